# SPDX-License-Identifier: Apache-2.0
"""Who does what in a block of dispatch, and the words by which its warps agree.

The first warp tells and learns how many tokens ranks send. The last
`N_INDEX_WARPS` write entries and counts; the last of these (`n_counting_warps`) then
read the counts of all ranks. Those between send. All but the index warps have turns at
receiving; these take one where parts are not dealt beforehand.
"""

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

comptime DONE_WARP = 7
"""Which tells of earlier reads."""

comptime TOKENS_READY = 0
"""Control word: 1 if the numbers of tokens are there, or `NO_NUMBERS`."""

comptime NO_NUMBERS = UInt32(2)
"""Value of `TOKENS_READY` if they did not come."""

comptime SUMMED = 1
"""Control word: index warps that have the sum of their counts."""

comptime COUNTED = 2
"""Control word: index warps that have the rows of their pairs."""

comptime FAILED = 3
"""Control word: whether a count is missing or the rows do not fit."""

comptime NEXT_RECEIVE = 4
"""Control word: next item to receive."""

comptime GAVE_UP = 5
"""Control word: 1 if an index warp may not write."""

comptime NEXT_SEND = 6
"""Control word: units that sending warps have taken after their first."""

comptime N_CONTROL = NEXT_SEND + 1
"""Control words of a block."""
