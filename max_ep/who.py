# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom, read from the ranks' memory while a launch hangs.

No rank takes part: flags in the regions show what has arrived, and the counters of a
CPU process, which stand in its segment, say which phase runs. So processes that are
stopped or were killed are seen, too. ``docs/troubleshooting.md`` shows the output.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from .memory.symmetric_memory import Segment, process_state, segments_of

PHASES = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
_N_HEADER_WORDS = 32
_LINE = 80


@dataclass(frozen=True)
class Facts:
    """What a reader of a rank's memory must know about its group."""

    n_ranks: int
    n_experts: int
    n_local_experts: int
    n_local_ranks: int
    dispatch_counts_offset: int
    combine_counts_offset: int
    region_bytes: int
    status_bytes: int
    generations_word: int
    launch_word: int

    def as_dict(self) -> dict[str, int]:
        """Returns what a segment's owner writes into its header."""
        return asdict(self)


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
        said = [wait.text() for wait in self.ranks if wait.rank == culprits[0]]
        also = f" (and {_listed(culprits[1:])} too)" if culprits[1:] else ""
        return f"Rank {culprits[0]} keeps others waiting{also}: {said[0]}."

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


def cpu_wait(
    facts: Facts, rank: int, header: np.ndarray, region: np.ndarray, now_ns: int
) -> RankWait:
    """Reads what a CPU rank does.

    Args:
        facts: Of its group.
        rank: The rank.
        header: First words of its counters, int32.
        region: Its region, uint8.
        now_ns: The monotonic clock.
    """
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
        wait.missing = missing_ranks(facts, rank, number, last, region)
    return wait


def next_generation(last: int) -> int:
    """Returns the generation after one, as ``next_generation`` of ``flags.mojo``."""
    return last + 1 if last != 2**32 - 1 else 2


def missing_ranks(
    facts: Facts, rank: int, phase: int, last: int, region: np.ndarray
) -> list[int]:
    """Returns whose flags have not come that a phase awaits.

    Args:
        facts: Of the group.
        rank: The rank that waits.
        phase: Its number in ``PHASES``.
        last: The generation of this phase's last launch.
        region: Memory of the rank, uint8. The counts stand as in ``layout.mojo``.
    """
    n, n_local = facts.n_ranks, facts.n_local_experts
    is_dispatch = phase < 2
    first = n_local * n if is_dispatch else facts.n_experts
    offset = facts.dispatch_counts_offset
    if not is_dispatch:
        offset = facts.combine_counts_offset
    flags = region[offset:].view(np.uint64)[: first + n] >> np.uint64(32)
    n_mine = max(0, min(n_local, facts.n_experts - rank * n_local))
    if phase == 0:  # done words, of ranks with experts
        readers = range(-(-facts.n_experts // n_local))
        return [r for r in readers if flags[first + r] != last]
    if phase == 2:  # done words of all; a rank without experts sends nothing
        return [r for r in range(n) if n_mine and flags[first + r] != last]
    has_come = flags[:first] == next_generation(last)
    if phase == 1:
        come = has_come.reshape(n_local, n)[:n_mine].all(axis=0)
        return [r for r in range(n) if not come[r]]
    return sorted({e // n_local for e in np.flatnonzero(~has_come).tolist()})


# -------------------------------------------------------------------- other processes


def waits_of_segments(group: str, segments: Iterable[Segment]) -> Waits:
    """Reads a group of CPU processes from their segments, which any of them maps."""
    ranks = []
    for segment in sorted(segments, key=lambda segment: segment.node_id):
        facts = Facts(**segment.facts)
        state = process_state(segment.pid, segment.started)
        process = f"process {segment.pid} {state}" if state else ""
        if segment.is_closed and not process:
            process = f"process {segment.pid} has closed its memory"
        memory = np.frombuffer(segment.memory, np.uint8)[segment.first_byte :]
        for i in range(facts.n_local_ranks):
            rank = segment.node_id * facts.n_local_ranks + i
            header = memory[i * facts.status_bytes :][: 4 * _N_HEADER_WORDS]
            start = segment.regions_byte - segment.first_byte + i * facts.region_bytes
            region = memory[start : start + facts.region_bytes]
            wait = cpu_wait(
                facts, rank, header.view(np.int32), region, time.monotonic_ns()
            )
            wait.process = process
            ranks.append(wait)
    return Waits(group, ranks)


def groups_of(target: str | None) -> dict[str, list[Segment]]:
    """Finds groups of CPU processes of this machine, with their segments.

    Args:
        target: A process, or the beginning of a group's name; None: all.

    Raises:
        ValueError: If this process may not look into that one.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    if target is not None and target.isdecimal() and int(target) in pids:
        pids, target = [int(target)], None
    groups: dict[str, dict[tuple[int, bool], Segment]] = {}
    for pid in pids:
        try:
            found = segments_of(pid)
        except OSError as error:
            if len(pids) == 1:
                raise ValueError(f"process {pid}: {error.strerror}") from error
            continue
        for segment in found:
            if segment.facts and segment.group.startswith(target or ""):
                of_group = groups.setdefault(segment.group, {})
                of_group.setdefault((segment.node_id, segment.is_closed), segment)
    # A process that has joined again has closed an earlier segment of this name.
    return {
        group: [
            segment
            for (node_id, is_closed), segment in found.items()
            if not (is_closed and (node_id, False) in found)
        ]
        for group, found in groups.items()
    }


def run_who(options: argparse.Namespace) -> int:
    """Runs ``max-ep who``; returns the exit status."""
    try:
        groups = groups_of(options.target)
    except ValueError as error:
        print(f"max-ep who: {error}", file=sys.stderr)
        return 1
    if not groups:
        print(
            f"max-ep who: no group of CPU processes {options.target or ''} found here. "
            "Ranks of one process never wait; for others call "
            "EPCommInitializer.who_waits() in a thread of the process",
            file=sys.stderr,
        )
        return 1
    tables = [str(waits_of_segments(group, groups[group])) for group in groups]
    print("\n\n".join(tables))
    return 0
