# SPDX-License-Identifier: Apache-2.0
"""How a warp sends partial sums to the ranks of the tokens that have a row here."""
from max.gpu import block_idx, grid_dim, syncwarp, WARP_SIZE

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.puts import send_message_warp
from ..device.schedule import Chunk
from ..device.warp import any_lane, bytes_at, in_32_bits
from ..protocol.arguments import CombinedTokens
from ..protocol.counters import NO_ROW, Taken, Word
from ..protocol.flags import arrive_with_block
from ..protocol.layout import Group, MESSAGE_ALIGN, SOURCE_INFO_BYTES
from ..protocol.token_format import BytePointer
from ..row_limit.kept_counts import publish_kept_counts
from .partials import from_all_blocks, LaneSlice, n_rows_at_once, send_split
from .roles import N_SPLIT_ROUNDS, NEXT_SEND, SENT_PARTS, TokenRecord
from .weights import LaneWeight, own_weight


@always_inline
def n_sources[group: Group, keeps_own: Bool]() -> Int:
    """Counts the ranks whose sums a launch makes that sends: its own if it keeps them.
    """
    return group.n_ranks if keeps_own else group.n_ranks - 1


@always_inline
def sum_to_send[group: Group, keeps_own: Bool](number: Int) -> Tuple[Int, Int]:
    """Finds the relative rank and the token of a sum that is sent."""
    comptime n_others = max(1, n_sources[group, keeps_own]())
    var token_idx, other = divmod(number, n_others)
    # Not all owners begin with the same rank; its own sums come last.
    var source = 1 + other
    comptime if keeps_own:
        source = source % group.n_ranks
    return (source, token_idx)


