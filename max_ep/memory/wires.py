# SPDX-License-Identifier: Apache-2.0
"""Connections to CPU ranks of other hosts, and the memory that is reached through them.

Each process listens, and leaves its address and a token in the group's store. It calls
those of other hosts; what its link puts goes through that connection, and they write it
into their memory. So processes of different hosts share nothing but the store. For
tests: the link (``link.py``) is as bad as a network may be.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import struct
import threading
from typing import Any

from ..limits import (
    GROUP_VARIABLE,
    START_TIMEOUT_S,
    STORE_VARIABLE,
    link_of_environment,
)
from ..processes.meeting import differing
from ..processes.rendezvous import KeyStore, NamedStore, Prefixed, gather
from .link import Link
from .symmetric_memory import SharedMemory

_HEAD = struct.Struct("<QQQ")  # block, offset, bytes; block 0: an answer is wanted
_TOKEN_BYTES = 16
_TOKEN_S = 10.0
_WORD_BYTES = 8


def _own_address(first: str) -> tuple[socket.AddressFamily, str]:
    """Returns where other hosts reach this one, if they reach the ``first``."""
    family, *_, place = socket.getaddrinfo(first, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as looks:
        looks.connect(place)  # which sends nothing
        return family, looks.getsockname()[0]


class Wires:
    """This rank's connections with the ranks of other hosts."""

    def __init__(
        self,
        store: KeyStore,
        rank: int,
        n_ranks: int,
        per_host: int,
        timeout_s: float,
        first_host: str = "127.0.0.1",
    ) -> None:
        """Connects all ranks of different hosts, which reach the ``first_host``; all
        call it. A connection that takes nothing for the time-out is given up."""
        self.store, self.rank, self.n_ranks = store, rank, n_ranks
        self.per_host = per_host
        self._blocks: dict[int, tuple[int, int]] = {}
        """Address and bytes of what peers may write."""
        self._writing, self._sending = threading.Lock(), threading.Lock()
        self._lines: dict[int, socket.socket] = {}
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        family, host = _own_address(first_host)
        backlog = dict(family=family, backlog=n_ranks)
        self._listener = socket.create_server((host, 0), **backlog)
        self._start(self._accept)
        port = self._listener.getsockname()[1]
        mine = json.dumps([host, port, self._token.hex()]).encode()
        start_s = max(timeout_s, START_TIMEOUT_S)
        all_ = gather(store, "connections", rank, n_ranks, mine, start_s)
        for peer, said in enumerate(all_):
            if peer // per_host != rank // per_host:
                host, port, token = json.loads(said)
                line = socket.create_connection((host, port), timeout_s)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(bytes.fromhex(token))
                self._lines[peer] = line

    def _start(self, run, *arguments) -> None:
        named = dict(name="max_ep-wires", daemon=True)
        threading.Thread(target=run, args=arguments, **named).start()

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # it was closed
            while True:
                line, _ = self._listener.accept()
                self._start(self._serve, line)

    def _serve(self, line: socket.socket) -> None:
        """Writes what a peer puts, until it ends."""
        with line, line.makefile("rb") as comes, contextlib.suppress(OSError):
            line.settimeout(_TOKEN_S)
            if not hmac.compare_digest(comes.read(_TOKEN_BYTES), self._token):
                return
            line.settimeout(None)
            while len(head := comes.read(_HEAD.size)) == _HEAD.size:
                block, offset, n_bytes = _HEAD.unpack(head)
                data = comes.read(n_bytes)
                if len(data) < n_bytes:
                    return
                if block:
                    self._write(block, offset, data)
                else:
                    line.sendall(b"\0")

    def _write(self, block: int, offset: int, data: bytes) -> None:
        with self._writing:
            base, n_bytes = self._blocks.get(block, (0, 0))
            if offset + len(data) > n_bytes:  # it was freed
                return
            if len(data) == _WORD_BYTES:  # never torn
                word = int.from_bytes(data, "little")
                ctypes.c_uint64.from_address(base + offset).value = word
            else:
                ctypes.memmove(base + offset, data, len(data))

    def attach(self, block: int, base: int, n_bytes: int) -> None:
        """Lets peers write into memory, by a number that all ranks give it."""
        with self._writing:
            self._blocks[block] = base, n_bytes

    def detach(self, block: int) -> None:
        """Ignores what is put into it from now on."""
        with self._writing:
            self._blocks.pop(block, None)

    def send(self, peer: int, block: int, offset: int, data: bytes) -> None:
        """Sends what a peer writes; nothing to one that has gone: who waits for it says
        so."""
        self._say(peer, _HEAD.pack(block, offset, len(data)) + data, False)

    def settle(self) -> None:
        """Returns once all peers have written what was sent to them."""
        for peer in [*self._lines]:
            self._say(peer, _HEAD.pack(0, 0, 0), True)

    def _say(self, peer: int, text: bytes, is_answered: bool) -> None:
        with self._sending:
            line = self._lines.get(peer)
            if line is None:
                return
            try:
                line.sendall(text)
                if is_answered and not line.recv(1):
                    raise ConnectionResetError
            except OSError:
                self._lines.pop(peer).close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        with self._sending:
            while self._lines:
                _, line = self._lines.popitem()
                line.close()


