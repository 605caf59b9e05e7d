# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of CPU ranks: one region a rank, mapped by every peer.

`LocalMemory` serves ranks of one process, `SharedMemory` one process a node through
POSIX shared memory. Each process creates a segment, named after group and node,
prepares its regions, marks it ready, and maps its peers' segments. Once all peers have
mapped it, it removes the segment's *name*: the memory is then freed with the last
mapping, however the processes end. A process that dies earlier leaves its name. The
next group of that name replaces it, and no peer maps it.

This file needs nothing but Python: tests' processes load it without MAX.
"""

from __future__ import annotations

import _posixshmem  # CPython's own wrapper of shm_open, as in multiprocessing
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

_PAGE = 4096
_CREATED = b"max_ep_0"
_READY = b"max_ep_1"
_CLOSED = b"max_ep_2"
# Header of a segment: state, length of the JSON that names the owner. Then, in
# the last bytes of the page, one byte a node.
_MAPPED, _OBJECTS = 1, 2  # "I have mapped this", "we do not agree"
_HEADER = struct.Struct("<8sI")
_MAPPED_AT = _PAGE - 256
_POLL_S = 0.002
_GROUP_BYTES = 200
"""Longest name of a group; a file's may have 255 bytes."""
_CREATION_S = 0.5
"""How long a process may take from creating a segment to naming its owner."""


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


@dataclass
class Owner:
    """Who made a segment, and for what."""

    pid: int
    started: str  # distinguishes a reused pid
    fingerprint: str
    # For those who look at the ranks: `max_ep.who.Facts`.
    facts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def myself(fingerprint: str, facts: dict[str, int] | None = None) -> Owner:
        return Owner(os.getpid(), _start_time(os.getpid()), fingerprint, facts or {})

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _start_time(self.pid) == self.started


def _stat(pid: int) -> list[str]:
    """Returns what the system says of a process, from its state on."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The command, in brackets, may hold spaces; field 22 is the start.
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    """Returns when a process started, "" where the system does not say."""
    fields = _stat(pid)
    # A zombie has ended; only its parent has not noticed yet.
    return "" if not fields or fields[0] == "Z" else fields[19]


def process_state(pid: int, started: str | None = None) -> str:
    """Says what is wrong with a process; "": it runs, or the system does not say."""
    if started and _start_time(pid) != started:
        return "is dead"
    return "is stopped" if _stat(pid)[:1] in (["T"], ["t"]) else ""


def _segment_name(group: str, node_id: int) -> str:
    return f"/max_ep-{group}-{node_id}"


def members_name(group: str) -> str:
    """Names the notes of a group's processes (``membership.py``)."""
    return f"/max_ep-{group}-members"


