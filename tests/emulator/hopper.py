# SPDX-License-Identifier: Apache-2.0
"""What Hopper adds: barriers with phases, copies of boxes by TMA, and `wgmma`.

A copy is done when it begins. A `wgmma` reads its operands when it begins, too, and
when it is waited for they must still be the same: it may read them until then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .memory import Memory
from .numbers import FP8

FIRST_MAP = 1 << 30
"""Stands for the address of a kernel's first parameter; the next ones follow."""
RANK_SHIFT = 24
"""The rank of a block in its cluster, in an address of shared memory."""
ROW = 128
"""Bytes of a row that a swizzle spans."""


def swizzled(address: np.ndarray | int) -> np.ndarray | int:
    return address ^ address >> 3 & 0x70


@dataclass
class Phases:
    """A barrier in shared memory."""

    count: int
    pending: int
    n_bytes: int = 0
    parity: int = 0

    def change(self, n_arrivals: int, n_bytes: int) -> None:
        self.pending -= n_arrivals
        self.n_bytes += n_bytes
        if self.pending < 0:
            raise RuntimeError("more arrivals at a barrier than it counts")
        if self.pending == 0 and self.n_bytes == 0:
            self.parity ^= 1
            self.pending = self.count


@dataclass
class TensorMap:
    """A tensor of 2 bytes an element, and the box that is copied at once; the last
    dimension is contiguous."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass
class Hopper:
    """What a block has beside its memory."""

    memory: Memory
    shared: Memory
    maps: list[TensorMap | None]
    cluster: list[Hopper] = field(default_factory=list)
    phases: dict[int, Phases] = field(default_factory=dict)
    reads: dict[int, list] = field(default_factory=dict)
    """For each warpgroup, groups of what its `wgmma` have read; the last is open."""
    link: Any = None
    """The rank's end of a link to other hosts, if there is one."""

    def initialize(self, at: int, count: int) -> None:
        self.phases[at] = Phases(count, count)

    def arrive(self, at: int, n_arrivals: int = 1, n_bytes: int = 0) -> None:
        self.phases[at].change(n_arrivals, n_bytes)

    def arrive_at(self, at: int, n_arrivals: int) -> None:
        """Arrives at a barrier of the cluster."""
        block = self.cluster[at >> RANK_SHIFT]
        block.arrive(at & (1 << RANK_SHIFT) - 1, n_arrivals)

    def is_before(self, at: int, parity: int) -> bool:
        """Returns whether the phase of a parity has not completed."""
        return self.phases[at].parity == parity

    def prefetch(self, at: int, n_bytes: int) -> None:
        """Checks that there is what would get into L2; that reads nothing."""
        assert at % 16 == n_bytes % 16 == 0 < n_bytes
        for place in range(at, at + n_bytes, 16):
            self.memory.loads[8](place)

    def copy(self, to: int, map_: int, at: tuple, barrier: int, both: bool) -> None:
        """Copies a box; `both`: to the same place in both blocks."""
        source = self.maps[map_ - FIRST_MAP]
        assert source and len(at) == len(source.box)
        begin = at[::-1]
        for i, idx in enumerate(np.ndindex(*source.box[:-1])):
            place = [int(b) + n for b, n in zip(begin, (*idx, 0))]
            row = bytes(ROW)
            if all(x < n for x, n in zip(place, source.shape)):
                first = source.address + 2 * sum(
                    x * n for x, n in zip(place, source.strides)
                )
                self.memory.loads[4](first), self.memory.loads[4](first + ROW - 4)
                row = bytes(self.memory.bytes[first : first + ROW])
            for chunk in range(0, ROW, 16):
                dest = swizzled(to + i * ROW + chunk)
                for block in self.cluster if both else [self]:
                    block.shared.bytes[dest : dest + 16] = row[chunk : chunk + 16]
        for block in self.cluster if both else [self]:
            block.phases[barrier].change(0, -ROW * math.prod(source.box[:-1]))

    # ---------------------------------------------------------------------- wgmma

    def _operand(self, descriptor: int, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns 32 bytes of each row, and where they stand."""
        assert descriptor >> 62 == 1, "128 bytes are swizzled"
        row = np.arange(n_rows)
        first = (descriptor & 0x3FFF) << 4
        first = first + row // 8 * ((descriptor >> 32 & 0x3FFF) << 4) + row % 8 * ROW
        places = swizzled(np.stack([first, first + 16], 1)) >> 4
        return np.frombuffer(self.shared.bytes, "V16")[places], places

    def multiply(self, group: int, shape: str, given: list) -> list[tuple[int, ...]]:
        """Runs a `wgmma` of the 128 threads of a warpgroup."""
        n, k = _sizes(shape)
        a, b, keeps, _ = given[0]
        parts = [self._operand(a, 64), self._operand(b, n)]
        open_ = self.reads.setdefault(group, [[]])[-1]
        open_ += [(places, found.copy()) for found, places in parts]
        left, right = (_numbers(found, k) for found, _ in parts)
        sums = np.array([x[3] for x in given], np.uint32).view(np.float32)
        if not keeps:
            sums = np.zeros_like(sums)
        thread, i = np.ogrid[:128, : n // 2]
        rows = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
        columns = i // 4 * 8 + thread % 4 * 2 + i % 2
        product = (left @ right.T)[rows, columns]
        return [tuple(x) for x in (sums + product).view(np.uint32).tolist()]

    def commit(self, group: int) -> None:
        self.reads.setdefault(group, [[]]).append([])

    def await_groups(self, group: int, n_left: int) -> None:
        """Checks that what groups have read is still there; the last may go on."""
        groups = self.reads.get(group, [[]])
        n_done = max(0, len(groups) - 1 - n_left)
        now = np.frombuffer(self.shared.bytes, "V16")
        for places, found in (read for done in groups[:n_done] for read in done):
            if now[places].tobytes() != found.tobytes():
                raise RuntimeError("a stage is overwritten while wgmma reads it")
        del groups[:n_done]


def _sizes(shape: str) -> tuple[int, int]:
    """Returns n and k of a shape such as m64n128k16."""
    n, _, k = shape.partition("n")[2].partition("k")
    return int(n), int(k)


def _numbers(found: np.ndarray, k: int) -> np.ndarray:
    """Returns numbers in float32: 32 bytes a row are bfloat16, or FP8."""
    if k == 16:
        halves = found.view(np.uint16).reshape(len(found), k)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    return FP8[found.view(np.uint8).reshape(len(found), k)]


def mma(given: list) -> list[tuple[int, ...]]:
    """Runs an `mma` of 16 x 8 x 16 of a warp."""
    lane = np.arange(32)
    a, b, c = (np.array([x[i] for x in given], np.uint32) for i in range(3))
    low, high = (
        lambda x: (x << 16).view(np.float32),
        lambda x: (x & 0xFFFF0000).view(np.float32),
    )
    left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    sums = c.view(np.float32)
    for i in range(4):
        rows, columns = lane // 4 + i % 2 * 8, lane % 4 * 2 + i // 2 * 8
        left[rows, columns] = low(a[:, i])
        left[rows, columns + 1] = high(a[:, i])
    for i in range(2):
        rows = lane % 4 * 2 + i * 8
        right[rows, lane // 4] = low(b[:, i])
        right[rows + 1, lane // 4] = high(b[:, i])
    product = left @ right
    of_lane = np.stack(
        [product[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] for i in range(4)], 1
    )
    return [tuple(x) for x in (sums + of_lane).view(np.uint32).tolist()]
