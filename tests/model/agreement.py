# SPDX-License-Identifier: Apache-2.0
"""How processes agree on who goes on: `membership.py`, in small groups.

A process publishes a note, reads the decisions, appends one, clears memory of those
that join, meets the others, or works. Between any two of these it may be killed or
stopped for ever, or be so slow that others no longer wait for it.
"""

from dataclasses import dataclass, replace

from .faults import Wrong, explore

MUTATIONS = (
    "the last decision of an epoch counts",
    "an old decision is taken",
    "who decides holds a lock",
    "nobody meets those that join",
)
"""What may be broken on purpose."""


@dataclass(frozen=True)
class Process:
    does: str = "begins"
    epoch: int = 0  # of the decision that it has taken
    members: frozenset = frozenset()
    joined: frozenset = frozenset()
    proposal: tuple = ()
    masked: frozenset = frozenset()
    note: str = "member"  # or joining, gone
    note_epoch: int = 0
    ready: int = 0  # the decision for which it has cleared memory

    @property
    def is_alive(self) -> bool:
        return self.does not in ("is dead", "is out", "ends")


_NOTHING = 0, frozenset(), frozenset(), (), frozenset()


@dataclass(frozen=True)
class State:
    processes: tuple
    log: tuple = ()  # (epoch, members, joined), as appended
    taken: tuple = ()  # (epoch, members) that some process has taken
    holder: int = -1  # of the lock, if there were one
    n_faults: int = 0
    n_timeouts: int = 0


@dataclass(frozen=True)
class AgreementWorld:
    """A group, and how often what may happen."""

    members: int = 3
    joining: int = 0
    n_epochs: int = 2
    n_faults: int = 1
    n_timeouts: int = 1
    mutation: str = ""

    def explore(self) -> int:
        members = frozenset(range(self.members))
        begins = [Process(members=members)] * self.members
        joins = [Process("joins", note="joining")] * self.joining
        return explore(
            State((*begins, *joins)),
            self._next,
            lambda state: any(p.does in ("waits", "meets") for p in state.processes),
        )

    def _next(self, state: State) -> list[State]:
        found = []
        for i, process in enumerate(state.processes):
            if not process.is_alive or process.does == "is stopped":
                continue
            found += getattr(self, "_" + process.does)(state, i, process)
            if state.n_faults < self.n_faults:
                for does in ("is dead", "is stopped"):
                    after = self._with(state, i, process, does=does)
                    found.append(replace(after, n_faults=state.n_faults + 1))
        return found

    def _with(self, state: State, i: int, process: Process, **changes: object) -> State:
        changed = replace(process, **changes)
        if not changed.is_alive or changed.does == "is stopped":  # the rest is the same
            note = changed.note, changed.note_epoch, changed.ready
            changed = Process(changed.does, *_NOTHING, *note)
        others = state.processes
        return replace(state, processes=(*others[:i], changed, *others[i + 1 :]))

    def _times_out(self, state: State, late: set[int]) -> list[State]:
        """Says, as a state, whether one need not wait for others any longer."""
        if all(state.processes[p].does == "is stopped" for p in late):
            return [state]
        n = state.n_timeouts + 1
        return [replace(state, n_timeouts=n)] if n <= self.n_timeouts else []

    def _latest(self, state: State) -> tuple:
        latest = (0, frozenset(), frozenset())
        for record in state.log:
            again = "the last" in self.mutation and record[0] == latest[0]
            if record[0] > latest[0] or again:
                latest = record
        return latest

    def _begins(self, state: State, i: int, process: Process) -> list[State]:
        # Work of the step before: it writes to whom it does not mask.
        for peer in process.members - process.masked - {i}:
            if process.joined and state.processes[peer].ready < process.epoch:
                raise Wrong(f"{i} writes to {peer}, which has not cleared its memory")
        if process.epoch == self.n_epochs:
            return [self._with(state, i, process, does="ends", note="gone")]
        epoch = process.epoch + 1
        changes = dict(note_epoch=epoch, joined=frozenset(), masked=frozenset())
        return [self._with(state, i, process, does="waits", **changes)]

    def _waits(self, state: State, i: int, process: Process) -> list[State]:
        epoch, latest = process.epoch + 1, self._latest(state)
        if "an old" in self.mutation:
            latest = next((r for r in state.log if r[0] == epoch), latest)
        if latest[0] > process.epoch:
            if latest[0] == epoch and i in latest[1]:
                return [self._take(state, i, process, latest)]
            return [self._with(state, i, process, does="is out", note="gone")]
        notes = state.processes
        alive = {p for p in process.members if notes[p].is_alive}
        present = {p for p in alive if notes[p].note_epoch == epoch}
        present = {p for p in present if notes[p].note == "member"}
        awaited = {p for p in alive - present if notes[p].note == "member"}
        joining = {p for p, n in enumerate(notes) if n.note == "joining" and n.is_alive}
        if state.holder not in (-1, i) and notes[state.holder].is_alive:
            return []
        holder = i if "a lock" in self.mutation else -1
        found = []
        for after in self._times_out(state, awaited) if awaited else [state]:
            joined = frozenset(() if awaited else joining)
            record = epoch, frozenset(present) | joined, joined
            after = self._with(after, i, process, does="appends", proposal=record)
            found.append(replace(after, holder=holder))
        return found

    def _appends(self, state: State, i: int, process: Process) -> list[State]:
        after = self._with(state, i, process, does="waits", proposal=())
        log = (*state.log, process.proposal)
        if "the last" not in self.mutation and process.proposal[0] <= len(state.log):
            log = state.log  # nobody sees the second of an epoch
        return [replace(after, log=log, holder=-1)]

    def _joins(self, state: State, i: int, process: Process) -> list[State]:
        latest = self._latest(state)
        if i in latest[2]:
            return [self._take(state, i, process, latest)]
        if not any(p.note == "member" and p.is_alive for p in state.processes):
            return [self._with(state, i, process, does="is out")]
        return []

    def _take(self, state: State, i: int, process: Process, record: tuple) -> State:
        epoch, members, joined = record
        if any(newer > epoch for newer, *_ in state.log):
            raise Wrong(f"{i} takes decision {epoch}, and the others have a newer one")
        for known, theirs in state.taken:
            if known == epoch and theirs != members:
                raise Wrong(f"{i} takes {set(members)}, another {set(theirs)}")
        state = replace(state, taken=(*{*state.taken, (epoch, members)},))
        state = replace(state, taken=tuple(sorted(state.taken, key=str)))
        return self._with(
            state,
            i,
            process,
            does="clears" if joined else "begins",
            note="member",
            epoch=epoch,
            members=members,
            joined=joined,
            masked=frozenset(),
        )

    def _clears(self, state: State, i: int, process: Process) -> list[State]:
        return [self._with(state, i, process, does="meets", ready=process.epoch)]

    def _meets(self, state: State, i: int, process: Process) -> list[State]:
        notes = state.processes
        missing = {p for p in process.members if notes[p].ready < process.epoch}
        awaited = {p for p in missing if notes[p].is_alive}
        masked = frozenset(missing)
        if "nobody meets" in self.mutation:
            awaited, masked = set(), frozenset()
        return [
            self._with(after, i, process, does="begins", masked=masked)
            for after in (self._times_out(state, awaited) if awaited else [state])
        ]


WORLDS = [
    AgreementWorld(members=2, joining=1),
    AgreementWorld(members=3, n_faults=2),
    AgreementWorld(members=3, n_timeouts=2, n_faults=0),
    AgreementWorld(members=2, joining=2, n_epochs=1),
]
"""All that are explored."""
