# SPDX-License-Identifier: Apache-2.0
"""Products of a token, or of up to four, on Hopper.

A warp multiplies some rows of a weight along some of `k`. It asks for all these weights
at once, past L1, before it waits for tokens. Then it multiplies in float32; a block adds
up what its warps have, in order.
"""
from max.gpu import WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext, LaunchAttribute
from max.gpu.primitives import warp
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly
from std.utils import StaticTuple

from .groups import shared, Smem
from .overlap import await_kernel_before, overlapping, prefetch
from .product import Bf16In, Bf16Out, GroupedProduct, In, KernelArgument, LANE
from .tile import silu

comptime MAX_TOKENS = 4
"""More tokens have other kernels for their experts."""
comptime MAX_ROWS = 2
"""More rows of a product with one weight have other kernels."""
comptime MAX_TOP_K = 16
"""Warps of a block."""
comptime STEP = WARP_SIZE * LANE
"""Elements of a row that a warp loads at once."""
comptime _Loaded = SIMD[DType.uint32, 4]


@always_inline
def _load(row: Bf16In, offset: Int) -> _Loaded:
    """Issues a load of weights here, where the compiler may not move it."""
    var words = inlined_assembly[
        "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,l",
        has_side_effect=True,
    ](row.unsafe_offset(offset))
    return _Loaded(words[0], words[1], words[2], words[3])


@always_inline
def _floats(words: _Loaded) -> SIMD[DType.float32, LANE]:
    """Widens eight bfloat16."""
    var low = bitcast[DType.float32, 4](words << 16)
    var high = bitcast[DType.float32, 4](words & 0xFFFF0000)
    return low.interleave(high)


@fieldwise_init
struct Dots[n_tokens: Int, n_rows: Int, n_steps: Int](TrivialRegisterPassable):
    """A warp's products of tokens and rows of weights, along some of `k`."""

    comptime Sums = StaticTuple[Float32, Self.n_tokens * Self.n_rows]
    comptime OfRow = StaticTuple[Float32, Self.n_tokens]
    """What a lane has of its row of each token."""
    comptime LANES = WARP_SIZE // Self.n_rows
    """Lanes that have the same row, side by side."""
    comptime Weights = StaticTuple[_Loaded, Self.n_steps * Self.n_rows]

    var rows: StaticTuple[Bf16In, Self.n_rows]
    """Weights, `[k]` each."""
    var first: Int
    """The first step of `k` that the warp takes, in elements."""
    var stride: Int
    """Elements to its next steps."""
    var k: Int

    @always_inline
    def is_there(self, at: Int, i: Int) -> Bool:
        """Whether a lane has elements in a step, or is behind `k`."""
        return at + i * STEP + Int(thread_idx.x) % WARP_SIZE * LANE < self.k

    @always_inline
    def place(self, at: Int, i: Int) -> Int:
        """Returns where a lane loads; behind `k` what was before."""
        var lane = Int(thread_idx.x) % WARP_SIZE
        return min(at + i * STEP + lane * LANE, self.k - LANE)

    @always_inline
    def prefetch(self):
        """Gets the weights of the first steps into L2."""
        var n = min(self.k - self.first, Self.n_steps * STEP)
        var lane = Int(thread_idx.x) % WARP_SIZE
        var row = self.rows[0]
        comptime for i in range(1, Self.n_rows):
            row = self.rows[i] if lane == i else row
        if n > 0 and lane < Self.n_rows:
            prefetch(row.unsafe_offset(self.first), 2 * n)

    @always_inline
    def load(self, at: Int) -> Self.Weights:
        """Asks for weights of `n_steps` steps."""
        var loaded = Self.Weights(fill=_Loaded(0))
        comptime for i in range(Self.n_steps):
            var place = self.place(at, i)
            comptime for row in range(Self.n_rows):
                loaded[i * Self.n_rows + row] = _load(self.rows[row], place)
        return loaded

    @always_inline
    def multiply(self, x: Bf16In, var loaded: Self.Weights) -> Self.OfRow:
        """Multiplies tokens, `[n_tokens][k]`, with weights of which the first are loaded;
        a lane gets its row's sums."""
        var sums = Self.Sums(fill=0)
        var at = self.first
        while at < self.k:
            comptime for i in range(Self.n_steps):
                comptime for token in range(Self.n_tokens):
                    # Tokens may be written while this kernel runs, before the wait.
                    var words = bitcast[DType.uint32, 4](
                        x.unsafe_load[width=LANE, alignment=16, invariant=False](
                            token * self.k + self.place(at, i)
                        )
                    )
                    var is_there = self.is_there(at, i)
                    var v = _floats(words if is_there else _Loaded(0))
                    self.add[token, i](sums, loaded, v)
            at += self.stride
            if at < self.k:
                loaded = self.load(at)
        return self.add_up(sums)

    @always_inline
    def add[
        token: Int, i: Int
    ](self, mut sums: Self.Sums, loaded: Self.Weights, v: SIMD[DType.float32, LANE]):
        """Adds products of a lane's elements of a token and of weights of step `i`."""
        comptime for row in range(Self.n_rows):
            comptime sum = token * Self.n_rows + row
            var w = _floats(loaded[i * Self.n_rows + row])
            comptime for j in range(LANE):
                sums[sum] = fma(w[j], v[j], sums[sum])

    @always_inline
    def add_up(self, sums: Self.Sums) -> Self.OfRow:
        """Adds up what lanes have. Two lanes share the rows that both have: each sends
        half of them, and keeps the others, until one row is left."""
        comptime assert WARP_SIZE % Self.n_rows == 0, "max_ep: lanes share rows"
        var lane = Int(thread_idx.x) % WARP_SIZE
        var of_row = Self.OfRow(fill=0)
        comptime for token in range(Self.n_tokens):
            var kept = StaticTuple[Float32, Self.n_rows](fill=0)
            comptime for row in range(Self.n_rows):
                kept[row] = sums[token * Self.n_rows + row]
            comptime for level in range(5):
                comptime distance = WARP_SIZE >> (level + 1)
                comptime half = Self.n_rows >> (level + 1)
                var is_second = lane & distance != 0
                comptime for i in range(half):
                    var sent = kept[i] if is_second else kept[i + half]
                    kept[i] = kept[i + half] if is_second else kept[i]
                    kept[i] += warp.shuffle_xor(sent, UInt32(distance))
                comptime if half == 0:
                    kept[0] += warp.shuffle_xor(kept[0], UInt32(distance))
            of_row[token] = kept[0]
        return of_row


