# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of CPU ranks: who maps what, and what is left behind."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from max_ep.memory import symmetric_memory
from max_ep.memory.symmetric_memory import LocalMemory, SharedMemory
from max_ep.processes.meeting import process_state
from max_ep.processes.sockets import group_name
from tests.children import handles, names_of, new_handles
from tests.errors import raises, refused
from tests.processes.memories import (
    REGION_BYTES,
    STATUS_BYTES,
    TIMEOUT_S,
    close_all,
    connect_all,
    hear,
    make,
    n_mappings,
    read,
    write,
)


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

    def n_handles() -> int:
        return sum(group in name for name in handles())

    before = n_handles()
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
    assert n_handles() == before + 1
    close_all((first, old, new))


def test_too_little_memory_is_an_error_at_once(group):
    """Before the system kills somebody for it."""
    wanted, before = 1 << 45, handles()
    words = f"no memory for {wanted + 4096} bytes of node 0: .*Lower max_tokens"
    with pytest.raises(MemoryError, match=words):
        SharedMemory(group, 0, 2, 1, wanted, "")
    assert names_of(group) == []
    assert not new_handles(before)


def test_memory_that_others_take_meanwhile_is_an_error(group, monkeypatch):
    """Each process would see that its own fits, and the system kill one of them."""
    free = iter([1 << 30, (128 << 20) - 1, 7])
    monkeypatch.setattr(symmetric_memory, "_memory_free", lambda: next(free))
    words = f"no memory for {(192 << 20) + 4096} bytes of node 0: 7 bytes are free"
    with pytest.raises(MemoryError, match=words):
        SharedMemory(group, 0, 2, 1, 192 << 20, "")


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
