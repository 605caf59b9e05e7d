# SPDX-License-Identifier: Apache-2.0
"""What warps of a block of reduced combine agree on: phases, control words, how many.

Each warp may send, and then takes part in adding up; the last three also do what a
launch does once (`combine.mojo`).
"""

comptime SEND = 2
"""The phase of the sending half, a position in `failures.PHASES`."""

comptime RECEIVE = 3
"""The phase of the receiving half."""

comptime N_WARPS_MIN = 4
"""Warps of a block at least: the last three also notice, count and tell."""

comptime NEXT_SUM = 0
"""Control word: next part of a token to add up."""

comptime NEXT_SEND = 1
"""Control word: units that sending warps have taken after their first."""

comptime N_CONTROL = 2
"""Control words of a block."""
