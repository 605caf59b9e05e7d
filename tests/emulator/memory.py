# SPDX-License-Identifier: Apache-2.0
"""Memory of the emulator, as words at addresses, and its clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

POISON = 0xA5


class Memory:
    """Words at addresses; gaps between what was allocated are out of bounds, and so is
    what is near address 0."""

    def __init__(self, n_bytes: int, gap: int = 256, begin: int = 0) -> None:
        self.bytes = bytearray([POISON]) * n_bytes
        self._views = {n: memoryview(self.bytes).cast(c) for n, c in SIZES.items()}
        self._is_there = bytearray(n_bytes // 4)
        self._gap, self._end = gap, max(gap, begin)
        access = {n: self._access(n) for n in SIZES}
        self.loads = {n: load for n, (load, _) in access.items()}
        self.stores = {n: store for n, (_, store) in access.items()}
        # Kernels find them so.
        self.load_1, self.load_2, self.load_4, self.load_8 = self.loads.values()
        self.store_1, self.store_2, self.store_4, self.store_8 = self.stores.values()

    @property
    def unordered(self) -> Memory:
        """Itself, for ordered accesses; of memory that is watched what is below."""
        return self

    def poll(self, *_: object) -> None:
        """Is called at each ordered load."""

    def order(self, *_: object) -> None:
        """Is called at each other ordered access."""

    def allocate(self, n_bytes: int, align: int = 256) -> int:
        begin = -(-self._end // align) * align
        self._end = begin + n_bytes + self._gap
        assert self._end <= len(self.bytes), "the emulated memory is too small"
        self.open(begin, n_bytes)
        return begin

    def open(self, begin: int, n_bytes: int) -> None:
        first, end = begin // 4, -(-(begin + n_bytes) // 4)
        self._is_there[first:end] = b"\1" * (end - first)

    def put(self, data: bytes) -> int:
        begin = self.allocate(max(len(data), 1))
        self.bytes[begin : begin + len(data)] = data
        return begin

    def array(self, at: int, dtype: type, *shape: int) -> np.ndarray:
        """Copies numbers."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self.bytes[at : at + n_bytes], dtype).reshape(shape)

    def load(self, at: int, n_bytes: int) -> int:
        return self.loads[n_bytes](at)

    def _access(self, n_bytes: int) -> tuple[Callable, Callable]:
        """Makes functions that load and store so many bytes."""
        view, is_there = self._views[n_bytes], self._is_there
        shift, odd, mask = n_bytes.bit_length() - 1, n_bytes - 1, (1 << 8 * n_bytes) - 1

        def load(at: int) -> int:
            if at & odd or not is_there[at >> 2]:
                raise IndexError(f"{n_bytes} bytes at {at:#x}")
            return view[at >> shift]

        def store(at: int, value: int) -> None:
            if at & odd or not is_there[at >> 2]:
                raise IndexError(f"{n_bytes} bytes at {at:#x}")
            view[at >> shift] = value & mask

        return load, store


SIZES = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass
class Clock:
    ns: int = 1
