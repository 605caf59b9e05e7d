# SPDX-License-Identifier: Apache-2.0
"""CpuRank: the state of a launch on a CPU rank, and its waits.

docs/fault_tolerance.md says when a peer is late for ranks that mask it.
"""
from ..protocol.call import Call
from ..protocol.counters import Counters, N_FAILURE_WORDS, Word
from ..protocol.failures import Caller, Failure, place_of, raise_failure, what_failed
from ..protocol.flags import (
    count_of,
    Deadline,
    flag_at,
    flag_word,
    FlagPointer,
    generation_of,
    load_acquire_sys,
    ms_of,
    next_generation,
    now_ns,
    POLLS_BEFORE_SLEEP,
    publish,
    SLEEP_SECONDS,
)
from ..protocol.layout import Group
from ..protocol.peer_words import FLAG_BYTES, Limit, PeerWords
from ..protocol.token_format import BytePointer
from ..protocol.transport import PeerBuffers
from ..protocol.word_list import N_KINDS, peer_words
from .link import Link
from std.time import sleep

comptime _POLLS_PER_HEARTBEAT = 16
"""Polls, each after a sleep, between two heartbeats of a rank that waits."""
comptime _FAR_BEATS_PER_TIMEOUT = 8
"""The most that it sends to other hosts in the time after which it would be masked."""


def _ms_since(then: UInt32, now: UInt32) -> Int:
    """Returns how long ago a time was; the clock may wrap."""
    return Int((now - then).cast[DType.int32]())


