# SPDX-License-Identifier: Apache-2.0
"""A warp's tile of a product on a GPU, straight from global memory.

The instruction is a warp-wide `mma` of 16 x 8 x 16. A sum over `k` may take its terms in
any order. So each lane reads 16 adjacent bytes of a row, of weights and tokens alike,
and passes them as the elements that the instruction wants from it.
"""

from max.gpu import WARP_SIZE, thread_idx
from max.gpu.compute.mma import mma
from std.math import exp, recip

from .product import Bf16In, Bf16Out

comptime COLUMNS = 16
"""Columns of a tile: rows of weights."""
comptime TOKENS = 8
"""Tokens of one instruction."""
comptime CHUNK = 64
"""Most tokens of a tile."""
comptime K_STEP = 64
"""Divides `k`."""
comptime _K_LOAD = 32
"""Elements of a row that its four lanes load at once, 16 bytes each."""

comptime Sums[n_tiles: Int] = Array[SIMD[DType.float32, 4], n_tiles]
"""A lane's results of `n_tiles` instructions side by side."""


@always_inline
def silu(x: Float32) -> Float32:
    return x * recip(1 + exp(-x))


@always_inline
def _load(row: Bf16In, offset: Int) -> SIMD[DType.bfloat16, 8]:
    return row.unsafe_load[width=8, alignment=16](offset)


@fieldwise_init
struct Tile[swiglu: Bool = False](Copyable, Movable):
    """Some tokens of a group, and 16 rows of its weight.

    These are 16 columns of the result, with SwiGLU 8: 8 rows of gate and of up.
    """

    var y: Bf16Out
    """Results `[..., n]`."""
    var x: Bf16In
    """Tokens `[..., k]`."""
    var weight: Bf16In
    """The group's weights `[n, k]`."""
    var begin: Int
    var end: Int
    """End of the tokens, `> begin`."""
    var column: Int
    var n: Int
    var k: Int

    @always_inline
    def add[
        n_tiles: Int, n_loads: Int
    ](self, mut sums: Sums[n_tiles], first: Int, stride: Int):
        """Adds every `stride`-th step along `k`, from step `first` on.

        A step has `n_loads` loads of a row of weights in flight; `n_tiles`
        instructions side by side share them.
        """
        # A lane holds rows `high` and `high + 8` of the weights, row `high` of the
        # tokens, and the results of columns `high` and `high + 8` for tokens
        # `2 * low` and `2 * low + 1`.
        var high, low = divmod(Int(thread_idx.x) % WARP_SIZE, 4)
        var upper = self.weight.unsafe_offset((self.column + high) * self.k + 8 * low)
        var lower = upper.unsafe_offset(8 * self.k)
        comptime if Self.swiglu:
            lower = upper.unsafe_offset(self.n * self.k)
        var tokens = Array[Bf16In, n_tiles](fill=self.x.unsafe_offset(8 * low))
        comptime for tile in range(n_tiles):
            # Behind the last token, load the last one again; it is not stored.
            var token = min(self.begin + TOKENS * tile + high, self.end - 1)
            tokens[tile] = self.x.unsafe_offset(token * self.k + 8 * low)
        comptime step = _K_LOAD * n_loads
        for at in range(first * step, self.k, stride * step):
            var ups = Array[SIMD[DType.bfloat16, 8], n_loads](fill=0)
            var downs = Array[SIMD[DType.bfloat16, 8], n_loads](fill=0)
            comptime for i in range(n_loads):
                ups[i] = _load(upper, at + _K_LOAD * i)
                downs[i] = _load(lower, at + _K_LOAD * i)
            comptime for i in range(n_loads):
                comptime for tile in range(n_tiles):
                    var token = _load(tokens[tile], at + _K_LOAD * i)
                    comptime for half in range(2):
                        comptime o = 4 * half
                        var a = (
                            ups[i]
                            .slice[2, offset=o]()
                            .join(downs[i].slice[2, offset=o]())
                            .join(
                                ups[i]
                                .slice[2, offset=o + 2]()
                                .join(downs[i].slice[2, offset=o + 2]())
                            )
                        )
                        mma(sums[tile], a, token.slice[4, offset=o](), sums[tile])

    @always_inline
    def store[n_tiles: Int](self, sums: Sums[n_tiles]):
        var high, low = divmod(Int(thread_idx.x) % WARP_SIZE, 4)
        comptime for tile in range(n_tiles):
            comptime for i in range(2):
                var token = self.begin + TOKENS * tile + 2 * low + i
                var upper, lower = sums[tile][i], sums[tile][i + 2]
                var at = token * self.n + self.column + high
                if token < self.end:
                    comptime if Self.swiglu:
                        self.y[unsafe_offset=at] = (silu(upper) * lower).cast[
                            DType.bfloat16
                        ]()
                    else:
                        self.y[unsafe_offset=at] = upper.cast[DType.bfloat16]()
                        self.y[unsafe_offset=at + 8] = lower.cast[DType.bfloat16]()

    @always_inline
    def multiply[n_tiles: Int, n_loads: Int](self):
        var sums = Sums[n_tiles](fill=0)
        self.add[n_tiles, n_loads](sums, 0, 1)
        self.store(sums)
