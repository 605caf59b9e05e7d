# SPDX-License-Identifier: Apache-2.0
"""How a warp of reduced combine adds up tokens from own rows and partial sums.

In a fixed order, whichever comes first (`combine.mojo`): a sum is awaited where its
turn is. Each 16 bytes are looked at until they are there, and `SENTINEL` is put back.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, WARP_SIZE
from std.memory import bitcast
from std.utils.numerics import nan

from ..counters import NO_ROW, rank_elsewhere
from ..device.block import Block, next_work
from ..device.schedule import Schedule
from ..device.warp import (
    any_lane,
    any_of_lanes,
    bytes_at,
    load16,
    SENTINEL,
    store16,
)
from ..failures import NO_MESSAGE
from ..flags import load_relaxed_sys_16, next_generation, Wait
from ..layout import Group
from ..token_format import BytePointer, LaneBytes
from .roles import NEXT_SUM, RECEIVE
from .saved_routes import SavedRoutes
from .sums import add_rows, n_rows_at_once, PartialFormat, sum_split

comptime MAX_PREFETCHED = 8
"""Looks at partial sums that a lane has under way while it adds rows."""


@always_inline
def _await_16(
    p: BytePointer,
    first_loaded: LaneBytes,
    owner_rank: Int,
    generation: UInt32,
    block: Block[...],
) -> Tuple[LaneBytes, Bool]:
    """Waits for 16 bytes of a partial sum, and puts `SENTINEL` back."""
    var bytes = first_loaded
    var wait = Wait(block.deadline)
    while bytes[3] == SENTINEL:
        if wait.has_expired():
            block.fail(
                NO_MESSAGE,
                RECEIVE,
                owner_rank,
                -1,
                generation,
                0,
            )
            return (bytes, False)
        bytes = load_relaxed_sys_16(p)
    # I3: whoever writes here next has seen a later done word.
    store16(p, LaneBytes(SENTINEL))
    return (bytes, True)


@always_inline
def _load_partial[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_prefetched: Int,
    first_loaded: Int,
](
    mut prefetched_vectors: Array[LaneBytes, n_prefetched],
    partial_sum: BytePointer,
    share: Int,
):
    """Reads a lane's share of a partial sum, whether it has come or not."""
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    if share < Format.n_shares:
        comptime for i in range(Format.n_partial_vectors):
            prefetched_vectors[first_loaded + i] = load_relaxed_sys_16(
                Format.partial_vector(partial_sum, share, i)
            )


@always_inline
def _add_partial[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_prefetched: Int,
    first_loaded: Int,
](
    mut sum: PartialFormat[combine_dtype, partial_dtype, hidden_size].Sum,
    prefetched_vectors: Array[LaneBytes, n_prefetched],
    partial_sum: BytePointer,
    share: Int,
    owner_rank: Int,
    generation: UInt32,
    block: Block[...],
) -> Bool:
    """Adds a lane's share of a partial sum as it comes."""
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime n = Format.width // Format.n_partial_vectors
    var are_there = True
    if share < Format.n_shares:
        comptime for i in range(Format.n_partial_vectors):
            var bytes, is_there = _await_16(
                Format.partial_vector(partial_sum, share, i),
                prefetched_vectors[first_loaded + i],
                owner_rank,
                generation,
                block,
            )
            are_there = are_there and is_there
            var part = bitcast[partial_dtype, n](bytes).cast[DType.float32]()
            comptime for j in range(n):
                sum[i * n + j] += part[j]
    return are_there


