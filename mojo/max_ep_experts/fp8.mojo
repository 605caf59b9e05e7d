# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for Hopper in blockwise FP8, on the tiles and copies of `wgmma`.

A row has a scale for each 128 elements of k, a weight for each 128 x 128. That is what a
stage holds, so the product of a stage is scaled when it is added up, in float32.

Copies move bytes: to them two FP8 elements are one bfloat16. With SwiGLU the result is
quantized like a dispatched token, and is the next product's `x`.
"""
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    barrier,
    block_idx,
    block_rank_in_cluster,
    cluster_sync,
    grid_dim,
    syncwarp,
    thread_idx,
)
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream, Dim
from max.gpu.host import FuncAttribute
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory
from max.gpu.primitives import warp
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils import StaticTuple

from .copies import BOX, HALF, map_of_rows, map_of_weights, SWIZZLE
from .product import GroupedProduct, In, Out
from .ring import MAX_GROUPS, Ring, RING_BYTES
from .tile import K_STEP
from .tiles import BlockTile, BM, BN, Schedule
from .wgmma import (
    N_THREADS,
    WARPGROUP,
    count_tiles,
    eight_columns,
    find_tiles,
    load_tiles,
    skip_tile,
    Sums,
)

comptime FP8 = DType.float8_e4m3fn
comptime BLOCK = 128
"""Elements of a scale, in rows and in both directions of weights."""
comptime FP8_MAX = Float32(448)
comptime FP8_MIN_AMAX = Float32(1e-4)
"""As in the format `blockwise_fp8`."""


@fieldwise_init
struct ScaledProduct(DevicePassable, TrivialRegisterPassable):
    """A product of FP8 rows and weights, with their scales."""

    var product: GroupedProduct[DType.bfloat16]
    """What is multiplied, as bytes: `k` is half of the elements of a row. `y` is
    bfloat16; with SwiGLU it is FP8, `[n_rows][n / 2]`."""
    var x_scales: In[DType.float32]
    """`[k / 128][n_rows]`."""
    var weight_scales: In[DType.float32]
    """`[n_experts][n / 128][k / 128]`."""
    var y_scales: Out[DType.float32]
    """With SwiGLU `[n / 256][n_rows]`."""

    comptime device_type: AnyType = Self
    """What a kernel gets: the same bytes."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in MAX's errors about kernel arguments."""
        return "max_ep_experts.ScaledProduct"

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
def _descriptor(ring: Ring, row: UInt32) -> WGMMADescriptor[FP8]:
    """Describes rows of 128 swizzled bytes, as in `wgmma`."""
    return WGMMADescriptor[FP8].create[64, 1, SWIZZLE](
        ring.rows(row).unsafe_bitcast[Scalar[FP8]]()
    )


