# SPDX-License-Identifier: Apache-2.0
"""Steps that dispatch and combine of CPU ranks share."""
from ..flags import Deadline, FlagPointer, Waiter, await_generation
from ..layout import (
    FLAG_BYTES,
    SOURCE_CHOICE_WORD,
    SOURCE_GENERATION_WORD,
    SOURCE_TOKEN_WORD,
)
from ..token_format import BytePointer


@always_inline
def flag_at(buffer: BytePointer, offset: Int) -> FlagPointer:
    """Points to a flag of a counts buffer.

    Args:
        buffer: Start of the counts buffer.
        offset: From the layout, in bytes.

    Returns:
        The flag.
    """
    return buffer.unsafe_offset(offset).unsafe_bitcast[UInt64]()


@always_inline
def write_source_info(
    message: BytePointer,
    token_bytes: Int,
    token_idx: Int,
    k: Int,
    generation: UInt32,
):
    """Writes the source info behind the token of a message.

    Args:
        message: Start of the message.
        token_bytes: Bytes of its token.
        token_idx: The token's index on its source rank.
        k: Which of the token's choices.
        generation: The generation that writes the message.
    """
    var words = message.unsafe_offset(token_bytes).unsafe_bitcast[Int32]()
    words[unsafe_offset=SOURCE_TOKEN_WORD] = Int32(token_idx)
    words[unsafe_offset=SOURCE_CHOICE_WORD] = Int32(k)
    words[unsafe_offset=SOURCE_GENERATION_WORD] = generation.cast[DType.int32]()


def await_readers[
    n_ranks: Int
](
    my_counts: BytePointer,
    done_offset: Int,
    generation: UInt32,
    deadline: Deadline,
    who: Waiter,
) raises:
    """Waits until every peer has read what this rank sent it last.

    In a program that dispatches and combines in turn this never waits: the
    last combine has already shown that all peers were done (docs/protocol.md).

    Parameters:
        n_ranks: Ranks of the group.

    Args:
        my_counts: This rank's counts buffer, where peers put done words.
        done_offset: Bytes from there to the done words.
        generation: The generation that must have been read.
        deadline: When to give up.
        who: What an error says.

    Raises:
        If a peer is not done in time.
    """
    for reader_rank in range(n_ranks):
        var waiter = who
        waiter.missing_rank = reader_rank
        # I3: no slot is written before its last reader is done with it.
        _ = await_generation(
            flag_at(my_counts, done_offset + reader_rank * FLAG_BYTES),
            generation,
            deadline,
            waiter,
        )
