# SPDX-License-Identifier: Apache-2.0
"""Runs programs in processes of their own."""

import contextlib
import functools
import gc
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ALL_CASES = "MAX_EP_ALL_CASES" in os.environ
"""Whether what is slow is run, too."""
slow = pytest.mark.skipif(not ALL_CASES, reason="slow; make test-all has it")

ROOT = Path(__file__).resolve().parents[1]
MOJO_PROGRAMS = ROOT / "tests/mojo"
WHERE_WE_IMPORT = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
"""The `PYTHONPATH` of a child that imports as this process does."""


def ran(
    *command: Any, timeout: float = 3600, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Runs a command, and takes what it prints. Its environment is what Python takes it
    for: importing MAX sets variables that keep another Python from its packages."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )


def printed(*command: Any, **how: Any) -> str:
    """Runs a command that must succeed; returns what it printed."""
    done = ran(*command, **how)
    assert done.returncode == 0, (
        f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def compiled_mojo(source: str) -> Callable[..., str]:
    """Compiles a program of the Mojo package when it is first run, once for a state of
    the sources and an installation, whose libraries it loads by their paths; interprets
    it if there is no linker."""
    from max_ep.cache import cache_dir, kept
    from max_ep.extension import run_mojo, sources_hash

    where = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    program = cache_dir() / sources_hash() / f"{Path(source).stem}-{where}"

    def build(path: Path) -> None:
        run_mojo("build", "-I", ".", source, "-o", str(path))

    @functools.cache
    def is_built() -> bool:
        try:
            kept(program, build)
        except RuntimeError:
            return False
        return True

    def run(*words: str) -> str:
        if is_built():
            return printed(program, *words)
        return run_mojo("run", "-I", ".", source, *words)

    return run


def handles() -> set[str]:
    """Lists this process's open handles, each by a name that no other ever has. What
    earlier tests left to the garbage collector is closed first."""
    gc.collect()
    names = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the handle of the listing itself
            names.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return names


def new_handles(before: set[str], n: int = 0) -> set[str]:
    """Lists the handles that are open and were not before, once there are only `n`:
    threads that answer other processes close theirs a bit later."""
    deadline = time.monotonic() + 10
    while len(found := handles() - before) > n and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def names_of(group: str) -> list[str]:
    """Lists files and sockets of a group, which others can find; their random ends are
    left out."""
    with open("/proc/net/unix") as sockets:
        names = [line.split()[-1].rpartition("/")[0] for line in sockets]
    pattern = re.compile(rf"@max_ep/{re.escape(group[:24])}|max_ep-{re.escape(group)}")
    return sorted(filter(pattern.match, {*names, *os.listdir("/dev/shm")}))
