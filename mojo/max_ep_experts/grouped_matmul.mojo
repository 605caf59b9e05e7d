# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for GPUs, for sizes that `hopper.mojo` does not take."""

from max.gpu import WARP_SIZE, barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext
from std.math import ceildiv

from .groups import add_up, count, group_of, shared
from .product import GroupedProduct
from .tile import CHUNK, COLUMNS, K_STEP, TOKENS, Tile

comptime _N_WARPS = 4
comptime _BLOCKS_PER_SM = 3
"""Blocks of a multiprocessor that the registers allow."""
comptime MAX_GROUPS = 3840
"""Groups whose counts fit in shared memory."""


def grouped_matmul_kernel[swiglu: Bool](product: GroupedProduct[DType.bfloat16]):
    """Multiplies each group's tokens with the transpose of its weights.

    Only the device knows the rows of each group, so the grid fills the GPU once. Each
    warp takes 16 rows of a weight and a chunk of up to 64 tokens, then the next such
    tile.

    Launch: grid any, block of `_N_WARPS` warps; `n` a multiple of `COLUMNS`, `k` of
    `K_STEP`, up to `MAX_GROUPS` groups.
    """
    var before = shared[UInt32, MAX_GROUPS + 1]()

    @always_inline
    def chunks_of(n_rows: UInt32) -> UInt32:
        return ceildiv(n_rows, UInt32(CHUNK))

    # The compiler leaves out what is for one group.
    var groups = product
    groups.one_group = 0
    count(groups, before, chunks_of)
    barrier()
    var warp_idx = Int(thread_idx.x) // WARP_SIZE
    if warp_idx == 0:
        add_up(before, product.n_groups)
    barrier()

    @always_inline
    def chunks_before(group: Int) {imm} -> UInt32:
        return before[unsafe_offset=group]

    var n, k = product.n, product.k
    var n_columns = n // COLUMNS
    var n_tiles = Int(before[unsafe_offset=product.n_groups]) * n_columns
    for i in range(
        Int(block_idx.x) * _N_WARPS + warp_idx, n_tiles, Int(grid_dim.x) * _N_WARPS
    ):
        var chunk, column = divmod(i, n_columns)
        var group = group_of(UInt32(chunk), product.n_groups, chunks_before)
        var first = (chunk - Int(chunks_before(group))) * CHUNK
        var begin = Int(groups.begin(group)) + first
        var end = begin + min(Int(groups.size(group)) - first, CHUNK)
        var expert = Int(product.expert_ids[unsafe_offset=group])
        comptime width = 2 if swiglu else 1
        var tile = Tile[swiglu](
            product.y,
            product.x,
            product.weights.unsafe_offset(expert * n * k),
            begin,
            end,
            column * COLUMNS // width,
            n // width,
            k,
        )
        # With few tokens, many loads of weights in flight decide the speed.
        if end - begin > 4 * TOKENS:
            tile.multiply[CHUNK // TOKENS, 2]()
        elif end - begin > TOKENS:
            tile.multiply[4, 2]()
        elif k % (4 * K_STEP) == 0:
            tile.multiply[1, 8]()
        else:
            tile.multiply[1, 2]()


def launch_grouped_matmul[
    swiglu: Bool
](product: GroupedProduct[DType.bfloat16], context: DeviceContext) raises:
    if product.n_groups > MAX_GROUPS:
        raise Error(
            t"max_ep: grouped_matmul on GPUs takes up to {MAX_GROUPS} experts;"
            t" given {product.n_groups}"
        )
    if product.n_groups == 0:
        return
    var function = context.compile_function[grouped_matmul_kernel[swiglu]]()
    context.enqueue_function(
        function,
        product,
        grid_dim=_BLOCKS_PER_SM
        * context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
        block_dim=_N_WARPS * WARP_SIZE,
    )
