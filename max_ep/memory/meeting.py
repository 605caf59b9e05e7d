# SPDX-License-Identifier: Apache-2.0
"""Processes of a group on one host meet, and hand each other their memory.

Each process listens at a socket named after group and node. Of two processes the one
with the higher node calls the other. Both say who they are, and pass the descriptor of
their memory. The socket ends with its process, and the memory with its last user:
nothing is left behind, however a process ends. This file needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass

_GROUP_BYTES = 80
"""Longest name of a group; a socket's may have 107 bytes."""
_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.002


@dataclass
class Owner:
    """The process that some memory belongs to."""

    pid: int
    started: str  # distinguishes a reused pid
    fingerprint: str
    """What must be the same in all processes."""

    @staticmethod
    def myself(fingerprint: str) -> Owner:
        return Owner(os.getpid(), _start_time(os.getpid()), fingerprint)

    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.started


def _stat(pid: int) -> list[str]:
    """Returns what the system says of a process, from its state on."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The command, in brackets, may hold spaces; field 22 is the start.
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    """Returns when a process started, "" if there is none."""
    fields = _stat(pid)
    # A zombie has ended; only its parent has not noticed yet.
    return "" if not fields or fields[0] == "Z" else fields[19]


def parent_of(pid: int) -> int:
    """Returns the process that started another; 0 if the system does not say."""
    return int((_stat(pid)[1:2] or ["0"])[0])


def process_state(pid: int, started: str | None = None) -> str:
    """Says what is wrong with a process; "": it runs, or the system does not say."""
    if started and _start_time(pid) != started:
        return "is dead"
    return "is stopped" if _stat(pid)[:1] in (["T"], ["t"]) else ""


def differing(*fingerprints: str) -> list[str]:
    """Returns of each of two fingerprints the fields that the other does not have."""
    fields = [text.split(", ") for text in fingerprints]
    return [
        ", ".join(x for x in some if x not in others)
        for some, others in zip(fields, fields[::-1])
    ]


class Meeting:
    """A process that waits for the others of its group."""

    def __init__(
        self,
        group: str,
        node_id: int,
        n_nodes: int,
        fingerprint: str,
        epoch: int = 0,
    ) -> None:
        """Begins to listen: others may call from now on, and are answered later.

        No other group alive on this machine may have the name ``group``; all of its
        processes must give the same ``fingerprint``. A group may meet again in each
        ``epoch``.
        """
        if not 0 < len(group.encode()) <= _GROUP_BYTES or set("/\0") & set(group):
            raise ValueError(
                f"group={group!r} names a socket: pass 1 to {_GROUP_BYTES} bytes "
                "without '/'"
            )
        self.group, self.node_id, self.n_nodes = group, node_id, n_nodes
        self._epoch = epoch
        self.owner = Owner.myself(fingerprint)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        try:
            self._listener.bind(self._name(node_id))
            self._listener.listen(n_nodes)
        except OSError:
            self._listener.close()
            raise RuntimeError(
                f"max_ep: node {node_id} of group {group!r} is already taken by "
                f"process {self._pid_of(node_id)}; give each group a name of its own "
                "and each process its own node_id"
            ) from None

    def _name(self, node: int) -> str:
        return f"\0max_ep/{self._epoch}/{self.group}-{node}"

    def _pid_of(self, node: int) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            try:
                line.connect(self._name(node))
                return str(_credentials(line)[0])
            except OSError:
                return "?"

    def meet(
        self,
        descriptor: int,
        timeout_s: float,
        absent: Collection[int] = (),
        lost: set[int] | None = None,
    ) -> dict[int, tuple[Owner, int]]:
        """Exchanges descriptors with all nodes that are not ``absent``, and ends; the
        caller closes them. Who does not come in time is added to ``lost``, if it is
        given, and an error else."""
        self._descriptor, deadline = descriptor, time.monotonic() + timeout_s
        missing = set(range(self.n_nodes)) - {self.node_id, *absent}
        found: dict[int, tuple[Owner, int]] = {}
        with self._listener, selectors.DefaultSelector() as lines:
            lines.register(self._listener, selectors.EVENT_READ)
            try:
                while missing:
                    called = {key.data for key in lines.get_map().values()}
                    for node in missing - called:
                        line = node < self.node_id and self._call(node)
                        if line:
                            lines.register(line, selectors.EVENT_READ, node)
                    for key, _ in lines.select(_POLL_S):
                        if key.fileobj is self._listener:
                            guest, _ = self._listener.accept()
                            guest.setblocking(False)
                            lines.register(guest, selectors.EVENT_READ)
                            continue
                        lines.unregister(key.fileobj)
                        self._take(key.fileobj, missing, found)
                    if missing and time.monotonic() > deadline:
                        if lost is not None:
                            lost |= missing
                            break
                        raise self._too_late(sorted(missing), timeout_s)
            except BaseException:
                for _, theirs in found.values():
                    os.close(theirs)
                raise
            finally:
                for key in list(lines.get_map().values()):
                    key.fileobj.close()
        return found

    def _call(self, node: int) -> socket.socket | None:
        """Calls a node; None if it is not there yet, or many are calling it."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        try:
            line.connect(self._name(node))
            self._say(line)
            return line
        except OSError:
            line.close()
            return None

    def _say(self, line: socket.socket) -> None:
        if _credentials(line)[1] != os.getuid():
            raise PermissionError("the socket is another user's")
        text = json.dumps([self.node_id, asdict(self.owner)]).encode()
        socket.send_fds(line, [text], [self._descriptor])

    def _take(
        self,
        line: socket.socket,
        missing: set[int],
        found: dict[int, tuple[Owner, int]],
    ) -> None:
        """Takes what a line brings: nothing, if its process has gone."""
        cloexec = socket.MSG_CMSG_CLOEXEC
        theirs: list[int] = []
        with line:
            try:
                text, theirs, *_ = socket.recv_fds(line, _MESSAGE_BYTES, 1, cloexec)
                if not text or _credentials(line)[1] != os.getuid():
                    return
                try:
                    node, fields = json.loads(text)
                    node, owner = int(node), Owner(**fields)
                except (TypeError, ValueError):
                    return  # another program has called
                if owner.fingerprint != self.owner.fingerprint:
                    for peer in {*range(self.n_nodes)} - {self.node_id}:
                        if call := self._call(peer):
                            call.close()  # nobody waits for this one
                    other, own = differing(owner.fingerprint, self.owner.fingerprint)
                    raise ValueError(
                        f"max_ep: node {node} of group {self.group!r} has another "
                        f"configuration: {other}; this node ({self.node_id}): {own}"
                    )
                # One that was met already has gone on to the next group of this name.
                if node in missing and theirs:
                    if node > self.node_id:
                        self._say(line)
                    missing.remove(node)
                    found[node] = owner, theirs.pop()
            except OSError:
                pass
            finally:
                for other in theirs:
                    os.close(other)

    def _too_late(self, missing: list[int], timeout_s: float) -> TimeoutError:
        there = [node for node in missing if self._pid_of(node) != "?"]
        found = f"{there} do not answer" if there else "nobody is there"
        return TimeoutError(
            f"max_ep: node {self.node_id} waited {timeout_s} s for nodes {missing} of "
            f"group {self.group!r} to start: {found}. Start all {self.n_nodes} "
            "processes, or raise timeout_s; what has ended, as with another "
            "configuration, has said why"
        )

    def close(self) -> None:
        self._listener.close()


def _credentials(line: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and user group at the other end."""
    said = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", said)
