# SPDX-License-Identifier: Apache-2.0
"""How a warp adds up the rows of a token: its own in place, others as they arrive."""
import max.gpu.primitives.warp as warp
from max.gpu import grid_dim, syncwarp, WARP_SIZE
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import size_of
from std.utils.numerics import nan

from ..device.block import Block
from ..device.warp import any_lane, in_32_bits, load16, store16
from ..protocol.arguments import CombinedTokens
from ..protocol.counters import expert_of_choice, NO_EXPERT, row_of_own, Word
from ..protocol.failures import Failure, is_fatal, RECEIVE
from ..protocol.flags import count_of, flag_word, generation_of, message_flag
from ..protocol.layout import Group, MESSAGE_ALIGN
from ..protocol.message_sizes import plain_token_bytes
from ..protocol.token_format import BytePointer, LaneBytes, LocalRows
from ..row_limit.kept_counts import await_dropped, record_rows_found
from .roles import NEXT_CHUNK

comptime ROWS_IN_FLIGHT = 8

comptime _Choices = SIMD[DType.int32, ROWS_IN_FLIGHT]
comptime _Weights = SIMD[DType.float32, ROWS_IN_FLIGHT]


@fieldwise_init
struct TokenRows[group: Group, dtype: DType, own_are_sent: Bool](
    TrivialRegisterPassable
):
    """The rows of a token that a warp adds up; lane `k` knows choice `k`'s.

    `own_are_sent`: whether the launch before has sent rows of own tokens, too.
    """

    comptime width = MESSAGE_ALIGN // size_of[Scalar[Self.dtype]]()

    comptime Sum = SIMD[DType.float32, Self.width]

    comptime row_bytes = plain_token_bytes(
        Self.group.hidden_size, size_of[Scalar[Self.dtype]]()
    )
    comptime n_vectors = Self.row_bytes // MESSAGE_ALIGN

    var received: BytePointer
    """Where rows arrive for this token."""
    var expert_rows: BytePointer
    var choice: Int32
    """What `Counters.choices` says of the lane's choice. If ranks mask, a row
    that has arrived has the rank that sent it here, in place of its expert."""
    var weight: Float32

    @always_inline
    def reduce(
        self,
        result: BytePointer,
        shared_row: BytePointer,
        is_broken: Bool,
        begin: Int,
        end: Int,
        lane: Int,
    ):
        """Adds some vectors of the weighted rows, in choice order."""
        comptime top_k = Self.group.top_k
        var choices, weights = self._batch(0)
        # All lanes take each step, since they hand choices to each other.
        for first_vector in range(begin, end, WARP_SIZE):
            var vector = first_vector + lane
            var is_there = True
            comptime if Self.n_vectors % WARP_SIZE != 0:
                is_there = vector < end
            var sum = Self.Sum(0)
            var shared = LaneBytes(0)
            comptime if Self.group.fused_shared_expert:
                if is_there:
                    shared = load16(shared_row.unsafe_offset(vector * MESSAGE_ALIGN))
            comptime if top_k <= ROWS_IN_FLIGHT:
                self._add(sum, 0, choices, weights, vector, is_there)
            else:
                for first in range(0, top_k, ROWS_IN_FLIGHT):
                    choices, weights = self._batch(first)
                    self._add(sum, first, choices, weights, vector, is_there)
            comptime if Self.group.fused_shared_expert:
                sum = sum.cast[Self.dtype]().cast[DType.float32]()
                sum += Self._wide(shared)
            if is_broken:
                sum = nan[DType.float32]()
            if is_there:
                store16(
                    result.unsafe_offset(vector * MESSAGE_ALIGN),
                    bitcast[DType.uint32, 4](sum.cast[Self.dtype]()),
                )

    @always_inline
    def _add(
        self,
        mut sum: Self.Sum,
        first: Int,
        choices: _Choices,
        weights: _Weights,
        vector: Int,
        is_there: Bool,
    ):
        comptime n = min(ROWS_IN_FLIGHT, Self.group.top_k)
        var parts = Array[LaneBytes, n](fill=0)
        comptime for i in range(n):
            if is_there and choices[i] != NO_EXPERT:
                # If ranks mask, the choice is the rank that sent the row.
                comptime masks = Self.group.masks
                var sender = Int(choices[i]) if masks else 0
                var row = self.received.unsafe_offset(
                    Self.group.combine_message_offset(0, first + i, sender)
                )
                comptime if not Self.own_are_sent:
                    var own = row_of_own(choices[i])
                    if own >= 0:
                        row = self.expert_rows.unsafe_offset(own * Self.row_bytes)
                parts[i] = load16(row.unsafe_offset(vector * MESSAGE_ALIGN))
        comptime for i in range(n):
            if choices[i] != NO_EXPERT:
                sum = fma(Self.Sum(weights[i]), Self._wide(parts[i]), sum)

    @always_inline
    def _batch(self, first: Int) -> Tuple[_Choices, _Weights]:
        """Hands some choices and weights to all lanes; none after the last."""
        comptime assert WARP_SIZE % ROWS_IN_FLIGHT == 0, "no lane to ask"
        var choices = _Choices(NO_EXPERT)
        var weights = _Weights(0)
        comptime for i in range(min(ROWS_IN_FLIGHT, Self.group.top_k)):
            choices[i] = warp.shuffle_idx(self.choice, UInt32(first + i))
            weights[i] = warp.shuffle_idx(self.weight, UInt32(first + i))
        return (choices, weights)

    @staticmethod
    @always_inline
    def _wide(bytes: LaneBytes) -> Self.Sum:
        return bitcast[Self.dtype, Self.width](bytes).cast[DType.float32]()


