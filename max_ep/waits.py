# SPDX-License-Identifier: Apache-2.0
"""Reads from a rank's memory whom it waits for, while a launch hangs.

No rank takes part: flags in the regions show what has arrived, and the counters of a
CPU rank say which phase runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from .limits import SOURCE_INFO_BYTES

if TYPE_CHECKING:
    from .config import EPConfig

PHASES = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
N_HEADER_WORDS = 32
_LINE = 80


@dataclass(frozen=True)
class Facts:
    """What a reader of a rank's memory must know about its group."""

    n_ranks: int
    n_experts: int
    n_local_experts: int
    dispatch_counts_offset: int
    combine_counts_offset: int
    generations_word: int
    launch_word: int
    protocol: int
    max_tokens_per_rank: int
    top_k: int
    combine_msg_bytes: int
    combine_recv_offset: int
    n_tokens_word: int
    combine_of_word: int
    choices_word: int
    masked_word: int

    @classmethod
    def of(cls, config: EPConfig) -> Facts:
        """Takes them from a configuration; Mojo knows where words are."""
        own = "n_ranks", "n_experts", "max_tokens_per_rank", "top_k"
        known = vars(config.sizes()) | {name: getattr(config, name) for name in own}
        return cls(**{field.name: known[field.name] for field in fields(cls)})


@dataclass
class RankWait:
    """What a rank does, and whom it waits for."""

    rank: int
    phase: str = ""
    """One of ``PHASES``: what runs, or what ran last; "": nothing has run."""
    generation: int = 0
    is_running: bool = False
    since_s: float | None = None
    """How long it has been running, or has been over."""
    missing: list[int] = field(default_factory=list)
    """Ranks whose data, or word that they have read, has not come."""
    process: str = ""
    """What is wrong with its process."""
    pid: int = 0
    """Pid of its process; 0: nobody knows."""

    def text(self) -> str:
        """Says what the rank does, as a part of a sentence."""
        if not self.phase:
            did = "it has begun no EP launch"
        elif self.is_running:
            did = f"it is in {self.phase} {self.generation} and waits for nobody"
        else:
            did = f"it is in no EP launch since {self.phase} {self.generation}"
            if self.since_s is not None:
                did += f", {_seconds(self.since_s)} ago"
        return did + (f"; {self.process}" if self.process else "")


@dataclass
class Waits:
    """What all ranks of a group do; ``str`` makes a table."""

    group: str
    ranks: list[RankWait]

    def culprits(self) -> list[int]:
        """Returns the ranks that others wait for, and that wait for nobody."""
        waiting = {wait.rank for wait in self.ranks if wait.missing}
        return sorted({m for wait in self.ranks for m in wait.missing} - waiting)

    def sentence(self) -> str:
        """Names the ranks that most likely keep the others."""
        waiting = [wait.rank for wait in self.ranks if wait.missing]
        culprits = self.culprits()
        if not waiting:
            return "No rank waits for another."
        if not culprits:
            return (
                f"Ranks {_listed(waiting)} wait for each other: they do not run the "
                "same EP ops in the same order, or GPU ranks have not begun combine."
            )
        texts = {wait.rank: wait.text() for wait in self.ranks}
        text = texts.get(culprits[0], "its memory cannot be read from here")
        also = f" (and {_listed(culprits[1:])} too)" if culprits[1:] else ""
        return f"Rank {culprits[0]} keeps others waiting{also}: {text}."

    def __str__(self) -> str:
        head = f"{'rank':>4}  {'phase':<20}{'generation':>10}{'for':>10}  waits for"
        lines = [f"group {self.group}", head]
        for wait in self.ranks:
            phase = wait.phase or "-"
            if wait.phase and not wait.is_running:
                phase = f"after {phase}"
            since = "" if wait.since_s is None else _seconds(wait.since_s)
            why = _listed(wait.missing) if wait.missing else "-"
            if wait.process:
                why += f" ({wait.process})"
            line = f"{wait.rank:>4}  {phase:<20}{wait.generation:>10}{since:>10}  {why}"
            lines.append(line if len(line) <= _LINE else line[: _LINE - 3] + "...")
        return "\n".join([*lines, textwrap.fill(self.sentence(), _LINE)])


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds / 60:.0f} min"


