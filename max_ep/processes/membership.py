# SPDX-License-Identifier: Apache-2.0
"""Membership of a group: processes agree, outside of any launch, on who goes on.

The group has notes (``notes.py``), one of each process: in shared memory, or in a store
if its processes are on several hosts. Between two
steps a process writes there whom it masks, and waits until the others have done so. Who
need not wait any longer adds a decision to the log. The first one of an epoch counts. A
process that wants to join gets the notes from a member, says so in its own, and is let
in by the next decision. This file needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .meeting import Owner, differing, is_there, process_state
from .messages import said, taken
from .notes import Notes, NotesInStore, damaged
from .sockets import Answering, call, found, group_name, listen, process_at
from .store import StoreLost

_LOOK_S, _UNCLEAR_S = 0.05, 5.0
_REPORT_EVERY_S = 10.0

MEMBER, JOINING, GONE = "member", "joining", "gone"


class RankExpelled(RuntimeError):
    """The group goes on without this process: ``EPCommInitializer.rejoin()``, or end.

    Its results since the peers have masked it are flagged as degraded.
    """


@dataclass
class Note:
    """What a process says of itself."""

    owner: Owner
    state: str = JOINING
    time_s: float = 0
    """When it came to the decision; of one that is joining, its last sign of life."""
    epoch: int = 0
    """The decision that it takes part in."""
    masked: list[int] = field(default_factory=list)
    """Nodes that it masks."""
    generations: list[int] = field(default_factory=list)
    ready: int = 0
    """The decision that it has carried out."""

    def is_alive(self) -> bool:
        return self.state != GONE


@dataclass
class Decision:
    """The members of the group from now on."""

    epoch: int = 0
    members: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    """Members whose memory is new to the others."""
    generations: list[int] = field(default_factory=list)
    """What each member has run: dispatch sent, received, combine sent, received."""
    deadline_s: float = 0
    """Until when members wait for each other."""


def decide(
    epoch: int, members: Iterable[int], notes: dict[int, Note], joining: Iterable[int]
) -> Decision:
    """Applies the rule: in turn, who is not yet expelled expels whom it masks.

    Those come first whom the fewest mask, of equals the lowest: one that was stopped,
    and then masks all others, comes last. Who masks one that stays is out. Members that
    have not come are expelled, and those that have run something else than the first.
    ``notes`` are of those that have come.
    """
    expelled, kept = set(members) - set(notes), []
    generations: list[int] = []
    maskers = {n: sum(n in note.masked for note in notes.values()) for n in notes}
    for node in sorted(notes, key=lambda n: (maskers[n], n)):
        generations = generations or notes[node].generations
        agrees = set(kept).isdisjoint(notes[node].masked)
        is_alike = notes[node].generations == generations
        if node not in expelled and agrees and is_alike:
            kept.append(node)
            expelled |= set(notes[node].masked)
    joined = sorted(set(joining) - set(kept))
    return Decision(epoch, sorted([*kept, *joined]), joined, generations)


def _name(group: str, node: int) -> str:
    return f"{group_name(group)}-{node}/notes"


def notes_of(group: str, n_nodes: int, timeout_s: float) -> int | None:
    """Returns a descriptor of a running group's notes, which a member hands over; None:
    no member is there. Waits for those that are there and not stopped."""
    names, strangers = [_name(group, node) for node in range(n_nodes)], set()
    begin_s, pids = time.monotonic(), []
    with selectors.DefaultSelector() as lines:
        try:
            while (waited_s := time.monotonic() - begin_s) < timeout_s:
                called = {key.data for key in lines.get_map().values()}
                is_unclear = False
                for name in {*found(*names)} - called - strangers:
                    line = call(name)
                    if line is None:  # many are calling it
                        is_unclear = waited_s < _UNCLEAR_S
                    elif is_there(process_at(line)):
                        lines.register(line, selectors.EVENT_READ, name)
                    else:
                        strangers.add(name)
                        line.close()
                asked = [process_at(key.fileobj) for key in lines.get_map().values()]
                pids = [x.pid for x in asked if process_state(x.pid) != "is stopped"]
                if not pids and not is_unclear:
                    return None
                for key, _ in lines.select(_LOOK_S):
                    lines.unregister(key.fileobj)
                    descriptor = _handed(key.fileobj, n_nodes)
                    if descriptor is not None:
                        return descriptor
                    time.sleep(Notes.poll_s)  # it has just ended
        finally:
            for key in list(lines.get_map().values()):
                key.fileobj.close()
    raise TimeoutError(
        f"max_ep: group {group!r} runs, and none of its processes {sorted(pids)} has "
        f"answered for {timeout_s:g} s; end those that hang"
    )


def _handed(line: socket.socket, n_nodes: int) -> int | None:
    """Takes a descriptor of notes; None: what came is none."""
    theirs: list[int] = []
    with line:
        try:
            cloexec = socket.MSG_CMSG_CLOEXEC
            _, theirs, *_ = socket.recv_fds(line, 16, 1, cloexec)
            if theirs and Notes.may_be(theirs[0], n_nodes):
                return theirs.pop()
        except OSError:
            pass
        finally:
            for other in theirs:
                os.close(other)
    return None


class Membership:
    """The notes of a group's processes, as one of them sees them."""

    def __init__(
        self,
        group: str,
        node: int,
        n_nodes: int,
        owner: Owner,
        timeout_s: float,
        notes: Notes | NotesInStore,
    ) -> None:
        """Takes the place of a process; the ``notes`` are taken over."""
        self._group, self._node, self._n_nodes = group, node, n_nodes
        self._timeout_s = timeout_s
        self._note = Note(owner)
        self._notes = notes
        self._answering: Answering | None = None
        self._latest = self.decision = Decision(members=list(range(n_nodes)))
        self._latest_at = 0

    def hand_on(self) -> None:
        """Gives the notes, from now on, to processes that join; a store has them."""
        if not isinstance(self._notes, Notes):
            return

        def reply(guest: socket.socket) -> None:
            socket.send_fds(guest, [b"notes"], [self._notes.descriptor])

        self._answering = Answering(listen(_name(self._group, self._node)), reply)

    def is_running(self) -> bool:
        """Returns whether the group runs without this node."""
        old, own = self.note(self._node), self._note.owner.fingerprint
        if old is not None and old.is_alive():
            raise RuntimeError(
                f"max_ep: node {self._node} of group {self._group!r} has a process that"
                f" is alive, {old.owner.pid}, and can still write: end it, or let it"
                " rejoin()"
            )
        members = [note for note in self.notes().values() if note.state == MEMBER]
        if members and members[0].owner.fingerprint != own:
            theirs, own = differing(members[0].owner.fingerprint, own)
            raise ValueError(
                f"max_ep: group {self._group!r} runs with another configuration: "
                f"{theirs}; this process: {own}"
            )
        return bool(members)

    def begin(self) -> None:
        """Begins the group with all nodes, after the decisions of one that has ended.
        No process decides before all have called it."""
        self.decision = replace(self.decision, epoch=self.latest().epoch)

    # ---------------------------------------------------------------------- notes

    def note(self, node: int) -> Note | None:
        """Returns the note of a process; None: it has written none."""
        text = self._notes.read(node)
        return None if text is None else self._taken(node, text)

    def _taken(self, node: int, text: bytes) -> Note:
        """Returns what a process said; one that does not live is gone."""
        note, lives = taken(Note, text), self._notes.lives(node)
        if note is None:
            raise damaged(f"that of node {node} is none")
        if not (note.owner.is_alive() if lives is None else lives):
            note.state = GONE
        return note

    def notes(self) -> dict[int, Note]:
        texts = self._notes.read_all()
        return {node: self._taken(node, text) for node, text in texts.items()}

    def publish(self, **fields: Any) -> None:
        """Changes this process's note."""
        self._note = replace(self._note, **fields)
        self._notes.write(self._node, said(self._note))

    # ------------------------------------------------------------------- decisions

    def latest(self) -> Decision:
        for at, line in self._notes.appended():
            decision = taken(Decision, line)
            # Later ones of an epoch do not count.
            if decision is not None and decision.epoch > self._latest.epoch:
                self._notes.forget(self._latest_at)
                self._latest, self._latest_at = decision, at
        return self._latest

    def _decide(self, decision: Decision) -> None:
        """Adds a decision, which counts if there is none of its epoch."""
        self._notes.append(said(decision), decision.epoch)

    def reconcile(
        self,
        masked: Iterable[int],
        generations: list[int],
        heard_s: Callable[[list[int]], float] = lambda nodes: 0,
    ) -> Decision:
        """Takes part in the next decision, and returns it.

        ``heard_s`` says when one of some nodes was last heard of, by this process's
        clock: those that still wait in a launch, for one that has died, are not late. A
        ``TimeoutError``: fewer than half of the processes alive have come.
        """
        epoch, n_polls = self.decision.epoch + 1, 0
        said = dict(masked=sorted(masked), generations=generations)
        self.publish(time_s=self._notes.now_s(), epoch=epoch, state=MEMBER, **said)
        while (decision := self.latest()).epoch < epoch:
            notes, members = self.notes(), self.decision.members
            now_s = self._notes.now_s()
            here = {
                n: notes[n] for n in members if n in notes and notes[n].state == MEMBER
            }
            present = {n: note for n, note in here.items() if note.epoch == epoch}
            # One that is joining is another process than the member was.
            awaited = [n for n in members if n not in present]
            awaited = [n for n in awaited if n in here or n not in notes]
            deadline_s = min(n.time_s for n in present.values()) + self._timeout_s
            silent_s = time.monotonic() - heard_s(awaited) if awaited else math.inf
            is_late = now_s > deadline_s and silent_s > self._timeout_s
            if is_late and len(awaited) > len(present):
                self.publish(epoch=epoch - 1)
                raise TimeoutError(
                    f"max_ep: reconcile: node {self._node} waited "
                    f"{self._timeout_s} s for nodes {awaited}, which are alive"
                )
            if is_late or not awaited:
                # There must be time left to meet those that join.
                is_early = now_s < deadline_s - self._timeout_s / 2
                # One that is stopped would hold up all.
                recent = [n for n in notes if now_s - notes[n].time_s < self._timeout_s]
                joining = [n for n in recent if notes[n].state == JOINING]
                decision = decide(epoch, members, present, joining if is_early else [])
                self._decide(replace(decision, deadline_s=deadline_s))
                continue
            n_polls += 1
            time.sleep(self._notes.poll_s if n_polls > self._notes.n_spins else 0)
        # One that missed a decision was not in it.
        if decision.epoch > epoch or self._node not in decision.members:
            self.publish(state=GONE)
            raise RankExpelled(
                f"max_ep: the group goes on without node {self._node}: it was late, or "
                "ran something else than the others. EPCommInitializer.rejoin() takes "
                "it in again"
            )
        self.decision = decision
        return decision

    def join(self, timeout_s: float) -> Decision:
        """Waits until the members let this process in, with new or cleared memory."""
        before, began_s = self.latest().epoch, time.monotonic()
        report_at_s = began_s + _REPORT_EVERY_S
        while True:
            now_s = time.monotonic()
            self.publish(state=JOINING, time_s=self._notes.now_s())
            decision = self.latest()
            if decision.epoch > before and self._node in decision.joined:
                break
            notes = self.notes().items()
            members = [node for node, note in notes if note.state == MEMBER]
            if not members:
                raise RuntimeError("max_ep: the group ended before this process joined")
            waits = (
                f"max_ep: node {self._node} of group {self._group!r} waited "
                f"{now_s - began_s:.0f} s for the members {members} to call "
                "EPCommInitializer.reconcile()"
            )
            if now_s > began_s + timeout_s:
                raise TimeoutError(waits)
            if now_s > report_at_s:
                report_at_s = now_s + _REPORT_EVERY_S
                print(waits, file=sys.stderr, flush=True)
            time.sleep(10 * self._notes.poll_s)
        self.decision = decision
        self.publish(epoch=decision.epoch, state=MEMBER, masked=[])
        return decision

    def meet(self) -> list[int]:
        """Waits until all have carried out a decision; returns who has not come."""
        epoch, missing = self.decision.epoch, self.decision.members
        self.publish(ready=epoch)
        while True:
            notes = self.notes()
            missing = [n for n in missing if n not in notes or notes[n].ready < epoch]
            alive = [n for n in missing if n not in notes or notes[n].is_alive()]
            if not alive or self.left_s() < 0:
                return missing
            time.sleep(self._notes.poll_s)

    def left_s(self) -> float:
        """Returns how long members still wait for each other after a decision."""
        return self.decision.deadline_s - self._notes.now_s()

    def close(self) -> None:
        """Leaves; the notes end with their last process."""
        try:
            with contextlib.suppress(StoreLost):  # which has seen this line end
                note = self.note(self._node)
                if note is not None and note.owner == self._note.owner:
                    self.publish(state=GONE)
        finally:
            if self._answering is not None:
                self._answering.close()
            self._notes.close()
