# SPDX-License-Identifier: Apache-2.0
"""What warps of a block of reduced combine agree on: phases, control words, how many.

Each warp may send, and then takes part in adding up; the last three also do what a
launch does once (`combine.mojo`).
"""
from ..device.schedule import Schedule

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


@always_inline
def receive_schedule(warp_idx: Int, n_warps: Int) -> Schedule:
    """Schedules all warps, from the last down, without those that do more first.
    """
    return Schedule.of_receivers(warp_idx, n_warps, n_warps - N_WARPS_MIN + 1)
