# SPDX-License-Identifier: Apache-2.0
"""The kernel of matmuls of groups on Hopper, and its launch.

In a block one thread finds the tiles; one, the producer, copies 64 elements of k at a time
into a ring of stages in shared memory; two warpgroups, the consumers, multiply. Blocks are
in clusters of two, which share rows or weights: one copy goes to both.

What consumers compute is a `TileProduct`: in bfloat16 (`wgmma.mojo`), in FP8 (`fp8.mojo`).
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
from max.gpu.compute.mma import WGMMADescriptor
from max.gpu.host import DeviceAttribute, DeviceContext, Dim
from max.gpu.host import FuncAttribute
from max.gpu.host.nvidia.tma import TMADescriptor
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory
from std.sys.info import _accelerator_arch
from std.utils import StaticTuple

from .copies import load_stage, map_of_rows, map_of_weights, SWIZZLE
from .groups import add_up, count
from .product import GroupedProduct, KernelArgument
from .ring import MAX_GROUPS, NextTile, Ring, RING_BYTES
from .tile import K_STEP
from .tiles import BN, Chunks, Schedule

comptime WARPGROUP = 128
comptime _N_THREADS = 3 * WARPGROUP
comptime Sums[columns: Int] = StaticTuple[Float32, columns // 2]
"""A thread's part of 64 rows: of each of two rows, two adjacent columns of every 8."""


@always_inline
def warp_and_lane() -> Tuple[UInt32, UInt32]:
    """Returns the warp of the warpgroup, and the lane."""
    return divmod(UInt32(thread_idx.x) % UInt32(WARPGROUP), UInt32(WARP_SIZE))


trait TileProduct(KernelArgument):
    """A product, and how a warpgroup computes its rows."""

    comptime swiglu: Bool
    """Whether the result is SwiGLU of the product."""
    comptime chunks: Chunks
    """How rows are divided."""
    comptime may_be_narrow: Bool
    """Whether tiles may have half of the columns."""
    comptime n_gathering: Int = 0
    """Threads that copy rows in place of the producer."""

    def grouped(self) -> GroupedProduct[DType.bfloat16]:
        ...

    def n_rows_of_x(self) -> Int:
        return self.grouped().n_rows

    def consume(self, var ring: Ring, warpgroup: UInt32):
        """Computes a warpgroup's part of each tile."""
        ...

    @always_inline
    def gather(self, var ring: Ring, thread: UInt32):
        """Copies the rows of each tile, with one of `n_gathering` threads."""
        pass


@always_inline
def descriptor[dtype: DType](ring: Ring, row: UInt32) -> WGMMADescriptor[dtype]:
    """Describes rows of 128 swizzled bytes, 8 of them 1024 (64 * 16) from the next 8.
    """
    return WGMMADescriptor[dtype].create[64, 1, SWIZZLE](
        ring.rows(row).unsafe_bitcast[Scalar[dtype]]()
    )


@always_inline
def _find_tiles(var schedule: Schedule, var next: NextTile, rank: UInt32):
    """Finds the tiles, with one thread, each while the one before is loaded."""
    while True:
        var tile = schedule.next(rank)
        next.give(tile)
        if tile.n_rows == 0:
            return


