# SPDX-License-Identifier: Apache-2.0
"""How tokens and sums are split into chunks, and which warp takes which: arithmetic on
the numbers of tokens, warps and blocks of a launch.
"""
from max.gpu import WARP_SIZE
from std.math import ceildiv

from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.token_format import TokenFormat
from .warp import divmod_32


def n_steps_of[token_fmt_type: TokenFormat]() -> Int:
    """Counts the steps of a token, of 16 bytes a lane each."""
    return ceildiv(token_fmt_type.value_bytes // MESSAGE_ALIGN, WARP_SIZE)


@always_inline
def vector_of_lane[
    Format: TokenFormat
](step: Int, end: Int, lane: Int) -> Tuple[Int, Bool]:
    """Returns which 16 bytes of values a lane moves in a step; in 32 bits."""
    comptime n_vectors = Format.value_bytes // MESSAGE_ALIGN
    var vector = UInt32(step) * UInt32(WARP_SIZE) + UInt32(lane)
    var is_in_chunk = UInt32(step) < UInt32(end)
    comptime if n_vectors % WARP_SIZE != 0:
        is_in_chunk = is_in_chunk and vector < UInt32(n_vectors)
    return (Int(vector), is_in_chunk)


@fieldwise_init
struct Chunk(TrivialRegisterPassable):
    """A range of the steps of a token or of a sum."""

    var whole: Int
    var idx: Int
    var begin: Int
    var end: Int


@always_inline
def chunk_of[n_steps: Int](whole: Int, idx: Int, n_chunks: Int) -> Chunk:
    """Finds the steps of one of `n_chunks` chunks of the same size, or almost."""
    return Chunk(
        whole,
        idx,
        divmod_32(idx * n_steps, n_chunks)[0],
        divmod_32((idx + 1) * n_steps, n_chunks)[0],
    )


@fieldwise_init
struct Split[n_steps: Int, more: Int, fewer: Int](TrivialRegisterPassable):
    """Into how many chunks a token or a sum is split: one of two constants.

    Division by a constant is fast. If tokens are few, a warp takes only one chunk, and
    cannot start before this division is done.
    """

    comptime _MORE = min(Self.more, Self.n_steps)
    comptime _FEWER = min(Self.fewer, Self.n_steps)

    comptime most_steps = ceildiv(Self.n_steps, Self._FEWER)

    var are_more: Bool

    @always_inline
    def n_chunks(self) -> Int:
        return Self._MORE if self.are_more else Self._FEWER

    @always_inline
    def chunk(self, number: Int) -> Chunk:
        """Finds a chunk by its number among those of all tokens or sums."""
        var found = Self._chunk[Self._MORE](number)
        comptime if Self._FEWER != Self._MORE:
            if not self.are_more:
                found = Self._chunk[Self._FEWER](number)
        return found

    @staticmethod
    @always_inline
    def _chunk[n_chunks: Int](number: Int) -> Chunk:
        var whole, idx = divmod_32(number, n_chunks)
        comptime if n_chunks == Self.n_steps:
            return Chunk(whole, idx, idx, idx + 1)
        return chunk_of[Self.n_steps](whole, idx, n_chunks)


comptime InlineSplit[n_steps: Int] = Split[n_steps, 14, 7]
"""How inline tokens are split. Sender and receiver may split them differently."""


@always_inline
def inline_split[n_steps: Int](n_tokens: Int) -> InlineSplit[n_steps]:
    return InlineSplit[n_steps](n_tokens <= 64)


@fieldwise_init
struct Schedule(TrivialRegisterPassable):
    """Which items a warp takes, if they are few and scheduled statically.

    In each round a block takes one item, with one warp. The first blocks and the first
    warps send most, so they come last when items to receive, or to add up, are assigned.
    """

    var first: Int
    """The warp's first round; for a warp without rounds, one past all items."""
    var stride: Int
    """From one of its rounds to the next: the warps of a block that have rounds."""

    @staticmethod
    @always_inline
    def of_receivers(warp_idx: Int, n_receivers: Int, n_first: Int) -> Self:
        """Schedules the receivers of a block: the first `n_first` warps begin, from
        the last of them down. Warps behind `n_receivers` have no round.
        """
        var round = min(n_first, n_receivers) - 1 - warp_idx
        if round < 0:
            round += n_receivers
        return Self(round if warp_idx < n_receivers else n_receivers, n_receivers)

    @staticmethod
    @always_inline
    def item(round: Int, block: Int, n_blocks: Int) -> Int:
        return round * n_blocks + n_blocks - 1 - block
