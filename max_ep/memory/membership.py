# SPDX-License-Identifier: Apache-2.0
"""Membership of a group: processes agree, outside of any launch, on who goes on.

The group has a folder in shared memory, with a note of each process. Between two steps
a process writes there whom it masks, and waits until the others have done so. Who need
not wait any longer adds a decision. The first one of an epoch counts. Files appear and
are replaced at once and whole, so nobody holds a lock that a process could take along
when it is stopped or killed. A process that wants to join says so in its note, and is
let in by the next decision. This file needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .meeting import Owner, differing

_POLL_S, _SPINS = 0.0005, 200
_JOIN_S, _JOIN_POLL_S = 600.0, 0.005
"""How long a process waits to be let in."""

MEMBER, JOINING, GONE = "member", "joining", "gone"


class RankExpelled(RuntimeError):
    """The group goes on without this process: ``EPCommInitializer.rejoin()``, or end.

    Its results since the peers have masked it are flagged as degraded.
    """


@dataclass
class Note:
    """What a process says of itself."""

    owner: dict[str, Any]
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
        return self.state != GONE and Owner(**self.owner).is_alive()

    def is_member(self) -> bool:
        return self.state == MEMBER and self.is_alive()

    def is_joining(self) -> bool:
        return self.state == JOINING and self.is_alive()


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


def members_folder(group: str) -> Path:
    """Names the folder of a group's notes and decisions."""
    return Path(f"/dev/shm/max_ep-{group}-members")


def remove_members(group: str) -> None:
    shutil.rmtree(members_folder(group), ignore_errors=True)


