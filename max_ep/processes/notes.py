# SPDX-License-Identifier: Apache-2.0
"""What the processes of a group write for each other: a note of each, and a log.

It is a file without a name, which is handed on like memory (``meeting.py``) and ends
with its last user. Nobody holds a lock that a process could take along when it is
stopped or killed: a note has one writer and two places, and the kernel appends what
several write one after another. This file needs nothing but Python.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import time
import zlib
from typing import Any

from .store import State, StoreLine

_NOTE_BYTES = 64 << 10
_HEADER = struct.Struct("QII")  # number, bytes, checksum of both and the text
_TRIES, _TRY_S = 1000, 0.001
_READ_BYTES = 1 << 20
_LOG_BYTES = 1 << 20
"""About how much of the log is kept."""


class Notes:
    """The file, as one process maps it."""

    poll_s, n_spins = 0.0005, 200
    """How long who waits for a note sleeps between two looks, and how many it takes
    before it sleeps."""

    def __init__(self, descriptor: int, n_nodes: int) -> None:
        """Takes a descriptor over."""
        self.descriptor, self._n_notes_bytes = descriptor, _n_bytes(n_nodes)
        self._n_nodes = n_nodes
        self._map = mmap.mmap(descriptor, self._n_notes_bytes)
        self._at = self._n_notes_bytes
        """Where the log goes on that this process has not read."""
        self._kept_from = self._at

    @staticmethod
    def make(n_nodes: int) -> int:
        """Makes an empty file; returns its descriptor."""
        flags, descriptor = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING, -1
        try:
            descriptor = os.memfd_create("max_ep-notes", flags)
            os.ftruncate(descriptor, _n_bytes(n_nodes))
            # A process that made it shorter would end those that map it.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise RuntimeError(
                "max_ep: the system makes no file in memory for the notes of the "
                f"group: {error.strerror}"
            ) from error
        return descriptor

    @staticmethod
    def may_be(descriptor: int, n_nodes: int) -> bool:
        """Returns whether a descriptor may be of such a file."""
        found = os.fstat(descriptor)
        is_file = stat.S_ISREG(found.st_mode) and found.st_size >= _n_bytes(n_nodes)
        return is_file and bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)

    def _place(self, node: int, number: int) -> int:
        return (2 * node + number % 2) * _NOTE_BYTES

    def _numbers(self, node: int) -> list[int]:
        places = (self._place(node, i) for i in range(2))
        return [_HEADER.unpack_from(self._map, place)[0] for place in places]

    def read(self, node: int) -> bytes | None:
        """Returns a node's note; None: it has written none."""
        for _ in range(_TRIES):
            number = max(self._numbers(node))
            if number == 0:
                return None
            place = self._place(node, number)
            found, n_bytes, checksum = _HEADER.unpack_from(self._map, place)
            first = place + _HEADER.size
            text = self._map[first : first + min(n_bytes, _NOTE_BYTES - _HEADER.size)]
            if found == number and checksum == _checksum(number, text):
                return text
            time.sleep(_TRY_S)  # it has written two meanwhile, or memory is late
        raise damaged(f"the note of node {node} is not whole")

    def write(self, node: int, text: bytes) -> None:
        """Replaces a node's note: nobody reads a part of it."""
        if len(text) > _NOTE_BYTES - _HEADER.size:
            raise ValueError(f"max_ep: a note of {len(text)} bytes is too long")
        number = max(self._numbers(node)) + 1
        place = self._place(node, number)
        first = place + _HEADER.size
        self._map[first : first + len(text)] = text
        checksum = _checksum(number, text)
        # The number comes last: until then readers take the other place.
        _HEADER.pack_into(self._map, place, 0, len(text), checksum)
        struct.pack_into("Q", self._map, place, number)

    def read_all(self) -> dict[int, bytes]:
        """Returns the notes of all nodes that have written one."""
        texts = {node: self.read(node) for node in range(self._n_nodes)}
        return {node: text for node, text in texts.items() if text is not None}

    def lives(self, node: int) -> bool | None:
        """Returns whether a node's process lives; None: ask the system."""
        return None

    def now_s(self) -> float:
        """Returns the time of the group's clock."""
        return time.monotonic()

    def append(self, text: bytes, number: int = 0) -> None:
        """Adds a line to the log. One write: others' lines stand before or behind it;
        the first line break ends what a killed process may have begun. What numbers it
        stands in it, too."""
        os.write(self.descriptor, b"\n" + text + b"\n")

    def appended(self) -> list[tuple[int, bytes]]:
        """Returns the whole lines that this process has not read, and where they are;
        of the oldest some may be gone."""
        n_bytes = os.fstat(self.descriptor).st_size
        if n_bytes - self._at > _READ_BYTES:  # not through what was forgotten
            self._at = os.lseek(self.descriptor, self._at, os.SEEK_DATA)
        lines: list[tuple[int, bytes]] = []
        while text := os.pread(self.descriptor, _READ_BYTES, self._at):
            whole = text[: text.rfind(b"\n") + 1]
            if not whole and len(text) < _READ_BYTES:
                break  # the end of a line is still missing
            for line in (whole or text).splitlines(keepends=True):
                lines.append((self._at, line.strip(b"\0\n")))
                self._at += len(line)
        return [(at, line) for at, line in lines if line]

    def forget(self, before: int) -> None:
        """Gives back the memory of the log before a place, now and then."""
        n_pages = (before - self._kept_from) // mmap.PAGESIZE
        if n_pages * mmap.PAGESIZE >= _LOG_BYTES:
            n_bytes = n_pages * mmap.PAGESIZE
            with mmap.mmap(self.descriptor, n_bytes, offset=self._kept_from) as old:
                old.madvise(mmap.MADV_REMOVE)
            self._kept_from += n_bytes

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)


