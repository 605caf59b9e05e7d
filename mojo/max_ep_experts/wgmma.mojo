# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for Hopper in bfloat16."""
from max.gpu import WARP_SIZE, thread_idx
from max.gpu.compute.mma import (
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)

from .copies import HALF
from .hopper import (
    descriptor,
    eight_columns,
    row_of_thread,
    skip_tile,
    Sums,
    TileProduct,
)
from .product import GroupedProduct
from .ring import Ring
from .tile import K_STEP
from .tiles import BlockTile, BM, BN


@always_inline
def _multiply[
    columns: Int
](mut ring: Ring, warpgroup: UInt32, n_steps: UInt32) -> Sums[columns]:
    """Multiplies a warpgroup's rows with so many columns, along k."""
    comptime k_of_one = 16
    comptime size_of_one: Int = k_of_one * 2
    var sums = Sums[columns](fill=0)
    var last = UInt32(0)
    for step in range(n_steps):
        ring.await_full()
        var a = descriptor[DType.bfloat16](ring, warpgroup * HALF)
        var b = descriptor[DType.bfloat16](ring, BM)
        wgmma_fence_aligned()
        comptime for i in range(K_STEP // k_of_one):
            sums = wgmma_async[
                Int(HALF),
                columns,
                k_of_one,
                DType.float32,
                columns // 2,
                a_type=DType.bfloat16,
                b_type=DType.bfloat16,
            ](a + size_of_one * i, b + size_of_one * i, sums)
        wgmma_commit_group_sync()
        # The stage before this one has been read.
        wgmma_wait_group_sync[1]()
        if step > 0:
            ring.release(last)
        last = ring.stage
        ring.step()
    wgmma_wait_group_sync[0]()
    ring.release(last)
    return sums


@always_inline
def _store[
    columns: Int, swiglu: Bool
](
    product: GroupedProduct[DType.bfloat16],
    tile: BlockTile,
    warpgroup: UInt32,
    sums: Sums[columns],
):
    """Stores the thread's two rows, 16 bytes at a time."""
    comptime width: UInt32 = 2 if swiglu else 1
    var n = product.n // Int(width)
    var lane = UInt32(thread_idx.x) % UInt32(WARP_SIZE)
    var column = tile.column // width + 8 * (lane % 4)
    comptime for half in range(2):
        var row = row_of_thread(warpgroup) + UInt32(8 * half)
        var to = product.y.unsafe_offset(Int(tile.begin + row) * n + Int(column))
        comptime for block in range(columns // Int(32 * width)):
            var v = eight_columns[columns, swiglu, block, half](sums)
            if row < tile.n_rows:
                to.unsafe_store[alignment=16](32 * block, v.cast[DType.bfloat16]())


@fieldwise_init
struct Bf16Product[swiglu_: Bool](TileProduct):
    """A product in bfloat16."""

    comptime swiglu = Self.swiglu_
    comptime may_be_narrow = True

    var product: GroupedProduct[DType.bfloat16]

    @always_inline
    def grouped(self) -> GroupedProduct[DType.bfloat16]:
        return self.product

    @always_inline
    def consume(self, var ring: Ring, warpgroup: UInt32):
        var n_steps = UInt32(self.product.k // K_STEP)
        while True:
            ring.await_full()
            var tile = ring.tile()[]
            if tile.n_rows == 0:
                return
            if warpgroup * HALF >= tile.n_rows:
                skip_tile(ring, n_steps)
            elif tile.n_columns == BN:
                var sums = _multiply[Int(BN)](ring, warpgroup, n_steps)
                _store[Int(BN), Self.swiglu](self.product, tile, warpgroup, sums)
            else:
                var sums = _multiply[Int(BN) // 2](ring, warpgroup, n_steps)
                _store[Int(BN) // 2, Self.swiglu](self.product, tile, warpgroup, sums)