def _listed(ranks: Sequence[int]) -> str:
    """Lists numbers in order, with a dash for three or more in a row."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )


# ------------------------------------------------------------- the words of a rank


@dataclass
class Words:
    """The memory of a rank, from two functions that copy ``(at, n_bytes)``."""

    read_counters: Callable[[int, int], bytes]
    read_region: Callable[[int, int], bytes]

    def counters(self, first: int, n: int) -> np.ndarray:
        """Reads words of the counters, int32."""
        return np.frombuffer(self.read_counters(4 * first, 4 * n), np.int32)

    def flags(self, offset: int, n: int) -> np.ndarray:
        """Reads flags of the region."""
        return np.frombuffer(self.read_region(offset, 8 * n), np.uint64)


def cpu_wait(facts: Facts, rank: int, words: Words, now_ns: int) -> RankWait:
    """Reads what a CPU rank does, at a time of the monotonic clock."""
    header = words.counters(0, N_HEADER_WORDS)
    launch = int(header[facts.launch_word])
    if launch == 0:
        return RankWait(rank)
    number = abs(launch) - 1
    last = int(header[facts.generations_word + number].view(np.uint32))
    since_ns = int(header[facts.launch_word + 2 :][:2].copy().view(np.int64)[0])
    is_running = launch > 0
    # A CPU rank advances its generation at the end of a phase.
    generation = next_generation(last) if is_running else last
    wait = RankWait(rank, PHASES[number], generation, is_running)
    wait.since_s = max(0, now_ns - since_ns) / 1e9
    if is_running:
        wait.missing = missing_ranks(facts, rank, wait.phase, last, words)
        if facts.protocol & MASKS:
            is_masked = words.counters(facts.masked_word, facts.n_ranks) != 0
            wait.missing = [r for r in wait.missing if not is_masked[r]]
    return wait


def next_generation(last: int) -> int:
    """Returns the generation after one, as ``next_generation`` of ``flags.mojo``."""
    return last + 1 if last != 2**32 - 1 else 2


def missing_ranks(
    facts: Facts, rank: int, phase: str, last: int, words: Words
) -> list[int]:
    """Returns whose flags have not come that a phase of a CPU rank awaits after
    generation ``last``. They stand as in ``layout.mojo``."""
    n, n_local = facts.n_ranks, facts.n_local_experts
    n_counts, offset = n_local * n, facts.dispatch_counts_offset
    if phase.startswith("combine"):
        n_counts, offset = facts.n_experts, facts.combine_counts_offset
    flags = words.flags(offset, n_counts + n) >> np.uint64(32)
    counts, done = flags[:n_counts], flags[n_counts:]
    n_mine = _experts_of(facts, rank)
    if phase == "dispatch_async":  # of ranks with experts
        readers = range(-(-facts.n_experts // n_local))
        return [r for r in readers if done[r] != last]
    if phase == "combine_async":  # of all; a rank without experts sends nothing
        return [r for r in range(n) if n_mine and done[r] != last]
    has_come = counts == next_generation(last)
    if phase == "dispatch_wait":
        come = has_come.reshape(n_local, n)[:n_mine].all(axis=0)
        return [r for r in range(n) if not come[r]]
    return sorted({e // n_local for e in np.flatnonzero(~has_come).tolist()})


# --------------------------------------------------------------------- on a GPU


BY_EXPERT, SUMS, TO_ALL, MASKS = 1, 3, 5, 8  # as `Group.protocol` of layout.mojo


def gpu_wait(facts: Facts, rank: int, words: Words) -> RankWait:
    """Reads what a GPU rank does, from what its kernels leave in any case.

    They store no time, and none for this. ``is_running``: something is missing that
    the rank's last launch, or its next, waits for.
    """

    def wait(phase: str, generation: int, missing: Sequence[int] = ()) -> RankWait:
        is_running = bool(missing)
        return RankWait(rank, phase, generation, is_running, missing=list(missing))

    header = words.counters(0, N_HEADER_WORDS)
    generations = header[facts.generations_word :][:4].view(np.uint32).tolist()
    sent, received, combine_sent, combine_received = generations
    n, n_local = facts.n_ranks, facts.n_local_experts
    protocol = facts.protocol & ~MASKS
    is_by_rank = protocol != BY_EXPERT
    n_pairs, n_mine = n_local * n, _experts_of(facts, rank)
    flags = words.flags(facts.dispatch_counts_offset, n_pairs + (1 + is_by_rank) * n)
    flags = flags >> np.uint64(32)
    read, counts = flags[n_pairs:][:n], flags[:n_pairs].reshape(n_local, n)[:n_mine]
    if is_by_rank:  # numbers of tokens go to every rank
        counts = np.vstack([counts, flags[n_pairs + n :]])
    else:  # the generation advances when a launch ends
        sent = max([sent, *counts[:, rank].tolist()])
    if sent == 0:
        return RankWait(rank)
    missing = np.flatnonzero((counts != sent).any(axis=0)).tolist()
    if rank in missing:
        return wait("dispatch_async", sent, _late(read, sent - 1))
    if missing:
        return wait("dispatch_wait", sent, missing)
    is_combined = header[facts.combine_of_word].view(np.uint32) == received
    if protocol in (SUMS, TO_ALL):
        if not is_combined:
            return wait("dispatch_wait", sent)
        # A combine begins by publishing that its rank has read the dispatch.
        late = [r for r in _late(read, received) if r != rank]
        return wait("combine_wait", combine_sent, late)
    if is_combined:
        return wait("combine_wait", combine_received)
    awaited = next_generation(combine_received)
    late = _owners_of_missing_rows(facts, header, received, awaited, words)
    if late:
        return wait("combine_wait", awaited, late)
    return wait("dispatch_wait", sent)


def _late(read: np.ndarray, generation: int) -> list[int]:
    """Returns the ranks whose done word has not reached a generation."""
    behind = (generation - read.astype(np.int64)) & 0xFFFF_FFFF
    return np.flatnonzero((behind != 0) & (behind < 2**31)).tolist()


def _owners_of_missing_rows(
    facts: Facts,
    header: np.ndarray,
    dispatched: int,
    generation: int,
    words: Words,
) -> list[int]:
    """Returns the ranks that have a row of this rank's tokens and have not sent it."""
    half = dispatched & 1
    n = int(header[facts.n_tokens_word + half]) * facts.top_k
    n_places = facts.max_tokens_per_rank * facts.top_k
    choices = words.counters(facts.choices_word + half * n_places, n)
    # Negative: no row, or one that is here. With a cap on rows, also the position.
    positions, experts = divmod(choices, facts.n_experts)
    kept = words.flags(facts.combine_counts_offset, facts.n_experts)[experts]
    is_dropped = kept >> np.uint64(32) == generation
    is_dropped &= positions >= (kept & np.uint64(2**32 - 1)).astype(np.int64)
    has_no_row = (choices < 0) | is_dropped
    owners = np.where(has_no_row, -1, experts // facts.n_local_experts)
    late: set[int] = set()
    for choice, owner in enumerate(owners.tolist()):
        if owner < 0 or owner in late:
            continue
        place = choice + (owner * n_places if facts.protocol & MASKS else 0)
        behind = (place + 1) * facts.combine_msg_bytes - SOURCE_INFO_BYTES
        if words.flags(facts.combine_recv_offset + behind, 1) >> 32 != generation:
            late.add(owner)
    return sorted(late)


def _experts_of(facts: Facts, rank: int) -> int:
    n_local = facts.n_local_experts
    return max(0, min(n_local, facts.n_experts - rank * n_local))
