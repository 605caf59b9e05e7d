# SPDX-License-Identifier: Apache-2.0
"""How a warp of reduced combine adds up tokens from own rows and partial sums.

In a fixed order, whichever comes first (`combine.mojo`): a sum is awaited where its
turn is. Each 16 bytes are looked at until they are there, and `EMPTY` is put back.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE, block_idx, grid_dim
from std.memory import bitcast
from std.utils.numerics import nan

from ..counters import EPLocalSyncCounters, NO_EXPERT, NO_ROW
from ..expert_slots.device_steps import (
    SharedAddresses,
    any_lane,
    bytes_at,
    load16,
    store16,
    take_turn,
)
from ..failures import NO_MESSAGE, note_failure
from ..flags import SPINS_BETWEEN_LOOKS, next_generation, peek_16
from ..layout import RegionLayout
from ..token_format import BytePointer, LaneBytes
from .combine_roles import NEXT_PART, RECEIVE
from .device_steps import EMPTY, Launch, divmod_32
from .partial_sums import ADD_LOADS, PartialFormat, add_rows, n_parts_of


comptime MAX_LOOKS = 8
"""Looks at partial sums that a lane has under way while it adds rows."""


@always_inline
def _await_16[
    n_experts: Int
](
    p: BytePointer,
    first_look: LaneBytes,
    owner_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Tuple[LaneBytes, Bool]:
    """Waits for 16 bytes of a partial sum, and puts `EMPTY` back.

    Parameters:
        n_experts: Experts of the group.

    Args:
        p: Where they come.
        first_look: What was there before.
        owner_rank: Who sends them.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        The bytes, and whether they came.
    """
    var bytes = first_look
    var spins = 0
    while bytes[3] == EMPTY:
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                RECEIVE,
                owner_rank,
                -1,
                generation,
                0,
            )
            return (bytes, False)
        bytes = peek_16(p)
    # I3: whoever writes here next has seen a later done word.
    store16(p, LaneBytes(EMPTY))
    return (bytes, True)


@always_inline
def _look_at_partial[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_steps: Int,
    n_looks: Int,
    first_look: Int,
](
    mut looks: Array[LaneBytes, n_looks],
    partial_sum: BytePointer,
    first: Int,
    end: Int,
    lane: Int,
):
    """Reads a lane's shares of a partial sum, whether they have come or not.

    Parameters:
        combine_dtype: Element type of rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_steps: Steps that are added at once.
        n_looks: Length of `looks`.
        first_look: First of those of this partial sum.

    Args:
        looks: Result.
        partial_sum: `[hidden_size]` in this rank's region.
        first: First step.
        end: Behind the last.
        lane: This lane.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime for step in range(n_steps):
        var share = (first + step) * WARP_SIZE + lane
        if first + step < end and share < Format.n_shares:
            comptime for i in range(Format.n_partial_vectors):
                looks[
                    first_look + step * Format.n_partial_vectors + i
                ] = peek_16(Format.partial_vector(partial_sum, share, i))


