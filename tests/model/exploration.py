# SPDX-License-Identifier: Apache-2.0
"""Explores what can happen when a program runs on the machine of `machine.py`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .machine import Steps
from .memory import ENDS, Place, State, Step, Violation, show_value


@dataclass
class Result:
    """What an exploration has found."""

    n_states: int
    failure: Violation | None = None
    trace: list[str] = field(default_factory=list)
    n_ends: int = 0

    def __str__(self) -> str:
        if self.failure is None:
            return f"holds: {self.n_states} states"
        return "\n".join(
            [f"violated: {self.failure.prop}", *self.trace, f"  => {self.failure}"]
        )


class Machine(Steps):
    """Runs a program in every order."""

    def waiting(self, state: State) -> list[tuple[int, int]]:
        """Lists the agents that are not at their end."""
        return [
            (rank, agent)
            for rank, r in enumerate(state.ranks)
            for agent, steps in enumerate(r.agents)
            if r.pcs[agent] < len(steps)
        ]

    def is_over(self, state: State) -> bool:
        return all(r.launch == len(self.program.program) for r in state.ranks)

    def _next_steps(self, state: State) -> Iterator[tuple[int, int, Step]]:
        for rank, agent in self.waiting(state):
            r = state.ranks[rank]
            yield rank, agent, r.agents[agent][r.pcs[agent]]

    def _stuck(self, state: State) -> Violation:
        lines = ["all wait:"]
        for rank, agent, step in self._next_steps(state):
            line = self._describe(state, rank, agent).strip()
            if step.kind == "await":
                line += f"; holds {show_value(self._read_newest(state, step.place))}"
                lines.append(line)
        return Violation(ENDS, "\n     ".join(lines))

    def _is_choice(self, step: Step) -> bool:
        return step.kind == "poll" or step.kind == "arrive" and (step.value or 0) > 1

    def _run_ahead(self, state: State) -> None:
        """Does all steps whose outcome does not depend on when they are done. Whether
        two accesses are ordered depends on views, not on which came first, and a wait
        may take the oldest message that ends it: it teaches least."""
        self.settle(state)
        moved = True
        while moved:
            moved = False
            for rank, agent in self.waiting(state):
                r = state.ranks[rank]
                while r.pcs[agent] < len(r.agents[agent]):
                    step = r.agents[agent][r.pcs[agent]]
                    if self._is_choice(step):
                        break
                    options = self.options(state, rank, agent)
                    if not options:
                        break
                    self.perform(state, rank, agent, options[0])
                    moved = True
            if moved:
                self.settle(state)

    def _branches(self, state: State) -> list[tuple[int, int, int]]:
        """Lists the choices that make a difference once all else has run ahead. What a
        poll finds, or which block is the last to arrive, does not depend on the other
        choices but in one way: a poll may find nothing only because others have not
        gone on. So choices are made one after another, and polls that find nothing last
        of all."""
        idle = []
        arriving: dict[Place, list[tuple[int, int, int]]] = {}
        for rank, agent, step in self._next_steps(state):
            if not self._is_choice(step):
                continue
            options = self.options(state, rank, agent)
            if step.kind == "arrive":
                arriving.setdefault(step.place, []).append((rank, agent, 0))
                here = arriving[step.place]
                there = self._read_newest(state, step.place)
                if len(here) + there >= step.value:
                    return here
            elif len(options) > 1:
                return [(rank, agent, i) for i in range(len(options))]
            else:
                idle.append((rank, agent, 0))
        return idle or [one for group in arriving.values() for one in group]

    def _every_option(self, state: State) -> list[tuple[int, int, int]]:
        return [
            (rank, agent, i)
            for rank, agent in self.waiting(state)
            for i in range(len(self.options(state, rank, agent)))
        ]

    def explore(
        self, every_order: bool = False, max_states: int = 10**7, gives_up: bool = False
    ) -> Result:
        """Explores all that can happen, depth first."""
        start = self.start()
        if every_order:
            self.settle(start)
        seen = set()
        # A state, and the choices that led to it.
        stack: list[tuple[State, Any]] = [(start, None)]
        n_ends = 0
        while stack:
            state, path = stack.pop()
            try:
                if not every_order:
                    self._run_ahead(state)
            except Violation as violation:
                return self._failed(violation, path, seen, every_order)
            key = state.key()
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > max_states:
                if gives_up:
                    break
                raise RuntimeError(f"more than {max_states} states")
            branches = (
                self._every_option(state) if every_order else self._branches(state)
            )
            for rank, agent, i in branches:
                choice = (path, (rank, agent, i))
                after = state.copy()
                try:
                    option = self.options(after, rank, agent)[i]
                    self.perform(after, rank, agent, option)
                    self.settle(after)
                except Violation as violation:
                    return self._failed(violation, choice, seen, every_order)
                stack.append((after, choice))
            if not branches:
                if not self.is_over(state):
                    return self._failed(self._stuck(state), path, seen, every_order)
                n_ends += 1
        return Result(len(seen), n_ends=n_ends)

    def _failed(
        self, violation: Violation, path: Any, seen: Any, every_order: bool
    ) -> Result:
        """Goes the way once more, and writes it down."""
        choices = []
        while path is not None:
            path, choice = path
            choices.append(choice)
        trace = self._trace = []
        state = self.start()
        try:
            self.settle(state)
            for rank, agent, i in reversed(choices):
                if not every_order:
                    self._run_ahead(state)
                option = self.options(state, rank, agent)[i]
                self.perform(state, rank, agent, option)
                self.settle(state)
            if not every_order:
                self._run_ahead(state)
        except Violation:
            pass
        self._trace = None
        return Result(len(seen), violation, trace)

    def walk(self, seed: int) -> Result:
        """Goes a random way: for worlds that are too large to explore."""
        chance = random.Random(seed)
        trace = self._trace = []
        state = self.start()
        self.settle(state)
        try:
            while not self.is_over(state):
                agents = self.waiting(state)
                chance.shuffle(agents)
                for rank, agent in agents:
                    options = self.options(state, rank, agent)
                    if options:
                        self.perform(state, rank, agent, chance.choice(options))
                        self.settle(state)
                        break
                else:
                    raise self._stuck(state)
        except Violation as violation:
            return Result(0, violation, trace)
        return Result(0, n_ends=1)
