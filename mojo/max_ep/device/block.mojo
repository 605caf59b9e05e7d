# SPDX-License-Identifier: Apache-2.0
"""A block of a GPU launch: how it begins, waits, fails, publishes and ends.

A launch is a grid of blocks that are all resident at once: in the fused forms some
wait for what others send. A launch of by-rank ranks moves its generations at its
begin, as soon as every block has read the old ones. That it has read its messages
is published by the next launch of its rank (`publish_earlier_reads`): by then all
its blocks have ended, so none has to be counted.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    barrier,
    block_idx,
    grid_dim,
    lane_id,
    syncwarp,
    thread_idx,
    warp_id,
    WARP_SIZE,
)
from std.sys import inlined_assembly

from ..counters import (
    BROKEN_WORD,
    EPLocalSyncCounters,
    LaunchHeader,
    N_HEADER_WORDS,
    wanted_word,
)
from ..failures import (
    is_fatal,
    NO_MESSAGE,
    NOT_READ,
    record_failure,
    WRONG_COUNTERS,
)
from ..flags import (
    arrive_on_gpu,
    count_of,
    DeviceDeadline,
    fetch_add_block,
    flag_at,
    flag_word,
    FlagPointer,
    generation_of,
    has_reached,
    is_not_before,
    load_acquire_sys,
    publish,
    SharedWord,
    Wait,
)
from ..layout import FLAG_BYTES, Group
from ..token_format import BytePointer
from ..transport import put_flag
from .shared import share_addresses, shared_words, SharedAddresses
from .warp import any_lane, bytes_at


@always_inline
def await_launch_before():
    """Waits until the kernel before this one has ended, and lets the next begin.

    Launched so that they overlap (`Phase.overlaps_previous`), a kernel's blocks may begin
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
def header_word(counters: EPLocalSyncCounters) -> Int32:
    """Begins to read the counters' header, which `Block.begin` needs.

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


@fieldwise_init
struct Block[group: Group](TrivialRegisterPassable):
    """What each warp of a block needs from the begin of a launch to its end.

    Parameters:
        group: Sizes of the group.
    """

    var lane: Int
    """This lane."""
    var warp_idx: Int
    """This warp of the block."""
    var can_go: Bool
    """Whether the launch may do anything; the same in the whole block."""
    var my_rank: Int
    """This rank."""
    var deadline: DeviceDeadline
    """The time by which all waits must be met."""
    var before: LaunchHeader
    """The header of the counters before this launch."""
    var control: SharedWord
    """The block's control words, all 0 at first."""
    var counters: EPLocalSyncCounters[Self.group.n_experts]
    """This rank's words."""
    var recv_bufs: SharedAddresses
    """Receive buffers of all ranks, of dispatch or of combine."""
    var counts: SharedAddresses
    """Counts buffers of all ranks: those of dispatch."""

    @staticmethod
    @always_inline
    def begin[
        n_control: Int
    ](
        word: Int32,
        counters: EPLocalSyncCounters[Self.group.n_experts],
        recv_bufs: SharedAddresses,
        counts: SharedAddresses,
        phase: Int,
    ) -> Self:
        """Sets a block up; all its threads call it, with their `header_word`.

        Addresses that were shared before are visible afterwards.
        """
        comptime assert WARP_SIZE == 32, "by rank is for NVIDIA GPUs"
        var control = shared_words[n_control + 1]()
        var lane = Int(lane_id())
        var warp_idx = Int(warp_id())
        var header = LaunchHeader.of(word)
        if warp_idx == 0:
            # One warp decides for its block: a failure that is recorded meanwhile
            # must not make some warps leave and others wait for them.
            var can_go = is_in_order[Self.group](word, counters, phase)
            if lane == 0:
                control[unsafe_offset=n_control] = 1 if can_go else 0
        elif warp_idx == 1:
            for i in range(lane, n_control, WARP_SIZE):
                control[unsafe_offset=i] = 0
        barrier()
        return Self(
            lane,
            warp_idx,
            control[unsafe_offset=n_control] != 0,
            header.my_rank,
            DeviceDeadline.after(header.timeout_ms),
            header,
            control,
            counters,
            recv_bufs,
            counts,
        )

    @staticmethod
    @always_inline
    def set_up[
        n_control: Int
    ](
        counters: EPLocalSyncCounters[Self.group.n_experts],
        my_rank: Int32,
        recv_bufs: Array[BytePointer, Self.group.n_ranks_per_node],
        counts: Array[FlagPointer, Self.group.n_ranks_per_node],
    ) -> Self:
        """Sets a block of a portable phase up; a block barrier must follow.

        Every warp calls it, once it knows that the launch `can_start`. `my_rank` -1:
        as the counters say.
        """
        var rank = rank_of(counters, my_rank)
        var control = shared_words[n_control]()
        if thread_idx.x < n_control:
            control[unsafe_offset=thread_idx.x] = 0
        var header = LaunchHeader.read(counters)
        comptime n_ranks = Self.group.n_ranks
        comptime use_shmem = Self.group.use_shmem
        return Self(
            Int(lane_id()),
            Int(warp_id()),
            True,
            rank,
            DeviceDeadline.after(header.timeout_ms),
            header,
            control,
            counters,
            share_addresses[n_ranks, use_shmem](recv_bufs, rank),
            share_addresses[n_ranks, use_shmem](counts, rank),
        )

    @always_inline
    def fail(
        self,
        code: Int32,
        phase: Int,
        missing_rank: Int,
        expert_or_row: Int,
        wanted: UInt32,
        found: UInt64,
        a: Int = 0,
        b: Int = 0,
    ):
        """Records a failure; the arguments are those of `record_failure`."""
        record_failure(
            self.counters.failure(),
            code,
            phase,
            missing_rank,
            expert_or_row,
            wanted,
            found,
            a,
            b,
        )

    @always_inline
    def await_done_words(
        self, done_offset: Int, generation: UInt32, phase: Int
    ) -> Bool:
        """Waits until every peer has read what this rank sent it last."""
        var my_counts = bytes_at(self.counts[unsafe_offset=self.my_rank])
        var is_met = True
        for rank in range(self.lane, Self.group.n_ranks, WARP_SIZE):
            # I3: no slot is written before its last reader is done with it.
            var flag = flag_at(my_counts, done_offset + rank * FLAG_BYTES)
            var word = load_acquire_sys(flag)
            var wait = Wait(self.deadline)
            while not has_reached(word, generation):
                if wait.has_expired():
                    self.fail(NOT_READ, phase, rank, -1, generation, word)
                    is_met = False
                    break
                word = load_acquire_sys(flag)
        # What each lane has seen of its ranks, all lanes may build on.
        syncwarp()
        return not any_lane(not is_met)

    @always_inline
    def await_message(
        self,
        flag: FlagPointer,
        generation: UInt32,
        phase: Int,
        missing_rank: Int,
        expert_id: Int,
    ) -> UInt64:
        """Waits until a message has arrived."""
        var word = load_acquire_sys(flag)
        var wait = Wait(self.deadline)
        while generation_of(word) != generation:
            if wait.has_expired():
                self.fail(
                    NO_MESSAGE,
                    phase,
                    missing_rank,
                    expert_id,
                    generation,
                    word,
                )
                break
            word = load_acquire_sys(flag)
        return word

    @always_inline
    def publish_done(self, offset: Int, generation: UInt32):
        """Publishes to every rank that its messages have been read."""
        syncwarp()
        for rank in range(self.lane, Self.group.n_ranks, WARP_SIZE):
            var to = self.counts[unsafe_offset=rank]
            comptime if Self.group.use_shmem:
                if to == 0:
                    put_flag(
                        self.counts[unsafe_offset=self.my_rank]
                        + UInt64(offset),
                        generation,
                        0,
                        rank,
                    )
                    continue
            publish(flag_at(bytes_at(to), offset), generation, 0)

    @always_inline
    def is_last_to_start(self, warp_idx: Int) -> Bool:
        """Selects one thread of the grid, once all blocks have read the header.

        Every thread of every block calls it, once.
        """
        if self.warp_idx != warp_idx or self.lane != 0:
            return False
        if arrive_on_gpu(self.counters.blocks_done()) != Int(grid_dim.x) - 1:
            return False
        self.counters.blocks_done()[] = 0
        return True

    @always_inline
    def publish_reads(
        self, dispatch_received: UInt32, combine_received: UInt32
    ):
        """Publishes to every rank which generations this one has read.

        One warp calls it. A word holds both: dispatch in its upper half, combine
        in its lower one.
        """
        # After `is_last_block` one lane has acquired what all blocks did.
        syncwarp()
        for rank in range(self.lane, Self.group.n_ranks, WARP_SIZE):
            publish(
                flag_at(
                    bytes_at(self.counts[unsafe_offset=rank]),
                    Self.group.dispatch_done_offset(self.my_rank),
                ),
                dispatch_received,
                Int(combine_received),
            )

    @always_inline
    def publish_earlier_reads(self, warp_idx: Int):
        """Publishes to every rank what the launches before this one have read.

        One warp of the first block does. What it publishes was true when this
        launch began: a kernel that calls this begins when those before it have
        ended.
        """
        if block_idx.x == 0 and self.warp_idx == warp_idx:
            self.publish_reads(
                self.before.dispatch_received, self.before.combine_received
            )

    @always_inline
    def _sent[is_combine: Bool](self) -> UInt32:
        comptime if is_combine:
            return self.before.combine_sent
        return self.before.dispatch_sent

    @always_inline
    def await_readers[is_combine: Bool](self, phase: Int) -> Bool:
        """Waits until all ranks have read what this one sent last, with one warp.
        """
        var generation = self._sent[is_combine]()
        var drained = self.before.dispatch_drained
        comptime if is_combine:
            drained = self.before.combine_drained
        if drained == generation:
            return True
        var my_counts = bytes_at(self.counts[unsafe_offset=self.my_rank])
        var are_all_met = True
        for rank in range(self.lane, Self.group.n_ranks, WARP_SIZE):
            var flag = flag_at(my_counts, Self.group.dispatch_done_offset(rank))
            var word = load_acquire_sys(flag)
            var wait = Wait(self.deadline)
            while not is_not_before(_read_of[is_combine](word), generation):
                if wait.has_expired():
                    self.fail(
                        NOT_READ,
                        phase,
                        rank,
                        -1,
                        generation,
                        flag_word(_read_of[is_combine](word), 0),
                    )
                    are_all_met = False
                    break
                word = load_acquire_sys(flag)
        # What each lane has seen of its ranks, all lanes may build on.
        syncwarp()
        if any_lane(not are_all_met):
            self.counters.set_broken()
            return False
        return True

    @always_inline
    def prefetch_done_words[is_combine: Bool](self):
        """Spares the next launch that sends a wait, if all have read already.

        One warp calls it, for which nobody waits. It polls `_DONE_POLLS` times.
        """
        var generation = self._sent[is_combine]()
        var my_counts = bytes_at(self.counts[unsafe_offset=self.my_rank])
        for _ in range(_DONE_POLLS):
            var is_met = True
            for rank in range(self.lane, Self.group.n_ranks, WARP_SIZE):
                var word = load_acquire_sys(
                    flag_at(my_counts, Self.group.dispatch_done_offset(rank))
                )
                if not is_not_before(_read_of[is_combine](word), generation):
                    is_met = False
            syncwarp()
            if not any_lane(not is_met):
                if self.lane == 0:
                    comptime if is_combine:
                        self.counters.set_combine_drained(generation)
                    else:
                        self.counters.set_dispatch_drained(generation)
                return


