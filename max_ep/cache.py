# SPDX-License-Identifier: Apache-2.0
"""Files that are kept between runs. One process makes a file, the others wait for it.

MAX has its own cache of compiled graphs. Processes that start together would all find
it empty and compile; :func:`compile_once` makes them wait for the first.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .limits import NODE_VARIABLE

_POLL_S = 0.05
_FIRST_REPORT_S = 2.0
_REPORT_EVERY_S = 10.0
_PATIENCE_S = 900.0
_DONE = b"done"


def cache_dir() -> Path:
    """Returns ``MAX_EP_CACHE_DIR``, or ``max_ep`` in the user's cache folder."""
    if folder := os.environ.get("MAX_EP_CACHE_DIR"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "max_ep"


def kept(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns a file of the cache; if it is missing, one process makes it.

    ``make`` writes it, to a path of the same name in another folder.
    """
    if target.is_file():
        return target
    _check_folder(target.parent)
    with one_at_a_time(target.parent / f"{target.name}.lock", target.name):
        if not target.is_file():
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                made = Path(folder) / target.name
                make(made)
                os.replace(made, target)
    return target


def compile_once() -> None:
    """From now on, compiles a graph in one of the processes of this host only. The
    others wait, say so on stderr, and find it in MAX's cache."""
    # Here, so that who only keeps files, as `max_ep.torch`, loads no MAX.
    from max.engine import InferenceSession
    from max.graph import Graph, Module

    compile_alone = InferenceSession.compile
    if hasattr(compile_alone, "__wrapped__"):
        return

    @functools.wraps(compile_alone)
    def compile(session: Any, model: Any, **options: Any) -> Any:
        module = model.module if isinstance(model, Graph) else model
        if not isinstance(module, Module):
            return compile_alone(session, model, **options)
        text = str(module.mlir_module)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        lock = cache_dir() / "graphs" / f"{digest}.lock"
        with one_at_a_time(lock, f"graph {'+'.join(module.top_level_graph_names())}"):
            return compile_alone(session, model, **options)

    InferenceSession.compile = compile  # type: ignore[method-assign]


@contextmanager
def one_at_a_time(lock: Path, what: str) -> Iterator[None]:
    """Lets one process run the block; the waiting ones then go on together. The file
    holds who has its ``flock``, or ``done``; without locks nobody waits."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        is_first = _take(fd, what)
        yield
        if is_first:
            _write(fd, _DONE)
    finally:
        os.close(fd)


def _take(fd: int, what: str) -> bool:
    """Waits for the lock; returns whether this process is the one that works."""
    begin = time.monotonic()
    report_at, has_waited = begin + _FIRST_REPORT_S, False
    while True:
        # Shared among those that use what is done. Not done: its maker has failed. Who
        # has not waited does not know whether it is still there.
        if has_waited and _lock(fd, fcntl.LOCK_SH):
            if os.pread(fd, 64, 0) == _DONE:
                return False
            fcntl.flock(fd, fcntl.LOCK_UN)
        if _lock(fd, fcntl.LOCK_EX):
            _write(fd, _name().encode())
            return True
        has_waited = True
        now = time.monotonic()
        # Empty while the holder writes its name.
        if now > report_at and (maker := os.pread(fd, 64, 0).decode()):
            report_at = now + _REPORT_EVERY_S
            _report(f"{maker} to compile {what} ({now - begin:.0f} s)")
        if now - begin > _PATIENCE_S:
            _report(f"{what} no longer, and compiles it, too")
            return False
        time.sleep(_POLL_S)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # A file system without locks: nobody waits.
    return True


def _write(fd: int, text: bytes) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)


def _report(text: str) -> None:
    print(f"max_ep: {_name()} waits for {text}", file=sys.stderr, flush=True)


def _name() -> str:
    node = os.environ.get(NODE_VARIABLE)
    return f"process {os.getpid()}" + (f" (node {node})" if node else "")


def _check_folder(folder: Path) -> None:
    """Makes a folder; says so if no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RuntimeError(
            f"max_ep: nothing can be kept in {folder}: {error.strerror}. Set "
            "MAX_EP_CACHE_DIR to a folder that you may write to"
        ) from error