@always_inline
def _refuse_bad_answer(
    n_tokens: Int, dispatch_generation: UInt32, block: Block[...]
) -> Bool:
    """Returns whether the result cannot be the dispatch's; records why."""
    var n_sent = block.before.n_tokens(dispatch_generation)
    if n_sent != n_tokens:
        block.refuse(Failure.BAD_N_TOKENS, RECEIVE, -1, n_tokens, n_sent)
    if block.is_overtaken(dispatch_generation):
        block.refuse(Failure.OVERTAKEN, RECEIVE)
    # Or something has failed before.
    return is_fatal(block.counters.at(Word.FAILURE)[])


@always_inline
def reduce_tokens[
    group: Group, //, dtype: DType, own_are_sent: Bool
](
    combined: CombinedTokens[dtype],
    expert_rows: LocalRows,
    dispatch_generation: UInt32,
    block: Block[group],
):
    """Reduces this block's share of the tokens, with one warp of several."""
    comptime top_k = group.top_k
    comptime Rows = TokenRows[group, dtype, own_are_sent]
    comptime row_bytes = Rows.row_bytes
    comptime n_vectors = Rows.n_vectors
    comptime n_steps = ceildiv(n_vectors, WARP_SIZE)
    comptime n_warps = group.num_threads // WARP_SIZE
    var n_tokens = in_32_bits(combined.n_tokens)
    var output_tokens = BytePointer(unsafe_from_address=Int(combined.tokens))
    var lane = block.lane
    var received = block.receiving()
    var recv_buf = block.recv_buf()
    var choices = block.counters.choices(dispatch_generation)
    # Few tokens are split into chunks: alone, a warp has at most one; with peers up to
    # four, since rows arrive one after another.
    comptime chunks_of_warp = 1 if group.n_ranks == 1 else 4
    var n_chunks = 1
    while (
        n_chunks < n_steps
        and 2 * n_tokens * n_chunks <= chunks_of_warp * n_warps * Int(grid_dim.x)
    ):
        n_chunks *= 2
    n_chunks = min(n_chunks, n_steps)
    var is_broken = _refuse_bad_answer(n_tokens, dispatch_generation, block)
    while True:
        var item = block.next_item(NEXT_CHUNK)
        if item >= n_tokens * n_chunks:
            return
        var token_idx, chunk = divmod(item, n_chunks)
        var rows = recv_buf.unsafe_offset(group.combine_message_offset(token_idx, 0))
        var choice = NO_EXPERT
        var weight: Float32 = 0
        if lane < top_k:
            choice = choices[unsafe_offset=token_idx * top_k + lane]
            weight = combined.router_weights[unsafe_offset=token_idx * top_k + lane]
        comptime if group.drops_rows:
            if choice >= 0:
                if await_dropped(choice, block):
                    choice = NO_EXPERT
                else:
                    choice = Int32(expert_of_choice(choice, group))
        var own = row_of_own(choice)
        if own >= expert_rows.n_rows:
            block.refuse(
                Failure.TOO_MANY_ROWS, RECEIVE, own, own + 1, expert_rows.n_rows
            )
            is_broken = True
            choice = NO_EXPERT
        if choice >= 0 and not is_broken:
            var expert = Int(choice)
            var owner_rank = expert // group.n_local_experts()
            var word: UInt64 = 0
            if not block.is_masked(owner_rank):
                word = block.await_message(
                    message_flag(
                        rows.unsafe_offset(
                            group.combine_message_offset(0, lane, owner_rank)
                        ),
                        group.combine_msg_bytes,
                    ),
                    owner_rank,
                    expert,
                )
            is_broken = generation_of(word) != received
            comptime if group.masks:
                if is_broken:
                    # Its rank is masked: the token is combined without it.
                    choice = NO_EXPERT
                    is_broken = False
                    word = flag_word(received, expert)
            if not is_broken and count_of(word) != expert:
                block.fail(
                    Failure.WRONG_EXPERT, owner_rank, expert, word, token_idx, lane
                )
                is_broken = True
        comptime if group.drops_rows:
            record_rows_found(token_idx, choice != NO_EXPERT, block)
        is_broken = any_lane(is_broken)
        syncwarp()
        comptime if group.masks:
            # The rank that sent the row, for each has places of its own.
            if choice >= 0:
                choice //= Int32(group.n_local_experts())
            elif own_are_sent and row_of_own(choice) >= 0:
                choice = Int32(block.my_rank)
        Rows(rows, expert_rows.rows, choice, weight).reduce(
            output_tokens.unsafe_offset(token_idx * row_bytes),
            expert_rows.rows.unsafe_offset(token_idx * row_bytes),
            is_broken,
            chunk * n_steps // n_chunks * WARP_SIZE,
            min((chunk + 1) * n_steps // n_chunks * WARP_SIZE, n_vectors),
            lane,
        )
