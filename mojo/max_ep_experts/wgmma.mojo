# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for Hopper.

In a block one thread finds the tiles; one, the producer, copies 64 elements of k at a time
into a ring of stages in shared memory; two warpgroups, the consumers, multiply 64 rows
each. Blocks are in clusters of two, which share rows or weights: one copy goes to both.
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
from std.utils import StaticTuple

from .copies import HALF, load_stage, map_of_rows, map_of_weights, SWIZZLE
from .groups import add_up, count, Smem
from .product import Bf16Out, GroupedProduct
from .ring import MAX_GROUPS, NextTile, Ring, RING_BYTES
from .tile import K_STEP, silu
from .tiles import BlockTile, BM, BN, n_odd, n_pairs, Schedule

comptime WARPGROUP = 128
comptime N_THREADS = 3 * WARPGROUP
comptime Sums[columns: Int] = StaticTuple[Float32, columns // 2]
"""A thread's part of 64 rows: of each of two rows, two adjacent columns of every 8."""


@always_inline
def _descriptor(p: Smem[BFloat16]) -> WGMMADescriptor[DType.bfloat16]:
    """Describes rows of 128 swizzled bytes, 8 of them 1024 (64 * 16) from the next 8.
    """
    return WGMMADescriptor[DType.bfloat16].create[64, 1, SWIZZLE](p)


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
        var a = _descriptor(ring.rows(warpgroup * HALF))
        var b = _descriptor(ring.rows(BM))
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
def skip_tile(mut ring: Ring, n_steps: UInt32):
    """Goes on to the next tile where a warpgroup has no rows."""
    for _ in range(n_steps):
        ring.await_full()
        ring.release(ring.stage)
        ring.step()


@always_inline
def eight_columns[
    columns: Int, swiglu: Bool, block: Int, half: Int
](sums: Sums[columns]) -> SIMD[DType.float32, 8]:
    """Returns 8 adjacent columns of the block-th 32 that four lanes have.

    `half` is which of the lane's two rows. The order is that of `copies.mojo`.
    """
    comptime blocks_of_box = 2 if swiglu else 4
    comptime box, at = divmod(block, blocks_of_box)
    var v = SIMD[DType.float32, 8](0)
    comptime for i in range(8 if swiglu else 4):
        comptime first = 4 * (16 * box + i * blocks_of_box + at) + 2 * half
        comptime if swiglu:
            v[i] = silu(sums[first]) * sums[first + 1]
        else:
            v[2 * i] = sums[first]
            v[2 * i + 1] = sums[first + 1]
    return v


@always_inline
def _store[
    columns: Int, swiglu: Bool
](y: Bf16Out, n: Int, tile: BlockTile, warpgroup: UInt32, sums: Sums[columns]):
    """Stores a warpgroup's rows, which are `n` elements apart, 16 bytes at a time."""
    comptime width: UInt32 = 2 if swiglu else 1
    var thread = UInt32(thread_idx.x) % UInt32(WARPGROUP)
    var warp, lane = divmod(thread, UInt32(WARP_SIZE))
    var column = tile.column // width + 8 * (lane % 4)
    comptime for half in range(2):
        var row = warpgroup * HALF + 16 * warp + lane // 4 + UInt32(8 * half)
        var to = y.unsafe_offset(Int(tile.begin + row) * n + Int(column))
        comptime for block in range(columns // Int(32 * width)):
            var v = eight_columns[columns, swiglu, block, half](sums)
            if row < tile.n_rows:
                to.unsafe_store[alignment=16](32 * block, v.cast[DType.bfloat16]())


@always_inline
def find_tiles(var schedule: Schedule, var next: NextTile, rank: UInt32):
    """Finds the tiles, with one thread, each while the one before is loaded."""
    while True:
        var tile = schedule.next(rank)
        next.give(tile)
        if tile.n_rows == 0:
            return


@always_inline
def load_tiles[
    swiglu: Bool
](
    x: TMADescriptor,
    weights: TMADescriptor,
    product: GroupedProduct[DType.bfloat16],
    var ring: Ring,
    rank: UInt32,
):
    """Loads the stages of each tile, with one thread."""
    comptime width: UInt32 = 2 if swiglu else 1
    var n_steps = UInt32(product.k // K_STEP)
    var next = ring.next_tile()
    while True:
        var tile = next.take()
        var eight = tile.expert * UInt32(product.n // 8) + tile.column // (8 * width)
        ring.await_empty()
        ring.tile()[] = tile
        if tile.n_rows == 0:
            _ = ring.full()[].arrive()
            return
        for step in range(n_steps):
            ring.await_empty()
            var k = step * UInt32(K_STEP)
            load_stage[16 // width](x, weights, ring, tile, eight, k, rank)
            ring.step()


@always_inline
def _consume[
    swiglu: Bool
](product: GroupedProduct[DType.bfloat16], var ring: Ring, warpgroup: UInt32):
    """Computes a warpgroup's rows of each tile."""
    var n_steps = UInt32(product.k // K_STEP)
    var n = product.n // 2 if swiglu else product.n
    while True:
        ring.await_full()
        var tile = ring.tile()[]
        if tile.n_rows == 0:
            return
        if warpgroup * HALF >= tile.n_rows:
            skip_tile(ring, n_steps)
        elif tile.n_columns == BN:
            var sums = _multiply[Int(BN)](ring, warpgroup, n_steps)
            _store[Int(BN), swiglu](product.y, n, tile, warpgroup, sums)
        else:
            var sums = _multiply[Int(BN) // 2](ring, warpgroup, n_steps)
            _store[Int(BN) // 2, swiglu](product.y, n, tile, warpgroup, sums)


@always_inline
def count_tiles(product: GroupedProduct[DType.bfloat16], ring: Ring):
    """Counts pairs and odd chunks before each group, with the block."""

    @always_inline
    def pairs(n_rows: UInt32) -> UInt32:
        return n_pairs(n_rows)

    @always_inline
    def odds(n_rows: UInt32) -> UInt32:
        return n_odd(n_rows)

    count(product, ring.table(0), pairs)
    count(product, ring.table(1), odds)
    barrier()
    var warp = Int(thread_idx.x) // WARP_SIZE
    if warp < 2:
        add_up(ring.table(warp), product.n_groups)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](N_THREADS),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](2, 1, 1),
)
@__llvm_arg_metadata(x, `nvvm.grid_constant`)
@__llvm_arg_metadata(weights, `nvvm.grid_constant`)
def wgmma_kernel[
    swiglu: Bool
](x: TMADescriptor, weights: TMADescriptor, product: GroupedProduct[DType.bfloat16]):
    """Multiplies each group's rows with the transpose of its weight.

    Only the device knows the rows of each group, so the grid fills the GPU once.

    Launch: an even grid, clusters of two, `N_THREADS` threads, `RING_BYTES`.

    Args:
        x: The map of the product's `x`.
        weights: The map of its weights.
        product: What `fits`.
    """
    var ring = Ring.at(
        external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    )
    var thread = Int(thread_idx.x)
    var rank = UInt32(block_rank_in_cluster())
    if thread == 0:
        ring.initialize()
    count_tiles(product, ring)
    cluster_sync()
    if thread < WARPGROUP:
        warpgroup_reg_dealloc[40]()
        if thread == 0:
            load_tiles[swiglu](x, weights, product, ring, rank)
        elif thread == WARP_SIZE:
            var schedule = Schedule(
                product,
                ring.table(0),
                ring.table(1),
                UInt32(block_idx.x) // 2,
                UInt32(grid_dim.x) // 2,
            )
            find_tiles(schedule^, ring.next_tile(), rank)
    else:
        warpgroup_reg_alloc[232]()
        _consume[swiglu](product, ring, UInt32(thread // WARPGROUP - 1))
    # Nobody leaves while the other block may still write or arrive here.
    syncwarp()
    cluster_sync()


def fits(product: GroupedProduct[DType.bfloat16]) -> Bool:
    """Returns whether the kernel takes a product."""
    return (
        product.n % Int(BN) == 0
        and product.k % K_STEP == 0
        and Int(product.y) % 16 == 0
        and 0 < product.n_groups <= MAX_GROUPS
        and product.n_rows > 0
    )


def launch_wgmma[
    swiglu: Bool
](
    product: GroupedProduct[DType.bfloat16], context: DeviceContext, queue: DeviceStream
) raises:
    """Launches `wgmma_kernel`."""
    var n_clusters = context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT) // 2
    var function = context.compile_function[wgmma_kernel[swiglu]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(RING_BYTES))
    )
    queue.enqueue_function(
        function,
        map_of_rows(product, context),
        map_of_weights[swiglu](product, context),
        product,
        grid_dim=2 * n_clusters,
        block_dim=N_THREADS,
        cluster_dim=Dim(2, 1, 1),
        shared_mem_bytes=RING_BYTES,
    )
