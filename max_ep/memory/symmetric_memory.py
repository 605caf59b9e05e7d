# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of CPU ranks: one region a rank, mapped by every peer.

`LocalMemory` serves ranks of one process, `SharedMemory` one process a node. Each
process makes a file without a name, and hands it to its peers when they meet
(`meeting.py`). The memory is freed with the last mapping, however the processes end.
This file needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection

from ..plural import counted
from ..processes.meeting import Meeting, Owner
from ..processes.notes import Notes, damaged

_PAGE = 4096
_PART_BYTES = 64 << 20
# A segment: a page whose first byte says that its process has closed it, the status of
# its ranks, their regions.
_IS_CLOSED = 1


def _address(memory: mmap.mmap) -> int:
    """Returns where a mapping stands in this process."""
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor)
    del anchor  # an exported buffer would keep the mapping from closing
    return address


def no_memory(what: str, why: object) -> MemoryError:
    return MemoryError(
        f"max_ep: no memory for {what}: {why}. Lower max_tokens_per_rank; `max-ep "
        "plan` shows what each buffer takes"
    )


class LocalMemory:
    """Zeroed regions of ranks that share this process; pages are taken when written."""

    def __init__(self, n_ranks: int, region_bytes: int) -> None:
        try:
            self._maps = [mmap.mmap(-1, region_bytes) for _ in range(n_ranks)]
        except OSError as error:
            what = f"{counted(n_ranks, 'region')} of {region_bytes} bytes"
            raise no_memory(what, error.strerror) from error

    def local_addresses(self) -> list[int]:
        return [_address(memory) for memory in self._maps]

    def close(self) -> None:
        for memory in self._maps:
            memory.close()
        self._maps = []


