# SPDX-License-Identifier: Apache-2.0
"""How many tokens each source sends. With `on_timeout="mask"`, a source that stays
silent counts as having none.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, syncwarp, WARP_SIZE

from ..device.block import Block
from ..device.liveness import NEVER_DECIDED, UNDECIDED
from ..device.shared import shared, SharedInts
from ..device.warp import any_lane
from ..protocol.counters import Word
from ..protocol.failures import Failure, RECEIVE
from ..protocol.flags import (
    count_of,
    flag_at,
    flag_word,
    generation_of,
    load_acquire_block,
    load_acquire_sys,
    load_relaxed_sys,
    POLLS_PER_CLOCK_READ,
    store_relaxed_gpu,
    store_release_block,
)
from ..protocol.layout import Group
from .roles import NO_NUMBERS, TOKENS_READY


@always_inline
def settle(block: Block[...], mut n_polls: Int, src_rank: Int, place: Int) -> UInt64:
    """Counts a poll without success; returns what to take in place of a word that has
    not come for long.

    All blocks must take the same, for they lay out the same rows. The first block
    decides, and masks the source. Others take a word that comes early, then what
    the first has decided. `place`: that of `Counters.decided`.
    """
    n_polls += 1
    if n_polls % POLLS_PER_CLOCK_READ != 0:
        return UNDECIDED
    var generation = block.receiving()
    if block_idx.x == 0:
        if block.liveness().mask_if_late(src_rank):
            return flag_word(generation, 0)
        return UNDECIDED
    var word = block.liveness().read_decision(place)
    if word == NEVER_DECIDED:
        block.record(Failure.NO_COUNT, RECEIVE, src_rank, -1, generation, word)
        return flag_word(generation, 0)
    return word


@always_inline
def publish_decision(block: Block[...], word: UInt64, place: Int):
    """Publishes what the first block took, for blocks that are late."""
    if block_idx.x == 0:
        store_relaxed_gpu(block.counters.decided(place), word)


struct SharedTokenCounts[group: Group](TrivialRegisterPassable):
    """Numbers of tokens of all sources, in shared memory of a block."""

    var block: Block[Self.group]
    var n_tokens_of: SharedInts
    """The tokens of each source, and the most."""

    @always_inline
    def __init__(out self, block: Block[Self.group]):
        self.block = block
        self.n_tokens_of = shared[Int32, Self.group.n_ranks + 1]()

    @always_inline
    def n_tokens(self, src_rank: Int) -> Int:
        return Int(self.n_tokens_of[unsafe_offset=src_rank])

    @always_inline
    def most_tokens(self) -> Int:
        return self.n_tokens(Self.group.n_ranks)

    @always_inline
    def share(self) -> Bool:
        """Awaits the numbers of tokens of all sources for the block, with one warp."""
        var generation = self.block.receiving()
        var my_counts = self.block.my_counts()
        var is_late = False
        var most: Int32 = 0
        for src_rank in range(self.block.lane, Self.group.n_ranks, WARP_SIZE):
            var flag = flag_at(my_counts, Self.group.dispatch_n_tokens_offset(src_rank))
            var word = load_relaxed_sys(flag)
            # A rank that was masked may be late, and its words may come now.
            if self.block.is_masked(src_rank):
                word = flag_word(generation, 0)
            var n_polls = 0
            var place = Self.group.n_pairs() + src_rank
            while generation_of(word) != generation:
                comptime if Self.group.masks:
                    word = settle(self.block, n_polls, src_rank, place)
                    if generation_of(word) == generation:
                        break
                else:
                    if self.block.give_up_if_late(n_polls, src_rank):
                        self.block.fail(Failure.NO_COUNT, src_rank, -1, word)
                        is_late = True
                        break
                word = load_relaxed_sys(flag)
            comptime if Self.group.spans_hosts():
                # The signal of a put: the entries have come.
                word = load_acquire_sys(flag)
            comptime if Self.group.masks:
                publish_decision(self.block, word, place)
            var n = 0 if is_late else count_of(word)
            self.n_tokens_of[unsafe_offset=src_rank] = Int32(n)
            most = max(most, Int32(n))
            comptime if Self.group.has_sums:
                if block_idx.x == 0:
                    var source = Self.group.relative_rank(self.block.my_rank, src_rank)
                    var received = self.block.counters.received_tokens()
                    received[unsafe_offset=source] = Int32(n)
        most = warp.max(most)
        if self.block.lane == 0:
            self.n_tokens_of[unsafe_offset=Self.group.n_ranks] = most
            if block_idx.x == 0:
                self.block.counters.at(Word.MOST_RECEIVED)[] = most
        var are_there = not any_lane(is_late)
        syncwarp()
        if self.block.lane == 0:
            store_release_block(
                self.block.word(TOKENS_READY), 1 if are_there else NO_NUMBERS
            )
        return are_there

    @always_inline
    def await_all(self) -> Bool:
        self.block.await_word(TOKENS_READY, 1)
        syncwarp()
        return load_acquire_block(self.block.word(TOKENS_READY)) != NO_NUMBERS
