# SPDX-License-Identifier: Apache-2.0
"""Processes answer who asks whom they wait for: ``max-ep who``.

A thread of each process answers for all ranks whose memory it maps. So CPU processes
that are stopped or were killed are seen, too, as long as one of their group answers.
Processes of this user are asked, and answered; root asks those of all users.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..processes.meeting import process_state
from ..processes.messages import said, taken
from ..processes.sockets import Answering, call, found, listen, process_at
from ..waits import Waits, Words, cpu_wait

if TYPE_CHECKING:
    from .symmetric_memory import SharedMemory


def waits_of_processes(sizes: SimpleNamespace, memory: SharedMemory) -> Waits:
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
            wait = cpu_wait(sizes, node * n_local + i, words, time.monotonic_ns())
            wait.pid = owner.pid
            wait.process = f"process {owner.pid} {state}" if state else ""
            ranks.append(wait)
    return Waits(memory.group, ranks)


_NAME = "who"
"""Names of the sockets where processes answer begin so."""
_ANSWER_S, _ANSWER_BYTES = 5.0, 16 << 20
_asked: weakref.WeakSet[Any] = weakref.WeakSet()


def answer_for(initializer: Any) -> None:
    """Has those who want to know call ``who_waits`` of an initializer."""
    _asked.add(initializer)
    _begin_to_answer()


@functools.cache
def _begin_to_answer() -> None:
    with contextlib.suppress(RuntimeError):  # without a socket nobody can ask
        listener = listen(_NAME, kind=socket.SOCK_STREAM)
        Answering(listener, _reply, answers_root=True)


def _reply(asking: socket.socket) -> None:
    """Writes a line of JSON for each group of this process."""
    for initializer in list(_asked):
        # Closed meanwhile, or before.
        with contextlib.suppress(RuntimeError, ValueError):
            asking.sendall(said(initializer.who_waits()) + b"\n")


def answers() -> Iterator[tuple[int, list[Waits] | str]]:
    """Asks the processes that this user may ask: yields the number of each, and its
    ranks, or why it says nothing."""
    with contextlib.ExitStack() as stack:
        lines = []
        for name in found(_NAME):
            if line := call(name, socket.SOCK_STREAM):
                stack.enter_context(line)
                process = process_at(line)
                if process.is_mine or os.geteuid() == 0:
                    lines.append((process.pid, line))
        deadline_s = time.monotonic() + _ANSWER_S
        for pid, line in lines:
            if state := process_state(pid):
                yield pid, state
                continue
            text = _read(line, deadline_s)
            if text is None:
                yield pid, "does not answer"
                continue
            found_waits = (taken(Waits, row) for row in text.splitlines())
            yield pid, [_checked(waits, pid) for waits in found_waits if waits]


def _read(line: socket.socket, deadline_s: float) -> bytes | None:
    """Returns all that comes; None: it does not end in time, or is too much."""
    text = b""
    while len(text) < _ANSWER_BYTES:
        try:
            line.settimeout(max(0.01, deadline_s - time.monotonic()))
            if not (more := line.recv(1 << 20)):
                return text
        except OSError:
            return None
        text += more
    return None


def _checked(waits: Waits, pid: int) -> Waits:
    """Names the process, and leaves what a terminal shows as it is."""
    waits.group = _printable(waits.group)
    for wait in waits.ranks:
        wait.phase, wait.process = _printable(wait.phase), _printable(wait.process)
        wait.pid = wait.pid or pid
    return waits


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
