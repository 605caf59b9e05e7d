# SPDX-License-Identifier: Apache-2.0
"""Done words on GPUs: a rank publishes to every peer which generations it has read.

Peers write to its memory again only after that. Dispatch by expert and combine of rows
have words of their own. Dispatch by rank and combine of sums share one: dispatch's
generation is in its upper half, combine's in its lower one.

The next launch that sends publishes the shared word (`publish_earlier_reads`). By then
all blocks of the launches before have ended, so nobody needs to count them. A launch
that only receives publishes it at its end (`end_wait`) if ranks share a GPU, or if
combine sends rows: that publishes no done words of dispatch.
"""
from max.gpu import block_idx, syncwarp, WARP_SIZE

from ..protocol.counters import Word
from ..protocol.failures import Failure, record_failure, SEND
from ..protocol.flags import (
    count_of,
    flag_at,
    flag_word,
    generation_of,
    is_not_before,
    load_acquire_sys,
    publish,
)
from ..protocol.layout import Group
from ..protocol.peer_words import FLAG_BYTES
from ..protocol.transport import put_flag
from .block import Block
from .start import elect_last_block
from .warp import any_lane, bytes_at

comptime _DONE_POLLS = 16
"""Peers publish some microseconds after their launch began; a poll takes about one."""


@always_inline
def await_done_words[
    group: Group, //, in_lower_half: Bool = False
](done_offset: Int, generation: UInt32, block: Block[group]) -> Bool:
    """Waits, with one warp, until every peer has read what this rank sent it last."""
    var my_counts = block.my_counts()
    var is_met = True
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        # I3: no slot is written before its last reader is done with it.
        var flag = flag_at(my_counts, done_offset + rank * FLAG_BYTES)
        var word = load_acquire_sys(flag)
        var n_polls = 0
        while not is_not_before(_read_of[in_lower_half](word), generation):
            if block.give_up_if_late(n_polls, rank):
                comptime if not group.masks:
                    record_failure(
                        block.counters,
                        Failure.NOT_READ,
                        SEND,
                        rank,
                        -1,
                        generation,
                        flag_word(_read_of[in_lower_half](word), 0),
                    )
                is_met = group.masks
                break
            word = load_acquire_sys(flag)
    # Makes what each lane has acquired visible to all lanes of the warp.
    syncwarp()
    return not any_lane(not is_met)


@always_inline
def publish_done[group: Group](offset: Int, generation: UInt32, block: Block[group]):
    """Publishes to every rank that its messages have been read."""
    syncwarp()
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        var to = block.counts[unsafe_offset=rank]
        comptime if group.uses_shmem():
            if to == 0:
                var own = block.counts[unsafe_offset=block.my_rank]
                put_flag(own + UInt64(offset), generation, 0, rank)
                continue
        publish(flag_at(bytes_at(to), offset), generation, 0)


# ------------------------------------------------------------------------------ by rank


@always_inline
def await_readers[group: Group](block: Block[group]) -> Bool:
    """Waits for readers by rank, unless `poll_done_words` has seen them."""
    comptime is_combine = group.is_combine()
    var generation = block.before.generation[_sent(is_combine)]()
    if block.before.generation[_drained(is_combine)]() == generation:
        return True
    if not await_done_words[is_combine](
        group.dispatch_done_offset(0), generation, block
    ):
        block.counters.set_broken()
        return False
    return True


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
def end_wait[group: Group](block: Block[group]):
    """Ends a launch that only receives, and publishes what it has read."""
    if not elect_last_block(block.counters):
        return
    if block.lane == 0:
        block.advance[False, True]()
    comptime if group.is_combine():
        _publish_reads(
            block.before.generation[Word.DISPATCH_RECEIVED](), block.receiving(), block
        )
    else:
        _publish_reads(
            block.receiving(), block.before.generation[Word.COMBINE_RECEIVED](), block
        )


@always_inline
def _publish_reads[
    group: Group
](dispatch_received: UInt32, combine_received: UInt32, block: Block[group]):
    """Publishes, with one warp, which generations this rank has read."""
    # After `elect_last_block` one lane has acquired what all blocks did.
    syncwarp()
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        publish(
            block.flag(rank, group.dispatch_done_offset(block.my_rank)),
            dispatch_received,
            Int(combine_received),
        )


@always_inline
def poll_done_words[group: Group](block: Block[group]):
    """Polls done words of the other direction, so that its next launch need not wait;
    a warp that no other waits for calls it."""
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


def _sent(is_combine: Bool) -> Int:
    return Word.COMBINE_SENT if is_combine else Word.DISPATCH_SENT


def _drained(is_combine: Bool) -> Int:
    """The word with the last generation whose readers `poll_done_words` has seen."""
    return Word.COMBINE_DRAINED if is_combine else Word.DISPATCH_DRAINED


@always_inline
def _read_of[in_lower_half: Bool](word: UInt64) -> UInt32:
    return UInt32(count_of(word)) if in_lower_half else generation_of(word)