@always_inline
def _read_of[is_combine: Bool](word: UInt64) -> UInt32:
    comptime if is_combine:
        return UInt32(count_of(word))
    return generation_of(word)


# Peers publish some microseconds after their launch began; a poll takes about one.
comptime _DONE_POLLS = 16


@always_inline
def rank_of(counters: EPLocalSyncCounters, my_rank: Int32) -> Int:
    """Finds out which rank a launch is for."""
    return Int(my_rank) if my_rank >= 0 else counters.my_rank()


@always_inline
def next_work(next: SharedWord, lane: Int) -> Int:
    """Takes the next of what a block's warps share out; all lanes call it."""
    var round: UInt32 = 0
    if lane == 0:
        round = fetch_add_block(next, 1)
    return Int(warp.shuffle_idx(round, UInt32(0)))


@always_inline
def can_start[group: Group](counters: EPLocalSyncCounters, phase: Int) -> Bool:
    """Returns whether a launch may touch anything but its counters and results.

    The launcher has made sure that the counters are as many as the launch
    needs, so their header may be read, and the failure recorded there, whoever
    they belong to. No word that is read changes during a launch, unless
    all its warps leave early: so none waits for one that has left.
    """
    var found: Int32 = 0
    if lane_id() < N_HEADER_WORDS:
        found = counters.words[unsafe_offset=lane_id()]
    return is_in_order[group](found, counters, phase)


