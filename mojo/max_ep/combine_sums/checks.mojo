# SPDX-License-Identifier: Apache-2.0
"""What a reduced combine refuses: each check notes why, and breaks its rank.

They go by what earlier launches have left in the counters; nobody waits here.
"""
from ..counters import EPLocalSyncCounters
from ..device.block import Block
from ..failures import (
    BAD_N_TOKENS,
    NOTHING_DISPATCHED,
    OTHER_ROWS,
    OVERTAKEN,
    TOO_MANY_ROWS,
)
from ..flags import next_generation
from ..layout import Group
from .roles import RECEIVE, SEND


@always_inline
def is_bad_answer(
    n_tokens: Int,
    dispatch_generation: UInt32,
    block: Block[...],
) -> Bool:
    """Tells whether the result cannot be that of the dispatch; notes why."""
    var generation = next_generation(block.before.combine_received)
    var n_sent = block.before.n_tokens(dispatch_generation)
    if n_sent != n_tokens:
        block.fail(
            BAD_N_TOKENS,
            RECEIVE,
            block.my_rank,
            -1,
            generation,
            0,
            n_tokens,
            n_sent,
        )
        block.counters.set_broken()
        return True
    # Where the own rows are, and their weights, is known of the last dispatch.
    if block.before.dispatch_received != dispatch_generation:
        block.fail(
            OTHER_ROWS,
            RECEIVE,
            block.my_rank,
            -1,
            generation,
            0,
            Int(dispatch_generation),
            Int(block.before.dispatch_received),
        )
        block.counters.set_broken()
        return True
    # The number of tokens is kept for two dispatches.
    var dispatch_sent = block.before.dispatch_sent
    if dispatch_sent != dispatch_generation and dispatch_sent != (
        next_generation(dispatch_generation)
    ):
        block.fail(
            OVERTAKEN,
            RECEIVE,
            block.my_rank,
            -1,
            generation,
            0,
        )
        block.counters.set_broken()
        return True
    return False


@always_inline
def is_nothing_dispatched(block: Block[...]) -> Bool:
    """Tells whether there is no dispatch to answer; notes it."""
    if block.before.dispatch_received != 0:
        return False
    block.fail(
        NOTHING_DISPATCHED,
        SEND,
        block.my_rank,
        -1,
        next_generation(block.before.combine_sent),
        0,
    )
    block.counters.set_broken()
    return True


@always_inline
def rows_delivered[group: Group](counters: EPLocalSyncCounters) -> Int32:
    """Begins to read how many rows dispatch has delivered.

    Of its own accord, so that it is under way with the header.
    """
    comptime n_pairs = group.n_local_experts() * group.n_ranks
    return Int32(counters.pair_row(n_pairs))


@always_inline
def has_too_few_rows(
    n_rows: Int32,
    n_rows_max: Int32,
    phase: Int,
    block: Block[...],
) -> Bool:
    """Tells whether the rows are fewer than dispatch delivered; notes it."""
    if n_rows <= n_rows_max:
        return False
    var last = block.before.combine_sent
    if phase == RECEIVE:
        last = block.before.combine_received
    block.fail(
        TOO_MANY_ROWS,
        phase,
        block.my_rank,
        0,
        next_generation(last),
        0,
        Int(n_rows),
        Int(n_rows_max),
    )
    block.counters.set_broken()
    return True
