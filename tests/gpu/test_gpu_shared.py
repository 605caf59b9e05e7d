# SPDX-License-Identifier: Apache-2.0
"""GPU memory of several processes: how they hand it on, which needs no GPU."""

import itertools
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from max_ep.memory import gpu_shared
from max_ep.memory.gpu_shared import GpuSharedMemory
from tests.children import handles, new_handles


class Driver:
    """The driver's calls, with files in place of GPU memory."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        """Which file is at an address."""
        self._addresses = itertools.count(1 << 30, 1 << 30)

    def call(self, name: str, *given: Any) -> None:
        if name == "cuMemCreate":
            given[0]._obj.value = os.memfd_create("block")
        elif "ShareableHandle" in name:
            given[0]._obj.value = os.dup(given[1].value)
        elif name == "cuMemAddressReserve":
            given[0]._obj.value = next(self._addresses)
        elif name == "cuMemMap":
            assert given[0].value not in self.mapped
            self.mapped[given[0].value] = os.fstat(given[3].value).st_ino
        elif name == "cuMemUnmap":
            del self.mapped[given[0].value]
        elif name == "cuMemRelease":
            os.close(given[0].value)


def test_a_new_process_takes_the_address_of_the_old(monkeypatch) -> None:
    """So graphs that were captured reach it. Who does not come is named, and in its
    place stands memory that nobody else has."""
    driver, group = Driver(), f"test-{uuid.uuid4().hex[:12]}"
    monkeypatch.setattr(gpu_shared, "_call", driver.call)
    monkeypatch.setattr(gpu_shared, "use_context", lambda _: None)
    before = handles()

    first, old = (GpuSharedMemory(group, rank, 3, 1, "") for rank in (0, 1))
    with ThreadPoolExecutor(2) as pool:
        (_, place, _), _ = pool.map(lambda m: m.connect(60, absent=[2]), (first, old))
    assert driver.mapped[place] == driver.mapped[old.local_addresses()[0]]
    old.close()
    new = GpuSharedMemory(group, 1, 3, 1, "")
    new.withdraw()
    with ThreadPoolExecutor(2) as pool:
        given = ({1}, {0}), (7, 7), 2 * (time.monotonic() + 60,)
        lost = pool.map(GpuSharedMemory.trade, (first, new), *given)
    assert [*lost] == [set(), set()]
    assert first.map(1) == [place] and new.map(0) != [place]
    assert driver.mapped[place] == driver.mapped[new.local_addresses()[0]]
    assert first.trade({2}, 8, time.monotonic()) == {2}
    (nobodys,) = first.map(2)
    assert [*driver.mapped.values()].count(driver.mapped[nobodys]) == 1
    first.close()
    new.close()
    assert not driver.mapped and not new_handles(before)
