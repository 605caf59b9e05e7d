# SPDX-License-Identifier: Apache-2.0
"""CpuRank: the state of a launch on a CPU rank, and its wait for done words (I3).

Waits for counts are in `plan.mojo` and `combine.mojo`. All waits of CPU ranks poll in
`await_generation` (`flags.mojo`).
"""
from ..arguments import Call
from ..counters import EPLocalSyncCounters
from ..flags import (
    await_generation,
    Deadline,
    flag_at,
    flag_word,
    FlagPointer,
    generation_of,
    load_acquire_sys,
    message_flag,
    next_generation,
    Waiter,
)
from ..layout import FLAG_BYTES, Group, n_experts_on_rank
from ..token_format import BytePointer
from ..transport import PeerBuffers


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
            if (
                reader_rank == self.my_rank
                and generation_of(load_acquire_sys(done)) != self.last
                and self.deadline.timeout_ms > 0
            ):
                raise self.error(
                    t" again, before this rank has waited for what was sent"
                    t" last (generation {self.last}); wait on every rank before"
                    t" sending again."
                )
            var who = self.waiter(reader_rank, "word that it has read")
            _ = await_generation(done, self.last, self.deadline, who)


def write_source_info(
    message: BytePointer, msg_bytes: Int, choice: Int, generation: UInt32
):
    """Writes the source info of a message: a count announces it."""
    message_flag(message, msg_bytes)[] = flag_word(generation, choice)
