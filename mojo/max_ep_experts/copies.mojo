# SPDX-License-Identifier: Apache-2.0
"""How rows and weights get into a stage: tensor maps, and copies of boxes.

The map of weights permutes them, so that a lane gets adjacent columns of the result. The
row in a box of 128

    64 * i + 16 * w + 8 * h + q

is of column `32 * w + 4 * q + 2 * i + h`, with SwiGLU of column `16 * w + 2 * q + i` of
gate, `h = 0`, or of up. In bfloat16 a lane of warp `w` has one `q`, in FP8 two adjacent
ones of each `w`.
"""
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    create_tma_descriptor,
    TensorMapL2Promotion,
    TensorMapSwizzle,
    TMADescriptor,
)
from max.gpu.memory import (
    cp_async_bulk_tensor_shared_cluster_global,
    cp_async_bulk_tensor_shared_cluster_global_multicast,
)
from std.math import ceildiv
from std.sys import inlined_assembly
from std.utils import IndexList, StaticTuple

from .groups import Smem
from .product import Bf16In, Bf16Out, GroupedProduct
from .ring import Ring, ROW_BYTES
from .tile import K_STEP
from .tiles import BlockTile, BM, BN

comptime SWIZZLE = TensorMapSwizzle.SWIZZLE_128B
comptime BOX: UInt32 = 128
"""Rows of a weight that are copied together."""
comptime WARPS = 4
"""Warps of a warpgroup."""
comptime _ROWS: UInt32 = 32
"""Rows of `x` that are copied at once."""
comptime _BOTH = UInt16(3)
"""The blocks of a cluster."""


def _map[
    rank: Int, //
](
    address: Int,
    shape: IndexList[rank],
    strides: IndexList[rank],
    box: IndexList[rank],
    context: DeviceContext,
) raises -> TMADescriptor:
    """Makes a tensor map; the last dimension is contiguous. L2 loads 256 bytes."""
    var buffer = DeviceBuffer[DType.bfloat16](
        context, Bf16Out(unsafe_from_address=address), 1, owning=False
    )
    return create_tma_descriptor[
        DType.bfloat16, rank, SWIZZLE, TensorMapL2Promotion.L2_256B
    ](buffer, shape, strides, box)


def map_of_rows(
    product: GroupedProduct[DType.bfloat16], n_rows: Int, context: DeviceContext
) raises -> TMADescriptor:
    """Makes the map of `x` of so many rows, with coordinates `(k, row)`."""
    return _map(
        Int(product.x),
        IndexList[2](n_rows, product.k),
        IndexList[2](product.k, 1),
        IndexList[2](Int(_ROWS), K_STEP),
        context,
    )


def map_of_weights[
    swiglu: Bool
](
    product: GroupedProduct[DType.bfloat16], context: DeviceContext
) raises -> TMADescriptor:
    """Makes the map of weights, with coordinates `(k, 0, 2 * i, w)`.

    `w` counts the warps' parts of all experts' rows. With SwiGLU the coordinates are
    `(k, 0, 0, w)`, where `k` goes on in the next row, that of `i = 1`.
    """
    var n_rows, k = product.n_experts * product.n, product.k
    # Up is n / 2 rows behind gate; the last expert's has no other behind it.
    var up = product.n // 2
    var n_warps = (n_rows - up) // 16 if swiglu else n_rows // 32
    var shape = IndexList[4](n_warps, 4, 8, k)
    var strides = IndexList[4](32 * k, k, 4 * k, 1)
    comptime if swiglu:
        shape = IndexList[4](n_warps, 2, 8, 2 * k)
        strides = IndexList[4](16 * k, up * k, 2 * k, 1)
    var box = IndexList[4](WARPS, 2, 8, K_STEP)
    return _map(Int(product.weights), shape, strides, box, context)


