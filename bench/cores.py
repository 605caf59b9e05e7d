# SPDX-License-Identifier: Apache-2.0
"""Cores of the servers and the clients of ``bench.serving``.

On some hosts one core is 1.3 times as fast as its neighbour. So servers swap their
cores from round to round, and each has each share of the cores equally often.
"""

from __future__ import annotations

import os
from pathlib import Path

from max_ep.bench.runs import output


class Shares:
    """Equal shares of the cores of this process: one for clients, one a server."""

    def __init__(self, cores: set[int], n_servers: int) -> None:
        """Divides ``cores``; all share them if there are too few."""
        given, n = sorted(cores), len(cores) // (n_servers + 1)
        self.of_each = n
        """Cores of each; 0: all are shared."""
        parts = [set(given[i * n : (i + 1) * n]) for i in range(n_servers + 1)]
        self.clients, *self._servers = parts if n else [set(given)] * (n_servers + 1)

    def of_server(self, server: int, a_round: int) -> set[int]:
        """Returns the cores of a server in a round."""
        return self._servers[(server + a_round) % len(self._servers)]


def move(session: int, cores: set[int]) -> int:
    """Moves all threads of a session's processes to cores; returns how many moved.

    ``session`` is the id of the process that began it. Threads that they start later
    follow.
    """
    n_moved = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, which may have spaces: state, parent, group, session.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            for thread in (process / "task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)
                n_moved += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return n_moved


def host() -> str:
    """Names the CPU of this machine."""
    lines = output(["lscpu"]).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if "Model name" in line]
    return names[0] if names else "unknown CPU"
