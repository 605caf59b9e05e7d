# SPDX-License-Identifier: Apache-2.0
"""The index of many choices: entries and counts, by blocks.

Each block but the last has a contiguous run of choices. It counts, for each expert, the
choices before the run, and publishes the run's entries. The last block counts all
choices, and publishes the counts. A block reads all choices before its own.
"""
from max.gpu import block_idx, grid_dim, named_barrier, WARP_SIZE
from std.math import ceildiv

from ..counters import NO_EXPERT
from ..device.block import Block
from ..flags import fetch_add_block, load_acquire_block, SharedWord, store_release_block
from ..layout import Group, MESSAGE_ALIGN
from .choices import Choices, n_shared_ids
from .publish import publish_count, publish_entry
from .roles import GAVE_UP, N_INDEX_WARPS

# Ids that a lane loads at once from global memory.
comptime _IDS_AT_ONCE = 16

# Ids of a round that are compared before the next are loaded.
comptime _EARLIER_IDS = 16

# Barrier 0 is the whole block's.
comptime _INDEX_BARRIER = Int32(1)


@always_inline
def run_of_block(n_choices: Int, block: Int, n_blocks: Int) -> Tuple[Int, Int]:
    """Returns begin and end; the last block has no run, unless it is the only one."""
    var length = ceildiv(n_choices, max(n_blocks - 1, 1))
    var begin = min(block * length, n_choices)
    return (begin, min(begin + length, n_choices))


@always_inline
def index_by_blocks[
    group: Group
](choices: Choices[group], block: Block[group], indexer: Int, can_write: Bool):
    comptime n_threads = N_INDEX_WARPS * WARP_SIZE
    # Where ids would be, if they were few.
    comptime assert (
        n_shared_ids[group]() >= n_threads + group.n_experts + WARP_SIZE
    ), "a round and the counts fit"
    var experts = choices.shared_ids
    var n_before = experts.unsafe_bitcast[UInt32]().unsafe_offset(n_threads)
    var me = indexer * WARP_SIZE + block.lane
    for expert in range(me, group.n_experts, n_threads):
        n_before[unsafe_offset=expert] = 0
    if not can_write and block.lane == 0:
        store_release_block(block.word(GAVE_UP), 1)
    _index_barrier()
    if load_acquire_block(block.word(GAVE_UP)) != 0:
        return
    var is_last = block_idx.x == grid_dim.x - 1
    var begin, end = run_of_block(choices.n_choices, Int(block_idx.x), Int(grid_dim.x))
    # Loaded while the earlier ones are counted.
    var choice = choices.load(begin + me, end)
    if begin < end or is_last:
        for first in range(me, begin, n_threads * _IDS_AT_ONCE):
            var ids = Array[Int32, _IDS_AT_ONCE](fill=NO_EXPERT)
            comptime for i in range(_IDS_AT_ONCE):
                if first + i * n_threads < begin:
                    ids[i] = choices.load_id(first + i * n_threads)
            comptime for i in range(_IDS_AT_ONCE):
                _count_id[group](n_before, ids[i], block.lane)
    for first in range(begin, end, n_threads):
        var number = first + me
        var is_expert = choice.is_expert[group]()
        experts[unsafe_offset=me] = choice.id if is_expert else NO_EXPERT
        _index_barrier()
        if number < end:
            var position: Int32 = 0
            if is_expert:
                position = Int32(n_before[unsafe_offset=Int(choice.id)])
            # Those of this round before it.
            for i in range(0, (indexer + 1) * WARP_SIZE, _EARLIER_IDS):
                comptime for j in range(0, _EARLIER_IDS, 4):
                    var earlier = experts.unsafe_load[width=4, alignment=MESSAGE_ALIGN](
                        i + j
                    )
                    comptime for k in range(4):
                        if earlier[k] == choice.id and i + j + k < me:
                            position += 1
            publish_entry(number, choice, Int(position), block, 0, 1)
        _index_barrier()
        _count_id[group](n_before, choice.id, block.lane)
        choice = choices.load(number + n_threads, end)
    if is_last:
        _index_barrier()
        for expert in range(me, group.n_experts, n_threads):
            publish_count(expert, Int(n_before[unsafe_offset=expert]), block)


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
def _index_barrier():
    """Waits for all index warps of the block; each sees what they wrote."""
    named_barrier[Int32(N_INDEX_WARPS * WARP_SIZE)](_INDEX_BARRIER)