@always_inline
def add_tokens[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    group: Group,
    fused_shared_expert: Bool,
    are_few: Bool,
](
    output_tokens: BytePointer,
    n_tokens: Int,
    expert_rows: BytePointer,
    is_bad: Bool,
    schedule: Schedule,
    prefetched: SavedRoutes,
    is_prefetched: Bool,
    block: Block[group],
):
    """Adds up this block's share of the tokens, with one warp of several."""
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime row_bytes = hidden_size * Format.row_element
    comptime n_vectors = Format.n_partial_vectors
    comptime n_prefetched = group.n_ranks * n_vectors
    comptime prefetches = n_prefetched <= MAX_PREFETCHED
    comptime max_prefetched = n_prefetched if prefetches else n_vectors
    var lane = block.lane
    var my_rank = block.my_rank
    var generation = next_generation(block.before.combine_received)
    var recv_buf = bytes_at(block.recv_bufs[unsafe_offset=my_rank])
    var cut = sum_split[Format.n_steps, are_few](n_tokens)
    var is_broken = is_bad
    var round = schedule.first
    var is_known = is_prefetched
    while True:
        comptime if not are_few:
            round = next_work(block.control.unsafe_offset(NEXT_SUM), lane)
        var item = Schedule.item(round, Int(block_idx.x), Int(grid_dim.x))
        if item >= n_tokens * cut.n_chunks():
            return
        round += schedule.stride
        var chunk = cut.chunk(item)
        var token_idx = chunk.whole
        var saved = prefetched
        if not are_few or not is_known:
            saved = SavedRoutes.of[group](block.counters, 0, token_idx, lane)
        is_known = False
        var row = saved.row
        if is_broken:
            row = NO_ROW
        var owner = rank_elsewhere(row)
        var owners: UInt32 = 0
        comptime if prefetches:
            owners = any_of_lanes(
                UInt32(1) << UInt32(owner) if owner >= 0 else 0
            )
        var result = output_tokens.unsafe_offset(token_idx * row_bytes)
        for step in range(chunk.begin, chunk.end):
            var share = step * WARP_SIZE + lane
            # A first look at the partial sums, under way while rows are added.
            var prefetched_vectors = Array[LaneBytes, max_prefetched](
                fill=LaneBytes(SENTINEL)
            )
            comptime if prefetches:
                comptime for rank in range(group.n_ranks):
                    if (owners >> UInt32(rank)) & 1 != 0:
                        _load_partial[
                            combine_dtype,
                            partial_dtype,
                            hidden_size,
                            max_prefetched,
                            rank * n_vectors,
                        ](
                            prefetched_vectors,
                            recv_buf.unsafe_offset(
                                group.partial_offset(rank, token_idx)
                            ),
                            share,
                        )
            var sum = Format.Sum(0)
            add_rows[
                combine_dtype,
                partial_dtype,
                hidden_size,
                n_rows_at_once[are_few, max_prefetched](),
            ](sum, expert_rows, share, row, saved.weight)
            var is_there = True
            comptime if prefetches:
                comptime for rank in range(group.n_ranks):
                    if (owners >> UInt32(rank)) & 1 != 0:
                        var came = _add_partial[
                            combine_dtype,
                            partial_dtype,
                            hidden_size,
                            max_prefetched,
                            rank * n_vectors,
                        ](
                            sum,
                            prefetched_vectors,
                            recv_buf.unsafe_offset(
                                group.partial_offset(rank, token_idx)
                            ),
                            share,
                            rank,
                            generation,
                            block,
                        )
                        is_there = is_there and came
            else:
                # The lowest owner that is left, each time.
                var last_owner = -1
                while True:
                    var next_owner = Int32(group.n_ranks)
                    if owner > last_owner:
                        next_owner = Int32(owner)
                    last_owner = Int(warp.min(next_owner))
                    if last_owner == group.n_ranks:
                        break
                    # All that are missing are looked at at once.
                    var partial_sum = recv_buf.unsafe_offset(
                        group.partial_offset(last_owner, token_idx)
                    )
                    _load_partial[
                        combine_dtype,
                        partial_dtype,
                        hidden_size,
                        max_prefetched,
                        0,
                    ](prefetched_vectors, partial_sum, share)
                    var came = _add_partial[
                        combine_dtype,
                        partial_dtype,
                        hidden_size,
                        max_prefetched,
                        0,
                    ](
                        sum,
                        prefetched_vectors,
                        partial_sum,
                        share,
                        last_owner,
                        generation,
                        block,
                    )
                    is_there = is_there and came
            if any_lane(not is_there):
                block.counters.set_broken()
                is_broken = True
                owner = -1
                owners = 0
                row = NO_ROW
            if share < Format.n_shares:
                comptime if fused_shared_expert:
                    sum = sum.cast[combine_dtype]().cast[DType.float32]()
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
                            sum[i * n + j] += numbers[j]
                if is_broken:
                    sum = nan[DType.float32]()
                Format.store_row(result, share, sum)