struct CpuRank[group: Group](TrivialRegisterPassable):
    """A CPU rank in one launch of dispatch or of combine."""

    var phase: Int
    """As in `PHASES`."""
    var my_rank: Int
    var last: UInt32
    var generation: UInt32
    var counters: Counters[Self.group]
    var send_bufs: PeerBuffers
    var recv_bufs: PeerBuffers
    var recv_counts: PeerBuffers
    var timeout_ms: Int
    """How long it may wait in all; 0: it must not wait, because the ranks of this
    process run one after another."""
    var deadline: Deadline
    var caller: Caller
    var link: Link
    """To ranks of other hosts, if the group has some."""

    comptime _heartbeats = Self.group.heartbeat_offset(0) + (
        0 if Self.group.dispatch_msg_bytes
        > 0 else Self.group.dispatch_counts_from_combine_counts()
    )
    """Where the heartbeats are, from the counts of this op's direction."""

    def __init__(out self, call: Call[Self.group], phase: Int) raises:
        self.phase = phase
        self.my_rank = call.counters.my_rank()
        # The words of the four phases are in the order of `PHASES`.
        self.last = call.counters.generation(Word.DISPATCH_SENT + phase)
        self.generation = next_generation(self.last)
        self.counters = call.counters
        self.send_bufs = call.send_bufs
        self.recv_bufs = call.recv_bufs
        self.recv_counts = call.counts
        self.timeout_ms = call.counters.timeout_ms()
        self.deadline = Deadline.after(self.timeout_ms)
        self.caller = call.caller
        self.link = Link.of(call.counters)
        comptime if Self.group.masks:
            var now = ms_of(now_ns())
            if phase == 0:
                self.counters.step_began_ms()[] = now.cast[DType.int32]()
            self._hear(now)
            self._give_heartbeat(now, begins=True)

    def recv_buf(self) -> BytePointer:
        return self.recv_bufs[self.my_rank]

    def put_buf(self) -> BytePointer:
        """Locates where messages by expert wait until they are put to other hosts."""
        return self.send_bufs[self.my_rank]

    def staged_token(self, token_idx: Int) -> BytePointer:
        return self.recv_buf().unsafe_offset(
            Self.group.staged_from_recv(self.my_rank, token_idx)
        )

    def n_experts(self) -> Int:
        return Self.group.n_experts_on(self.my_rank)

    def expert_id(self, local_expert: Int) -> Int:
        return Self.group.expert_id(self.my_rank, local_expert)

    def flag(self, rank: Int, offset: Int) -> FlagPointer:
        return flag_at(self.recv_counts[rank], offset)

    def my_flag(self, offset: Int) -> FlagPointer:
        return self.flag(self.my_rank, offset)

    def is_masked(self, rank: Int) -> Bool:
        return self.counters.is_masked(rank)

    def is_far(self, rank: Int) -> Bool:
        """Returns whether a rank is on another host, where only the link leads."""
        return Self.group.spans_hosts() and (
            self.recv_bufs.addresses[unsafe_offset=rank] == 0
        )

    def near(self, rank: Int) -> Int:
        """Names the rank in whose recv buffer this one writes what is for a rank: if that
        is far, its own, where it is staged."""
        return self.my_rank if self.is_far(rank) else rank

    def ranks_per_host(self) -> Int:
        var n = 0
        for rank in range(Self.group.n_ranks):
            n += Int(not self.is_far(rank))
        return n

    def relay_to(self, my_rank: Int, rank: Int) -> Int:
        """Names the rank of a rank's host with which another exchanges, if ranks relay.
        """
        return Self.group.relay_to(my_rank, rank, self.ranks_per_host())

    def relays_for(self, src_rank: Int) -> Bool:
        """Returns whether this rank relays what a source sends to its host."""
        comptime if not Self.group.relays:
            return False
        return self.is_far(src_rank) and (
            self.relay_to(self.my_rank, src_rank) == src_rank
        )

    def is_mate(self, rank: Int) -> Bool:
        """Returns whether a rank is another one of this host."""
        return rank != self.my_rank and not self.is_far(rank)

    def put(self, rank: Int, to: BytePointer, from_: BytePointer, n_bytes: Int) raises:
        """Puts what is staged; `to`: the place, as it is in this rank's region."""
        if not self.is_masked(rank):
            self.link.put(rank, to, from_, n_bytes, self.deadline)

    def fence(self) raises:
        """Has signals and puts to come come after all before, on other hosts."""
        comptime if Self.group.spans_hosts():
            self.link.fence(self.deadline)

    def publish(self, rank: Int, offset: Int, count: Int = 0) raises:
        if not self.is_masked(rank):
            self._publish(rank, offset, self.generation, count)

    def _publish(self, rank: Int, offset: Int, generation: UInt32, count: Int) raises:
        comptime if Self.group.spans_hosts():
            if self.is_far(rank):
                var word = flag_word(generation, count)
                self.link.signal(rank, self.my_flag(offset), word, self.deadline)
                return
        publish(self.flag(rank, offset), generation, count)

    def publish_done(self, offset: Int) raises:
        for rank in range(Self.group.n_ranks):
            self.publish(rank, offset + self.my_rank * FLAG_BYTES)

    def count_from(self, src_rank: Int, offset: Int) -> Int:
        """Reads a count that was awaited; what a masked rank sent counts as 0."""
        if self.is_masked(src_rank):
            return 0
        return count_of(load_acquire_sys(self.my_flag(offset)))

    def await_peers(self, what_is_sent: Bool = False) raises:
        """Waits for all that this phase awaits of its peers, or for what an async phase
        awaits of others' same phase; raises, or masks who is late.

        Before it sends, every peer has read what it was sent last (I3: no slot is
        written before its last reader is done with it).
        """
        comptime for kind in range(N_KINDS):
            var words = peer_words[kind](Self.group, on_gpu=False)
            var is_sent = self.phase % 2 == 0 and not words.is_done_word()
            if words.phase == self.phase and is_sent == what_is_sent:
                for peer in range(Self.group.n_ranks):
                    for i in range(Self.group.n_words_of(words, self.my_rank, peer)):
                        self._await_word(words, peer, i)

    def _await_word(self, words: PeerWords, missing_rank: Int, i: Int) raises:
        var mine = self.recv_bufs if words.is_in_recv() else self.recv_counts
        var flag = flag_at(mine[self.my_rank], words.place(missing_rank, i))
        var generation = self.last if words.is_done_word() else self.generation
        comptime masks = Self.group.masks
        var began: UInt32 = 0
        comptime if masks:
            began = ms_of(now_ns())
        var n_polls = 0
        while not self.is_masked(missing_rank):
            # Read the clock first. If this process is suspended between the lines, the
            # peer must not look late for it.
            var now: UInt32 = 0
            comptime if masks:
                now = ms_of(now_ns())
            var word = load_acquire_sys(flag)
            if generation_of(word) == generation:
                return
            n_polls += 1
            if n_polls < POLLS_BEFORE_SLEEP and self.timeout_ms > 0:
                continue
            var is_late: Bool
            comptime if masks:
                is_late = self._is_late(missing_rank, began, now)
            else:
                is_late = self.deadline.has_passed()
            if is_late:
                if not masks or missing_rank == self.my_rank:
                    var code = Failure.NO_COUNT
                    if words.is_done_word():
                        code = Failure.NOT_READ
                    elif self.phase % 2 == 0:  # late weights
                        code = Failure.NO_MESSAGE
                    var expert = self._expert_of(words, missing_rank, i)
                    self._raise_missing(code, missing_rank, expert, generation, word)
                self.counters.masked(missing_rank)[] = 1
                return
            if masks and n_polls % _POLLS_PER_HEARTBEAT == 0:
                self._give_heartbeat(now)
            sleep(SLEEP_SECONDS)

    def await_flag(self, flag: FlagPointer, missing_rank: Int) raises:
        """Waits for a flag of this generation, where ranks do not mask."""
        var n_polls = 0
        while True:
            var word = load_acquire_sys(flag)
            if generation_of(word) == self.generation:
                return
            n_polls += 1
            if n_polls < POLLS_BEFORE_SLEEP:
                continue
            if self.deadline.has_passed():
                self._raise_missing(
                    Failure.NO_MESSAGE, missing_rank, -1, self.generation, word
                )
            sleep(SLEEP_SECONDS)

    def _raise_missing(
        self, code: Int32, missing_rank: Int, expert: Int, wanted: UInt32, found: UInt64
    ) raises:
        var record: Array[Int32, N_FAILURE_WORDS] = [
            code,
            Int32(self.phase),
            Int32(missing_rank),
            Int32(expert),
            wanted.cast[DType.int32](),
            generation_of(found).cast[DType.int32](),
            0,
            0,
        ]
        raise_failure(record, self.my_rank, self.timeout_ms, self.caller)

    def _expert_of(self, words: PeerWords, peer: Int, i: Int) -> Int:
        """Names the expert whose count a word is, or -1."""
        if words.is_done_word() or words.limit == Limit.NONE:
            return -1
        var is_mine = words.limit == Limit.EXPERTS_OF_READER
        return Self.group.expert_id(self.my_rank if is_mine else peer, i)

    def _give_heartbeat(self, now: UInt32, begins: Bool = False) raises:
        """Says to all ranks that this one lives; to those of other hosts seldom, but as a
        launch begins."""
        var place = Self._heartbeats + self.my_rank * FLAG_BYTES
        var sent = self.counters.heard(self.my_rank)
        var age_ms = _ms_since(generation_of(sent[]), now)
        var least_ms = max(1, self.timeout_ms // _FAR_BEATS_PER_TIMEOUT)
        var is_old = begins or age_ms >= least_ms
        if is_old:
            sent[] = flag_word(now, 0)
        for rank in range(Self.group.n_ranks):
            if not self.is_masked(rank) and (is_old or not self.is_far(rank)):
                self._publish(rank, place, now, 0)

    def _heartbeat(self, rank: Int) -> UInt32:
        """Returns the last heartbeat of a rank, a time of its host's clock."""
        var place = Self._heartbeats + rank * FLAG_BYTES
        return generation_of(load_acquire_sys(self.my_flag(place)))

    def _hear(self, now: UInt32):
        """Records when new heartbeats of other hosts, which have other clocks, came."""
        comptime if Self.group.spans_hosts():
            for rank in range(Self.group.n_ranks):
                var heard = self.counters.heard(rank)
                var beat = self._heartbeat(rank)
                if self.is_far(rank) and generation_of(heard[]) != beat:
                    heard[] = flag_word(beat, Int(now))

    def _is_late(self, rank: Int, began: UInt32, now: UInt32) -> Bool:
        """Returns whether a rank has given no heartbeat for the time-out.

        One that waits for others as long as this one, and longer, is late, too.
        """
        var timeout_ms = self.timeout_ms
        var step_began = self.counters.step_began_ms()[]
        var seen: UInt32
        if self.is_far(rank):
            self._hear(now)  # of all: several that die at once cost one time-out
            seen = UInt32(count_of(self.counters.heard(rank)[]))
        else:
            seen = self._heartbeat(rank)
        var silent_ms = min(
            _ms_since(step_began.cast[DType.uint32](), now), _ms_since(seen, now)
        )
        return (
            timeout_ms == 0
            or silent_ms > timeout_ms
            or _ms_since(began, now) > 2 * timeout_ms
        )

    def error(self, what: String) -> Error:
        return Error(place_of(self.phase, self.my_rank), ": ", what, self.caller.next)

    def refusal(
        self, code: Int32, expert_or_row: Int = -1, a: Int = 0, b: Int = 0
    ) -> Error:
        var what = what_failed(code, self.my_rank, expert_or_row, a, b, self.caller)
        return self.error(what)
