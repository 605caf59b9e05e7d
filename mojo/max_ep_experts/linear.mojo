# SPDX-License-Identifier: Apache-2.0
"""A product of few rows and one weight, for GPUs."""

from max.gpu import WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

from .groups import shared, Smem
from .product import Bf16In, Bf16Out, GroupedProduct
from .tile import CHUNK, COLUMNS, K_STEP, TOKENS, Sums, Tile

comptime FEW_ROWS = 128
"""`linear_kernel` takes fewer rows. A multiple of the tile of MAX's matmul."""
comptime _N_WARPS = 8
"""Warps that share the sums of 16 columns along `k`."""


@always_inline
def _multiply_together[n_tiles: Int, n_loads: Int](tile: Tile, theirs: Smem[Float32]):
    """Computes a tile with all warps of a block, each some steps of `k`.

    The other warps leave their sums in `theirs`; the first warp adds them in order.
    """
    comptime n_words = n_tiles * WARP_SIZE
    var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
    var sums = Sums[n_tiles](fill=0)
    tile.add[n_tiles, n_loads](sums, warp_idx, _N_WARPS)
    if warp_idx > 0:
        comptime for i in range(n_tiles):
            theirs.unsafe_store[alignment=16](
                4 * ((warp_idx - 1) * n_words + i * WARP_SIZE + lane), sums[i]
            )
    barrier()
    if warp_idx == 0:
        for other in range(_N_WARPS - 1):
            comptime for i in range(n_tiles):
                sums[i] += theirs.unsafe_load[width=4, alignment=16](
                    4 * (other * n_words + i * WARP_SIZE + lane)
                )
        tile.store(sums)


def linear_kernel(
    y: Bf16Out, x: Bf16In, weight: Bf16In, n_rows: Int32, n: Int32, k: Int32
):
    """Multiplies few rows with the transpose of a weight: `y` is `[n_rows][n]`, `x`
    `[n_rows][k]`, `weight` `[n][k]`, both 16-byte aligned.

    Launch: grid `(n / COLUMNS, ceildiv(n_rows, CHUNK))`, block of `_N_WARPS` warps,
    which share the sum along `k`; `n` a multiple of `COLUMNS`, `k` of `K_STEP`.
    """
    comptime n_sums = (_N_WARPS - 1) * (CHUNK // TOKENS) * WARP_SIZE * 4
    var theirs = shared[Float32, n_sums, 16]()
    var begin = Int(block_idx.y) * CHUNK
    var tile = Tile(
        y,
        x,
        weight,
        begin,
        min(begin + CHUNK, Int(n_rows)),
        Int(block_idx.x) * COLUMNS,
        Int(n),
        Int(k),
    )
    if tile.end - begin > 4 * TOKENS:
        _multiply_together[CHUNK // TOKENS, 2](tile, theirs)
    elif tile.end - begin > TOKENS:
        _multiply_together[4, 2](tile, theirs)
    elif Int(k) % (4 * K_STEP) == 0:
        _multiply_together[1, 8](tile, theirs)
    else:
        _multiply_together[1, 2](tile, theirs)


def launch_linear(
    product: GroupedProduct[DType.bfloat16], context: DeviceContext
) raises:
    if product.n_rows == 0:
        return
    context.enqueue_function(
        context.compile_function[linear_kernel](),
        product.y,
        product.x,
        product.weights,
        Int32(product.n_rows),
        Int32(product.n),
        Int32(product.k),
        grid_dim=(product.n // COLUMNS, ceildiv(product.n_rows, CHUNK)),
        block_dim=_N_WARPS * WARP_SIZE,
    )
