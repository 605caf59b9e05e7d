# SPDX-License-Identifier: Apache-2.0
"""A child process of the benchmark: started, listened to, and killed if it hangs.

A library that hangs or dies takes its process along; a child's end says which case
it was at. What a child does stands in ``bench/gpu_children.py``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .gpu_shapes import Case

MARK = "@@ "
"""What a child's messages begin with."""

TIME_UP = "time was up"
"""Why a child ended that was at work when it had to end."""

_ROOT = Path(__file__).resolve().parent.parent


def say(message: dict) -> None:
    """Tells the parent something, in a child."""
    print(MARK + json.dumps(message), flush=True)


@dataclass(frozen=True)
class End:
    """How a child ended."""

    at: str
    """The case and form it was at, or ``open_`` and a configuration."""
    step: str
    reason: str
    """Empty if it came to its end."""

    def blames(self, name: str, case: Case) -> bool:
        """Returns whether a case and form is lost with this end."""
        if self.at == "start-up":
            return True
        return self.at in (name, f"open_{case.config.name}")


def start(spec: dict) -> subprocess.Popen:
    """Starts a child in a process group of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(spec, file)
    return subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_children", file.name],
        cwd=_ROOT,
        env=dict(os.environ, PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def watch(process: subprocess.Popen, stall_s: float, deadline: float) -> End:
    """Reads what a child says until it ends; kills it if it hangs or is late."""
    at, step, log, reason = "start-up", "", [], ""
    for message in messages(process, stall_s):
        if message is None:
            reason = f"said nothing for {stall_s:.0f} s"
        elif isinstance(message, str):
            log.append(message)
        elif "start" in message:
            at, step = message["start"], message.get("step", "")
        if time.monotonic() > deadline and not reason:
            _kill(process)
            reason = TIME_UP
    if process.wait() != 0 and not reason:
        reason = "the process died: " + " / ".join(log[-6:])[-600:]
    return End(at, step, reason)


def messages(process: subprocess.Popen, stall_s: float) -> Iterator[dict | str | None]:
    """Yields a child's messages and other lines; None when it has hung.

    A child that says nothing for ``stall_s`` is killed.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=stall_s)
        except queue.Empty:
            _kill(process)
            yield None
            return
        if line is None:
            process.wait()
            return
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))
        elif line.strip():
            if "warn" not in line.lower():
                print(f"    | {line[:300]}", flush=True)
            yield line


def results(path: Path) -> list[dict]:
    """Returns what a child has written, a dictionary a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _kill(process: subprocess.Popen) -> None:
    """Ends a child and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
