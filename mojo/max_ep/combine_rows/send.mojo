# SPDX-License-Identifier: Apache-2.0
"""How warps send expert rows back to the places of their choices."""
from max.gpu import block_idx, grid_dim, syncwarp, thread_idx, WARP_SIZE
from std.math import ceildiv
from std.sys import size_of

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.puts import send_message_warp
from ..device.schedule import Chunk, Split
from ..device.shared import shared, SharedInts
from ..device.warp import ACCESSES_IN_FLIGHT, bytes_at, load16_now, store16
from ..protocol.arguments import GivenRows
from ..protocol.counters import Counters
from ..protocol.failures import Failure, SEND
from ..protocol.flags import arrive_with_block, message_flag, publish
from ..protocol.layout import Group, MESSAGE_ALIGN
from ..protocol.message_sizes import plain_token_bytes
from ..protocol.token_format import BytePointer, LaneBytes
from ..protocol.transport import combine_put_offset
from ..row_limit.kept_counts import publish_kept_counts
from .roles import N_SPLIT_ROUNDS, NEXT_ROW, SENT_PARTS

comptime _N_PARTS = 4
"""Parts of a row that warps send at the same time, if rows are few."""


@fieldwise_init
struct SharedPairs(TrivialRegisterPassable):
    """What dispatch has recorded of the pairs, in shared memory."""

    var rows: SharedInts
    """First row of each pair."""
    var counts: SharedInts
    """Rows of each pair; at the end those of the largest."""

    @staticmethod
    @always_inline
    def of[group: Group, //](counters: Counters[group]) -> Self:
        """Copies them with all threads; a block barrier must follow."""
        comptime n = group.n_pairs() + 1
        var rows, counts = shared[Int32, n](), shared[Int32, n]()
        for pair in range(Int(thread_idx.x), n, group.num_threads):
            rows[unsafe_offset=pair] = Int32(counters.pair_row(pair))
            counts[unsafe_offset=pair] = Int32(counters.pair_count(pair))
        return {rows, counts}


@always_inline
def _copy_part[
    row_bytes: Int
](to: BytePointer, from_: BytePointer, part: Chunk, lane: Int):
    """Copies some steps of a row, with one warp."""
    comptime n_vectors = row_bytes // MESSAGE_ALIGN
    comptime in_flight = ACCESSES_IN_FLIGHT
    for first in range(part.begin, part.end, in_flight):
        var loaded = Array[LaneBytes, in_flight](fill=0)
        comptime for is_load in [True, False]:
            comptime for i in range(in_flight):
                var vector = (first + i) * WARP_SIZE + lane
                var is_there = first + i < part.end
                comptime if n_vectors % WARP_SIZE != 0:
                    is_there = is_there and vector < n_vectors
                var at = vector * MESSAGE_ALIGN
                comptime if is_load:
                    loaded[i] = load16_now(from_.unsafe_offset(at), is_there)
                else:
                    if is_there:
                        store16(to.unsafe_offset(at), loaded[i])


@always_inline
def send_rows[
    group: Group, //, dtype: DType, sends_own: Bool
](given: GivenRows, pairs: SharedPairs, put_buf: UInt64, block: Block[group]):
    """Sends some of this block's rows, with each of its sending warps."""
    comptime row_bytes = plain_token_bytes(group.hidden_size, size_of[Scalar[dtype]]())
    comptime n_steps = ceildiv(row_bytes // MESSAGE_ALIGN, WARP_SIZE)
    comptime assert row_bytes % MESSAGE_ALIGN == 0, "whole vectors are sent"
    comptime RowSplit = Split[n_steps, 1 if group.spans_hosts() else _N_PARTS, 1]
    var sent = block.sending()
    if not await_readers(block):
        return
    comptime if group.drops_rows:
        if block_idx.x == 0 and block.warp_idx == 0:
            publish_kept_counts(block)
    # Slot by slot over all pairs: all sources get rows all the time, and
    # tokens are complete about in their order.
    comptime first_source = 0 if sends_own else 1
    comptime n_sources = group.n_ranks - first_source
    comptime n_sent_pairs = group.n_local_experts() * n_sources
    var n_blocks = Int(grid_dim.x)
    var n_items = Int(pairs.counts[unsafe_offset=group.n_pairs()]) * n_sent_pairs
    var split = RowSplit(n_items <= N_SPLIT_ROUNDS * n_blocks)
    while True:
        var part = split.chunk(block.next_round(NEXT_ROW))
        var item = part.whole * n_blocks + Int(block_idx.x)
        if item >= n_items:
            return
        var slot, sent_pair = divmod(item, n_sent_pairs)
        var local_expert, source = divmod(sent_pair, n_sources)
        var src_rank = group.rank_of_relative(block.my_rank, first_source + source)
        var pair = group.pair(local_expert, src_rank)
        # What dispatch has recorded of a source may be incomplete if it was masked.
        if block.is_masked(src_rank):
            continue
        if slot >= Int(pairs.counts[unsafe_offset=pair]):
            continue
        var row = Int(pairs.rows[unsafe_offset=pair]) + slot
        var n_rows = given.rows.n_rows
        if row >= n_rows:
            block.refuse(Failure.TOO_MANY_ROWS, SEND, row, row + 1, n_rows)
            return
        var token_idx = Int(given.src_info[unsafe_offset=2 * row])
        var k = Int(given.src_info[unsafe_offset=2 * row + 1])
        if (
            token_idx < 0
            or token_idx >= group.max_tokens_per_rank
            or k < 0
            or k >= group.top_k
        ):
            block.refuse(Failure.BAD_SOURCE, SEND, row, token_idx, k)
            return
        # I4: a choice has one expert, so one writer.
        var expert_id = group.expert_id(block.my_rank, local_expert)
        var offset = UInt64(group.combine_message_offset(token_idx, k, block.my_rank))
        var message = block.recv_bufs[unsafe_offset=src_rank] + offset
        var put_to: UInt64 = 0
        comptime if group.spans_hosts():
            if message == offset:
                put_to = block.recv_bufs[unsafe_offset=block.my_rank] + offset
                comptime if group.is_linked():
                    message = block.recv_bufs[unsafe_offset=block.my_rank] + UInt64(
                        group.staged_row_offset(src_rank, token_idx, k)
                    )
                else:
                    message = put_buf + UInt64(
                        combine_put_offset(group, src_rank, group.choice(token_idx, k))
                    )
        var from_ = given.rows.rows.unsafe_offset(row * row_bytes)
        _copy_part[row_bytes](bytes_at(message), from_, part, block.lane)
        syncwarp()
        # I2: a message's flag is published after all of the message.
        comptime if group.spans_hosts():
            if put_to != 0:
                # I3: as in dispatch, a done word ends the use of the put buffer.
                send_message_warp(
                    put_to,
                    message,
                    row_bytes,
                    put_to + UInt64(row_bytes),
                    sent,
                    expert_id,
                    src_rank,
                )
                continue
        if block.lane == 0:
            var is_last = True
            if split.are_more:
                var n_sent = arrive_with_block(block.word(SENT_PARTS + part.whole))
                is_last = n_sent == split.n_chunks() - 1
            if is_last:
                var flag = message_flag(bytes_at(message), group.combine_msg_bytes)
                publish(flag, sent, expert_id)
