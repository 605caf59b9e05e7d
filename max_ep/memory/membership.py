# SPDX-License-Identifier: Apache-2.0
"""Who is in a group: processes agree, outside of any launch, on who goes on.

Each process has a note in a file of shared memory. Between two steps it writes there
whom it masks, and waits until the others have done so. Who need not wait any longer
appends a decision to the file. The first one of an epoch counts, so nobody holds a lock
that a process could take along when it is stopped or killed. A process that wants to
join says so in its note, and is let in by the next decision. This file needs nothing
but Python.
"""

from __future__ import annotations

import _posixshmem
import contextlib
import ctypes
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .symmetric_memory import Owner, members_name, unlink

_SLOT = 8192
_COUNTER = struct.Struct("<Q")  # writes of a slot; the last is in this one's half
_HALF = (_SLOT - _COUNTER.size) // 2
_HEADER = struct.Struct("<II")  # bytes, checksum
_MOST_BYTES = _HALF - _HEADER.size
_READS = 1000
"""Reads of a slot: it may be written twice during one of them."""
_LOG_BYTES = 1 << 20
"""Decisions are read in parts of this size; older ones are removed."""
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
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
    handle: int
    """Descriptor of its regions, in its process."""
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


@dataclass
class Decision:
    """Who is in the group from now on."""

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


