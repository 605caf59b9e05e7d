# SPDX-License-Identifier: Apache-2.0
"""How dispatch shares tokens out: into which parts, to which warps, how many at once.
And how halves that overlap share the multiprocessors.

Nothing here touches memory: these are numbers of a launch, by its tokens and warps.
"""
from max.gpu import WARP_SIZE
from std.math import ceildiv

from ..layout import MESSAGE_ALIGN, N_CHUNKS
from ..token_format import TokenFormat
from .warp import divmod_32


@always_inline
def n_steps_of[token_fmt_type: TokenFormat]() -> Int:
    """Counts the steps of a token, of 16 bytes a lane each."""
    return ceildiv(token_fmt_type.value_bytes // MESSAGE_ALIGN, WARP_SIZE)


@always_inline
def vector_of_lane[
    n_vectors: Int
](step: Int, end: Int, lane: Int) -> Tuple[Int, Bool]:
    """Says which 16 bytes of a token are a lane's in a step of a warp.

    In 32 bits, which is quicker.
    """
    var vector = UInt32(step) * UInt32(WARP_SIZE) + UInt32(lane)
    var is_in_chunk = UInt32(step) < UInt32(end)
    comptime if n_vectors % WARP_SIZE != 0:
        is_in_chunk = is_in_chunk and vector < UInt32(n_vectors)
    return (Int(vector), is_in_chunk)


@fieldwise_init
struct Chunk(TrivialRegisterPassable):
    """A part of something that is cut into parts."""

    var whole: Int
    """Which whole it is of."""
    var part: Int
    """Which of its parts."""
    var begin: Int
    """Its first step."""
    var end: Int
    """Behind its last step."""


@fieldwise_init
struct Split[n_steps: Int, more: Int, fewer: Int](TrivialRegisterPassable):
    """Into how many chunks a token or a sum is split: one of two constants.

    Division by a constant is quick. If tokens are few, a warp takes one chunk in all,
    and waits for the result of this division.

    Parameters:
        n_steps: Steps of a token, of 16 bytes a lane each.
        more: The larger number, if the token has so many steps.
        fewer: The smaller number, if the token has so many steps.
    """

    comptime _MORE = min(Self.more, Self.n_steps)
    comptime _FEWER = min(Self.fewer, Self.n_steps)

    comptime most_steps = ceildiv(Self.n_steps, Self._FEWER)
    """Steps of the largest chunk."""

    var are_more: Bool
    """Whether it is the first of the two."""

    @always_inline
    def n_chunks(self) -> Int:
        """Counts the parts."""
        return Self._MORE if self.are_more else Self._FEWER

    @always_inline
    def chunk(self, number: Int) -> Chunk:
        """Finds one of all parts."""
        var found = Self._piece[Self._MORE](number)
        comptime if Self._FEWER != Self._MORE:
            if not self.are_more:
                found = Self._piece[Self._FEWER](number)
        return found

    @staticmethod
    @always_inline
    def _piece[n_chunks: Int](number: Int) -> Chunk:
        var whole, part = divmod_32(number, n_chunks)
        comptime if n_chunks == Self.n_steps:
            return Chunk(whole, part, part, part + 1)
        return Chunk(
            whole,
            part,
            divmod_32(part * Self.n_steps, n_chunks)[0],
            divmod_32((part + 1) * Self.n_steps, n_chunks)[0],
        )


comptime InlineSplit[n_steps: Int] = Split[n_steps, 14, 7]
"""How inline tokens are split. Sender and receiver may split them differently.

Parameters:
    n_steps: Steps of a token, of 16 bytes a lane each.
"""

comptime FlaggedSplit[n_steps: Int] = Split[n_steps, N_CHUNKS, N_CHUNKS]
"""How tokens are split whose chunks have flags.

Parameters:
    n_steps: Steps of a token, of 16 bytes a lane each.
"""


@always_inline
def inline_split[n_steps: Int](n_tokens: Int) -> InlineSplit[n_steps]:
    """Chooses into how many chunks an inline token is split."""
    return InlineSplit[n_steps](n_tokens <= 64)


@fieldwise_init
struct Schedule(TrivialRegisterPassable):
    """Which rounds of a block are a warp's, if few items are scheduled statically.

    The first blocks and the first warps send most, so they come last: to receive, or
    to add up.
    """

    var first: Int
    """Its first round; of a warp that has none, a round behind all items."""
    var stride: Int
    """Rounds from one to the next: warps of a block that have a round."""

    @staticmethod
    @always_inline
    def of_receivers(warp_idx: Int, n_receivers: Int, n_first: Int) -> Self:
        """Schedules the receivers of a block: the first `n_first` warps begin, from
        the last of them down. Warps behind `n_receivers` have no round.
        """
        var round = min(n_first, n_receivers) - 1 - warp_idx
        if round < 0:
            round += n_receivers
        return Self(
            round if warp_idx < n_receivers else n_receivers, n_receivers
        )

    @always_inline
    def n_scheduled(self, n_blocks: Int) -> Int:
        """Counts the items that are few: one for each of those warps."""
        return self.stride * n_blocks

    @staticmethod
    @always_inline
    def item(round: Int, block: Int, n_blocks: Int) -> Int:
        """Finds what is done in a turn of a block."""
        return round * n_blocks + n_blocks - 1 - block
