# SPDX-License-Identifier: Apache-2.0
"""Where received tokens go: numbers and counts of all ranks, and rows from them.

All of them are self-tagged words: a wait for several looks at all that are
missing at once, since one after another costs a trip to the memory each.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE, block_idx, syncwarp
from std.math import ceildiv

from ..counters import EPLocalSyncCounters
from ..expert_slots.device_steps import (
    SharedAddresses,
    SharedInts,
    any_lane,
    bytes_at,
)
from ..expert_slots.dispatch import write_no_rows
from ..expert_slots.host_steps import flag_at
from ..failures import NO_COUNT, TOO_MANY_ROWS, note_failure
from ..flags import (
    SPINS_BETWEEN_LOOKS,
    block_arrive,
    block_peek,
    block_publish,
    count_of,
    generation_of,
    peek_number,
)
from ..layout import RegionLayout, n_experts_on_rank
from ..row_tables import RowTables
from .device_steps import Launch
from .dispatch_roles import COUNTED, FAILED, N_INDEX_WARPS, RECEIVE, SUMMED

comptime _COUNTS_IN_FLIGHT = 4


@always_inline
def read_numbers[
    n_experts: Int, layout: RegionLayout
](
    n_tokens_of: SharedInts,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
) -> Bool:
    """Waits for the numbers of tokens of all sources, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        n_tokens_of: Result: tokens of each source, and behind them the most.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        generation: The generation to wait for.

    Returns:
        Whether all came; the same in all lanes.
    """
    var my_counts = bytes_at(counts[unsafe_offset=launch.my_rank])
    var is_late = False
    var most: Int32 = 0
    for src_rank in range(launch.lane, layout.n_ranks, WARP_SIZE):
        var flag = flag_at(my_counts, layout.dispatch_n_tokens_offset(src_rank))
        var word = peek_number(flag)
        var spins = 0
        while generation_of(word) != generation:
            spins += 1
            if (
                spins % SPINS_BETWEEN_LOOKS == 0
                and launch.deadline.has_passed()
            ):
                note_failure(
                    counters.failure(),
                    NO_COUNT,
                    RECEIVE,
                    src_rank,
                    -1,
                    generation,
                    word,
                )
                is_late = True
                break
            word = peek_number(flag)
        var n = 0 if is_late else count_of(word)
        n_tokens_of[unsafe_offset=src_rank] = Int32(n)
        most = max(most, Int32(n))
        comptime if layout.is_reduced():
            if block_idx.x == 0:
                counters.received_tokens(layout)[
                    unsafe_offset=src_rank
                ] = Int32(n)
    most = warp.max(most)
    if launch.lane == 0:
        n_tokens_of[unsafe_offset=layout.n_ranks] = most
        if block_idx.x == 0:
            counters.set_most_received(Int(most))
    return not any_lane(is_late)


@always_inline
def _read_counts[
    n_experts: Int, layout: RegionLayout
](
    before: SharedInts,
    sums: SharedInts,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
    counter: Int,
) -> Bool:
    """Waits for the counts of some pairs and adds them up, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        before: Result: rows of the pairs before each one, of those that this
            warp counts.
        sums: Result: rows of all of them, in the word of this warp.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        generation: The generation to wait for.
        counter: This warp among those that count.

    Returns:
        Whether all came; the same in all lanes.
    """
    comptime n_ranks = layout.n_ranks
    comptime n_local_experts = layout.n_local_experts()
    comptime in_flight = min(
        _COUNTS_IN_FLIGHT, ceildiv(_pairs_of_warp[layout](), WARP_SIZE)
    )
    var my_counts = bytes_at(counts[unsafe_offset=launch.my_rank])
    var n_held = n_experts_on_rank(n_experts, n_ranks, launch.my_rank)
    var begin = counter * _pairs_of_warp[layout]()
    var end = min(begin + _pairs_of_warp[layout](), n_local_experts * n_ranks)
    var n_before: Int32 = 0
    for first in range(begin, end, WARP_SIZE * in_flight):
        var words = Array[UInt64, in_flight](fill=0)
        var is_missing = Array[Bool, in_flight](fill=False)
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + launch.lane
            is_missing[i] = pair < min(end, n_held * n_ranks)
        var spins = 0
        while True:
            comptime for i in range(in_flight):
                if is_missing[i]:
                    var pair = first + i * WARP_SIZE + launch.lane
                    words[i] = peek_number(
                        flag_at(my_counts, layout.dispatch_count_offset(pair))
                    )
            var missing = -1
            comptime for i in range(in_flight):
                is_missing[i] = (
                    is_missing[i] and generation_of(words[i]) != generation
                )
                if is_missing[i]:
                    missing = i
            if missing < 0:
                break
            spins += 1
            if (
                spins % SPINS_BETWEEN_LOOKS == 0
                and launch.deadline.has_passed()
            ):
                var pair = first + missing * WARP_SIZE + launch.lane
                note_failure(
                    counters.failure(),
                    NO_COUNT,
                    RECEIVE,
                    pair % n_ranks,
                    launch.my_rank * n_local_experts + pair // n_ranks,
                    generation,
                    peek_number(
                        flag_at(my_counts, layout.dispatch_count_offset(pair))
                    ),
                )
                break
        var is_late = False
        comptime for i in range(in_flight):
            is_late = is_late or is_missing[i]
        if any_lane(is_late):
            return False
        var below = Array[Int32, in_flight](fill=0)
        comptime for i in range(in_flight):
            below[i] = warp.prefix_sum[exclusive=True](
                Int32(count_of(words[i]))
            )
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + launch.lane
            if pair < end:
                before[unsafe_offset=pair] = n_before + below[i]
            n_before += warp.shuffle_idx(
                below[i] + Int32(count_of(words[i])), UInt32(WARP_SIZE - 1)
            )
    if launch.lane == 0:
        sums[unsafe_offset=counter] = n_before
    return True


@always_inline
def _pairs_of_warp[layout: RegionLayout]() -> Int:
    """Says how many pairs each index warp counts.

    Parameters:
        layout: How the regions are cut.

    Returns:
        A multiple of the warp's size; the last warps may have fewer, or none.
    """
    comptime n_pairs = layout.n_local_experts() * layout.n_ranks
    return ceildiv(n_pairs, N_INDEX_WARPS * WARP_SIZE) * WARP_SIZE


@always_inline
def lay_out_rows[
    n_experts: Int, layout: RegionLayout
](
    pair_rows: SharedInts,
    sums: SharedInts,
    tables: RowTables[layout, ...],
    n_shared: Int,
    n_rows_max: Int,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
    counter: Int,
):
    """Waits for the counts and lays out the rows, with one of the index warps.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        pair_rows: Result: rows before each pair, were they packed.
        sums: Room for a number of each index warp.
        tables: Result of block 0: which row is whose.
        n_shared: Rows of the shared expert, which come first.
        n_rows_max: Rows the outputs hold.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words; block 0 notes the pairs there.
        generation: The generation to wait for.
        counter: This warp among those that count.
    """
    comptime n_ranks = layout.n_ranks
    comptime n_pairs = layout.n_local_experts() * n_ranks
    var control = launch.control
    var is_there = _read_counts[n_experts, layout](
        pair_rows, sums, counts, launch, counters, generation, counter
    )
    if not is_there:
        counters.set_broken()
        if launch.lane == 0:
            block_publish(control.unsafe_offset(FAILED), 1)
    # Also if it has failed: the block waits for all index warps without end.
    syncwarp()
    if launch.lane == 0:
        block_arrive(control.unsafe_offset(SUMMED))
    while block_peek(control.unsafe_offset(SUMMED)) < N_INDEX_WARPS:
        pass
    var sum: Int32 = 0
    if launch.lane < N_INDEX_WARPS:
        sum = sums[unsafe_offset=launch.lane]
    var sums_before = warp.prefix_sum[exclusive=True](sum) + Int32(n_shared)
    var n_rows = Int(warp.shuffle_idx(sums_before, UInt32(N_INDEX_WARPS)))
    var rows_before = warp.shuffle_idx(sums_before, UInt32(counter))
    var begin = counter * _pairs_of_warp[layout]()
    var end = min(begin + _pairs_of_warp[layout](), n_pairs)
    for pair in range(begin + launch.lane, end, WARP_SIZE):
        pair_rows[unsafe_offset=pair] += rows_before
    var n_rows_needed = tables.n_rows_needed(n_rows)
    if n_rows_needed > n_rows_max:
        counters.set_broken()
        if launch.lane == 0:
            note_failure(
                counters.failure(),
                TOO_MANY_ROWS,
                RECEIVE,
                launch.my_rank,
                0,
                generation,
                0,
                n_rows_needed,
                n_rows_max,
            )
            block_publish(control.unsafe_offset(FAILED), 1)
    syncwarp()
    if launch.lane == 0:
        block_arrive(control.unsafe_offset(COUNTED))
    # AFTER: `pair_rows` holds the rows before each pair, once all have arrived.

    if block_idx.x != 0:
        return
    while block_peek(control.unsafe_offset(COUNTED)) < N_INDEX_WARPS:
        pass
    if block_peek(control.unsafe_offset(FAILED)) != 0:
        if counter == 0:
            write_no_rows(tables, launch.lane, WARP_SIZE)
        return
    # The first block tells of the rows: in the outputs, and for combine.
    comptime n_local_experts = layout.n_local_experts()
    for pair in range(begin + launch.lane, end, WARP_SIZE):
        var row = Int(pair_rows[unsafe_offset=pair])
        var count = (
            Int(pair_rows[unsafe_offset=pair + 1]) if pair + 1
            < n_pairs else n_rows
        ) - row
        var local_expert, src_rank = divmod(pair, n_ranks)
        var first_pair = layout.pair(local_expert, 0)
        counters.set_pair_rows(
            pair, Int(row_of_pair(tables, pair_rows, pair)), count
        )
        tables.write_pair(
            pair, row - Int(pair_rows[unsafe_offset=first_pair]), count
        )
        if src_rank == 0:
            var next_row = n_rows
            if local_expert + 1 < n_local_experts:
                next_row = Int(pair_rows[unsafe_offset=pair + n_ranks])
            tables.write_expert(
                local_expert,
                Int(row_of_pair(tables, pair_rows, pair)),
                next_row - row,
            )
    if counter != 0:
        return
    var largest: Int32 = 0
    for pair in range(launch.lane, n_pairs, WARP_SIZE):
        var next_row = Int32(n_rows)
        if pair + 1 < n_pairs:
            next_row = pair_rows[unsafe_offset=pair + 1]
        largest = max(largest, next_row - pair_rows[unsafe_offset=pair])
    largest = warp.max(largest)
    if launch.lane == 0:
        tables.write_ends(n_rows)
        counters.set_pair_rows(n_pairs, n_rows_needed, Int(largest))


@always_inline
def row_of_pair(tables: RowTables, pair_rows: SharedInts, pair: Int) -> Int32:
    """Finds the first row of a pair.

    Args:
        tables: How rows stand.
        pair_rows: Rows before each pair.
        pair: From `RegionLayout.pair`.

    Returns:
        The row.
    """
    comptime layout = tables.layout
    var row = pair_rows[unsafe_offset=pair]
    comptime if tables.is_padded:
        var local_expert = pair // layout.n_ranks
        row += (
            Int32(tables.first_row(local_expert, 0))
            - pair_rows[unsafe_offset=layout.pair(local_expert, 0)]
        )
    return row
