# SPDX-License-Identifier: Apache-2.0
"""Reads from a rank's memory whom it waits for, while a launch hangs.

No rank takes part: words in the regions show what has arrived, and the counters of a
CPU rank say which phase runs. Where these words are, which phase awaits them, and which
generation, Mojo says once for a configuration (``mojo/max_ep/launch/sizes.mojo``).
"""

from __future__ import annotations

import ctypes
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

_LINE = 80


@dataclass
class RankWait:
    """What a rank does, and whom it waits for."""

    rank: int
    phase: str = ""
    """The name of what runs, or of what ran last; "": nothing has run."""
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
                "same EP ops in the same order."
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

    def flag(self, offset: int) -> int:
        """Reads a flag of the region."""
        return int.from_bytes(self.read_region(offset, 8), "little")


def at_address(address: int) -> Callable[[int, int], bytes]:
    """Returns what copies bytes behind an address of this process."""
    return lambda at, n_bytes: ctypes.string_at(address + at, n_bytes)


def place(kind: SimpleNamespace, peer: int, i: Any, run: int = 0) -> Any:
    """Locates word ``i`` of a peer in a region; as ``place`` of ``peer_words.mojo``."""
    first = kind.offset + peer * kind.peer_stride + run * kind.run_stride
    return first + i * kind.spacing


def n_words(
    sizes: SimpleNamespace, kind: SimpleNamespace, reader: int, peer: int
) -> int:
    """Counts the words of a peer that exist in the region of a rank."""
    if kind.limit == "none":
        return kind.n
    return min(kind.n, sizes.experts_of[reader if kind.limit == "reader" else peer])


def named(kinds: Sequence[SimpleNamespace], name: str) -> SimpleNamespace:
    return next(kind for kind in kinds if kind.name == name)


def _after(last: int, step: int) -> int:
    """Returns a generation, the one after it (1), or before it (-1); as
    ``next_generation`` of ``flags.mojo``, which skips 0 and 1 after a wrap."""
    if step > 0 and last == 2**32 - 1:
        return 2
    return max(0, last + step)


def _is_behind(found: np.ndarray, wanted: int) -> bool:
    """Returns whether one of some generations has not reached another; they wrap."""
    behind = (wanted - found.astype(np.int64)) & 0xFFFF_FFFF
    return bool(((behind != 0) & (behind < 2**31)).any())


@dataclass
class _Look:
    """A look at the memory of a rank; ``sizes``: what Mojo says of its group."""

    sizes: SimpleNamespace
    rank: int
    words: Words

    def __post_init__(self) -> None:
        self.header = self.words.counters(0, self.sizes.header_words)

    def generation(self, word: int) -> int:
        """Reads a generation in the header."""
        return int(self.header[word].view(np.uint32))

    def missing(self, kind: SimpleNamespace) -> tuple[int, list[int]]:
        """Returns the generation that is awaited, and the ranks whose words of a kind
        have not reached it."""
        look = self._rows if kind.which == "choices" else self._flags
        wanted, late = look(kind)
        if late and self.sizes.masks:  # nobody waits for a rank that it masks
            masked = self.words.counters(self.sizes.masked_word, self.sizes.n_ranks)
            late = [rank for rank in late if masked[rank] == 0]
        return wanted, late

    def _flags(self, kind: SimpleNamespace) -> tuple[int, list[int]]:
        ranks = range(self.sizes.n_ranks)
        n = [n_words(self.sizes, kind, self.rank, peer) for peer in ranks]
        at = np.stack([place(kind, peer, np.arange(kind.n)) for peer in ranks])
        begin, end = int(at.min()), int(at.max()) + 8
        flags = np.frombuffer(self.words.read_region(begin, end - begin), np.uint64)
        shift = np.uint64(32 if kind.holds == "generation" else 0)
        found = (flags[(at - begin) // 8] >> shift).astype(np.uint32)
        wanted = _after(self.generation(kind.word), kind.step)
        return wanted, [x for x in ranks if _is_behind(found[x, : n[x]], wanted)]

    def _rows(self, kind: SimpleNamespace) -> tuple[int, list[int]]:
        """Looks at the rows that its last combine gets, where each is on its own."""
        sizes, words = self.sizes, self.words
        wanted = _after(self.generation(kind.word), kind.step)
        half = self.generation(sizes.combine_of_word) & 1
        n = int(self.header[sizes.n_tokens_word + half]) * sizes.top_k
        choices = words.counters(sizes.choices_word + half * sizes.n_choices, n)
        counts, late = named(sizes.gpu, "combine count"), set()
        # Negative: no row, or one that is here. With a cap on rows, also the position.
        for choice in np.flatnonzero(choices >= 0).tolist():
            position, expert = divmod(int(choices[choice]), sizes.n_experts)
            owner, local_expert = divmod(expert, sizes.n_local_experts)
            if owner in late:
                continue
            kept = words.flag(place(counts, owner, local_expert))
            if kept >> 32 == wanted and position >= kept & 0xFFFF_FFFF:
                continue
            found = words.flag(place(kind, owner, choice)) >> 32
            if _is_behind(np.uint32(found), wanted):
                late.add(owner)
        return wanted, sorted(late)


def cpu_wait(sizes: SimpleNamespace, rank: int, words: Words, now_ns: int) -> RankWait:
    """Reads what a CPU rank does, at a time of the monotonic clock."""
    look = _Look(sizes, rank, words)
    launch = int(look.header[sizes.launch_word])
    if launch == 0:
        return RankWait(rank)
    number = abs(launch) - 1
    # A CPU rank advances its generation at the end of a phase.
    last = look.generation(sizes.generations_word + number)
    is_running = launch > 0
    wait = RankWait(rank, sizes.phases[number], _after(last, is_running), is_running)
    since = look.header[sizes.launch_since_word :][:2].copy().view(np.int64)
    wait.since_s = max(0, now_ns - int(since[0])) / 1e9
    if is_running:
        for kind in sizes.cpu:
            if kind.phase == wait.phase:
                wait.missing = sorted({*wait.missing, *look.missing(kind)[1]})
    return wait


def gpu_wait(sizes: SimpleNamespace, rank: int, words: Words) -> RankWait:
    """Reads what a GPU rank does, from what its kernels leave in any case.

    They store no time, and none for this. ``is_running``: something is missing that
    the rank's last launch, or its next, waits for.
    """
    look = _Look(sizes, rank, words)
    sent, received, combine_sent, combine_received = (
        look.generation(sizes.generations_word + i) for i in range(4)
    )
    for phase in sizes.phases:
        generation, late = 0, set()
        for kind in sizes.gpu:
            can_see = kind.holds != "data" and kind.which in ("each", "choices")
            if kind.phase == phase and can_see:
                wanted, missing = look.missing(kind)
                if kind.word == sizes.combine_of_word:  # the dispatch that is answered
                    wanted = combine_sent
                generation, late = max(generation, wanted), late | {*missing}
        if late:
            if phase.endswith("_async"):  # what was read is of the generation before
                generation = _after(generation, 1)
            return RankWait(rank, phase, generation, True, missing=sorted(late))
    if sent == 0:
        return RankWait(rank)
    if look.generation(sizes.combine_of_word) == received:
        return RankWait(rank, sizes.phases[3], combine_received)
    return RankWait(rank, sizes.phases[1], sent)
