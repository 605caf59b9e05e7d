# SPDX-License-Identifier: Apache-2.0
"""Processes of a group on one host meet, and hand each other their memory.

Each process listens at a socket named after group and node (``sockets.py``). Of two
processes the one with the higher node calls the other. Both say who they are, and pass
the descriptor of their memory, which ends with its last user. What another user's
process says is not read, and what is no such message is ignored. This file needs
nothing but Python.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..plural import counted
from . import presence
from .messages import said, taken
from .sockets import (
    Process,
    call,
    found,
    group_name,
    listen,
    owner_of,
    process_at,
)

_GROUP_BYTES = 80
"""Longest name of a group."""
_MESSAGE_BYTES = 1 << 16
_FIRST_LOOK_S, _SELDOM_S, _LONGER = 0.002, 0.1, 1.3
"""How often a process looks who has come: less and less often."""
_REPORT_EVERY_S = 10.0
_MOST_GUESTS = 256
"""Lines that may be open, of strangers who say nothing too; a group has 128 nodes."""


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


@dataclass
class Hello:
    """What a process says to another."""

    node: int
    owner: Owner


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


def is_there(process: Process) -> bool:
    """Returns whether it is alive and this user's; who it forked has its sockets."""
    return process.is_mine and (not process.pid or _start_time(process.pid) != "")


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
        is_block: Callable[[int], bool] = lambda descriptor: True,
    ) -> None:
        """Begins to listen: others may call from now on, and are answered later.

        No other group of this user on this machine may have the name ``group``; all of
        its processes must give the same ``fingerprint``. A group may meet again in each
        ``epoch``. ``is_block`` says whether a descriptor may be of a peer's memory.
        """
        check_group(group)
        self.group, self.node_id, self.n_nodes = group, node_id, n_nodes
        self._epoch, self._is_block = epoch, is_block
        self.owner = Owner.myself(fingerprint)
        self.notes = -1
        """Descriptor of the group's notes: node 0 hands it to all."""
        hello = said(Hello(node_id, self.owner))
        if len(hello) > _MESSAGE_BYTES:
            raise ValueError(
                f"max_ep: {len(hello)} bytes say what node {node_id} is, at most "
                f"{_MESSAGE_BYTES} can; the name of a configuration is too long"
            )
        self._hello = hello
        self._listener = listen(self._name(node_id))
        mine = self._listener.getsockname()[1:].decode()
        for name in {*found(self._name(node_id))} - {mine}:
            other = owner_of(name)
            if other and is_there(other):
                self._listener.close()
                raise RuntimeError(
                    f"max_ep: node {node_id} of group {group!r} is already taken by "
                    f"{other}; give each group a name of its own and each process its "
                    "own node_id, or end what an earlier run has left"
                )
        presence.hide(group, node_id)

    def _name(self, node: int) -> str:
        return f"{group_name(self.group, self._epoch)}-{node}/meet"

    def meet(
        self,
        descriptor: int,
        timeout_s: float,
        absent: Collection[int] = (),
        lost: set[int] | None = None,
    ) -> dict[int, tuple[Owner, int]]:
        """Exchanges descriptors with all nodes that are not ``absent``, and ends; the
        caller closes them. Who does not come in time is added to ``lost``, if it is
        given, and an error else. Says on stderr whom it waits for."""
        self._descriptor, begin_s = descriptor, time.monotonic()
        self._foreign: set[str] = set()
        missing = set(range(self.n_nodes)) - {self.node_id, *absent}
        met: dict[int, tuple[Owner, int]] = {}
        look_s, look_at_s = _FIRST_LOOK_S, begin_s
        report_at_s, deadline_s = begin_s + _REPORT_EVERY_S, begin_s + timeout_s
        with self._listener, selectors.DefaultSelector() as lines:
            lines.register(self._listener, selectors.EVENT_READ)
            try:
                while missing:
                    now_s = time.monotonic()
                    if now_s >= look_at_s:
                        self._call_all(missing, lines)
                        look_at_s = now_s + look_s
                        look_s = min(_LONGER * look_s, _SELDOM_S)
                    if now_s >= report_at_s:
                        self._report(missing, now_s - begin_s)
                        report_at_s = now_s + _REPORT_EVERY_S
                    for key, _ in lines.select(max(0, look_at_s - time.monotonic())):
                        if key.fileobj is self._listener:
                            self._welcome(lines)
                        elif key.fileobj.fileno() >= 0:  # it was not sent away
                            lines.unregister(key.fileobj)
                            self._take(key.fileobj, missing, met)
                    if missing and time.monotonic() > deadline_s:
                        if lost is not None:
                            lost |= missing
                            break
                        raise self._too_late(missing, timeout_s)
            except BaseException:
                for _, theirs in met.values():
                    os.close(theirs)
                raise
            finally:
                for key in list(lines.get_map().values()):
                    key.fileobj.close()
        return met

    def _call_all(self, missing: set[int], lines: selectors.BaseSelector) -> None:
        """Calls those who have come, each once; they may not have come yet, or many may
        be calling them."""
        called = {key.data for key in lines.get_map().values()}
        lower = [self._name(node) for node in missing if node < self.node_id]
        for name in {*found(*lower)} - called - self._foreign if lower else ():
            line = self._call(name)
            if line is not None:
                lines.register(line, selectors.EVENT_READ, name)

    def _call(self, name: str) -> socket.socket | None:
        """Calls a process of this user, and says who this one is."""
        line = call(name)
        if line is None:
            return None
        try:
            if is_there(process_at(line)):
                self._say(line)
                return line
            self._foreign.add(name)
        except OSError:
            pass
        line.close()
        return None

    def _welcome(self, lines: selectors.BaseSelector) -> None:
        """Accepts calls: those of other users end at once, and so does that of who has
        said nothing for the longest, if there are too many."""
        of_guests = [key for key in lines.get_map().values() if key.data == _GUEST]
        guests = [key.fileobj for key in of_guests]
        for _ in range(_MOST_GUESTS):
            try:
                guest, _ = self._listener.accept()
            except OSError:  # all were accepted
                break
            if process_at(guest).is_mine:
                guest.setblocking(False)
                lines.register(guest, selectors.EVENT_READ, _GUEST)
                guests.append(guest)
            else:
                guest.close()
        for guest in guests[:-_MOST_GUESTS]:
            lines.unregister(guest)
            guest.close()

    def _say(self, line: socket.socket) -> None:
        notes = [self.notes] if self.notes >= 0 and self.node_id == 0 else []
        socket.send_fds(line, [self._hello], [self._descriptor, *notes])

    def _take(
        self,
        line: socket.socket,
        missing: set[int],
        met: dict[int, tuple[Owner, int]],
    ) -> None:
        """Takes what a line brings: nothing, if its process has gone, or says something
        else than a process of a group does."""
        cloexec = socket.MSG_CMSG_CLOEXEC
        theirs: list[int] = []
        with line:
            try:
                text, theirs, *_ = socket.recv_fds(line, _MESSAGE_BYTES, 2, cloexec)
                hello = taken(Hello, text)
                if hello is None or not theirs or not self._is_block(theirs[0]):
                    return
                node, owner = hello.node, hello.owner
                if owner.fingerprint != self.owner.fingerprint:
                    self._tell_all()
                    other, own = differing(owner.fingerprint, self.owner.fingerprint)
                    raise ValueError(
                        f"max_ep: node {node} of group {self.group!r} has another "
                        f"configuration: {other}; this node ({self.node_id}): {own}"
                    )
                # One that was met already has gone on to the next group of this name.
                if node in missing:
                    if node > self.node_id:
                        self._say(line)
                    missing.remove(node)
                    # It may be the number of another container's.
                    pid = process_at(line).pid or owner.pid
                    met[node] = replace(owner, pid=pid), theirs.pop(0)
                    if node == 0 and theirs:
                        self.notes = theirs.pop()
            except OSError:
                pass
            finally:
                for other in theirs:
                    os.close(other)

    def _tell_all(self) -> None:
        """Says to all who are there what this process is."""
        peers = {*range(self.n_nodes)} - {self.node_id}
        for name in found(*map(self._name, peers)):
            if line := self._call(name):
                line.close()  # nobody waits for this one

    def _report(self, missing: set[int], waited_s: float) -> None:
        print(
            f"max_ep: node {self.node_id} waits for nodes {sorted(missing)} of group "
            f"{self.group!r} ({waited_s:.0f} s): {self._what_they_do(missing)}",
            file=sys.stderr,
            flush=True,
        )

    def _what_they_do(self, missing: set[int]) -> str:
        does = {node: self._what_does(node) for node in sorted(missing)}
        texts = [f"node {node} {text}" for node, text in does.items() if text]
        nodes = [str(node) for node, text in does.items() if not text]
        if nodes:
            are = "nodes {} are" if len(nodes) > 1 else "node {} is"
            texts.append(f"{are.format(', '.join(nodes))} not there")
        return ", ".join(texts)

    def _what_does(self, node: int) -> str:
        """Returns what a node does; "": it is not there."""
        for name in found(self._name(node)):
            other = owner_of(name)
            if other is None:  # many are calling it
                return "does not answer"
            if is_there(other):
                state = process_state(other.pid)
                return f"does not answer ({other}{state and ' '}{state})"
        return presence.what_does(self.group, node)

    def _too_late(self, missing: set[int], timeout_s: float) -> TimeoutError:
        return TimeoutError(
            f"max_ep: node {self.node_id} waited {timeout_s:g} s for nodes "
            f"{sorted(missing)} of group {self.group!r} to start: "
            f"{self._what_they_do(missing)}. Start all "
            f"{counted(self.n_nodes, 'process')}, as one user, or raise "
            "EPConfig.start_timeout_s; what has ended, as with another configuration, "
            "has said why"
        )

    def close(self) -> None:
        self._listener.close()


_GUEST = "a guest"
"""Marks the line of who has called; the others have the name that was called."""


def check_group(group: object) -> None:
    """Raises a ``ValueError`` unless a group can have this name."""
    if (
        not isinstance(group, str)
        or not 0 < len(group.encode(errors="replace")) <= _GROUP_BYTES
        or not group.isprintable()
        or "/" in group
    ):
        raise ValueError(
            f"group={group!r} names sockets: pass a text of 1 to {_GROUP_BYTES} bytes "
            "without '/', all of which can be printed"
        )
