# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul for GPUs with warp-wide matrix instructions (16 x 8 x 16).

It exists because MAX's does not compile for Hopper in bfloat16
(docs/decisions/0016-grouped-matmul-on-hopper.md); elsewhere use MAX's. It needs no
shared memory: a product's sum over `k` may take its terms in any order, so each
lane reads 16 adjacent bytes of a row and says that these are the elements the
instruction wants from it, of the weights and of the tokens alike.
"""

from max.gpu import WARP_SIZE, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceContext
from std.math import ceildiv

comptime _N_WARPS = 4
comptime COLUMNS = 16
"""Results of a token that a warp computes: rows of weights, in the instruction."""
comptime _TOKENS = 8
"""Tokens of one instruction."""
comptime K_STEP = 64
"""Elements of a row that a warp takes at a time; divides `k`."""
comptime _K_LOAD = 32
"""Elements of a row that the four lanes of it load at once, 16 bytes each."""
comptime _SPLITS = 4
"""Blocks that share the tokens of a group, if it has that many."""


@always_inline
def _load(
    row: Pointer[BFloat16, ImmUntrackedOrigin], offset: Int
) -> SIMD[DType.bfloat16, 8]:
    return row.unsafe_load[width=8, alignment=16](offset)


@always_inline
def _multiply[
    n_tiles: Int
](
    y: Pointer[BFloat16, MutUntrackedOrigin],
    x: Pointer[BFloat16, ImmUntrackedOrigin],
    weight: Pointer[BFloat16, ImmUntrackedOrigin],
    begin: Int,
    end: Int,
    column: Int,
    n: Int,
    k: Int,
):
    """Computes 16 columns of up to `n_tiles` x 8 tokens.

    Parameters:
        n_tiles: Instructions side by side that share the weights.

    Args:
        y: Results `[..., n]`.
        x: Tokens `[..., k]`.
        weight: The group's weights `[n, k]`.
        begin: First token.
        end: Behind the last token of the group, `> begin`.
        column: First column.
        n: Columns of `y`.
        k: Elements of a token.
    """
    # The instruction's picture: a lane holds rows `high` and `high + 8` of the
    # weights, row `high` of the tokens, and the results of columns `high` and
    # `high + 8` for tokens `2 * low` and `2 * low + 1`.
    var high, low = divmod(Int(thread_idx.x) % WARP_SIZE, 4)
    var upper = weight.unsafe_offset((column + high) * k + 8 * low)
    var lower = weight.unsafe_offset((column + high + 8) * k + 8 * low)
    var tokens = Array[Pointer[BFloat16, ImmUntrackedOrigin], n_tiles](
        fill=x.unsafe_offset(8 * low)
    )
    comptime for tile in range(n_tiles):
        # Behind the last token the last one again: what it gives is not stored.
        var token = min(begin + _TOKENS * tile + high, end - 1)
        tokens[tile] = x.unsafe_offset(token * k + 8 * low)
    var acc = Array[SIMD[DType.float32, 4], n_tiles](fill=0)
    for step in range(0, k, K_STEP):
        comptime for half in range(K_STEP // _K_LOAD):
            var at = step + _K_LOAD * half
            var up = _load(upper, at)
            var down = _load(lower, at)
            comptime for tile in range(n_tiles):
                var token = _load(tokens[tile], at)
                comptime for i in range(2):
                    var a = (
                        up.slice[2, offset=4 * i]()
                        .join(down.slice[2, offset=4 * i]())
                        .join(
                            up.slice[2, offset=4 * i + 2]().join(
                                down.slice[2, offset=4 * i + 2]()
                            )
                        )
                    )
                    mma(acc[tile], a, token.slice[4, offset=4 * i](), acc[tile])
    comptime for tile in range(n_tiles):
        comptime for i in range(4):
            var token = begin + _TOKENS * tile + 2 * low + i % 2
            if token < end:
                y[unsafe_offset=token * n + column + high + 8 * (i // 2)] = acc[
                    tile
                ][i].cast[DType.bfloat16]()


def grouped_matmul_kernel(
    y: Pointer[BFloat16, MutUntrackedOrigin],
    x: Pointer[BFloat16, ImmUntrackedOrigin],
    weights: Pointer[BFloat16, ImmUntrackedOrigin],
    row_offsets: Pointer[UInt32, ImmUntrackedOrigin],
    expert_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_rows: Int32,
    n_experts: Int32,
    n: Int32,
    k: Int32,
):
    """Multiplies each group's tokens with the transpose of its weights.

    A dispatch that failed leaves no offsets: none is used beyond the rows, and a
    group whose expert there is not is left out.

    Launch: grid `(n / 64 rounded up, n_groups, any)`, block of four warps.

    Args:
        y: `[n_rows][n]`; rows behind the last group stay untouched.
        x: `[n_rows][k]`, 16-byte aligned.
        weights: `[n_experts][n][k]`, 16-byte aligned.
        row_offsets: `[n_groups + 1]`: where groups begin.
        expert_ids: `[n_groups]`: whose weights.
        n_rows: Rows there is room for.
        n_experts: Experts.
        n: A multiple of 16.
        k: A multiple of `K_STEP`.
    """
    var group = Int(block_idx.y)
    var begin = Int(row_offsets[unsafe_offset=group])
    var end = min(Int(row_offsets[unsafe_offset=group + 1]), Int(n_rows))
    var warp = Int(block_idx.x) * _N_WARPS + Int(thread_idx.x) // WARP_SIZE
    var column = warp * COLUMNS
    var expert = Int(expert_ids[unsafe_offset=group])
    if column >= Int(n) or not 0 <= expert < Int(n_experts):
        return
    var weight = weights.unsafe_offset(expert * Int(n) * Int(k))

    @always_inline
    def tokens_in_steps_of[n_tiles: Int]() {imm}:
        comptime size = n_tiles * _TOKENS
        for first in range(
            begin + Int(block_idx.z) * size, end, Int(grid_dim.z) * size
        ):
            _multiply[n_tiles](y, x, weight, first, end, column, Int(n), Int(k))

    # Few tokens: what counts is to have many loads of weights under way.
    if end - begin <= _TOKENS:
        tokens_in_steps_of[1]()
    elif end - begin <= 4 * _TOKENS:
        tokens_in_steps_of[4]()
    else:
        tokens_in_steps_of[8]()


def launch_grouped_matmul(
    y: Pointer[BFloat16, MutUntrackedOrigin],
    x: Pointer[BFloat16, ImmUntrackedOrigin],
    weights: Pointer[BFloat16, ImmUntrackedOrigin],
    row_offsets: Pointer[UInt32, ImmUntrackedOrigin],
    expert_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_groups: Int,
    n_rows: Int,
    n_experts: Int,
    n: Int,
    k: Int,
    context: DeviceContext,
) raises:
    """Launches `grouped_matmul_kernel`.

    Args:
        y: As there.
        x: As there.
        weights: As there.
        row_offsets: As there.
        expert_ids: As there.
        n_groups: Groups.
        n_rows: As there.
        n_experts: As there.
        n: As there.
        k: As there.
        context: The device.

    Raises:
        If `n` or `k` is no multiple of what the kernel takes at a time, or the
        launch fails.
    """
    if n % COLUMNS != 0 or k % K_STEP != 0:
        raise Error(
            "max_ep: grouped_matmul on GPUs takes n in multiples of ",
            COLUMNS,
            " and k of ",
            K_STEP,
            "; given n=",
            n,
            " and k=",
            k,
        )
    if n_groups == 0:
        return
    var function = context.compile_function[grouped_matmul_kernel]()
    context.enqueue_function(
        function,
        y,
        x,
        weights,
        row_offsets,
        expert_ids,
        Int32(n_rows),
        Int32(n_experts),
        Int32(n),
        Int32(k),
        grid_dim=(ceildiv(n, _N_WARPS * COLUMNS), n_groups, _SPLITS),
        block_dim=_N_WARPS * WARP_SIZE,
    )
