# SPDX-License-Identifier: Apache-2.0
"""A store that the processes of a group on several hosts share: a small TCP server.

    python -m max_ep.processes.store [HOST:]PORT

It is no part of the group: a supervisor runs it, and no process of the group takes it
along. A process keeps a line to it. For each group it holds

* a text of each node, and whether the line of who wrote it is still open: a process
  that dies, in whatever way, is known to be dead as soon as its line ends;
* the last *decision*, a numbered text: one counts only if its number is higher than
  that of the last. So the first of a number counts, and nobody holds a lock;
* the time, for the hosts' clocks differ.

A group is forgotten with its last line. Whoever reaches the port can read and write:
use a network that you trust. This file needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ..limits import STORE_VARIABLE, shown
from .messages import said, taken

_MOST_BYTES = 1 << 20
"""Longest request or answer."""
_ANSWER_S = 10.0
"""How long an answer may take."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 5),
)
"""A host that is lost says nothing: its lines end after about ten seconds."""


@dataclass
class Request:
    """What a process asks; the answer is the whole state of its group."""

    group: str
    node: int
    text: str | None = None
    """The node's text from now on."""
    number: int = 0
    """0: no decision."""
    decision: str = ""


@dataclass
class Text:
    """What a node has said."""

    node: int
    text: str
    is_alive: bool
    """Whether its process still has its line."""


@dataclass
class State:
    """What a store knows of a group."""

    store: str
    """Another one, if the store was started again."""
    now_s: float
    texts: list[Text] = field(default_factory=list)
    number: int = 0
    decision: str = ""


class _Group:
    def __init__(self) -> None:
        self.texts: dict[int, tuple[str, object]] = {}
        """By node, with the line that it came over."""
        self.number, self.decision = 0, ""
        self.lines: set[object] = set()


class _Line(socketserver.StreamRequestHandler):
    """A process's line, with a thread of its own."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while text := self.rfile.readline(_MOST_BYTES):
                request = taken(Request, text)
                if request is None:  # it is no process of a group
                    return
                self.wfile.write(said(self.server.answer(request, self)) + b"\n")

    def finish(self) -> None:
        self.server.forget(self)
        with contextlib.suppress(OSError):
            super().finish()


class StoreServer(socketserver.ThreadingTCPServer):
    """Answers until :meth:`close`."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str = "", port: int = 0) -> None:
        """Port 0: one that is free; :attr:`port` says which."""
        self._lock, self._groups = threading.Lock(), {}
        self._id = secrets.token_hex(8)
        super().__init__((host, port), _Line)
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        line, address = super().get_request()
        _keep_alive(line)
        return line, address

    def answer(self, request: Request, line: object) -> State:
        with self._lock:
            group = self._groups.setdefault(request.group, _Group())
            group.lines.add(line)
            if request.text is not None:
                group.texts[request.node] = request.text, line
            if request.number > group.number:
                group.number, group.decision = request.number, request.decision
            texts = [
                Text(node, text, of in group.lines)
                for node, (text, of) in group.texts.items()
            ]
            now_s = time.monotonic()
            return State(self._id, now_s, texts, group.number, group.decision)

    def forget(self, line: object) -> None:
        """Its process has ended, or was too slow."""
        with self._lock:
            for name, group in list(self._groups.items()):
                group.lines.discard(line)
                if not group.lines:
                    del self._groups[name]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class StoreLost(RuntimeError):
    """The store cannot be asked; steps need it not."""


class StoreLine:
    """A process's line to the store."""

    def __init__(self, address: str, group: str, node: int) -> None:
        self._address, self._group, self._node = address, group, node
        self._line: socket.socket | None = None
        self._answers: Any = None
        self._store, self._text = "", None
        self._lock = threading.Lock()

    def ask(
        self, text: str | None = None, number: int = 0, decision: str = ""
    ) -> State:
        """Says something, or nothing, and returns what the store knows of the group.

        A line that has ended is opened again. Raises a :class:`StoreLost` if the store
        does not answer, or is another one than before.
        """
        request = Request(self._group, self._node, text, number, decision)
        with self._lock:
            try:
                try:
                    state = self._answer(request)
                except OSError:  # the line may be an old one
                    state = self._answer(request)
            except OSError as error:
                raise self._lost(f"does not answer: {error}") from error
            if state is None:
                raise self._lost("answers what no store of max_ep does")
            if self._store not in ("", state.store):
                raise self._lost("was started again, and has forgotten the group")
            self._store = state.store
            return state

    def _answer(self, request: Request) -> State | None:
        self._text = self._text if request.text is None else request.text
        try:
            if self._line is None:
                address = parse_address(self._address)
                self._line = socket.create_connection(address, _ANSWER_S)
                _keep_alive(self._line)
                self._answers = self._line.makefile("rb")
                # The store has taken this process for dead since its line ended.
                request = replace(request, text=self._text)
            self._line.sendall(said(request) + b"\n")
            text = self._answers.readline(_MOST_BYTES)
            if not text:
                raise ConnectionError("it has ended the line")
            return taken(State, text)
        except OSError:
            self._end_line()
            raise

    def _end_line(self) -> None:
        if self._line is not None:
            self._answers.close()
            self._line.close()
        self._line = None

    def _lost(self, what: str) -> StoreLost:
        self._end_line()
        return StoreLost(
            f"max_ep: the store {self._address} ({STORE_VARIABLE}) of group "
            f"{self._group!r} {what}. Ranks go on, and mask those that are late; "
            "without the store nobody can agree or join. Call again when it answers; "
            "if it was started again, end all processes of the group, and start them "
            "again"
        )

    def close(self) -> None:
        with self._lock:
            self._end_line()


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE:
        line.setsockopt(socket.IPPROTO_TCP, option, value)


def parse_address(text: str) -> tuple[str, int]:
    """Returns host and port; raises a ``ValueError`` for what is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"max_ep: {STORE_VARIABLE}={shown(text)} must be HOST:PORT, where "
            "`python -m max_ep.processes.store PORT` runs"
        )
    return host.strip("[]"), int(port)


def store_of_environment() -> str:
    """Returns the address of the store; "": there is none."""
    address = os.environ.get(STORE_VARIABLE, "")
    if address:
        parse_address(address)
    return address


def main(arguments: list[str]) -> None:
    text = arguments[0] if len(arguments) == 1 else ""
    host, port = parse_address(text if ":" in text else f"0.0.0.0:{text}")
    with contextlib.closing(StoreServer(host, port)) as server:
        print(f"max_ep: store at port {server.port}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