@always_inline
def _add_partial[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    n_steps: Int,
    n_looks: Int,
    first_look: Int,
](
    mut sums: Array[
        PartialFormat[combine_dtype, partial_dtype, hidden_size].Sum, n_steps
    ],
    looks: Array[LaneBytes, n_looks],
    partial_sum: BytePointer,
    first: Int,
    end: Int,
    owner_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Adds a lane's shares of a partial sum as they come.

    Parameters:
        combine_dtype: Element type of rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        n_steps: Steps that are added at once.
        n_looks: Length of `looks`.
        first_look: First of those of this partial sum.

    Args:
        sums: Shares of this lane, to be added to.
        looks: What was there before.
        partial_sum: `[hidden_size]` in this rank's region.
        first: First step.
        end: Behind the last.
        owner_rank: Who sends it.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether they came; this lane's.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime n = Format.width // Format.n_partial_vectors
    var are_there = True
    comptime for step in range(n_steps):
        var share = (first + step) * WARP_SIZE + launch.lane
        if first + step < end and share < Format.n_shares:
            comptime for i in range(Format.n_partial_vectors):
                var bytes, is_there = _await_16(
                    Format.partial_vector(partial_sum, share, i),
                    looks[first_look + step * Format.n_partial_vectors + i],
                    owner_rank,
                    generation,
                    launch,
                    counters,
                )
                are_there = are_there and is_there
                var part = bitcast[partial_dtype, n](bytes).cast[
                    DType.float32
                ]()
                comptime for j in range(n):
                    sums[step][i * n + j] += part[j]
    return are_there


@always_inline
def add_tokens[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    layout: RegionLayout,
    fused_shared_expert: Bool,
    n_steps: Int,
](
    output_tokens: BytePointer,
    n_tokens: Int,
    expert_rows: BytePointer,
    recv_bufs: SharedAddresses,
    dispatch_generation: UInt32,
    is_bad: Bool,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Adds up this block's share of the tokens, with one warp of several.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.
        n_steps: Steps that are added at once.

    Args:
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens of this rank.
        expert_rows: This rank's expert rows.
        recv_bufs: All ranks' combine recv buffers.
        dispatch_generation: The dispatch that is answered.
        is_bad: Whether to write NaN only.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime top_k = layout.top_k
    comptime row_bytes = hidden_size * Format.row_element
    comptime n_vectors = Format.n_partial_vectors
    comptime n_looks = layout.n_ranks * n_steps * n_vectors
    comptime looks_first = n_looks <= MAX_LOOKS and n_steps * n_vectors < 4
    comptime max_looks = n_looks if looks_first else n_steps * n_vectors
    var lane = launch.lane
    var my_rank = launch.my_rank
    var generation = next_generation(launch.before.combine_received)
    var recv_buf = bytes_at(recv_bufs[unsafe_offset=my_rank])
    var choices = counters.choices(dispatch_generation, layout.n_choices())
    var n_parts = n_parts_of(n_tokens, Format.n_steps)
    var is_broken = is_bad
    while True:
        var turn = take_turn(launch.control.unsafe_offset(NEXT_PART), lane)
        # From the last block on: those that send least.
        var item = (
            turn * Int(grid_dim.x) + Int(grid_dim.x) - 1 - Int(block_idx.x)
        )
        if item >= n_tokens * n_parts:
            return
        var token_idx, part = divmod_32(item, n_parts)
        var row = NO_ROW
        var weight: Float32 = 0
        var owner = -1
        if lane < top_k:
            # All three at once: there is no row of what is not here.
            var choice = layout.choice(token_idx, lane)
            var expert = choices[unsafe_offset=choice]
            row = counters.received_rows(layout, my_rank)[unsafe_offset=choice]
            weight = counters.received_weights(layout, my_rank)[
                unsafe_offset=choice
            ]
            if expert != NO_EXPERT:
                owner = Int(expert) // layout.n_local_experts()
        if is_broken:
            owner = -1
            row = NO_ROW
        var owners: UInt32 = 0
        comptime if looks_first:
            comptime for rank in range(layout.n_ranks):
                if any_lane(owner == rank) and rank != my_rank:
                    owners |= UInt32(1) << UInt32(rank)
        var begin = part * Format.n_steps // n_parts
        var end = (part + 1) * Format.n_steps // n_parts
        var result = output_tokens.unsafe_offset(token_idx * row_bytes)
        for first in range(begin, end, n_steps):
            # A first look at the partial sums, under way while rows are added.
            var looks = Array[LaneBytes, max_looks](fill=LaneBytes(EMPTY))
            comptime if looks_first:
                comptime for rank in range(layout.n_ranks):
                    if (owners >> UInt32(rank)) & 1 != 0:
                        _look_at_partial[
                            combine_dtype,
                            partial_dtype,
                            hidden_size,
                            n_steps,
                            max_looks,
                            rank * n_steps * n_vectors,
                        ](
                            looks,
                            recv_buf.unsafe_offset(
                                layout.partial_offset(rank, token_idx)
                            ),
                            first,
                            end,
                            lane,
                        )
            var sums = Array[Format.Sum, n_steps](fill=0)
            add_rows[
                combine_dtype, partial_dtype, hidden_size, n_steps, ADD_LOADS
            ](sums, expert_rows, first, end, row, weight, lane)
            var is_there = True
            comptime if looks_first:
                comptime for rank in range(layout.n_ranks):
                    if (owners >> UInt32(rank)) & 1 != 0:
                        var came = _add_partial[
                            combine_dtype,
                            partial_dtype,
                            hidden_size,
                            n_experts,
                            n_steps,
                            max_looks,
                            rank * n_steps * n_vectors,
                        ](
                            sums,
                            looks,
                            recv_buf.unsafe_offset(
                                layout.partial_offset(rank, token_idx)
                            ),
                            first,
                            end,
                            rank,
                            generation,
                            launch,
                            counters,
                        )
                        is_there = is_there and came
            else:
                # The lowest owner that is left, each time.
                var last_owner = -1
                while True:
                    var next_owner = Int32(layout.n_ranks)
                    if owner > last_owner and owner != my_rank:
                        next_owner = Int32(owner)
                    last_owner = Int(warp.min(next_owner))
                    if last_owner == layout.n_ranks:
                        break
                    # All that are missing are looked at at once.
                    var partial_sum = recv_buf.unsafe_offset(
                        layout.partial_offset(last_owner, token_idx)
                    )
                    _look_at_partial[
                        combine_dtype,
                        partial_dtype,
                        hidden_size,
                        n_steps,
                        max_looks,
                        0,
                    ](looks, partial_sum, first, end, lane)
                    var came = _add_partial[
                        combine_dtype,
                        partial_dtype,
                        hidden_size,
                        n_experts,
                        n_steps,
                        max_looks,
                        0,
                    ](
                        sums,
                        looks,
                        partial_sum,
                        first,
                        end,
                        last_owner,
                        generation,
                        launch,
                        counters,
                    )
                    is_there = is_there and came
            if any_lane(not is_there):
                counters.set_broken()
                is_broken = True
                owner = -1
                owners = 0
                row = NO_ROW
            comptime for step in range(n_steps):
                var share = (first + step) * WARP_SIZE + lane
                if first + step < end and share < Format.n_shares:
                    comptime if fused_shared_expert:
                        sums[step] = (
                            sums[step]
                            .cast[combine_dtype]()
                            .cast[DType.float32]()
                        )
                        comptime for i in range(Format.n_row_vectors):
                            var numbers = Format.widen(
                                load16(
                                    Format.row_vector(
                                        expert_rows.unsafe_offset(
                                            token_idx * row_bytes
                                        ),
                                        share,
                                        i,
                                    )
                                )
                            )
                            comptime n = Format.width // Format.n_row_vectors
                            comptime for j in range(n):
                                sums[step][i * n + j] += numbers[j]
                    if is_broken:
                        sums[step] = nan[DType.float32]()
                    Format.store_row(result, share, sums[step])
