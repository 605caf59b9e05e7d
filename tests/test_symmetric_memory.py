# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of CPU ranks: who maps what, and what is left behind.

No MAX here, so a peer is a bare Python process that starts in a moment. Where
it does not matter that peers are processes, they are threads.
"""

import _posixshmem
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from errors import raises, refused

from max_ep.memory import symmetric_memory
from max_ep.memory.symmetric_memory import (
    LocalMemory,
    SharedMemory,
    process_state,
    segments_of,
    shared_memory_free,
    unlink_group,
)

REGION_BYTES = 3 * 4096 + 256
"""Not a whole number of pages."""

TIMEOUT_S = 10.0

_PRELUDE = """
import ctypes, importlib.util, os, signal, sys, threading, time
spec = importlib.util.spec_from_file_location("symmetric_memory", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
SharedMemory, group = module.SharedMemory, sys.argv[2]
def say(*words):
    print(*words, flush=True)
"""


class Peer:
    """A process that runs some code; it prints lines, and reads lines."""

    def __init__(self, group: str, code: str) -> None:
        source = symmetric_memory.__file__
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), source, group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        code = self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()
        return code


@pytest.fixture
def group() -> Iterator[str]:
    """A name; nothing of that name may be left when a test is done."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    left = names_of(name)
    unlink_group(name, 8)
    assert left == []


@pytest.fixture
def start(group: str) -> Iterator[Callable[[str], Peer]]:
    peers: list[Peer] = []

    def start_peer(code: str) -> Peer:
        peers.append(Peer(group, code))
        return peers[-1]

    yield start_peer
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


def names_of(group: str) -> list[str]:
    prefix = f"max_ep-{group}-"
    return sorted(n[len(prefix) :] for n in os.listdir("/dev/shm") if prefix in n)


def make(group, node_id, n_nodes=2, n_local_ranks=1, fingerprint="hidden_size=8"):
    return SharedMemory(
        group, node_id, n_nodes, n_local_ranks, REGION_BYTES, fingerprint
    )


def connect_all(memories, timeout_s=TIMEOUT_S):
    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(lambda memory: memory.connect(timeout_s), memories))


