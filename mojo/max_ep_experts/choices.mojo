# SPDX-License-Identifier: Apache-2.0
"""What stands before and behind experts if all are on one device: a router's choices are
sorted by expert, and a token's rows are added up. Experts' first product gathers tokens.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.gpu.primitives import warp
from std.math import ceildiv, fma
from std.sys import size_of
from std.utils import StaticTuple

from .groups import shared
from .product import In, KernelArgument, Out

comptime _FOUR = 4
"""Ids that a lane loads at once."""
comptime _IN_FLIGHT = 4
"""How many such loads at a time."""
comptime _STEP = _IN_FLIGHT * WARP_SIZE * _FOUR
"""Ids that a warp has loaded then."""
comptime _MAX_WARPS = 1024 // WARP_SIZE
comptime _N_THREADS = 128
comptime _ROWS_IN_FLIGHT = 8
comptime _Four = SIMD[DType.uint32, _FOUR]
comptime _Ids = StaticTuple[_Four, _IN_FLIGHT]


@always_inline
def place(first: Int, lane: Int, i: Int) -> Int:
    """Returns the first of the `i`-th four choices of a lane."""
    return first + (i * WARP_SIZE + lane) * _FOUR


@fieldwise_init
struct Choices(KernelArgument):
    """A router's choices, and in which order experts take them.

    Choices of nobody, with an id that no expert has, stand behind all others.
    """

    var row_offsets: Out[DType.uint32]
    """First row of each expert, `[n_experts + 1]`."""
    var expert_ids: Out[DType.int32]
    """All experts, `[n_experts]`."""
    var token_of_row: Out[DType.int32]
    """`[n_choices]`; from `row_offsets[n_experts]` on of choices of nobody."""
    var row_of_choice: Out[DType.int32]
    """`[n_choices]`, -1 for one of nobody."""
    var ids: In[DType.int32]
    """Experts `[n_tokens][top_k]`."""
    var n_choices: Int
    var n_experts: Int
    var top_k: Int

    @always_inline
    def expert(self, choice: Int) -> UInt32:
        """Returns whose a choice is; `n_experts` if nobody's."""
        return min(UInt32(self.ids[unsafe_offset=choice]), UInt32(self.n_experts))

    @always_inline
    def experts(self, first: Int, lane: Int) -> _Ids:
        """Behind the last choice they are neither nobody's nor an expert's."""
        var found = _Ids(fill=_Four(UInt32(self.n_experts + 1)))
        if first + _STEP <= self.n_choices and Int(self.ids) % 16 == 0:
            comptime for i in range(_IN_FLIGHT):
                var ids = self.ids.unsafe_load[width=_FOUR, alignment=16](
                    place(first, lane, i)
                )
                var nobody = _Four(UInt32(self.n_experts))
                found[i] = min(ids.cast[DType.uint32](), nobody)
            return found
        comptime for i in range(_IN_FLIGHT):
            comptime for j in range(_FOUR):
                var choice = place(first, lane, i) + j
                if choice < self.n_choices:
                    found[i][j] = self.expert(choice)
        return found

    @always_inline
    def put(self, choice: Int, expert: UInt32, row: UInt32):
        var is_nobody = expert == UInt32(self.n_experts)
        self.row_of_choice[unsafe_offset=choice] = -1 if is_nobody else Int32(row)
        var token = UInt32(choice) // UInt32(self.top_k)
        self.token_of_row[unsafe_offset=Int(row)] = Int32(token)

    @always_inline
    def begin(self, expert: UInt32, row: UInt32):
        self.row_offsets[unsafe_offset=Int(expert)] = row
        if expert < UInt32(self.n_experts):
            self.expert_ids[unsafe_offset=Int(expert)] = Int32(expert)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_MAX_WARPS * WARP_SIZE))
)
def sort_kernel(choices: Choices):
    """Gives the choices of one expert their rows, with a block.

    It counts all ids of experts before its own, so blocks need not wait for each other.

    Launch: `n_experts + 1` blocks of up to `_MAX_WARPS` warps.
    """
    var below_of = shared[UInt32, _MAX_WARPS]()
    var own_of = shared[UInt32, _MAX_WARPS]()
    var expert = UInt32(block_idx.x)
    var warp_idx, lane = divmod(Int(thread_idx.x), WARP_SIZE)
    var n_warps = Int(block_dim.x) // WARP_SIZE
    # A warp has adjacent ids.
    var n_mine = ceildiv(choices.n_choices, n_warps * _STEP) * _STEP
    var begin = warp_idx * n_mine
    var end = min(begin + n_mine, choices.n_choices)

    var below, own = UInt32(0), UInt32(0)
    for first in range(begin, end, _STEP):
        var loaded = choices.experts(first, lane)
        comptime for i in range(_IN_FLIGHT):
            comptime for j in range(_FOUR):
                below += UInt32(1) if loaded[i][j] < expert else 0
                own += UInt32(1) if loaded[i][j] == expert else 0
    below = warp.sum(below)
    own = warp.sum(own)
    if lane == 0:
        below_of[unsafe_offset=warp_idx] = below
        own_of[unsafe_offset=warp_idx] = own
    barrier()
    var before = UInt32(0)
    if lane < n_warps:
        before = below_of[unsafe_offset=lane]
        if lane < warp_idx:
            before += own_of[unsafe_offset=lane]
    var row = warp.sum(before)
    if Int(thread_idx.x) == 0:
        choices.begin(expert, row)
    if own == 0:
        return
    for first in range(begin, end, _STEP):
        var loaded = choices.experts(first, lane)
        comptime for i in range(_IN_FLIGHT):
            var n = UInt32(0)
            comptime for j in range(_FOUR):
                n += UInt32(1) if loaded[i][j] == expert else 0
            if warp.vote[DType.uint32](n > 0) != 0:
                var ended = row + warp.prefix_sum(n)
                var of_lane = ended - n
                comptime for j in range(_FOUR):
                    if loaded[i][j] == expert:
                        var choice = place(first, lane, i) + j
                        choices.put(choice, expert, of_lane)
                        of_lane += 1
                row = warp.shuffle_idx(ended, UInt32(WARP_SIZE - 1))


