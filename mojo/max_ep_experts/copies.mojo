# SPDX-License-Identifier: Apache-2.0
"""How rows and weights get into a stage: tensor maps, and copies of boxes.

Of every 8 rows of a box of weights, `wgmma` gives each of the four lanes of a row of the
result two adjacent ones. The map of weights permutes them. Of a column `8 * e + 2 * i + j`
of the box, `j < 2`, with SwiGLU of gate and up, `j = 0` and `1`, of a column `8 * e + i`,
the row in the box is

    i * 2 * n_eights + 2 * e + j

So lane `e % 4` has all 8 columns of eight `e`.
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
from std.utils import IndexList, StaticTuple

from .groups import Smem
from .product import Bf16Out, GroupedProduct
from .ring import Ring, ROW_BYTES
from .tile import K_STEP
from .tiles import BlockTile, BM, BN

comptime SWIZZLE = TensorMapSwizzle.SWIZZLE_128B
comptime BOX: UInt32 = 128
"""Rows of a weight that are copied at once."""
comptime HALF: UInt32 = 64
"""Rows of `x` that are copied at once, those of a warpgroup."""
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
    product: GroupedProduct[DType.bfloat16], context: DeviceContext
) raises -> TMADescriptor:
    """Makes the map of `x`, with coordinates `(k, row)`."""
    return _map(
        Int(product.x),
        IndexList[2](product.n_rows, product.k),
        IndexList[2](product.k, 1),
        IndexList[2](Int(HALF), K_STEP),
        context,
    )


def map_of_weights[
    swiglu: Bool
](
    product: GroupedProduct[DType.bfloat16], context: DeviceContext
) raises -> TMADescriptor:
    """Makes the map of weights, with coordinates `(k, 0, eight, 0)`.

    An eight is 8 columns of the result.
    """
    var n, k = product.n, product.k
    var n_eights = product.n_experts * n // 8
    comptime if swiglu:
        # Up is n / 2 rows behind gate; the last expert's has no other behind it.
        return _map(
            Int(product.weights),
            IndexList[4](8, n_eights - n // 16, 2, k),
            IndexList[4](k, 8 * k, n // 2 * k, 1),
            IndexList[4](8, 8, 2, K_STEP),
            context,
        )
    return _map(
        Int(product.weights),
        IndexList[4](4, n_eights, 2, k),
        IndexList[4](2 * k, 8 * k, k, 1),
        IndexList[4](4, 16, 2, K_STEP),
        context,
    )


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
    eights_of_box: UInt32
](
    x: TMADescriptor,
    weights: TMADescriptor,
    ring: Ring,
    tile: BlockTile,
    eight: UInt32,
    k: UInt32,
    rank: UInt32,
):
    """Starts the copies of a stage; of what both blocks have each copies half.

    Parameters:
        eights_of_box: Eights that are copied at once.

    Args:
        x: The map of `x`.
        weights: The map of weights.
        ring: At the stage.
        tile: The block's tile.
        eight: Its first 8 columns of the result, counted from the first expert.
        k: First element.
        rank: This block.
    """
    var n_rows = HALF if tile.n_rows <= HALF else BM
    ring.full()[].expect_bytes(Int32(n_rows + tile.n_columns) * Int32(ROW_BYTES))

    @always_inline
    def copy_weights[to_both: Bool](i: UInt32) {imm}:
        var at = StaticTuple[UInt32, 4](k, 0, eight + i * eights_of_box, 0)
        _copy[to_both](weights, at, ring, ring.rows(BM + i * BOX))

    @always_inline
    def copy_rows[to_both: Bool](i: UInt32) {imm}:
        var at = StaticTuple[UInt32, 2](k, tile.begin + i * HALF)
        _copy[to_both](x, at, ring, ring.rows(i * HALF))

    if tile.shares_weight:
        copy_weights[True](rank)
        copy_rows[False](0)
        if n_rows == BM:
            copy_rows[False](1)
    else:
        copy_weights[False](0)
        if tile.n_columns == BN:
            copy_weights[False](1)
        if n_rows == BM or rank == 0:
            copy_rows[True](rank)
