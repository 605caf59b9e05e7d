# SPDX-License-Identifier: Apache-2.0
"""How a warp adds up tokens: own rows, then partial sums in order of rank."""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, WARP_SIZE
from std.utils.numerics import nan

from ..device.block import Block
from ..device.schedule import Schedule
from ..device.warp import any_lane, any_of_lanes, has_bit
from ..protocol.arguments import CombinedTokens
from ..protocol.counters import NO_ROW, rank_elsewhere, Taken, Word
from ..protocol.flags import generation_of, message_flag
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, LaneBytes, SENTINEL
from ..row_limit.kept_counts import await_dropped, record_rows_found
from .partials import from_all_blocks, LaneSlice, n_rows_at_once, sum_split
from .roles import NEXT_SUM, sum_receive_schedule, TokenRecord
from .weights import LaneWeight, own_weight

comptime MAX_PREFETCHED = 8
"""Vectors of partial sums that a lane loads while it adds rows."""


@fieldwise_init
struct SumReceiver[group: Group, dtype: DType, partial_dtype: DType, was_kept: Bool](
    TrivialRegisterPassable
):
    """How each warp adds up tokens. `was_kept`: the result holds this rank's own sums.
    """

    var block: Block[Self.group]
    var expert_rows: BytePointer
    var combined: CombinedTokens[Self.dtype]
    var n_tokens: Int
    var is_refused: Bool
    var prefetched: TokenRecord
    """A record of a token that was loaded before the launch began."""
    var is_prefetched: Bool
    """Whether `prefetched` holds the record of this warp's first token."""

    @always_inline
    def add_tokens[are_few: Bool](self):
        comptime Slice = LaneSlice[Self.group, Self.dtype, Self.partial_dtype]
        comptime n_vectors = Slice.n_partial_vectors
        comptime n_prefetched = Self.group.n_ranks * n_vectors
        comptime is_linked = Self.group.is_linked()
        comptime prefetches = n_prefetched <= MAX_PREFETCHED
        comptime max_prefetched = n_prefetched if prefetches else n_vectors
        var block = self.block
        var lane = block.lane
        var recv_buf = block.recv_buf()
        var split = sum_split[Slice.n_steps, are_few](self.n_tokens)
        var schedule = sum_receive_schedule(
            block.warp_idx, Self.group.num_threads // WARP_SIZE
        )
        var is_broken = self.is_refused
        var round = schedule.first
        var is_known = self.is_prefetched
        var from_all = from_all_blocks[Self.group](self.n_tokens)
        while True:
            var item = Schedule.item(round, Int(block_idx.x), Int(grid_dim.x))
            comptime if not are_few:
                item = block.of_lane_0(block.take[Taken.SUMS](NEXT_SUM, from_all))
            if item >= self.n_tokens * split.n_chunks():
                return
            round += schedule.stride
            var chunk = split.chunk(item)
            var token_idx = chunk.whole
            var saved = self.prefetched
            if not are_few or not is_known:
                saved = TokenRecord.of(block.counters, 0, token_idx, lane)
            is_known = False
            var row = saved.row
            if is_broken:
                row = NO_ROW
            var owner = rank_elsewhere(row)
            comptime if Self.group.relays:
                # One rank of each other host has added its sums.
                if owner >= 0 and block.is_far(owner):
                    owner = block.relay_to(owner)
            comptime if Self.group.masks:
                if owner >= 0 and block.is_masked(owner):
                    owner = -1
            comptime if Self.group.drops_rows:
                if owner >= 0:
                    var choices = block.counters.choices(
                        block.before.generation[Word.DISPATCH_RECEIVED]()
                    )
                    var choice = choices[
                        unsafe_offset=Self.group.choice(token_idx, lane)
                    ]
                    if await_dropped(choice, block):
                        owner = -1
                record_rows_found(token_idx, row >= 0 or owner >= 0, block)
            var owners: UInt32 = 0
            comptime if prefetches:
                owners = any_of_lanes(UInt32(1) << UInt32(owner) if owner >= 0 else 0)
            var output = BytePointer(unsafe_from_address=Int(self.combined.tokens))
            var result = output.unsafe_offset(token_idx * Slice.row_bytes)
            var weight = LaneWeight[Self.group].known(saved.weight, block)
            comptime if Self.group.late_weights and not Self.was_kept:
                var weights = self.combined.router_weights
                weight = own_weight(weights, row, token_idx, block)
            for step in range(chunk.begin, chunk.end):
                var slice = Slice(step * WARP_SIZE + lane)
                # The partial sums are under way while rows are added.
                var loaded = Array[LaneBytes, max_prefetched](fill=LaneBytes(SENTINEL))
                comptime if prefetches:
                    comptime for rank in range(Self.group.n_ranks):
                        var is_loaded = has_bit(owners, rank)
                        comptime if is_linked:
                            # A put is awaited once, and read only then.
                            is_loaded = is_loaded and not (
                                step == chunk.begin and block.is_far(rank)
                            )
                        if is_loaded:
                            slice.load_partial[rank * n_vectors](
                                loaded, slice.partial_of(recv_buf, rank, token_idx)
                            )
                var sum = Slice.Sum(0)
                comptime if Self.was_kept:
                    if slice.idx < Slice.n_slices:
                        slice.add_row(sum, result)
                else:
                    slice.add_rows[n_rows_at_once[are_few, max_prefetched]()](
                        sum, self.expert_rows, row, weight
                    )
                    comptime if Self.group.late_weights:
                        # As if it had been kept.
                        sum = sum.cast[Self.dtype]().cast[DType.float32]()
                    elif Self.group.is_given():
                        # As sums of other ranks: bits do not show where experts are.
                        sum = sum.cast[Self.partial_dtype]().cast[DType.float32]()
                var are_all_there = True
                comptime if prefetches and Self.group.masks:
                    owners = slice.await_partials(
                        loaded, recv_buf, token_idx, owners, block
                    )
                comptime if prefetches:
                    comptime for rank in range(Self.group.n_ranks):
                        if has_bit(owners, rank):
                            var partial_sum = slice.partial_of(
                                recv_buf, rank, token_idx
                            )
                            var is_far = False
                            comptime if is_linked:
                                is_far = block.is_far(rank)
                                if is_far and step == chunk.begin:
                                    if _await_put(partial_sum, rank, block):
                                        slice.load_partial[rank * n_vectors](
                                            loaded, partial_sum
                                        )
                                    else:
                                        are_all_there = False
                                if is_far and are_all_there:
                                    _ = slice.add_partial[
                                        rank * n_vectors, was_awaited=True
                                    ](sum, loaded, partial_sum, rank, block)
                            if not is_far:
                                var came = slice.add_partial[
                                    rank * n_vectors, was_awaited=Self.group.masks
                                ](sum, loaded, partial_sum, rank, block)
                                are_all_there = are_all_there and came
                else:
                    # The lowest owner that is left, each time.
                    var last_owner = -1
                    while True:
                        var next_owner = Int32(Self.group.n_ranks)
                        if owner > last_owner:
                            next_owner = Int32(owner)
                        last_owner = Int(warp.min(next_owner))
                        if last_owner == Self.group.n_ranks:
                            break
                        # All that are missing are polled at once.
                        var partial_sum = slice.partial_of(
                            recv_buf, last_owner, token_idx
                        )
                        comptime if is_linked:
                            if block.is_far(last_owner):
                                var has_come = step != chunk.begin or _await_put(
                                    partial_sum, last_owner, block
                                )
                                are_all_there = are_all_there and has_come
                                if has_come:
                                    slice.load_partial[0](loaded, partial_sum)
                                    _ = slice.add_partial[0, was_awaited=True](
                                        sum, loaded, partial_sum, last_owner, block
                                    )
                                continue
                        slice.load_partial[0](loaded, partial_sum)
                        var came = slice.add_partial[0](
                            sum, loaded, partial_sum, last_owner, block
                        )
                        are_all_there = are_all_there and came
                if not Self.group.masks and any_lane(not are_all_there):
                    is_broken = True
                    owner = -1
                    owners = 0
                    row = NO_ROW
                if slice.idx < Slice.n_slices:
                    comptime if Self.group.fused_shared_expert:
                        slice.add_shared(
                            sum,
                            self.expert_rows.unsafe_offset(token_idx * Slice.row_bytes),
                        )
                    comptime if Self.group.is_given():
                        for i in range(self.combined.n_biases):
                            var bias = BytePointer(
                                unsafe_from_address=Int(self.combined.bias(i))
                            )
                            slice.add_row(
                                sum, bias.unsafe_offset(token_idx * Slice.row_bytes)
                            )
                    if is_broken:
                        sum = nan[DType.float32]()
                    slice.store_row(result, sum)


@always_inline
def _await_put[
    group: Group, //
](partial_sum: BytePointer, owner_rank: Int, block: Block[group]) -> Bool:
    """Waits, with a warp, until a put has brought a partial sum from another host."""
    var flag = message_flag(partial_sum, group.combine_msg_bytes)
    var word = block.await_message(flag, owner_rank)
    return not any_lane(generation_of(word) != block.receiving())
