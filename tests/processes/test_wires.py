# SPDX-License-Identifier: Apache-2.0
"""Connections between CPU ranks of different hosts, and the stores in which their
processes meet."""

import contextlib
import ctypes
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from max_ep.memory.wires import Wires
from max_ep.processes.rendezvous import NamedStore, Prefixed, gather
from max_ep.processes.store import StoreServer
from tests.errors import raises


class Kept(dict):
    """A store for the threads of one process."""

    set = dict.__setitem__


@pytest.fixture
def pair() -> Any:
    """Two ranks, each on a host, and their store."""
    store = Kept()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(Wires, store, rank, 2, 1, 60.0) for rank in range(2)]
        wires = [one.result(300) for one in made]
    yield *wires, store
    for one in wires:
        one.close()


def test_what_is_put_is_there_once_it_settles(pair):
    one, other, _ = pair
    memory = (ctypes.c_uint64 * 8)()
    other.attach(5, ctypes.addressof(memory), 64)
    one.send(1, 5, 8, bytes(range(16)))
    one.send(1, 5, 56, (7).to_bytes(8, "little"))
    one.settle()
    assert bytes(memory)[8:24] == bytes(range(16)) and memory[7] == 7


def test_nothing_is_written_outside_of_what_is_attached(pair):
    """Fails if bounds or blocks are not looked at."""
    one, other, _ = pair
    memory = (ctypes.c_uint64 * 8)()
    other.attach(5, ctypes.addressof(memory), 32)
    for block, offset in ((5, 32), (5, 24), (6, 0)):
        one.send(1, block, offset, b"x" * 16)
    one.settle()
    other.detach(5)
    one.send(1, 5, 0, b"x" * 16)
    one.settle()
    assert not any(memory)


def test_a_stranger_writes_nothing(pair):
    """It does not know the token. Fails if that is not compared."""
    _, other, store = pair
    memory = (ctypes.c_uint64 * 8)()
    other.attach(5, ctypes.addressof(memory), 64)
    host, port, token = json.loads(store["connections/1"])
    put = b"".join(n.to_bytes(8, "little") for n in (5, 0, 8)) + b"x" * 8
    ask = bytes(24)
    for is_known in (False, True):
        with socket.create_connection((host, port), 60) as line:
            line.sendall((bytes.fromhex(token) if is_known else bytes(16)) + put + ask)
            try:
                assert line.recv(1) == (b"\0" if is_known else b"")
            except ConnectionResetError:
                assert not is_known
        assert any(memory) == is_known


def test_one_that_has_gone_is_sent_nothing(pair):
    one, other, _ = pair
    for line in other._lines.values():
        line.close()
    one._lines[1].shutdown(socket.SHUT_WR)
    for _ in range(3):
        one.send(1, 5, 0, b"x" * 8)
    one.settle()
    assert not one._lines


def test_gather_names_who_does_not_come():
    store = Kept()
    come = threading.Timer(0.1, store.set, ("sizes/1", b"b"))
    come.start()
    assert gather(store, "sizes", 0, 2, b"a", 60.0) == [b"a", b"b"]
    with raises(TimeoutError, "sizes: rank 0 waited 0.1 s for rank 2"):
        gather(store, "sizes", 0, 3, b"a", 0.1)


def test_the_store_of_the_environment_gathers():
    """Each use of it has keys of its own."""
    with contextlib.closing(StoreServer("127.0.0.1")) as server:
        stores = [NamedStore(f"127.0.0.1:{server.port}") for _ in range(2)]
        for use in ("a", "b"):
            with ThreadPoolExecutor(2) as pool:
                given = [
                    pool.submit(gather, Prefixed(of, use), "k", rank, 2, text, 60.0)
                    for rank, (of, text) in enumerate(
                        zip(stores, (b"\0", use.encode()))
                    )
                ]
                assert [x.result(300) for x in given] == [[b"\0", use.encode()]] * 2
