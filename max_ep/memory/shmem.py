# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's host side: symmetric memory of GPU ranks on several hosts.

The NVSHMEM that MAX ships keeps all its host state in thread-local variables: a thread
is a PE (SHMEM's word for a rank). Only the thread that joined may allocate, free or
register kernels. Joining, allocating and freeing are collective, so the threads of one
process must make these calls at the same time. MAX does not specify the threads that
ops run on, so each local rank has its own thread here.

Processes find each other through MPI (``mpirun`` starts them), and rank = ``mpi_rank *
n_gpus_per_node + local rank``. See decision 0010. Or they meet in a store (that of
``MAX_EP_STORE``, or of ``torch.distributed``): then the library is that of NVSHMEM's
wheel, and each has one rank. Those free memory when they next allocate: by then all
know which memory nobody uses.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import queue
import struct
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import cache, partial
from pathlib import Path

from ..limits import STORE_VARIABLE
from ..processes.rendezvous import KeyStore, gather
from ..shmem_parts import (
    check_installed,
    host_library,
    library_to_join,
    mpi_library,
)
from .gpu_shared import has_variable, use_context
from .symmetric_memory import no_memory

_MODULES_VARIABLE = "MAX_EP_SHMEM_MODULES"  # as in shmem_modules.mojo
_MAX_MODULES = 4096
_STATE_OF_DEVICE = "nvshmemi_device_state_d"
_INIT_WITH_MPI_COMM, _INIT_WITH_UNIQUE_ID = 1 << 1, 1 << 3
_UNIQUE_ID_BYTES = 128
_IS_INITIALIZED = 2
_THREAD_MULTIPLE = 3
_DIGEST_BYTES = 32
_REPORT_EVERY_S = 10.0


def _host_library(path: Path) -> ctypes.CDLL:
    shmem = ctypes.CDLL(str(path))
    shmem.nvshmem_malloc.restype = ctypes.c_void_p
    shmem.nvshmem_malloc.argtypes = [ctypes.c_size_t]
    shmem.nvshmem_free.argtypes = [ctypes.c_void_p]
    shmem.nvshmem_ptr.restype = ctypes.c_void_p
    shmem.nvshmem_ptr.argtypes = [ctypes.c_void_p, ctypes.c_int]
    shmem.nvshmemx_cumodule_init.argtypes = [ctypes.c_void_p]
    shmem.nvshmemx_cumodule_finalize.argtypes = [ctypes.c_void_p]
    return shmem


def _attributes(comm: int, unique_id: int, number: int, n: int) -> ctypes.Array:
    """Makes an ``nvshmemx_init_attr_t``, version 1: version, mpi_comm *, then
    arguments: version, unique id (version, id *, number of this one, how many)."""
    attributes = ctypes.create_string_buffer(144)
    versions = [(1 << 16) + n_bytes for n_bytes in (144, _UNIQUE_ID_BYTES, 24)]
    given = versions[0], comm, *versions[1:], unique_id, number, n
    struct.Struct("i4xQ i4x i4xQii").pack_into(attributes, 0, *given)
    return attributes


class _ByMpi:
    """Open MPI, NVSHMEM's MPI plug-in and MAX's host library."""

    def __init__(self) -> None:
        check_installed()
        mpi, host = mpi_library(), host_library()
        assert mpi is not None and host is not None
        # In this order and global: what is loaded already satisfies the next
        # one by its name, without LD_LIBRARY_PATH.
        self.mpi = ctypes.CDLL(str(mpi), mode=ctypes.RTLD_GLOBAL)
        provided = ctypes.c_int()
        status = self.mpi.MPI_Init_thread(
            None, None, _THREAD_MULTIPLE, ctypes.byref(provided)
        )
        if status or provided.value < _THREAD_MULTIPLE:
            raise RuntimeError(
                f"max_ep: MPI_Init_thread: status {status}, thread level "
                f"{provided.value}; {_THREAD_MULTIPLE} is needed"
            )
        world = ctypes.c_char.in_dll(self.mpi, "ompi_mpi_comm_world")
        self.world = ctypes.c_void_p(ctypes.addressof(world))
        byte = ctypes.c_char.in_dll(self.mpi, "ompi_mpi_byte")
        self.byte = ctypes.c_void_p(ctypes.addressof(byte))
        rank, size = ctypes.c_int(), ctypes.c_int()
        self.mpi.MPI_Comm_rank(self.world, ctypes.byref(rank))
        self.mpi.MPI_Comm_size(self.world, ctypes.byref(size))
        self.rank, self.size = rank.value, size.value
        # Where NVSHMEM looks for its plug-ins.
        os.environ.setdefault("MODULAR_SHMEM_LIB_DIR", str(host.parent))
        plugin = host.with_name("nvshmem_bootstrap_mpi.so.3")
        ctypes.CDLL(str(plugin), mode=ctypes.RTLD_GLOBAL)
        self.shmem = _host_library(host)

    def attributes(self, local_rank: int, n_local: int) -> tuple[int, ctypes.Array]:
        """Returns how a local rank joins: the flag, and what belongs to it."""
        comm = ctypes.addressof(self.world)
        return _INIT_WITH_MPI_COMM, _attributes(comm, 0, local_rank, n_local)

    def all_equal(self, what: bytes) -> bool:
        """Returns whether all processes give the same bytes; collective."""
        digest = hashlib.sha256(what).digest()
        everybodys = ctypes.create_string_buffer(_DIGEST_BYTES * self.size)
        n_of = _DIGEST_BYTES, self.byte
        self.mpi.MPI_Allgather(digest, *n_of, everybodys, *n_of, self.world)
        return everybodys.raw == digest * self.size

    def barrier(self) -> None:
        self.mpi.MPI_Barrier(self.world)

    def end(self) -> None:
        self.mpi.MPI_Finalize()


class StoreGroup:
    """Processes with one rank each that meet in a store, all in the same order."""

    def __init__(
        self,
        store: KeyStore,
        rank: int,
        size: int,
        timeout_s: float,
        device: int = 0,
        per_host: int = 1,
    ) -> None:
        """``device``: this rank's GPU; ``per_host``: ranks of a host, which map each
        other's memory."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.device, self.per_host = device, per_host
        self._store, self._n_met = store, 0

    def meet(self, mine: bytes = b"") -> list[bytes]:
        """Returns what each process gives, once all have."""
        self._n_met += 1
        key = f"SHMEM, meeting {self._n_met}"
        return gather(self._store, key, self.rank, self.size, mine, self.timeout_s)

    def barrier(self) -> None:
        self.meet()


class _ByStore:
    """NVSHMEM's wheel, for processes with one rank each."""

    def __init__(self, group: StoreGroup) -> None:
        check_installed(by_store=True)
        self.shmem = _host_library(library_to_join())
        self.rank, self.size = group.rank, group.size
        self._id = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
        struct.pack_into("i", self._id, 0, (1 << 16) + _UNIQUE_ID_BYTES)
        if self.rank == 0 and self.shmem.nvshmemx_get_uniqueid(self._id):
            raise RuntimeError(
                "max_ep: NVSHMEM makes no unique id; NVSHMEM_DEBUG=INFO says more"
            )
        self._id.raw = group.meet(self._id.raw if self.rank == 0 else b"")[0]
        self.name = hashlib.sha256(self._id.raw).hexdigest()
        """Names the processes that have joined."""

    def attributes(self, local_rank: int, n_local: int) -> tuple[int, ctypes.Array]:
        of_id = ctypes.addressof(self._id), self.rank, self.size
        return _INIT_WITH_UNIQUE_ID, _attributes(0, *of_id)

    def end(self) -> None:
        """The store ends with the process of node 0."""


class _Pe:
    """One local rank: a thread that runs what it is given, in order."""

    def __init__(
        self, libraries: _ByMpi | _ByStore, local_rank: int, device: int
    ) -> None:
        self._libraries, self._shmem = libraries, libraries.shmem
        self._local_rank, self.device = local_rank, device
        self._modules: set[int] = set()
        self._jobs: queue.Queue = queue.Queue()
        name = f"max_ep-shmem-{local_rank}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            future, function, arguments = self._jobs.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

    def submit(self, function, *arguments) -> Future:
        future: Future = Future()
        self._jobs.put((future, function, arguments))
        return future

    def join(self, n_local: int) -> tuple[int, int]:
        """Joins SHMEM, on its GPU; collective. Returns rank and ranks."""
        shmem = self._shmem
        use_context(self.device)
        how = self._libraries.attributes(self._local_rank, n_local)
        status = shmem.nvshmemx_hostlib_init_attr(*how)
        state = shmem.nvshmemx_init_status()
        if status or state < _IS_INITIALIZED:
            raise RuntimeError(
                f"max_ep: joining SHMEM failed: status {status}, state {state}; "
                "NVSHMEM_DEBUG=INFO says more"
            )
        return shmem.nvshmem_my_pe(), shmem.nvshmem_n_pes()

    def register(self, module: int) -> int:
        """Gives a CUDA module this rank's device state, once, if it puts anything."""
        if module in self._modules or not has_variable(module, _STATE_OF_DEVICE):
            return 0
        status = self._shmem.nvshmemx_cumodule_init(module)
        if status == 0:
            self._modules.add(module)
        return status

    def leave(self) -> None:
        """Leaves SHMEM; collective."""
        for module in self._modules:
            self._shmem.nvshmemx_cumodule_finalize(module)
        self._shmem.nvshmemx_hostlib_finalize()


class _Process:
    """This process in SHMEM: joined once, left when the process ends."""

    def __init__(
        self, libraries: _ByMpi | _ByStore, devices: list[int], timeout_s: float
    ) -> None:
        """``devices``: the GPU of each rank of this process."""
        n = len(devices)
        self.libraries = libraries
        self.n_allocated = 0
        self.unused: dict[int, list[int]] = {}
        """What is closed here, by its number; others may still use theirs."""
        self.pes = [_Pe(libraries, i, device) for i, device in enumerate(devices)]
        join = [partial(pe.join, n) for pe in self.pes]
        numbers = self.run(timeout_s, "joining SHMEM", *join)
        want = [(libraries.rank * n + i, libraries.size * n) for i in range(n)]
        if numbers != want:
            raise RuntimeError(f"max_ep: SHMEM numbers ranks {numbers}, not {want}")
        self._table = (ctypes.c_uint64 * (2 + 2 * _MAX_MODULES))()
        # Kept alive: ops call it as long as the process runs.
        int64, uint64 = ctypes.c_int64, ctypes.c_uint64
        self._callback = ctypes.CFUNCTYPE(int64, int64, uint64)(self._register)
        self._table[0] = ctypes.cast(self._callback, ctypes.c_void_p).value
        os.environ[_MODULES_VARIABLE] = str(ctypes.addressof(self._table))
        atexit.register(self._leave)

    def run(self, timeout_s: float, what: str, *functions) -> list:
        """Runs a function on the thread of each rank at once, or of the first ones."""
        futures = [pe.submit(run) for pe, run in zip(self.pes, functions)]
        here = f"on process {self.libraries.rank} of {self.libraries.size}"
        waited_s = 0.0
        while waited_s < timeout_s:
            part_s = min(_REPORT_EVERY_S, timeout_s - waited_s)
            done, waiting = wait(futures, part_s, FIRST_EXCEPTION)
            if not waiting or any(future.exception() for future in done):
                return [future.result() for future in futures if future in done]
            waited_s += part_s
            print(f"max_ep: {what} {here} ({waited_s:.0f} s)", file=sys.stderr)
        raise TimeoutError(
            f"max_ep: {what} {here} timed out after {timeout_s:g} s: another process "
            "did not take part"
        )

    def _register(self, device_id: int, module: int) -> int:
        # Called by an op, on whatever thread MAX runs it.
        try:
            (pe,) = (pe for pe in self.pes if pe.device == device_id)
            status = pe.submit(pe.register, module).result(60)
            n = self._table[1]
            if status == 0 and n < _MAX_MODULES:
                self._table[2 + 2 * n], self._table[3 + 2 * n] = device_id, module
                self._table[1] = n + 1
            return status
        except BaseException as error:  # must not unwind into the op
            print(f"max_ep: registering kernels failed: {error!r}", file=sys.stderr)
            return -1

    def _leave(self) -> None:
        try:
            self.run(20.0, "leaving SHMEM", *(pe.leave for pe in self.pes))
            self.libraries.end()
        except (TimeoutError, RuntimeError) as error:
            print(error, file=sys.stderr)


_by_mpi, group_in = cache(_ByMpi), cache(StoreGroup)
_process: _Process | None = None


def mpi_rank() -> tuple[int, int]:
    """Returns the number of this process and how many there are; starts MPI."""
    libraries = _by_mpi()
    return libraries.rank, libraries.size


def _joined(group: StoreGroup | None, devices: list[int], timeout_s: float) -> _Process:
    """Joins SHMEM with a GPU for each rank, if this process has not yet; collective."""
    global _process
    if _process is None:
        libraries = _ByStore(group) if group else _by_mpi()
        _process = _Process(libraries, devices, timeout_s)
    was = [pe.device for pe in _process.pes]
    if was != devices:
        raise ValueError(
            f"max_ep: this process joined SHMEM with GPU {was}, and now {devices} is "
            "asked for; that cannot change while it runs"
        )
    return _process


def join(group: StoreGroup) -> None:
    """Joins SHMEM, if this process has not yet; all processes of the group call it."""
    process = _joined(group, [group.device], group.timeout_s)
    name = getattr(process.libraries, "name", "MPI")
    if group.meet(name.encode()) != [name.encode()] * group.size or (
        process.libraries.rank,
        process.libraries.size,
    ) != (group.rank, group.size):
        raise ValueError(
            f"max_ep: this process joined NVSHMEM as rank {process.libraries.rank} of "
            f"{process.libraries.size}, with other processes than those of this group, "
            f"where it is rank {group.rank} of {group.size}. NVSHMEM has one group a "
            "process; make all buffers over the same ranks"
        )


class ShmemMemory:
    """Regions of this process's ranks in SHMEM's symmetric memory."""

    queue = 0
    """No queue of puts: kernels make them."""

    def __init__(
        self,
        n_local: int,
        node_id: int,
        n_nodes: int,
        region_bytes: int,
        fingerprint: str,
        timeout_s: float,
        start_timeout_s: float,
        group: StoreGroup | None = None,
    ) -> None:
        """Joins SHMEM, if this process has not yet, and allocates; collective. Each of
        the ``n_local`` ranks has the GPU of its number. Processes meet in a store, or
        through MPI."""
        if group is None:
            rank, size = mpi_rank()
            if (rank, size) != (node_id, n_nodes):
                raise ValueError(
                    f"node_id={node_id} of n_nodes={n_nodes}, but MPI says that this "
                    f"is process {rank} of {size}; start the group with `mpirun -np "
                    "n_nodes`"
                )
        elif n_local != 1:
            raise ValueError(
                f"n_gpus_per_node={n_local} with {STORE_VARIABLE}: processes that meet "
                "in a store have one GPU each; count each as a node, or start one a "
                "host with `mpirun`"
            )
        devices = [group.device] if group else [*range(n_local)]
        self._process = process = _joined(group, devices, start_timeout_s)
        self._group, self._timeout_s = group, timeout_s
        what = f"{region_bytes} bytes, {fingerprint}"
        if not self._is_same(what, start_timeout_s):
            raise ValueError(
                "max_ep: the processes of this group have different "
                f"configurations; this one ({node_id}): {what}"
            )
        shmem = process.libraries.shmem
        allocate = [partial(shmem.nvshmem_malloc, region_bytes)] * n_local
        what = "allocating symmetric memory"
        self._addresses = process.run(start_timeout_s, what, *allocate)
        process.n_allocated += 1
        self._number = process.n_allocated
        if not all(self._addresses):
            raise no_memory(f"{region_bytes} bytes of each rank", "SHMEM has less")
        self._first_rank = node_id * n_local
        self._n_ranks = n_nodes * n_local

    def _is_same(self, what: str, timeout_s: float) -> bool:
        """Returns whether all processes ask for the same. Those that meet in a store
        free what none of them uses any more."""
        process = self._process
        if self._group is None:
            # MPI is called by one thread of a process.
            compare = partial(process.libraries.all_equal, what.encode())
            return all(process.run(timeout_s, "joining", compare))
        mine = json.dumps([what, [*process.unused]]).encode()
        all_ = [*map(json.loads, self._group.meet(mine))]
        for number in sorted(set(all_[0][1]).intersection(*(x for _, x in all_))):
            self._free(process.unused.pop(number), timeout_s)
        return all(theirs == what for theirs, _ in all_)

    def _free(self, addresses: list[int], timeout_s: float) -> None:
        free = self._process.libraries.shmem.nvshmem_free
        frees = [partial(free, address) for address in addresses]
        self._process.run(timeout_s, "freeing symmetric memory", *frees)

    def local_addresses(self) -> list[int]:
        return self._addresses

    def connect(self, timeout_s: float, absent: object = ()) -> list[int]:
        """Waits for all processes; returns addresses, 0 for ranks reached by puts."""
        process, group = self._process, self._group
        if group is None:
            barrier = process.libraries.barrier
            process.run(timeout_s, "joining the group", barrier)
        else:
            group.barrier()
        regions = [0] * self._n_ranks
        if group is not None:
            first = group.rank // group.per_host * group.per_host
            for peer in range(first, first + group.per_host):
                regions[peer] = self._mapped(peer, timeout_s)
        for i, address in enumerate(self._addresses):
            regions[self._first_rank + i] = address
        return regions

    def _mapped(self, peer: int, timeout_s: float) -> int:
        """Returns where the region of another rank of this host is mapped."""
        (address,) = self._addresses
        find = partial(self._process.libraries.shmem.nvshmem_ptr, address, peer)
        (found,) = self._process.run(timeout_s, f"mapping rank {peer}", find)
        if not found:
            raise RuntimeError(
                f"max_ep: NVSHMEM does not map the memory of rank {peer}, which is on "
                "this host: its GPU needs peer access (`nvidia-smi topo -p2p w`)"
            )
        return found

    def settle(self, timeout_s: float) -> None:
        """Returns once what this process has put is with the others."""
        quiet = self._process.libraries.shmem.nvshmem_quiet
        self._process.run(timeout_s, "waiting for puts", quiet)

    def close(self) -> None:
        """Gives the memory back; collective, unless processes meet in a store."""
        addresses, self._addresses = self._addresses, []
        if self._group is None:
            self._free(addresses, self._timeout_s)
        elif addresses:
            self._process.unused[self._number] = addresses
