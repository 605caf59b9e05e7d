# SPDX-License-Identifier: Apache-2.0
"""When a rank that does not answer is masked: the clock of ranks that mask.

A rank that waits for a dead one is late for others, who must not mask it, too. So each
rank that waits sends heartbeats, and a rank is masked only if nothing has come of it,
and no heartbeat, for `timeout_ms`. Between its launches a rank sends none.

All this is read after some dozens of polls without success, never before.
"""
from ..counters import EPLocalSyncCounters, LaunchHeader
from ..flags import (
    count_of,
    DeviceDeadline,
    flag_word,
    generation_of,
    load_relaxed_gpu,
    store_relaxed_gpu,
)
from ..layout import Group

comptime _NS_PER_MS = UInt64(1_000_000)
comptime _BEATS_PER_TIMEOUT = 8
"""Heartbeats that a rank sends in the time after which it would be masked."""
comptime _MOST_TIMEOUTS = UInt64(4)
"""How long heartbeats help: two ranks that wait for each other stop some time."""
comptime _UNDECIDED_MS = UInt64(2_000)
"""How much longer the other blocks wait for what the first decides."""


struct Liveness[group: Group](TrivialRegisterPassable):
    """A reading of the clock, and what the rank knows of its peers."""

    var counters: EPLocalSyncCounters[Self.group.n_experts]
    var now_ns: UInt64
    var end_ns: UInt64
    """The deadline of the launch."""
    var timeout_ms: Int

    @always_inline
    def __init__(
        out self,
        counters: EPLocalSyncCounters[Self.group.n_experts],
        deadline: DeviceDeadline,
        header: LaunchHeader,
    ):
        """Reads the clock."""
        self.counters = counters
        self.now_ns = deadline.now_ns()
        self.end_ns = deadline.end_ns
        self.timeout_ms = header.timeout_ms

    @always_inline
    def now_ms(self) -> UInt32:
        """Returns the time in ms; it wraps."""
        return UInt32((self.now_ns // _NS_PER_MS) & 0xFFFF_FFFF)

    @always_inline
    def _timeout_ns(self) -> UInt64:
        return UInt64(self.timeout_ms) * _NS_PER_MS

    @always_inline
    def is_time_for_heartbeats(self) -> Bool:
        """Returns whether the rank's last ones are old; says that it sends some."""
        var sent = self.counters.step_began_ms(Self.group)
        var age = self.now_ms() - load_relaxed_gpu(sent).cast[DType.uint32]()
        if age < UInt32(max(1, self.timeout_ms // _BEATS_PER_TIMEOUT)):
            return False
        store_relaxed_gpu(sent, self.now_ms().cast[DType.int32]())
        return True

    @always_inline
    def is_silent(self, rank: Int, beat: UInt32) -> Bool:
        """Returns whether a rank's time is over; `beat`: its heartbeat."""
        var heard = self.counters.heard(Self.group, rank)
        var last = load_relaxed_gpu(heard)
        if generation_of(last) != beat:
            store_relaxed_gpu(heard, flag_word(beat, Int(self.now_ms())))
            last = flag_word(beat, Int(self.now_ms()))
        if self.now_ns <= self.end_ns:
            return False
        var age = self.now_ms() - UInt32(count_of(last))
        return (
            age >= UInt32(self.timeout_ms)
            or self.now_ns > self.end_ns + (_MOST_TIMEOUTS - 1) * self._timeout_ns()
        )

    @always_inline
    def is_late(self) -> Bool:
        """Returns whether half of the launch's time is over.

        From then on only the first block takes counts; the others wait for what it
        decides. What they took before, it sees long before it gives up.
        """
        return self.now_ns > self.end_ns - self._timeout_ns() // 2

    @always_inline
    def is_too_late(self) -> Bool:
        """Returns whether the first block must have decided."""
        var rest = (2 * _MOST_TIMEOUTS - 1) * self._timeout_ns()
        return self.now_ns > self.end_ns + rest + _UNDECIDED_MS * _NS_PER_MS