class Membership:
    """The notes of a group's processes, as one of them sees them."""

    def __init__(
        self, group: str, node: int, n_nodes: int, owner: Owner, timeout_s: float
    ) -> None:
        """Takes the place of a process; :meth:`create` makes the group's folder."""
        self._group, self._node, self._n_nodes = group, node, n_nodes
        self._folder, self._timeout_s = members_folder(group), timeout_s
        self._note = Note(asdict(owner))
        self._folder_id: int | None = None
        """Identifies the folder that has this process's notes."""
        self._latest = self.decision = Decision(members=list(range(n_nodes)))

    @staticmethod
    def create(group: str) -> None:
        """Makes an empty folder, in place of what an earlier group left."""
        remove_members(group)
        members_folder(group).mkdir(mode=0o700)

    @staticmethod
    def discard(group: str) -> None:
        """Removes the folder of a group that has not begun, if nobody uses it."""
        with contextlib.suppress(OSError):
            members_folder(group).rmdir()

    def is_running(self) -> bool:
        """Returns whether the group runs without this node."""
        old, own = self.note(self._node), self._note.owner["fingerprint"]
        if old is not None and old.is_alive():
            raise RuntimeError(
                f"max_ep: node {self._node} of group {self._group!r} has a process that"
                f" is alive, {old.owner['pid']}, and can still write: end it, or let it"
                " rejoin()"
            )
        members = [note for note in self.notes().values() if note.is_member()]
        if members and members[0].owner["fingerprint"] != own:
            theirs, own = differing(members[0].owner["fingerprint"], own)
            raise ValueError(
                f"max_ep: group {self._group!r} runs with another configuration: "
                f"{theirs}; this process: {own}"
            )
        return bool(members)

    # ---------------------------------------------------------------------- notes

    def note(self, node: int) -> Note | None:
        """Returns the note of a process; None: it has written none."""
        try:
            return Note(**json.loads((self._folder / f"note-{node}").read_text()))
        except FileNotFoundError:
            return None

    def notes(self) -> dict[int, Note]:
        nodes = range(self._n_nodes)
        return {node: note for node in nodes if (note := self.note(node))}

    def publish(self, **fields: Any) -> None:
        """Changes this process's note."""
        self._note = replace(self._note, **fields)
        try:
            if not self._is_same_folder():
                raise FileNotFoundError
            os.replace(self._written(self._note), self._folder / f"note-{self._node}")
        except FileNotFoundError:
            if self._note.state != GONE:
                raise RuntimeError(
                    f"max_ep: the group ended before node {self._node} wrote its note"
                ) from None

    def _is_same_folder(self) -> bool:
        """Returns whether the folder is there, and not that of a later group."""
        try:
            found = self._folder.stat().st_ino
        except FileNotFoundError:
            return False
        self._folder_id = self._folder_id or found
        return found == self._folder_id

    def _written(self, what: Note | Decision) -> Path:
        """Writes a file that nobody reads before it has its name."""
        path = self._folder / f"new-{self._node}-{os.getpid()}"
        path.unlink(missing_ok=True)  # may have got its name
        path.write_text(json.dumps(asdict(what)))
        return path

    # ------------------------------------------------------------------- decisions

    def latest(self) -> Decision:
        while True:
            names = [path.name for path in self._folder.glob("epoch-*")]
            epoch = max((int(name.split("-")[1]) for name in names), default=0)
            if epoch <= self._latest.epoch:
                return self._latest
            with contextlib.suppress(FileNotFoundError):  # there are later ones now
                text = (self._folder / f"epoch-{epoch}").read_text()
                self._latest = Decision(**json.loads(text))

    def _decide(self, decision: Decision) -> None:
        """Adds a decision, if there is none of its epoch, and removes an old one."""
        with contextlib.suppress(FileExistsError):
            os.link(self._written(decision), self._folder / f"epoch-{decision.epoch}")
        (self._folder / f"epoch-{decision.epoch - 2}").unlink(missing_ok=True)

    def reconcile(
        self,
        masked: Iterable[int],
        generations: list[int],
        heard_s: Callable[[list[int]], float] = lambda nodes: 0,
    ) -> Decision:
        """Takes part in the next decision, and returns it.

        ``heard_s`` says when one of some nodes was last heard of: those that still wait
        in a launch, for one that has died, are not late. A ``TimeoutError``: fewer than
        half of the processes alive have come.
        """
        epoch, n_polls = self.decision.epoch + 1, 0
        said = dict(masked=sorted(masked), generations=generations)
        self.publish(time_s=time.monotonic(), epoch=epoch, state=MEMBER, **said)
        while (decision := self.latest()).epoch < epoch:
            notes, members = self.notes(), self.decision.members
            now_s = time.monotonic()
            here = {n: notes[n] for n in members if n in notes and notes[n].is_member()}
            present = {n: note for n, note in here.items() if note.epoch == epoch}
            # One that is joining is another process than the member was.
            awaited = [n for n in members if n not in present]
            awaited = [n for n in awaited if n in here or n not in notes]
            deadline_s = min(n.time_s for n in present.values()) + self._timeout_s
            is_late = now_s > deadline_s and (
                not awaited or now_s > heard_s(awaited) + self._timeout_s
            )
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
                joining = [n for n in recent if notes[n].is_joining()]
                decision = decide(epoch, members, present, joining if is_early else [])
                self._decide(replace(decision, deadline_s=deadline_s))
                continue
            n_polls += 1
            time.sleep(_POLL_S if n_polls > _SPINS else 0)
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

    def join(self) -> Decision:
        """Waits until the members let this process in, with new or cleared memory."""
        before, began_s = self.latest().epoch, time.monotonic()
        while True:
            now_s = time.monotonic()
            self.publish(state=JOINING, time_s=now_s)
            decision = self.latest()
            if decision.epoch > before and self._node in decision.joined:
                break
            if not any(note.is_member() for note in self.notes().values()):
                raise RuntimeError("max_ep: the group ended before this process joined")
            if now_s > began_s + _JOIN_S:
                raise TimeoutError(
                    f"max_ep: node {self._node} waited {_JOIN_S} s for the members to "
                    "call EPCommInitializer.reconcile()"
                )
            time.sleep(_JOIN_POLL_S)
        self.decision = decision
        self.publish(epoch=decision.epoch, state=MEMBER, masked=[])
        return decision

    def meet(self) -> list[int]:
        """Waits until all have carried out a decision; returns who has not come."""
        epoch, missing = self.decision.epoch, self.decision.members
        self.publish(ready=epoch)
        while True:
            notes = {node: self.note(node) for node in missing}
            missing = [n for n, note in notes.items() if not note or note.ready < epoch]
            alive = [n for n in missing if notes[n] is None or notes[n].is_alive()]
            if not alive or time.monotonic() > self.decision.deadline_s:
                return missing
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leaves; the last one removes the notes."""
        note = self.note(self._node)
        if note is not None and note.owner == self._note.owner:
            self.publish(state=GONE)
        if self._is_same_folder() and not any(
            note.is_alive() for note in self.notes().values()
        ):
            remove_members(self._group)
