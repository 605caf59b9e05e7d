# SPDX-License-Identifier: Apache-2.0
"""One of several processes compiles, the others wait; the kernel frees the lock.

Threads stand for processes: each opens the lock's file by itself.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from max.engine import InferenceSession
from max.graph import Graph

from max_ep import cache

TIMEOUT_S = 60

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
