# SPDX-License-Identifier: Apache-2.0
"""Tries mutations: where a run first reaches one, a process forks in which it is on.

So the way there is run once for all of them. The parent goes on without it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence

from tests.codegen.assembly import Kernel, Op

from .mutations import Mutation, mutations

FEWEST_SECONDS = 4
"""Processor time that a forked process gets at least, and twice that of its check. Only
one that takes longer does not end."""


class Trials:
    """Mutations that are tried; `caught` has what was noticed of each."""

    def __init__(self, tried: Sequence[Mutation]) -> None:
        self.number = {mutation: i for i, mutation in enumerate(tried)}
        self.is_open = [False] * len(tried)
        self.caught: dict[Mutation, str] = {}
        self.late: dict[Mutation, str] = {}
        """What a forked process was stopped in; its check may just be long."""
        self.seconds = FEWEST_SECONDS
        self.reached: set[Mutation] = set()
        self._mutations = list(tried)
        self._on: int | None = None
        self._report = -1

    def of(self, kernel: Kernel) -> dict[int, list[tuple[int, list[Op]]]]:
        """Returns what operations of a kernel become, by the mutations' numbers."""
        found: dict[int, list[tuple[int, list[Op]]]] = {}
        for mutation, changes in mutations(kernel).items():
            if (number := self.number.get(mutation)) is not None:
                for place, made in changes.items():
                    found.setdefault(place, []).append((number, made))
        return found

    def begins(self, number: int) -> bool:
        """Returns whether a mutation is on; forks if it is to be tried here."""
        if self._on is not None:
            return True
        self.is_open[number] = False
        mutation = self._mutations[number]
        self.reached.add(mutation)
        to_read, to_write = os.pipe()
        if pid := os.fork():
            os.close(to_write)
            with open(to_read, "rb") as report:
                said = report.read().decode()
            _, status = os.waitpid(pid, 0)
            if status == signal.SIGVTALRM:
                self.late[mutation] = f"does not end in {self.seconds:.0f} s"
            elif said or status:
                self.caught[mutation] = said or f"ends with {status}"
            return False
        signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds)
        self._on, self._report = number, to_write
        self.is_open[:] = [False] * len(self.is_open)
        self.is_open[number] = True
        return True

    def run(self, check: Callable[[], None]) -> None:
        """Runs a check with each mutation that it reaches and that was not noticed."""
        self.late, self.seconds = {}, FEWEST_SECONDS
        begin = time.process_time()
        self._run(check, [x for x in self._mutations if x not in self.caught])
        needed = 2 * (time.process_time() - begin)
        if self.late and self.seconds < needed:
            late, self.late, self.seconds = self.late, {}, needed
            self._run(check, late)
        self.caught |= self.late

    def _run(self, check: Callable[[], None], tried: Collection[Mutation]) -> None:
        self.is_open[:] = [x in tried for x in self._mutations]
        try:
            check()
        except BaseException as error:
            if self._on is None:
                raise
            os.write(self._report, f"{type(error).__name__}: {error}"[:4000].encode())
        if self._on is not None:
            os._exit(0)