def launch_sort(choices: Choices, context: DeviceContext) raises:
    var n_warps = min(max(ceildiv(choices.n_choices, _STEP), 1), _MAX_WARPS)
    context.enqueue_function(
        context.compile_function[sort_kernel](),
        choices,
        grid_dim=choices.n_experts + 1,
        block_dim=n_warps * WARP_SIZE,
    )


def cpu_sort(choices: Choices):
    var next = List[UInt32](length=choices.n_experts + 2, fill=0)
    for choice in range(choices.n_choices):
        next[Int(choices.expert(choice)) + 1] += 1
    for expert in range(choices.n_experts + 1):
        next[expert + 1] += next[expert]
        choices.begin(UInt32(expert), next[expert])
    for choice in range(choices.n_choices):
        var expert = choices.expert(choice)
        choices.put(choice, expert, next[Int(expert)])
        next[Int(expert)] += 1


@extensibility.register("max_ep.sort_choices")
struct SortChoices:
    """Sorts a router's choices by expert; those of one expert stay in order.

    `row_offsets` and `expert_ids` are as dispatch gives them.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        row_offsets: OutputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, rank=1, ...],
        token_of_row: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_of_choice: OutputTensor[dtype=DType.int32, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var choices = Choices(
            row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            expert_ids={unsafe_from_address = Int(expert_ids.unsafe_ptr())},
            token_of_row={unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            row_of_choice={unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            ids={unsafe_from_address = Int(ids.unsafe_ptr())},
            n_choices=ids.dim_size(0) * ids.dim_size(1),
            n_experts=expert_ids.dim_size(0),
            top_k=ids.dim_size(1),
        )
        comptime if is_gpu[target]():
            launch_sort(choices, ctx)
        else:
            cpu_sort(choices)


@fieldwise_init
struct WeightedRows[dtype: DType, top_k: Int](KernelArgument):
    """Rows of experts that are added up for each token, in order of choice."""

    comptime width = 16 // size_of[Scalar[Self.dtype]]()

    var y: Out[Self.dtype]
    """`[n_tokens][n_columns]`."""
    var rows: In[Self.dtype]
    """`[n_rows][n_columns]`; on GPUs 16-byte aligned."""
    var row_of_choice: In[DType.int32]
    """`[n_tokens][top_k]`, below 0 for none."""
    var weights: In[DType.float32]
    """`[n_tokens][top_k]`."""
    var n_tokens: Int
    var n_columns: Int
    """A multiple of `width`."""

    @always_inline
    def add(self, token: Int, column: Int):
        """Adds up `width` columns of a token, in float32."""
        var sum = SIMD[DType.float32, Self.width](0)
        var first = token * Self.top_k
        comptime for begin in range(0, Self.top_k, _ROWS_IN_FLIGHT):
            comptime n = min(_ROWS_IN_FLIGHT, Self.top_k - begin)
            var found = Array[Int32, n](fill=0)
            var parts = Array[SIMD[Self.dtype, Self.width], n](fill=0)
            var weights = Array[Float32, n](fill=0)
            comptime for i in range(n):
                found[i] = self.row_of_choice[unsafe_offset=first + begin + i]
                weights[i] = self.weights[unsafe_offset=first + begin + i]
            comptime for i in range(n):
                parts[i] = self.rows.unsafe_load[width=Self.width, alignment=16](
                    Int(max(found[i], 0)) * self.n_columns + column
                )
            comptime for i in range(n):
                var part = parts[i].cast[DType.float32]()
                var more = fma(type_of(sum)(weights[i]), part, sum)
                sum = SIMD[DType.bool, Self.width](fill=found[i] >= 0).select(more, sum)
        self.y.unsafe_store[alignment=16](
            token * self.n_columns + column, sum.cast[Self.dtype]()
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_N_THREADS)),
    # Without it the assembler loads two rows at a time, with half of the registers.
    `nvvm.minctasm`=SIMDLength(8),
)
def add_kernel[dtype: DType, top_k: Int](rows: WeightedRows[dtype, top_k]):
    comptime width = rows.width
    var thread = UInt32(block_idx.x) * UInt32(_N_THREADS) + UInt32(thread_idx.x)
    var token, vector = divmod(thread, UInt32(rows.n_columns // width))
    if Int(token) < rows.n_tokens:
        rows.add(Int(token), Int(vector) * width)


def launch_add(rows: WeightedRows, context: DeviceContext) raises:
    var n_threads = rows.n_tokens * (rows.n_columns // rows.width)
    context.enqueue_function(
        context.compile_function[add_kernel[rows.dtype, rows.top_k]](),
        rows,
        grid_dim=ceildiv(n_threads, _N_THREADS),
        block_dim=_N_THREADS,
    )


@extensibility.register("max_ep.add_rows")
struct AddRows:
    """Adds up the weighted rows of each token in order of its choices, in float32."""

    @staticmethod
    def execute[
        target: StaticString, top_k: Int
    ](
        y: OutputTensor[rank=2, ...],
        rows: InputTensor[dtype=y.dtype, rank=2, ...],
        row_of_choice: InputTensor[dtype=DType.int32, rank=2, ...],
        weights: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var added = WeightedRows[y.dtype, top_k](
            y={unsafe_from_address = Int(y.unsafe_ptr())},
            rows={unsafe_from_address = Int(rows.unsafe_ptr())},
            row_of_choice={unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            weights={unsafe_from_address = Int(weights.unsafe_ptr())},
            n_tokens=y.dim_size(0),
            n_columns=y.dim_size(1),
        )
        if row_of_choice.dim_size(0) != added.n_tokens:
            raise Error(
                t"max_ep: add_rows takes weights of the tokens of the choices; given"
                t" {added.n_tokens} and {row_of_choice.dim_size(0)} tokens"
            )
        if added.n_tokens == 0:
            return
        comptime if is_gpu[target]():
            launch_add(added, ctx)
        else:
            for token in range(added.n_tokens):
                for column in range(0, added.n_columns, added.width):
                    added.add(token, column)
