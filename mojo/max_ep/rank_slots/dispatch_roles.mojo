# SPDX-License-Identifier: Apache-2.0
"""Who does what in a block of dispatch, and the words by which its warps agree.

The first warp tells and learns how many tokens ranks send. The last
`N_INDEX_WARPS` write entries and counts; the last of these (`n_counting_warps`) then
read the counts of all ranks. Those between send. All but the index warps have turns at
receiving; these take one where parts are not dealt beforehand.
"""
from max.gpu import block_idx, grid_dim

comptime SEND = 0
"""The phase of the sending half, a position in `failures.PHASES`."""

comptime RECEIVE = 1
"""The phase of the receiving half."""

comptime N_INDEX_WARPS = 8
"""Warps of a block that write entries and counts; some then read counts."""

comptime N_WARPS_MIN = N_INDEX_WARPS + 2
"""Warps of a block at least: one sends."""

comptime NUMBERS_WARP = 0
"""Which tells how many tokens this rank sends, and learns it of the others."""

comptime FIRST_SENDER = 1
"""The first of those that send."""

# Warps that also count the blocks that have begun, and tell of earlier reads, or look
# for those of others: if they send at all, they do not begin at once.
comptime COUNTING_WARP = 6
"""Which counts the blocks that have begun."""

comptime TELLING_WARP = 7
"""Which tells of earlier reads."""

comptime INDEXED = 0
"""Control word: index warps that have written their entries."""

comptime TOKENS_READY = 1
"""Control word: 1 if the numbers of tokens are there, or `NO_NUMBERS`."""

comptime NO_NUMBERS = UInt32(2)
"""Value of `TOKENS_READY` if they did not come."""

comptime SUMMED = 2
"""Control word: index warps that have the sum of their counts."""

comptime COUNTED = 3
"""Control word: index warps that have the rows of their pairs."""

comptime FAILED = 4
"""Control word: whether a count is missing or the rows do not fit."""

comptime NEXT_ITEM = 5
"""Control word: next item to receive."""

comptime GAVE_UP = 6
"""Control word: 1 if an index warp may not write."""

comptime NEXT_TURN = 7
"""Control word: units that sending warps have taken after their first."""

comptime N_CONTROL = NEXT_TURN + 1
"""Control words of a block."""


@fieldwise_init
struct ReceiveTurns(TrivialRegisterPassable):
    """Which turns of a block at receiving are a warp's, if there are few items.

    Index warps have none: some of them count.
    """

    var first: Int
    """Its first one; an index warp's is behind all that are dealt."""
    var n_turns: Int
    """From one to the next: warps of a block that have turns."""

    @staticmethod
    @always_inline
    def of(warp_idx: Int, n_warps: Int) -> Self:
        """Deals them from the last sender down, but for those that have more to do.

        The first senders send most.

        Args:
            warp_idx: The warp.
            n_warps: Warps of a block.

        Returns:
            Its turns.
        """
        var n = n_warps - N_INDEX_WARPS
        var turn = min(COUNTING_WARP, n) - 1 - warp_idx
        if turn < 0:
            turn += n
        return Self(turn if warp_idx < n else n, n)

    @always_inline
    def n_dealt(self) -> Int:
        """Counts the items that are few: one for each of those warps.

        Returns:
            Items of the grid.
        """
        return self.n_turns * Int(grid_dim.x)

    @always_inline
    def item(self, turn: Int) -> Int:
        """Finds what is received in a turn of this block.

        Args:
            turn: The turn.

        Returns:
            Which of all parts of all tokens: from the last block on, as the first
            ones send most.
        """
        return turn * Int(grid_dim.x) + Int(grid_dim.x) - 1 - Int(block_idx.x)
