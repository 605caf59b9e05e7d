# SPDX-License-Identifier: Apache-2.0
"""Counts of all ranks, and the row positions computed from them.

Each of these words holds its generation. A wait for several words polls all missing
ones at once, because polling one after another would cost a memory latency each.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, syncwarp, WARP_SIZE
from std.bit import pop_count
from std.math import ceildiv

from ..device.block import Block
from ..device.shared import shared, SharedInts
from ..device.warp import any_lane, max_of_lanes, sum_of_lanes
from ..protocol.failures import Failure, RECEIVE
from ..protocol.flags import (
    arrive_in_block,
    count_of,
    flag_at,
    flag_word,
    generation_of,
    load_acquire_block,
    load_relaxed_sys,
    load_relaxed_sys_2,
    store_release_block,
)
from ..protocol.layout import count_offset, Group, MESSAGE_ALIGN, round_up
from ..protocol.row_tables import RowTables
from ..protocol.token_format import BytePointer
from ..row_limit.kept_rows import largest_level
from .roles import FAILED, N_INDEX_WARPS, SCANNED, SUMMED
from .token_counts import publish_decision, settle

comptime _PAIRS_OF_LANE = 8
"""Pairs that a lane reads at once: a load has two neighbouring words."""
comptime _PAIRS_AT_ONCE = _PAIRS_OF_LANE * WARP_SIZE
"""Pairs that a warp reads at once: so many have one warp, more have several."""

comptime _LaneCounts = Array[UInt64, _PAIRS_OF_LANE]
"""Flags that hold the counts of a lane's pairs."""


