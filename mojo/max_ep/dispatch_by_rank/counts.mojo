# SPDX-License-Identifier: Apache-2.0
"""Where received tokens go: numbers and counts of all ranks, and rows from them.

All of them are self-tagged words: a wait for several looks at all that are
missing at once, since one after another costs a trip to the memory each.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, syncwarp, WARP_SIZE
from std.math import ceildiv

from ..counters import relative_rank
from ..device.block import Block
from ..device.shared import SharedInts
from ..device.warp import any_lane, bytes_at, max_of_lanes
from ..failures import NO_COUNT, TOO_MANY_ROWS
from ..flags import (
    arrive_in_block,
    count_of,
    flag_at,
    generation_of,
    load_acquire_block,
    load_relaxed_sys,
    load_relaxed_sys_2,
    store_release_block,
    Wait,
)
from ..layout import Group, MESSAGE_ALIGN, n_experts_on_rank
from ..row_tables import RowTables
from .roles import COUNTED, FAILED, N_INDEX_WARPS, RECEIVE, SUMMED


@always_inline
def read_numbers[
    group: Group
](n_tokens_of: SharedInts, block: Block[group], generation: UInt32,) -> Bool:
    """Waits for the numbers of tokens of all sources, with one warp."""
    var my_counts = bytes_at(block.counts[unsafe_offset=block.my_rank])
    var is_late = False
    var most: Int32 = 0
    for src_rank in range(block.lane, group.n_ranks, WARP_SIZE):
        var flag = flag_at(my_counts, group.dispatch_n_tokens_offset(src_rank))
        var word = load_relaxed_sys(flag)
        var wait = Wait(block.deadline)
        while generation_of(word) != generation:
            if wait.has_expired():
                block.fail(
                    NO_COUNT,
                    RECEIVE,
                    src_rank,
                    -1,
                    generation,
                    word,
                )
                is_late = True
                break
            word = load_relaxed_sys(flag)
        var n = 0 if is_late else count_of(word)
        n_tokens_of[unsafe_offset=src_rank] = Int32(n)
        most = max(most, Int32(n))
        comptime if group.has_sums():
            if block_idx.x == 0:
                block.counters.received_tokens(group)[
                    unsafe_offset=relative_rank(
                        block.my_rank, src_rank, group.n_ranks
                    )
                ] = Int32(n)
    most = warp.max(most)
    if block.lane == 0:
        n_tokens_of[unsafe_offset=group.n_ranks] = most
        if block_idx.x == 0:
            block.counters.set_most_received(Int(most))
    return not any_lane(is_late)


comptime _LOADS_OF_LANE = 4

comptime _PAIRS_OF_LANE = 2 * _LOADS_OF_LANE
"""Pairs of a lane: a look is at two neighbouring words."""

comptime _PAIRS_AT_ONCE = _PAIRS_OF_LANE * WARP_SIZE
"""Pairs that a warp counts at once: so many have one warp, more have several."""


@always_inline
def n_counting_warps[group: Group]() -> Int:
    """Says how many of the index warps count: the last ones, which index least.
    """
    comptime n_pairs = group.n_local_experts() * group.n_ranks
    return min(N_INDEX_WARPS, ceildiv(n_pairs, _PAIRS_AT_ONCE))


@always_inline
def _pairs_of_warp[group: Group]() -> Int:
    """Says how many pairs each of them counts."""
    comptime n_pairs = group.n_local_experts() * group.n_ranks
    comptime stride = ceildiv(
        n_pairs, n_counting_warps[group]() * _PAIRS_AT_ONCE
    )
    return stride * _PAIRS_AT_ONCE


@always_inline
def n_pair_rows[group: Group]() -> Int:
    """Says how much room a block needs for the rows before its pairs."""
    return n_counting_warps[group]() * _pairs_of_warp[group]() + 1


@always_inline
def _pair_of_lane(first: Int, i: Int, lane: Int) -> Int:
    """Says which pairs a lane reads: two of each look, which are neighbours."""
    return first + (i // 2 * WARP_SIZE + lane) * 2 + i % 2


@always_inline
def _read_counts[
    group: Group
](
    before: SharedInts,
    sums: SharedInts,
    largest_of: SharedInts,
    n_before_all: Int32,
    block: Block[group],
    generation: UInt32,
    counter: Int,
) -> Bool:
    """Waits for the counts of some pairs and adds them up, with one warp."""
    comptime n_ranks = group.n_ranks
    comptime n_local_experts = group.n_local_experts()
    var my_counts = bytes_at(block.counts[unsafe_offset=block.my_rank])
    var n_held = n_experts_on_rank(group.n_experts, n_ranks, block.my_rank)
    var begin = counter * _pairs_of_warp[group]()
    var end = min(begin + _pairs_of_warp[group](), n_local_experts * n_ranks)
    var n_before = n_before_all
    var largest: Int32 = 0
    for first in range(begin, end, _PAIRS_AT_ONCE):
        var words = Array[UInt64, _PAIRS_OF_LANE](fill=0)
        var is_missing = Array[Bool, _PAIRS_OF_LANE](fill=False)
        var n_pairs = min(end, n_held * n_ranks)
        comptime for i in range(_PAIRS_OF_LANE):
            is_missing[i] = _pair_of_lane(first, i, block.lane) < n_pairs
        var wait = Wait(block.deadline)
        while True:
            comptime for i in range(0, _PAIRS_OF_LANE, 2):
                if is_missing[i] or is_missing[i + 1]:
                    words[i], words[i + 1] = load_relaxed_sys_2(
                        flag_at(
                            my_counts,
                            group.dispatch_count_offset(
                                _pair_of_lane(first, i, block.lane)
                            ),
                        )
                    )
            var missing = -1
            comptime for i in range(_PAIRS_OF_LANE):
                is_missing[i] = (
                    is_missing[i] and generation_of(words[i]) != generation
                )
                if is_missing[i]:
                    missing = i
            if missing < 0:
                break
            if wait.has_expired():
                var pair = _pair_of_lane(first, missing, block.lane)
                block.fail(
                    NO_COUNT,
                    RECEIVE,
                    pair % n_ranks,
                    block.my_rank * n_local_experts + pair // n_ranks,
                    generation,
                    load_relaxed_sys(
                        flag_at(my_counts, group.dispatch_count_offset(pair))
                    ),
                )
                break
        var is_late = False
        comptime for i in range(_PAIRS_OF_LANE):
            is_late = is_late or is_missing[i]
        if any_lane(is_late):
            return False
        # Neighbouring lanes have read neighbouring words. Now a lane has
        # neighbouring pairs, so that lanes are added up once.
        comptime for i in range(0, _PAIRS_OF_LANE, 2):
            var pair = _pair_of_lane(first, i, block.lane)
            var two = SIMD[DType.int32, 2](0)
            if pair < n_pairs:
                two[0] = Int32(count_of(words[i]))
            if pair + 1 < n_pairs:
                two[1] = Int32(count_of(words[i + 1]))
            before.unsafe_store[alignment=8](pair, two)
            largest = max(largest, two.reduce_max())
        syncwarp()
        var mine = before.unsafe_offset(first + block.lane * _PAIRS_OF_LANE)
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
    if block.lane == 0:
        sums[unsafe_offset=counter] = n_before
        largest_of[unsafe_offset=counter] = largest
    return True


@always_inline
def _count_rows[
    group: Group
](
    pair_rows: SharedInts,
    sums: SharedInts,
    largest_of: SharedInts,
    tables: RowTables[group, ...],
    n_shared: Int,
    n_rows_max: Int,
    block: Block[group],
    generation: UInt32,
    counter: Int,
):
    """Waits for the counts and finds the rows before each pair, with one warp.
    """
    comptime n_pairs = group.n_local_experts() * group.n_ranks
    comptime n_counting = n_counting_warps[group]()
    var control = block.control
    var is_there = _read_counts[group](
        pair_rows,
        sums,
        largest_of,
        Int32(n_shared) if n_counting == 1 else 0,
        block,
        generation,
        counter,
    )
    if not is_there:
        block.counters.set_broken()
        if block.lane == 0:
            sums[unsafe_offset=counter] = 0
            store_release_block(control.unsafe_offset(FAILED), 1)
    var n_rows: Int32
    comptime if n_counting == 1:
        syncwarp()
        n_rows = sums[unsafe_offset=0]
    else:
        # Also if it has failed: the others wait for it without end.
        syncwarp()
        if block.lane == 0:
            arrive_in_block(control.unsafe_offset(SUMMED))
        while load_acquire_block(control.unsafe_offset(SUMMED)) < UInt32(
            n_counting
        ):
            pass
        var sum: Int32 = 0
        if block.lane < n_counting:
            sum = sums[unsafe_offset=block.lane]
        var sums_before = warp.prefix_sum[exclusive=True](sum) + Int32(n_shared)
        n_rows = warp.shuffle_idx(sums_before, UInt32(n_counting))
        var rows_before = warp.shuffle_idx(sums_before, UInt32(counter))
        var begin = counter * _pairs_of_warp[group]()
        var end = min(begin + _pairs_of_warp[group](), n_pairs)
        for pair in range(begin + block.lane, end, WARP_SIZE):
            pair_rows[unsafe_offset=pair] += rows_before
    if counter == 0 and block.lane == 0:
        pair_rows[unsafe_offset=n_pairs] = n_rows
    var n_rows_needed = tables.n_rows_needed(Int(n_rows))
    if n_rows_needed > n_rows_max:
        block.counters.set_broken()
        if block.lane == 0:
            block.fail(
                TOO_MANY_ROWS,
                RECEIVE,
                block.my_rank,
                0,
                generation,
                0,
                n_rows_needed,
                n_rows_max,
            )
            store_release_block(control.unsafe_offset(FAILED), 1)
    # Also if it has failed: the block waits for all that count without end.
    syncwarp()
    if block.lane == 0:
        arrive_in_block(control.unsafe_offset(COUNTED))
    # AFTER: `pair_rows` holds the rows before each pair, once all have arrived.


@always_inline
def lay_out_rows[
    group: Group
](
    pair_rows: SharedInts,
    sums: SharedInts,
    largest_of: SharedInts,
    tables: RowTables[group, ...],
    n_shared: Int,
    n_rows_max: Int,
    block: Block[group],
    generation: UInt32,
    indexer: Int,
):
    """Waits for the counts and lays out the rows, with one of the index warps.
    """
    comptime n_ranks = group.n_ranks
    comptime n_local_experts = group.n_local_experts()
    comptime n_pairs = n_local_experts * n_ranks
    comptime n_counting = n_counting_warps[group]()
    var control = block.control
    var counter = indexer - (N_INDEX_WARPS - n_counting)
    if counter >= 0:
        _count_rows[group](
            pair_rows,
            sums,
            largest_of,
            tables,
            n_shared,
            n_rows_max,
            block,
            generation,
            counter,
        )
    if block_idx.x != 0:
        return
    # The first block tells of the rows: in the outputs, and for combine.
    while load_acquire_block(control.unsafe_offset(COUNTED)) < UInt32(
        n_counting
    ):
        pass
    if load_acquire_block(control.unsafe_offset(FAILED)) != 0:
        if indexer == 0:
            tables.write_no_rows(block.lane, WARP_SIZE)
        return
    for pair in range(
        indexer * WARP_SIZE + block.lane, n_pairs, N_INDEX_WARPS * WARP_SIZE
    ):
        var row = Int(pair_rows[unsafe_offset=pair])
        var count = Int(pair_rows[unsafe_offset=pair + 1]) - row
        var local_expert, src_rank = divmod(pair, n_ranks)
        var first_pair = group.pair(local_expert, 0)
        block.counters.set_pair_rows(
            pair, Int(row_of_pair(tables, pair_rows, pair)), count
        )
        tables.write_pair(
            pair, row - Int(pair_rows[unsafe_offset=first_pair]), count
        )
        if src_rank == 0:
            tables.write_expert(
                local_expert,
                Int(row_of_pair(tables, pair_rows, pair)),
                Int(pair_rows[unsafe_offset=pair + n_ranks]) - row,
            )
    if indexer != 0:
        return
    var largest: Int32 = 0
    if block.lane < n_counting:
        largest = largest_of[unsafe_offset=block.lane]
    largest = max_of_lanes(largest)
    if block.lane == 0:
        var n_rows = Int(pair_rows[unsafe_offset=n_pairs])
        tables.write_ends(n_rows)
        block.counters.set_pair_rows(
            n_pairs, tables.n_rows_needed(n_rows), Int(largest)
        )


@always_inline
def row_of_pair(tables: RowTables, pair_rows: SharedInts, pair: Int) -> Int32:
    """Finds the first row of a pair."""
    comptime group = tables.group
    var row = pair_rows[unsafe_offset=pair]
    comptime if tables.is_padded:
        var local_expert = pair // group.n_ranks
        row += (
            Int32(tables.first_row(local_expert, 0))
            - pair_rows[unsafe_offset=group.pair(local_expert, 0)]
        )
    return row