class WiredLink(Link):
    """A link of one rank, for its block of memory, that goes through wires."""

    def __init__(
        self,
        wires: Wires,
        block: int,
        base: int,
        seed: int,
        sizes: Any,
        keeps_fences: bool = True,
    ) -> None:
        self._wires, self._block = wires, block
        # What a place is of other ranks: counted from the beginning of the block.
        regions = [0] * wires.n_ranks
        regions[wires.rank] = base
        super().__init__([wires.rank], regions, seed, sizes, keeps_fences)

    def _write(self, peer: int, to: int, of: int, n_bytes: int) -> None:
        is_put = n_bytes > 0
        data = ctypes.string_at(of, n_bytes) if is_put else of.to_bytes(8, "little")
        self._wires.send(peer, self._block, to, data)


class WiredMemory:
    """A block of each rank; those of this host are mapped."""

    def __init__(
        self,
        wires: Wires,
        name: str,
        n_bytes: int,
        fingerprint: str,
        seed: int,
        sizes: Any,
    ) -> None:
        """Makes this rank's block, zeroed; ``name`` is the same on all ranks, and
        ``sizes`` are the group's."""
        host, i = divmod(wires.rank, wires.per_host)
        of_host = f"{name}-{host}", i, wires.per_host, 1, n_bytes, fingerprint
        self._wires, self._name = wires, name
        self._shared = SharedMemory(*of_host)
        digest = hashlib.blake2b(name.encode(), digest_size=_WORD_BYTES).digest()
        self._block = int.from_bytes(digest, "little") | 1
        (base,) = self._shared.local_addresses()
        wires.attach(self._block, base, n_bytes)
        self.link = WiredLink(wires, self._block, base, seed, sizes)
        self.queue = self.link.queues()[wires.rank]
        """Address of what this rank asks its link for."""

    def local_addresses(self) -> list[int]:
        return self._shared.local_addresses()

    def connect(self, timeout_s: float, absent: object = ()) -> list[int]:
        """Waits until all ranks have their block; returns their addresses, 0 for those
        of other hosts. Hosts compile one by one, so they may come late."""
        wires = self._wires
        mine = self._shared.connect(timeout_s)
        of_all = wires.store, f"memory {self._name}", wires.rank, wires.n_ranks
        gather(*of_all, b"", max(timeout_s, START_TIMEOUT_S))
        first = wires.rank // wires.per_host * wires.per_host
        regions = [0] * wires.n_ranks
        regions[first : first + wires.per_host] = mine
        return regions

    def settle(self, timeout_s: float) -> None:
        """Returns once what this rank has asked for is with the others."""
        self.link.settle(timeout_s)
        self._wires.settle()

    def close(self) -> None:
        """Gives the memory back, once what was asked for is on its way."""
        self.link.close()
        self._wires.detach(self._block)
        self._shared.close()


_numbers = itertools.count(1)
"""Numbers the groups of this process, which all processes make in the same order."""


class StoredMemory(WiredMemory):
    """That of processes, with a rank each, that meet in a store of their own."""

    def __init__(
        self,
        store: NamedStore,
        n_local: int,
        node_id: int,
        n_nodes: int,
        n_bytes: int,
        fingerprint: str,
        timeout_s: float,
        start_timeout_s: float,
        sizes: Any,
    ) -> None:
        """Waits for the other processes, which have the same fingerprint, and connects
        them."""
        if n_local != 1:
            raise ValueError(
                f"n_gpus_per_node={n_local} with {STORE_VARIABLE}: processes that meet "
                "in a store have one rank each"
            )
        per_host, seed = link_of_environment(n_nodes, 1)
        mine = json.dumps([secrets.token_hex(8), fingerprint]).encode()
        group = os.environ.get(GROUP_VARIABLE, "")
        of_store = store, f"{group} ep_init {next(_numbers)}", node_id, n_nodes
        all_ = [*map(json.loads, gather(*of_store, mine, start_timeout_s))]
        for node, (_, theirs) in enumerate(all_):
            if theirs != fingerprint:
                other, own = differing(theirs, fingerprint)
                raise ValueError(
                    f"max_ep: node {node} has another configuration: {other}; this "
                    f"node ({node_id}): {own}"
                )
        name, _ = all_[0]
        of_wires = node_id, n_nodes, per_host, timeout_s, store.host
        wires = Wires(Prefixed(store, name), *of_wires)
        super().__init__(wires, name, n_bytes, fingerprint, seed, sizes)

    def close(self) -> None:
        super().close()
        self._wires.close()
