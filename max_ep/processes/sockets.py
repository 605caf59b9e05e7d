# SPDX-License-Identifier: Apache-2.0
"""Sockets at which the processes of a user find each other.

They have no path, and end with their process: nothing is left behind. Every user of
the machine sees their names, and may take some. So a name ends at random: nobody can
take it first. Who looks for a process lists the names that begin alike, and the kernel
says whose process is at the other end. No call waits. All processes of a group have one
user and one network namespace. This file needs nothing but Python.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

_BACKLOG = 4096
"""Calls that may wait to be accepted: another user can fill a short queue."""
_LISTENS = 0x10000  # __SO_ACCEPTCON
_MOST_BYTES = 107
_SEND_S = 1.0
"""How long an answer may take to whom does not read it."""


@dataclass
class Process:
    """The process at the other end of a line, as the kernel says."""

    pid: int
    """0: it cannot be seen from here, as one of another container."""
    user: int

    @property
    def is_mine(self) -> bool:
        return self.user == os.geteuid()

    def __str__(self) -> str:
        return f"process {self.pid or 'of another container'}"


def group_name(group: str, epoch: int = 0) -> str:
    """Returns what names of a group's sockets begin with, in an epoch: a part that one
    can read, and one that tells groups apart."""
    digest = hashlib.blake2b(f"{epoch}/{group}".encode(), digest_size=6).digest()
    readable = re.sub(r"[^\w.-]", "_", group, flags=re.ASCII)[:24]
    return f"{readable}.{base64.urlsafe_b64encode(digest).decode()}"


def listen(
    name: str, about: str = "", kind: int = socket.SOCK_SEQPACKET
) -> socket.socket:
    """Listens at a name that begins with ``name``; those who list it see ``about``."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.setblocking(False)
    full = f"max_ep/{name}/{secrets.token_urlsafe(8)}"
    if about:
        full += ":" + re.sub(r"[^ -~]", "?", about)
    try:
        listener.bind(f"\0{full[:_MOST_BYTES]}")
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RuntimeError(
            f"max_ep: no socket {full!r} can be made: {error.strerror}"
        ) from error
    return listener


def found(*names: str) -> list[str]:
    """Lists the whole names, of any user, that begin with one of some and listen."""
    begins = tuple(f"@max_ep/{name}/" for name in names)
    # Names may hold any byte, and a line break: who calls one looks who is there.
    try:
        with open("/proc/net/unix", errors="replace") as lines:
            rows = [line.rstrip("\n").split(None, 7) for line in lines]
    except OSError as error:
        raise RuntimeError(
            "max_ep: processes find each other in /proc/net/unix, which cannot be read "
            f"here: {error.strerror}"
        ) from error
    return [
        row[7][1:]
        for row in rows
        if len(row) == 8 and row[7].startswith(begins) and row[3] == f"{_LISTENS:08X}"
    ]


def about(name: str) -> str:
    """Returns what a whole name says of its process."""
    return name.partition(":")[2]


def call(name: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket | None:
    """Calls who listens at a whole name; None: nobody, or too many are calling. The
    line does not block."""
    line = socket.socket(socket.AF_UNIX, kind)
    line.setblocking(False)
    try:
        line.connect(f"\0{name}")
        return line
    except OSError:
        line.close()
        return None


def process_at(line: socket.socket) -> Process:
    """Returns who listened, or who called."""
    asked = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("3i", asked)
    return Process(pid, user)


def owner_of(name: str) -> Process | None:
    """Returns who listens at a whole name; None: nobody, or too many are calling."""
    line = call(name)
    if line is None:
        return None
    with line:
        return process_at(line)


class Answering:
    """A thread that answers calls of this user's processes, one after another."""

    def __init__(
        self,
        listener: socket.socket,
        reply: Callable[[socket.socket], None],
        answers_root: bool = False,
    ) -> None:
        """``reply`` only writes; it may raise ``OSError``."""
        self._listener, self._reply = listener, reply
        self._users = {os.geteuid()} | ({0} if answers_root else set())
        listener.setblocking(True)
        run = dict(target=self._run, daemon=True, name="max_ep answers")
        self._thread = threading.Thread(**run)
        self._thread.start()

    def _run(self) -> None:
        with self._listener:
            while True:
                try:
                    guest, _ = self._listener.accept()
                except ConnectionAbortedError:
                    continue
                except OSError:  # it was closed
                    return
                with guest:
                    if process_at(guest).user in self._users:
                        guest.settimeout(_SEND_S)
                        with contextlib.suppress(OSError):  # it has not listened
                            self._reply(guest)

    def close(self) -> None:
        """Answers no more; what was being said is over."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait of the thread
        self._thread.join(2 * _SEND_S)