@always_inline
def _multiply[
    swiglu: Bool
](
    scaled: ScaledProduct,
    mut ring: Ring,
    tile: BlockTile,
    warpgroup: UInt32,
    row: UInt32,
) -> Sums[Int(BN)]:
    """Multiplies a warpgroup's rows with `BN` columns, along k.

    The thread has rows `row` and `row + 8` of the tile. Of 128 rows of a weight those
    with SwiGLU are 64 of gate and 64 of up, in turn.
    """
    comptime n_boxes = Int(BN // BOX)
    comptime k_of_one = 32
    # The scales behind the last row may be those of another group, or none.
    var upper = tile.begin + min(row, tile.n_rows - 1)
    var lower = tile.begin + min(row + 8, tile.n_rows - 1)
    var column = tile.column // 2 if swiglu else tile.column
    var first = scaled.scales_of(tile.expert, column)
    # The second is of up, or of the second box.
    var more = UInt32(scaled.product.n // 2) if swiglu else BOX
    var second = scaled.scales_of(tile.expert, column + more)
    var sums = Sums[Int(BN)](fill=0)
    var next = scaled.of_rows(0, upper, lower)
    for step in range(scaled.n_steps()):
        # Those of rows come from L2, so they are loaded a step before.
        var of_rows = next
        next = scaled.of_rows(min(step + 1, scaled.n_steps() - 1), upper, lower)
        var of_columns = SIMD[DType.float32, 2](
            scaled.weight_scales[unsafe_offset=Int(first) + step],
            scaled.weight_scales[unsafe_offset=Int(second) + step],
        )
        ring.await_full()
        comptime for box in range(n_boxes):
            var a = _descriptor(ring, warpgroup * HALF)
            var b = _descriptor(ring, BM + UInt32(box) * BOX)
            var products = Sums[Int(BOX)](fill=0)
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
                comptime at = i % 2 if swiglu else box
                comptime to = box * Int(BOX) // 2 + i
                var factor = of_rows[i // 2 % 2] * of_columns[at]
                sums[to] = sums[to] + products[i] * factor
        ring.step()
    return sums


@always_inline
def _store(
    product: GroupedProduct[DType.bfloat16],
    tile: BlockTile,
    row: UInt32,
    sums: Sums[Int(BN)],
):
    """Stores the thread's two rows, 16 bytes at a time."""
    var lane = UInt32(thread_idx.x) % UInt32(WARP_SIZE)
    var column = tile.column + 8 * (lane % 4)
    comptime for half in range(2):
        var at = row + UInt32(8 * half)
        var first = Int(tile.begin + at) * product.n + Int(column)
        comptime for block in range(Int(BN) // 32):
            var v = eight_columns[Int(BN), False, block, half](sums)
            if at < tile.n_rows:
                product.y.unsafe_store[alignment=16](
                    first + 32 * block, v.cast[DType.bfloat16]()
                )


@always_inline
def _store_quantized(
    scaled: ScaledProduct, tile: BlockTile, row: UInt32, sums: Sums[Int(BN)]
):
    """Stores SwiGLU of the thread's two rows, 128 columns with one scale."""
    comptime n_blocks = Int(BN) // 64
    var n = scaled.product.n // 2
    var lane = UInt32(thread_idx.x) % UInt32(WARP_SIZE)
    var first = tile.column // 2
    var y = scaled.product.y.unsafe_bitcast[Scalar[FP8]]()
    var y_scales = scaled.y_scales.unsafe_offset(
        Int(first) // BLOCK * scaled.product.n_rows
    )
    comptime for half in range(2):
        var at = row + UInt32(8 * half)
        var values = Array[SIMD[DType.float32, 8], n_blocks](fill=0)
        var amax = FP8_MIN_AMAX
        comptime for block in range(n_blocks):
            values[block] = eight_columns[Int(BN), True, block, half](sums)
            amax = max(amax, abs(values[block]).reduce_max())
        # The other columns are in the next three lanes.
        amax = max(amax, warp.shuffle_xor(amax, 1))
        amax = max(amax, warp.shuffle_xor(amax, 2))
        if at < tile.n_rows:
            var to = Int(tile.begin + at)
            var column = first + 8 * (lane % 4)
            comptime for block in range(n_blocks):
                var v = (values[block] * (FP8_MAX / amax)).cast[FP8]()
                y.unsafe_store[alignment=8](to * n + Int(column) + 32 * block, v)
            if lane % 4 == 0:
                y_scales[unsafe_offset=to] = amax / FP8_MAX


@always_inline
def _consume[swiglu: Bool](scaled: ScaledProduct, var ring: Ring, warpgroup: UInt32):
    """Computes a warpgroup's rows of each tile."""
    var thread = UInt32(thread_idx.x) % UInt32(WARPGROUP)
    var in_warp, lane = divmod(thread, UInt32(WARP_SIZE))
    var row = warpgroup * HALF + 16 * in_warp + lane // 4
    while True:
        ring.await_full()
        var tile = ring.tile()[]
        if tile.n_rows == 0:
            return
        if warpgroup * HALF >= tile.n_rows:
            skip_tile(ring, UInt32(scaled.n_steps()))
            continue
        var sums = _multiply[swiglu](scaled, ring, tile, warpgroup, row)
        comptime if swiglu:
            _store_quantized(scaled, tile, row, sums)
        else:
            _store(scaled.product, tile, row, sums)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](N_THREADS),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](2, 1, 1),
)
@__llvm_arg_metadata(x, `nvvm.grid_constant`)
@__llvm_arg_metadata(weights, `nvvm.grid_constant`)
def fp8_kernel[
    swiglu: Bool
](x: TMADescriptor, weights: TMADescriptor, scaled: ScaledProduct):
    """Multiplies each group's rows with the transpose of its weight.

    Launch: as `wgmma_kernel`.

    Args:
        x: The map of the product's `x`.
        weights: The map of its weights.
        scaled: What `fits_fp8`.
    """
    var ring = Ring.at(
        external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    )
    var thread = Int(thread_idx.x)
    var rank = UInt32(block_rank_in_cluster())
    if thread == 0:
        ring.initialize()
    count_tiles(scaled.product, ring)
    cluster_sync()
    if thread < WARPGROUP:
        warpgroup_reg_dealloc[40]()
        if thread == 0:
            load_tiles[swiglu](x, weights, scaled.product, ring, rank)
        elif thread == WARP_SIZE:
            var schedule = Schedule(
                scaled.product,
                ring.table(0),
                ring.table(1),
                UInt32(block_idx.x) // 2,
                UInt32(grid_dim.x) // 2,
                # 128 results of SwiGLU have one scale.
                may_be_narrow=False,
            )
            find_tiles(schedule^, ring.next_tile(), rank)
    else:
        warpgroup_reg_alloc[232]()
        _consume[swiglu](scaled, ring, UInt32(thread // WARPGROUP - 1))
    # Nobody leaves while the other block may still write or arrive here.
    syncwarp()
    cluster_sync()


def fits_fp8(product: GroupedProduct[DType.bfloat16]) -> Bool:
    """Returns whether the kernel takes a product."""
    return (
        product.n % Int(BN) == 0
        and product.k % K_STEP == 0
        and product.n_groups <= MAX_GROUPS
    )


def launch_fp8[
    swiglu: Bool
](scaled: ScaledProduct, context: DeviceContext, queue: DeviceStream) raises:
    """Launches `fp8_kernel`.

    Raises:
        If the sizes do not fit the kernel, or the launch fails.
    """
    var product = scaled.product
    if not fits_fp8(product):
        raise Error(
            t"max_ep: FP8 matmuls of experts take n in multiples of {BN} and k of"
            t" {BLOCK}, up to {MAX_GROUPS} experts; given n={product.n},"
            t" k={2 * product.k} and {product.n_groups} experts"
        )
    if product.n_groups == 0 or product.n_rows == 0:
        return
    var n_clusters = context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT) // 2
    var function = context.compile_function[fp8_kernel[swiglu]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(RING_BYTES))
    )
    queue.enqueue_function(
        function,
        map_of_rows(product, context),
        map_of_weights[swiglu](product, context),
        scaled,
        grid_dim=2 * n_clusters,
        block_dim=N_THREADS,
        cluster_dim=Dim(2, 1, 1),
        shared_mem_bytes=RING_BYTES,
    )
