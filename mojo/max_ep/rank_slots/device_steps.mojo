# SPDX-License-Identifier: Apache-2.0
"""Steps that dispatch and reduced combine of GPU ranks share in `rank_slots`.

A launch that sends notes its generations at its begin, as soon as every block
has read the old ones, and leaves to the next launch of its rank what it could
only tell at its end: that it has read its messages. By then it has ended, so
that nothing has to be counted or waited for (`publish_earlier_reads`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    WARP_SIZE,
    barrier,
    block_idx,
    grid_dim,
    lane_id,
    thread_idx,
    warp_id,
)

from ..counters import EPLocalSyncCounters, LaunchHeader, N_HEADER_WORDS
from ..expert_slots.device_steps import (
    SharedAddresses,
    bytes_at,
    is_in_order,
    shared_words,
)
from ..expert_slots.host_steps import flag_at
from ..flags import DeviceDeadline, SharedWord, arrive, publish
from ..layout import RegionLayout
from ..token_format import LaneBytes

comptime EMPTY = UInt32(0xFFFF_FFFF)
"""Last word of 16 bytes that have not come yet, where data is its own flag.

The reader puts it back. Data that has it there by itself is sent with
`EMPTY - 1`: in bfloat16, float32 and float8_e4m3fn only a NaN looks so, and it
stays one.
"""


@always_inline
def without_empty(bytes: LaneBytes) -> LaneBytes:
    """Makes 16 bytes that do not look as if they had not come.

    Args:
        bytes: What is sent.

    Returns:
        The same, but for the last bit of one NaN.
    """
    var sent = bytes
    if sent[3] == EMPTY:
        sent[3] = EMPTY - 1
    return sent


@fieldwise_init
struct Launch(TrivialRegisterPassable):
    """What the warps of a block know from the start of a launch."""

    var lane: Int
    """This lane."""
    var warp_idx: Int
    """This warp of the block."""
    var can_go: Bool
    """Whether the launch may do anything; the same in the whole block."""
    var my_rank: Int
    """This rank."""
    var deadline: DeviceDeadline
    """When to give up."""
    var before: LaunchHeader
    """The header of the counters before this launch."""
    var control: SharedWord
    """The block's control words, all 0 at first."""


@always_inline
def start_launch[
    n_experts: Int, //, layout: RegionLayout, n_control: Int
](counters: EPLocalSyncCounters[n_experts], phase: Int) -> Launch:
    """Sets a block up; all its threads call it.

    Addresses that were shared before are there afterwards.

    Parameters:
        n_experts: Experts of the group.
        layout: How the launch expects the regions to be cut.
        n_control: Control words.

    Args:
        counters: This rank's local words.
        phase: Who starts, a position in `failures.PHASES`.

    Returns:
        What the warps need to know.
    """
    comptime assert WARP_SIZE == 32, "rank_slots has kernels for NVIDIA GPUs"
    comptime assert N_HEADER_WORDS == WARP_SIZE, "a lane has one word"
    var control = shared_words[n_control + 1]()
    var lane = Int(lane_id())
    var warp_idx = Int(warp_id())
    # Other blocks may already move the generations, but not before this block
    # has arrived: so this is read once, and before the barrier.
    var word = counters.words[unsafe_offset=lane]
    var header = LaunchHeader.of(word)
    if warp_idx == 0:
        # One warp decides for its block: a failure that is noted meanwhile
        # must not make some warps leave and others wait for them.
        var can_go = is_in_order[layout](word, counters, phase)
        if lane == 0:
            control[unsafe_offset=n_control] = 1 if can_go else 0
    elif warp_idx == 1:
        for i in range(lane, n_control, WARP_SIZE):
            control[unsafe_offset=i] = 0
    barrier()
    return Launch(
        lane,
        warp_idx,
        control[unsafe_offset=n_control] != 0,
        header.my_rank,
        DeviceDeadline.after(header.timeout_ms),
        header,
        control,
    )


@always_inline
def is_last_to_start(
    launch: Launch, counters: EPLocalSyncCounters, n_warps: Int
) -> Bool:
    """Tells one thread of the grid that all blocks have read the header.

    Every thread of every block calls it, once.

    Args:
        launch: From `start_launch`.
        counters: This rank's local words.
        n_warps: Warps of a block.

    Returns:
        True in one thread, of a warp that is not needed at once.
    """
    if launch.warp_idx != n_warps - 3 or launch.lane != 0:
        return False
    if arrive(counters.blocks_done()) != Int(grid_dim.x) - 1:
        return False
    counters.blocks_done()[] = 0
    return True


@always_inline
def publish_earlier_reads[
    layout: RegionLayout
](launch: Launch, dispatch_counts: SharedAddresses, n_warps: Int):
    """Tells every rank what the launches before this one have read.

    One warp of the first block does. What it tells was true when this launch
    began: a kernel begins when the one before it has ended.

    Parameters:
        layout: How the regions are cut.

    Args:
        launch: From `start_launch`.
        dispatch_counts: All ranks' dispatch counts buffers.
        n_warps: Warps of a block.
    """
    if block_idx.x != 0 or launch.warp_idx != n_warps - 4:
        return
    for rank in range(launch.lane, layout.n_ranks, WARP_SIZE):
        var counts = bytes_at(dispatch_counts[unsafe_offset=rank])
        publish(
            flag_at(counts, layout.dispatch_done_offset(launch.my_rank)),
            launch.before.dispatch_received,
            0,
        )
        comptime if layout.is_reduced():
            publish(
                flag_at(
                    counts, layout.early_combine_done_offset(launch.my_rank)
                ),
                launch.before.combine_received,
                0,
            )
