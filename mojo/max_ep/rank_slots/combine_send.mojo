# SPDX-License-Identifier: Apache-2.0
"""How a warp of reduced combine sends partial sums to the ranks of the tokens.

A token of which this rank has no row is left out. Own tokens are never sent: what
this rank adds to them is added by the receiving half.
"""
from max.gpu import WARP_SIZE, block_idx, grid_dim

from ..counters import EPLocalSyncCounters, NO_ROW
from ..expert_slots.device_steps import (
    SharedAddresses,
    any_lane,
    bytes_at,
    take_turn,
)
from ..layout import RegionLayout
from ..token_format import BytePointer
from .combine_roles import NEXT_TURN, SEND
from .device_steps import Launch, await_readers, divmod_32
from .partial_sums import (
    FEW_SEND_LOADS,
    PartialFormat,
    SEND_LOADS,
    add_rows,
    n_parts_of,
)


@always_inline
def send_partials[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    layout: RegionLayout,
    are_few: Bool,
](
    expert_rows: BytePointer,
    most: Int,
    recv_bufs: SharedAddresses,
    dispatch_counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    sender: Int,
    n_senders: Int,
):
    """Sends this block's share of the partial sums, with one warp of several.

    Parameters:
        combine_dtype: Element type of the rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        are_few: Whether `are_few_tokens`.

    Args:
        expert_rows: `[n_rows][hidden_size]`.
        most: Tokens of the source that has most.
        recv_bufs: All ranks' combine recv buffers.
        dispatch_counts: All ranks' dispatch counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        sender: This warp among those that send.
        n_senders: How many do.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime n_steps = Format.n_steps_at_once[are_few]()
    comptime n_ranks = layout.n_ranks
    comptime top_k = layout.top_k
    comptime n_others = n_ranks - 1
    comptime if n_others > 0:
        var lane = launch.lane
        var my_rank = launch.my_rank
        var n_blocks = Int(grid_dim.x)
        var n_parts = n_parts_of(most, Format.n_steps)
        var n_tokens_of = counters.received_tokens(layout)
        var is_waiting = True
        var turn = sender
        while True:
            var unit = Int(block_idx.x) + turn * n_blocks
            if unit >= most * n_others * n_parts:
                return
            comptime if not are_few:
                turn = n_senders + take_turn(
                    launch.control.unsafe_offset(NEXT_TURN), lane
                )
            else:
                # A turn is one more trip to shared memory.
                turn += n_senders
            var place, part = divmod_32(unit, n_parts)
            var token_idx, other = divmod(place, n_others)
            var src_rank = my_rank + 1 + other
            src_rank -= n_ranks if src_rank >= n_ranks else 0
            # All three at once: what stands behind the last token is not used.
            var n_tokens = Int(n_tokens_of[unsafe_offset=src_rank])
            var row = NO_ROW
            var weight: Float32 = 0
            if lane < top_k:
                var choice = layout.choice(token_idx, lane)
                row = counters.received_rows(layout, src_rank)[
                    unsafe_offset=choice
                ]
                weight = counters.received_weights(layout, src_rank)[
                    unsafe_offset=choice
                ]
            if token_idx >= n_tokens or not any_lane(row != NO_ROW):
                continue
            var begin = part * Format.n_steps // n_parts
            var end = (part + 1) * Format.n_steps // n_parts
            # I4: the partial sums of a rank have one writer.
            var to = bytes_at(
                recv_bufs[unsafe_offset=src_rank]
                + UInt64(layout.partial_offset(my_rank, token_idx))
            )
            for first in range(begin, end, n_steps):
                var sums = Array[Format.Sum, n_steps](fill=0)
                add_rows[
                    combine_dtype,
                    partial_dtype,
                    hidden_size,
                    n_steps,
                    SEND_LOADS if n_steps > 1 else FEW_SEND_LOADS,
                ](sums, expert_rows, first, end, row, weight, lane)
                if is_waiting:
                    # I3, for partial sums.
                    if not await_readers[layout, True](
                        launch, dispatch_counts, counters, SEND
                    ):
                        return
                    is_waiting = False
                comptime for step in range(n_steps):
                    var share = (first + step) * WARP_SIZE + lane
                    if first + step < end and share < Format.n_shares:
                        Format.put_partial(to, share, sums[step])
