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
    syncwarp,
    warp_id,
)
from std.sys import inlined_assembly

from ..counters import EPLocalSyncCounters, LaunchHeader, N_HEADER_WORDS
from ..failures import NOT_READ, note_failure
from ..expert_slots.device_steps import (
    SharedAddresses,
    any_lane,
    bytes_at,
    is_in_order,
    shared_words,
)
from ..flags import (
    DeviceDeadline,
    SPINS_BETWEEN_LOOKS,
    SharedWord,
    arrive,
    count_of,
    flag_at,
    flag_word,
    generation_of,
    is_not_before,
    peek,
    publish,
)
from ..layout import Group
from ..token_format import LaneBytes

comptime EMPTY = UInt32(0xFFFF_FFFF)
"""Last word of 16 bytes that have not come yet, where data is its own flag.

The reader puts it back. Data that has it there by itself is sent with
`_LIKE_EMPTY` instead.
"""

comptime _LIKE_EMPTY = UInt32(0x7FFF_FFFF)
"""In bfloat16, float32 and float8_e4m3fn NaN, as only `EMPTY` itself is."""


@always_inline
def without_empty(bytes: LaneBytes) -> LaneBytes:
    """Makes 16 bytes that do not look as if they had not come."""
    var sent = bytes
    if sent[3] == EMPTY:
        sent[3] = _LIKE_EMPTY
    return sent


@always_inline
def await_launch_before():
    """Waits until the kernel before this one has ended, and lets the next begin.

    Launched so that they overlap (`gpu_launch.mojo`), a kernel's blocks may begin
    before that: nothing may be read before this. Otherwise it waits for nothing.
    """
    let_next_begin()
    await_kernels_before()


@always_inline
def let_next_begin():
    """Lets the next kernel begin, once a thread of each block has called this.
    """
    inlined_assembly[
        "griddepcontrol.launch_dependents;",
        NoneType,
        constraints="~{memory}",
        has_side_effect=True,
    ]()


@always_inline
def await_kernels_before():
    """Waits until the kernels before this one have ended."""
    inlined_assembly[
        "griddepcontrol.wait;",
        NoneType,
        constraints="~{memory}",
        has_side_effect=True,
    ]()


@always_inline
def divmod_32(a: Int, b: Int) -> Tuple[Int, Int]:
    """Divides numbers that fit into 32 bits, which is quicker."""
    var quotient = UInt32(a) // UInt32(b)
    return (Int(quotient), Int(UInt32(a) - quotient * UInt32(b)))


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
def header_word(counters: EPLocalSyncCounters) -> Int32:
    """Begins to read the counters' header, which `start_launch` needs.

    What a kernel does between the two does not wait for it.
    """
    comptime assert N_HEADER_WORDS == WARP_SIZE, "a lane has one word"
    # Here, and not where it is used: that is behind all that is under way with it.
    return inlined_assembly[
        "ld.global.b32 $0, [$1];",
        Int32,
        constraints="=r,l,~{memory}",
        has_side_effect=True,
    ](counters.words.unsafe_offset(Int(lane_id())))


@always_inline
def start_launch[
    group: Group, n_control: Int
](word: Int32, counters: EPLocalSyncCounters, phase: Int) -> Launch:
    """Sets a block up; all its threads call it.

    Addresses that were shared before are there afterwards.
    """
    comptime assert WARP_SIZE == 32, "rank_slots has kernels for NVIDIA GPUs"
    var control = shared_words[n_control + 1]()
    var lane = Int(lane_id())
    var warp_idx = Int(warp_id())
    var header = LaunchHeader.of(word)
    if warp_idx == 0:
        # One warp decides for its block: a failure that is noted meanwhile
        # must not make some warps leave and others wait for them.
        var can_go = is_in_order[group](word, counters, phase)
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
    launch: Launch, counters: EPLocalSyncCounters, warp_idx: Int
) -> Bool:
    """Tells one thread of the grid that all blocks have read the header.

    Every thread of every block calls it, once.
    """
    if launch.warp_idx != warp_idx or launch.lane != 0:
        return False
    if arrive(counters.blocks_done()) != Int(grid_dim.x) - 1:
        return False
    counters.blocks_done()[] = 0
    return True


