# SPDX-License-Identifier: Apache-2.0
"""CpuRank: the state of a launch on a CPU rank, and its waits.

`await_flag` is the wait of all phases. Where ranks mask a peer that is late, each rank
writes a heartbeat to its peers when a launch begins and while it waits. A peer is late,
and is masked, if it has not published what is awaited and has given no heartbeat for
the time-out, counted from the begin of this rank's step at the earliest. So a
peer that itself waits for a dead one is not taken for dead, and one time-out is enough
for several that died at once.
"""
from ..arguments import Call
from ..counters import EPLocalSyncCounters, Word
from ..flags import (
    count_of,
    Deadline,
    flag_at,
    flag_word,
    FlagPointer,
    generation_of,
    load_acquire_sys,
    message_flag,
    next_generation,
    POLLS_BEFORE_SLEEP,
    publish,
    raise_missing,
    SLEEP_SECONDS,
    Waiter,
)
from ..layout import FLAG_BYTES, Group, n_experts_on_rank
from ..token_format import BytePointer
from ..transport import PeerBuffers
from std.time import perf_counter_ns, sleep

comptime _POLLS_PER_HEARTBEAT = 16
"""Polls, each after a sleep, between two heartbeats of a rank that waits."""


def _now_ms() -> UInt32:
    """Reads the clock, which all processes of a host share."""
    return UInt32(UInt64(perf_counter_ns()) // 1_000_000 & 0xFFFF_FFFF)


def _ms_since(then: UInt32, now: UInt32) -> Int:
    """Returns how long ago a time was; the clock may wrap."""
    return Int((now - then).cast[DType.int32]())


struct CpuRank[group: Group](TrivialRegisterPassable):
    """A CPU rank in one launch of dispatch or of combine."""

    var op: StaticString
    var my_rank: Int
    var last: UInt32
    """The generation of this op's previous launch."""
    var generation: UInt32
    var counters: EPLocalSyncCounters[Self.group.n_experts]
    var recv_bufs: PeerBuffers[Self.group.n_ranks]
    var recv_counts: PeerBuffers[Self.group.n_ranks]
    var deadline: Deadline

    comptime n_pairs = Self.group.pair(Self.group.n_local_experts(), 0)
    """Pairs of a local expert and a source rank."""
    comptime _heartbeats = Self.group.heartbeat_offset(0) + (
        0 if Self.group.dispatch_msg_bytes
        > 0 else Self.group.dispatch_counts_from_combine_counts()
    )
    """Where the heartbeats are, from the counts of this op's direction."""

    def __init__(out self, call: Call[Self.group], op: StaticString, last_word: Int):
        """Starts the clock; `last_word` counts the op's generations."""
        self.op = op
        self.my_rank = call.counters.my_rank()
        self.last = call.counters.generation(last_word)
        self.generation = next_generation(self.last)
        self.counters = call.counters
        self.recv_bufs = call.recv_bufs
        self.recv_counts = call.counts
        self.deadline = Deadline.after(call.counters.timeout_ms())
        comptime if Self.group.masks:
            var now = _now_ms()
            if last_word == Word.DISPATCH_SENT:
                self.counters.step_began_ms(Self.group)[] = now.cast[DType.int32]()
            self._give_heartbeat(now)

    def recv_buf(self) -> BytePointer:
        """Points to this rank's own recv buffer."""
        return self.recv_bufs[self.my_rank]

    def staged_token(self, token_idx: Int) -> BytePointer:
        """Points to where one of this rank's own tokens is encoded."""
        return self.recv_buf().unsafe_offset(
            Self.group.staged_from_recv(self.my_rank)
            + Self.group.dispatch_staged_offset(token_idx)
        )

    def n_experts(self) -> Int:
        """Counts the experts that this rank holds."""
        return n_experts_on_rank(Self.group.n_experts, Self.group.n_ranks, self.my_rank)

    def expert_id(self, local_expert: Int) -> Int:
        """Finds the global id of a local expert."""
        return self.my_rank * Self.group.n_local_experts() + local_expert

    def flag(self, rank: Int, offset: Int) -> FlagPointer:
        """Points to a count or done word of a rank."""
        return flag_at(self.recv_counts[rank], offset)

    def my_flag(self, offset: Int) -> FlagPointer:
        """Points to a count or done word of this rank."""
        return self.flag(self.my_rank, offset)

    def is_masked(self, rank: Int) -> Bool:
        """Returns whether this rank has masked another one."""
        return self.counters.is_masked(Self.group, rank)

    def count_from(self, src_rank: Int, offset: Int) -> Int:
        """Reads a count that was awaited; what a masked rank sent counts as 0."""
        if self.is_masked(src_rank):
            return 0
        return count_of(load_acquire_sys(self.my_flag(offset)))

    def await_flag(self, flag: FlagPointer, generation: UInt32, who: Waiter) raises:
        """Waits until a rank has published; raises, or masks it, if it is late."""
        comptime masks = Self.group.masks
        var began: UInt32 = 0
        comptime if masks:
            began = _now_ms()
        var n_polls = 0
        while not self.is_masked(who.missing_rank):
            # Before flag and heartbeat: a rank that is stopped between these lines
            # must not take its own pause for that of another.
            var now: UInt32 = 0
            comptime if masks:
                now = _now_ms()
            var word = load_acquire_sys(flag)
            if generation_of(word) == generation:
                return
            n_polls += 1
            if n_polls < POLLS_BEFORE_SLEEP and self.deadline.timeout_ms > 0:
                continue
            var is_late: Bool
            comptime if masks:
                is_late = self._is_late(who.missing_rank, began, now)
            else:
                is_late = self.deadline.has_passed()
            if is_late:
                if not masks or who.missing_rank == self.my_rank:
                    var found = generation_of(word)
                    raise_missing(found, generation, self.deadline.timeout_ms, who)
                self.counters.masked(Self.group, who.missing_rank)[] = 1
                return
            if masks and n_polls % _POLLS_PER_HEARTBEAT == 0:
                self._give_heartbeat(now)
            sleep(SLEEP_SECONDS)

    def _give_heartbeat(self, now: UInt32):
        """Shows the peers that this rank is alive."""
        var place = Self._heartbeats + self.my_rank * FLAG_BYTES
        for rank in range(Self.group.n_ranks):
            if not self.is_masked(rank):
                publish(self.flag(rank, place), now, 0)

    def _is_late(self, rank: Int, began: UInt32, now: UInt32) -> Bool:
        """Returns whether a rank has given no heartbeat for the time-out.

        One that waits for others as long as this one, and longer, is late, too.
        """
        var timeout_ms = self.deadline.timeout_ms
        var step_began = self.counters.step_began_ms(Self.group)[]
        var seen = load_acquire_sys(self.my_flag(Self._heartbeats + rank * FLAG_BYTES))
        var silent_ms = min(
            _ms_since(step_began.cast[DType.uint32](), now),
            _ms_since(generation_of(seen), now),
        )
        return (
            timeout_ms == 0
            or silent_ms > timeout_ms
            or _ms_since(began, now) > 2 * timeout_ms
        )

    def waiter(
        self, missing_rank: Int, what: StaticString, expert_id: Int = -1
    ) -> Waiter:
        """Names what this launch waits for."""
        return Waiter(self.op, self.my_rank, missing_rank, what, expert_id)

    def error[T: Writable](self, what: T) -> Error:
        """Makes an error of this launch."""
        return Error("max_ep: ", self.op, " on rank ", self.my_rank, what)

    def await_readers(self, done_offset: Int, *, only_owners: Bool) raises:
        """Waits until every peer has read what this rank sent last."""
        for reader_rank in range(Self.group.n_ranks):
            if only_owners and reader_rank >= Self.group.n_ranks_with_experts():
                continue
            # I3: no slot is written before its last reader is done with it.
            var done = self.my_flag(done_offset + reader_rank * FLAG_BYTES)
            var who = self.waiter(reader_rank, "word that it has read")
            self.await_flag(done, self.last, who)


def write_source_info(
    message: BytePointer, msg_bytes: Int, choice: Int, generation: UInt32
):
    """Writes the source info of a message: a count announces it."""
    message_flag(message, msg_bytes)[] = flag_word(generation, choice)