@always_inline
def is_in_order[
    group: Group
](found: Int32, counters: EPLocalSyncCounters, phase: Int) -> Bool:
    """Returns whether the header of counters allows a launch; see `can_start`.
    """
    comptime assert N_HEADER_WORDS <= WARP_SIZE, "a lane checks one word"
    var lane = Int(lane_id())
    var wanted: Int32 = 0
    if lane < N_HEADER_WORDS:
        wanted = wanted_word(lane, found, group)
    if any_lane(found != wanted):
        if found != wanted:
            record_failure(
                counters.failure(),
                WRONG_COUNTERS,
                phase,
                -1,
                lane,
                0,
                0,
                Int(found),
                Int(wanted),
            )
        return False
    return not any_lane(lane == BROKEN_WORD and found != 0)


@always_inline
def is_last_block(counters: EPLocalSyncCounters) -> Bool:
    """Selects one warp of the grid once all blocks have done their work.

    Every thread of every block calls it, once, at the end of a launch. If one
    has failed, no warp is selected, and later launches do nothing.
    """
    barrier()
    if warp_id() != 0:
        return False
    var all_done: UInt32 = 0
    if lane_id() == 0:
        if arrive_on_gpu(counters.blocks_done()) == Int(grid_dim.x) - 1:
            counters.blocks_done()[] = 0
            if is_fatal(counters.failure()[]):
                counters.set_broken()
            else:
                all_done = 1
    return warp.shuffle_idx(all_done, UInt32(0)) != 0
