# SPDX-License-Identifier: Apache-2.0
"""Checks of a combine of sums: a failed check is recorded and marks the rank as broken.

Checks read what earlier launches have left in the counters. They do not wait.
"""
from ..device.block import Block
from ..failures import Failure, RECEIVE, SEND
from ..flags import next_generation


@always_inline
def _refuse(
    block: Block[...],
    code: Int32,
    phase: Int,
    a: Int = 0,
    b: Int = 0,
    expert_or_row: Int = -1,
) -> Bool:
    """Records why a launch cannot go on, and breaks its rank."""
    block.refuse(code, phase, expert_or_row, a, b)
    block.counters.set_broken()
    return True


@always_inline
def refuse_bad_answer(
    n_tokens: Int, dispatch_generation: UInt32, block: Block[...]
) -> Bool:
    """Returns whether the result cannot be the dispatch's; records why."""
    var n_sent = block.before.n_tokens(dispatch_generation)
    if n_sent != n_tokens:
        return _refuse(block, Failure.BAD_N_TOKENS, RECEIVE, n_tokens, n_sent)
    # Where the own rows are, and their weights, is known of the last dispatch.
    var last = block.before.dispatch_received
    if last != dispatch_generation:
        return _refuse(
            block, Failure.OTHER_ROWS, RECEIVE, Int(dispatch_generation), Int(last)
        )
    # The number of tokens is kept for two dispatches.
    var dispatch_sent = block.before.dispatch_sent
    if dispatch_sent != dispatch_generation and dispatch_sent != (
        next_generation(dispatch_generation)
    ):
        return _refuse(block, Failure.OVERTAKEN, RECEIVE)
    return False


@always_inline
def refuse_no_dispatch(block: Block[...]) -> Bool:
    """Returns whether there is no dispatch to answer; records it."""
    if block.before.dispatch_received != 0:
        return False
    return _refuse(block, Failure.NOTHING_DISPATCHED, SEND)


@always_inline
def refuse_too_few_rows(
    n_rows: Int, n_rows_max: Int, phase: Int, block: Block[...]
) -> Bool:
    """Returns whether rows are fewer than dispatch delivered; records it."""
    if n_rows <= n_rows_max:
        return False
    return _refuse(block, Failure.TOO_MANY_ROWS, phase, n_rows, n_rows_max, 0)
