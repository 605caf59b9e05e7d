# SPDX-License-Identifier: Apache-2.0
"""What `test_launch.py` launches: processes that fail, answer badly, or never end.

As a program: launches two that never end, and is ended by a signal.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from max_ep import launch
from max_ep.launch import _LENGTH_BYTES

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
"""Stands for a compiler."""


def note(folder: str, name: str, text: object) -> None:
    path = Path(folder, f".{name}")
    path.write_text(str(text))
    path.rename(path.with_name(name))


def meet(folder: str, node_id: int, n_nodes: int) -> None:
    """Waits until all processes have started."""
    note(folder, f"here-{node_id}", os.getpid())
    while len(list(Path(folder).glob("here-*"))) < n_nodes:
        time.sleep(0.01)


class Unreadable:
    """Is rebuilt by what raises."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class HalfAFile:
    """Takes a length, and dies in the middle of the rest."""

    def __init__(self, fd: int, *_: Any, **__: Any) -> None:
        self._fd = fd

    def __enter__(self) -> "HalfAFile":
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        if len(data) == _LENGTH_BYTES:
            os.write(self._fd, data)
        else:
            os.write(self._fd, data[:1000])
            os.kill(os.getpid(), signal.SIGKILL)


def answer(node_id: int, how: str) -> Any:
    """Answers more than a pipe holds; node 1 does it badly."""
    if node_id == 1 and how == "unreadable":
        return Unreadable()
    if node_id == 1 and how == "half":
        launch.__globals__["open"] = HalfAFile
    if node_id == 1 and how == "unwritable":
        return lambda: None
    return bytes(1 << 20)


def first_fails(node_id: int, folder: str) -> None:
    """Node 1 fails when all are there; node 0 says why once that is known, node 2 does
    not hear of it."""
    meet(folder, node_id, 3)
    if node_id == 1:
        raise LookupError("the first cause")
    if node_id == 0:
        while not Path(folder, "taken-1").exists():
            time.sleep(0.01)
        raise TimeoutError("waited for node 1")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def compile_for_ever(node_id: int, folder: str) -> None:
    """Waits for a process that it started."""
    with subprocess.Popen(SLEEP) as compiler:
        note(folder, f"compiler-{node_id}", compiler.pid)
        note(folder, f"member-{node_id}", os.getpid())
        try:
            compiler.wait()
        finally:
            compiler.kill()


def raise_exit(*_: object) -> None:
    sys.exit(3)


if __name__ == "__main__":
    _, folder, handler = sys.argv
    if handler == "own":
        signal.signal(signal.SIGTERM, raise_exit)
    launch(compile_for_ever, 2, (folder,))
