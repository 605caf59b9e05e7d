# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises one process per node on this machine."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from .cache import compile_once
from .limits import GROUP_VARIABLE, NODE_VARIABLE

_GRACE_S = 5.0


class LaunchError(RuntimeError):
    """Some processes of a group failed; says which and how.

    Attributes:
        failures: What each failed node said, by ``node_id``.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        texts = (f"node {node}: {text}" for node, text in failures.items())
        super().__init__("\n".join(texts))


def _child(
    function: Callable[..., Any],
    args: Sequence[Any],
    node_id: int,
    group: str,
    results: multiprocessing.connection.Connection,
) -> None:
    os.environ[GROUP_VARIABLE] = group
    os.environ[NODE_VARIABLE] = str(node_id)
    compile_once()
    try:
        answer = pickle.dumps((True, function(node_id, *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    results.send_bytes(answer)
    results.close()


def launch(
    function: Callable[..., Any],
    n_nodes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 600.0,
) -> list[Any]:
    """Runs ``function(node_id, *args)`` in ``n_nodes`` processes.

    The processes form a group: the ``EPCommInitializer`` of each finds its peers. One
    process compiles a graph, the others wait for it. Processes are spawned, because a
    fork of a process that has used MAX hangs. So ``function`` must be importable and
    ``args`` picklable, and a script must call this under
    ``if __name__ == "__main__":``, because each process imports it.

    After ``timeout_s`` the processes are killed. Returns the results, in the order of
    ``node_id``.

    Raises:
        LaunchError: If a process raised, was killed, or took too long. The
            others are given time to notice, then killed; nothing of the group stays
            in shared memory.
        TypeError: If ``args`` is not a sequence of arguments.
        ValueError: If ``function`` or ``args`` cannot be handed to other processes,
            or there is no process to run.
    """
    if n_nodes < 1:
        raise ValueError(f"launch n_nodes={n_nodes!r}: pass how many processes, >= 1")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(
            f"launch args={args!r} must be a sequence of arguments, as args=({args!r},)"
        )
    try:
        pickle.dumps((function, args))
    except Exception as error:
        raise ValueError(
            f"launch cannot hand function={function!r} and args to other processes: "
            f"{error}; define it at the top of a module, and pass args that can be "
            "pickled"
        ) from error
    context = multiprocessing.get_context("spawn")
    group = uuid.uuid4().hex[:16]
    members: dict[Any, Any] = {}  # node and process, by pipe
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for node_id in range(n_nodes):
            receiver, sender = context.Pipe(duplex=False)
            given = function, args, node_id, group, sender
            process = context.Process(target=_child, args=given, daemon=True)
            process.start()
            sender.close()
            members[receiver] = node_id, process
        waiting = dict(members)
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), left_s)
            if not ready:
                for node_id, _ in waiting.values():
                    failures[node_id] = f"no result after {timeout_s} s; killed"
                break
            for pipe in ready:
                node_id, process = waiting.pop(pipe)
                succeeded, answer = _answer_of(process, pipe)
                (results if succeeded else failures)[node_id] = answer
    finally:
        for _, process in members.values():
            # After a failure, or Ctrl-C, one may wait for its peers without an end.
            process.join(_GRACE_S if len(results) == n_nodes else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise LaunchError(dict(sorted(failures.items())))
    return [results[node_id] for node_id in range(n_nodes)]


def _answer_of(process: Any, pipe: Any) -> tuple[bool, Any]:
    """Returns whether a process succeeded, and its answer or what became of it."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(_GRACE_S)
    text = f"died without a result (exit code {process.exitcode})"
    if process.exitcode == 1:
        # What the function raises comes back: this one did not get so far.
        text += (
            "; what it printed says why. A script must call launch under "
            '`if __name__ == "__main__":`'
        )
    return False, text