def test_segments_show_who_died_and_who_closed(group, start):
    """Without their names, which are gone; from any process that maps them."""
    peer = start(
        f"""
        memory = SharedMemory(group, 1, 2, 1, {REGION_BYTES}, "x", 100, dict(sense=7))
        memory.connect({TIMEOUT_S})
        memory.status[:4] = b"peer"
        say("mapped")
        sys.stdin.readline()
        """
    )
    mine = SharedMemory(group, 0, 2, 1, REGION_BYTES, "x", 100, dict(sense=7))
    mine.connect(TIMEOUT_S)
    assert peer.hear() == "mapped" and names_of(group) == []

    def seen(pid: int) -> dict[int, tuple]:
        segments = [s for s in segments_of(pid) if s.group == group]
        assert all(s.facts == {"sense": 7} for s in segments)
        return {
            s.node_id: (
                process_state(s.pid, s.started),
                s.is_closed,
                s.memory[s.first_byte :][:4],
            )
            for s in segments
        }

    empty = bytes(4)
    both = {0: ("", False, empty), 1: ("", False, b"peer")}
    assert seen(os.getpid()) == seen(peer.process.pid) == both
    peer.process.send_signal(signal.SIGSTOP)
    while seen(os.getpid())[1][0] != "is stopped":
        time.sleep(0.01)
    peer.kill()
    assert seen(os.getpid())[1] == ("is dead", False, b"peer")
    mine.close()


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
    addresses = memory.connect(0.0)
    assert n_mappings("/dev/zero") > before
    assert addresses == memory.local_addresses() and len(set(addresses)) == 3
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
    """Three nodes of two ranks: what one writes, all read, and nothing else."""
    memories = [make(group, node, 3, 2) for node in range(3)]
    own = [memory.local_addresses() for memory in memories]
    tables = connect_all(memories)
    for node, table in enumerate(tables):
        assert len(table) == 6
        assert table[2 * node : 2 * node + 2] == own[node]
        assert all(address % 256 == 0 for address in table)
    for address in tables[0]:
        assert read(address, REGION_BYTES) == bytes(REGION_BYTES)
    for rank in range(6):
        writer = (rank // 2 + 1) % 3  # not the owner
        write(tables[writer][rank], bytes([rank + 1]) * REGION_BYTES)
    for table in tables:
        for rank, address in enumerate(table):
            assert read(address, REGION_BYTES) == bytes([rank + 1]) * REGION_BYTES
    for memory in memories:
        memory.close()


def test_what_is_given_back(group):
    """No names once connected; peers keep what one of them has given back."""
    name = f"max_ep-{group}"
    memories = [make(group, node) for node in range(2)]
    assert names_of(group) == ["0", "1"]
    tables = connect_all(memories)
    assert names_of(group) == []
    write(tables[0][0], b"still ok")
    assert n_mappings(name) == 4
    for _ in range(2):
        memories[0].close()
        assert n_mappings(name) == 2
    assert read(tables[1][0]) == b"still ok"
    memories[1].close()
    assert n_mappings(name) == 0


def test_memory_is_taken_when_made(group):
    """Or a kernel that comes to it gets a bus error. Only the user may open it."""
    memory = SharedMemory(group, 0, 2, 1, 64 << 20, "")
    status = os.stat(f"/dev/shm/max_ep-{group}-0")
    memory.close()
    assert status.st_blocks * 512 >= 64 << 20
    assert status.st_mode & 0o777 == 0o600
    assert names_of(group) == []
    memory.close()


class _SlowMemory(SharedMemory):
    """Of a process that loses its core just when all peers have answered."""

    def _unmapped(self) -> list[int]:
        time.sleep(0.05)
        return super()._unmapped()


@pytest.mark.parametrize("slow_node", [0, 1, 2])
def test_again_and_again_under_one_name(group, slow_node):
    """A fast node must not take a slow one's memory of the round before."""
    n_nodes, n_rounds = 3, 4

    def run(node_id: int) -> str | None:
        kind = _SlowMemory if node_id == slow_node else SharedMemory
        round_ = 0
        try:
            for round_ in range(n_rounds):  # noqa: B007
                memory = kind(group, node_id, n_nodes, 1, REGION_BYTES, "")
                memory.connect(1.0)
                memory.close()
        except Exception as error:
            return f"node {node_id}, round {round_}: {error}"
        return None

    with ThreadPoolExecutor(n_nodes) as pool:
        assert list(pool.map(run, range(n_nodes))) == [None] * n_nodes


# ------------------------------------------------------------- names left behind

_JOIN_AND_HANG = f"""
memory = SharedMemory(group, 1, 2, 1, {REGION_BYTES}, "hidden_size=8")
def join():
    try:
        memory.connect(60)
        say("connected")
    except Exception as error:
        say(type(error).__name__)
threading.Thread(target=join, daemon=True).start()
while module._read_owner(memory._mine) is None:
    time.sleep(0.001)
say("ready")
time.sleep(60)
"""


@pytest.fixture
def hung(start) -> Peer:
    """Node 1, which has joined, and hangs."""
    peer = start(_JOIN_AND_HANG)
    assert peer.hear() == "ready"
    return peer


@pytest.mark.parametrize("is_zombie", [False, True])
def test_memory_of_the_dead_is_replaced(group, hung, is_zombie):
    """Also of a killed process whose parent has not looked yet: it still has its pid.
    What another group has left stays."""
    other = make(f"{group}-other", 0)
    if is_zombie:
        os.kill(hung.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, hung.process.pid, os.WEXITED | os.WNOWAIT)
    else:
        hung.kill()
    assert names_of(group) == ["1", "other-0"]  # or this test would show nothing
    memories = [make(group, node) for node in range(2)]
    tables = connect_all(memories)
    write(tables[0][1], b"to node1")
    assert read(memories[1].local_addresses()[0]) == b"to node1"
    unlink_group(group, 2)
    assert names_of(group) == ["other-0"]
    for memory in [*memories, other]:
        memory.close()


def test_memory_of_a_reused_pid_is_replaced(group):
    """The pid in the segment lives, but it is another process."""
    memory = make(group, 1)
    with pytest.raises(TimeoutError):
        memory.connect(0.0)
    memory = make(group, 1)
    owner = memory.owner
    symmetric_memory._write_owner(
        memory._mine, type(owner)(1, "before the system started", owner.fingerprint)
    )
    other = make(group, 1)  # must not be refused
    other.close()
    memory.close()


def test_dead_peer_is_not_mapped(group, hung):
    hung.kill()
    memory = make(group, 0)
    with pytest.raises(
        TimeoutError,
        match="node 0 waited 0.3 s for node 1 of group .* to start: only what the "
        f"dead process {hung.process.pid} left behind",
    ):
        memory.connect(0.3)
    unlink_group(group, 2)


def test_living_owner_is_not_replaced(group, hung):
    with pytest.raises(
        RuntimeError,
        match=f"node 1 of group .* already taken by process {hung.process.pid};",
    ):
        make(group, 1)
    # And it goes on as if nothing had been.
    memory = make(group, 0)
    memory.connect(TIMEOUT_S)
    assert hung.hear() == "connected"
    memory.close()


def test_who_begins_at_the_same_time_is_not_replaced(group, monkeypatch):
    """Two processes with one node_id look, find no segment, and create theirs. Fails if
    a name is removed although nothing was found: the first would wait for peers that
    map the memory of the second, and remove its name when it gives up."""
    first = make(group, 0)
    names = names_of(group)
    monkeypatch.setattr(symmetric_memory, "_open_owned", lambda name: None)
    with pytest.raises(RuntimeError, match="node 0 of .* already taken by a process"):
        make(group, 0)
    assert names_of(group) == names
    first.close()


# ------------------------------------------------------------------------ errors


def test_full_file_system_is_an_error_at_once(group):
    """Not a bus error in a kernel, later."""
    stat = os.statvfs("/dev/shm")
    wanted = stat.f_blocks * stat.f_frsize + 4096
    free, handles = shared_memory_free(), set(os.listdir("/proc/self/fd"))
    words = f"no space for {wanted + 4096} bytes .*node 0.*--shm-size"
    with pytest.raises(MemoryError, match=words):
        SharedMemory(group, 0, 2, 1, wanted, "")
    assert names_of(group) == []
    assert abs(shared_memory_free() - free) < 64 << 20  # others use it too
    assert set(os.listdir("/proc/self/fd")) == handles


def test_peer_that_does_not_come_is_named(group):
    memories = [make(group, node, 3) for node in (0, 2)]
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(memory.connect, 0.5) for memory in memories]
    assert 0.4 < time.monotonic() - begin < 2
    for node_id, wait in zip((0, 2), waits):
        with pytest.raises(
            TimeoutError,
            match=f"node {node_id} waited 0.5 s for node 1 of group {group!r} to "
            "start: no segment of that name. Start all 3 processes",
        ):
            wait.result()
    assert names_of(group) == []


