# SPDX-License-Identifier: Apache-2.0
"""What processes of several hosts tell each other before they can reach each other.

A store keeps bytes under keys, and all processes of a group reach it: that of
``torch.distributed`` (``max_ep/torch/hosts.py``). This file needs nothing but Python.
"""

from __future__ import annotations

import time
from typing import Protocol

_POLL_S = 0.002


class Store(Protocol):
    """Where processes leave what others read."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """Returns what a key has now; None: nobody has set it."""


def gather(
    store: Store, key: str, rank: int, n_ranks: int, mine: bytes, timeout_s: float
) -> list[bytes]:
    """Returns what each rank gives under a key, which is used once; a ``TimeoutError``
    names the first that does not come."""
    store.set(f"{key}/{rank}", mine)
    deadline_s, found = time.monotonic() + timeout_s, []
    for peer in range(n_ranks):
        while (theirs := store.get(f"{key}/{peer}")) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"max_ep: {key}: rank {rank} waited {timeout_s:g} s for rank "
                    f"{peer}, which has died, is late, or makes other calls than this "
                    "rank"
                )
            time.sleep(_POLL_S)
        found.append(theirs)
    return found
