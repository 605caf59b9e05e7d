# SPDX-License-Identifier: Apache-2.0
"""What processes of several hosts tell each other before they can reach each other.

A store keeps bytes under keys, and all processes of a group reach it: that of
``torch.distributed`` (``max_ep/torch/hosts.py``), or that of ``MAX_EP_STORE``
(``store.py``). This file needs nothing but Python.
"""

from __future__ import annotations

import functools
import time
from typing import Protocol

from .store import StoreLine, parse_address, store_of_environment

_POLL_S = 0.002


class KeyStore(Protocol):
    """Where processes leave what others read."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """Returns what a key has now; None: nobody has set it."""


def gather(
    store: KeyStore, key: str, rank: int, n_ranks: int, mine: bytes, timeout_s: float
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


class NamedStore:
    """The store of ``MAX_EP_STORE``: a key is the name of a group there, and a node."""

    def __init__(self, address: str) -> None:
        self.host, _ = parse_address(address)
        self._address = address
        self._groups: dict[str, StoreLine] = {}
        """A line each, which stays open: a group ends with its last line."""

    def set(self, key: str, value: bytes) -> None:
        group, _, node = key.rpartition("/")
        line = StoreLine(self._address, group, int(node))
        self._groups[group] = line
        line.ask(value.hex())

    def get(self, key: str) -> bytes | None:
        group, _, node = key.rpartition("/")
        for text in self._groups[group].ask().texts:
            if text.node == int(node):
                return bytes.fromhex(text.text)
        return None


class Prefixed:
    """A store whose keys are those of one use of another."""

    def __init__(self, store: KeyStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        return self._store.get(f"{self._prefix}/{key}")


@functools.cache
def named_store() -> NamedStore | None:
    """Returns the store that the environment names; None: it names none."""
    address = store_of_environment()
    return NamedStore(address) if address else None
