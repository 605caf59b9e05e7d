# SPDX-License-Identifier: Apache-2.0
"""Reads GPU memory while a kernel hangs: on a stream of its own, by driver calls."""

from __future__ import annotations

import ctypes

import numpy as np

from .gpu_shared import _call, use_context

_NON_BLOCKING, _HOST, _DEVICE = 1, 1, 2


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
    """The counters and the region of a rank."""

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
