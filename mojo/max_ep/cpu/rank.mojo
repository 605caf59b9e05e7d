# SPDX-License-Identifier: Apache-2.0
"""CpuRank: what a launch of a CPU rank knows, and its wait before it writes."""
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
    """A CPU rank in one launch of dispatch or of combine.

    Parameters:
        group: Sizes of the group, and the offsets of its buffers.
    """

    var op: StaticString
    """The op, as errors name it."""
    var my_rank: Int
    """This rank."""
    var last: UInt32
    """The generation that this op ended last."""
    var generation: UInt32
    """The generation of this launch."""
    var counters: EPLocalSyncCounters[Self.group.n_experts]
    """Its local words."""
    var recv_bufs: PeerBuffers[Self.group.n_ranks]
    """Every rank's recv buffer."""
    var recv_counts: PeerBuffers[Self.group.n_ranks]
    """Every rank's counts and done words."""
    var deadline: Deadline
    """When the launch gives up."""

    comptime n_pairs = Self.group.pair(Self.group.n_local_experts(), 0)
    """Pairs of a local expert and a source rank."""

    @always_inline
    def __init__(
        out self,
        op: StaticString,
        last: UInt32,
        counters: EPLocalSyncCounters,
        recv_bufs: PeerBuffers,
        recv_counts: PeerBuffers,
    ):
        """Starts the launch's clock."""
        self.op = op
        self.my_rank = counters.my_rank()
        self.last = last
        self.generation = next_generation(last)
        self.counters = {counters.words}
        self.recv_bufs = {recv_bufs.addresses}
        self.recv_counts = {recv_counts.addresses}
        self.deadline = Deadline.after(counters.timeout_ms())

    @always_inline
    def recv_buf(self) -> BytePointer:
        """Points to this rank's own recv buffer."""
        return self.recv_bufs[self.my_rank]

    @always_inline
    def staged_token(self, token_idx: Int) -> BytePointer:
        """Points to where one of this rank's own tokens is encoded."""
        return self.recv_buf().unsafe_offset(
            Self.group.staged_from_recv(self.my_rank)
            + Self.group.dispatch_staged_offset(token_idx)
        )

    @always_inline
    def n_experts(self) -> Int:
        """Counts the experts that this rank holds."""
        return n_experts_on_rank(
            Self.group.n_experts, Self.group.n_ranks, self.my_rank
        )

    @always_inline
    def expert_id(self, local_expert: Int) -> Int:
        """Finds the global id of a local expert."""
        return self.my_rank * Self.group.n_local_experts() + local_expert

    @always_inline
    def flag(self, rank: Int, offset: Int) -> FlagPointer:
        """Points to a count or done word of a rank."""
        return flag_at(self.recv_counts[rank], offset)

    @always_inline
    def my_flag(self, offset: Int) -> FlagPointer:
        """Points to a count or done word of this rank."""
        return self.flag(self.my_rank, offset)

    @always_inline
    def waiter(
        self, missing_rank: Int, what: StaticString, expert_id: Int = -1
    ) -> Waiter:
        """Names what this launch waits for."""
        return Waiter(self.op, self.my_rank, missing_rank, what, expert_id)

    def error[T: Writable](self, what: T) -> Error:
        """Makes an error of this launch."""
        return Error("max_ep: ", self.op, " on rank ", self.my_rank, what)

    def await_readers(self, done_offset: Int, *, only_owners: Bool) raises:
        """Waits until every peer has read what this rank sent it last.

        In a program that dispatches and combines in turn this never waits: the
        last combine has already shown that all peers were done
        (docs/protocol.md).
        """
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


@always_inline
def write_source_info(
    message: BytePointer, msg_bytes: Int, choice: Int, generation: UInt32
):
    """Writes the source info behind the token of a message.

    An ordinary store: on CPU a count announces the message.
    """
    message_flag(message, msg_bytes)[] = flag_word(generation, choice)
