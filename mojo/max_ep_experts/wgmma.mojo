# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for Hopper in bfloat16.

The result is computed transposed: rows of a weight are the 64 rows of a `wgmma`, rows of
`x` its columns, of which it takes any multiple of 8. So few rows of a group's last tile
are multiplied for nothing.
"""
from max.gpu.compute.mma import (
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from std.math import ceildiv

from .copies import BOX, fence_gathered
from .hopper import descriptor, Sums, TileProduct, warp_and_lane
from .product import GroupedProduct
from .ring import Ring
from .tile import K_STEP, silu
from .tiles import BlockTile, BM, BN, Chunks

comptime ROW_STEP = 16
"""A product is compiled for each multiple of so many rows."""
comptime _M = 64
"""Rows of a weight of one `wgmma`."""
comptime Parts[n: Int, rows: Int] = Array[Sums[rows], n]
"""A thread's sums of so many `wgmma`, for so many rows of `x`."""


@always_inline
def adjacent[
    n: Int, rows: Int, //, swiglu: Bool, eight: Int, j: Int
](sums: Parts[n, rows]) -> SIMD[DType.float32, n if swiglu else 2 * n]:
    """Returns the columns of the lane's `j`-th row of the `eight`-th 8.

    The order is that of `copies.mojo`.
    """
    comptime at = 4 * eight + j
    var v = SIMD[DType.float32, n if swiglu else 2 * n](0)
    comptime for i in range(n):
        comptime if swiglu:
            v[i] = silu(sums[i][at]) * sums[i][at + 2]
        else:
            v[2 * i] = sums[i][at]
            v[2 * i + 1] = sums[i][at + 2]
    return v


@always_inline
def _multiply[
    n: Int, rows: Int, gathers: Bool
](mut ring: Ring, first: UInt32, n_steps: UInt32) -> Parts[n, rows]:
    """Multiplies rows of the weight, `_M` at a time from `first` on, along k."""
    comptime k_of_one = 16
    comptime size_of_one: Int = k_of_one * 2
    var sums = Parts[n, rows](fill=Sums[rows](fill=0))
    var last = UInt32(0)
    for step in range(n_steps):
        ring.await_full()
        comptime if gathers:
            fence_gathered()
        var b = descriptor[DType.bfloat16](ring, 0)
        # ORDER: registers of the sums are written before `wgmma` reads them.
        wgmma_fence_aligned()
        comptime for part in range(n):
            var a = descriptor[DType.bfloat16](ring, BM + first + UInt32(part * _M))
            comptime for i in range(K_STEP // k_of_one):
                sums[part] = wgmma_async[
                    _M,
                    rows,
                    k_of_one,
                    DType.float32,
                    rows // 2,
                    a_type=DType.bfloat16,
                    b_type=DType.bfloat16,
                ](a + size_of_one * i, b + size_of_one * i, sums[part])
        wgmma_commit_group_sync()
        # The stage before this one has been read.
        wgmma_wait_group_sync[1]()
        if step > 0:
            ring.release(last)
        last = ring.stage
        ring.step()
    wgmma_wait_group_sync[0]()
    ring.release(last)
    return sums^


@fieldwise_init
struct Bf16Product[swiglu_: Bool, most: UInt32 = BM, gathers: Bool = False](
    TileProduct
):
    """A product in bfloat16."""

    comptime swiglu = Self.swiglu_
    comptime chunks = Chunks(most=Self.most, step=UInt32(ROW_STEP))
    comptime may_be_narrow = True

    var product: GroupedProduct[DType.bfloat16]

    @always_inline
    def grouped(self) -> GroupedProduct[DType.bfloat16]:
        return self.product

    @always_inline
    def consume(self, var ring: Ring, warpgroup: UInt32):
        while True:
            ring.await_full()
            var tile = ring.tile()[]
            if tile.n_rows == 0:
                return
            var n_steps_of_rows = ceildiv(tile.n_rows, UInt32(ROW_STEP))
            comptime for i in range(1, Int(Self.most) // ROW_STEP + 1):
                if n_steps_of_rows == UInt32(i):
                    if tile.n_columns == BN:
                        self._compute[2, i * ROW_STEP](ring, tile, warpgroup)
                    else:
                        self._compute[1, i * ROW_STEP](ring, tile, warpgroup)

    @always_inline
    def _compute[
        n: Int, rows: Int
    ](self, mut ring: Ring, tile: BlockTile, warpgroup: UInt32):
        """Computes a warpgroup's box of the weight, or its half of the only box."""
        var n_steps = UInt32(self.product.k // K_STEP)
        var sums = _multiply[n, rows, Self.gathers](
            ring, warpgroup * UInt32(n * _M), n_steps
        )
        comptime width = n if Self.swiglu else 2 * n
        comptime of_column: UInt32 = 2 if Self.swiglu else 1
        var columns = self.product.n // Int(of_column)
        var warp, lane = warp_and_lane()
        # Counted in rows of the weight.
        var column = tile.column + 32 * warp + 4 * (lane // 4)
        column += warpgroup * (BOX if n == 2 else 2)
        var first = 2 * (lane % 4)
        var n_rows = Int32(tile.n_rows) - Int32(first)
        # One address after another: all at once would take registers.
        var to = self.product.y.unsafe_offset(
            Int(tile.begin + first) * columns + Int(column // of_column)
        )
        comptime for eight in range(rows // 8):
            comptime for j in range(2):
                var v = adjacent[Self.swiglu, eight, j](sums)
                # Only the last step of rows may be shorter.
                comptime is_whole = 8 * (eight + 1) <= rows - ROW_STEP
                if is_whole or Int32(8 * eight + j) < n_rows:
                    to.unsafe_store[alignment=2 * width](
                        j * columns, v.cast[DType.bfloat16]()
                    )
            to = to.unsafe_offset(8 * columns)
