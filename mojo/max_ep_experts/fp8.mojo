# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for Hopper in blockwise FP8.

A row has a scale for each 128 elements of k, a weight for each 128 x 128. That is what a
stage holds, so the product of a stage is scaled when it is added up, in float32.

Copies move bytes: to them two FP8 elements are one bfloat16. With SwiGLU the result is
quantized like a dispatched token, and is the next product's `x`.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import WARP_SIZE, thread_idx
from max.gpu.compute.mma import (
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp

from .copies import BOX, WARPS
from .hopper import descriptor, launch_only_on_hopper, Sums, TileProduct, warp_and_lane
from .product import GroupedProduct, In, Out, product_of
from .ring import Ring
from .tile import K_STEP, silu
from .tiles import BlockTile, BM, BN, Chunks

comptime FP8 = DType.float8_e4m3fn
comptime BLOCK = 128
"""Elements of a scale, in rows and in both directions of weights."""
comptime FP8_MAX = Float32(448)
comptime FP8_MIN_AMAX = Float32(1e-4)
"""As in the format `fp8`."""
comptime HALF: UInt32 = 64
"""Rows of a warpgroup."""


@always_inline
def adjacent[
    swiglu: Bool, block: Int, half: Int
](sums: Sums[Int(BN)]) -> SIMD[DType.float32, 4 if swiglu else 8]:
    """Returns adjacent columns of the block-th 32 that four lanes have, with SwiGLU 16.

    `half` is which of the lane's two rows. The order is that of `copies.mojo`.
    """
    comptime box, w = divmod(block, WARPS)
    var v = SIMD[DType.float32, 4 if swiglu else 8](0)
    comptime for j in range(2):
        comptime for i in range(2):
            comptime first = 4 * (16 * box + 8 * i + 2 * w) + 2 * half + j
            comptime if swiglu:
                v[2 * j + i] = silu(sums[first]) * sums[first + 4]
            else:
                v[4 * j + 2 * i] = sums[first]
                v[4 * j + 2 * i + 1] = sums[first + 4]
    return v


@fieldwise_init
struct ScaledProduct[swiglu_: Bool](TileProduct):
    """A product of FP8 rows and weights, with their scales."""

    comptime swiglu = Self.swiglu_
    comptime chunks = Chunks(most=2 * HALF, step=2 * HALF)
    # 128 results of SwiGLU have one scale.
    comptime may_be_narrow = False

    var product: GroupedProduct[DType.bfloat16]
    """What is multiplied, as bytes: `k` is half of the elements of a row. `y` is
    bfloat16; with SwiGLU it is FP8, `[n_rows][n / 2]`."""
    var x_scales: In[DType.float32]
    """`[k / 128][n_rows]`."""
    var weight_scales: In[DType.float32]
    """`[n_experts][n / 128][k / 128]`."""
    var y_scales: Out[DType.float32]
    """With SwiGLU `[n / 256][n_rows]`."""

    @always_inline
    def grouped(self) -> GroupedProduct[DType.bfloat16]:
        return self.product

    @always_inline
    def consume(self, var ring: Ring, warpgroup: UInt32):
        var warp, lane = warp_and_lane()
        var row = warpgroup * HALF + 16 * warp + lane // 4
        while True:
            ring.await_full()
            var tile = ring.tile()[]
            if tile.n_rows == 0:
                return
            if warpgroup * HALF >= tile.n_rows:
                # It has no rows.
                for _ in range(UInt32(self.n_steps())):
                    ring.await_full()
                    ring.release(ring.stage)
                    ring.step()
                continue
            var sums = self._multiply(ring, tile, warpgroup, row)
            comptime if Self.swiglu:
                self._store_quantized(tile, row, sums)
            else:
                self._store(tile, row, sums)

    @always_inline
    def n_steps(self) -> Int:
        """Returns how many scales a row has."""
        return self.product.k // K_STEP

    @always_inline
    def of_rows(
        self, step: Int, upper: UInt32, lower: UInt32
    ) -> SIMD[DType.float32, 2]:
        """Returns a scale of each of two rows."""
        var scales = self.x_scales.unsafe_offset(step * self.product.n_rows)
        return {scales[unsafe_offset=Int(upper)], scales[unsafe_offset=Int(lower)]}

    @always_inline
    def scales_of(self, expert: UInt32, column: UInt32) -> UInt32:
        """Returns where the scales of 128 rows of a weight begin; they are adjacent."""
        var blocks = UInt32(self.product.n // BLOCK)
        return (expert * blocks + column // BLOCK) * UInt32(self.n_steps())

    @always_inline
    def _multiply(
        self, mut ring: Ring, tile: BlockTile, warpgroup: UInt32, row: UInt32
    ) -> Sums[Int(BN)]:
        """Multiplies a warpgroup's rows with `BN` columns, along k.

        The thread has rows `row` and `row + 8` of the tile. Of 128 rows of a weight those
        with SwiGLU are 64 of gate and 64 of up, 8 in turn.
        """
        comptime n_boxes = Int(BN // BOX)
        comptime k_of_one = 32
        # The scales behind the last row may be those of another group, or none.
        var upper = tile.begin + min(row, tile.n_rows - 1)
        var lower = tile.begin + min(row + 8, tile.n_rows - 1)
        var column = tile.column // 2 if Self.swiglu else tile.column
        var first = self.scales_of(tile.expert, column)
        # The second is of up, or of the second box.
        var more = UInt32(self.product.n // 2) if Self.swiglu else BOX
        var second = self.scales_of(tile.expert, column + more)
        var sums = Sums[Int(BN)](fill=0)
        var next = self.of_rows(0, upper, lower)
        for step in range(self.n_steps()):
            # Scales of rows come from L2, so they are loaded a step before.
            var of_rows = next
            next = self.of_rows(min(step + 1, self.n_steps() - 1), upper, lower)
            var of_columns = SIMD[DType.float32, 2](
                self.weight_scales[unsafe_offset=Int(first) + step],
                self.weight_scales[unsafe_offset=Int(second) + step],
            )
            ring.await_full()
            comptime for box in range(n_boxes):
                var a = descriptor[FP8](ring, warpgroup * HALF)
                var b = descriptor[FP8](ring, BM + UInt32(box) * BOX)
                var products = Sums[Int(BOX)](fill=0)
                # ORDER: registers of the sums are written before `wgmma` reads them.
                wgmma_fence_aligned()
                comptime for i in range(BLOCK // k_of_one):
                    products = wgmma_async[
                        Int(HALF),
                        Int(BOX),
                        k_of_one,
                        DType.float32,
                        Int(BOX) // 2,
                        a_type=FP8,
                        b_type=FP8,
                        scale_d=0 if i == 0 else 1,
                    ](a + k_of_one * i, b + k_of_one * i, products)
                wgmma_commit_group_sync()
                wgmma_wait_group_sync[0]()
                comptime if box == n_boxes - 1:
                    ring.release(ring.stage)
                comptime for i in range(Int(BOX) // 2):
                    comptime at = i // 4 % 2 if Self.swiglu else box
                    comptime to = box * Int(BOX) // 2 + i
                    var factor = of_rows[i // 2 % 2] * of_columns[at]
                    sums[to] = sums[to] + products[i] * factor
            ring.step()
        return sums

    @always_inline
    def _store(self, tile: BlockTile, row: UInt32, sums: Sums[Int(BN)]):
        """Stores the thread's two rows, 16 bytes at a time."""
        var lane = UInt32(thread_idx.x) % UInt32(WARP_SIZE)
        var column = tile.column + 8 * (lane % 4)
        comptime for half in range(2):
            var at = row + UInt32(8 * half)
            var first = Int(tile.begin + at) * self.product.n + Int(column)
            comptime for block in range(Int(BN) // 32):
                var v = adjacent[False, block, half](sums)
                if at < tile.n_rows:
                    self.product.y.unsafe_store[alignment=16](
                        first + 32 * block, v.cast[DType.bfloat16]()
                    )

    @always_inline
    def _store_quantized(self, tile: BlockTile, row: UInt32, sums: Sums[Int(BN)]):
        """Stores SwiGLU of the thread's two rows, 128 columns with one scale."""
        comptime n_blocks = Int(BN) // 32
        var n = self.product.n // 2
        var lane = UInt32(thread_idx.x) % UInt32(WARP_SIZE)
        var first = tile.column // 2
        var y = self.product.y.unsafe_bitcast[Scalar[FP8]]()
        var y_scales = self.y_scales.unsafe_offset(
            Int(first) // BLOCK * self.product.n_rows
        )
        comptime for half in range(2):
            var at = row + UInt32(8 * half)
            var values = Array[SIMD[DType.float32, 4], n_blocks](fill=0)
            var amax = FP8_MIN_AMAX
            comptime for block in range(n_blocks):
                values[block] = adjacent[True, block, half](sums)
                amax = max(amax, abs(values[block]).reduce_max())
            # The other columns are in the next three lanes.
            amax = max(amax, warp.shuffle_xor(amax, 1))
            amax = max(amax, warp.shuffle_xor(amax, 2))
            if at < tile.n_rows:
                var to = Int(tile.begin + at)
                var column = first + 4 * (lane % 4)
                comptime for block in range(n_blocks):
                    var v = (values[block] * (FP8_MAX / amax)).cast[FP8]()
                    y.unsafe_store[alignment=4](to * n + Int(column) + 16 * block, v)
                if lane % 4 == 0:
                    y_scales[unsafe_offset=to] = amax / FP8_MAX


def _check_scales(
    op: StaticString,
    x: InputTensor[dtype=FP8, rank=2, ...],
    x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
) raises:
    var n_rows, k = x.dim_size(0), x.dim_size(1)
    if x_scales.dim_size(0) * BLOCK != k or x_scales.dim_size(1) != n_rows:
        raise Error(
            t"max_ep: {op}: rows [{n_rows}, {k}] need scales [{k // BLOCK}, {n_rows}];"
            t" given [{x_scales.dim_size(0)}, {x_scales.dim_size(1)}]"
        )


@extensibility.register("max_ep.grouped_matmul_fp8")
struct GroupedMatmulFp8:
    """Multiplies each expert's rows with the transpose of its weight.

    As `grouped_matmul`, with a scale for each 128 elements of a row, `[k / 128,
    n_rows]`, and for each 128 x 128 of a weight, `[n_experts, n / 128, k / 128]`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=FP8, rank=2, ...],
        x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
        weights: InputTensor[dtype=FP8, rank=3, ...],
        weight_scales: InputTensor[dtype=DType.float32, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime op = "grouped_matmul_fp8"
        _check_scales(op, x, x_scales)
        var product = ScaledProduct[swiglu_=False](
            product_of[DType.bfloat16](y, x, weights, row_offsets, expert_ids),
            {unsafe_from_address = Int(x_scales.unsafe_ptr())},
            {unsafe_from_address = Int(weight_scales.unsafe_ptr())},
            # Not written without SwiGLU; a pointer is never null.
            {unsafe_from_address = Int(y.unsafe_ptr())},
        )
        launch_only_on_hopper(op, product, ctx)


@extensibility.register("max_ep.grouped_gate_up_fp8")
struct GroupedGateUpFp8:
    """Computes `silu(x @ gate.T) * (x @ up.T)` of each expert's rows, quantized again.

    `y_scales` is `[n / 256, n_rows]`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=FP8, rank=2, ...],
        y_scales: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=FP8, rank=2, ...],
        x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
        weights: InputTensor[dtype=FP8, rank=3, ...],
        weight_scales: InputTensor[dtype=DType.float32, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime op = "grouped_gate_up_fp8"
        _check_scales(op, x, x_scales)
        var product = ScaledProduct[swiglu_=True](
            product_of[DType.bfloat16](y, x, weights, row_offsets, expert_ids),
            {unsafe_from_address = Int(x_scales.unsafe_ptr())},
            {unsafe_from_address = Int(weight_scales.unsafe_ptr())},
            {unsafe_from_address = Int(y_scales.unsafe_ptr())},
        )
        launch_only_on_hopper(op, product, ctx)