@always_inline
def _load_tiles[
    swiglu: Bool, gathers: Bool
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
        var first = tile.expert * width * UInt32(product.n // 32) + tile.column // 32
        ring.await_empty()
        ring.tile()[] = tile
        if tile.n_rows == 0:
            # ORDER: RELEASE of the tile that ends; pairs with `await_full`.
            _ = ring.full()[].arrive()
            return
        for step in range(n_steps):
            ring.await_empty()
            var k = step * UInt32(K_STEP)
            load_stage[swiglu, gathers](
                x, weights, ring, tile, first, UInt32(product.k), k, rank
            )
            ring.step()


@always_inline
def _count_tiles[chunks: Chunks](product: GroupedProduct[DType.bfloat16], ring: Ring):
    """Counts pairs and odd chunks before each group, with the block."""

    @always_inline
    def pairs(n_rows: UInt32) -> UInt32:
        return chunks.n_pairs(n_rows)

    @always_inline
    def odds(n_rows: UInt32) -> UInt32:
        return chunks.n_odd(n_rows)

    count(product, ring.table(0), pairs)
    count(product, ring.table(1), odds)
    barrier()
    var warp = Int(thread_idx.x) // WARP_SIZE
    if warp < 2:
        add_up(ring.table(warp), product.n_groups)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](_N_THREADS),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](2, 1, 1),
)
@__llvm_arg_metadata(x, `nvvm.grid_constant`)
@__llvm_arg_metadata(weights, `nvvm.grid_constant`)
def hopper_kernel[P: TileProduct](x: TMADescriptor, weights: TMADescriptor, product: P):
    """Multiplies each group's rows with the transpose of its weight.

    Only the device knows the rows of each group, so the grid fills the GPU once.

    Launch: an even grid, clusters of two, `_N_THREADS` threads, `RING_BYTES`; `x` and
    `weights` are maps of the product's, which `fits`.
    """
    var ring = Ring.at(
        external_memory[UInt8, address_space=AddressSpace.SHARED, alignment=1024]()
    )
    var thread = Int(thread_idx.x)
    var rank = UInt32(block_rank_in_cluster())
    var grouped = product.grouped()
    if thread == 0:
        ring.initialize[P.n_gathering]()
    _count_tiles[P.chunks](grouped, ring)
    # ORDER: RELEASE and ACQUIRE in the cluster: tables and barriers of both blocks are there.
    cluster_sync()
    if thread < WARPGROUP:
        warpgroup_reg_dealloc[40]()
        if thread == 0:
            _load_tiles[P.swiglu, P.n_gathering > 0](x, weights, grouped, ring, rank)
        elif thread == WARP_SIZE:
            var schedule = Schedule(
                grouped,
                P.chunks,
                ring.table(0),
                ring.table(1),
                UInt32(block_idx.x) // 2,
                UInt32(grid_dim.x) // 2,
                P.may_be_narrow,
            )
            _find_tiles(schedule^, ring.next_tile(), rank)
        comptime if P.n_gathering > 0:
            comptime first = WARPGROUP - P.n_gathering
            if thread >= first:
                product.gather(ring, UInt32(thread - first))
    else:
        warpgroup_reg_alloc[232]()
        product.consume(ring, UInt32(thread // WARPGROUP - 1))
    # ORDER: nobody leaves while the other block may still write or arrive here.
    syncwarp()
    cluster_sync()


def is_hopper[arch: StaticString = _accelerator_arch()]() -> Bool:
    """Returns whether a GPU is a Hopper GPU: "sm_90a", in a graph "nvidia:sm_90a"."""
    return arch.endswith("sm_90a")


def fits(product: GroupedProduct[DType.bfloat16]) -> Bool:
    """Returns whether the kernel takes the sizes of a product, and where `y` is."""
    return (
        product.n % Int(BN) == 0
        and product.k % K_STEP == 0
        and product.n_groups <= MAX_GROUPS
        and Int(product.y) % 16 == 0
    )


def launch_on_hopper[P: TileProduct, //](product: P, context: DeviceContext) raises:
    """Launches `hopper_kernel`, unless there is nothing to do."""
    var grouped = product.grouped()
    if grouped.n_groups == 0 or grouped.n_rows == 0:
        return
    var n_clusters = context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT) // 2
    var function = context.compile_function[hopper_kernel[P]](
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(RING_BYTES))
    )
    context.enqueue_function(
        function,
        map_of_rows(grouped, product.n_rows_of_x(), context),
        map_of_weights[P.swiglu](grouped, context),
        product,
        grid_dim=2 * n_clusters,
        block_dim=_N_THREADS,
        cluster_dim=Dim(2, 1, 1),
        shared_mem_bytes=RING_BYTES,
    )


def launch_only_on_hopper[
    P: TileProduct, //
](op: StaticString, product: P, context: DeviceContext) raises:
    """Launches a product that has no other kernel."""
    comptime if is_hopper():
        var grouped = product.grouped()
        if not fits(grouped):
            raise Error(
                t"max_ep: {op} takes n in multiples of {BN} and k of"
                t" {2 * K_STEP} bytes, up to {MAX_GROUPS} experts, and results that are"
                t" aligned to 16 bytes; given n={grouped.n}, k of {2 * grouped.k} bytes"
                t" and {grouped.n_groups} experts"
            )
        launch_on_hopper(product, context)
    else:
        raise Error(t"max_ep: {op} is for Hopper")
