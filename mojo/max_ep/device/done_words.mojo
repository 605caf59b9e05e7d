# SPDX-License-Identifier: Apache-2.0
"""How a launch begins and ends for the other ranks: generations and done words.

A rank publishes to every peer which generations it has read; peers write to its memory
again only after that. One word serves both directions: dispatch's generation is in its
upper half, combine's in its lower one.

The next launch that sends publishes it (`publish_earlier_reads`). By then all blocks of
the launches before have ended, so nobody needs to count them. Where ranks share a GPU
the next launch may be queued behind those of others, which wait for the word: there a
launch that only receives publishes it at its end (`end_wait`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import barrier, block_idx, grid_dim, syncwarp, WARP_SIZE

from ..protocol.counters import Word
from ..protocol.failures import Failure, is_fatal, SEND
from ..protocol.flags import (
    arrive_on_gpu,
    count_of,
    flag_at,
    flag_word,
    generation_of,
    is_not_before,
    load_acquire_sys,
    publish,
)
from ..protocol.layout import Group
from ..protocol.transport import put_flag
from .block import Block
from .warp import any_lane, bytes_at

comptime _DONE_POLLS = 16
"""Peers publish some microseconds after their launch began; a poll takes about one."""


@always_inline
def publishes_at_end[sends: Bool](group: Group) -> Bool:
    """Returns whether a launch advances the generations, and publishes what it has read,
    at its end."""
    return not sends and group.shares_gpu


@always_inline
def advance_at_start[
    group: Group, //, sends: Bool, receives: Bool
](warp_idx: Int, n_tokens: Int, block: Block[group]):
    """Advances the generations with one warp of the block that is the last to begin.

    All blocks have read the header by then; all call this. `n_tokens`: of a dispatch.
    """
    comptime if not publishes_at_end[sends](group):
        if block.warp_idx == warp_idx and block.lane == 0:
            var blocks = block.counters.at(Word.BLOCKS_ARRIVED)
            if arrive_on_gpu(blocks) == Int(grid_dim.x) - 1:
                blocks[] = 0
                block.advance[sends, receives](n_tokens)


@always_inline
def publish_earlier_reads[group: Group](warp_idx: Int, block: Block[group]):
    """Publishes, with one warp of the grid, what the launches before have read.

    They are over: the kernel has called `await_launch_before`.
    """
    if block_idx.x == 0 and block.warp_idx == warp_idx:
        _publish_reads(
            block.before.generation[Word.DISPATCH_RECEIVED](),
            block.before.generation[Word.COMBINE_RECEIVED](),
            block,
        )


@always_inline
def await_readers[group: Group](block: Block[group]) -> Bool:
    """Waits, with one warp, until every peer has read what this rank sent it last, unless
    `poll_done_words` has seen that."""
    comptime is_combine = group.is_combine()
    var generation = block.before.generation[_sent(is_combine)]()
    if block.before.generation[_drained(is_combine)]() == generation:
        return True
    var my_counts = block.my_counts()
    var is_met = True
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        # I3: no slot is written before its last reader is done with it.
        var flag = flag_at(my_counts, group.dispatch_done_offset(rank))
        var word = load_acquire_sys(flag)
        var n_polls = 0
        while not is_not_before(_read_of[is_combine](word), generation):
            if block.give_up_if_late(n_polls, rank):
                comptime if not group.masks:
                    block.record(
                        Failure.NOT_READ,
                        SEND,
                        rank,
                        -1,
                        generation,
                        flag_word(_read_of[is_combine](word), 0),
                    )
                is_met = group.masks
                break
            word = load_acquire_sys(flag)
    # Makes what each lane has acquired visible to all lanes of the warp.
    syncwarp()
    return not any_lane(not is_met)


@always_inline
def poll_done_words[group: Group, //, sends: Bool](warp_idx: Int, block: Block[group]):
    """Polls done words of the other direction with one warp of the grid, so that its next
    launch need not wait; no other warp waits for this one."""
    comptime if not publishes_at_end[sends](group):
        if block_idx.x == 0 and block.warp_idx == warp_idx:
            _poll_done_words(block)


@always_inline
def _poll_done_words[group: Group](block: Block[group]):
    comptime is_combine = not group.is_combine()
    var generation = block.before.generation[_sent(is_combine)]()
    var my_counts = block.my_counts()
    for _ in range(_DONE_POLLS):
        var is_met = True
        for rank in range(block.lane, group.n_ranks, WARP_SIZE):
            var word = load_acquire_sys(
                flag_at(my_counts, group.dispatch_done_offset(rank))
            )
            if not is_not_before(
                _read_of[is_combine](word), generation
            ) and not block.is_masked(rank):
                is_met = False
        syncwarp()
        if not any_lane(not is_met):
            if block.lane == 0:
                block.counters.set_generation(_drained(is_combine), generation)
            return


@always_inline
def end_wait[group: Group, //, sends: Bool](block: Block[group]):
    """Ends a launch that `publishes_at_end`, with all threads: the block that is the last
    to end advances and publishes, unless one has failed."""
    comptime if publishes_at_end[sends](group):
        barrier()
        if block.warp_idx != 0:
            return
        var all_done: UInt32 = 0
        if block.lane == 0:
            var blocks = block.counters.at(Word.BLOCKS_ARRIVED)
            if arrive_on_gpu(blocks) == Int(grid_dim.x) - 1:
                blocks[] = 0
                if not is_fatal(block.counters.at(Word.FAILURE)[]):
                    block.advance[False, True](0)
                    all_done = 1
        if warp.shuffle_idx(all_done, UInt32(0)) == 0:
            return
        comptime if group.is_combine():
            _publish_reads(
                block.before.generation[Word.DISPATCH_RECEIVED](),
                block.receiving(),
                block,
            )
        else:
            _publish_reads(
                block.receiving(),
                block.before.generation[Word.COMBINE_RECEIVED](),
                block,
            )


@always_inline
def _publish_reads[
    group: Group
](dispatch_received: UInt32, combine_received: UInt32, block: Block[group]):
    """Publishes, with one warp, which generations this rank has read."""
    # In `end_wait` one lane has acquired what all blocks did.
    syncwarp()
    var offset = group.dispatch_done_offset(block.my_rank)
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        var to = block.counts[unsafe_offset=rank]
        comptime if group.spans_hosts():
            if to == 0:
                var own = block.counts[unsafe_offset=block.my_rank]
                put_flag(
                    own + UInt64(offset), dispatch_received, Int(combine_received), rank
                )
                continue
        publish(flag_at(bytes_at(to), offset), dispatch_received, Int(combine_received))


def _sent(is_combine: Bool) -> Int:
    return Word.COMBINE_SENT if is_combine else Word.DISPATCH_SENT


def _drained(is_combine: Bool) -> Int:
    """The word with the last generation whose readers `poll_done_words` has seen."""
    return Word.COMBINE_DRAINED if is_combine else Word.DISPATCH_DRAINED


@always_inline
def _read_of[in_lower_half: Bool](word: UInt64) -> UInt32:
    return UInt32(count_of(word)) if in_lower_half else generation_of(word)
