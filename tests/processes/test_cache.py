# SPDX-License-Identifier: Apache-2.0
"""One of several processes compiles, the others wait; the kernel frees the lock.

Threads stand for processes: each opens the lock's file by itself.
"""

import errno
import grp
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from max.engine import InferenceSession
from max.graph import Graph

from max_ep import cache, first_import
from tests.children import WHERE_WE_IMPORT, printed
from tests.errors import raises

TIMEOUT_S = 600

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("process of the test", file=file, flush=True)
print("holds", flush=True)
time.sleep(60)
"""


def kept_by_threads(target: Path, n: int, make: Callable[[Path], None]) -> None:
    with ThreadPoolExecutor(n) as pool:
        for done in [pool.submit(cache.kept, target, make) for _ in range(n)]:
            assert done.result(TIMEOUT_S).read_text() == "made"


def test_one_makes_a_file_and_the_others_wait(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cache, "_FIRST_REPORT_S", 0.0)
    report, reports, made = cache._report, threading.Semaphore(0), []

    def counted(text: str) -> None:
        report(text)
        reports.release()

    def make(path: Path) -> None:
        made.append(path)
        for _ in range(2):  # until both others have said that they wait
            assert reports.acquire(timeout=TIMEOUT_S)
        path.write_text("made")

    monkeypatch.setattr(cache, "_report", counted)
    kept_by_threads(tmp_path / "file", 3, make)
    assert len(made) == 1
    said = f"waits for process {os.getpid()} to compile file (0 s)"
    assert capfd.readouterr().err.count(said) == 2


def test_who_is_killed_frees_the_lock(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cache, "_FIRST_REPORT_S", 0.0)
    target = tmp_path / "file"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"{target}.lock"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
    report = cache._report

    def kills(text: str) -> None:
        report(text)
        holder.kill()

    monkeypatch.setattr(cache, "_report", kills)
    kept_by_threads(target, 2, lambda path: path.write_text("made"))
    holder.wait()
    assert "waits for process of the test" in capfd.readouterr().err


def test_who_fails_lets_the_next_try(tmp_path):
    tries: list[int] = []

    def make(path: Path) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("no")
        path.write_text("made")

    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(cache.kept, tmp_path / "file", make).exception for _ in range(4)
        ]
        assert sum(answer(TIMEOUT_S) is not None for answer in answers) == 2
    assert len(tries) == 3


def test_who_has_waited_goes_on_with_the_others(tmp_path, monkeypatch):
    """One after another, processes of a large group would load for a minute."""
    monkeypatch.setattr(cache, "_FIRST_REPORT_S", 0.0)
    lock, both, reports = (
        tmp_path / "lock",
        threading.Barrier(2),
        threading.Semaphore(0),
    )
    monkeypatch.setattr(cache, "_report", lambda text: reports.release())

    def wait() -> None:
        with cache.one_at_a_time(lock, "it"):
            both.wait(TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        with cache.one_at_a_time(lock, "it"):
            others = [pool.submit(wait) for _ in range(2)]
            assert all(reports.acquire(timeout=TIMEOUT_S) for _ in others)
        for other in others:
            other.result(TIMEOUT_S)


def test_nobody_waits_for_ever(tmp_path, monkeypatch, capfd):
    """A process that is stopped keeps its lock."""
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.1)
    lock = tmp_path / "lock"
    with cache.one_at_a_time(lock, "it"), cache.one_at_a_time(lock, "it"):
        assert "waits for it no longer" in capfd.readouterr().err


def test_graphs_are_compiled_one_after_another(tmp_path, monkeypatch):
    """In any order, and different ones beside each other: with one lock this hangs."""
    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(tmp_path))
    compiling: list[str] = []
    both = threading.Barrier(2)

    def compile(session, model, **options):
        assert model.name not in compiling
        compiling.append(model.name)
        both.wait(TIMEOUT_S)
        compiling.remove(model.name)
        return model.name

    monkeypatch.setattr(InferenceSession, "compile", compile)
    for _ in range(2):
        cache.compile_once()
    graphs = []
    for name in ("first", "second"):
        with Graph(name) as graph:
            graph.output()
        graphs.append(graph)

    def run(order: list[Graph]) -> list[str]:
        return [InferenceSession.compile(None, graph) for graph in order]

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, order) for order in (graphs, graphs[::-1])]
        assert [r.result(TIMEOUT_S) for r in runs] == [
            ["first", "second"],
            ["second", "first"],
        ]
    assert len(list((tmp_path / "graphs").iterdir())) == 2


def made(path: Path) -> None:
    path.write_text("made")


@pytest.mark.parametrize("damage", [b"", b"mad", bytes(4), b"mode", None])
def test_a_damaged_file_is_made_again(tmp_path, capfd, damage):
    """Truncated, of zeros, or without the sum that stands beside it. Without the sums
    the damaged file is returned."""
    target = cache.kept(tmp_path / "file", made)
    assert capfd.readouterr().err == ""
    if damage is None:
        (tmp_path / "file.sum").unlink()
    else:
        target.write_bytes(damage)
    assert cache.kept(target, made).read_text() == "made"
    said = capfd.readouterr().err
    assert said == f"max_ep: {target} does not match its file.sum; made again\n"
    cache.kept(target, fails)
    assert sorted(os.listdir(tmp_path)) == ["file", "file.lock", "file.sum"]


def fails(path: Path) -> None:
    raise ValueError("the compiler's words")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(first: Any, *rest: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else first
            done.append(f"{name} {Path(path).name}")
            real(first, *rest)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    cache.kept(tmp_path / "file", made)
    assert done == [
        "fsync file",
        "fsync file.sum",
        "replace file.sum",
        "replace file",
        f"fsync {tmp_path.name}",
    ]


@pytest.mark.parametrize(
    "mode, owner, words",
    [
        (0o777, None, "has mode 777, so others may write to it"),
        (0o775, None, "has mode 775, so others may write to it"),
        (0o700, 1234, "belongs to user 1234, and this is user"),
    ],
)
def test_nothing_is_loaded_that_others_can_write(
    tmp_path, monkeypatch, mode, owner, words
):
    """It would run in this process. Also if the cache is what others can write, and
    what is in it looks well."""
    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_is_own", lambda state: False)  # the group
    target = cache.kept(tmp_path / "folder" / "file", made)
    tmp_path.chmod(mode)
    if owner is not None:
        monkeypatch.setattr(cache.os, "geteuid", lambda: 4321)
        if os.getuid() == 0:
            os.chown(tmp_path, owner, -1)
        else:
            words = words.replace("1234", str(os.getuid()))
    with raises(RuntimeError, f"{words}; MAX_EP_CACHE_DIR; {tmp_path}"):
        cache.kept(target, fails)
    with raises(RuntimeError, words):
        cache.lock_in_cache("graphs/0")


@pytest.fixture
def account() -> pwd.struct_passwd:
    """This user's; in some containers it has none."""
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        pytest.skip("this user has no account")


