# SPDX-License-Identifier: Apache-2.0
"""What warps of a block of reduced combine agree on: phases, control words, how many.

Each warp may send, and then takes part in adding up; the last three also do what a
launch does once (`combine.mojo`).
"""
from max.gpu import block_idx, grid_dim

comptime SEND = 2
"""The phase of the sending half, a position in `failures.PHASES`."""

comptime RECEIVE = 3
"""The phase of the receiving half."""

comptime N_WARPS_MIN = 4
"""Warps of a block at least: the last three also notice, count and tell."""

comptime NEXT_PART = 0
"""Control word: next part of a token to add up."""

comptime NEXT_TURN = 1
"""Control word: units that sending warps have taken after their first."""

comptime N_CONTROL = 2
"""Control words of a block."""


@fieldwise_init
struct FirstTurn(TrivialRegisterPassable):
    """Which turns of a block at adding up few tokens are a warp's."""

    var turn: Int
    """Its first one."""
    var n_turns: Int
    """From one to its next: warps of a block."""

    @staticmethod
    @always_inline
    def of(warp_idx: Int, n_warps: Int) -> Self:
        """Deals them from the last warp down, but for those that have more to do.

        The first warps send before, so they come late, and these last.

        Args:
            warp_idx: The warp.
            n_warps: Warps of a block.

        Returns:
            Its turns.
        """
        var turn = n_warps - N_WARPS_MIN - warp_idx
        return Self(turn + n_warps if turn < 0 else turn, n_warps)

    @always_inline
    def item(self, turn: Int) -> Int:
        """Finds what is added up in a turn of this block.

        Args:
            turn: The turn.

        Returns:
            Which of all parts of all tokens: from the last block on, as the first
            ones send most.
        """
        return turn * Int(grid_dim.x) + Int(grid_dim.x) - 1 - Int(block_idx.x)
