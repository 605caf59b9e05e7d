# SPDX-License-Identifier: Apache-2.0
"""How processes find each other: who has a name, who is waited for, who is ignored."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from max_ep.cache import one_at_a_time
from max_ep.limits import GROUP_VARIABLE, NODE_VARIABLE
from max_ep.processes import meeting, presence
from max_ep.processes.meeting import Meeting
from max_ep.processes.sockets import call, found, group_name
from tests.children import handles, names_of, new_handles
from tests.processes.memories import (
    HANG,
    REGION_BYTES,
    TIMEOUT_S,
    close_all,
    connect_all,
    errors_of,
    hear,
    make,
    read,
    write,
)
from tests.processes.nonsense import NONSENSE


@pytest.mark.parametrize("is_zombie", [False, True])
def test_the_dead_leave_nothing(group, hung, is_zombie):
    """Nor does a killed process whose parent has not looked yet."""
    assert names_of(group)  # or this test would show nothing
    hung.kill()
    os.waitid(os.P_PID, hung.pid, os.WEXITED | (os.WNOWAIT if is_zombie else 0))
    memories = [make(group, node) for node in range(2)]
    tables = connect_all(memories)
    write(tables[0][1], b"to node1")
    assert read(memories[1].local_addresses()[0]) == b"to node1"
    close_all(memories)


def test_what_a_dead_process_has_forked_is_not_it(group, start):
    """A child has the sockets of its parent, and answers none."""
    peer = start(f"""
        import os, time
        memory = SharedMemory(group, 1, 2, 1, {REGION_BYTES}, "hidden_size=8", 256)
        child = os.fork()
        if child == 0:
            time.sleep(600)
        say(child)
        sys.stdin.readline()
        """)
    child = int(hear(peer))
    try:
        peer.kill()
        peer.wait()
        assert names_of(group)  # or this test would show nothing
        memories = [make(group, node) for node in range(2)]
        connect_all(memories)
        close_all(memories)
    finally:
        os.kill(child, signal.SIGKILL)
    while names_of(group):  # until it has ended
        time.sleep(0.01)


def test_living_owner_is_not_replaced(group, hung):
    with pytest.raises(
        RuntimeError, match=f"node 1 of group .* already taken by process {hung.pid};"
    ):
        make(group, 1)
    # And it goes on as if nothing had been.
    memory = make(group, 0)
    hung.stdin.write("\n")
    hung.stdin.flush()
    memory.connect(TIMEOUT_S)
    assert hear(hung) == "connected"
    memory.close()


def strange_calls(group: str, node: int) -> list[socket.socket]:
    """Calls of a process of this user that says nonsense, with a descriptor or none or
    many, or nothing."""
    (name,) = found(f"{group_name(group)}-{node}/meet")
    lines = [call(name) for _ in range(2 * len(NONSENSE) + 2)]
    for i, text in enumerate(2 * NONSENSE):
        socket.send_fds(lines[i], [text], [] if i < len(NONSENSE) else [0, 1, 2])
    lines[-1].close()
    return lines


def test_what_another_program_says_is_ignored(group):
    """It may find a node's socket. Its descriptors are closed, and who waits for what
    it says does not wait for that alone."""
    memories = [make(group, node) for node in range(2)]
    before = handles()
    assert 2 * len(NONSENSE) < meeting._MOST_GUESTS
    lines = [line for node in range(2) for line in strange_calls(group, node)]
    connect_all(memories)
    for line in lines:
        line.close()
    # Each has mapped the other.
    opened = new_handles(before, 2)
    assert len(opened) == 2 and all("memfd" in name for name in opened)
    close_all(memories)


def test_strangers_who_say_nothing_hold_up_nobody(group, monkeypatch):
    """Or have spoken and are sent away: there are more than a process listens to."""
    monkeypatch.setattr(meeting, "_MOST_GUESTS", 8)
    memories = [make(group, node, 3) for node in range(3)]
    (name,) = found(f"{group_name(group)}-0/meet")
    (other,) = found(f"{group_name(group)}-2/meet")
    silent = [call(name) for _ in range(100)]
    for _ in range(100):
        silent.append(call(other))
        silent[-1].send(b"7")
    connect_all(memories)
    for line in silent:
        line.close()
    close_all(memories)


def test_what_is_no_memory_is_not_taken(group):
    """Though it comes with the words of a peer."""
    mine, peer = make(group, 0), make(group, 1)
    hello = json.loads(peer._meeting._hello)
    (name,) = found(f"{group_name(group)}-0/meet")
    too_small = os.memfd_create("x")
    with call(name) as first, call(name) as second:
        for line, descriptor in ((first, 0), (second, too_small)):
            socket.send_fds(line, [json.dumps(hello).encode()], [descriptor])
        connect_all([mine, peer])
    os.close(too_small)
    close_all((mine, peer))


def errors_without_node_1(group: str) -> tuple[float, list[BaseException]]:
    """Connects nodes 0 and 2 of three; returns how long they waited, and what each
    raises. On a busy machine they may need more time to meet each other."""
    for timeout_s in (0.3, 3.0, 30.0):
        errors = errors_of([make(group, node, 3) for node in (0, 2)], timeout_s)
        if all("for nodes [1] of" in str(error) for error in errors):
            break
    return timeout_s, errors


def test_peer_that_does_not_come_is_named(group):
    begin = time.monotonic()
    timeout_s, errors = errors_without_node_1(group)
    assert time.monotonic() - begin >= timeout_s
    for node_id, error in zip((0, 2), errors):
        assert isinstance(error, TimeoutError)
        waited = f"node {node_id} waited {timeout_s:g} s for nodes [1]"
        said = f"{waited} of group {group!r} to start:"
        assert f"{said} node 1 is not there. Start all 3 processes" in str(error)
        assert "as with another configuration, has said why" in str(error)
    assert names_of(group) == []


def test_peer_that_hangs_is_named(group, hung):
    """Also if it is stopped. Who waits for it answers others meanwhile: all blame it,
    and what has come from them is closed."""
    before = handles()
    process = f"process {hung.pid}"
    for state in ("", " is stopped"):
        for error in errors_without_node_1(group)[1]:
            assert isinstance(error, TimeoutError)
            said = f"for nodes [1] of group {group!r} to start: node 1 does not answer"
            assert f"{said} ({process}{state}). Start" in str(error)
        hung.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, hung.pid, os.WSTOPPED | os.WNOWAIT)
    assert not new_handles(before)


def test_a_full_queue_holds_up_nobody(group, start):
    """A node listens, is stopped, and has more calls than its system lets wait: a call
    that waits until it is accepted would wait for ever."""
    stopped = start(
        "from max_ep.processes import sockets\nsockets._BACKLOG = 2\n" + HANG
    )
    assert hear(stopped) == "there"
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    (name,) = found(f"{group_name(group)}-1/meet")
    with contextlib.ExitStack() as stack:
        while (line := call(name)) is not None:
            stack.enter_context(line)
        for error in errors_without_node_1(group)[1]:
            assert isinstance(error, TimeoutError)
            assert "node 1 does not answer. Start" in str(error)


def test_who_waits_says_what_the_others_do(group, start, monkeypatch, capfd):
    """Also of one that does not run: it need not answer."""
    monkeypatch.setattr(meeting, "_REPORT_EVERY_S", 0.0)
    busy = start("""
        from max_ep.processes import presence
        presence.show(group, 1)
        with presence.doing("compiles graph layer"):
            say("there")
            sys.stdin.readline()
        say("loads")
        sys.stdin.readline()
        """)
    assert hear(busy) == "there"
    busy.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
    does = f"node 1 compiles graph layer (process {busy.pid})"
    (error,) = errors_of([make(group, 0, 4)], 0.5)
    assert f"{does}, nodes 2, 3 are not there. Start" in str(error)
    said = capfd.readouterr().err.splitlines()
    whom = re.escape(f"max_ep: node 0 waits for nodes [1, 2, 3] of group {group!r} (")
    wanted = rf"{whom}\d+ s\): {re.escape(does)}, nodes 2, 3 are not there"
    assert said and all(re.fullmatch(wanted, line) for line in said), said
    busy.send_signal(signal.SIGCONT)
    busy.stdin.write("\n")
    busy.stdin.flush()
    assert hear(busy) == "loads"
    assert presence.what_does(group, 1) == f"is loading (process {busy.pid})"
    with make(group, 1)._meeting._listener:  # has come
        presence.show(group, 2)
        assert presence.what_does(group, 2) == f"is loading (process {os.getpid()})"
        make(group, 2, 3).close()
        assert presence.what_does(group, 2) == ""


def test_a_process_that_compiles_says_so(group, tmp_path, monkeypatch):
    """Before it has an `EPCommInitializer`, and while another compiles."""
    monkeypatch.setenv(GROUP_VARIABLE, group)
    monkeypatch.setenv(NODE_VARIABLE, "1")
    lock = tmp_path / "graph.lock"

    def does() -> str:
        return presence.what_does(group, 1).rpartition(" (")[0]

    def wait_and_load() -> str:
        with one_at_a_time(lock, "graph layer"):
            return does()

    with ThreadPoolExecutor() as pool:
        with one_at_a_time(lock, "graph layer"):
            assert does() == "compiles graph layer"
            waits = pool.submit(wait_and_load)
            while does() != "waits for another to compile graph layer":
                time.sleep(0.01)
        assert waits.result() == "loads graph layer"
    assert does() == ""


def test_another_configuration_is_refused(group):
    """All that are there hear of it, not only the two that meet: the others would wait
    for those until time is up."""
    sizes = {node: 16 if node == 1 else 8 for node in (0, 2, 3, 1)}
    memories = [
        make(group, node, 4, fingerprint=f"top_k=2, hidden_size={size}")
        for node, size in sizes.items()
    ]
    begin = time.monotonic()
    errors = errors_of(memories, TIMEOUT_S)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    assert all(isinstance(error, ValueError) for error in errors), errors
    errors = list(map(str, errors))
    assert all("another configuration: hidden_size=" in x for x in errors), errors
    # The first to look sees both; the others may hear of it.
    assert any("hidden_size=8" in x and "hidden_size=16" in x for x in errors), errors
    assert not any("top_k" in x for x in errors), "what is the same is not shown"
    assert names_of(group) == []


def test_a_group_meets_in_each_epoch(group):
    """Also under its longest name, and while an earlier meeting is open."""
    long = (group + 80 * "x")[:80]
    first = Meeting(long, 0, 1, "same")
    for epoch in (1, 2**40):
        assert Meeting(long, 0, 1, "same", epoch).meet(0, TIMEOUT_S) == {}
    first.close()


def test_another_users_process_is_not_met(group, monkeypatch):
    """It could bind the name first. Nothing is passed to it, and nothing taken."""
    meetings = [Meeting(group, node, 2, "") for node in range(2)]
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(meeting.meet, 0, 0.2) for meeting in meetings]
        for wait in waits:
            assert isinstance(wait.exception(), TimeoutError)
