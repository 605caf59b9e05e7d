# SPDX-License-Identifier: Apache-2.0
"""When a rank that does not answer is masked: the clock of ranks that mask.

docs/fault_tolerance.md says when a rank is late. Between its launches it sends no
heartbeats.

All this is read after some dozens of polls without success, never before.
"""
from ..counters import Counters
from ..flags import (
    count_of,
    flag_at,
    flag_word,
    FlagPointer,
    generation_of,
    load_relaxed_gpu,
    load_relaxed_sys,
    ms_of,
    now_ns,
    store_relaxed_gpu,
    store_relaxed_sys,
)
from ..layout import Group
from .shared import SharedAddresses
from .warp import bytes_at

comptime _NS_PER_MS = UInt64(1_000_000)
comptime _BEATS_PER_TIMEOUT = 8
"""Heartbeats that a rank sends in the time after which it would be masked."""
comptime _MOST_TIMEOUTS = UInt64(4)
"""How long heartbeats help: two ranks that wait for each other stop some time."""
comptime _UNDECIDED_MS = UInt64(2_000)
"""How much longer the other blocks wait for what the first decides."""


@fieldwise_init
struct Clock[group: Group](TrivialRegisterPassable):
    """The time of a launch, and what the rank knows of its peers."""

    var words: Pointer[Int32, MutUntrackedOrigin]
    var counts: SharedAddresses
    """Counts buffers of all ranks, as in `Block`."""
    var end_ns: UInt64

    @always_inline
    def _counters(self) -> Counters[Self.group]:
        return {self.words}

    @always_inline
    def _timeout_ns(self) -> UInt64:
        return UInt64(self._counters().timeout_ms()) * _NS_PER_MS

    @always_inline
    def _heartbeat(self, reader: Int, rank: Int) -> FlagPointer:
        """Points to the heartbeat of a rank on a reader's rank."""
        var offset = Self.group.heartbeat_offset(rank)
        # `CombineRows` has the counts of combine.
        comptime if Self.group.combine_msg_bytes > 0 and not Self.group.has_sums:
            offset += Self.group.dispatch_counts_from_combine_counts()
        return flag_at(bytes_at(self.counts[unsafe_offset=reader]), offset)

    @always_inline
    def send_heartbeats(self, now: UInt64):
        """Says to every rank that this one lives and waits, if its last ones are old.
        """
        var now_ms = ms_of(now)
        var sent = self._counters().step_began_ms()
        var age = now_ms - load_relaxed_gpu(sent).cast[DType.uint32]()
        if age < UInt32(max(1, self._counters().timeout_ms() // _BEATS_PER_TIMEOUT)):
            return
        store_relaxed_gpu(sent, now_ms.cast[DType.int32]())
        for rank in range(Self.group.n_ranks):
            store_relaxed_sys(
                self._heartbeat(rank, self._counters().my_rank()), now_ms, 0
            )

    @always_inline
    def is_silent(self, rank: Int, now: UInt64) -> Bool:
        """Returns whether a rank's time is over."""
        var now_ms = ms_of(now)
        var beat = generation_of(
            load_relaxed_sys(self._heartbeat(self._counters().my_rank(), rank))
        )
        var heard = self._counters().heard(rank)
        var last = load_relaxed_gpu(heard)
        if generation_of(last) != beat:
            last = flag_word(beat, Int(now_ms))
            store_relaxed_gpu(heard, last)
        if now <= self.end_ns:
            return False
        return (
            now_ms - UInt32(count_of(last)) >= UInt32(self._counters().timeout_ms())
            or now > self.end_ns + (_MOST_TIMEOUTS - 1) * self._timeout_ns()
        )

    @always_inline
    def is_late(self, now: UInt64) -> Bool:
        """Returns whether half of the launch's time is over."""
        return now > self.end_ns - self._timeout_ns() // 2

    @always_inline
    def is_too_late(self, now: UInt64) -> Bool:
        """Returns whether the first block must have decided."""
        var rest = (2 * _MOST_TIMEOUTS - 1) * self._timeout_ns()
        return now > self.end_ns + rest + _UNDECIDED_MS * _NS_PER_MS


@always_inline
def is_lost[group: Group](clock: Clock[group], rank: Int) -> Bool:
    """Returns whether a rank is masked now; masks it if its time is over."""
    var masked = clock._counters().masked(rank)
    if load_relaxed_gpu(masked) != 0:
        return True
    var now = now_ns()
    clock.send_heartbeats(now)
    if not clock.is_silent(rank, now):
        return False
    store_relaxed_gpu(masked, 1)
    return True


comptime UNDECIDED = UInt64(0)
"""What `decided_of` returns as long as there is no decision; no flag."""
comptime NEVER_DECIDED = UInt64(1)
"""What it returns if the first block has failed to decide."""


@always_inline
def decided_of[group: Group](clock: Clock[group], place: Int) -> UInt64:
    """Reads what the first block has decided of a count, once half of the launch's time
    is over; called by the others."""
    var now = now_ns()
    clock.send_heartbeats(now)
    if not clock.is_late(now):
        return UNDECIDED
    if clock.is_too_late(now):
        return NEVER_DECIDED
    return load_relaxed_gpu(clock._counters().decided(place))
