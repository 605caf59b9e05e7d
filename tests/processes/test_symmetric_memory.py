# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of CPU ranks: who maps what, and what is left behind.

No MAX here, so a peer is a bare Python process that starts in a moment. Where
it does not matter that peers are processes, they are threads.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from max_ep.cache import one_at_a_time
from max_ep.limits import GROUP_VARIABLE, NODE_VARIABLE
from max_ep.memory import symmetric_memory
from max_ep.memory.symmetric_memory import LocalMemory, SharedMemory
from max_ep.processes import meeting, presence
from max_ep.processes.meeting import Meeting, process_state
from max_ep.processes.sockets import call, found, group_name
from tests.children import names_of
from tests.errors import raises, refused
from tests.processes.nonsense import NONSENSE

REGION_BYTES = 3 * 4096 + 256
"""Not a whole number of pages."""

STATUS_BYTES = 256
TIMEOUT_S = 10.0

_PRELUDE = """
import sys
from max_ep.memory.symmetric_memory import SharedMemory
group = sys.argv[1]
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def group() -> Iterator[str]:
    """A name; nothing of that name may be left when a test is done."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    assert names_of(name) == []


@pytest.fixture
def start(group: str) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts a process that runs some code; it prints lines, and reads lines."""
    with contextlib.ExitStack() as stack:

        def start_peer(code: str) -> subprocess.Popen:
            code = _PRELUDE + textwrap.dedent(code)
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            peer = subprocess.Popen([sys.executable, "-c", code, group], **pipes)
            stack.enter_context(peer)
            stack.callback(peer.kill)
            return peer

        yield start_peer


def hear(peer: subprocess.Popen) -> str:
    return peer.stdout.readline().strip()


def make(group, node_id, n_nodes=2, n_local_ranks=1, fingerprint="hidden_size=8"):
    sizes = n_nodes, n_local_ranks, REGION_BYTES
    return SharedMemory(group, node_id, *sizes, fingerprint, STATUS_BYTES)


def connect_all(memories):
    """Connects all at once; returns the table of each."""
    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(lambda memory: memory.connect(TIMEOUT_S), memories))


def errors_of(memories, timeout_s) -> list[BaseException]:
    """Connects all at once; returns what each raises."""
    with ThreadPoolExecutor(len(memories)) as pool:
        waits = [pool.submit(memory.connect, timeout_s) for memory in memories]
    return [wait.exception() for wait in waits]


def close_all(memories) -> None:
    for memory in memories:
        memory.close()


def test_memory_shows_who_died(group, start):
    """Status and region as it left them. After `close` all is refused, not read."""
    peer = start(
        f"""
        memory = SharedMemory(group, 1, 2, 1, {REGION_BYTES}, "hidden_size=8", 256)
        memory.connect({TIMEOUT_S})
        memory.status[:4] = b"peer"
        say("mapped")
        sys.stdin.readline()
        """
    )
    mine = make(group, 0)
    table = mine.connect(TIMEOUT_S)
    assert hear(peer) == "mapped" and names_of(group) == []

    def seen(node: int) -> tuple:
        owner = mine.owners[node]
        state = process_state(owner.pid, owner.started)
        return state, mine.is_closed(node), mine.read_status(node, 0, 0, 4)

    assert [seen(0), seen(1)] == [("", False, bytes(4)), ("", False, b"peer")]
    peer.send_signal(signal.SIGSTOP)
    while seen(1)[0] != "is stopped":
        time.sleep(0.01)
    peer.kill()
    peer.wait()
    assert seen(1) == ("is dead", False, b"peer")
    write(table[1] + 8, b"region")
    assert mine.read_region(1, 0, 8, 6) == b"region"
    mine.close()
    with pytest.raises(ValueError, match="closed"):
        mine.read_status(1, 0, 0, 4)


def read(address: int, n: int = 8) -> bytes:
    return ctypes.string_at(address, n)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def n_mappings(name: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


# ------------------------------------------------------------------ one process


def test_local_memory_is_zero_and_writable_to_its_ends():
    before = n_mappings("/dev/zero")
    memory = LocalMemory(3, REGION_BYTES)
    addresses = memory.local_addresses()
    assert n_mappings("/dev/zero") > before
    assert len(set(addresses)) == 3
    for value in range(2):
        for i, address in enumerate(addresses):
            assert address % 256 == 0
            wanted = bytes([value * (i + 1)]) * REGION_BYTES
            assert read(address, REGION_BYTES) == wanted
        for i, address in enumerate(addresses):
            write(address, bytes([i + 1]) * REGION_BYTES)
    memory.close()
    memory.close()
    assert memory.local_addresses() == []
    assert n_mappings("/dev/zero") == before


# ---------------------------------------------------------------------- sharing


def test_every_rank_has_one_address_for_the_same_bytes(group):
    """Many nodes of two ranks: what one writes, all read, and nothing else."""
    n = 40
    memories = [make(group, node, n, 2) for node in range(n)]
    own = [memory.local_addresses() for memory in memories]
    tables = connect_all(memories)
    for node, table in enumerate(tables):
        assert len(table) == 2 * n
        assert table[2 * node : 2 * node + 2] == own[node]
        assert all(address % 256 == 0 for address in table)
    for address in tables[0]:
        assert read(address, REGION_BYTES) == bytes(REGION_BYTES)
    for rank in range(2 * n):
        writer = (rank // 2 + 1) % n  # not the owner
        write(tables[writer][rank], bytes([rank + 1]) * REGION_BYTES)
        status = memories[rank // 2].status
        assert len(status) == 2 * STATUS_BYTES
        begin = rank % 2 * STATUS_BYTES
        status[begin : begin + 4] = bytes([rank + 101]) * 4
    for memory, table in zip(memories, tables):
        for rank, address in enumerate(table):
            assert read(address, REGION_BYTES) == bytes([rank + 1]) * REGION_BYTES
            assert memory.read_region(*divmod(rank, 2), 0, 4) == bytes([rank + 1]) * 4
            assert memory.read_status(*divmod(rank, 2), 0, 4) == bytes([rank + 101]) * 4
    close_all(memories)


def test_what_is_given_back(group):
    """No names once connected; peers keep what one of them has given back."""
    name = f"max_ep-{group}"
    memories = [make(group, node) for node in range(2)]
    names = [f"@max_ep/{group_name(group)}-{node}/meet" for node in range(2)]
    assert names_of(group) == names
    tables = connect_all(memories)
    assert names_of(group) == []
    write(tables[0][0], b"still ok")
    assert n_mappings(name) == 6 and not memories[1].is_closed(0)
    for _ in range(2):
        memories[0].close()
        assert n_mappings(name) == 3 and memories[1].is_closed(0)
    assert read(tables[1][0]) == b"still ok"
    memories[1].close()
    assert n_mappings(name) == 0


def test_memory_that_cannot_be_mapped_leaves_the_old(group):
    memory = make(group, 0, 1)
    before = memory.local_addresses()
    with pytest.raises((OSError, ValueError)):
        memory._map(0, os.open("/dev/null", os.O_RDONLY))
    assert memory.local_addresses() == before and not memory.is_closed(0)
    memory.close()


def test_memory_is_taken_when_made(group):
    """Or a kernel that comes to it is killed."""
    memory = SharedMemory(group, 0, 2, 1, 64 << 20, "")
    assert os.fstat(memory._descriptor).st_blocks * 512 >= 64 << 20
    memory.close()
    memory.close()


@pytest.mark.parametrize("slow_node", [0, 1, 2])
def test_again_and_again_under_one_name(group, slow_node):
    """A fast node must not take the memory of the round before, of a node that loses
    its core before it answers, and when all have."""
    n_nodes, n_rounds = 3, 4

    def run(node_id: int) -> None:
        for _ in range(n_rounds):
            memory = make(group, node_id, n_nodes)
            meet = memory._meeting.meet

            def slowly(*arguments, meet=meet):
                time.sleep(0.02)
                found = meet(*arguments)
                time.sleep(0.05)
                return found

            if node_id == slow_node:
                memory._meeting.meet = slowly
            memory.connect(TIMEOUT_S)
            memory.close()

    with ThreadPoolExecutor(n_nodes) as pool:
        list(pool.map(run, range(n_nodes)))


def test_a_process_that_joins_is_mapped(group):
    """In place of the one that was there. Who does not come is named, and in its place
    stands what was there, or memory of nobody: launches write there."""
    first, old = (make(group, node, 3) for node in range(2))
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda m: m.connect(TIMEOUT_S, absent=[2]), (first, old))
        assert all(both)
    write(old.local_addresses()[0], b"the last")
    new = make(group, 1, 3)
    new.withdraw()
    assert names_of(group) == []
    n_handles = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(2) as pool:
        given = ({1}, {0}), (7, 7), 2 * (time.monotonic() + TIMEOUT_S,)
        assert [*pool.map(SharedMemory.trade, (first, new), *given)] == [set(), set()]
    (address,), (back,) = first.map(1), new.map(0)
    assert read(address) == bytes(8) and first.owners[1] == new.owner
    write(address, b"replaced")
    write(back, b"to first")
    assert read(new.local_addresses()[0]) == b"replaced"
    assert read(first.local_addresses()[0]) == b"to first"
    assert first.trade({1, 2}, 8, time.monotonic()) == {1, 2}
    assert read(first.map(1)[0]) == b"replaced"
    (nobodys,) = first.map(2)
    write(nobodys, b"anything")
    assert read(old.local_addresses()[0]) == b"the last" and 2 not in first.owners
    # A mapping has one: `new` has mapped `first`.
    assert len(os.listdir("/proc/self/fd")) == n_handles + 1
    close_all((first, old, new))


# --------------------------------------------------------------- who has the name

_HANG = f"""
memory = SharedMemory(group, 1, 2, 1, {REGION_BYTES}, "hidden_size=8", 256)
say("there")
sys.stdin.readline()
memory.connect({TIMEOUT_S})
say("connected")
"""


@pytest.fixture
def hung(start) -> subprocess.Popen:
    """Node 1, which is there, and answers once it has read a line."""
    peer = start(_HANG)
    assert hear(peer) == "there"
    return peer


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


# ------------------------------------------------------------------------ errors


def test_too_little_memory_is_an_error_at_once(group):
    """Before the system kills somebody for it."""
    wanted, handles = 1 << 45, set(os.listdir("/proc/self/fd"))
    words = f"no memory for {wanted + 4096} bytes of node 0: .*Lower max_tokens"
    with pytest.raises(MemoryError, match=words):
        SharedMemory(group, 0, 2, 1, wanted, "")
    assert names_of(group) == []
    assert set(os.listdir("/proc/self/fd")) == handles


def test_memory_that_others_take_meanwhile_is_an_error(group, monkeypatch):
    """Each process would see that its own fits, and the system kill one of them."""
    free = iter([1 << 30, (128 << 20) - 1, 7])
    monkeypatch.setattr(symmetric_memory, "_memory_free", lambda: next(free))
    words = f"no memory for {(192 << 20) + 4096} bytes of node 0: 7 bytes are free"
    with pytest.raises(MemoryError, match=words):
        SharedMemory(group, 0, 2, 1, 192 << 20, "")


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
    handles = len(os.listdir("/proc/self/fd"))
    assert 2 * len(NONSENSE) < meeting._MOST_GUESTS
    lines = [line for node in range(2) for line in strange_calls(group, node)]
    connect_all(memories)
    for line in lines:
        line.close()
    # Two listeners are gone, and each has mapped the other.
    assert len(os.listdir("/proc/self/fd")) == handles
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


def test_peer_that_does_not_come_is_named(group):
    memories = [make(group, node, 3) for node in (0, 2)]
    begin = time.monotonic()
    errors = errors_of(memories, 0.5)
    assert 0.4 < time.monotonic() - begin < 2
    for node_id, error in zip((0, 2), errors):
        assert isinstance(error, TimeoutError)
        said = f"node {node_id} waited 0.5 s for nodes [1] of group {group!r} to start:"
        assert f"{said} node 1 is not there. Start all 3 processes" in str(error)
        assert "as with another configuration, has said why" in str(error)
    assert names_of(group) == []


def test_peer_that_hangs_is_named(group, hung):
    """Also if it is stopped. Who waits for it answers others meanwhile: all blame it,
    and what has come from them is closed."""
    handles = set(os.listdir("/proc/self/fd"))
    process = f"process {hung.pid}"
    for state in ("", " is stopped"):
        for error in errors_of([make(group, node, 3) for node in (0, 2)], 0.3):
            assert isinstance(error, TimeoutError)
            said = f"for nodes [1] of group {group!r} to start: node 1 does not answer"
            assert f"{said} ({process}{state}). Start" in str(error)
        hung.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, hung.pid, os.WSTOPPED | os.WNOWAIT)
    assert set(os.listdir("/proc/self/fd")) == handles


def test_a_full_queue_holds_up_nobody(group, start):
    """A node listens, is stopped, and has more calls than its system lets wait: a call
    that waits until it is accepted would wait for ever."""
    stopped = start(
        "from max_ep.processes import sockets\nsockets._BACKLOG = 2\n" + _HANG
    )
    assert hear(stopped) == "there"
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    (name,) = found(f"{group_name(group)}-1/meet")
    with contextlib.ExitStack() as stack:
        while (line := call(name)) is not None:
            stack.enter_context(line)
        begin = time.monotonic()
        for error in errors_of([make(group, node, 3) for node in (0, 2)], 0.3):
            assert isinstance(error, TimeoutError)
            assert "node 1 does not answer. Start" in str(error)
        assert time.monotonic() - begin < 5


def test_who_waits_says_what_the_others_do(group, start, monkeypatch, capfd):
    """Also of one that does not run: it need not answer."""
    monkeypatch.setattr(meeting, "_REPORT_EVERY_S", 0.2)
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


@refused("""
LocalMemory(2, 1 << 50) | no memory for 2 regions of
make("", 0) | group=; 1 to 80 bytes without '/'
make("a/b", 0) | group=; 1 to 80 bytes without '/'
make("a\\0", 0) | group=; 1 to 80 bytes without '/'
make("x" * 81, 0) | group=; 1 to 80 bytes without '/'
make("a\\n", 0) | group=; 1 to 80 bytes without '/'
make("\\ud800", 0) | group=; 1 to 80 bytes without '/'
make(7, 0) | group=7 names sockets; 1 to 80 bytes without '/'
""")
def test_memory_that_cannot_be(arguments, words):
    with raises((MemoryError, ValueError), words):
        eval(arguments, globals())