class Membership:
    """The notes of a group's processes, as one of them sees them."""

    def __init__(
        self, group: str, node: int, n_nodes: int, owner: Owner, timeout_s: float
    ) -> None:
        """Opens the notes of a group; they exist, or :meth:`create` makes them."""
        self._node, self._n_nodes = node, n_nodes
        self._timeout_s = timeout_s
        self._name = members_name(group)
        self._handle = _posixshmem.shm_open(self._name, os.O_RDWR | os.O_APPEND)
        self._log_at = self._read_to = n_nodes * _SLOT
        try:
            self._memory = mmap.mmap(self._handle, self._log_at)
        except ValueError:  # the file is shorter
            os.close(self._handle)
            raise
        self._note = Note(asdict(owner), -1)
        self._latest = self.decision = Decision(members=list(range(n_nodes)))

    @staticmethod
    def create(group: str, n_nodes: int) -> None:
        """Makes empty notes, in place of what an earlier group left."""
        unlink(members_name(group))
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        handle = _posixshmem.shm_open(members_name(group), flags, mode=0o600)
        os.ftruncate(handle, n_nodes * _SLOT)
        os.close(handle)

    @classmethod
    def of_running(
        cls, group: str, node: int, n_nodes: int, owner: Owner, timeout_s: float
    ) -> Membership | None:
        """Returns the notes of a group that runs without this node, or None.

        Raises:
            RuntimeError: If the node's old process is alive: it may still write.
        """
        try:
            members = cls(group, node, n_nodes, owner, timeout_s)
        except (FileNotFoundError, ValueError):
            return None  # no notes, or node 0 is making them
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

    def note(self, node: int) -> Note | None:
        """Returns the note of a process; None: it has written none."""
        for _ in range(_READS):
            (n_written,) = _COUNTER.unpack_from(self._memory, node * _SLOT)
            if n_written == 0:
                return None
            at = node * _SLOT + _COUNTER.size + n_written % 2 * _HALF
            n_bytes, checksum = _HEADER.unpack_from(self._memory, at)
            body = self._memory[at + _HEADER.size : at + _HEADER.size + n_bytes]
            if n_bytes <= _MOST_BYTES and zlib.crc32(body) == checksum:
                return Note(**json.loads(body))
        raise RuntimeError(f"max_ep: the notes of {self._name} are damaged")

    def notes(self) -> list[Note]:
        """Returns the notes of all processes."""
        return [note for n in range(self._n_nodes) if (note := self.note(n))]

    def publish(self, **fields: Any) -> None:
        """Changes this process's note, beside the last: that can be read meanwhile."""
        for name, value in fields.items():
            setattr(self._note, name, value)
        body = json.dumps(asdict(self._note)).encode()
        if len(body) > _MOST_BYTES:
            raise ValueError(f"max_ep: {len(body)} bytes are too many for a note")
        (n_written,) = _COUNTER.unpack_from(self._memory, self._node * _SLOT)
        n_written += 1
        at = self._node * _SLOT + _COUNTER.size + n_written % 2 * _HALF
        self._memory[at + _HEADER.size : at + _HEADER.size + len(body)] = body
        _HEADER.pack_into(self._memory, at, len(body), zlib.crc32(body))
        _COUNTER.pack_into(self._memory, self._node * _SLOT, n_written)

    def begin(self, handle: int) -> None:
        """Becomes one of the first members."""
        self.publish(handle=handle, state=MEMBER)

    # ------------------------------------------------------------------- decisions

    def latest(self) -> Decision:
        """Reads on to the last decision. Of those of one epoch the first counts."""
        while part := os.pread(self._handle, _LOG_BYTES, self._read_to):
            *lines, rest = part.split(b"\n")
            for line in lines:
                self._read_to += len(line) + 1
                # Its writer was killed, or it is removed in part.
                with contextlib.suppress(ValueError):
                    found = Decision(**json.loads(line))
                    if found.epoch > self._latest.epoch:
                        self._latest = found
            if not lines:
                if rest.strip(b"\0"):
                    break  # it is being written
                self._read_to += len(rest)
        return self._latest

    def _decide(self, decision: Decision) -> None:
        """Appends a decision, and removes what all have read."""
        os.write(self._handle, b"\n" + json.dumps(asdict(decision)).encode() + b"\n")
        n_bytes = self._read_to - _LOG_BYTES - self._log_at
        if n_bytes > 0:
            where = ctypes.c_int64(self._log_at), ctypes.c_int64(n_bytes)
            ctypes.CDLL(None).fallocate(self._handle, _PUNCH_HOLE, *where)

    def _present(self) -> dict[int, Note]:
        """Returns the notes of members that take part in the next decision."""
        found = {}
        for node in self.decision.members:
            note = self.note(node)
            if note and note.epoch == self._note.epoch and note.state == MEMBER:
                if note.is_alive():
                    found[node] = note
        return found

    def _awaited(self, present: Iterable[int]) -> list[int]:
        """Returns the members that may still come."""
        awaited = []
        for node in set(self.decision.members) - set(present):
            note = self.note(node)
            # One that is joining is another process than the member was.
            if note is None or (note.state == MEMBER and note.is_alive()):
                awaited.append(node)
        return awaited

    def _joining(self, now_s: float) -> list[int]:
        """Returns who waits to be let in: one that is stopped would hold up all."""
        return [
            node
            for node in range(self._n_nodes)
            if (note := self.note(node))
            and note.state == JOINING
            and now_s - note.time_s < self._timeout_s
            and note.is_alive()
        ]

    def reconcile(
        self,
        masked: Iterable[int],
        generations: list[int],
        heard_s: Callable[[list[int]], float] = lambda nodes: 0,
    ) -> Decision:
        """Takes part in the next decision, and returns it.

        ``heard_s`` says when one of some nodes was last heard of: those that still wait
        in a launch, for one that has died, are not late.

        Raises:
            RankExpelled: If the decision is to go on without this process.
            TimeoutError: If fewer than half of the processes alive have come.
        """
        epoch, n_polls = self.decision.epoch + 1, 0
        self.publish(
            time_s=time.monotonic(),
            epoch=epoch,
            state=MEMBER,
            masked=sorted(masked),
            generations=generations,
        )
        while (decision := self.latest()).epoch < epoch:
            present, now_s = self._present(), time.monotonic()
            awaited = self._awaited(present)
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
                joining = self._joining(now_s) if is_early else []
                members = self.decision.members
                decision = decide(epoch, members, present, joining)
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

    def join(self, handle: int) -> Decision:
        """Waits until the members let this process in, with new or cleared memory."""
        before, began_s = self.latest().epoch, time.monotonic()
        while True:
            now_s = time.monotonic()
            self.publish(handle=handle, state=JOINING, time_s=now_s)
            decision = self.latest()
            if decision.epoch > before and self._node in decision.joined:
                break
            if not any(n.state == MEMBER and n.is_alive() for n in self.notes()):
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
        if not any(note.is_alive() for note in self.notes()):
            unlink(self._name)
        self._release()

    def _release(self) -> None:
        self._memory.close()
        os.close(self._handle)
