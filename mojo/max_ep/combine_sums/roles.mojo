# SPDX-License-Identifier: Apache-2.0
"""Control words of a block of `CombineSums`, the roles of its warps, and what dispatch
has recorded of a token. Each warp may send, and then takes part in adding up.
"""
from ..device.schedule import Schedule
from ..protocol.counters import Counters, NO_ROW
from ..protocol.layout import Group

comptime N_WARPS_MIN = 4
"""Fewest warps of a block. The last three have a task of their own first."""
# Counted from the end.
comptime PUBLISHING_WARP = 3
"""The warp that publishes earlier reads."""
comptime ELECTING_WARP = 2
"""The warp that counts the blocks that have begun."""
comptime POLLING_WARP = 1
"""The warp that polls done words."""
comptime NEXT_SUM = 0
"""Control word: next part of a token to add up."""
comptime NEXT_SEND = 1
"""Control word: chunks that sending warps have taken after their first."""
comptime N_CONTROL = 2
comptime SENT_PARTS = N_CONTROL
"""Over several hosts: first control word of those that count the parts of a sum that are
staged."""
comptime N_SPLIT_ROUNDS = 4
"""Sums of a block that are split into parts at most."""


@always_inline
def sum_receive_schedule(warp_idx: Int, n_warps: Int) -> Schedule:
    """Schedules all warps, from the last down; those that do more come last."""
    return Schedule.of_receivers(warp_idx, n_warps, n_warps - N_WARPS_MIN + 1)


@fieldwise_init
struct TokenRecord(TrivialRegisterPassable):
    """The record of a token; lane `k` holds that of choice `k`."""

    var n_tokens: Int32
    """Tokens of its source: if the token is past them, the rest is meaningless."""
    var row: Int32
    """As in `Counters.received_rows`."""
    var weight: Float32
    """Its router weight, if it has a row here."""

    @staticmethod
    @always_inline
    def of[
        group: Group, //
    ](counters: Counters[group], source: Int, token_idx: Int, lane: Int) -> Self:
        var saved = Self(counters.received_tokens()[unsafe_offset=source], NO_ROW, 0)
        if lane < group.top_k and token_idx < group.max_tokens_per_rank:
            var choice = group.choice(token_idx, lane)
            saved.row = counters.received_rows(source)[unsafe_offset=choice]
            comptime if group.is_given():
                saved.weight = 1
            elif not group.late_weights:
                saved.weight = counters.received_weights(source)[unsafe_offset=choice]
        return saved
