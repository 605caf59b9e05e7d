# SPDX-License-Identifier: Apache-2.0
"""GPU memory by driver calls: mapped by other processes, or read while a kernel hangs.

The processes hand each other the handle of ``cuMemCreate`` as a file descriptor
(``meeting.py``). The memory exists as long as a process maps it, so a peer that dies
leaves no dangling mapping. It does not depend on the settings of torch's allocator.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Collection
from typing import Any

import numpy as np

from .meeting import Meeting

_GRANULARITY = 2 << 20
_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_NON_BLOCKING, _HOST, _DEVICE = 1, 1, 2
_U64, _SIZE = ctypes.c_uint64, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def use_context(device: int) -> None:
    """Makes the device's primary context current, if none is."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


def _call(name: str, *arguments: Any) -> None:
    """Calls the driver; raises what it says."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        said = (text.value or b"?").decode()
        if name == "cuMemCreate":
            raise MemoryError(f"max_ep: no GPU memory for a region: {said}")
        raise RuntimeError(
            f"max_ep: {name}: {said}. Ranks on one host write into each other's "
            "memory: the GPUs need peer access (`nvidia-smi topo -p2p w`)"
        )


class GpuSharedMemory:
    """A block of this GPU's memory, and everybody's."""

    def __init__(
        self,
        group: str,
        node_id: int,
        n_nodes: int,
        n_bytes: int,
        fingerprint: str,
        device: int = 0,
    ) -> None:
        """Allocates this rank's block; its contents are undefined.

        Group and fingerprint are as :class:`Meeting` has them.
        """
        self._meeting = Meeting(group, node_id, n_nodes, fingerprint)
        self.group, self.owner = group, self._meeting.owner
        self._device = device
        self._n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        self._mapped: dict[int, tuple[int, int]] = {}
        """Address and handle of each rank's block."""
        self._given: dict[int, int] = {}
        """Descriptors that :meth:`trade` has brought, by rank."""
        try:
            use_context(device)
            self._map(node_id, self._create())
        except BaseException:
            self.close()
            raise

    handle = -1
    """Nobody finds this memory alone: both sides :meth:`trade`."""

    def _create(self) -> int:
        """Allocates a block; returns its handle."""
        handle, what = _U64(), _Properties()
        what.type, what.handle_types = _PINNED, _POSIX_DESCRIPTOR
        what.location = _Location(_ON_DEVICE, self._device)
        made = ctypes.byref(handle), _SIZE(self._n_bytes)
        _call("cuMemCreate", *made, ctypes.byref(what), _U64(0))
        return handle.value

    def _map(self, rank: int, handle: int) -> list[int]:
        """Maps a rank's block for this GPU, in place of its earlier one; returns where.

        The address stays: captured graphs have it.
        """
        size, zero = _SIZE(self._n_bytes), _U64(0)
        if rank in self._mapped:
            address, old = map(_U64, self._mapped[rank])
            _call("cuMemUnmap", address, size)
            _call("cuMemRelease", old)
        else:
            address = _U64()
            reserve = (ctypes.byref(address), size, _SIZE(0), zero, zero)
            _call("cuMemAddressReserve", *reserve)
        _call("cuMemMap", address, size, _SIZE(0), _U64(handle), zero)
        self._mapped[rank] = address.value, handle
        access = _Access(_Location(_ON_DEVICE, self._device), _READ_WRITE)
        _call("cuMemSetAccess", address, size, ctypes.byref(access), _SIZE(1))
        return [address.value]

    def local_addresses(self) -> list[int]:
        """Returns the address of this rank's block."""
        return [self._mapped[self._meeting.node_id][0]]

    def connect(self, timeout_s: float, absent: Collection[int] = ()) -> list[int]:
        """Returns the address of every rank's block, in this process.

        Ranks that are ``absent`` are not waited for; in place of theirs stands its own.
        """
        self._meet(self._meeting, timeout_s, absent)
        addresses = self.local_addresses() * self._meeting.n_nodes
        for peer in [*self._given]:
            addresses[peer : peer + 1] = self.map(peer)
        return addresses

    def _meet(self, meeting: Meeting, timeout_s: float, *more: Any) -> None:
        descriptor, kind = ctypes.c_int(), ctypes.c_int(_POSIX_DESCRIPTOR)
        mine = _U64(self._mapped[meeting.node_id][1])
        export = ctypes.byref(descriptor), mine, kind, _U64(0)
        _call("cuMemExportToShareableHandle", *export)
        try:
            found = meeting.meet(descriptor.value, timeout_s, *more)
        finally:
            os.close(descriptor.value)
        self._forget()
        self._given = {peer: theirs for peer, (_, theirs) in found.items()}

    def trade(self, peers: set[int], epoch: int, deadline_s: float) -> set[int]:
        """Hands this rank's block to peers, which hand on theirs at the same time, and
        agree on the ``epoch``; returns who has not come. :meth:`map` uses what has."""
        place = self._meeting.node_id, self._meeting.n_nodes, self.owner.fingerprint
        absent, lost = set(range(place[1])) - peers, set()
        meeting = Meeting(self.group, *place, epoch)
        self._meet(meeting, deadline_s - time.monotonic(), absent, lost)
        return lost

    def map(self, rank: int, *_: Any) -> list[int]:
        """Maps a rank's block that was handed on, in place of an earlier one; if there
        is neither, a block of nobody's. Returns where. No launch may be under way."""
        if rank in self._given:
            handle, descriptor = _U64(), self._given.pop(rank)
            take = ctypes.byref(handle), ctypes.c_void_p(descriptor)
            try:
                kind = ctypes.c_int(_POSIX_DESCRIPTOR)
                _call("cuMemImportFromShareableHandle", *take, kind)
            finally:
                os.close(descriptor)
            return self._map(rank, handle.value)
        if rank not in self._mapped:
            self._map(rank, self._create())
        return [self._mapped[rank][0]]

    def _forget(self) -> None:
        while self._given:
            os.close(self._given.popitem()[1])

    def withdraw(self) -> None:
        """Is not to be met: who joins trades."""
        self._meeting.close()

    def close(self) -> None:
        """Unmaps all blocks, which no kernel may use; peers keep what they map."""
        self._meeting.close()
        self._forget()
        mapped, self._mapped = self._mapped, {}
        for address, handle in mapped.values():
            _call("cuMemUnmap", _U64(address), _SIZE(self._n_bytes))
            _call("cuMemAddressFree", _U64(address), _SIZE(self._n_bytes))
            _call("cuMemRelease", _U64(handle))


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("type", ctypes.c_uint),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class GpuWords:
    """The counters and the region of a rank, read on a stream of its own."""

    def __init__(self, device: int, counters: int, region: int) -> None:
        """Takes addresses; nothing is read yet."""
        use_context(device)
        self._counters, self._region = counters, region
        self._stream = ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

    def __enter__(self) -> GpuWords:
        return self

    def __exit__(self, *_: object) -> None:
        _call("cuStreamDestroy_v2", self._stream)

    def counters(self, first: int, n: int) -> np.ndarray:
        """Reads words of the counters, int32."""
        return self._read(self._counters + 4 * first, 1, 4 * n, 4 * n).view(np.int32)

    def flags(self, offset: int, n: int, pitch: int = 8) -> np.ndarray:
        """Reads flags of the region, ``pitch`` bytes from one to the next."""
        rows, width = (n, 8) if pitch > 8 else (1, 8 * n)
        return self._read(self._region + offset, rows, width, pitch).view(np.uint64)

    def _read(self, address: int, rows: int, width: int, pitch: int) -> np.ndarray:
        found = np.zeros(rows * width, np.uint8)
        copy = _Copy2D(width=width, height=rows)
        copy.src_type, copy.src_device, copy.src_pitch = _DEVICE, address, pitch
        copy.dst_type, copy.dst_host, copy.dst_pitch = _HOST, found.ctypes.data, width
        if rows * width:
            if rows == 1:
                copy.src_pitch = width
            _call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self._stream)
            _call("cuStreamSynchronize", self._stream)
        return found