@always_inline
def pair_of_lane(first: Int, i: Int, lane: Int) -> Int:
    """Numbers the pairs that a lane reads: neighbours, two of each load."""
    return first + (i // 2 * WARP_SIZE + lane) * 2 + i % 2


struct SharedRowOffsets[group: Group](TrivialRegisterPassable):
    """Row positions of all sources, in shared memory of a block."""

    comptime n_pairs = Self.group.n_pairs()
    comptime n_scanners = min(N_INDEX_WARPS, ceildiv(Self.n_pairs, _PAIRS_AT_ONCE))
    """The last index warps scan: they index least."""
    comptime _pairs_of_scanner = _PAIRS_AT_ONCE * ceildiv(
        Self.n_pairs, Self.n_scanners * _PAIRS_AT_ONCE
    )

    var block: Block[Self.group]
    var tables: RowTables[Self.group]
    var pair_rows: SharedInts
    """The rows before each pair, packed, and before the end."""
    var sums: SharedInts
    """For each scanner, the rows of its pairs."""
    var largest_of: SharedInts
    """For each scanner, the rows of its largest pair."""
    var gaps: SharedInts
    """With `Group.row_alignment`: the places without a row before each local expert,
    and before the end."""

    comptime _has_gaps = Self.group.row_alignment > 1

    @always_inline
    def __init__(out self, block: Block[Self.group], tables: RowTables[Self.group]):
        self.block = block
        self.tables = tables
        comptime n_padded = Self.n_scanners * Self._pairs_of_scanner
        self.pair_rows = shared[Int32, n_padded + 1, MESSAGE_ALIGN]()
        self.sums = shared[Int32, N_INDEX_WARPS]()
        self.largest_of = shared[Int32, N_INDEX_WARPS]()
        comptime n_gaps = Self.group.n_local_experts() + 1
        self.gaps = shared[Int32, n_gaps if Self._has_gaps else 1]()

    @always_inline
    def rows_before(self, pair: Int) -> Int:
        return Int(self.pair_rows[unsafe_offset=pair])

    @always_inline
    def _n_rows_of_pair(self, pair: Int) -> Int:
        return self.rows_before(pair + 1) - self.rows_before(pair)

    @always_inline
    def _n_rows_of_expert(self, local_expert: Int) -> Int:
        return self.rows_before(Self.group.pair(local_expert + 1, 0)) - (
            self.rows_before(Self.group.pair(local_expert, 0))
        )

    @always_inline
    def first_row_of_pair(self, pair: Int) -> Int32:
        var row = self.pair_rows[unsafe_offset=pair]
        comptime if Self.group.is_padded:
            var local_expert = pair // Self.group.n_ranks
            row += (
                Int32(self.tables.first_row(local_expert, 0))
                - self.pair_rows[unsafe_offset=Self.group.pair(local_expert, 0)]
            )
        comptime if Self._has_gaps:
            row += self.gaps[unsafe_offset=pair // Self.group.n_ranks]
        return row

    @always_inline
    def has_row(self, pair: Int, position: Int32) -> Bool:
        return self.pair_rows[unsafe_offset=pair] + position < (
            self.pair_rows[unsafe_offset=pair + 1]
        )

    @always_inline
    def await_pair_rows(self) -> Bool:
        self.block.await_word(SCANNED, Self.n_scanners)
        return load_acquire_block(self.block.word(FAILED)) == 0

    @always_inline
    def _await_counts(self, mut words: _LaneCounts, first: Int, end: Int) -> Bool:
        """Waits for the counts of a lane's pairs, all that are missing at once."""
        var my_counts = self.block.my_counts()
        var is_missing = Array[Bool, _PAIRS_OF_LANE](fill=False)
        comptime for i in range(_PAIRS_OF_LANE):
            var pair = pair_of_lane(first, i, self.block.lane)
            is_missing[i] = pair < end
            if self.block.is_masked(pair % Self.group.n_ranks):
                # Whatever it has sent, the pair has no rows.
                words[i] = flag_word(self.block.receiving(), 0)
                is_missing[i] = False
        var n_polls = 0
        while True:
            var missing = self._poll(words, is_missing, my_counts, first)
            if missing < 0:
                break
            comptime if Self.group.masks:
                var pair = pair_of_lane(first, missing, self.block.lane)
                var word = settle(self.block, n_polls, pair % Self.group.n_ranks, pair)
                if generation_of(word) == self.block.receiving():
                    comptime for i in range(_PAIRS_OF_LANE):
                        if i == missing:
                            words[i] = word
                            is_missing[i] = False
                    # The next poll follows at once.
                    n_polls -= 1
            else:
                # Where no rank masks, it does not matter which rank is late.
                if self.block.give_up_if_late(n_polls, rank=0):
                    var pair = pair_of_lane(first, missing, self.block.lane)
                    self.block.fail(
                        Failure.NO_COUNT,
                        pair % Self.group.n_ranks,
                        Self.group.expert_of_pair(self.block.my_rank, pair),
                        load_relaxed_sys(
                            flag_at(my_counts, count_offset[Self.group](pair))
                        ),
                    )
                    break
        comptime if Self.group.masks:
            comptime for i in range(_PAIRS_OF_LANE):
                var pair = pair_of_lane(first, i, self.block.lane)
                if pair < end:
                    publish_decision(self.block, words[i], pair)
        var is_late = False
        comptime for i in range(_PAIRS_OF_LANE):
            is_late = is_late or is_missing[i]
        return not any_lane(is_late)

    @always_inline
    def _poll(
        self,
        mut words: _LaneCounts,
        mut is_missing: Array[Bool, _PAIRS_OF_LANE],
        my_counts: BytePointer,
        first: Int,
    ) -> Int:
        """Loads the counts that are missing; returns one that still is, or -1."""
        comptime for i in range(0, _PAIRS_OF_LANE, 2):
            if is_missing[i] or is_missing[i + 1]:
                var pair = pair_of_lane(first, i, self.block.lane)
                comptime if Self.group.is_linked():
                    # Neighbours are of other sources, and stand elsewhere.
                    comptime for j in range(2):
                        if is_missing[i + j]:
                            words[i + j] = load_relaxed_sys(
                                flag_at(my_counts, count_offset[Self.group](pair + j))
                            )
                    continue
                var two = load_relaxed_sys_2(
                    flag_at(my_counts, Self.group.dispatch_count_offset(pair))
                )
                comptime for j in range(2):
                    # What was taken in place of a count stays.
                    if not Self.group.masks or is_missing[i + j]:
                        words[i + j] = two[j]
        var missing = -1
        comptime for i in range(_PAIRS_OF_LANE):
            is_missing[i] = (
                is_missing[i] and generation_of(words[i]) != self.block.receiving()
            )
            if is_missing[i]:
                missing = i
        return missing

    @always_inline
    def _read_counts(self, n_before_all: Int32, scanner: Int) -> Bool:
        var n_held = Self.group.n_experts_on(self.block.my_rank)
        var begin = scanner * Self._pairs_of_scanner
        var end = min(begin + Self._pairs_of_scanner, Self.n_pairs)
        var n_before = n_before_all
        var largest: Int32 = 0
        for first in range(begin, end, _PAIRS_AT_ONCE):
            # The places after those of this rank's experts stay empty.
            var end_held = min(end, n_held * Self.group.n_ranks)
            var words = _LaneCounts(fill=0)
            if not self._await_counts(words, first, end_held):
                return False
            # Neighbouring lanes have read neighbouring words. Now a lane has
            # neighbouring pairs, so that lanes are added up once.
            comptime for i in range(0, _PAIRS_OF_LANE, 2):
                var pair = pair_of_lane(first, i, self.block.lane)
                var two = SIMD[DType.int32, 2](0)
                if pair < end_held:
                    two[0] = Int32(count_of(words[i]))
                if pair + 1 < end_held:
                    two[1] = Int32(count_of(words[i + 1]))
                self.pair_rows.unsafe_store[alignment=8](pair, two)
                largest = max(largest, two.reduce_max())
            syncwarp()
            var mine = self.pair_rows.unsafe_offset(
                first + self.block.lane * _PAIRS_OF_LANE
            )
            comptime assert _PAIRS_OF_LANE == 8, "a lane adds up two loads of four"
            var low = mine.unsafe_load[width=4, alignment=MESSAGE_ALIGN](0)
            var high = mine.unsafe_load[width=4, alignment=MESSAGE_ALIGN](4)
            var n_mine = low.reduce_add() + high.reduce_add()
            var n = n_before + warp.prefix_sum[exclusive=True](n_mine)
            comptime for i in range(_PAIRS_OF_LANE):
                mine[unsafe_offset=i] = n
                n += low[i] if i < 4 else high[i - 4]
            n_before = warp.shuffle_idx(n, UInt32(WARP_SIZE - 1))
        largest = max_of_lanes(largest)
        if self.block.lane == 0:
            self.sums[unsafe_offset=scanner] = n_before
            self.largest_of[unsafe_offset=scanner] = largest
        return True

    @always_inline
    def _add_sums_before(self, n_shared: Int, scanner: Int) -> Int32:
        """Adds the sums of earlier warps to this one's; returns all rows."""
        # Even after a failure: the other warps wait for this without a deadline.
        syncwarp()
        if self.block.lane == 0:
            arrive_in_block(self.block.word(SUMMED))
        self.block.await_word(SUMMED, Self.n_scanners)
        var sum: Int32 = 0
        if self.block.lane < Self.n_scanners:
            sum = self.sums[unsafe_offset=self.block.lane]
        var sums_before = warp.prefix_sum[exclusive=True](sum) + Int32(n_shared)
        var n_rows = warp.shuffle_idx(sums_before, UInt32(Self.n_scanners))
        var rows_before = warp.shuffle_idx(sums_before, UInt32(scanner))
        var begin = scanner * Self._pairs_of_scanner
        var end = min(begin + Self._pairs_of_scanner, Self.n_pairs)
        for pair in range(begin + self.block.lane, end, WARP_SIZE):
            self.pair_rows[unsafe_offset=pair] += rows_before
        return n_rows

    @always_inline
    def _count_rows(self, n_shared: Int, n_rows_max: Int, scanner: Int):
        var failed = self.block.word(FAILED)
        var is_there = self._read_counts(
            Int32(n_shared) if Self.n_scanners == 1 else 0, scanner
        )
        # Its sum is then anything: what is refused for it is not recorded any more.
        if not is_there and self.block.lane == 0:
            store_release_block(failed, 1)
        var n_rows: Int32
        comptime if Self.n_scanners == 1:
            syncwarp()
            n_rows = self.sums[unsafe_offset=0]
        else:
            n_rows = self._add_sums_before(n_shared, scanner)
        if scanner == 0 and self.block.lane == 0:
            self.pair_rows[unsafe_offset=Self.n_pairs] = n_rows
        comptime if Self.group.drops_rows:
            var n_kept = max(n_rows_max - Self.group.n_shared_max(), 0)
            if scanner == 0:
                self._drop_rows(n_kept)
            n_rows = min(n_rows, Int32(n_shared + n_kept))
        var n_rows_needed = self.tables.n_rows_needed(Int(n_rows))
        comptime if Self._has_gaps:
            if scanner == 0:
                n_rows_needed += self._align_experts()
        if n_rows_needed > n_rows_max and self.block.lane == 0:
            self.block.refuse(
                Failure.TOO_MANY_ROWS, RECEIVE, 0, n_rows_needed, n_rows_max
            )
            store_release_block(failed, 1)
        # Even after a failure: the block waits for all scanners without a deadline.
        syncwarp()
        if self.block.lane == 0:
            arrive_in_block(self.block.word(SCANNED))
        # AFTER: `pair_rows` holds the rows before each pair, once all have arrived.

    @always_inline
    def _drop_rows(self, n_rows_max: Int):
        """Reduces the rows of pairs to those that fit, with the first scanner."""
        # The others have added up their pairs.
        self.block.await_word(SCANNED, Self.n_scanners - 1)
        syncwarp()
        var lane = self.block.lane
        if block_idx.x == 0:
            for i in range(lane, Self.group.n_local_experts(), WARP_SIZE):
                self.block.counters.rows_dropped(i)[] = Int32(self._n_rows_of_expert(i))
        var n_before = self.rows_before(0)
        if self.rows_before(Self.n_pairs) - n_before <= n_rows_max:
            return

        def rows_below(level: Int) {imm} -> Int:
            var n = 0
            for pair in range(lane, Self.n_pairs, WARP_SIZE):
                n += min(self._n_rows_of_pair(pair), level)
            return Int(sum_of_lanes(UInt32(n)))

        var level = largest_level(n_rows_max, rows_below)
        var n_left = n_rows_max - rows_below(level)
        for first in range(0, Self.n_pairs, WARP_SIZE):
            var pair = first + lane
            var count = self._n_rows_of_pair(pair) if pair < Self.n_pairs else 0
            var have_more = warp.vote[DType.uint32](count > level)
            var n_earlier = pop_count(have_more & ((UInt32(1) << UInt32(lane)) - 1))
            if count > level:
                count = level + Int(Int(n_earlier) < n_left)
            n_left -= Int(pop_count(have_more))
            var n = Int(warp.prefix_sum[exclusive=True](Int32(count))) + n_before
            # All lanes have read what one of them writes.
            syncwarp()
            if pair < Self.n_pairs:
                self.pair_rows[unsafe_offset=pair] = Int32(n)
            n_before = Int(warp.shuffle_idx(Int32(n + count), UInt32(WARP_SIZE - 1)))
        if lane == 0:
            self.pair_rows[unsafe_offset=Self.n_pairs] = Int32(n_before)

    @always_inline
    def _align_experts(self) -> Int:
        """Counts the places without a row before each expert, with the first scanner;
        returns all."""
        comptime alignment = Self.group.row_alignment
        comptime n_local_experts = Self.group.n_local_experts()
        # The others have added up their pairs.
        self.block.await_word(SCANNED, Self.n_scanners - 1)
        syncwarp()
        var n_before: Int32 = 0
        for first in range(0, n_local_experts, WARP_SIZE):
            var local_expert = first + self.block.lane
            var gap: Int32 = 0
            if local_expert < n_local_experts:
                var n_rows = self._n_rows_of_expert(local_expert)
                gap = Int32(round_up(n_rows, alignment) - n_rows)
            var n = n_before + warp.prefix_sum[exclusive=True](gap)
            if local_expert < n_local_experts:
                self.gaps[unsafe_offset=local_expert] = n
            n_before = warp.shuffle_idx(n + gap, UInt32(WARP_SIZE - 1))
        if self.block.lane == 0:
            self.gaps[unsafe_offset=n_local_experts] = n_before
        return Int(n_before)

    @always_inline
    def lay_out_rows(self, n_shared: Int, n_rows_max: Int, indexer: Int):
        """Waits for counts and lays out the rows, with an index warp."""
        var scanner = indexer - (N_INDEX_WARPS - Self.n_scanners)
        if scanner >= 0:
            self._count_rows(n_shared, n_rows_max, scanner)
        if block_idx.x != 0:
            return
        if not self.await_pair_rows():
            if indexer == 0:
                self.tables.write_no_rows(self.block.lane, WARP_SIZE)
            return
        self._write_tables(indexer)

    @always_inline
    def _write_tables(self, indexer: Int):
        """Writes where rows are, for outputs and combine, with the first block."""
        var first = indexer * WARP_SIZE + self.block.lane
        for pair in range(first, Self.n_pairs, N_INDEX_WARPS * WARP_SIZE):
            var row = self.rows_before(pair)
            var count = self.rows_before(pair + 1) - row
            var local_expert, src_rank = divmod(pair, Self.group.n_ranks)
            var first_row = Int(self.first_row_of_pair(pair))
            self.block.counters.set_pair_rows(pair, first_row, count)
            var begin = row - self.rows_before(Self.group.pair(local_expert, 0))
            self.tables.write_pair(pair, begin, count)
            if src_rank == 0:
                comptime if Self.group.drops_rows:
                    # It holds the rows that have been announced.
                    self.block.counters.rows_dropped(local_expert)[] -= Int32(
                        self._n_rows_of_expert(local_expert)
                    )
                var n_rows = self.rows_before(pair + Self.group.n_ranks) - row
                self.tables.write_expert(local_expert, first_row, n_rows)
        if indexer != 0:
            return
        var largest: Int32 = 0
        if self.block.lane < Self.n_scanners:
            largest = self.largest_of[unsafe_offset=self.block.lane]
        largest = max_of_lanes(largest)
        if self.block.lane == 0:
            var n_rows = self.rows_before(Self.n_pairs)
            self.tables.write_ends(n_rows)
            var n_needed = self.tables.n_rows_needed(n_rows)
            comptime if Self._has_gaps:
                n_needed += Int(self.gaps[unsafe_offset=Self.group.n_local_experts()])
            self.block.counters.set_pair_rows(Self.n_pairs, n_needed, Int(largest))
