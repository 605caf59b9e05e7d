# SPDX-License-Identifier: Apache-2.0
"""Masks, time-outs, late stores, agreement and readmission, in small groups.

Unlike the other worlds, memory here is in order: what a flag makes visible is not the
question, but who reads and writes at all. A rank runs, for each step, the four phases
of `mojo/max_ep/cpu/`. A phase waits for all that it does not mask, then writes to one
peer after another; a rank may be killed, or be as slow as it likes, between any two of
these. A time-out may come whenever something is missing, so a rank that is only slow is
masked, too. After the last step but one the ranks reconcile, as `membership.py` does,
and who was killed or expelled is taken in again.

The one token of a rank chooses another owner in each step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

DISPATCH_ASYNC, DISPATCH_WAIT, COMBINE_ASYNC, COMBINE_WAIT = range(4)
MUTATIONS = {
    "the mask is ignored by readers": 0,
    "a masked rank is written to": 1,
    "a masked rank is waited for": 0,
    "owners share the places of rows": 2,
    "readmission without the group's generations": 0,
    "readmission leaves the old done words": 0,
    "readmission before the old process has ended": 2,
}
"""What may be broken on purpose, and which of the worlds shows it."""


class Wrong(Exception):
    """A property that does not hold."""


def explore(start: Any, next_of: Callable, waits: Callable) -> int:
    """Goes every way; returns the number of states. `waits`: whether a state is no
    end."""
    todo, seen = [start], {start}
    while todo:
        state = todo.pop()
        after = next_of(state)
        if not after and waits(state):
            raise Wrong(f"all wait: {state}")
        new = [one for one in after if one not in seen]
        seen.update(new)
        todo += new
    return len(seen)


@dataclass(frozen=True)
class Rank:
    """A process: what it has done, and what it will do next."""

    step: int = 1
    phase: int = 0
    peer: int = -1  # -1: waits; else writes to this one next
    generation: int = 0  # that dispatch and combine have run; the next is one more
    masked: frozenset = frozenset()
    rows: tuple = ()  # (source, truth) of the tokens received in this step
    state: str = "runs"  # or killed, agrees, expelled, ends


@dataclass(frozen=True)
class State:
    ranks: tuple
    memory: tuple = ()  # sorted (place, value); a place begins with its owner
    old: tuple = ()  # processes that were replaced while they still could write
    n_timeouts: int = 0
    n_kills: int = 0
    has_joined: bool = False


@dataclass
class FaultWorld:
    """A group, and how often what may happen."""

    n_ranks: int = 3
    n_steps: int = 2
    n_timeouts: int = 2
    n_kills: int = 1
    slow: tuple = (0, 1, 2)
    """Ranks that may be so slow that others mask them."""
    mutation: str = ""

    def owner(self, rank: int, step: int) -> int:
        """Says which rank has the expert of a rank's token."""
        return (rank + step) % self.n_ranks

    def has(self, mutation: str) -> bool:
        return mutation in self.mutation

    # ------------------------------------------------------------------ exploring

    def explore(self) -> int:
        start = State(tuple(Rank() for _ in range(self.n_ranks)))
        return explore(
            start,
            self.next_states,
            lambda state: any(r.state in ("runs", "agrees") for r in state.ranks),
        )

    def next_states(self, state: State) -> list[State]:
        found = []
        for i, rank in enumerate(state.ranks):
            if rank.state == "runs":
                found += self._run(state, i, rank)
                if state.n_kills < self.n_kills and rank.step <= self.n_steps - 1:
                    dead = replace(rank, state="killed")
                    n_kills = state.n_kills + 1
                    found.append(replace(self._with(state, i, dead), n_kills=n_kills))
        for i, rank in state.old:
            # It was stopped, and goes on: stores that were under way.
            for to in self._peers(i):
                words = self._words(i, rank, to)
                left = tuple(old for old in state.old if old != (i, rank))
                found.append(replace(self._store(state, words), old=left))
        return found + self._reconcile(state)

    def _with(self, state: State, i: int, rank: Rank) -> State:
        return replace(state, ranks=state.ranks[:i] + (rank,) + state.ranks[i + 1 :])

    def _store(self, state: State, words: dict) -> State:
        memory = dict(state.memory) | words
        return replace(state, memory=tuple(sorted(memory.items())))

    def _peers(self, i: int) -> list[int]:
        return [r for r in range(self.n_ranks) if r != i]

    # ----------------------------------------------------------------- the phases

    def _awaited(self, i: int, rank: Rank) -> dict[int, tuple]:
        """Names each peer's flag that a phase awaits, and its generation."""
        g = rank.generation
        name, wanted = {
            DISPATCH_ASYNC: ("dispatch_done", g),
            DISPATCH_WAIT: ("count", g + 1),
            COMBINE_ASYNC: ("combine_done", g),
            COMBINE_WAIT: ("rows", g + 1),
        }[rank.phase]
        masked = () if self.has("is waited for") else rank.masked
        return {p: (i, name, p, wanted) for p in self._peers(i) if p not in masked}

    def _words(self, i: int, rank: Rank, to: int) -> dict:
        """Lists what a phase writes to a peer, its flag included."""
        g, step = rank.generation + 1, rank.step
        if rank.phase == DISPATCH_ASYNC:
            truth = (i, step) if self.owner(i, step) == to else None
            return {
                (to, "token", i): truth,
                (to, "count", i): (g, int(truth is not None)),
            }
        if rank.phase == DISPATCH_WAIT:
            return {(to, "dispatch_done", i): (g, 0)}
        if rank.phase == COMBINE_WAIT:
            return {(to, "combine_done", i): (g, 0)}
        mine = [truth for source, truth in rank.rows if source == to]
        owner = 0 if self.has("owners share") else i
        row = {(to, "row", owner): (g, (*mine[0], i))} if mine else {}
        return row | {(to, "rows", i): (g, len(mine))}

    def _run(self, state: State, i: int, rank: Rank) -> list[State]:
        memory = dict(state.memory)
        if rank.peer >= 0:
            return [self._write(state, i, rank)]
        missing = [
            peer
            for peer, (*place, wanted) in self._awaited(i, rank).items()
            if memory.get(tuple(place), (0, 0))[0] != wanted
        ]
        if not missing:
            rank = self._read(memory, i, rank)
            return [self._with(state, i, replace(rank, peer=0))]
        found = []
        for peer in set(missing) - rank.masked:
            # It will never come: it is dead, or masks this rank.
            theirs = state.ranks[peer]
            is_gone = theirs.state != "runs" or i in theirs.masked
            n = state.n_timeouts + (not is_gone)
            if is_gone or (peer in self.slow and n <= self.n_timeouts):
                masked = replace(rank, masked=rank.masked | {peer})
                after = self._with(state, i, masked)
                found.append(replace(after, n_timeouts=n))
        return found

    def _write(self, state: State, i: int, rank: Rank) -> State:
        to = rank.peer
        if to != i and (to not in rank.masked or self.has("written to")):
            state = self._store(state, self._words(i, rank, to))
        if to + 1 < self.n_ranks:
            return self._with(state, i, replace(rank, peer=to + 1))
        rank = replace(rank, peer=-1, phase=(rank.phase + 1) % 4)
        if rank.phase == DISPATCH_ASYNC:
            rank = replace(
                rank, step=rank.step + 1, generation=rank.generation + 1, rows=()
            )
            if rank.step == self.n_steps and not state.has_joined:
                rank = replace(rank, state="agrees")
            elif rank.step > self.n_steps:
                rank = replace(rank, state="ends")
        return self._with(state, i, rank)

    def _read(self, memory: dict, i: int, rank: Rank) -> Rank:
        """Reads what a phase has awaited; checks that it is right."""
        g = rank.generation + 1
        ignores = self.has("ignored by readers")
        if rank.phase == DISPATCH_WAIT:
            rows = []
            for source in self._peers(i):
                if source in rank.masked and not ignores:
                    continue
                _, n = memory.get((i, "count", source), (0, 0))
                truth = memory.get((i, "token", source))
                if n and truth is None:
                    raise Wrong("a token that is not there")
                if n:
                    rows.append((source, truth))
            return replace(rank, rows=tuple(rows))
        if rank.phase != COMBINE_WAIT:
            return rank
        owner = self.owner(i, rank.step)
        if owner == i or (owner in rank.masked and not ignores):
            return rank  # its own, or flagged
        place = 0 if self.has("owners share") else owner
        found, truth = memory.get((i, "row", place), (0, None))
        if owner not in rank.masked and memory[i, "rows", owner] != (g, 1):
            raise Wrong(f"rank {i}: the owner has no row, and nothing is flagged")
        if (found, truth) != (g, (i, rank.step, owner)):
            raise Wrong(f"rank {i}, step {rank.step}: {found, truth} without the flag")
        return rank

    # ------------------------------------------------------------------ agreement

    def _reconcile(self, state: State) -> list[State]:
        """Decides once all have come that still run; those that do not are late."""
        come = [i for i, r in enumerate(state.ranks) if r.state == "agrees"]
        running = [i for i, r in enumerate(state.ranks) if r.state == "runs"]
        if state.has_joined or len(come) < len(running) or not come:
            return []
        found = []
        if not running:
            found.append(self._decide(state, come))
        elif state.n_timeouts < self.n_timeouts:
            late = replace(state, n_timeouts=state.n_timeouts + len(running))
            if late.n_timeouts <= self.n_timeouts and self.has("old process"):
                found.append(self._decide(late, come))
        return found

    def _decide(self, state: State, come: list[int]) -> State:
        masks = {i: state.ranks[i].masked for i in come}
        maskers = {i: sum(i in m for m in masks.values()) for i in come}
        kept, expelled = [], set(range(self.n_ranks)) - set(come)
        for i in sorted(come, key=lambda i: (maskers[i], i)):
            if i not in expelled and masks[i].isdisjoint(kept):
                kept.append(i)
                expelled |= masks[i]
        old = tuple((i, r) for i, r in enumerate(state.ranks) if r.state == "runs")
        generation = state.ranks[kept[0]].generation
        memory = dict(state.memory)
        joined = [i for i in range(self.n_ranks) if i not in kept]
        for i in joined:
            self._take_in(memory, i, generation)
        ranks = list(state.ranks)
        for i in range(self.n_ranks):
            is_new = i in joined and self.has("without the group's")
            ranks[i] = Rank(self.n_steps, generation=0 if is_new else generation)
        # No time-out may come now: all must be as if nothing had happened.
        return replace(
            state,
            ranks=tuple(ranks),
            memory=tuple(sorted(memory.items())),
            old=old,
            n_timeouts=self.n_timeouts,
            has_joined=True,
        )

    def _take_in(self, memory: dict, i: int, generation: int) -> None:
        """Clears what a rank wrote, and makes its memory as if it had read all."""
        for place in [p for p in memory if i in (p[0], p[2])]:
            if not (self.has("old done words") and "done" in place[1]):
                del memory[place]
        for peer in self._peers(i):
            for name in ("dispatch_done", "combine_done"):
                for place in ((i, name, peer), (peer, name, i)):
                    if not self.has("old done words"):
                        memory[place] = (generation, 0)


WORLDS = [
    FaultWorld(n_kills=1, n_timeouts=0),
    FaultWorld(n_kills=0, n_timeouts=2),
    FaultWorld(n_kills=0, n_timeouts=3, n_steps=3, slow=(0,)),
    FaultWorld(n_kills=1, n_timeouts=1),
]
"""All that are explored."""
