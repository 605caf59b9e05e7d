# SPDX-License-Identifier: Apache-2.0
"""Puts entries, counts and the number of tokens to ranks of other hosts, few puts each.

Index warps have written them as to any rank: entries into the places of this rank's own
number, which are the same in all regions, counts into staging places.
"""
from max.gpu import block_idx, grid_dim, syncwarp

from ..device.block import Block
from ..device.puts import send_message_warp, send_words_warp
from ..device.warp import any_lane
from ..protocol.flags import arrive_on_gpu, arrive_with_block
from ..protocol.layout import count_offset, Group
from ..protocol.peer_words import FLAG_BYTES
from ..protocol.transport import put_flag
from .index_large import run_of_block
from .roles import INDEXED, N_INDEX_WARPS


@always_inline
def put_index[group: Group](n_tokens: Int, is_by_blocks: Bool, block: Block[group]):
    """All index warps call it when they are done; the last one of the grid puts. If each
    block has entries that stand together, the last of the block puts these."""
    syncwarp()
    var is_last = False
    if block.lane == 0:
        is_last = arrive_with_block(block.word(INDEXED)) == N_INDEX_WARPS - 1
    if not any_lane(is_last):
        return
    # Entries that nobody awaits must not be under way when the next ones go.
    var puts_run = is_by_blocks and not group.finds_ranks()
    if puts_run:
        _put_run(n_tokens, block)
    is_last = False
    if block.lane == 0:
        var blocks = block.counters.blocks_indexed()
        if arrive_on_gpu(blocks) == Int(grid_dim.x) - 1:
            blocks[] = 0
            is_last = True
    if not any_lane(is_last):
        return
    syncwarp()
    var my_rank = block.my_rank
    var counts = block.counts[unsafe_offset=my_rank]
    var recv = block.recv_bufs[unsafe_offset=my_rank]
    var entries = recv + UInt64(group.entry_offset(my_rank, 0))
    var number = counts + UInt64(group.dispatch_n_tokens_offset(my_rank))
    var to = counts + UInt64(count_offset[group](group.pair(0, my_rank)))
    for i in range(1, group.n_ranks):
        var rank = group.rank_of_relative(my_rank, i)
        if not block.is_far(rank):
            continue
        # I1: only this rank writes what is of its number.
        var n_experts = group.n_experts_on(rank)
        if n_experts > 0:
            var expert = group.expert_id(rank, 0)
            var staged = counts + UInt64(group.staged_count_offset(expert))
            send_words_warp(to, staged, n_experts * FLAG_BYTES, rank)
        if n_tokens > 0 and not puts_run:
            # I2: the number of tokens comes after the entries.
            var n_bytes = group.entry_offset(0, n_tokens * group.top_k)
            send_message_warp[1](
                entries, entries, n_bytes, number, block.sending(), n_tokens, rank
            )
        elif block.lane == 0:
            put_flag(number, block.sending(), n_tokens, rank)


@always_inline
def _put_run[group: Group](n_tokens: Int, block: Block[group]):
    """Puts the entries of this block's choices, with a warp."""
    syncwarp()
    var n_choices = group.choice(n_tokens, 0)
    var begin, end = run_of_block(n_choices, Int(block_idx.x), Int(grid_dim.x))
    if begin >= end:
        return
    var my_rank = block.my_rank
    var to = block.recv_bufs[unsafe_offset=my_rank] + UInt64(
        group.entry_offset(my_rank, begin)
    )
    for i in range(1, group.n_ranks):
        var rank = group.rank_of_relative(my_rank, i)
        if block.is_far(rank):
            # I1: only this rank writes entries of its number.
            send_words_warp(to, to, group.entry_offset(0, end - begin), rank)