@always_inline
def send_partials[
    group: Group, dtype: DType, //, partial_dtype: DType, are_few: Bool, keeps_own: Bool
](
    expert_rows: BytePointer,
    combined: CombinedTokens[dtype],
    n_senders: Int,
    prefetched: TokenRecord,
    block: Block[group],
):
    """Sends partial sums. With `keeps_own` the result holds this rank's own, until others
    are added."""
    comptime Slice = LaneSlice[group, dtype, partial_dtype]
    comptime n_others = n_sources[group, keeps_own]()
    comptime if n_others > 0:
        comptime if group.drops_rows:
            if block_idx.x == 0 and block.warp_idx == 0:
                if not await_readers(block):
                    return
                publish_kept_counts(block)
        var lane = block.lane
        var my_rank = block.my_rank
        var n_blocks = Int(grid_dim.x)
        var most = block.before.number[Word.MOST_RECEIVED]()
        var n_sums = most * n_others
        var are_in_parts = group.is_linked() and n_sums <= N_SPLIT_ROUNDS * n_blocks
        var split = send_split[group, Slice.n_steps, are_few](most, are_in_parts)
        var is_waiting = True
        # Over several hosts, as if it were in parts.
        var is_prefetched = are_in_parts or not group.is_linked()
        var from_all = from_all_blocks[group](most)
        var next = Int(block_idx.x) + block.warp_idx * n_blocks
        var taken = Int32(next)
        var part = block.warp_idx
        while True:
            var chunk: Chunk
            var round = 0
            if are_in_parts:
                # All parts of a sum are of one block.
                chunk = split.chunk(part)
                part += n_senders
                round = chunk.whole
                chunk.whole = round * n_blocks + Int(block_idx.x)
                if chunk.whole >= n_sums:
                    return
            else:
                var number = next
                comptime if not are_few:
                    number = block.of_lane_0(taken)
                if number >= n_sums * split.n_chunks():
                    return
                comptime if not are_few:
                    # Taken now, so that the warp need not wait for it.
                    taken = block.take[Taken.SUM_SENDS](NEXT_SEND, from_all)
                    taken += Int32(n_senders * n_blocks)
                else:
                    # A counter would cost one more trip to shared memory.
                    next += n_senders * n_blocks
                chunk = split.chunk(number)
            var source, token_idx = sum_to_send[group, keeps_own](chunk.whole)
            var saved = prefetched
            if not are_few or not is_prefetched:
                saved = TokenRecord.of(block.counters, source, token_idx, lane)
            is_prefetched = False
            comptime if keeps_own:
                if token_idx >= Int(saved.n_tokens):
                    saved.row = NO_ROW
                # Its own sum may be 0. The receive phase refuses another number of
                # tokens than was dispatched.
                if source == 0:
                    if token_idx >= in_32_bits(combined.n_tokens):
                        continue
                elif not any_lane(saved.row >= 0):
                    continue
            else:
                if token_idx >= Int(saved.n_tokens) or not any_lane(saved.row >= 0):
                    continue
            var src_rank = group.rank_of_relative(my_rank, source)
            # What dispatch has recorded of a source may be incomplete if it was masked.
            if block.is_masked(src_rank):
                continue
            comptime if group.relays:
                if block.relays_for(src_rank):  # `add_for_hosts` sends it
                    continue
            # I4: the partial sums of a rank have one writer.
            var to = bytes_at(
                block.recv_bufs[unsafe_offset=src_rank]
                + UInt64(group.partial_offset(my_rank, token_idx))
            )
            comptime if group.relays:
                if block.is_far(src_rank):
                    to = _place_at_relay(src_rank, token_idx, block)
            elif group.spans_hosts():
                if block.is_far(src_rank):
                    to = block.recv_buf().unsafe_offset(
                        group.staged_partial_offset(src_rank, token_idx)
                    )
            var weight = LaneWeight[group].of_source(
                saved.weight, block, src_rank, group.choice(token_idx, lane)
            )
            comptime if keeps_own:
                if source == 0:
                    var weights = combined.router_weights
                    weight = own_weight(weights, saved.row, token_idx, block)
            for step in range(chunk.begin, chunk.end):
                var slice = Slice(step * WARP_SIZE + lane)
                var sum = Slice.Sum(0)
                slice.add_rows[n_rows_at_once[are_few]()](
                    sum, expert_rows, saved.row, weight
                )
                comptime if group.late_weights:
                    if any_lane(weight.is_late):
                        return
                comptime if keeps_own:
                    if source == 0:
                        if slice.idx < Slice.n_slices:
                            var result = BytePointer(
                                unsafe_from_address=Int(combined.tokens)
                            ).unsafe_offset(token_idx * Slice.row_bytes)
                            slice.store_row(result, sum)
                        continue
                if is_waiting:
                    # I3, for partial sums.
                    if not await_readers(block):
                        return
                    is_waiting = False
                slice.send(to, sum)
            comptime if group.spans_hosts() and not group.relays:
                if block.is_far(src_rank):
                    if are_in_parts and not _is_last(round, split.n_chunks(), block):
                        continue
                    var offset = UInt64(group.partial_offset(my_rank, token_idx))
                    put_partial(to, offset, src_rank, block)


@always_inline
def _place_at_relay[
    group: Group, //
](src_rank: Int, token_idx: Int, block: Block[group]) -> BytePointer:
    """Locates a partial sum where the rank of this host adds it that has the source's place.
    """
    comptime n = group.n_mapped
    var rank = group.relay_to(src_rank, block.my_rank, n)
    var offset = group.gathered_partial_offset(src_rank, block.my_rank, token_idx, n)
    return bytes_at(block.recv_bufs[unsafe_offset=rank] + UInt64(offset))


@always_inline
def _is_last(round: Int, n_parts: Int, block: Block[...]) -> Bool:
    """Returns to a warp that has staged a part of a sum whether all parts are there."""
    syncwarp()
    var is_last = False
    if block.lane == 0:
        is_last = arrive_with_block(block.word(SENT_PARTS + round)) == n_parts - 1
    return any_lane(is_last)


@always_inline
def put_partial[
    group: Group, //
](staged: BytePointer, offset: UInt64, src_rank: Int, block: Block[group]):
    """Puts a staged partial sum, and its flag, to a rank of another host."""
    comptime n_bytes = group.combine_msg_bytes - SOURCE_INFO_BYTES
    comptime assert n_bytes % MESSAGE_ALIGN == 0, "whole vectors are sent"
    var to = block.recv_bufs[unsafe_offset=block.my_rank] + offset
    syncwarp()
    # I2: the flag comes after all of the sum. I3: a done word ends the use of its place.
    send_message_warp(
        to,
        UInt64(Int(staged)),
        n_bytes,
        to + UInt64(n_bytes),
        block.sending(),
        0,
        src_rank,
    )
