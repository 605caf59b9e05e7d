# SPDX-License-Identifier: Apache-2.0
"""The machine that the protocols' steps run on. How it is explored: `exploration.py`.

A rank runs launches, one after another. A launch is a few *agents* (warps, blocks
or threads), each a list of `Step`s; they run side by side. A step reads or writes
one *place*: a word or a payload in some rank's memory.

Memory is weak, as that of GPUs is. A place keeps the messages that were written to
it, and each agent has a *view*: what is ordered before its next step.

* A plain access is only right if all that was written there is in the view, and,
  for a write, all that was read there. Otherwise both could happen in the other
  order: the payload may become visible after a later relaxed store, and the read
  of a payload may be late.
* An atomic load takes any message that is not older than what the view has seen.
  An acquire takes over the view of a message that was released; a relaxed load
  learns of the one place only.
* A release hands on the whole view of its agent; a relaxed store itself only.
* What the link of a rank carries to other hosts, an agent each, may happen long after
  its launch: the launches that follow do not know of it. A put copies what its source
  holds then. Words that it brings hand on its view, as a signal does.

What is not in it: a relaxed store that becomes visible before an earlier load of
the same agent has returned, but as far as the rule for writes finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .launches import LINK
from .memory import (
    ALL_HAPPENED,
    BOTH,
    HAPPENED,
    OVERWRITTEN,
    RAN_PAST,
    SEEN,
    SENTINEL,
    UNPUBLISHED,
    WRONG_GENERATION,
    Cell,
    Message,
    Order,
    Place,
    RankState,
    State,
    Step,
    Violation,
    both,
    is_true,
    show_value,
)

if TYPE_CHECKING:
    from .launches import World


_ACCEPTS: dict[str, Callable[..., bool]] = {
    "anything": lambda value: True,
    "differs": lambda value, word: value[0] != word,
    "equals": lambda value, word: value[0] == word,
    "filled": lambda value: value != SENTINEL,
    "at least": lambda value, least: value >= least,
    "not zero": lambda value, i: value[i] != 0,
}


class Steps:
    """Does the steps of a program, and begins its launches."""

    def __init__(self, program: World) -> None:
        self.program = program
        self._numbers: dict[Any, int] = {}
        self._names: dict[Any, tuple[str, ...]] = {}
        self._builds: dict[Any, Any] = {}
        self._half = 1 << (program.generation_bits - 1)
        self.used: set[Step] = set()
        self._trace: list[str] | None = None

    def _read_newest(self, state: State, place: Place) -> Any:
        return self._cell(state, place).messages[-1].value

    def _cell(self, state: State, place: Place) -> Cell:
        cell = state.cells.get(place)
        if cell is None:
            value, truth = self.program.initial(place)
            cell = Cell((Message(value, truth, 0, 0),))
        return cell

    def _number(self, rank: int, state: State, agent: int) -> int:
        r = state.ranks[rank]
        name = (rank, r.launch, r.built, agent, r.pcs[agent])
        return self._numbers.setdefault(name, len(self._numbers))

    def accepts(self, accept: tuple[Any, ...], value: Any) -> bool:
        """Says whether a value ends a wait."""
        how, *of = accept
        if how == "reached":
            # `is_not_before` of flags.mojo, in as many bits as generations have.
            return (value[of[0]] - of[1]) % (2 * self._half) < self._half
        return _ACCEPTS[how](value, *of)

    def _bits(self, rank: int, state: State, agent: int) -> tuple[int, int]:
        """The bits of an agent's next step: that it happened, that it was seen."""
        number = 2 * self._number(rank, state, agent)
        return HAPPENED << number, SEEN << number

    def _candidates(
        self, state: State, place: Place, view: int, accept: Any
    ) -> tuple[list[Message], bool]:
        """Finds the messages that a wait may end with, oldest first."""
        messages = self._cell(state, place).messages
        first = 0
        for i, message in enumerate(messages):
            if message.seen & view:
                first = i
        visible = messages[first:]
        fitting = [m for m in visible if self.accepts(accept, m.value)]
        return fitting, bool(fitting) and fitting[-1] is not visible[-1]

    def _take(
        self, state: State, rank: int, agent: int, place: Place, step: Step, m: Message
    ) -> None:
        """Ends a wait with a message."""
        r = state.ranks[rank]
        if not is_true(step.truth, m.truth):
            raise Violation(
                WRONG_GENERATION,
                f"took {show_value(m.value)}, which is {show_value(m.truth)};"
                f" meant was {show_value(step.truth)}",
            )
        bit, seen = self._bits(rank, state, agent)
        r.views[agent] |= bit | seen | m.seen
        if step.order.acquires:
            r.views[agent] |= m.view
            if not m.happened and self.program.is_local(place):
                # A launch before this one has written it, and has ended.
                r.views[agent] |= r.base
        if not self.program.runs_ahead(place):
            cell = self._cell(state, place)
            state.put(place, Cell(cell.messages, cell.reads | bit))

    def _write(self, state: State, rank: int, agent: int, step: Step) -> None:
        r = state.ranks[rank]
        view = r.views[agent]
        cell = self._cell(state, step.place)
        is_weak = step.order in (Order.PLAIN, Order.STREAMED)
        for m in cell.messages:
            is_known = m.seen & view
            # Two that say the same may stay in either order.
            is_same = (m.value, m.truth) == (step.value, step.truth) and not is_weak
            if m.seen and not is_known and not is_same:
                raise Violation(
                    OVERWRITTEN,
                    f"{m} was written there, and nothing orders"
                    " the two: either may stay",
                )
        if not self.program.runs_ahead(step.place) and cell.reads & ~view:
            raise Violation(
                OVERWRITTEN, f"somebody may still be reading {cell.messages[-1]}"
            )
        happened, seen = self._bits(rank, state, agent)
        r.views[agent] |= seen
        if step.order != Order.STREAMED:
            r.views[agent] |= happened
        hands_on = step.order.releases or step.kind == "put"
        handed_on = r.views[agent] if hands_on else seen
        message = Message(step.value, step.truth, handed_on, happened, seen)
        state.put(step.place, Cell((*cell.messages, message), cell.reads))

    def _read(self, state: State, rank: int, agent: int, step: Step) -> None:
        r = state.ranks[rank]
        cell = self._cell(state, step.place)
        newest = cell.messages[-1]
        for m in cell.messages:
            if m.happened & ~r.views[agent]:
                raise Violation(
                    UNPUBLISHED,
                    f"{m} is not ordered before this read: it may"
                    " see that, what was there before, or a chunk of each",
                )
        if (
            not is_true(step.truth, newest.truth)
            or (step.value is not None and newest.value != step.value)
            or (step.accept and not self.accepts(step.accept, newest.value))
        ):
            raise Violation(
                UNPUBLISHED,
                f"holds {show_value(newest.truth)} ({show_value(newest.value)});"
                f" meant was {show_value(step.truth)} ({show_value(step.value)})",
            )
        bit, seen = self._bits(rank, state, agent)
        r.views[agent] |= bit | seen
        state.put(step.place, Cell(cell.messages, cell.reads | bit))

    def _arrive(self, state: State, rank: int, agent: int, step: Step) -> bool:
        """Adds one to a counter; returns whether this was the last."""
        r = state.ranks[rank]
        cell = self._cell(state, step.place)
        newest = cell.messages[-1]
        if step.order.acquires:
            r.views[agent] |= newest.view
        happened, seen = self._bits(rank, state, agent)
        r.views[agent] |= happened | seen | newest.seen
        handed_on = r.views[agent] if step.order.releases else seen
        # An addition goes on with the release of the one before it.
        message = Message(
            newest.value + 1, step.truth, handed_on | newest.view, happened, seen
        )
        state.put(step.place, Cell((*cell.messages, message), cell.reads))
        return newest.value + 1 == step.value

    def options(self, state: State, rank: int, agent: int) -> list[Any]:
        """Lists what an agent's next step may do; nothing if it has to wait."""
        r = state.ranks[rank]
        step = r.agents[agent][r.pcs[agent]]
        view = r.views[agent]
        if step.kind == "join":
            return [None] * all(r.pcs[a] >= len(r.agents[a]) for a in step.agents)
        if step.kind == "await":
            fitting, may_miss = self._candidates(state, step.place, view, step.accept)
            return ["missed"] if may_miss else fitting
        if step.kind == "poll":
            of = (self._candidates(state, x, view, step.accept)[0] for x in step.places)
            return [None, *itertools.product(*of)]
        return [None]

    def perform(self, state: State, rank: int, agent: int, option: Any) -> None:
        """Lets an agent do its next step, in place."""
        r = state.ranks[rank]
        step = r.agents[agent][r.pcs[agent]]
        if self._trace is not None:
            self._trace.append(self._describe(state, rank, agent))
        self.used.add(step)
        skip = 0
        if step.kind == "write":
            self._write(state, rank, agent, step)
        elif step.kind == "read":
            self._read(state, rank, agent, step)
        elif step.kind == "put":
            staged = self._cell(state, step.places[0]).messages[-1]
            self._read(state, rank, agent, replace(step, place=step.places[0]))
            carried = replace(step, value=staged.value, truth=staged.truth)
            self._write(state, rank, agent, carried)
        elif step.kind == "await":
            if option == "missed":
                raise Violation(
                    RAN_PAST,
                    "the word was there and has changed since: whoever polls only"
                    " now waits without end",
                )
            self._take(state, rank, agent, step.place, step, option)
        elif step.kind == "poll":
            if option is None:
                skip = step.skip
            else:
                for place, message in zip(step.places, option):
                    self._take(state, rank, agent, place, step, message)
        elif step.kind == "arrive":
            if not self._arrive(state, rank, agent, step):
                skip = step.skip
        elif step.kind == "drain":
            for pc in range(r.pcs[agent]):
                if r.agents[agent][pc].order == Order.STREAMED:
                    name = (rank, r.launch, r.built, agent, pc)
                    r.views[agent] |= BOTH << 2 * self._numbers[name]
        elif step.kind == "join":
            for a in step.agents:
                r.views[agent] |= r.views[a]
        r.pcs[agent] += 1 + skip

    def start(self) -> State:
        """Makes the first state."""
        return State([RankState(-1, 0) for _ in range(self.program.n_ranks)], {})

    def settle(self, state: State) -> None:
        """Ends launches whose agents are all done, and begins the next ones."""
        goes_on = True
        while goes_on:
            goes_on = False
            for rank, r in enumerate(state.ranks):
                if r.launch == len(self.program.program):
                    continue
                if any(pc < len(steps) for pc, steps in zip(r.pcs, r.agents)):
                    continue
                if self.program.in_turn and not self._has_turn(state, rank):
                    continue
                self._next_launch(state, rank)
                goes_on = True

    def _has_turn(self, state: State, rank: int) -> bool:
        """Says whether all launches before the next one of a rank have ended."""
        mine = (state.ranks[rank].launch + 1, rank)
        for other, r in enumerate(state.ranks):
            is_done = all(pc >= len(s) for pc, s in zip(r.pcs, r.agents))
            if other == rank:
                continue
            # The last launch of `other` that stands before `mine`.
            last = mine[0] if other < rank else mine[0] - 1
            if r.launch < last or (r.launch == last and not is_done):
                return False
        return True

    def _next_launch(self, state: State, rank: int) -> None:
        r = state.ranks[rank]
        names = self._names.get((rank, r.launch, r.built), ())
        for name, view in zip(names, r.views):
            if name != LINK:
                r.base |= view
        r.launch += 1
        r.pcs, r.views, r.agents, r.built = [], [], (), None
        for place in [p for p in state.cells if p[1] == rank]:
            if self.program.is_local(place):
                # All that comes after this launch comes after what it did.
                newest = state.cells[place].messages[-1]
                cell = Cell((Message(newest.value, newest.truth, 0),))
                is_first = (newest.value, newest.truth) == self.program.initial(place)
                state.put(place, None if is_first else cell)
        self._forget(state)
        if r.launch == len(self.program.program):
            return
        r.built = self.program.snapshot(
            rank, lambda place: self._read_newest(state, place)
        )
        name = (rank, r.launch, r.built)
        if name not in self._builds:
            built = self.program.build(rank, r.launch, r.built)
            self._names[name] = tuple(agent for agent, _ in built)
            self._builds[name] = tuple(tuple(steps) for _, steps in built)
        if self._trace is not None:
            op = self.program.program[r.launch]
            self._trace.append(f"  rank {rank} begins launch {r.launch}: {op}")
        r.agents = self._builds[name]
        r.pcs = [0] * len(r.agents)
        # An agent that begins with a join knows what those know that it waits for.
        r.views = [
            0 if steps and steps[0].kind == "join" else r.base for steps in r.agents
        ]

    def _forget(self, state: State) -> None:
        """Drops what makes no difference, so that equal states are found equal."""
        # Steps that everybody knows of, and those that no place asks for.
        known = -1
        for r in state.ranks:
            if r.launch < len(self.program.program):
                # All agents are taken to learn what launches before have done.
                for view in r.views or [r.base]:
                    known &= view | r.base
        asked = 0
        for cell in state.cells.values():
            asked |= cell.reads
            for m in cell.messages:
                asked |= m.happened | m.seen
        known &= asked
        known &= known >> 1 & ALL_HAPPENED
        known |= known << 1
        keep = both(asked) & ~known
        for r in state.ranks:
            r.base &= keep
            r.views = [view & keep for view in r.views]
        for place, cell in list(state.cells.items()):
            first = 0
            bits = cell.reads
            for i, m in enumerate(cell.messages):
                bits |= m.view | m.happened | m.seen
                if m.happened & known:
                    first = i
            if not first and not bits & ~keep:
                continue
            messages = tuple(
                Message(
                    m.value, m.truth, m.view & keep, m.happened & keep, m.seen & keep
                )
                for m in cell.messages[first:]
            )
            state.put(place, Cell(messages, cell.reads & keep))

    def _describe(self, state: State, rank: int, agent: int) -> str:
        r = state.ranks[rank]
        name = self._names[(rank, r.launch, r.built)][agent]
        step = r.agents[agent][r.pcs[agent]]
        return f"  rank {rank}, launch {r.launch}, {name}: {step}"
