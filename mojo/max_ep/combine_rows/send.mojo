# SPDX-License-Identifier: Apache-2.0
"""How a warp sends expert rows back to the places of their choices."""
from max.gpu import barrier, block_idx, syncwarp, thread_idx
from std.sys import size_of

from ..device.block import Block
from ..device.done_words import await_done_words
from ..device.shared import shared
from ..device.warp import bytes_at, copy_warp
from ..protocol.arguments import GivenRows
from ..protocol.counters import Word
from ..protocol.failures import Failure, SEND
from ..protocol.flags import message_flag, publish
from ..protocol.layout import Group
from ..protocol.message_sizes import plain_token_bytes
from ..protocol.transport import combine_put_offset, put_message_warp
from ..row_limit.kept_counts import publish_kept_counts

comptime NEXT_ROW = 0
"""Control word: next row to send."""
comptime NEXT_CHUNK = 1
"""Control word: next chunk of a token to reduce."""
comptime N_CONTROL = 2


@always_inline
def send_rows[
    group: Group, //, dtype: DType, sends_own: Bool
](given: GivenRows, n_senders: Int, put_buf: UInt64, block: Block[group]):
    """Sends this block's share of the rows, with its first warps; all warps call it."""
    # What dispatch has recorded of the pairs.
    comptime n_pairs = group.n_pairs()
    var pair_rows = shared[Int32, n_pairs]()
    var pair_counts = shared[Int32, n_pairs]()
    for pair in range(Int(thread_idx.x), n_pairs, group.num_threads):
        pair_rows[unsafe_offset=pair] = Int32(block.counters.pair_row(pair))
        pair_counts[unsafe_offset=pair] = Int32(block.counters.pair_count(pair))
    barrier()
    if block.warp_idx >= n_senders:
        return
    comptime row_bytes = plain_token_bytes(group.hidden_size, size_of[Scalar[dtype]]())
    var sent = block.sending()
    if not await_done_words(
        group.combine_done_offset(0),
        block.before.generation[Word.COMBINE_SENT](),
        block,
    ):
        return
    comptime if group.drops_rows:
        if block_idx.x == 0 and block.warp_idx == 0:
            publish_kept_counts(block)
    # Slot by slot over all pairs: all sources get rows all the time, and
    # tokens are complete about in their order.
    comptime first = 0 if sends_own else 1
    comptime n_sources = group.n_ranks - first
    comptime n_sent_pairs = group.n_local_experts() * n_sources
    var n_items = block.counters.pair_count(group.n_pairs()) * n_sent_pairs
    while True:
        var item = block.next_item(NEXT_ROW)
        if item >= n_items:
            return
        var slot, sent_pair = divmod(item, n_sent_pairs)
        var local_expert, source = divmod(sent_pair, n_sources)
        var src_rank = group.rank_of_relative(block.my_rank, first + source)
        var pair = group.pair(local_expert, src_rank)
        # What dispatch has recorded of a source may be incomplete if it was masked.
        if block.is_masked(src_rank):
            continue
        if slot >= Int(pair_counts[unsafe_offset=pair]):
            continue
        var row = Int(pair_rows[unsafe_offset=pair]) + slot
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
        comptime if group.uses_shmem():
            if message == offset:
                message = put_buf + UInt64(
                    combine_put_offset(group, src_rank, group.choice(token_idx, k))
                )
                put_to = block.recv_bufs[unsafe_offset=block.my_rank] + offset
        var from_ = given.rows.rows.unsafe_offset(row * row_bytes)
        copy_warp[row_bytes](bytes_at(message), from_, block.lane)
        syncwarp()
        # I2: a message's flag is published after all of the message.
        comptime if group.uses_shmem():
            if put_to != 0:
                # I3: as in dispatch, a done word ends the use of the put buffer.
                put_message_warp(
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
            var flag = message_flag(bytes_at(message), group.combine_msg_bytes)
            publish(flag, sent, expert_id)
