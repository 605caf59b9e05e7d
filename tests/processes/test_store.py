# SPDX-License-Identifier: Apache-2.0
"""The store that processes of several hosts share, and their agreement over it.

Seen to fail: a store that takes any decision, that shows all lines as open, that keeps
groups; a process that does not say its text again, that takes another store, whose
clock is its own, that begins at decision 0.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from max_ep.processes import store as store_module
from max_ep.processes.meeting import Owner
from max_ep.processes.membership import GONE, MEMBER, Membership, RankExpelled
from max_ep.processes.notes import NotesInStore
from max_ep.processes.store import StoreLine, StoreLost, StoreServer, parse_address
from tests.errors import raises, refused

AHEAD_S = 1e6
"""How much later it is where the store runs."""


@pytest.fixture
def server(monkeypatch) -> Iterator[StoreServer]:
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + AHEAD_S)
    monkeypatch.setattr(store_module, "time", clock)
    with contextlib.closing(StoreServer("127.0.0.1")) as server:
        yield server


def address(server: StoreServer) -> str:
    return f"127.0.0.1:{server.port}"


def until(holds: Callable[[], bool]) -> None:
    """A line that has ended is noticed by the thread that reads it."""
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_first_of_a_number_counts(server):
    """Also after one of a higher number: a store that takes any fails."""
    first, other = (StoreLine(address(server), "group", node) for node in range(2))
    first.ask(number=1, decision="a")
    state = other.ask(number=1, decision="b")
    assert (state.number, state.decision) == (1, "a")
    assert other.ask(number=3, decision="c").decision == "c"
    assert first.ask(number=2, decision="d").decision == "c"
    assert StoreLine(address(server), "another", 0).ask().number == 0


def test_a_line_that_ends_is_a_death(server):
    """Its text stays; the next process of the node has a line of its own."""
    stays, ends = (StoreLine(address(server), "group", node) for node in range(2))
    ends.ask("text")
    (text,) = stays.ask().texts
    assert (text.node, text.text, text.is_alive) == (1, "text", True)
    ends.close()
    until(lambda: not stays.ask().texts[0].is_alive)
    assert stays.ask().texts[0].text == "text"
    again = StoreLine(address(server), "group", 1)
    assert not again.ask().texts[0].is_alive
    assert again.ask("new").texts[0].is_alive


def test_a_line_is_opened_again(server):
    """After a fault of the network; the process says again what it said last."""
    stays, breaks = (StoreLine(address(server), "group", node) for node in range(2))
    breaks.ask("text")
    stays.ask()
    breaks._line.shutdown(socket.SHUT_RDWR)
    until(lambda: not stays.ask().texts[0].is_alive)
    assert breaks.ask().texts[0].is_alive


def test_a_group_is_forgotten_with_its_last_line(server):
    """So the next of its name finds no decision of it."""
    last = StoreLine(address(server), "group", 0)
    last.ask("text", 7, "decision")
    last.close()

    def is_forgotten() -> bool:
        with contextlib.closing(StoreLine(address(server), "group", 0)) as other:
            state = other.ask()
        return not state.texts and state.number == 0

    until(is_forgotten)


@pytest.mark.parametrize("text", [b"[]\n", b"\xff\n", b"GET / HTTP/1.1\r\n", b"x"])
def test_what_is_no_request_ends_its_line(server, text):
    with socket.create_connection(("127.0.0.1", server.port), 60) as stranger:
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    assert StoreLine(address(server), "group", 0).ask().number == 0


def test_a_store_that_is_lost_is_named(server):
    """Nobody agrees with a store that has forgotten what was agreed."""
    member = StoreLine(address(server), "group", 3)
    member.ask("text")
    server.close()
    member._line.shutdown(socket.SHUT_RDWR)
    with raises(StoreLost, "MAX_EP_STORE; does not answer; Ranks go on; nobody can"):
        member.ask()
    with contextlib.closing(StoreServer("127.0.0.1", server.port)):
        with raises(StoreLost, "was started again, and has forgotten; end all proc"):
            member.ask()
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.listen()
        talks = StoreLine(f"127.0.0.1:{other.getsockname()[1]}", "group", 0)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(talks.ask)
            line, _ = other.accept()
            line.sendall(b"hello\n")
            with raises(StoreLost, "answers what no store of max_ep does"):
                asked.result()
            line.close()


@refused("""
29500 | MAX_EP_STORE='29500' must be HOST:PORT; python -m max_ep.processes.store
host:0 | 'host:0'
host:port | 'host:port'
""")
def test_what_is_no_address(arguments, words):
    with raises(ValueError, words):
        parse_address(arguments)


# ----------------------------------------------------------------------- agreement


@pytest.fixture
def members(server) -> Iterator[Callable[..., Membership]]:
    made = []

    def make(node: int, timeout_s: float = 60.0) -> Membership:
        notes = NotesInStore(address(server), "group", node)
        made.append(Membership("group", node, 3, Owner.myself(""), timeout_s, notes))
        return made[-1]

    yield make
    for member in made:
        member.close()


def test_members_agree(members):
    """Whatever the clock of the store is: one that does not come costs a time-out."""
    all_ = [members(node) for node in range(3)]
    for member in all_:
        assert not member.is_running()
        assert abs(member._notes.now_s() - time.monotonic() - AHEAD_S) < 1
        member.begin()
    for member in all_:
        member.publish(state=MEMBER)

    def reconcile(member: Membership) -> list[int]:
        return member.reconcile([], [1]).members

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(reconcile, all_)) == 3 * [[0, 1, 2]]
        begin_s = time.monotonic()
        for member in all_[:2]:
            member._timeout_s = 2.0
        assert list(pool.map(reconcile, all_[:2])) == 2 * [[0, 1]]
        assert 1.9 < time.monotonic() - begin_s < 30
        for member in all_[:2]:
            member._timeout_s = 60.0
        with raises(RankExpelled, "goes on without node 2"):
            reconcile(all_[2])
        joins = pool.submit(all_[2].join, 60.0)
        until(lambda: all_[0].note(2).state == "joining")
        assert list(pool.map(reconcile, all_[:2])) == 2 * [[0, 1, 2]]
        assert joins.result().joined == [2]
        assert 0 < all_[0].left_s() <= 60
        assert list(pool.map(lambda member: member.meet(), all_)) == 3 * [[]]


def test_who_has_died_is_not_awaited(members):
    """Its process is on another host: nobody can look."""
    stays, dies = members(0), os.fork()
    if dies == 0:
        members(1).publish(state=MEMBER)
        time.sleep(600)
        os._exit(0)
    stays.publish(state=MEMBER)
    stays.decision.members.remove(2)
    until(lambda: stays.note(1) is not None)
    with ThreadPoolExecutor() as pool:
        decided = pool.submit(stays.reconcile, [], [1])
        time.sleep(0.1)
        assert not decided.done()
        os.kill(dies, signal.SIGKILL)
        assert decided.result(30).members == [0]
    os.waitpid(dies, 0)
    assert stays.note(1).state == GONE


def test_a_group_begins_after_the_decisions_of_another(members):
    """Its name is the same, and one of its processes still has a line."""
    old = members(0)
    old.publish(state=GONE)
    old._decide(old.decision.__class__(5, [0], [], []))
    new = members(1)
    assert not new.is_running()
    new.begin()
    new.decision.members[:] = [1]
    new.publish(state=MEMBER)
    assert new.reconcile([], [1]).epoch == 6