class NotesInStore:
    """The same, of processes that share no memory, but a store (``store.py``). Of the
    log it holds the last line, and takes only one of a higher number: the first of a
    number counts."""

    poll_s, n_spins = 0.005, 0

    def __init__(self, address: str, group: str, node: int) -> None:
        self._store, self._node = StoreLine(address, group, node), node
        self._ahead_s = 0.0
        """How much later it is there."""
        self._state = self._ask()

    def _ask(self, *said: Any) -> State:
        asked_s = time.monotonic()
        self._state = state = self._store.ask(*said)
        self._ahead_s = state.now_s - (asked_s + time.monotonic()) / 2
        return state

    def read(self, node: int) -> bytes | None:
        return self.read_all().get(node)

    def read_all(self) -> dict[int, bytes]:
        return {text.node: text.text.encode() for text in self._ask().texts}

    def write(self, node: int, text: bytes) -> None:
        assert node == self._node, "a line is that of its node"
        self._ask(text.decode())

    def lives(self, node: int) -> bool | None:
        """As of what was read last."""
        return any(text.node == node and text.is_alive for text in self._state.texts)

    def now_s(self) -> float:
        return time.monotonic() + self._ahead_s

    def append(self, text: bytes, number: int) -> None:
        self._ask(None, number, text.decode())

    def appended(self) -> list[tuple[int, bytes]]:
        state = self._ask()
        return [(0, state.decision.encode())] if state.number else []

    def forget(self, before: int) -> None:
        """It keeps the last line only."""

    def close(self) -> None:
        self._store.close()


def damaged(what: str) -> RuntimeError:
    return RuntimeError(
        f"max_ep: the notes of the group are damaged: {what}. Another program has "
        "written to them: end all processes of the group and start it again"
    )


def _n_bytes(n_nodes: int) -> int:
    return 2 * n_nodes * _NOTE_BYTES


def _checksum(number: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(struct.pack("QI", number, len(text))))
