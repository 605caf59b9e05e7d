# SPDX-License-Identifier: Apache-2.0
"""``max-ep who``: shows who waits for whom in the groups of this machine.

A thread of each process answers for all ranks whose memory it maps. So CPU processes
that are stopped or were killed are seen, too, as long as one of their group answers.
``docs/troubleshooting.md`` shows the output.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .memory.meeting import parent_of, process_state
from .waits import Facts, RankWait, Waits, Words, cpu_wait

if TYPE_CHECKING:
    from .memory.symmetric_memory import SharedMemory


def waits_of_processes(facts: Facts, memory: SharedMemory) -> Waits:
    """Reads all ranks of a group of CPU processes, in one that maps their memory."""
    ranks, n_local = [], memory.n_local_ranks
    for node, owner in sorted(memory.owners.items()):
        state = process_state(owner.pid, owner.started)
        if not state and memory.is_closed(node):
            state = "has closed its memory"
        for i in range(n_local):
            words = Words(
                functools.partial(memory.read_status, node, i),
                functools.partial(memory.read_region, node, i),
            )
            wait = cpu_wait(facts, node * n_local + i, words, time.monotonic_ns())
            wait.pid = owner.pid
            wait.process = f"process {owner.pid} {state}" if state else ""
            ranks.append(wait)
    return Waits(memory.group, ranks)


_SOCKET = "\0max_ep/who-"
"""And the number of a process: where it answers."""

_asked: weakref.WeakSet[Any] = weakref.WeakSet()


def answer_for(initializer: Any) -> None:
    """Has those who want to know call ``who_waits`` of an initializer."""
    _asked.add(initializer)
    _begin_to_answer()


@functools.cache
def _begin_to_answer() -> None:
    threading.Thread(target=_answer, daemon=True, name="max_ep who").start()


def _answer() -> None:
    """Writes a line of JSON for each group of this process to whoever connects."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_SOCKET + str(os.getpid()))
        except OSError:  # a container with the same network has this pid, too
            return
        listener.listen()
        while True:
            asking, _ = listener.accept()
            with asking, contextlib.suppress(OSError):
                for initializer in list(_asked):
                    # Closed meanwhile, or before.
                    with contextlib.suppress(RuntimeError, ValueError):
                        said = asdict(initializer.who_waits())
                        asking.sendall(json.dumps(said).encode() + b"\n")


def answers_of(pid: int) -> list[Waits]:
    """Asks a process for its ranks. Raises ``OSError`` if it does not answer."""
    if state := process_state(pid):
        raise TimeoutError(state)
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(5)
        asked.connect(_SOCKET + str(pid))
        lines = asked.makefile().read().splitlines()
    answers = [json.loads(line) for line in lines]
    for wait in (wait for answer in answers for wait in answer["ranks"]):
        wait["pid"] = wait["pid"] or pid
    return [Waits(a["group"], [RankWait(**r) for r in a["ranks"]]) for a in answers]


def groups_of(target: str | None = None) -> list[Waits]:
    """Asks all processes of this machine, and puts the ranks of a group together; of a
    process, of the one that started it, or by the beginning of a group's name."""
    groups: dict[str, dict[int, RankWait]] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        try:
            answers = answers_of(pid)
        except ConnectionRefusedError:
            continue  # it is no process of a group
        except TimeoutError as error:
            if str(pid) == target:
                print(f"max-ep who: process {pid} {error}", file=sys.stderr)
            continue
        for waits in answers:
            ranks = groups.setdefault(waits.group, {})
            for wait in waits.ranks:
                # A process may have a successor, which not all have mapped.
                if wait.rank not in ranks or ranks[wait.rank].process:
                    ranks[wait.rank] = wait
    found = [Waits(name, [by[r] for r in sorted(by)]) for name, by in groups.items()]
    if target is None:
        return found

    def is_meant(waits: Waits) -> bool:
        pids = [pid for wait in waits.ranks for pid in (wait.pid, parent_of(wait.pid))]
        return waits.group.startswith(target) or target in map(str, pids)

    return [*filter(is_meant, found)]


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
