# SPDX-License-Identifier: Apache-2.0
"""The index of many choices: entries and counts, by blocks.

Each block but the last has a contiguous run of choices. It counts, for each expert, the
choices before the run, and publishes the run's entries. The last block counts all
choices, and publishes the counts. A block reads all choices before its own.

A run is indexed in rounds, of a choice for each thread of the index warps. The position
of a choice is the number of those of its expert before the round, and in it before the
choice.
"""
from max.gpu import block_idx, grid_dim, named_barrier, WARP_SIZE
from std.math import ceildiv

from ..device.block import Block
from ..device.shared import SharedInts
from ..protocol.counters import NO_EXPERT
from ..protocol.flags import (
    fetch_add_block,
    load_acquire_block,
    SharedWord,
    store_release_block,
)
from ..protocol.layout import Group, MESSAGE_ALIGN
from .choices import Choices, n_shared_ids
from .publish import publish_count, publish_entry
from .roles import GAVE_UP, N_INDEX_WARPS
from .token_ranks import RouterLane

comptime _N_THREADS = N_INDEX_WARPS * WARP_SIZE

# Ids that a lane loads before it uses the first.
comptime _IDS_AT_ONCE = 16


@always_inline
def run_of_block[
    multiple: Int = 1
](n_choices: Int, block: Int, n_blocks: Int) -> Tuple[Int, Int]:
    """Returns begin and end; the last block has no run, unless it is the only one. Runs
    have a multiple of some choices."""
    var length = ceildiv(n_choices, max(n_blocks - 1, 1) * multiple) * multiple
    var begin = min(block * length, n_choices)
    return (begin, min(begin + length, n_choices))


@always_inline
def index_by_blocks[
    group: Group
](choices: Choices[group], block: Block[group], indexer: Int, can_write: Bool):
    # Where ids would be, if they were few.
    comptime n_words = _N_THREADS + group.n_experts + WARP_SIZE
    comptime assert n_shared_ids[group]() >= n_words, "a round and the counts fit"
    var ids_of_round = choices.shared_ids
    var n_before = ids_of_round.unsafe_bitcast[UInt32]().unsafe_offset(_N_THREADS)
    var me = indexer * WARP_SIZE + block.lane
    for expert in range(me, group.n_experts, _N_THREADS):
        n_before[unsafe_offset=expert] = 0
    if not can_write and block.lane == 0:
        store_release_block(block.word(GAVE_UP), 1)
    _index_barrier()
    if load_acquire_block(block.word(GAVE_UP)) != 0:
        return
    var is_last = block_idx.x == grid_dim.x - 1
    # Where ranks are found, a run has whole tokens.
    comptime multiple = group.top_k if group.finds_ranks() else 1
    var begin, end = run_of_block[multiple](
        choices.n_choices, Int(block_idx.x), Int(grid_dim.x)
    )
    # Loaded while the earlier ones are counted.
    var choice = choices.load(begin + me, end)
    if begin < end or is_last:
        comptime if group.finds_ranks():
            var n_tokens = Int(UInt32(begin) // UInt32(group.n_ranks))
            _count_ranks(choices, n_before, n_tokens, indexer, block.lane)
        else:
            for first in range(me, begin, _N_THREADS * _IDS_AT_ONCE):
                var ids = Array[Int32, _IDS_AT_ONCE](fill=NO_EXPERT)
                comptime for i in range(_IDS_AT_ONCE):
                    if first + i * _N_THREADS < begin:
                        ids[i] = choices.load_id(first + i * _N_THREADS)
                comptime for i in range(_IDS_AT_ONCE):
                    _count_id[group](n_before, ids[i], block.lane)
    for first in range(begin, end, _N_THREADS):
        var number = first + me
        var is_expert = choice.is_expert[group]()
        ids_of_round[unsafe_offset=me] = choice.id if is_expert else NO_EXPERT
        _index_barrier()
        if number < end:
            var position: Int32 = 0
            if is_expert:
                position = Int32(n_before[unsafe_offset=Int(choice.id)])
            var n_ids = (indexer + 1) * WARP_SIZE
            position = _add_earlier(position, choice.id, ids_of_round, n_ids, me)
            publish_entry(number, choice, Int(position), block, 0, 1)
        _index_barrier()
        _count_id[group](n_before, choice.id, block.lane)
        choice = choices.load(number + _N_THREADS, end)
    if is_last:
        _index_barrier()
        for expert in range(me, group.n_experts, _N_THREADS):
            publish_count(expert, Int(n_before[unsafe_offset=expert]), block)


@always_inline
def _add_earlier(
    n_before: Int32, id: Int32, ids_of_round: SharedInts, n_ids: Int, me: Int
) -> Int32:
    """Adds the choices of the round that have an id and are before this thread's."""
    var n = n_before
    for i in range(0, n_ids, _IDS_AT_ONCE):
        comptime for j in range(0, _IDS_AT_ONCE, 4):
            var earlier = ids_of_round.unsafe_load[width=4, alignment=MESSAGE_ALIGN](
                i + j
            )
            comptime for k in range(4):
                if earlier[k] == id and i + j + k < me:
                    n += 1
    return n


@always_inline
def _count_id[group: Group](n_of: SharedWord, id: Int32, lane: Int):
    """Counts a choice, with one lane of many at once."""
    var is_expert = id >= 0 and id < Int32(group.n_experts)
    # Not a constant 1: the assembler would choose an instruction for increments of few
    # different words, which is slow if there are many.
    _ = fetch_add_block(
        n_of.unsafe_offset(Int(id) if is_expert else group.n_experts + lane),
        UInt32(1) if is_expert else UInt32(0),
    )


@always_inline
def _count_ranks[
    group: Group
](choices: Choices[group], n_of: SharedWord, end: Int, indexer: Int, lane: Int):
    """Counts for each rank the tokens before `end` that go there, with all index
    warps."""
    comptime Lane = RouterLane[group.router_top_k]
    comptime of_warps = N_INDEX_WARPS * Lane.tokens_at_once
    # A lane of a token counts every `n_lanes`-th rank.
    comptime n_counts = ceildiv(group.n_ranks, Lane.n_lanes)
    var counts = Array[UInt32, n_counts](fill=0)
    for begin in range(indexer * Lane.tokens_at_once, end, of_warps * _IDS_AT_ONCE):
        var ids = Array[Int32, _IDS_AT_ONCE](fill=NO_EXPERT)
        comptime for i in range(_IDS_AT_ONCE):
            var mine = Lane.of(begin + i * of_warps, lane)
            ids[i] = mine.load[group](choices.ids, end)
        comptime for i in range(_IDS_AT_ONCE):
            var mine = Lane.of(begin + i * of_warps, lane)
            var ranks = mine.ranks[group](ids[i]) >> UInt32(mine.k)
            comptime for j in range(n_counts):
                counts[j] += (ranks >> UInt32(j * Lane.n_lanes)) & 1
    comptime for j in range(n_counts):
        if counts[j] != 0:
            var rank = Lane.of(0, lane).k + j * Lane.n_lanes
            _ = fetch_add_block(n_of.unsafe_offset(rank), counts[j])


@always_inline
def _index_barrier():
    """Waits for all index warps of the block; each sees what they wrote."""
    # Barrier 0 is the whole block's.
    named_barrier[Int32(_N_THREADS)](Int32(1))
