# SPDX-License-Identifier: Apache-2.0
"""``max-ep who``: shows who waits for whom in the groups of this machine.

``docs/troubleshooting.md`` shows the output.
"""

from __future__ import annotations

import argparse
import sys

from ..memory.answering import answers
from ..processes.meeting import parent_of
from ..waits import RankWait, Waits


def groups_of(target: str | None = None) -> list[Waits]:
    """Asks all processes of this machine, and puts the ranks of a group together; of a
    process, of the one that started it, or by the beginning of a group's name."""
    groups: dict[str, dict[int, RankWait]] = {}
    for pid, answer in answers():
        if isinstance(answer, str):
            if str(pid) == target:
                print(f"max-ep who: process {pid} {answer}", file=sys.stderr)
            continue
        for waits in answer:
            ranks = groups.setdefault(waits.group, {})
            for wait in waits.ranks:
                # A process may have a successor, which not all have mapped.
                if wait.rank not in ranks or ranks[wait.rank].process:
                    ranks[wait.rank] = wait
    all_ = [Waits(name, [by[r] for r in sorted(by)]) for name, by in groups.items()]
    if target is None:
        return all_

    def is_meant(waits: Waits) -> bool:
        pids = [pid for wait in waits.ranks for pid in (wait.pid, parent_of(wait.pid))]
        return waits.group.startswith(target) or target in map(str, pids)

    return [*filter(is_meant, all_)]


def run_who(options: argparse.Namespace) -> None:
    found = groups_of(options.target)
    if not found:
        others = [waits.group for waits in groups_of()] if options.target else []
        said = f"; there are {', '.join(others)}" if others else ""
        raise ValueError(
            f"no group of {options.target or 'any process'} found here{said}. CPU "
            "ranks of one process never wait"
        )
    print("\n\n".join(map(str, found)))
