# SPDX-License-Identifier: Apache-2.0
"""Who is in a group: processes agree, outside of any launch, on who goes on.

Each process has a note in a file of shared memory. Between two steps it writes there
whom it masks, and waits until the others have done so. The first that need not wait any
longer decides, under a lock, and writes the decision; everybody takes that one. A
process that wants to join says so in its note, and is let in by the next decision.
This file needs nothing but Python.
"""

from __future__ import annotations

import _posixshmem
import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .symmetric_memory import Owner, exists, members_name, unlink

_SLOT = 8192
_COUNTER = struct.Struct("<Q")  # writes of a slot; the last is in this one's half
_HALF = (_SLOT - _COUNTER.size) // 2
_HEADER = struct.Struct("<II")  # bytes, checksum
_MOST_BYTES = _HALF - _HEADER.size
_READS = 1000
"""Reads of a slot: it may be written twice during one of them."""
_POLL_S, _SPINS = 0.0005, 200
_JOIN_S = 600.0
"""How long a process waits to be let in."""

_MEET_S = 10.0
"""How long members wait, at least, for one that was let in and is alive."""

MEMBER, JOINING, GONE = "member", "joining", "gone"


class RankExpelled(RuntimeError):
    """The group goes on without this process: ``EPCommInitializer.rejoin()``, or end.

    Its results since the peers have masked it are flagged as degraded.
    """


@dataclass
class Note:
    """What a process says of itself."""

    owner: dict[str, Any]
    handle: int
    """Descriptor of its regions, in its process."""
    state: str = JOINING
    epoch: int = 0
    """The decision that it takes part in."""
    masked: list[int] = field(default_factory=list)
    """Nodes that it masks."""
    generations: list[int] = field(default_factory=list)
    ready: int = 0
    """The decision that it has carried out."""

    def is_alive(self) -> bool:
        return self.state != GONE and Owner(**self.owner).is_alive()


@dataclass
class Decision:
    """Who is in the group from now on."""

    epoch: int = 0
    members: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    """Members whose memory is new to the others."""
    generations: list[int] = field(default_factory=list)
    """What each member has run: dispatch sent, received, combine sent, received."""


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