@always_inline
def _copy[
    rank: Int, //, to_both: Bool
](source: TMADescriptor, at: StaticTuple[UInt32, rank], ring: Ring, to: Smem[BFloat16]):
    """Starts the copy of a box into the stage, in one or both blocks."""
    var map = Pointer(to=source).unsafe_bitcast[NoneType]()
    var coordinates = IndexList[rank]()
    comptime for i in range(rank):
        coordinates[i] = Int(at[i])
    comptime if to_both:
        cp_async_bulk_tensor_shared_cluster_global_multicast(
            to, map, ring.full(), coordinates, _BOTH
        )
    else:
        cp_async_bulk_tensor_shared_cluster_global(to, map, ring.full(), coordinates)


@always_inline
def load_stage[
    swiglu: Bool, gathers: Bool
](
    x: TMADescriptor,
    weights: TMADescriptor,
    ring: Ring,
    tile: BlockTile,
    first: UInt32,
    row: UInt32,
    k: UInt32,
    rank: UInt32,
):
    """Starts the copies of a stage; of what both blocks have each copies half.

    With `gathers` no rows: other warps copy them. `first` is the first warp's part of the
    weights' rows, `row` the elements of a row, `rank` this block.
    """
    var n_boxes = UInt32(0) if gathers else ceildiv(tile.n_rows, _ROWS)
    ring.full()[].expect_bytes(
        Int32(n_boxes * _ROWS + tile.n_columns) * Int32(ROW_BYTES)
    )

    @always_inline
    def copy_weights[to_both: Bool](i: UInt32) {imm}:
        comptime for part in range(2):
            var at = StaticTuple[UInt32, 4](k, 0, 0, first + i * UInt32(WARPS))
            at[0 if swiglu else 2] += UInt32(part) * (row if swiglu else 2)
            var to = BM + i * BOX + UInt32(part) * BOX // 2
            _copy[to_both](weights, at, ring, ring.rows(to))

    @always_inline
    def copy_rows[to_both: Bool](i: UInt32) {imm}:
        var at = StaticTuple[UInt32, 2](k, tile.begin + i * _ROWS)
        _copy[to_both](x, at, ring, ring.rows(i * _ROWS))

    if tile.shares_weight:
        copy_weights[True](rank)
        for i in range(n_boxes):
            copy_rows[False](i)
    else:
        copy_weights[False](0)
        if tile.n_columns == BN:
            copy_weights[False](1)
        for i in range(rank, n_boxes, 2):
            copy_rows[True](i)


@always_inline
def gather_16(to: UInt32, source: Bf16In):
    """Starts a copy of 16 bytes to an address in shared memory, past L1."""
    # ORDER: none of its own; `arrive_when_gathered` of the same thread releases it.
    inlined_assembly[
        "cp.async.cg.shared.global [$0], [$1], 16;",
        NoneType,
        constraints="r,l,~{memory}",
        has_side_effect=True,
    ](to, source)


@always_inline
def arrive_when_gathered(ring: Ring):
    """Lets this thread's copies arrive at the stage's barrier when they are done."""
    # ORDER: the arrival is a RELEASE of the copies, block scope; it is one of those that
    # the barrier counts. Pairs with the ACQUIRE of the wait in `Ring.await_full`.
    inlined_assembly[
        "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];",
        NoneType,
        constraints="r,~{memory}",
        has_side_effect=True,
    ](UInt32(Int(ring.full())))


@always_inline
def fence_gathered():
    """Makes gathered rows visible to `wgmma`, behind `Ring.await_full`."""
    # ORDER: `cp.async` writes through the generic proxy, `wgmma` reads through the async
    # proxy. The wait has ordered the copies before this thread, this fence orders them
    # before its `wgmma`. The other way needs none: that `wgmma` is done is a fence of both
    # proxies, and comes before the arrival that lets the next copies begin.
    inlined_assembly[
        "fence.proxy.async.shared::cta;",
        NoneType,
        constraints="~{memory}",
        has_side_effect=True,
    ]()
