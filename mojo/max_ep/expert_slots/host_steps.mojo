# SPDX-License-Identifier: Apache-2.0
"""Steps that dispatch and combine of CPU ranks share."""
from ..counters import EPLocalSyncCounters
from ..flags import (
    Deadline,
    FlagPointer,
    Waiter,
    await_generation,
    flag_at,
    flag_word,
    generation_of,
    message_flag,
    peek,
)
from ..layout import FLAG_BYTES, n_experts_on_rank
from ..token_format import BytePointer


@always_inline
def write_source_info(
    message: BytePointer, msg_bytes: Int, choice: Int, generation: UInt32
):
    """Writes the source info behind the token of a message.

    An ordinary store: on CPU the count of the pair announces the message.
    """
    message_flag(message, msg_bytes)[] = flag_word(generation, choice)


@fieldwise_init
struct RowCursor(TrivialRegisterPassable):
    """Walks the rows of all pairs in order, over the gaps between them."""

    var pair: Int
    """The pair of the row."""
    var n_before: Int
    """Rows of the pairs before it."""

    @staticmethod
    @always_inline
    def start() -> Self:
        """Stands before the first row."""
        return Self(0, 0)

    @always_inline
    def advance(mut self, i: Int, counters: EPLocalSyncCounters) -> Int:
        """Goes on to the pair of a row."""
        while self.n_before + counters.pair_count(self.pair) <= i:
            self.n_before += counters.pair_count(self.pair)
            self.pair += 1
        return i - self.n_before


def n_rows_of_pairs(n_pairs: Int, counters: EPLocalSyncCounters) -> Int:
    """Counts the rows of the last dispatch, without a shared expert's."""
    var n_rows = 0
    for pair in range(n_pairs):
        n_rows += counters.pair_count(pair)
    return n_rows


def hash_src_info(
    src_info: Pointer[mut=_, Int32, _],
    n_pairs: Int,
    counters: EPLocalSyncCounters,
) -> Int32:
    """Digests `src_info`, so that combine can tell the last dispatch's."""
    var digest = UInt32(n_rows_of_pairs(n_pairs, counters))
    for pair in range(n_pairs):
        var first = 2 * counters.pair_row(pair)
        for i in range(first, first + 2 * counters.pair_count(pair)):
            digest = (
                digest ^ src_info[unsafe_offset=i].cast[DType.uint32]()
            ) * 16777619
            digest ^= digest >> 15
    return digest.cast[DType.int32]()


def await_readers[
    n_experts: Int, n_ranks: Int
](
    my_counts: BytePointer,
    done_offset: Int,
    generation: UInt32,
    only_owners: Bool,
    deadline: Deadline,
    who: Waiter,
) raises:
    """Waits until every peer has read what this rank sent it last.

    In a program that dispatches and combines in turn this never waits: the
    last combine has already shown that all peers were done (docs/protocol.md).
    """
    for reader_rank in range(n_ranks):
        if only_owners and (
            n_experts_on_rank(n_experts, n_ranks, reader_rank) == 0
        ):
            continue
        var waiter = who
        waiter.missing_rank = reader_rank
        # I3: no slot is written before its last reader is done with it.
        var done = flag_at(my_counts, done_offset + reader_rank * FLAG_BYTES)
        if (
            reader_rank == who.my_rank
            and generation_of(peek(done)) != generation
            and deadline.timeout_ms > 0
        ):
            raise Error(
                "max_ep: ",
                who.phase,
                " on rank ",
                who.my_rank,
                " again, before this rank has waited for what was sent last",
                " (generation ",
                generation,
                "); wait on every rank before sending again.",
            )
        _ = await_generation(done, generation, deadline, waiter)
