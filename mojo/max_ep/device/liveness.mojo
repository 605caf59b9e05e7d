# SPDX-License-Identifier: Apache-2.0
"""When a rank that does not answer is masked: the clock of ranks that mask.

docs/fault_tolerance.md says when a rank is late. All this is read after some dozens of
polls without success, never before.
"""
from ..protocol.counters import Counters
from ..protocol.flags import (
    count_of,
    Deadline,
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
from ..protocol.layout import Group
from .shared import SharedAddresses
from .warp import bytes_at

comptime _NS_PER_MS = UInt64(1_000_000)
comptime _BEATS_PER_TIMEOUT = 8
"""Heartbeats that a rank sends in the time after which it would be masked."""
comptime _MOST_TIMEOUTS = UInt64(4)
"""How long heartbeats help: two ranks that wait for each other must stop."""
comptime _UNDECIDED_MS = UInt64(2_000)
"""How much longer the other blocks wait for what the first decides."""
comptime UNDECIDED = UInt64(0)
"""What `read_decision` returns as long as there is no decision; no flag."""
comptime NEVER_DECIDED = UInt64(1)
"""What it returns if the first block has failed to decide."""


@fieldwise_init
struct Liveness[group: Group](TrivialRegisterPassable):
    """A rank that waits, of those that mask."""

    var counters: Counters[Self.group]
    var counts: SharedAddresses
    var my_rank: Int
    var deadline: Deadline

    @always_inline
    def _timeout_ns(self) -> UInt64:
        return UInt64(self.counters.timeout_ms()) * _NS_PER_MS

    @always_inline
    def _heartbeat(self, reader: Int, rank: Int) -> FlagPointer:
        return flag_at(
            bytes_at(self.counts[unsafe_offset=reader]),
            Self.group.heartbeat_offset(rank),
        )

    @always_inline
    def _send_heartbeats(self, now: UInt64):
        """Says to every rank that this one lives and waits, if its last ones are old.
        """
        var now_ms = ms_of(now)
        var sent = self.counters.step_began_ms()
        var age = now_ms - load_relaxed_gpu(sent).cast[DType.uint32]()
        if age < UInt32(max(1, self.counters.timeout_ms() // _BEATS_PER_TIMEOUT)):
            return
        store_relaxed_gpu(sent, now_ms.cast[DType.int32]())
        for rank in range(Self.group.n_ranks):
            store_relaxed_sys(self._heartbeat(rank, self.my_rank), now_ms, 0)

    @always_inline
    def _record_heartbeat(self, rank: Int, now_ms: UInt32) -> UInt32:
        """Records a new heartbeat of a rank; returns when the last one was seen."""
        var beat = generation_of(load_relaxed_sys(self._heartbeat(self.my_rank, rank)))
        var heard = self.counters.heard(rank)
        var last = load_relaxed_gpu(heard)
        if generation_of(last) != beat:
            last = flag_word(beat, Int(now_ms))
            store_relaxed_gpu(heard, last)
        return UInt32(count_of(last))

    @always_inline
    def mask_if_late(self, rank: Int) -> Bool:
        """Masks a rank whose time is over, after a heartbeat of this one; returns whether
        it is masked."""
        var masked = self.counters.masked(rank)
        if load_relaxed_gpu(masked) != 0:
            return True
        var now = now_ns()
        self._send_heartbeats(now)
        var silent_ms = ms_of(now) - self._record_heartbeat(rank, ms_of(now))
        var end_ns = self.deadline.end_ns
        if now <= end_ns or (
            silent_ms < UInt32(self.counters.timeout_ms())
            and now <= end_ns + (_MOST_TIMEOUTS - 1) * self._timeout_ns()
        ):
            return False
        store_relaxed_gpu(masked, 1)
        return True

    @always_inline
    def read_decision(self, place: Int) -> UInt64:
        """Reads what the first block has decided of a count, once half of the launch's
        time is over; called by the others, after a heartbeat."""
        var now = now_ns()
        self._send_heartbeats(now)
        var end_ns = self.deadline.end_ns
        if now <= end_ns - self._timeout_ns() // 2:
            return UNDECIDED
        var rest = (2 * _MOST_TIMEOUTS - 1) * self._timeout_ns()
        if now > end_ns + rest + _UNDECIDED_MS * _NS_PER_MS:
            return NEVER_DECIDED
        return load_relaxed_gpu(self.counters.decided(place))