@always_inline
def publish_reads[
    group: Group
](
    launch: Launch,
    dispatch_counts: SharedAddresses,
    dispatch_received: UInt32,
    combine_received: UInt32,
):
    """Tells every rank which generations this one has read, with one warp.

    A word says both: dispatch in its upper half, combine in its lower one.
    """
    # Behind `is_last_block` one lane has acquired what all blocks did.
    syncwarp()
    for rank in range(launch.lane, group.n_ranks, WARP_SIZE):
        publish(
            flag_at(
                bytes_at(dispatch_counts[unsafe_offset=rank]),
                group.dispatch_done_offset(launch.my_rank),
            ),
            dispatch_received,
            Int(combine_received),
        )


@always_inline
def publish_earlier_reads[
    group: Group
](launch: Launch, dispatch_counts: SharedAddresses, warp_idx: Int):
    """Tells every rank what the launches before this one have read.

    One warp of the first block does. What it tells was true when this launch
    began: a kernel that calls this begins when those before it have ended.
    """
    if block_idx.x == 0 and launch.warp_idx == warp_idx:
        publish_reads[group](
            launch,
            dispatch_counts,
            launch.before.dispatch_received,
            launch.before.combine_received,
        )


@always_inline
def _read_of[is_combine: Bool](word: UInt64) -> UInt32:
    comptime if is_combine:
        return UInt32(count_of(word))
    return generation_of(word)


@always_inline
def await_readers[
    group: Group, is_combine: Bool
](
    launch: Launch,
    dispatch_counts: SharedAddresses,
    counters: EPLocalSyncCounters,
    phase: Int,
) -> Bool:
    """Waits until all ranks have read what this one sent last, with one warp.
    """
    var generation = launch.before.dispatch_sent
    var clear = launch.before.dispatch_clear
    comptime if is_combine:
        generation = launch.before.combine_sent
        clear = launch.before.combine_clear
    if clear == generation:
        return True
    var my_counts = bytes_at(dispatch_counts[unsafe_offset=launch.my_rank])
    var is_met = True
    for rank in range(launch.lane, group.n_ranks, WARP_SIZE):
        var flag = flag_at(my_counts, group.dispatch_done_offset(rank))
        var word = peek(flag)
        var spins = 0
        while not is_not_before(_read_of[is_combine](word), generation):
            spins += 1
            if (
                spins % SPINS_BETWEEN_LOOKS == 0
                and launch.deadline.has_passed()
            ):
                note_failure(
                    counters.failure(),
                    NOT_READ,
                    phase,
                    rank,
                    -1,
                    generation,
                    flag_word(_read_of[is_combine](word), 0),
                )
                is_met = False
                break
            word = peek(flag)
    # What each lane has seen of its ranks, all lanes may build on.
    syncwarp()
    if any_lane(not is_met):
        counters.set_broken()
        return False
    return True


# Peers' words come some microseconds after their launch began; a look is a trip to
# the memory.
comptime _LOOKS = 16


@always_inline
def note_readers[
    group: Group, is_combine: Bool
](
    launch: Launch,
    dispatch_counts: SharedAddresses,
    counters: EPLocalSyncCounters,
):
    """Spares the next launch that sends a wait, if all have read already.

    One warp calls it, for which nobody waits. It looks `_LOOKS` times, and does not
    insist.
    """
    var generation = launch.before.dispatch_sent
    comptime if is_combine:
        generation = launch.before.combine_sent
    var my_counts = bytes_at(dispatch_counts[unsafe_offset=launch.my_rank])
    for _ in range(_LOOKS):
        var is_met = True
        for rank in range(launch.lane, group.n_ranks, WARP_SIZE):
            var word = peek(
                flag_at(my_counts, group.dispatch_done_offset(rank))
            )
            if not is_not_before(_read_of[is_combine](word), generation):
                is_met = False
        syncwarp()
        if not any_lane(not is_met):
            if launch.lane == 0:
                comptime if is_combine:
                    counters.set_combine_clear(generation)
                else:
                    counters.set_dispatch_clear(generation)
            return
