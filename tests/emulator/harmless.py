# SPDX-License-Identifier: Apache-2.0
"""Mutations of GPU kernels that change nothing that matters, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .mutations import Mutation, line_of


@dataclass(frozen=True)
class Harmless:
    """What may become of a line, in any of its callers."""

    kinds: str  # An expression for the kinds of mutation
    file: str
    line: str  # Its text
    why: str
    caller: str = ""
    """A file that the line is called from, if it is harmless only there."""

    def has(self, mutation: Mutation) -> bool:
        return (
            bool(re.fullmatch(self.kinds, mutation.kind))
            and any(
                x.startswith(f"{self.file}:") and line_of(x) == self.line
                for x in mutation.place
            )
            and any(x.startswith(self.caller) for x in mutation.place)
        )


_RELAXED = "relaxed instead of acquire"

HARMLESS = [
    # Superfluous orders: a word is acquired twice, by two lines of the same lane.
    Harmless(
        _RELAXED,
        "dispatch_by_expert/receive.mojo",
        "self.block.await_word(PAIRS_READY, 1)",
        "The next line acquires the same word.",
    ),
    Harmless(
        _RELAXED,
        "dispatch_by_expert/receive.mojo",
        "if load_acquire_block(self.block.word(PAIRS_READY)) == _FAILED:",
        "The line before has acquired the same word.",
    ),
    Harmless(
        _RELAXED,
        "dispatch_by_rank/token_counts.mojo",
        "self.block.await_word(TOKENS_READY, 1)",
        "The line after the next acquires the same word.",
    ),
    Harmless(
        _RELAXED,
        "dispatch_by_rank/token_counts.mojo",
        "return load_acquire_block(self.block.word(TOKENS_READY)) != NO_NUMBERS",
        "Each lane has acquired the same word two lines before.",
    ),
    Harmless(
        _RELAXED,
        "dispatch_by_rank/row_offsets.mojo",
        "return load_acquire_block(self.block.word(FAILED)) == 0",
        "Whoever stores it arrives at `SCANNED` later, which the line before acquires.",
    ),
    Harmless(
        "relaxed instead of release",
        "dispatch_by_rank/row_offsets.mojo",
        "store_release_block(failed, 1)",
        "The same lane arrives at `SCANNED` or `SUMMED` later, which releases it, too.",
    ),
    Harmless(
        "relaxed instead of release",
        "dispatch_by_rank/index_large.mojo",
        "store_release_block(block.word(GAVE_UP), 1)",
        "The barrier of the next lines orders it, too.",
    ),
    Harmless(
        f"{_RELAXED}|scope gpu instead of sys",
        "row_limit/kept_counts.mojo",
        "var word = block.await_message(",
        "A kept count announces no other data: rows and sums have flags of their own.",
    ),
    # A superfluous guard.
    Harmless(
        "wanted: generation before, upper half",
        "dispatch_by_rank/receive.mojo",
        "and expert < Self.group.n_experts",
        "An entry of nobody has no position, either, which the next line asks.",
    ),
    Harmless(
        "not waited for",
        "device/done_words.mojo",
        "if block.give_up_if_late(n_polls, rank):",
        "It is taken after `POLLS_PER_CLOCK_READ` polls, which combine of rows does not"
        " need here. For other callers it is noticed.",
        "combine_rows/",
    ),
    # What a poll that gives up loses is time.
    Harmless(
        "not waited for",
        "device/done_words.mojo",
        "for _ in range(_DONE_POLLS):",
        "The next launch waits for what was not polled often enough.",
    ),
    Harmless(
        f"{_RELAXED}|scope gpu instead of sys",
        "device/done_words.mojo",
        "var word = load_acquire_sys(",
        "In the emulator's launches another warp acquires the same word. That it is"
        " needed shows the model: `poll_done_words` in `lifecycle_by_rank.py`.",
    ),
]
