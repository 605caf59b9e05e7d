# SPDX-License-Identifier: Apache-2.0
"""Files that are kept between runs. One process makes a file, the others wait for it.

MAX has its own cache of compiled graphs. Processes that start together would all find
it empty and compile; :func:`compile_once` makes them wait for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import grp
import hashlib
import os
import pwd
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .limits import GROUP_VARIABLE, NODE_VARIABLE
from .processes import presence

_POLL_S = 0.05
_FIRST_REPORT_S = 2.0
_REPORT_EVERY_S = 10.0
_PATIENCE_S = 900.0
_DONE = b"done"
_PLACES_OF_MAX = ("MODULAR_CACHE_DIR", "MODULAR_HOME", "XDG_CACHE_HOME", "HOME")
"""Variables that say where MAX keeps its own cache."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOM_BYTES = 1 << 24
"""A disk with less free space is full."""
_REMEDY = "Set MAX_EP_CACHE_DIR to a folder that you may write to"


def cache_dir() -> Path:
    """Returns ``MAX_EP_CACHE_DIR``, or ``max_ep`` in the user's cache folder."""
    if folder := os.environ.get("MAX_EP_CACHE_DIR"):
        return Path(folder).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which its specification wants
        base = os.path.join(_home(), ".cache")
    return Path(base).absolute() / "max_ep"


def _home() -> str:
    """Returns the user's home; an empty variable is none."""
    with contextlib.suppress(KeyError):
        return os.environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir
    raise RuntimeError(
        f"max_ep: HOME is not set, and user {os.geteuid()} has no home folder for the "
        f"cache. {_REMEDY}"
    )


def kept(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns a file of the cache; if it is missing or damaged, one process makes it.

    ``make`` writes it, to a path of the same name in another folder. Size and hash
    stand beside it, in ``NAME.sum``.

    Raises:
        RuntimeError: If nothing can be written there, or others than this user and
            root can: what is in the cache runs in this process.
    """
    folder = target.parent
    with _disk_errors(folder):  # it may be out of reach
        if folder.is_dir():
            _check_owner(folder)
            if _is_whole(target):
                return target
    check_folder(folder)
    with one_at_a_time(folder / f"{target.name}.lock", target.name):
        if not _is_whole(target):
            if target.exists():
                say(f"{target} does not match its {_sum_of(target).name}; made again")
            _make(target, make)
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    """Writes a file and its sum. They get their names when they are on the disk."""
    folder = target.parent
    with _disk_errors(folder):
        temporary = tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)
    with temporary as made_in:
        made = Path(made_in) / target.name
        try:
            make(made)
        except Exception:
            _check_space(folder)
            raise
        with _disk_errors(folder):
            size, digest = made.stat().st_size, _digest(made)
            _sum_of(made).write_text(f"{size} {digest}\n")
            for path in (made, _sum_of(made)):
                _sync(path)
            os.replace(_sum_of(made), _sum_of(target))
            os.replace(made, target)
            _sync(folder)


def _sync(path: Path) -> None:
    """Writes a file or folder to the disk; takes from others the right to change it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~_OTHERS_WRITE)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sum_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.sum")


def _is_whole(target: Path) -> bool:
    """Returns whether a file is there, and has the size and hash it was made with."""
    try:
        state, said = target.stat(), _sum_of(target).read_bytes()
    except OSError:
        return False
    size, _, digest = said.decode(errors="replace").strip().partition(" ")
    if size != str(state.st_size):
        return False
    return digest == _digest(target, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache
def _digest(path: Path, *_: int) -> str:
    """Returns the hash of a file, which is read once as long as its state is equal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
        # MAX's cache may be another one, where the graph is not.
        where = (os.environ.get(name, "") for name in _PLACES_OF_MAX)
        text = "\n".join((*where, str(module.mlir_module)))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        lock = lock_in_cache(f"graphs/{digest}")
        with one_at_a_time(lock, f"graph {'+'.join(module.top_level_graph_names())}"):
            return compile_alone(session, model, **options)

    InferenceSession.compile = compile  # type: ignore[method-assign]


def lock_in_cache(name: str) -> Path:
    """Returns a lock for :func:`one_at_a_time`. If its folder cannot be made, nobody
    waits; that of another user is refused."""
    lock = cache_dir() / f"{name}.lock"
    with contextlib.suppress(OSError):
        _make_folder(lock.parent)
        _check_owner(lock.parent)
    return lock


@contextmanager
def one_at_a_time(lock: Path, what: str) -> Iterator[None]:
    """Lets one process run the block; the waiting ones then go on together. The file
    holds who has its ``flock``, or ``done``; without locks nobody waits."""
    try:
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(lock, how, 0o600)
    except OSError:
        yield
        return
    group, node = os.environ.get(GROUP_VARIABLE), os.environ.get(NODE_VARIABLE, "")
    try:
        with presence.doing(f"waits for another to compile {what}", group, node):
            is_first = _take(fd, what)
        does = "compiles" if is_first else "loads"
        with presence.doing(f"{does} {what}", group, node):
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
        if now > report_at and (maker := os.pread(fd, 64, 0).decode(errors="replace")):
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
    """Says who works. On a full disk nobody hears of it, and each does the work."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, text, 0)


def say(text: str) -> None:
    print(f"max_ep: {text}", file=sys.stderr, flush=True)


def _report(text: str) -> None:
    say(f"{_name()} waits for {text}")


def _name() -> str:
    node = os.environ.get(NODE_VARIABLE)
    return f"process {os.getpid()}" + (f" (node {node})" if node else "")


def check_folder(folder: Path) -> Path:
    """Makes a folder, and returns it.

    Raises:
        RuntimeError: If no file can be made in it, or others can write to it.
    """
    with _disk_errors(folder):
        _make_folder(folder)
        _check_owner(folder)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def _make_folder(folder: Path) -> None:
    """Makes a folder for this user alone, and those above it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _check_owner(folder: Path) -> None:
    """Raises unless a folder, and those above it in the cache, are this user's or
    root's, and nobody else may write to them."""
    me, cache = os.geteuid(), cache_dir()
    for path in (folder, *(p for p in folder.parents if p.is_relative_to(cache))):
        state = path.stat()
        if state.st_uid not in (me, 0):
            what = f"belongs to user {state.st_uid}, and this is user {me}"
        elif state.st_mode & (stat.S_IWOTH if _is_own(state) else _OTHERS_WRITE):
            what = f"has mode {state.st_mode & 0o777:o}, so others may write to it"
        else:
            continue
        raise RuntimeError(
            f"max_ep: what is compiled is not kept in {path}, which {what}. {_REMEDY}, "
            "and that others may not"
        )


def _is_own(state: os.stat_result) -> bool:
    """Returns whether a group has one member: many systems give each user their own,
    and let it write."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(state.st_gid)
    except KeyError:
        return False
    is_mine = me.pw_gid == group.gr_gid and me.pw_name == group.gr_name
    return is_mine and set(group.gr_mem) <= {me.pw_name}


def _check_space(folder: Path) -> None:
    """Raises if a folder has no space: a compiler says it in its own words."""
    with _disk_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"max_ep: nothing can be kept in {folder}: {error.strerror}. {_REMEDY}"
        ) from error
