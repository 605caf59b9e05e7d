# SPDX-License-Identifier: Apache-2.0
"""`launch` supervises: who fails is named, and nobody outlives the group."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from max_ep import LaunchError, launch
from tests.children import WHERE_WE_IMPORT
from tests.errors import raises, refused
from tests.processes import launched

pytestmark = pytest.mark.usefixtures("all_cores")

TIMEOUT_S = 120


def until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not (is_so := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so


def test_one_failure_ends_the_others(tmp_path, monkeypatch):
    """Not after their time-out. The first cause comes first; who has seen something
    says it."""
    member = launch.__globals__["_Member"]
    outcome = member.outcome

    def noted(of: Any) -> Any:
        if (found := outcome(of)) is not None:
            launched.note(str(tmp_path), f"taken-{of.node_id}", "")
        return found

    monkeypatch.setattr(member, "outcome", noted)
    began = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(launched.first_fails, 3, (str(tmp_path),), timeout_s=3600)
    assert time.monotonic() - began < TIMEOUT_S
    failures = caught.value.failures
    assert list(failures) == [1, 0, 2]
    assert str(caught.value).startswith("node 1: Traceback")
    assert "LookupError: the first cause" in failures[1]
    assert "TimeoutError: waited for node 1" in failures[0]
    assert failures[2] == "no result 5 s after node 1 failed; killed"


@pytest.mark.parametrize(
    "how, words",
    [
        ("half", r"died while it answered (exit code -9; 1000 of 1048"),
        ("unreadable", "its result cannot be unpickled: ValueError: invalid literal"),
        ("unwritable", "its result, of <class 'function'>, cannot be pickled: "),
    ],
)
def test_a_bad_answer_names_its_node(how, words):
    """Without a length in front, half an answer is an `UnpicklingError`."""
    with pytest.raises(LaunchError) as caught:
        launch(launched.answer, 2, (how,), timeout_s=TIMEOUT_S)
    assert list(caught.value.failures) == [1]
    assert caught.value.failures[1].startswith(words)


def test_an_answer_may_be_large():
    assert (
        launch(launched.answer, 2, ("well",), timeout_s=TIMEOUT_S)
        == [bytes(1 << 20)] * 2
    )


@refused("""
n_nodes="2" | n_nodes='2': pass how many processes, an integer from 1 to 128
n_nodes=True | n_nodes=True
n_nodes=2.0 | n_nodes=2.0
n_nodes=10**6 | n_nodes=1000000
n_nodes=-1 | n_nodes=-1
timeout_s=None | timeout_s=None: pass seconds, a finite number above 0
timeout_s="60" | timeout_s='60'
timeout_s=float("nan") | timeout_s=nan
timeout_s=float("inf") | timeout_s=inf
timeout_s=0 | timeout_s=0
timeout_s=True | timeout_s=True
function="print" | function='print' must be a function
""")
def test_wrong_arguments_are_named(arguments, words):
    """Before a process starts."""
    given = dict(function=print, n_nodes=2) | eval(f"dict({arguments})")
    with raises((ValueError, TypeError), words):
        launch(**given)


def test_what_cannot_be_started_is_named(monkeypatch):
    """The one that has started ends."""
    started, names = launch.__globals__["_started"], []

    def start(task, node_id, group):
        if node_id == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        names.append(started(task, node_id, group))
        return names[0]

    monkeypatch.setitem(launch.__globals__, "_started", start)
    with raises(LaunchError, "node 1: cannot be started: Resource temporarily"):
        launch(time.sleep, 2, timeout_s=TIMEOUT_S)
    assert not names[0].process.is_alive()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # nobody looks after it


@pytest.mark.parametrize(
    "how, handler, status",
    [
        (signal.SIGTERM, "none", -signal.SIGTERM),
        (signal.SIGTERM, "own", 3),
        (signal.SIGKILL, "none", -signal.SIGKILL),
    ],
)
def test_children_end_with_their_parent(tmp_path, how, handler, status):
    """After a SIGTERM, what they started ends, too: it stands for a compiler."""
    parent = subprocess.Popen(
        [sys.executable, "-m", launched.__name__, tmp_path, handler],
        env=os.environ | {"PYTHONPATH": WHERE_WE_IMPORT},
        stderr=subprocess.DEVNULL,
    )
    pids: dict[str, int] = {}
    try:
        assert until(lambda: len(list(tmp_path.glob("member-*"))) == 2)
        pids = {p.name: int(p.read_text()) for p in tmp_path.glob("[mc]*")}
        parent.send_signal(how)
        assert parent.wait(TIMEOUT_S) == status
        assert len(pids) == 4
        if how == signal.SIGKILL:
            members = [pid for name, pid in pids.items() if "member" in name]
        else:
            members = list(pids.values())
        assert until(lambda: all(map(is_gone, members)))
    finally:
        parent.kill()
        parent.wait()
        for pid in pids.values():
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
