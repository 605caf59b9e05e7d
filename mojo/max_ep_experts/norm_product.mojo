# SPDX-License-Identifier: Apache-2.0
"""A sum of few tokens, its RMS norm, and the product of that with a weight, in one kernel
on Hopper.

Each block makes the norms for itself: a thread those elements that it multiplies. All
weights of a block are on their way before the kernel waits for what it adds up.
"""
from max.gpu import WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt
from std.utils import StaticTuple

from .few_rows import BlockOfRows, STEP, Tuning
from .groups import shared
from .norm import AddNorm, load_row
from .overlap import await_kernel_before
from .product import Bf16In, Bf16Out, LANE

comptime NORM_TUNING = Tuning(8, 8, 4, 0, True)
"""All warps of a block share `k`; the steps follow from `k`."""
comptime MAX_STEPS = 4
"""More steps take more registers for weights than two blocks have."""
comptime _Floats = SIMD[DType.float32, LANE]


def steps_for(n_columns: Int, tuning: Tuning = NORM_TUNING) -> Int:
    """Returns the steps of a warp."""
    return ceildiv(n_columns, tuning.n_warps * STEP)


def norm_product_kernel[
    n_tokens: Int, n_columns: Int, tuning: Tuning = NORM_TUNING
](y: Bf16Out, of: AddNorm, epsilon: Float32, weight: Bf16In, n: Int32):
    """Adds and normalizes `n_tokens` rows as `add_norm_kernel` does, and multiplies the
    norms with the transpose of a weight: `y` is `[n_tokens][n]`, `weight`
    `[n][n_columns]`, 16-byte aligned. No kernel may write the weights meanwhile.

    Launch: grid `ceildiv(n, rows of a block)`, `n_warps` warps; `n` a multiple of
    `n_rows`, `n_columns` of 8.
    """
    comptime n_steps = steps_for(n_columns, tuning)
    comptime n_warps = tuning.n_warps
    comptime Rows = BlockOfRows[n_tokens, n_steps, tuning]
    comptime n_kept = n_tokens * n_steps
    var sums = shared[Float32, Rows.N_SHARED, 16]()
    var of_warps = shared[Float32, n_tokens * n_warps, 16]()
    var rows = Rows(weight, Int(n), n_columns)
    var dots = rows.dots()
    var loaded = dots.load(dots.first)
    var weights = StaticTuple[_Floats, n_steps](fill=0)
    comptime for i in range(n_steps):
        weights[i] = load_row(of.weight, dots.place(dots.first, i))
    await_kernel_before()
    var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
    var totals = StaticTuple[_Floats, n_kept](fill=0)
    comptime for token in range(n_tokens):
        comptime for i in range(n_steps):
            var at = token * n_columns + dots.place(dots.first, i)
            if dots.is_there(dots.first, i):
                totals[token * n_steps + i] = of.add(at)
    comptime for token in range(n_tokens):
        var squares = Float32(0)
        comptime for i in range(n_steps):
            var total = totals[token * n_steps + i]
            squares += (total * total).reduce_add()
        squares = warp.sum(squares)
        if lane == 0:
            of_warps[unsafe_offset=token * n_warps + warp_idx] = squares
    barrier()
    var found = Rows.Dots.Sums(fill=0)
    comptime for token in range(n_tokens):
        var all = of_warps[unsafe_offset=token * n_warps]
        comptime for other in range(1, n_warps):
            all += of_warps[unsafe_offset=token * n_warps + other]
        var scale = rsqrt(all / Float32(n_columns) + epsilon)
        comptime for i in range(n_steps):
            var total = totals[token * n_steps + i]
            var normed = of.norm(total, scale, weights[i])
            # One block stores for all.
            if block_idx.x == 0 and dots.is_there(dots.first, i):
                var at = token * n_columns + dots.place(dots.first, i)
                of.total.unsafe_store[alignment=16](at, total.cast[DType.bfloat16]())
                of.normed.unsafe_store[alignment=16](at, normed)
            dots.add[token, i](found, loaded, normed.cast[DType.float32]())
    rows.store(y, dots.add_up(found), sums)


def launch_norm_product[
    n_columns: Int, max_rows: Int, tuning: Tuning = NORM_TUNING
](
    n_tokens: Int,
    y: Bf16Out,
    of: AddNorm,
    epsilon: Float32,
    weight: Bf16In,
    n: Int,
    context: DeviceContext,
) raises:
    """Launches the kernel for 1 to `max_rows` rows."""
    comptime for n_rows in range(1, max_rows + 1):
        if n_tokens == n_rows:
            context.enqueue_function(
                context.compile_function[
                    norm_product_kernel[n_rows, n_columns, tuning]
                ](),
                y,
                of,
                epsilon,
                weight,
                Int32(n),
                grid_dim=ceildiv(n, tuning.rows_of_block()),
                block_dim=tuning.n_warps * WARP_SIZE,
                attributes=tuning.attributes(),
            )
