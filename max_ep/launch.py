# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises one process per node on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import multiprocessing.connection
import numbers
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import first_import
from .cache import compile_once
from .limits import GROUP_VARIABLE, MAX_RANKS, NODE_VARIABLE, is_integer
from .processes import presence

_GRACE_S = 5.0
"""What the others have, after one has failed, to say what they saw; and after all have
answered, to end."""
_END_S = 1.0
"""What a process has from SIGTERM to SIGKILL."""
_POLL_S = 0.2
_LENGTH_BYTES = 8
"""In front of an answer."""
_PR_SET_PDEATHSIG = 1


class LaunchError(RuntimeError):
    """Some processes of a group failed; says which and how.

    Attributes:
        failures: What each failed node said, by ``node_id``. The first that failed
            comes first.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        texts = (f"node {node}: {text}" for node, text in failures.items())
        super().__init__("\n".join(texts))


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

    After ``timeout_s`` the processes are ended. If one fails, the others have seconds
    to say what they saw. They also end if this process ends, in whatever way; a SIGTERM
    that has no handler ends them first. Returns the results, in the order of
    ``node_id``.

    Raises:
        LaunchError: If a process raised, was killed, or took too long. Nothing of the
            group stays in shared memory.
        TypeError: If ``function`` is none, or ``args`` is not a sequence of arguments.
        ValueError: If ``function`` or ``args`` cannot be handed to other processes,
            ``n_nodes`` is not in ``[1, 128]``, or ``timeout_s`` is no time.
    """
    n_nodes = _checked(function, n_nodes, args, timeout_s)
    try:
        task = pickle.dumps((function, args))
    except Exception as error:
        raise ValueError(
            f"launch cannot hand function={function!r} and args to other processes: "
            f"{error}; define it at the top of a module, and pass args that can be "
            "pickled"
        ) from error
    first_import.prepare()
    group = uuid.uuid4().hex[:16]
    members: list[_Member] = []
    with _sigterm_raises():
        try:
            outcomes = _outcomes(task, n_nodes, group, timeout_s, members)
        finally:
            _end(members)
    if failures := {node: said for node, (good, said) in outcomes.items() if not good}:
        raise LaunchError(failures)
    return [outcomes[node][1] for node in range(n_nodes)]


def _checked(function: Any, n_nodes: Any, args: Any, timeout_s: Any) -> int:
    """Raises for what cannot be launched; returns the number of processes."""
    if not callable(function):
        raise TypeError(f"launch function={function!r} must be a function")
    if not is_integer(n_nodes) or not 1 <= n_nodes <= MAX_RANKS:
        raise ValueError(
            f"launch n_nodes={n_nodes!r}: pass how many processes, an integer from 1 "
            f"to {MAX_RANKS}"
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(
            f"launch args={args!r} must be a sequence of arguments, as args=({args!r},)"
        )
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"launch timeout_s={timeout_s!r}: pass seconds, a finite number above 0"
        )
    return int(n_nodes)


# ------------------------------------------------------------------- in the parent


