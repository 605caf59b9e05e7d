# SPDX-License-Identifier: Apache-2.0
"""GPU memory by driver calls: mapped by other processes, or read while a kernel hangs.

The processes hand each other the handle of ``cuMemCreate`` as a file descriptor
(``meeting.py``). The memory exists as long as a process maps it, so a peer that dies
leaves no dangling mapping. It does not depend on the settings of torch's allocator.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from typing import Any

from .symmetric_memory import PeerMemory, no_memory

_GRANULARITY = 2 << 20
_POSIX_DESCRIPTOR, _PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
_NON_BLOCKING, _NOT_FOUND = 1, 500
_U64, _SIZE = ctypes.c_uint64, ctypes.c_size_t
_KIND = c_int(_POSIX_DESCRIPTOR)


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def use_context(device: int) -> None:
    """Makes the device's primary context current, if none is."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    if not context:
        _call("cuDevicePrimaryCtxRetain", byref(context), device)
        _call("cuCtxSetCurrent", context)


def has_variable(module: int, name: str) -> bool:
    """Returns whether a CUDA module has a variable."""
    at, size, text = _U64(), _SIZE(), name.encode()
    found = _driver().cuModuleGetGlobal_v2(byref(at), byref(size), _U64(module), text)
    return found != _NOT_FOUND


def _call(name: str, *arguments: Any) -> None:
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, byref(text))
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
            descriptor, mine = c_int(), _U64(self._mapped[node_id][1])
            export = "cuMemExportToShareableHandle"
            _call(export, byref(descriptor), mine, _KIND, _U64(0))
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
            _call("cuMemCreate", byref(handle), size, byref(what), zero)
        else:
            take = "cuMemImportFromShareableHandle"
            _call(take, byref(handle), c_void_p(descriptor), _KIND)
        if node in self._mapped:
            address, old = map(_U64, self._mapped.pop(node))
            _call("cuMemUnmap", address, size)
            _call("cuMemRelease", old)
        else:
            address = _U64()
            _call("cuMemAddressReserve", byref(address), size, _SIZE(0), zero, zero)
        _call("cuMemMap", address, size, _SIZE(0), handle, zero)
        self._mapped[node] = address.value, handle.value
        access = _Access(location, _READ_WRITE)
        _call("cuMemSetAccess", address, size, byref(access), _SIZE(1))

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


@functools.cache
def _stream(device: int) -> c_void_p:
    """Makes a stream for reads beside kernels."""
    stream = c_void_p()
    _call("cuStreamCreate", byref(stream), _NON_BLOCKING)
    return stream


def reader(device: int, address: int) -> Callable[[int, int], bytes]:
    """Returns what copies bytes behind an address, ``(at, n_bytes)``, also while
    kernels run; for the thread that asks."""
    use_context(device)
    stream = _stream(device)

    def read(at: int, n_bytes: int) -> bytes:
        found = ctypes.create_string_buffer(n_bytes)
        if n_bytes:
            source, size = _U64(address + at), _SIZE(n_bytes)
            _call("cuMemcpyDtoHAsync_v2", found, source, size, stream)
            _call("cuStreamSynchronize", stream)
        return found.raw

    return read
