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

_TWO_WAYS = "Both ways are right: which is faster, depends on the number of tokens."

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
        f"wanted: generation before, upper half|{NOT_COMPARED}: never",
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
    # Two ways, each of which is right.
    *(
        Harmless(OFF_BY_ONE, "combine_sums/kernel.mojo", line, _TWO_WAYS)
        for line in (
            "if (most <= FEW_TOKENS) == are_few:",
            "if (n_tokens <= FEW_TOKENS) == are_few:",
            "var are_some = FEW_TOKENS < n and n <= SOME_TOKENS",
        )
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
    # A round more finds nothing.
    Harmless(
        OFF_BY_ONE,
        "combine_sums/send.mojo",
        "if number >= most * n_others * split.n_chunks():",
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
    # What is loaded is a guess.
    Harmless(
        TOO_FAR,
        "protocol/flags.mojo",
        "var old = Record.load[ordering=Ordering.RELAXED](word)",
        "The exchange compares with what is there.",
    ),
]

_OPEN = [
    (
        OFF_BY_ONE,
        "device/block.mojo",
        [
            "elif warp_idx == 1:",
            "for i in range(lane, n_control, WARP_SIZE):",
            "return self.deadline.has_passed()",
        ],
    ),
    (
        f"{NOT_STORED}|{TOO_FAR}",
        "device/block.mojo",
        [
            "item = fetch_add_gpu(",
            "self.counters.taken(what, next)[] = 0",
            "var round = fetch_add_block(self.word(counter), 1)",
        ],
    ),
    (TOO_FAR, "device/block.mojo", ["round = fetch_add_block(self.word(counter), 1)"]),
    (NOT_STORED, "device/block.mojo", ["self.counters.set_generation("]),
    (
        OFF_BY_ONE,
        "device/schedule.mojo",
        ["is_in_chunk = is_in_chunk and vector < UInt32(n_vectors)"],
    ),
    (
        OFF_BY_ONE,
        "dispatch_by_rank/choices.mojo",
        [
            "n_held[Self.group](self.n_tokens) <= N_SHARED_CHOICES",
            "return n_held[Self.group](self.n_tokens) <= N_LANE_CHOICES",
        ],
    ),
    (
        TOO_FAR,
        "dispatch_by_rank/choices.mojo",
        [
            "return self.shared_ids[unsafe_offset=choice]",
            "var bits = self.shared_weights[unsafe_offset=choice]",
            "var id = self.shared_ids[unsafe_offset=choice]",
            "weights[i] = self.weights[unsafe_offset=min(me + i * num_threads, last)]",
        ],
    ),
    (
        f"{NOT_STORED}|{TOO_FAR}",
        "dispatch_by_rank/choices.mojo",
        [
            "self.shared_ids[unsafe_offset=choice] = ids[i]",
            "self.shared_weights[unsafe_offset=choice] = bits",
        ],
    ),
    (
        OFF_BY_ONE,
        "dispatch_by_rank/index_small.mojo",
        [
            "for first in range(lane * _IDS_AT_ONCE, whole, WARP_SIZE * _IDS_AT_ONCE):",
            "for number in range(",
            "if choice_idx >= 0:",
            "if number >= group.n_experts:",
            "return found == id",
        ],
    ),
    (TOO_FAR, "dispatch_by_rank/index_small.mojo", ["if is_equal(some[i]):"]),
    (
        f"{OFF_BY_ONE}|{TOO_FAR}",
        "dispatch_by_rank/index_small.mojo",
        ["if whole + lane < end and is_equal(ids[unsafe_offset=whole + lane]):"],
    ),
    (
        OFF_BY_ONE,
        "dispatch_by_rank/kernel.mojo",
        ["n_tokens <= Self.group.n_inline_tokens(), Self.n_warps"],
    ),
    (
        NOT_STORED,
        "dispatch_by_rank/kernel.mojo",
        ["self.dispatched.tables.write_no_rows(me, n_threads)"],
    ),
    (
        f"{NOT_STORED}|{TOO_FAR}",
        "dispatch_by_rank/publish.mojo",
        [") if has_place else NO_EXPERT"],
    ),
    (
        OFF_BY_ONE,
        "dispatch_by_rank/receive.mojo",
        [
            "for first in range(chunk.begin, chunk.end, in_flight):",
            "if chunk.idx == 0 and not self._record(",
        ],
    ),
    (
        OFF_BY_ONE,
        "dispatch_by_rank/row_offsets.mojo",
        [
            "for first in range(begin, end, _PAIRS_AT_ONCE):",
            "for pair in range(first, Self.n_pairs, N_INDEX_WARPS * WARP_SIZE):",
        ],
    ),
    (
        f"{NOT_STORED}|{TOO_FAR}",
        "dispatch_by_rank/row_offsets.mojo",
        [
            "self.pair_rows[unsafe_offset=Self.n_pairs] = n_rows",
            "self.sums[unsafe_offset=scanner] = 0",
        ],
    ),
    (
        f"{OFF_BY_ONE}|{TOO_FAR}",
        "dispatch_by_rank/token_counts.mojo",
        ["return load_acquire_block(self.block.word(TOKENS_READY)) != NO_NUMBERS"],
    ),
    (
        f"{NOT_COMPARED}: .*",
        "protocol/failures.mojo",
        ["if not fetch_max(record, code):"],
    ),
    (
        f"{NOT_STORED}|{TOO_FAR}",
        "protocol/failures.mojo",
        ["record[unsafe_offset=5] = generation_of(found).cast[DType.int32]()"],
    ),
]
OPEN = [
    Harmless(kinds, file, line, "") for kinds, file, lines in _OPEN for line in lines
]
"""What no check has noticed yet that it was tried with, and nobody has explained. It is
not tried: each entry is to become a check, or to get a reason."""
