# SPDX-License-Identifier: Apache-2.0
"""Exchanges small messages between the processes of a group.

Ranks exchange what all must know before a launch: the next call and its sizes, and how
many tokens each sends. Every wait is bounded and names the missing rank.
"""

from __future__ import annotations

import ctypes
import json
import time
import zlib
from typing import Any, Protocol

from ..limits import START_TIMEOUT_S
from ..memory.symmetric_memory import SharedMemory
from ..processes.rendezvous import KeyStore

_NOTE_BYTES = 64 << 10
_HEADER = ctypes.c_uint64 * 3  # number of the exchange, bytes, checksum
_HEADER_BYTES = 24


class Notes(Protocol):
    """Three notes of each rank, which only it writes."""

    poll_s: float
    n_spins: int
    """How often somebody looks for a note before each look waits for ``poll_s``."""

    def write(self, i: int, number: int, body: bytes) -> None: ...

    def read(self, rank: int, i: int, number: int) -> bytes | None:
        """Returns a note, once it has this number and is there as a whole."""

    def close(self) -> None: ...


class SharedNotes:
    """Notes in memory that the ranks of a host share."""

    poll_s, n_spins = 0.0002, 2000

    def __init__(self, name: str, rank: int, n_ranks: int, timeout_s: float) -> None:
        """Creates this rank's part and finds the others'; ``name`` is the group's."""
        self._rank = rank
        self._memory = SharedMemory(
            name, rank, n_ranks, 1, 3 * _NOTE_BYTES, f"ranks={n_ranks}"
        )
        self._notes = self._memory.connect(max(timeout_s, START_TIMEOUT_S))

    def write(self, i: int, number: int, body: bytes) -> None:
        place = self._notes[self._rank] + i * _NOTE_BYTES
        ctypes.memmove(place + _HEADER_BYTES, body, len(body))
        header = _HEADER.from_address(place)
        header[1], header[2] = len(body), zlib.crc32(body)
        header[0] = number

    def read(self, rank: int, i: int, number: int) -> bytes | None:
        place = self._notes[rank] + i * _NOTE_BYTES
        header = _HEADER.from_address(place)
        if header[0] != number or header[1] > _NOTE_BYTES - _HEADER_BYTES:
            return None
        body = ctypes.string_at(place + _HEADER_BYTES, header[1])
        # A CPU may show the header before all of the body.
        return body if zlib.crc32(body) == header[2] else None

    def close(self) -> None:
        self._memory.close()


class StoredNotes:
    """Notes in a store that all hosts reach."""

    poll_s, n_spins = 0.001, 0

    def __init__(self, store: KeyStore, rank: int) -> None:
        self._store, self._rank = store, rank

    def write(self, i: int, number: int, body: bytes) -> None:
        self._store.set(f"{self._rank}/{i}", b"%d %s" % (number, body))

    def read(self, rank: int, i: int, number: int) -> bytes | None:
        found = self._store.get(f"{rank}/{i}") or b""
        theirs, _, body = found.partition(b" ")
        return body if theirs == b"%d" % number else None

    def close(self) -> None:
        """Its keys end with the store."""


class Board:
    """Two notes a rank, and what it said last. A rank that writes exchange `n` has read
    all notes of `n - 1`, so nobody still reads those of `n - 2`, which it overwrites.
    """

    def __init__(
        self, name: str, rank: int, n_ranks: int, timeout_s: float, notes: Notes
    ) -> None:
        self.name = name
        self.rank = rank
        self.n_ranks = n_ranks
        self.timeout_s = timeout_s
        self.n_exchanges = 0
        self._notes = notes

    def exchange(
        self, what: str, note: Any = None, absent: set[int] | None = None
    ) -> list[Any]:
        """Returns every rank's note, which JSON takes, of the call ``what``, the same
        on all. Ranks that are ``absent`` are not waited for, and have None; one that
        does not come is added to them, or named by a ``TimeoutError``.
        """
        self.n_exchanges += 1
        body = json.dumps([what, note]).encode()
        if len(body) > _NOTE_BYTES - _HEADER_BYTES:
            raise ValueError(f"max_ep: {what}: {len(body)} bytes are too many")
        self._notes.write(self.n_exchanges % 2, self.n_exchanges, body)
        mine = json.loads(body)
        deadline = time.monotonic() + self.timeout_s
        found: list[Any] = []
        for peer in range(self.n_ranks):
            if peer not in (absent or ()):
                try:
                    theirs = body
                    if peer != self.rank:
                        theirs = self._read(peer, what, deadline)
                    # Most often all write the same.
                    found.append(mine if theirs == body else json.loads(theirs))
                    continue
                except TimeoutError:
                    if absent is None:
                        raise
                    absent.add(peer)
            found.append((what, None))
        for peer, (theirs, _) in enumerate(found):
            if theirs != what:
                raise ValueError(
                    f"max_ep: rank {peer} calls {theirs}; this rank ({self.rank}) "
                    f"calls {what}. All ranks make the same calls in the same order"
                )
        return [theirs for _, theirs in found]

    def say(self, text: str) -> None:
        """Lets other ranks read a text, until this rank says another."""
        self._notes.write(2, 1, text.encode())

    def said(self, rank: int) -> str:
        """Returns what a rank said last; "" if that is nothing, or is being written."""
        return (self._notes.read(rank, 2, 1) or b"").decode()

    def _read(self, peer: int, what: str, deadline: float) -> bytes:
        n_polls = 0
        while True:
            body = self._notes.read(peer, self.n_exchanges % 2, self.n_exchanges)
            if body is not None:
                return body
            n_polls += 1
            if n_polls > self._notes.n_spins:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"max_ep: {what}: rank {self.rank} waited {self.timeout_s} s "
                        f"for rank {peer}, which has died, is late, or makes other "
                        "calls than this rank"
                    )
                time.sleep(self._notes.poll_s)

    def close(self) -> None:
        self._notes.close()