def test_a_group_of_one_may_write(account):
    """As `umask 002` lets it. A group with another name, or with members, is none."""
    name, gid = account.pw_name, account.pw_gid
    group = grp.getgrgid(gid)
    is_own = group.gr_name == name and set(group.gr_mem) <= {name}
    assert cache._is_own(SimpleNamespace(st_gid=gid)) == is_own
    assert not cache._is_own(SimpleNamespace(st_gid=gid + 1))


def test_folders_are_for_one_user(tmp_path):
    before = os.umask(0)
    try:
        target = cache.kept(tmp_path / "a" / "b" / "file", made)
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in target.parents[:2]}
    assert modes == {"0o700"}
    for name in ("file", "file.sum", "file.lock"):
        assert not target.with_name(name).stat().st_mode & 0o022, name


def test_a_lock_is_no_link(tmp_path):
    """What it points to stays as it is."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file.lock").symlink_to(victim)
    cache.kept(tmp_path / "file", made)
    assert victim.read_text() == "precious"


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", ["fsync", "compiler"])
def test_a_full_disk_is_said(tmp_path, monkeypatch, at):
    """Whoever meets it: a compiler has words of its own."""

    def make(path: Path) -> None:
        if at == "compiler":
            monkeypatch.setattr(os, "posix_fallocate", full)
            fails(path)
        made(path)

    if at == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    words = f"nothing can be kept in {tmp_path}: No space left on device; MAX_EP_CACHE"
    with raises(RuntimeError, words):
        cache.kept(tmp_path / "file", make)
    assert os.listdir(tmp_path) == ["file.lock"]


def test_other_errors_of_a_compiler_stay(tmp_path):
    with pytest.raises(ValueError, match="the compiler's words"):
        cache.kept(tmp_path / "file", fails)


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    words = f"nothing can be kept in {folder}: Not a directory; Set MAX_EP_CACHE_DIR"
    with raises(RuntimeError, words):
        cache.kept(folder / "file", made)


def test_a_folder_out_of_reach_is_said(tmp_path, monkeypatch):
    """Such as the home of another user. For root nothing is."""

    def refuse(*_: Any) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    words = f"nothing can be kept in {tmp_path}: Permission denied; MAX_EP_CACHE_DIR"
    with raises(RuntimeError, words):
        cache.kept(tmp_path / "file", made)


def test_where_the_cache_is(tmp_path, monkeypatch, account):
    """An empty variable is none; a relative one is where the process began."""
    monkeypatch.setattr(cache.os, "geteuid", os.geteuid)
    for name in ("MAX_EP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "")
    home = account.pw_dir
    assert cache.cache_dir() == Path(home, ".cache/max_ep")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_dir() == Path(home, ".cache/max_ep")
    monkeypatch.setattr(cache.os, "geteuid", lambda: 987654321)
    with raises(RuntimeError, "HOME is not set; user 987654321; Set MAX_EP_CACHE_DIR"):
        cache.cache_dir()
    monkeypatch.setenv("MAX_EP_CACHE_DIR", "relative")
    assert cache.cache_dir() == Path.cwd() / "relative"


# A library that MAX compiles when it is imported: with a compiler that takes its time,
# or leaves half of it.
IMPORT = """
import os, subprocess, sys, time
from pathlib import Path
import mojo.importer

