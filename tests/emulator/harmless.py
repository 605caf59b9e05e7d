# SPDX-License-Identifier: Apache-2.0
"""Mutations of GPU kernels that change nothing that matters, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .mutations import NOT_COMPARED, NOT_STORED, OFF_BY_ONE, TOO_FAR, Mutation, line_of


@dataclass(frozen=True)
class Harmless:
    """What may become of a line, in any of its callers."""

    kinds: str  # An expression for the kinds of mutation
    file: str
    line: str  # Its text
    why: str
    caller: str = ""
    """A file or a line that the line is called from, if it is harmless only there."""

    def has(self, mutation: Mutation) -> bool:
        return (
            bool(re.fullmatch(self.kinds, mutation.kind))
            and any(
                x.startswith(f"{self.file}:") and line_of(x) == self.line
                for x in mutation.place
            )
            and any(
                x.startswith(self.caller) or line_of(x) == self.caller
                for x in mutation.place
            )
        )


_RELAXED = "relaxed instead of acquire"

_TWO_WAYS = "Both ways are right: which is faster, depends on the number of tokens."

HARMLESS = [
    # Superfluous orders: a word is acquired twice, by two lines of the same lane.
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
        f"wanted: generation before, upper half|{NOT_COMPARED}: never",
        "dispatch_by_rank/receive.mojo",
        "and expert < Self.group.n_experts",
        "An entry of nobody has no position, either, which the next line asks.",
    ),
    # What a poll that gives up loses is time.
    Harmless(
        f"not waited for|{OFF_BY_ONE}",
        "device/done_words.mojo",
        "for _ in range(_DONE_POLLS):",
        "The next launch waits for what was not polled often enough.",
    ),
    Harmless(
        f"{_RELAXED}|scope gpu instead of sys|{TOO_FAR}",
        "device/done_words.mojo",
        "var word = load_acquire_sys(",
        "In the emulator's launches another warp acquires the same word. That it is"
        " needed shows the model: `poll_done_words` in `lifecycle_by_rank.py`.",
    ),
    Harmless(
        f"{NOT_STORED}|{NOT_COMPARED}: always",
        "device/done_words.mojo",
        "block.counters.set_generation(_drained(is_combine), generation)",
        "The next launch waits for what the poll has not recorded.",
    ),
    Harmless(
        f"{NOT_COMPARED}: always",
        "device/done_words.mojo",
        "if not is_not_before(",
        "The next launch waits for what the poll has not recorded.",
    ),
    Harmless(
        OFF_BY_ONE,
        "device/done_words.mojo",
        "if block.before.generation[_drained(is_combine)]() == generation:",
        "The launch waits for what the poll has recorded.",
    ),
    Harmless(
        OFF_BY_ONE,
        "device/block.mojo",
        "if n_polls % POLLS_PER_CLOCK_READ != 0:",
        "The clock is read as often, after another poll.",
    ),
    Harmless(
        OFF_BY_ONE,
        "device/block.mojo",
        "return self.deadline.has_passed()",
        "A wait ends a nanosecond earlier.",
    ),
    Harmless(
        OFF_BY_ONE,
        "combine_rows/send.mojo",
        "for first in range(part.begin, part.end, in_flight):",
        "Of a further round no step is there: it neither loads nor stores.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/row_offsets.mojo",
        "if indexer != 0:",
        "Another warp that has the same numbers writes them.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/token_counts.mojo",
        "if block_idx.x == 0:",
        "Another block, which has counted the same, writes it.",
    ),
    Harmless(
        OFF_BY_ONE,
        "row_limit/kept_rows.mojo",
        "if rows_below(middle) <= n_rows_max:",
        "If all places are taken, the level below and one row more a pair is the same.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/row_offsets.mojo",
        "if self.rows_before(Self.n_pairs) - n_before <= n_rows_max:",
        "If all rows just fit, the level is above all pairs, and none is dropped.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/row_offsets.mojo",
        "for first in range(0, Self.n_pairs, WARP_SIZE):",
        "Of a further round no pair is there.",
    ),
    Harmless(
        f"{NOT_STORED}|{TOO_FAR}",
        "protocol/row_tables.mojo",
        "self.row_offsets[unsafe_offset=idx] = UInt32(first_row)",
        "`write_ends` has written the same before; the next place becomes 0, too.",
        "self.dispatched.tables.write_no_rows(lane, WARP_SIZE)",
    ),
    # Two ways, each of which is right.
    *(
        Harmless(OFF_BY_ONE, "combine_sums/kernel.mojo", line, _TWO_WAYS)
        for line in (
            "if (most <= FEW_TOKENS) == are_few:",
            "if (n_tokens <= FEW_TOKENS) == are_few:",
            "var are_some = FEW_TOKENS < n and n <= SOME_TOKENS",
        )
    ),
    *(
        Harmless(OFF_BY_ONE, file, line, _TWO_WAYS)
        for file, line in (
            (
                "combine_rows/kernel.mojo",
                "var most = 4 if in_32_bits(self.combined.n_tokens) > 256 else 8",
            ),
            ("combine_rows/kernel.mojo", "if block.warp_idx < n_senders:"),
            (
                "combine_rows/send.mojo",
                "var split = RowSplit(n_items <= N_SPLIT_ROUNDS * n_blocks)",
            ),
            (
                "combine_rows/reduce.mojo",
                "and 2 * n_tokens * n_chunks <= chunks_of_warp * n_warps"
                " * Int(grid_dim.x)",
            ),
            (
                "dispatch_by_rank/choices.mojo",
                "return n_held[Self.group](self.n_tokens) <= n",
            ),
            (
                "dispatch_by_rank/kernel.mojo",
                "n_tokens <= Self.group.n_inline_tokens(), Self.n_warps",
            ),
            (
                "dispatch_by_expert/send.mojo",
                "while n < top_k and n_tokens * n < 2 * n_blocks:",
            ),
        )
    ),
    Harmless(
        OFF_BY_ONE,
        "combine_rows/reduce.mojo",
        "n_chunks < n_steps",
        "If it is too large, it is reduced behind the loop.",
    ),
    Harmless(
        OFF_BY_ONE,
        "combine_rows/reduce.mojo",
        "min((chunk + 1) * n_steps // n_chunks * WARP_SIZE, n_vectors),",
        "It compares how the compiler divides: in 64 or 32 bits, and below 0.",
    ),
    Harmless(
        OFF_BY_ONE,
        "combine_sums/kernel.mojo",
        "block.warp_idx >= n_senders,",
        "The warp loads again what it has loaded early.",
    ),
    # Another thread, warp or block does it.
    Harmless(
        OFF_BY_ONE,
        "device/block.mojo",
        "elif warp_idx == 1:",
        "Any warp but the first may clear the control words.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_expert/receive.mojo",
        "if not is_missing and lane == 0:",
        "Any lane may record that there are too many rows.",
    ),
    Harmless(
        OFF_BY_ONE,
        "device/shared.mojo",
        "if thread_idx.x == i:",
        "Any thread may copy an address.",
    ),
    Harmless(
        OFF_BY_ONE,
        "device/done_words.mojo",
        "if block_idx.x == 0 and block.warp_idx == warp_idx:",
        "Any block or warp may publish, and poll.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/receive.mojo",
        "if chunk.idx == 0 and not self._record(",
        "Any chunk of a token may record it. Where there is one, nothing is compared.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/receive.mojo",
        "for first in range(chunk.begin, chunk.end, in_flight):",
        "All steps of a chunk are in flight at once, but for tokens of more than 14 KB,"
        " which no group of the emulator has.",
    ),
    # A round more finds nothing.
    Harmless(
        OFF_BY_ONE,
        "combine_sums/send.mojo",
        "if number >= n_sums * split.n_chunks():",
        "No source has such a token, which the next guard asks.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/receive.mojo",
        "if item >= n_items:",
        "No source has such a token, which the next guard asks.",
    ),
    Harmless(
        OFF_BY_ONE,
        "dispatch_by_rank/send.mojo",
        "if lane < group.top_k and id >= 0 and id < Int32(group.n_experts):",
        "A rank gets a token that has no row there.",
    ),
    *(
        Harmless(OFF_BY_ONE, file, line, "The next guard finds nothing there.")
        for file, line in (
            ("combine_rows/send.mojo", "if item >= n_items:"),
            ("dispatch_by_expert/receive.mojo", "if item >= n_items:"),
            (
                "dispatch_by_expert/send.mojo",
                "for first in range(begin, end, WARP_SIZE * in_flight):",
            ),
        )
    ),
    # It is there before, or again.
    Harmless(
        f"{NOT_COMPARED}: never",
        "dispatch_by_expert/receive.mojo",
        "if pair < end and generation_of(words[i]) != self.block.receiving():",
        "A count that has come is loaded again. Nobody changes it meanwhile.",
    ),
    Harmless(
        NOT_STORED,
        "protocol/row_tables.mojo",
        "self.expert_ids[unsafe_offset=idx] = Int32(idx)",
        "The same warp has laid out the rows that do not fit, and so written the ids.",
        "self.dispatched.tables.write_no_rows(lane, WARP_SIZE)",
    ),
    Harmless(
        TOO_FAR,
        "combine_rows/reduce.mojo",
        "return is_fatal(block.counters.at(Word.FAILURE)[])",
        "It reads the phase. That of combine is more than 1, too, that of a dispatch"
        " which has dropped ids is not; and a fatal one broke the rank.",
    ),
    # What is loaded is a guess.
    Harmless(
        TOO_FAR,
        "protocol/flags.mojo",
        "var old = Record.load[ordering=Ordering.RELAXED](word)",
        "The exchange compares with what is there.",
    ),
]
