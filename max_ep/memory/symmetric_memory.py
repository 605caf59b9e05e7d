# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of CPU ranks: one region a rank, mapped by every peer.

`LocalMemory` serves ranks of one process, `SharedMemory` one process a node. Each
process makes a file without a name, and hands it to its peers when they meet
(`meeting.py`). The memory is freed with the last mapping, however the processes end.
This file needs nothing but Python.
"""

from __future__ import annotations

import _posixshmem  # CPython's own wrapper of shm_open, as in multiprocessing
import contextlib
import ctypes
import mmap
import os
from collections.abc import Collection

from .meeting import Meeting, Owner

_PAGE = 4096
# A segment: a page whose first byte says that its process has closed it, the status of
# its ranks, their regions.
_IS_CLOSED = 1


def _address(memory: mmap.mmap) -> int:
    """Returns where a mapping stands in this process."""
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor)
    del anchor  # an exported buffer would keep the mapping from closing
    return address


class LocalMemory:
    """Zeroed regions of ranks that share this process; pages are taken when written."""

    def __init__(self, n_ranks: int, region_bytes: int) -> None:
        self._maps: list[mmap.mmap] = []
        try:
            for _ in range(n_ranks):
                self._maps.append(mmap.mmap(-1, region_bytes))
        except OSError as error:
            self.close()
            raise MemoryError(
                f"max_ep: cannot map {n_ranks} regions of {region_bytes} bytes: "
                f"{error.strerror}. Lower max_tokens_per_rank; `max-ep plan` "
                "shows what each buffer takes"
            ) from error

    def local_addresses(self) -> list[int]:
        """Returns the address of each local rank's region."""
        return [_address(memory) for memory in self._maps]

    def connect(self, timeout_s: float) -> list[int]:
        """Returns the address of every rank's region; all are local."""
        return self.local_addresses()

    def close(self) -> None:
        """Gives the memory back."""
        for memory in self._maps:
            memory.close()
        self._maps = []


def members_name(group: str) -> str:
    """Names the notes of a group's processes (``membership.py``)."""
    return f"/max_ep-{group}-members"


def unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _posixshmem.shm_unlink(name)


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


class SharedMemory:
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
        """Makes this process's segment, zeroed; group and fingerprint as `Meeting` has.

        In front of the regions stand ``status_bytes`` of each rank, which only the rank
        writes.
        """
        self._meeting = Meeting(group, node_id, n_nodes, fingerprint)
        self.group, self.owner, self._node_id = group, self._meeting.owner, node_id
        self._n_nodes, self.n_local_ranks = n_nodes, n_local_ranks
        self.region_bytes, self.status_bytes = region_bytes, status_bytes
        n_status = n_local_ranks * status_bytes
        self._regions_at = _PAGE + -(-n_status // _PAGE) * _PAGE
        self._n_bytes = self._regions_at + n_local_ranks * region_bytes
        self._maps: dict[int, mmap.mmap] = {}
        self.owners: dict[int, Owner] = {node_id: self.owner}
        """Whose memory is mapped, by node."""
        self.status: mmap.mmap | None = None
        """The status of its ranks; stays mapped while it is used."""
        self.handle = os.memfd_create(f"max_ep-{group}-{node_id}")
        """Descriptor by which a process that joins later maps this segment."""
        try:
            # Now: too little memory must fail here, not in a kernel.
            if self._n_bytes > _memory_free():
                raise OSError("the system has less")
            os.posix_fallocate(self.handle, 0, self._n_bytes)
            self._maps[node_id] = mmap.mmap(self.handle, self._n_bytes)
            if n_status:
                self.status = mmap.mmap(self.handle, n_status, offset=_PAGE)
        except OSError as error:
            self.close()
            raise MemoryError(
                f"max_ep: no memory for {self._n_bytes} bytes of node {node_id} "
                f"({_memory_free()} bytes are free). Lower max_tokens_per_rank; "
                "`max-ep plan` shows what each buffer takes"
            ) from error

    def local_addresses(self) -> list[int]:
        """Returns the address of each local rank's region."""
        return self._regions(self._node_id)

    def _regions(self, node: int) -> list[int]:
        first = _address(self._maps[node]) + self._regions_at
        return [first + i * self.region_bytes for i in range(self.n_local_ranks)]

    def connect(self, timeout_s: float, absent: Collection[int] = ()) -> list[int]:
        """Maps the peers' regions, and returns all addresses.

        Nodes that are ``absent`` are not waited for; in place of theirs stand its own.
        """
        try:
            found = self._meeting.meet(self.handle, timeout_s, absent)
        except BaseException:
            self.close()
            raise
        for node, (owner, handle) in found.items():
            self.owners[node] = owner
            self._maps[node] = mmap.mmap(handle, self._n_bytes)
            os.close(handle)
        nodes = range(self._n_nodes)
        mapped = [node if node in self._maps else self._node_id for node in nodes]
        return [address for node in mapped for address in self._regions(node)]

    def map(self, node: int, owner: Owner | None, handle: int) -> list[int]:
        """Maps a process's segment by its descriptor, in place of an earlier one; if
        it has ended, or there is none, memory of nobody.

        Returns the addresses of its regions. No launch may be under way.
        """
        memory = None
        self.owners.pop(node, None)
        if owner is not None and owner.is_alive():
            path = f"/proc/{owner.pid}/fd/{handle}"
            with contextlib.suppress(OSError):
                if f"/memfd:max_ep-{self.group}-{node} " in os.readlink(path):
                    theirs = os.open(path, os.O_RDWR)
                    memory = mmap.mmap(theirs, self._n_bytes)
                    os.close(theirs)
                    self.owners[node] = owner
        if node in self._maps:
            self._maps[node].close()
        self._maps[node] = memory or mmap.mmap(-1, self._n_bytes)
        return self._regions(node)

    def is_closed(self, node: int) -> bool:
        """Returns whether a process has closed its memory."""
        return self._maps[node][0] == _IS_CLOSED

    def read_status(self, node: int, i: int, at: int, n_bytes: int) -> bytes:
        """Copies bytes of the status of local rank ``i`` of a node.

        For other threads: a ``ValueError`` if this process has closed its memory.
        """
        first = _PAGE + i * self.status_bytes + at
        return self._maps[node][first : first + n_bytes]

    def read_region(self, node: int, i: int, at: int, n_bytes: int) -> bytes:
        """Copies bytes of that rank's region."""
        first = self._regions_at + i * self.region_bytes + at
        return self._maps[node][first : first + n_bytes]

    def withdraw(self) -> None:
        """Is not to be met: who joins is mapped by its descriptor."""
        self._meeting.close()

    def close(self) -> None:
        """Gives the memory back; peers keep theirs until they close."""
        self._meeting.close()
        self.status = None
        for node, memory in self._maps.items():
            if node == self._node_id and not memory.closed:
                memory[0] = _IS_CLOSED
            memory.close()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