def unlink(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _posixshmem.shm_unlink(name)


def exists(name: str) -> bool:
    try:
        os.close(_posixshmem.shm_open(name, os.O_RDWR))
    except FileNotFoundError:
        return False
    return True


def _open_owned(name: str) -> mmap.mmap | None | bool:
    """Maps a segment that has an owner; None: there is none; False: try again."""
    memory = _open(name)
    if memory is not None:
        if _read_owner(memory) is not None:
            return memory
        memory.close()
        return False
    return False if exists(name) else None


def _write_owner(memory: mmap.mmap, owner: Owner) -> None:
    text = json.dumps(owner.__dict__).encode()
    memory[_HEADER.size : _HEADER.size + len(text)] = text
    _HEADER.pack_into(memory, 0, b"", len(text))
    memory[: len(_CREATED)] = _CREATED  # last: others wait for this


def _read_owner(memory: mmap.mmap) -> Owner | None:
    """Returns the owner of a segment, None while it is being created."""
    state, length = _HEADER.unpack_from(memory)
    if state not in (_CREATED, _READY, _CLOSED):
        return None
    start = _HEADER.size
    return Owner(**json.loads(bytes(memory[start : start + length])))


def _open(name: str) -> mmap.mmap | None:
    """Maps a segment, None if there is none of its full size."""
    try:
        return _map_and_close(_posixshmem.shm_open(name, os.O_RDWR))
    except FileNotFoundError:
        return None


def _map_and_close(handle: int, access: int = mmap.ACCESS_WRITE) -> mmap.mmap | None:
    """Maps a file; None if it was just created and has not its size yet."""
    try:
        if os.fstat(handle).st_size >= _PAGE:
            return mmap.mmap(handle, 0, access=access)
    finally:
        os.close(handle)
    return None


class SharedMemory:
    """Regions of one process a node, in POSIX shared memory."""

    def __init__(
        self,
        group: str,
        node_id: int,
        n_nodes: int,
        n_local_ranks: int,
        region_bytes: int,
        fingerprint: str,
        status_bytes: int = 0,
        facts: dict[str, int] | None = None,
    ) -> None:
        """Creates this process's segment, zeroed and not yet marked ready.

        No other group alive on this machine may have the name ``group``; all of its
        processes must give the same ``fingerprint``. Between the header and the
        regions stand ``status_bytes`` of each rank, which only their rank uses, and
        which others read by means of ``facts``.
        """
        if n_nodes > _PAGE - _MAPPED_AT:
            raise ValueError(f"n_nodes={n_nodes} is above {_PAGE - _MAPPED_AT}")
        if not 0 < len(group.encode()) <= _GROUP_BYTES or set("/\0") & set(group):
            raise ValueError(
                f"group={group!r} names a file: pass 1 to {_GROUP_BYTES} bytes "
                "without '/'"
            )
        self.group, self._node_id, self._n_nodes = group, node_id, n_nodes
        self._n_local_ranks, self._region_bytes = n_local_ranks, region_bytes
        self._status_bytes = n_local_ranks * status_bytes
        self._regions_byte = _PAGE + -(-self._status_bytes // _PAGE) * _PAGE
        self.owner = Owner.myself(fingerprint, facts)
        self._name = _segment_name(group, node_id)
        self._is_named = False
        self._absent = {node_id}
        self._mine: mmap.mmap | None = None
        self.status: mmap.mmap | None = None
        """What is between header and regions; stays mapped while it is used."""
        self._peers: dict[int, mmap.mmap] = {}
        self.handle = -1
        """Descriptor by which a process that joins later maps this segment."""
        self._create(self._size())

    def _size(self) -> int:
        return self._regions_byte + self._n_local_ranks * self._region_bytes

    def _create(self, n_bytes: int) -> None:
        # One that has no owner yet gets a moment to be created.
        deadline = time.monotonic() + _CREATION_S
        while (stale := _open_owned(self._name)) is False:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if stale:
            owner = _read_owner(stale)
            stale.close()
            if owner is not None and owner.is_alive():
                raise self._taken_by(f"process {owner.pid}")
        if stale is not None:
            unlink(self._name)
        try:
            handle = _posixshmem.shm_open(
                self._name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600
            )
        except FileExistsError:
            raise self._taken_by("a process that began at the same time") from None
        self._is_named = True
        try:
            # Now: a full file system must fail here, not with a SIGBUS in a kernel.
            os.posix_fallocate(handle, 0, n_bytes)
            self._mine = mmap.mmap(handle, n_bytes)  # keeps the lock until it is closed
            if self._status_bytes:
                n = self._status_bytes
                self.status = mmap.mmap(handle, n, offset=_PAGE)
            _lock(handle)
            _write_owner(self._mine, self.owner)
            self.handle = os.dup(handle)
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise MemoryError(
                f"max_ep: no space for {n_bytes} bytes of shared memory for node "
                f"{self._node_id} ({shared_memory_free()} bytes are free). "
                "Enlarge it (`mount -o remount,size=...` on /dev/shm, "
                "`docker run --shm-size=...`) or lower max_tokens_per_rank; "
                "`max-ep plan` shows what each buffer takes"
            ) from error
        finally:
            os.close(handle)

    def _taken_by(self, who: str) -> RuntimeError:
        return RuntimeError(
            f"max_ep: node {self._node_id} of group {self.group!r} is already taken "
            f"by {who}; give each group a name of its own and each process its own "
            "node_id"
        )

    def local_addresses(self) -> list[int]:
        """Returns the address of each local rank's region."""
        assert self._mine is not None
        return self._regions(self._mine)

    def _regions(self, memory: mmap.mmap) -> list[int]:
        base = _address(memory) + self._regions_byte
        return [base + i * self._region_bytes for i in range(self._n_local_ranks)]

    def connect(self, timeout_s: float, absent: Collection[int] = ()) -> list[int]:
        """Marks the regions ready, maps the peers', and returns all addresses.

        Nodes that are ``absent`` are not waited for; in place of theirs stand its own.
        """
        assert self._mine is not None
        deadline = time.monotonic() + timeout_s
        self._mine[: len(_READY)] = _READY
        self._absent = {self._node_id, *absent}
        try:
            for node in range(self._n_nodes):
                if node not in self._absent:
                    self._peers[node] = self._attach(node, deadline, timeout_s)
            if not _poll(lambda: not self._unmapped(), deadline):
                raise TimeoutError(
                    f"max_ep: node {self._node_id} waited {timeout_s} s for nodes "
                    f"{self._unmapped()} of group {self.group!r} to map its memory"
                )
        except BaseException:
            self.close()
            raise
        self.withdraw()
        addresses = []
        for node in range(self._n_nodes):
            addresses += self._regions(self._peers.get(node, self._mine))
        return addresses

    def _attach(self, node: int, deadline: float, timeout_s: float) -> mmap.mmap:
        name = _segment_name(self.group, node)
        found = "no segment of that name"

        def try_to_map() -> mmap.mmap | None:
            nonlocal found
            self._raise_objections()
            memory = _open(name)
            if memory is None:
                return None
            owner = _read_owner(memory)
            is_ready = memory[: len(_READY)] == _READY
            if owner is None or (owner.is_alive() and not is_ready):
                found = "its segment is not ready"
            elif memory[_MAPPED_AT + self._node_id]:
                # Mapped before, by an earlier group of this name in this
                # process: its owner has not come to the new one yet.
                found = "its segment is that of an earlier group"
            elif not owner.is_alive():
                found = f"only what the dead process {owner.pid} left behind"
            elif owner.fingerprint != self.owner.fingerprint:
                memory.close()
                self._object()
                raise ValueError(
                    f"max_ep: node {node} of group {self.group!r} has another "
                    f"configuration: {owner.fingerprint}; this node "
                    f"({self._node_id}): {self.owner.fingerprint}"
                )
            else:
                memory[_MAPPED_AT + self._node_id] = _MAPPED
                return memory
            memory.close()
            return None

        memory = _poll(try_to_map, deadline)
        if memory is None:
            raise TimeoutError(
                f"max_ep: node {self._node_id} waited {timeout_s} s for node "
                f"{node} of group {self.group!r} to start: {found}. Start all "
                f"{self._n_nodes} processes, or raise EPConfig.timeout_s"
            )
        return memory

    def _unmapped(self) -> list[int]:
        """Lists the nodes that have not mapped this segment."""
        assert self._mine is not None
        self._raise_objections()
        others = set(range(self._n_nodes)) - self._absent
        return [node for node in others if not self._mine[_MAPPED_AT + node]]

    def map(self, node: int, owner: Owner | None, handle: int) -> list[int]:
        """Maps a process's segment by its descriptor, in place of an earlier one; if
        it has ended, or there is none, memory of nobody.

        Returns the addresses of its regions. No launch may be under way.
        """
        memory = None
        if owner is not None and owner.is_alive():
            with contextlib.suppress(OSError):
                place = f"/proc/{owner.pid}/fd/{handle}"
                memory = _map_and_close(os.open(place, os.O_RDWR))
        if memory is None or _read_owner(memory) != owner:
            memory = mmap.mmap(-1, self._size())
        if node in self._peers:
            self._peers[node].close()
        self._peers[node] = memory
        return self._regions(memory)

    def withdraw(self) -> None:
        """Removes the segment's name: who joins is mapped by its descriptor."""
        unlink(self._name)
        self._is_named = False

    def _object(self) -> None:
        """Shows the peers that are there why this process will not come."""
        for node in range(self._n_nodes):
            memory = _open(_segment_name(self.group, node))
            if memory is not None:
                memory[_MAPPED_AT + self._node_id] = _OBJECTS
                memory.close()

    def _raise_objections(self) -> None:
        assert self._mine is not None
        for node in range(self._n_nodes):
            if node != self._node_id and self._mine[_MAPPED_AT + node] == _OBJECTS:
                raise ValueError(
                    f"max_ep: node {node} of group {self.group!r} has another "
                    "configuration than the rest and has left; its own error "
                    f"shows both. This node ({self._node_id}): "
                    f"{self.owner.fingerprint}"
                )

    def close(self) -> None:
        """Gives the memory back; peers keep theirs until they close."""
        if self._is_named:
            unlink(self._name)
            self._is_named = False
        elif self._mine is not None:
            self._mine[: len(_CLOSED)] = _CLOSED
        self.status = None
        for memory in [*self._peers.values(), self._mine]:
            if memory is not None:
                memory.close()
        self._peers = {}
        self._mine = None
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def _poll(ask: Callable[[], object], deadline: float):  # noqa: ANN202
    """Calls ``ask`` until it answers or the time is up; returns its answer."""
    while not (answer := ask()) and time.monotonic() <= deadline:
        time.sleep(_POLL_S)
    return answer


def shared_memory_free() -> int:
    """Returns the free bytes of the shared-memory file system, -1 if unknown."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return stat.f_bavail * stat.f_frsize


def _lock(handle: int) -> bool:
    """Locks a segment for as long as it is open; returns False if another has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_leftovers(prefix: str) -> None:
    """Removes the names of groups with a prefix whose processes were killed.

    A lock ends with its process. One can ask for it where the process cannot be seen,
    in another container.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            if not name.startswith(f"max_ep-{prefix}"):
                continue
            with contextlib.suppress(OSError, ValueError):  # another user's; empty yet
                handle = _posixshmem.shm_open(f"/{name}", os.O_RDWR)
                try:
                    with mmap.mmap(handle, 0) as memory:
                        if _read_owner(memory) is not None and _lock(handle):
                            unlink(f"/{name}")
                finally:
                    os.close(handle)


@dataclass
class Segment:
    """A segment of some group, mapped for reading."""

    group: str
    node_id: int
    memory: mmap.mmap
    pid: int
    started: str
    is_closed: bool
    facts: dict[str, int]

    @property
    def regions_byte(self) -> int:
        """Where the regions begin."""
        n_bytes = self.facts["n_local_ranks"] * self.facts["status_bytes"]
        return _PAGE + -(-n_bytes // _PAGE) * _PAGE

    first_byte = _PAGE
    """Where the status of the ranks begins."""


def segments_of(pid: int) -> list[Segment]:
    """Returns the segments that a process holds, its own and its peers'.

    Their names are gone; the system still leads to them through the process, also if
    it is stopped.
    """
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            name = os.path.basename(os.readlink(path)).removesuffix(" (deleted)")
            if name.startswith("max_ep-") and os.stat(path).st_ino not in found:
                memory = _map_and_close(os.open(path, os.O_RDONLY), mmap.ACCESS_READ)
                found[os.stat(path).st_ino] = name.removeprefix("max_ep-"), memory
    segments = []
    for name, memory in found.values():
        owner = memory and _read_owner(memory)
        if owner is not None:
            group, _, node_id = name.rpartition("-")
            is_closed = memory[: len(_CLOSED)] == _CLOSED
            who = owner.pid, owner.started, is_closed, owner.facts
            segments.append(Segment(group, int(node_id), memory, *who))
    return segments


def unlink_group(group: str, n_nodes: int) -> None:
    """Removes the names that a group's processes may have left."""
    for node in range(n_nodes):
        unlink(_segment_name(group, node))
    unlink(members_name(group))