def compile(source, target):
    os.write(2, b"compiles\\n")
    target.write_bytes(Path(sys.argv[1]).read_bytes()[: int(sys.argv[2])])
    time.sleep(1)
    target.write_bytes(Path(sys.argv[1]).read_bytes())

mojo.importer._compile_mojo_to_so = compile
sys.path.insert(0, os.getcwd())
import max_ep
import max._kv_cache_ops.kv_cache_ops as library
"""


@pytest.fixture
def imports(tmp_path) -> Callable[[int], list[subprocess.Popen]]:
    """Starts processes that import a copy of MAX's package of one library."""
    package = Path(
        *importlib.util.find_spec("max._kv_cache_ops").submodule_search_locations
    )
    folder = tmp_path / "max" / "_kv_cache_ops"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    shutil.copy(package / "kv_cache_ops.mojo", folder)
    import max._kv_cache_ops.kv_cache_ops as real

    def start(n: int) -> list[subprocess.Popen]:
        command = [sys.executable, "-c", IMPORT, real.__file__, "100"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        env = os.environ | {"PYTHONPATH": WHERE_WE_IMPORT}
        return [
            subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) for _ in range(n)
        ]

    return start


def test_one_process_compiles_max_s_library(imports, tmp_path):
    """Without the guard some load what is not finished: "file too short"."""
    processes = imports(4)
    said = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert "".join(said).count("compiles\n") == 1


@pytest.mark.parametrize("damage", [0, 100, -1])
def test_what_a_killed_process_left_is_made_again(imports, tmp_path, damage):
    """The first bytes of a library, or all but the last."""
    (first,) = imports(1)
    assert "compiles" in first.communicate(timeout=TIMEOUT_S)[1]
    (library,) = tmp_path.glob("max/_kv_cache_ops/__mojocache__/*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[:damage])
    (second,) = imports(1)
    said = second.communicate(timeout=TIMEOUT_S)[1]
    assert second.returncode == 0, said
    assert f"max_ep: {library} is damaged; it is made again\ncompiles\n" in said
    assert library.read_bytes() == whole


def test_a_library_that_cannot_be_removed_is_named(tmp_path):
    with raises(ImportError, f"MAX's library {tmp_path} is damaged; Reinstall max"):
        first_import._remove(str(tmp_path))  # a folder


IN_A_GROUP = """
import os
from max.engine import InferenceSession
from max_ep import EPConfig
from max.dtype import DType

print(hasattr(InferenceSession.compile, "__wrapped__"))
F32 = DType.float32
EPConfig(F32, F32, 64, 2, 8, 8, n_gpus_per_node=1, n_nodes=2, target="cpu")
print(hasattr(InferenceSession.compile, "__wrapped__"))
"""


@pytest.mark.parametrize("group, first", [("", "False"), ("a-group", "True")])
def test_a_group_compiles_once_without_launch(group, first):
    """Also what it compiles before it has an `EPCommInitializer`."""
    code = [sys.executable, "-c", IN_A_GROUP]
    said = printed(*code, PYTHONPATH=WHERE_WE_IMPORT, MAX_EP_GROUP=group)
    assert said.split() == [first, "True"]


def test_graphs_of_other_caches_are_others(tmp_path, monkeypatch):
    """MAX's cache may be empty, where a lock says that the graph is compiled."""
    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(InferenceSession, "compile", lambda *_, **__: None)
    cache.compile_once()
    with Graph("first") as graph:
        graph.output()
    for place in ("a", "b"):
        monkeypatch.setenv("MODULAR_CACHE_DIR", str(tmp_path / place))
        InferenceSession.compile(None, graph)
    assert len(list((tmp_path / "graphs").iterdir())) == 2