def _memory_free() -> int:
    """Returns the bytes that the system can still give, as far as it says."""
    free = [1 << 62]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        free += [int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvail")]
    with contextlib.suppress(OSError, ValueError):  # of a container; "max": no bound
        bounds = [f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current")]
        most, used = (int(open(path).read()) for path in bounds)
        free.append(most - used)
    return min(free)


class PeerMemory(ABC):
    """A block of memory of each process, which all of them map: they meet, and hand
    each other a descriptor."""

    def __init__(
        self, group: str, node_id: int, n_nodes: int, fingerprint: str
    ) -> None:
        """Can be met from now on; group and fingerprint as :class:`Meeting` has."""
        self._meeting = Meeting(
            group, node_id, n_nodes, fingerprint, is_block=self._is_block
        )
        self.group, self.owner, self._node_id = group, self._meeting.owner, node_id
        self._n_nodes = n_nodes
        self.owners: dict[int, Owner] = {node_id: self.owner}
        """Owners of the memory that is mapped, by node."""
        self._given: dict[int, tuple[Owner, int]] = {}
        """Descriptors of other nodes' blocks that are not mapped yet."""
        self._descriptor = -1

    @abstractmethod
    def _addresses(self, node: int) -> list[int]:
        """Returns where the ranks of a node have their regions in this process."""

    @abstractmethod
    def _map(self, node: int, descriptor: int | None) -> None:
        """Maps a node's block in place of an earlier one; None: a block of nobody's, if
        there is no earlier one."""

    def _is_block(self, descriptor: int) -> bool:
        """Returns whether a descriptor may be of another node's block."""
        return True

    def local_addresses(self) -> list[int]:
        """Returns the address of each local rank's region."""
        return self._addresses(self._node_id)

    def connect(
        self,
        timeout_s: float,
        absent: Collection[int] = (),
        makes_notes: bool = False,
    ) -> list[int]:
        """Maps the peers' blocks, and returns the addresses of all regions; in place of
        an ``absent`` node's stands a block of nobody's. ``makes_notes``: the group has
        notes from now on, for :meth:`take_notes`."""
        try:
            if makes_notes and self._node_id == 0:
                self._meeting.notes = Notes.make(self._n_nodes)
            self._given = self._meeting.meet(self._descriptor, timeout_s, absent)
            regions = [self.map(node) for node in range(self._n_nodes)]
        except BaseException:
            self.close()
            raise
        return [address for of_node in regions for address in of_node]

    def take_notes(self) -> int:
        """Returns a descriptor of the group's notes, for the caller to close."""
        notes, self._meeting.notes = self._meeting.notes, -1
        if notes < 0 or not Notes.may_be(notes, self._n_nodes):
            raise damaged("node 0 has handed on none")
        return notes

    def trade(self, peers: set[int], epoch: int, deadline_s: float) -> set[int]:
        """Hands this process's block to peers, which hand on theirs at the same time,
        and agree on the ``epoch``; returns who has not come. :meth:`map` uses what has.
        """
        absent, lost = set(range(self._n_nodes)) - peers, set()
        left_s = deadline_s - time.monotonic()
        fingerprint = self.owner.fingerprint
        given = self.group, self._node_id, self._n_nodes, fingerprint, epoch
        meeting = Meeting(*given, is_block=self._is_block)
        self._forget()
        self._given = meeting.meet(self._descriptor, left_s, absent, lost)
        return lost

    def map(self, node: int) -> list[int]:
        """Maps a block that was handed on, in place of an earlier one; returns the
        addresses of its regions. No launch may be under way."""
        owner, descriptor = self._given.pop(node, (None, None))
        try:
            self._map(node, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if owner is not None:
            self.owners[node] = owner
        return self._addresses(node)

    def withdraw(self) -> None:
        """Is not to be met: who joins trades."""
        self._meeting.close()

    def close(self) -> None:
        """Gives the memory back; peers keep what they map until they close."""
        self._meeting.close()
        self._forget()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        if self._meeting.notes >= 0:
            os.close(self._meeting.notes)
        self._meeting.notes = -1

    def _forget(self) -> None:
        """Closes the descriptors that were handed on and not mapped."""
        while self._given:
            _, (_, descriptor) = self._given.popitem()
            os.close(descriptor)


class SharedMemory(PeerMemory):
    """Regions of one process a node, in memory that its peers map."""

    def __init__(
        self,
        group: str,
        node_id: int,
        n_nodes: int,
        n_local_ranks: int,
        region_bytes: int,
        fingerprint: str,
        status_bytes: int = 0,
    ) -> None:
        """Makes this process's segment, zeroed: ``status_bytes`` of each rank, which
        only the rank writes, then the regions."""
        super().__init__(group, node_id, n_nodes, fingerprint)
        self.n_local_ranks = n_local_ranks
        self.region_bytes, self.status_bytes = region_bytes, status_bytes
        n_status = n_local_ranks * status_bytes
        self._regions_at = _PAGE + -(-n_status // _PAGE) * _PAGE
        self._n_bytes = self._regions_at + n_local_ranks * region_bytes
        self._maps: dict[int, mmap.mmap] = {}
        self.status: mmap.mmap | None = None
        """The status of its ranks; stays mapped while it is used."""
        self._descriptor = self._file_of_nobody()
        try:
            # Now: too little memory must fail here, not in a kernel. In parts: others
            # may take theirs at the same time.
            for at in range(0, self._n_bytes, _PART_BYTES):
                left = self._n_bytes - at
                if left > _memory_free():
                    raise OSError("the system has less")
                os.posix_fallocate(self._descriptor, at, min(left, _PART_BYTES))
            self._map(node_id, self._descriptor)
            if n_status:
                self.status = mmap.mmap(self._descriptor, n_status, offset=_PAGE)
        except OSError as error:
            self.close()
            what = f"{self._n_bytes} bytes of node {node_id}"
            raise no_memory(what, f"{_memory_free()} bytes are free") from error

    def _file_of_nobody(self) -> int:
        """Makes a file without a name."""
        try:
            return os.memfd_create(f"max_ep-{self.group}-{self._node_id}")
        except OSError as error:
            self.close()
            raise RuntimeError(
                f"max_ep: node {self._node_id} of group {self.group!r}: the system "
                f"makes no file in memory (memfd_create: {error.strerror})"
            ) from error

    def _addresses(self, node: int) -> list[int]:
        first = _address(self._maps[node]) + self._regions_at
        return [first + i * self.region_bytes for i in range(self.n_local_ranks)]

    def _map(self, node: int, descriptor: int | None) -> None:
        old = self._maps.get(node)
        if old is not None and descriptor is None:
            return
        handle = -1 if descriptor is None else descriptor  # -1: nobody's
        self._maps[node] = mmap.mmap(handle, self._n_bytes)
        if old is not None:
            old.close()

    def _is_block(self, descriptor: int) -> bool:
        return os.fstat(descriptor).st_size == self._n_bytes

    def is_closed(self, node: int) -> bool:
        return self._maps[node][0] == _IS_CLOSED

    def read_status(self, node: int, i: int, at: int, n_bytes: int) -> bytes:
        """Copies bytes of the status of local rank ``i`` of a node, for any thread: a
        ``ValueError`` if this process has closed its memory."""
        first = _PAGE + i * self.status_bytes + at
        return self._maps[node][first : first + n_bytes]

    def read_region(self, node: int, i: int, at: int, n_bytes: int) -> bytes:
        """Copies bytes of that rank's region."""
        first = self._regions_at + i * self.region_bytes + at
        return self._maps[node][first : first + n_bytes]

    def close(self) -> None:
        super().close()
        self.status = None
        for node, memory in self._maps.items():
            if node == self._node_id and not memory.closed:
                memory[0] = _IS_CLOSED
            memory.close()