@fieldwise_init
struct Tuning(TrivialRegisterPassable):
    """How a block shares the work of few rows."""

    var n_warps: Int
    """Warps of a block."""
    var n_slices: Int
    """Warps that share rows along `k`; divides `n_warps`."""
    var n_rows: Int
    """Rows of weights of a warp."""
    var n_steps: Int
    """Steps of `k` whose weights a warp asks for at once."""
    var overlaps: Bool
    """Whether it begins before the previous kernel has ended."""

    def rows_of_block(self) -> Int:
        return self.n_warps // self.n_slices * self.n_rows

    def attributes(self) -> List[LaunchAttribute]:
        return overlapping(self.overlaps)


comptime TUNING = Tuning(8, 8, 4, 1, True)
"""A product with one weight, and experts' gate and up, have this one."""
comptime DOWN = Tuning(0, 0, 4, 1, True)
"""The second product of experts has this one, and a warp for each choice."""


@always_inline
def _add_up[
    n_sums: Int, n_slices: Int
](sums: Smem[Float32], place: Int, out total: Float32):
    """Adds up what the warps of all slices have of a sum, in order."""
    total = sums[unsafe_offset=place]
    comptime for slice in range(1, n_slices):
        total += sums[unsafe_offset=slice * n_sums + place]


@fieldwise_init
struct BlockOfRows[n_tokens: Int, n_steps: Int, tuning: Tuning](
    TrivialRegisterPassable
):
    """The rows of a weight that a block multiplies with all tokens."""

    comptime OF_BLOCK = Self.tuning.rows_of_block()
    comptime N_SUMS = Self.n_tokens * Self.OF_BLOCK
    comptime Dots = Dots[Self.n_tokens, Self.tuning.n_rows, Self.n_steps]
    comptime N_SHARED = Self.tuning.n_slices * Self.N_SUMS
    """Floats in shared memory."""

    var weight: Bf16In
    """`[n][k]`."""
    var n: Int
    var k: Int

    @always_inline
    def dots(self) -> Self.Dots:
        """Returns what this warp multiplies."""
        comptime n_rows = Self.tuning.n_rows
        comptime step = Self.n_steps * STEP
        var group, slice = divmod(Int(thread_idx.x) // WARP_SIZE, Self.tuning.n_slices)
        # Behind the last row, the last ones again; they are not stored.
        var row = min(
            Int(block_idx.x) * Self.OF_BLOCK + group * n_rows, self.n - n_rows
        )
        var rows = StaticTuple[Bf16In, n_rows](fill=self.weight)
        comptime for i in range(n_rows):
            rows[i] = self.weight.unsafe_offset((row + i) * self.k)
        return Self.Dots(rows, slice * step, Self.tuning.n_slices * step, self.k)

    @always_inline
    def store(self, y: Bf16Out, found: Self.Dots.OfRow, sums: Smem[Float32]):
        """Adds up the sums of all warps, and stores them in `y`, `[n_tokens][n]`."""
        var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
        var group, slice = divmod(warp_idx, Self.tuning.n_slices)
        var row, of_row = divmod(lane, Self.Dots.LANES)
        var place = slice * Self.N_SUMS + group * Self.tuning.n_rows + row
        if of_row == 0:
            comptime for token in range(Self.n_tokens):
                sums[unsafe_offset=place + token * Self.OF_BLOCK] = found[token]
        barrier()
        var first = Int(block_idx.x) * Self.OF_BLOCK
        comptime n_threads = Self.tuning.n_warps * WARP_SIZE
        for i in range(Int(thread_idx.x), Self.N_SUMS, n_threads):
            var token, of_row = divmod(i, Self.OF_BLOCK)
            if first + of_row < self.n:
                y[unsafe_offset=token * self.n + first + of_row] = _add_up[
                    Self.N_SUMS, Self.tuning.n_slices
                ](sums, i).cast[DType.bfloat16]()


def few_rows_kernel[
    n_tokens: Int, tuning: Tuning
](y: Bf16Out, x: Bf16In, weight: Bf16In, n: Int32, k: Int32):
    """Multiplies `n_tokens` rows with the transpose of a weight: `y` is `[n_tokens][n]`,
    `x` `[n_tokens][k]`, `weight` `[n][k]`, all 16-byte aligned.

    Launch: grid `ceildiv(n, rows of a block)`, `n_warps` warps; `n` a multiple of
    `n_rows`, `k` of 8.
    """
    comptime Rows = BlockOfRows[n_tokens, tuning.n_steps, tuning]
    var sums = shared[Float32, Rows.N_SHARED, 16]()
    var rows = Rows(weight, Int(n), Int(k))
    var dots = rows.dots()
    # Not a load: the previous kernel may write the weights.
    dots.prefetch()
    await_kernel_before()
    rows.store(y, dots.multiply(x, dots.load(dots.first)), sums)


def launch_few_rows[
    tuning: Tuning, max_rows: Int
](product: GroupedProduct[DType.bfloat16], context: DeviceContext) raises:
    """Launches the kernel for 1 to `max_rows` rows."""
    comptime for n_tokens in range(1, max_rows + 1):
        if product.n_rows == n_tokens:
            context.enqueue_function(
                context.compile_function[few_rows_kernel[n_tokens, tuning]](),
                product.y,
                product.x,
                product.weights,
                Int32(product.n),
                Int32(product.k),
                grid_dim=ceildiv(product.n, tuning.rows_of_block()),
                block_dim=tuning.n_warps * WARP_SIZE,
                attributes=tuning.attributes(),
            )


@fieldwise_init
struct Chosen(KernelArgument):
    """Experts of few tokens, straight from a router's choices."""

    var y: Bf16Out
    """`[n_tokens][hidden_size]`."""
    var activated: Bf16Out
    """`[n_tokens * top_k][moe_dim]`."""
    var x: Bf16In
    """`[n_tokens][hidden_size]`."""
    var ids: In[DType.int32]
    """`[n_tokens][top_k]`."""
    var weights: In[DType.float32]
    """`[n_tokens][top_k]`."""
    var gate_up: Bf16In
    """`[n_experts][2 * moe_dim][hidden_size]`."""
    var down: Bf16In
    """`[n_experts][hidden_size][moe_dim]`."""
    var n_tokens: Int
    var top_k: Int
    var n_experts: Int
    var hidden_size: Int
    var moe_dim: Int


def chosen_gate_up_kernel[tuning: Tuning](of: Chosen):
    """Computes `silu(x @ gate.T) * (x @ up.T)` of each choice.

    Choices of one expert run side by side, so that its weights come from memory once.

    Launch: grid `choices * ceildiv(2 * moe_dim, rows of a block)`, `n_warps` warps.
    """
    comptime n_rows = tuning.n_rows
    comptime width = n_rows // 2
    comptime of_block = tuning.rows_of_block()
    comptime n_columns = of_block // 2
    comptime step = tuning.n_steps * STEP
    var sums = shared[Float32, tuning.n_slices * of_block, 16]()
    await_kernel_before()
    var n_choices = UInt32(of.n_tokens * of.top_k)
    var column_block, which = divmod(UInt32(block_idx.x), n_choices)
    var choice = Int(which)
    var expert = UInt32(of.ids.unsafe_load[invariant=False](choice))
    if expert >= UInt32(of.n_experts):
        return
    var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
    var group, slice = divmod(warp_idx, tuning.n_slices)
    var first = Int(column_block) * n_columns
    var column = min(first + group * width, of.moe_dim - width)
    var row = Int(expert) * 2 * of.moe_dim + column
    var rows = StaticTuple[Bf16In, n_rows](fill=of.gate_up)
    comptime for i in range(n_rows):
        var is_up = of.moe_dim if i >= width else 0
        rows[i] = of.gate_up.unsafe_offset((row + is_up + i % width) * of.hidden_size)
    var dots = Dots[1, n_rows, tuning.n_steps](
        rows, slice * step, tuning.n_slices * step, of.hidden_size
    )
    var x = of.x.unsafe_offset(choice // of.top_k * of.hidden_size)
    var found = dots.multiply(x, dots.load(dots.first))
    var row_of_warp, of_row = divmod(lane, dots.LANES)
    if of_row == 0:
        var half, at = divmod(row_of_warp, width)
        sums[
            unsafe_offset=slice * of_block + half * n_columns + group * width + at
        ] = found[0]
    barrier()
    var i = Int(thread_idx.x)
    if i < n_columns and first + i < of.moe_dim:
        var gate = _add_up[of_block, tuning.n_slices](sums, i)
        var up = _add_up[of_block, tuning.n_slices](sums, n_columns + i)
        of.activated[unsafe_offset=choice * of.moe_dim + first + i] = (
            silu(gate) * up
        ).cast[DType.bfloat16]()


def chosen_down_kernel[n_rows: Int, n_steps: Int](of: Chosen):
    """Multiplies what each choice has activated with its expert's weight, and adds up
    a token's weighted results in order of its choices. A warp has a choice.

    Launch: grid `n_tokens * hidden_size / n_rows`, `top_k` warps.
    """
    var sums = shared[Float32, MAX_TOP_K * n_rows, 16]()
    var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
    var row_block, which = divmod(UInt32(block_idx.x), UInt32(of.n_tokens))
    var token, first = Int(which), Int(row_block) * n_rows
    var choice = token * of.top_k + warp_idx
    # The router has ended: the previous kernel has waited for it.
    var expert = UInt32(of.ids.unsafe_load[invariant=False](choice))
    var weight = of.weights.unsafe_load[invariant=False](choice)
    var is_there = expert < UInt32(of.n_experts)
    var row = (Int(expert) if is_there else 0) * of.hidden_size + first
    var rows = StaticTuple[Bf16In, n_rows](fill=of.down)
    comptime for i in range(n_rows):
        rows[i] = of.down.unsafe_offset((row + i) * of.moe_dim)
    var dots = Dots[1, n_rows, n_steps](rows, 0, n_steps * STEP, of.moe_dim)
    var found = type_of(dots).OfRow(fill=0)
    if is_there:
        var loaded = dots.load(0)
        await_kernel_before()
        var x = Bf16In(unsafe_from_address=Int(of.activated))
        found = dots.multiply(x.unsafe_offset(choice * of.moe_dim), loaded)
    else:
        await_kernel_before()
    var row_of_warp, of_row = divmod(lane, dots.LANES)
    if of_row == 0:
        sums[unsafe_offset=warp_idx * n_rows + row_of_warp] = weight * found[0]
    barrier()
    var i = Int(thread_idx.x)
    if i < n_rows:
        var total = sums[unsafe_offset=i]
        for other in range(1, of.top_k):
            total += sums[unsafe_offset=other * n_rows + i]
        of.y[unsafe_offset=token * of.hidden_size + first + i] = total.cast[
            DType.bfloat16
        ]()


def launch_chosen_gate_up[tuning: Tuning](of: Chosen, context: DeviceContext) raises:
    context.enqueue_function(
        context.compile_function[chosen_gate_up_kernel[tuning]](),
        of,
        grid_dim=of.n_tokens
        * of.top_k
        * ceildiv(2 * of.moe_dim, tuning.rows_of_block()),
        block_dim=tuning.n_warps * WARP_SIZE,
        attributes=tuning.attributes(),
    )


def launch_chosen_down[tuning: Tuning](of: Chosen, context: DeviceContext) raises:
    """A block has a warp for each choice."""
    context.enqueue_function(
        context.compile_function[chosen_down_kernel[tuning.n_rows, tuning.n_steps]](),
        of,
        grid_dim=of.n_tokens * of.hidden_size // tuning.n_rows,
        block_dim=of.top_k * WARP_SIZE,
        attributes=tuning.attributes(),
    )


def launch_chosen(of: Chosen, context: DeviceContext) raises:
    """Runs the experts of 1 to `MAX_TOKENS` tokens."""
    launch_chosen_gate_up[TUNING](of, context)
    launch_chosen_down[DOWN](of, context)