@pytest.mark.parametrize(
    "is_ready, words",
    [
        (False, "for node 1 .*: its segment is not ready"),
        (True, r"for nodes \[1\] of .* to map"),  # it maps nobody
    ],
)
def test_peer_that_hangs_is_named(group, is_ready, words):
    memory, stuck = make(group, 0), make(group, 1)
    if is_ready:
        stuck._mine[: len(symmetric_memory._READY)] = symmetric_memory._READY
    with pytest.raises(TimeoutError, match=f"node 0 waited 0.2 s {words}"):
        memory.connect(0.2)
    stuck.close()
    assert names_of(group) == []


def test_another_configuration_is_refused(group):
    memories = [make(group, 0), make(group, 1, fingerprint="hidden_size=16")]
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(memory.connect, 1.0) for memory in memories]
    errors = [wait.exception() for wait in waits]
    assert all(errors), errors
    said = [str(error) for error in errors if isinstance(error, ValueError)]
    assert said, errors
    for text in said:
        assert "another configuration" in text
    # Who looks first sees both; the other may hear of it.
    assert any("hidden_size=8" in t and "hidden_size=16" in t for t in said)
    assert names_of(group) == []


def test_who_has_mapped_all_hears_of_another_configuration(group):
    """An objection is no "I have mapped this": its peer will not come."""
    memory, other = make(group, 0), make(group, 1)
    other._mine[: len(symmetric_memory._READY)] = symmetric_memory._READY
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(memory.connect, TIMEOUT_S)
        while not other._mine[symmetric_memory._MAPPED_AT]:
            time.sleep(0.001)
        other._object()
        with pytest.raises(ValueError, match="node 1 of .* has another configuration"):
            wait.result()
    other.close()
    assert names_of(group) == []


@refused("""
LocalMemory(2, 1 << 50) | cannot map 2 regions of
make("g", 0, 257) | n_nodes=257 is above 256
make("", 0) | group=; 1 to 200 bytes without '/'
make("a/b", 0) | group=; 1 to 200 bytes without '/'
make("a\\0", 0) | group=; 1 to 200 bytes without '/'
make("x" * 201, 0) | group=; 1 to 200 bytes without '/'
""")
def test_memory_that_cannot_be(arguments, words):
    with raises((MemoryError, ValueError), words):
        eval(arguments, globals())


def test_who_has_not_said_its_name_yet_is_not_replaced(group):
    """A segment is made first, and marked with its owner later."""
    name = symmetric_memory._segment_name(group, 0)
    handle = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)

    def go_on() -> mmap.mmap:
        time.sleep(0.1)
        os.ftruncate(handle, symmetric_memory._PAGE)
        memory = mmap.mmap(handle, 0)
        os.close(handle)
        symmetric_memory._write_owner(memory, symmetric_memory.Owner.myself(""))
        return memory

    with ThreadPoolExecutor(1) as pool:
        memory = pool.submit(go_on)
        with pytest.raises(RuntimeError, match="node 0 of .* already taken by process"):
            make(group, 0)
        memory.result().close()
    assert len(names_of(group)) == 1
    unlink_group(group, 1)
