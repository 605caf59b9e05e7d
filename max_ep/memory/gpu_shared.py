# SPDX-License-Identifier: Apache-2.0
"""GPU memory by driver calls: mapped by other processes, or read while a kernel hangs.

The processes hand each other the handle of ``cuMemCreate`` as a file descriptor
(``meeting.py``). The memory exists as long as a process maps it, so a peer that dies
leaves no dangling mapping. It does not depend on the settings of torch's allocator.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from .symmetric_memory import PeerMemory, no_memory

_GRANULARITY = 2 << 20
_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_NON_BLOCKING, _HOST, _DEVICE = 1, 1, 2
_U64, _SIZE = ctypes.c_uint64, ctypes.c_size_t
_KIND = ctypes.c_int(_POSIX_DESCRIPTOR)


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
            raise no_memory("a region on the GPU", said)
        raise RuntimeError(
            f"max_ep: {name}: {said}. Ranks on one host write into each other's "
            "memory: the GPUs need peer access (`nvidia-smi topo -p2p w`)"
        )


class GpuSharedMemory(PeerMemory):
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
        """Allocates this rank's block; its contents are undefined."""
        super().__init__(group, node_id, n_nodes, fingerprint)
        self._device = device
        self._n_bytes = -(-n_bytes // _GRANULARITY) * _GRANULARITY
        self._mapped: dict[int, tuple[int, int]] = {}
        """Address and handle of each rank's block."""
        try:
            use_context(device)
            self._map(node_id, None)
            descriptor, mine = ctypes.c_int(), _U64(self._mapped[node_id][1])
            export = ctypes.byref(descriptor), mine, _KIND, _U64(0)
            _call("cuMemExportToShareableHandle", *export)
            self._descriptor = descriptor.value
        except BaseException:
            self.close()
            raise

    def _map(self, node: int, descriptor: int | None) -> None:
        """The address stays: captured graphs have it."""
        if descriptor is None and node in self._mapped:
            return
        handle, size, zero = _U64(), _SIZE(self._n_bytes), _U64(0)
        location = _Location(_ON_DEVICE, self._device)
        if descriptor is None:
            what = _Properties(_PINNED, _POSIX_DESCRIPTOR, location)
            made = ctypes.byref(handle), size, ctypes.byref(what), zero
            _call("cuMemCreate", *made)
        else:
            take = ctypes.byref(handle), ctypes.c_void_p(descriptor), _KIND
            _call("cuMemImportFromShareableHandle", *take)
        if node in self._mapped:
            address, old = map(_U64, self._mapped.pop(node))
            _call("cuMemUnmap", address, size)
            _call("cuMemRelease", old)
        else:
            address = _U64()
            reserve = (ctypes.byref(address), size, _SIZE(0), zero, zero)
            _call("cuMemAddressReserve", *reserve)
        _call("cuMemMap", address, size, _SIZE(0), handle, zero)
        self._mapped[node] = address.value, handle.value
        access = _Access(location, _READ_WRITE)
        _call("cuMemSetAccess", address, size, ctypes.byref(access), _SIZE(1))

    def _addresses(self, node: int) -> list[int]:
        return [self._mapped[node][0]]

    def close(self) -> None:
        """Unmaps all blocks, which no kernel may use; peers keep what they map."""
        super().close()
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


@functools.cache
def _stream(device: int) -> ctypes.c_void_p:
    """Makes a stream for reads beside kernels."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return stream


class GpuWords:
    """The counters and the region of a rank, read while its kernels run."""

    def __init__(self, device: int, counters: int, region: int) -> None:
        """Takes addresses; nothing is read yet."""
        use_context(device)
        self._counters, self._region, self._stream = counters, region, _stream(device)

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