class Membership:
    """The notes of a group's processes, as one of them sees them."""

    def __init__(
        self, group: str, node: int, n_nodes: int, owner: Owner, timeout_s: float
    ) -> None:
        """Opens the notes of a group; they exist, or :meth:`create` makes them."""
        self._node, self._n_nodes = node, n_nodes
        self._timeout_s = timeout_s
        self._name = members_name(group)
        self._handle = _posixshmem.shm_open(self._name, os.O_RDWR)
        self._memory = mmap.mmap(self._handle, 0)
        self._note = Note(asdict(owner), -1)
        self.decision = Decision(members=list(range(n_nodes)))

    @staticmethod
    def create(group: str, n_nodes: int) -> None:
        """Makes empty notes, in place of what an earlier group left."""
        unlink(members_name(group))
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        handle = _posixshmem.shm_open(members_name(group), flags, mode=0o600)
        os.ftruncate(handle, (1 + n_nodes) * _SLOT)
        os.close(handle)

    @classmethod
    def of_running(
        cls, group: str, node: int, n_nodes: int, owner: Owner, timeout_s: float
    ) -> Membership | None:
        """Returns the notes of a group that runs without this node, or None.

        Raises:
            RuntimeError: If the node's old process is alive: it may still write.
        """
        if not exists(members_name(group)):
            return None
        members = cls(group, node, n_nodes, owner, timeout_s)
        old = members.note(node)
        if old is not None and old.is_alive():
            members._release()
            raise RuntimeError(
                f"max_ep: node {node} of group {group!r} has a process that is alive, "
                f"{old.owner['pid']}, and can still write: end it, or let it rejoin()"
            )
        for note in members.notes():
            if note.state != MEMBER or not note.is_alive():
                continue
            if note.owner["fingerprint"] != owner.fingerprint:
                members._release()
                raise ValueError(
                    f"max_ep: group {group!r} runs with another configuration: "
                    f"{note.owner['fingerprint']}; this process: {owner.fingerprint}"
                )
            return members
        members._release()
        return None

    # ---------------------------------------------------------------------- notes

    def _read(self, slot: int) -> Any:
        """Reads what was written last to a slot; None: nothing was."""
        for _ in range(_READS):
            (n_written,) = _COUNTER.unpack_from(self._memory, slot * _SLOT)
            if n_written == 0:
                return None
            at = slot * _SLOT + _COUNTER.size + n_written % 2 * _HALF
            n_bytes, checksum = _HEADER.unpack_from(self._memory, at)
            body = self._memory[at + _HEADER.size : at + _HEADER.size + n_bytes]
            if n_bytes <= _MOST_BYTES and zlib.crc32(body) == checksum:
                return json.loads(body)
        raise RuntimeError(f"max_ep: the notes of {self._name} are damaged")

    def _write(self, slot: int, value: Any) -> None:
        """Writes a slot, beside what was written last: that can be read meanwhile."""
        body = json.dumps(asdict(value)).encode()
        if len(body) > _MOST_BYTES:
            raise ValueError(f"max_ep: {len(body)} bytes are too many for a note")
        (n_written,) = _COUNTER.unpack_from(self._memory, slot * _SLOT)
        n_written += 1
        at = slot * _SLOT + _COUNTER.size + n_written % 2 * _HALF
        self._memory[at + _HEADER.size : at + _HEADER.size + len(body)] = body
        _HEADER.pack_into(self._memory, at, len(body), zlib.crc32(body))
        _COUNTER.pack_into(self._memory, slot * _SLOT, n_written)

    def note(self, node: int) -> Note | None:
        """Returns the note of a process; None: it has written none."""
        found = self._read(1 + node)
        return None if found is None else Note(**found)

    def notes(self) -> list[Note]:
        """Returns the notes of all processes."""
        return [note for n in range(self._n_nodes) if (note := self.note(n))]

    def publish(self, **fields: Any) -> None:
        """Changes this process's note."""
        for name, value in fields.items():
            setattr(self._note, name, value)
        self._write(1 + self._node, self._note)

    def _decided(self) -> Decision | None:
        found = self._read(0)
        return None if found is None else Decision(**found)

    def begin(self, handle: int) -> None:
        """Becomes one of the first members."""
        self.publish(handle=handle, state=MEMBER)

    # ------------------------------------------------------------------- decisions

    def _present(self) -> dict[int, Note]:
        """Returns the notes of members that take part in the next decision."""
        found = {}
        for node in self.decision.members:
            note = self.note(node)
            if note and note.epoch == self._note.epoch and note.state == MEMBER:
                if note.is_alive():
                    found[node] = note
        return found

    def _awaited(self) -> list[int]:
        """Returns the members that may still come."""
        awaited = []
        for node in set(self.decision.members) - set(self._present()):
            note = self.note(node)
            # One that is joining is another process than the member was.
            if note is None or (note.state == MEMBER and note.is_alive()):
                awaited.append(node)
        return awaited

    def reconcile(self, masked: Iterable[int], generations: list[int]) -> Decision:
        """Takes part in the next decision, and returns it.

        Raises:
            RankExpelled: If the decision is to go on without this process.
            TimeoutError: If fewer than half of the processes alive have come.
        """
        epoch = self.decision.epoch + 1
        self.publish(
            epoch=epoch, state=MEMBER, masked=sorted(masked), generations=generations
        )
        deadline, n_polls = time.monotonic() + self._timeout_s, 0
        while (decision := self._decided()) is None or decision.epoch < epoch:
            late_s = time.monotonic() - deadline
            if not (awaited := self._awaited()) or late_s > 0:
                if len(awaited) > len(self._present()) or late_s > self._timeout_s:
                    self.publish(epoch=epoch - 1)
                    raise TimeoutError(
                        f"max_ep: reconcile: node {self._node} waited "
                        f"{self._timeout_s} s for nodes {awaited}, which are alive"
                    )
                self._decide(epoch)
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

    def _decide(self, epoch: int) -> None:
        """Writes the decision, unless another process has."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another one is about to decide
        try:
            decided = self._decided()
            if decided is not None and decided.epoch >= epoch:
                return
            joining = [
                node
                for node in range(self._n_nodes)
                if (n := self.note(node)) and n.state == JOINING and n.is_alive()
            ]
            present = self._present()
            self._write(0, decide(epoch, self.decision.members, present, joining))
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def join(self, handle: int) -> Decision:
        """Waits until the members let this process in, with new or cleared memory."""
        decided = self._decided()
        before = decided.epoch if decided else 0
        self.publish(handle=handle, state=JOINING)
        deadline = time.monotonic() + _JOIN_S
        while True:
            decision = self._decided()
            if decision and decision.epoch > before and self._node in decision.joined:
                break
            if not any(n.state == MEMBER and n.is_alive() for n in self.notes()):
                raise RuntimeError("max_ep: the group ended before this process joined")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"max_ep: node {self._node} waited {_JOIN_S} s for the members to "
                    "call EPCommInitializer.reconcile()"
                )
            time.sleep(_POLL_S)
        self.decision = decision
        self.publish(epoch=decision.epoch, state=MEMBER, masked=[])
        return decision

    def meet(self) -> list[int]:
        """Waits until all have carried out a decision; returns who has not come."""
        epoch = self.decision.epoch
        self.publish(ready=epoch)
        deadline = time.monotonic() + max(self._timeout_s, _MEET_S)
        missing = self.decision.members
        while True:
            notes = {node: self.note(node) for node in missing}
            missing = [n for n, note in notes.items() if not note or note.ready < epoch]
            alive = [n for n in missing if notes[n] is None or notes[n].is_alive()]
            if not alive or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S)

    def handle_of(self, node: int) -> str:
        """Returns the path of a process's memory."""
        note = self.note(node)
        assert note is not None
        return f"/proc/{note.owner['pid']}/fd/{note.handle}"

    def close(self) -> None:
        """Leaves; the last one removes the notes."""
        note = self.note(self._node)
        if note is not None and note.owner == self._note.owner:
            self.publish(state=GONE)
        if not any(note.is_alive() for note in self.notes()):
            unlink(self._name)
        self._release()

    def _release(self) -> None:
        self._memory.close()
        os.close(self._handle)
