# SPDX-License-Identifier: Apache-2.0
"""A matmul of groups for GPUs, fast for few rows a group."""

from max.gpu import WARP_SIZE, barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext
from max.gpu.primitives import warp
from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from .product import Bf16In, Bf16Out, GroupedProduct, In
from .tile import CHUNK, COLUMNS, K_STEP, TOKENS, Tile, check_sizes

comptime _N_WARPS = 4
comptime _BLOCKS_PER_SM = 3
"""Blocks of a multiprocessor that the registers allow."""
comptime MAX_GROUPS = 3840
"""Groups that shared memory has room for."""


@always_inline
def _chunks_before(
    row_offsets: In[DType.uint32],
    expert_ids: In[DType.int32],
    n_groups: Int,
    n_rows: Int,
    n_experts: Int,
    before: Pointer[Int32, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
):
    """Counts the chunks of tokens before each group, with one warp.

    `before[n_groups]` is their number. Groups of an unknown expert have none.
    """
    var lane = Int(thread_idx.x) % WARP_SIZE
    var n_before = Int32(0)
    for first in range(0, n_groups, WARP_SIZE):
        var group = first + lane
        var n_chunks = Int32(0)
        if group < n_groups:
            var begin = Int(row_offsets[unsafe_offset=group])
            var end = min(Int(row_offsets[unsafe_offset=group + 1]), n_rows)
            var expert = Int(expert_ids[unsafe_offset=group])
            if begin < end and 0 <= expert < n_experts:
                n_chunks = Int32(ceildiv(end - begin, CHUNK))
        var below = warp.prefix_sum[exclusive=True](n_chunks)
        if group < n_groups:
            before[unsafe_offset=group] = n_before + below
        n_before += warp.shuffle_idx(below + n_chunks, UInt32(WARP_SIZE - 1))
    if lane == 0:
        before[unsafe_offset=n_groups] = n_before


def grouped_matmul_kernel(
    y: Bf16Out,
    x: Bf16In,
    weights: Bf16In,
    row_offsets: In[DType.uint32],
    expert_ids: In[DType.int32],
    n_groups: Int32,
    n_rows: Int32,
    n_experts: Int32,
    n: Int32,
    k: Int32,
):
    """Multiplies each group's tokens with the transpose of its weights.

    Only the device knows the rows of each group, so the grid fills the GPU once. Each
    warp takes 16 columns of a chunk of up to 64 tokens, then the next such tile.
    The offsets of a failed dispatch are undefined: rows behind `n_rows` are never
    touched, and groups of an unknown expert are skipped.

    Launch: grid any, block of four warps.

    Args:
        y: `[n_rows][n]`; rows behind the last group stay untouched.
        x: `[n_rows][k]`, 16-byte aligned.
        weights: `[n_experts][n][k]`, 16-byte aligned.
        row_offsets: `[n_groups + 1]`: where groups begin.
        expert_ids: `[n_groups]`: whose weights.
        n_groups: Number of groups, up to `MAX_GROUPS`.
        n_rows: Rows that `x` and `y` have room for.
        n_experts: Number of weights.
        n: A multiple of 16.
        k: A multiple of `K_STEP`.
    """
    var before = unsafe_stack_allocation[
        MAX_GROUPS + 1, Int32, address_space=AddressSpace.SHARED
    ]()
    var warp_idx = Int(thread_idx.x) // WARP_SIZE
    if warp_idx == 0:
        _chunks_before(
            row_offsets, expert_ids, Int(n_groups), Int(n_rows), Int(n_experts), before
        )
    barrier()
    var n_columns = Int(n) // COLUMNS
    var n_tiles = Int(before[unsafe_offset=Int(n_groups)]) * n_columns
    for i in range(
        Int(block_idx.x) * _N_WARPS + warp_idx, n_tiles, Int(grid_dim.x) * _N_WARPS
    ):
        var chunk, column = divmod(i, n_columns)
        # Bisection: the last group with at most `chunk` chunks before it.
        var group, above = 0, Int(n_groups)
        while group + 1 < above:
            var middle = (group + above) // 2
            if Int(before[unsafe_offset=middle]) <= chunk:
                group = middle
            else:
                above = middle
        var begin = (
            Int(row_offsets[unsafe_offset=group])
            + (chunk - Int(before[unsafe_offset=group])) * CHUNK
        )
        var end = min(
            min(Int(row_offsets[unsafe_offset=group + 1]), Int(n_rows)), begin + CHUNK
        )
        var expert = Int(expert_ids[unsafe_offset=group])
        var tile = Tile(
            y,
            x,
            weights.unsafe_offset(expert * Int(n) * Int(k)),
            begin,
            end,
            column * COLUMNS,
            Int(n),
            Int(k),
        )
        # With few tokens, many loads of weights in flight decide the speed.
        if end - begin > 4 * TOKENS:
            tile.multiply[CHUNK // TOKENS, 2]()
        elif end - begin > TOKENS:
            tile.multiply[4, 2]()
        elif Int(k) % (4 * K_STEP) == 0:
            tile.multiply[1, 8]()
        else:
            tile.multiply[1, 2]()


def launch_grouped_matmul(
    product: GroupedProduct[DType.bfloat16], context: DeviceContext
) raises:
    """Launches `grouped_matmul_kernel`.

    Args:
        product: The product; `n` a multiple of 16, `k` of `K_STEP`.
        context: The device.

    Raises:
        If `n`, `k` or the number of groups do not fit the kernel, or the launch fails.
    """
    check_sizes("grouped_matmul", product.n, product.k)
    if product.n_groups > MAX_GROUPS:
        raise Error(
            t"max_ep: grouped_matmul on GPUs takes up to {MAX_GROUPS} experts;"
            t" given {product.n_groups}"
        )
    if product.n_groups == 0:
        return
    var function = context.compile_function[grouped_matmul_kernel]()
    context.enqueue_function(
        function,
        product.y,
        product.x,
        product.weights,
        product.row_offsets,
        product.expert_ids,
        Int32(product.n_groups),
        Int32(product.n_rows),
        Int32(product.n_experts),
        Int32(product.n),
        Int32(product.k),
        grid_dim=_BLOCKS_PER_SM
        * context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
        block_dim=_N_WARPS * WARP_SIZE,
    )