@dataclass
class _Member:
    """A process, and what has come of its answer."""

    node_id: int
    process: Any
    pipe: Any
    answer: bytearray = field(default_factory=bytearray)

    def outcome(self) -> tuple[bool, Any] | None:
        """Returns whether the process succeeded, and its result or what became of it;
        None: it runs."""
        is_alive = self.process.is_alive()  # before its last bytes are read
        is_open = self._read()
        length = int.from_bytes(self.answer[:_LENGTH_BYTES], "big")
        n_wanted = _LENGTH_BYTES + length if length else math.inf
        if len(self.answer) < n_wanted and is_alive and is_open:
            return None
        if len(self.answer) >= n_wanted:
            return self._unpickled()
        return False, self._death(length)

    def _read(self) -> bool:
        """Takes what is in the pipe; returns whether more can come."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.pipe.fileno(), 1 << 20):
                self.answer += part
            return False
        return True

    def _unpickled(self) -> tuple[bool, Any]:
        try:
            return pickle.loads(memoryview(self.answer)[_LENGTH_BYTES:])
        except (Exception, SystemExit) as error:
            return False, (
                f"its result cannot be unpickled: {type(error).__name__}: {error}; "
                "return values that this process can rebuild"
            )

    def _death(self, length: int) -> str:
        """Says how a process ended that has not answered."""
        self.process.join(_END_S)
        code, came = self.process.exitcode, len(self.answer) - _LENGTH_BYTES
        if code is None:
            return "closed the pipe of its result; killed"
        if length:
            how = f"exit code {code}; {came} of {length} bytes came"
            return f"died while it answered ({how})"
        text = f"died without a result (exit code {code})"
        if code == 1:
            # What the function raises comes back: this one did not get so far.
            text += (
                "; what it printed says why. A script must call launch under "
                '`if __name__ == "__main__":`'
            )
        return text


def _outcomes(
    task: bytes, n_nodes: int, group: str, timeout_s: float, members: list[_Member]
) -> dict[int, tuple[bool, Any]]:
    """Starts the processes, and returns whether each succeeded, and its result or what
    became of it: by node, in the order in which they ended."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    deadline, missing = time.monotonic() + timeout_s, f"no result after {timeout_s} s"
    for node_id in range(n_nodes):
        try:
            members.append(_started(task, node_id, group))
        except OSError as error:
            text = f"cannot be started: {error.strerror or error}"
            return outcomes | {node_id: (False, text)}
    waiting = list(members)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        pipes = [member.pipe for member in waiting]
        multiprocessing.connection.wait(pipes, min(left_s, _POLL_S))
        for member in list(waiting):
            if (outcome := member.outcome()) is None:
                continue
            waiting.remove(member)
            outcomes[member.node_id] = outcome
            early = time.monotonic() + _GRACE_S
            if not outcome[0] and early < deadline:
                deadline = early
                missing = (
                    f"no result {_GRACE_S:.0f} s after node {member.node_id} failed"
                )
    for member in waiting:
        outcomes[member.node_id] = False, f"{missing}; killed"
    return outcomes


def _started(task: bytes, node_id: int, group: str) -> _Member:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with sender:
        given = task, node_id, group, os.getpid(), sender
        process = context.Process(target=_child, args=given, daemon=True)
        process.start()
    os.set_blocking(receiver.fileno(), False)
    return _Member(node_id, process, receiver)


def _end(members: list[_Member]) -> None:
    """Ends the processes, those that have answered by themselves."""
    have_answered = all(len(member.answer) > _LENGTH_BYTES for member in members)
    _join(members, _GRACE_S if have_answered else 0.1)
    for member in members:
        if member.process.is_alive():
            member.process.terminate()
    _join(members, _END_S)
    for member in members:
        if member.process.is_alive():
            member.process.kill()
            member.process.join()
        member.pipe.close()


def _join(members: list[_Member], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for member in members:
        member.process.join(max(0.0, deadline - time.monotonic()))


class _Terminated(BaseException):
    """SIGTERM has come."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Lets a SIGTERM that would end this process at once end its children first. A
    handler that is there stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(*_: Any) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    is_terminated = False
    try:
        yield
    except _Terminated:
        is_terminated = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if is_terminated:
            os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------------- in the children


def _child(
    task: bytes,
    node_id: int,
    group: str,
    parent: int,
    pipe: multiprocessing.connection.Connection,
) -> None:
    _end_with(parent)
    # Raised in the main thread: a compiler that it waits for is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("this process got a SIGTERM"))
    os.environ[GROUP_VARIABLE] = group
    os.environ[NODE_VARIABLE] = str(node_id)
    presence.show(group, node_id)
    answer = _answer(task, node_id)
    with open(pipe.fileno(), "wb", closefd=False) as file:
        file.write(len(answer).to_bytes(_LENGTH_BYTES, "big"))
        file.write(answer)
    pipe.close()


def _answer(task: bytes, node_id: int) -> bytes:
    """Runs the function; returns whether it succeeded, and its result or what it
    raised."""
    try:
        function, args = pickle.loads(task)
        compile_once()
        result = function(node_id, *args)
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    try:
        return pickle.dumps((True, result))
    except Exception as error:
        text = f"its result, of {type(result)}, cannot be pickled: {error}"
        return pickle.dumps((False, f"{text}; return values that can be pickled"))


def _end_with(parent: int) -> None:
    """From now on, the kernel kills this process when the thread ends that started it,
    which waits for it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
