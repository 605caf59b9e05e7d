# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that lose ranks and go on: `test_faults.py` drives them.

A member waits for commands; it is stopped or killed at a phase, at a line of the
package's memory/*.py, or whenever the driver sends the signal. `max_ep.launch` would
end with the first that dies.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from max.graph import Module

from max_ep import EPCommInitializer
from max_ep.limits import GROUP_VARIABLE
from max_ep.processes.meeting import process_state
from max_ep.reference import degraded
from tests.children import ALL_CASES
from tests.harness import assert_same_bits, to_buffer, to_numpy
from tests.oracle.cases import BF16, Case, in_protocols
from tests.oracle.drawn import narrow, widen
from tests.processes.generations import (
    SMALL,
    Oracle,
    apply_experts,
    config_of,
    inputs_of,
)
from tests.processes.process_graphs import add_phases
from tests.processes.processes import Engine, Member

PHASES = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
RECONCILE, JOIN = "reconcile", "join"
"""Faults in these calls: `join` is `ep_init` of a new process, or `rejoin`."""

TIMEOUT_S = float(os.environ.get("MAX_EP_FAULT_TIMEOUT", 2))
SLACK_S = float(os.environ.get("MAX_EP_FAULT_SLACK", 1))
"""How much longer than the time-out a call may take that loses ranks; more on a
machine that is busy otherwise."""

N_RANKS = int(os.environ.get("MAX_EP_FAULT_RANKS", 4))
MASKING = in_protocols([replace(SMALL, name="masking", n_ranks=N_RANKS)])
if "MAX_EP_FAULTS" not in os.environ:
    MASKING["masking_sums"] = replace(MASKING["masking_sums"], partial="mxfp8")
if not ALL_CASES and "MAX_EP_FAULTS" not in os.environ:
    # A group with sums is by rank, too.
    del MASKING["masking"], MASKING["masking_by_rank"]


def add_masking(module: Module, names: Iterable[str] = MASKING) -> None:
    for name in names:
        add_phases(module, MASKING[name], on_timeout="mask")


@dataclass
class Fault:
    rank: int
    how: signal.Signals = signal.SIGKILL
    phase: str | None = None
    """In front of this phase, or in `RECONCILE` or `JOIN`; None: in some phase."""
    delay_s: float = 0
    """When, if no phase and no line says it."""
    line: int | None = None
    """After so many lines of memory/*.py: of `RECONCILE` or `JOIN`."""

    @contextlib.contextmanager
    def strikes(self) -> Iterator[None]:
        """Counts the lines of what runs in it; strikes at the end at the latest."""
        left = self.line or 0

        def count(frame: Any, event: str, _: Any) -> Callable:
            nonlocal left
            left -= event == "line"
            if left == 0:
                os.kill(os.getpid(), self.how)
                left = -1
            return count

        def trace(frame: Any, *_: Any) -> Callable | None:
            return count if "/max_ep/memory/" in frame.f_code.co_filename else None

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)
            if left > 0:
                os.kill(os.getpid(), self.how)


def draw(
    seed: int, number: int, names: Sequence[str] = tuple(MASKING)
) -> tuple[str, list[Fault]]:
    """Draws one or two ranks, which are struck in any phase, at any time, in
    `reconcile()`, or as they join."""
    rng = np.random.default_rng([seed, number])
    faults = []
    for rank in rng.permutation(N_RANKS)[: 1 + int(rng.integers(4) == 0)]:
        at = [*PHASES, None, None, RECONCILE, RECONCILE, JOIN][rng.integers(9)]
        how = signal.SIGKILL if rng.integers(3) == 0 else signal.SIGSTOP
        has_line = at == JOIN or (at == RECONCILE and rng.integers(2))
        line = int(10 ** rng.uniform(0, 3)) if has_line else None
        faults.append(Fault(int(rank), how, at, rng.random() * 0.03, line))
    return names[rng.integers(len(names))], faults


def struck(fault: Fault | None) -> Any:
    has_line = fault is not None and fault.line is not None
    return fault.strikes() if has_line else contextlib.nullcontext()


def lost_ranks(comm: EPCommInitializer) -> list[int]:
    return sorted(set(range(N_RANKS)) - set(comm.active_ranks()))


@dataclass
class Step:
    """What a rank made of a generation."""

    seconds: float
    sums: np.ndarray
    degraded: np.ndarray
    live_share: np.ndarray
    masked: list[int]


class RankStep:
    def __init__(
        self, run_op: Callable, case: Case, rank: int, generation: int
    ) -> None:
        """`run_op` runs the graph of an op on the rank."""
        self._run_op, self._case = run_op, case
        self._rank, self._generation = rank, generation
        given = Oracle(case, inputs_of(case, generation))
        self._inputs = given.inputs(rank)
        self._bounds = given.dispatched[rank]
        self.results: list[np.ndarray] = []

    def run(self, phase: str) -> None:
        tokens, ids, weights = self._inputs
        if phase == "dispatch_async":
            self._run_op(phase, tokens, ids, weights)
        elif phase == "dispatch_wait":
            rows, offsets, _, self._src_info = self._run_op(phase)
            offsets = to_numpy(offsets).astype(np.int64)
            of_rank = replace(self._bounds, row_offsets=offsets)
            given = self._case, self._generation, self._rank, of_rank
            made = apply_experts(*given, widen(to_numpy(rows)))
            self._rows = to_buffer(narrow(made, BF16))
        elif phase == "combine_async":
            self._run_op(phase, self._rows, self._src_info)
        else:
            results = self._run_op(phase, weights, self._rows, ids)
            self.results = list(map(to_numpy, results))


class FaultMember(Member):
    def step(self, generation: int, fault: Fault | None) -> Step:
        step = RankStep(self.run_phase, self.case, self.rank, generation)
        begin = time.monotonic()
        for phase in PHASES:
            if fault is not None and fault.phase == phase:
                os.kill(os.getpid(), fault.how)
            step.run(phase)
        seconds = time.monotonic() - begin
        return Step(seconds, *step.results, lost_ranks(self.comm))

    def reconcile(self, fault: Fault | None) -> tuple[float, list[int]]:
        begin = time.monotonic()
        with struck(fault):
            active = self.comm.reconcile()
        return time.monotonic() - begin, active

    def silent_s(self, _: int) -> float:
        """Since when one of the other ranks has not been heard of."""
        others = set(range(N_RANKS)) - {self.rank}
        return time.monotonic() - self.comm._ranks._heard_s(others)

    def mask(self, rank: int) -> list[int]:
        self.comm.mask(rank)
        return self.comm.active_ranks()

    def rejoin(self, fault: Fault | None = None) -> str:
        with struck(fault):
            self.comm.rejoin()
        return HERE


def serve(graphs: str, group: str, pipe: Connection) -> None:
    """Is a member of a group for each protocol: does what it is asked, and answers."""
    os.environ[GROUP_VARIABLE] = group
    engine, members = Engine(graphs), {}
    pipe.send(LOADED)
    node_id = pipe.recv()

    def join(fault: Fault | None) -> str:
        case = MASKING[name]
        config = config_of(case, node_id, timeout_s=TIMEOUT_S, on_timeout="mask")
        with struck(fault):
            members[name] = FaultMember(engine, config, case, f"{group}-{name}")
        return HERE

    while (request := pipe.recv()) is not None:
        name, command, *args = request
        try:
            called = join if command == "join" else getattr(members[name], command)
            pipe.send(called(*args))
        except Exception:
            pipe.send(traceback.format_exc())
    for member in members.values():
        member.comm.close()


LOADED, HERE = "loaded", "here"
START_S = 300
"""How long a process may take to import MAX, on busy cores."""
ALL = list(range(N_RANKS))


def check(name: str, generation: int, rank: int, step: Step | str) -> None:
    """Right for every token without the flag, and the flag where it must be; what
    is left of a flagged token is right, too."""
    where, case = f"{name}, rank {rank}, generation {generation}", MASKING[name]
    assert isinstance(step, Step), f"{where}: {step}"
    where += f", without {step.masked}"
    given = inputs_of(case, generation)
    ids, weights = given.ids[rank], given.weights[rank]
    masked = [r in step.masked for r in ALL]
    flags, share = degraded(ids, weights, case.n_experts, masked)
    np.testing.assert_array_equal(step.degraded, flags, where)
    np.testing.assert_array_equal(step.live_share, share, where)
    is_lost = np.isin(ids // case.n_local_experts, step.masked)
    given.ids[rank] = np.where(is_lost, np.int32(-1), ids)
    want = Oracle(case, given).sums(rank, generation)
    assert_same_bits(where, step.sums, want)


class Group:
    """The driver's view of the processes."""

    def __init__(
        self,
        graphs: str,
        group: str,
        n_spares: int = 0,
        names: Iterable[str] = MASKING,
    ) -> None:
        """Starts the ranks, and `n_spares` processes that may replace others."""
        self._given = graphs, group
        self._context = multiprocessing.get_context("spawn")
        self._spares = [self._spawn() for _ in range(N_RANKS + n_spares)]
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.out = {name: set(ALL) for name in names}
        """Ranks whose process has not joined a group."""
        self.generation = 0
        # The time-out is for those that are late, not for slow starters.
        for _, pipe in self._spares[:N_RANKS]:
            assert pipe.poll(START_S)
        for rank in ALL:
            self.start(rank, spawns=False)
        for name in self.out:
            for rank in ALL:
                self.pipes[rank].send((name, "join", None))
                # All wait for the last longer than they wait in a launch.
                time.sleep(1.2 * TIMEOUT_S if rank == N_RANKS - 2 else 0)
            answers = [self.answer(rank) for rank in ALL]
            assert answers == N_RANKS * [HERE], answers
            self.out[name] = set()

    def _spawn(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        given = *self._given, theirs
        process = self._context.Process(target=serve, args=given, daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def start(self, rank: int, spawns: bool = True) -> None:
        """Gives a rank a new process, which has joined no group."""
        if spawns:
            self._spares.append(self._spawn())
        self.processes[rank], self.pipes[rank] = self._spares.pop(0)
        assert self.answer(rank) == LOADED
        self.pipes[rank].send(rank)
        for out in self.out.values():
            out.add(rank)

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(START_S), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def ask(self, ranks: list[int], name: str, command: str, *args: Any) -> list[Any]:
        for rank in ranks:
            self.pipes[rank].send((name, command, *args))
        return [self.answer(rank) for rank in ranks]

    def _run(
        self, name: str, command: str, ranks: list[int], faults: tuple, *args: Any
    ) -> dict[int, Any]:
        """Asks ranks, strikes some of them, and returns what the others answer."""
        at = {fault.rank: fault for fault in faults}
        for rank in ranks:
            self.pipes[rank].send((name, command, *args, at.get(rank)))
        begin = time.monotonic()
        for fault in sorted(faults, key=lambda fault: fault.delay_s):
            if fault.line is None and fault.phase not in PHASES:
                time.sleep(max(0, begin + fault.delay_s - time.monotonic()))
                os.kill(self.processes[fault.rank].pid, fault.how)
        return {rank: self.answer(rank) for rank in ranks if rank not in at}

    def step(self, name: str, ranks: list[int], *faults: Fault) -> list[int]:
        self.generation += 1
        steps = self._run(name, "step", ranks, faults, self.generation)
        # A rank that is hit in a later phase is hit when the others have gone on.
        n_waits = len(faults) if any(fault.phase for fault in faults) else 1
        for rank, step in steps.items():
            check(name, self.generation, rank, step)
            self.took(rank, step.seconds - (n_waits - 1) * TIMEOUT_S)
        return sorted(set.intersection(*(set(step.masked) for step in steps.values())))

    def reconcile(self, name: str, ranks: list[int], *faults: Fault) -> dict[int, Any]:
        """Reconciles; returns what each rank without a fault takes for active, or its
        error."""
        answers = self._run(name, RECONCILE, ranks, faults)
        active = {}
        for rank, got in answers.items():
            if isinstance(got, str):
                assert "RankExpelled: max_ep: the group goes on without" in got, got
                active[rank] = got
            else:
                seconds, active[rank] = got
                self.took(rank, seconds)
        return active

    def took(self, rank: int, seconds: float) -> None:
        """Checks how long a call took."""
        assert seconds < TIMEOUT_S + SLACK_S, (rank, seconds)

    def survive(self, name: str, *faults: Fault) -> None:
        """Loses ranks, goes on without them, takes them in again."""
        rest = ALL
        for is_reconcile in (False, True):
            struck = [
                f
                for f in faults
                if f.phase != JOIN and (f.phase == RECONCILE) == is_reconcile
            ]
            if struck:
                rest = self.lose(name, rest, *struck)
        joining = {fault.rank: fault for fault in faults if fault.phase == JOIN}
        for rank in set(joining) & set(rest):  # is lost first, in no call
            rest = [r for r in rest if r != rank]
            if joining[rank].how == signal.SIGKILL:
                self.processes[rank].kill()
                self.processes[rank].join()
            else:
                self.ask(rest, name, "mask", rank)
        for other in [name, *(set(self.out) - {name})]:
            self.heal(other, joining if other == name else {})
            assert self.step(other, ALL) == []

    def lose(self, name: str, members: list[int], *faults: Fault) -> list[int]:
        """Strikes ranks in a step, or in `RECONCILE`; returns the others, which all
        mask them."""
        lost = [fault.rank for fault in faults]
        rest = [rank for rank in members if rank not in lost]
        if faults[0].phase == RECONCILE:
            alive = [rank for rank in ALL if self.processes[rank].is_alive()]
            active = self.reconcile(name, alive, *faults)
            first = active[rest[0]]
            assert all(active[rank] == first for rank in rest), active
            assert set(rest) <= set(first) <= set(members), active
        else:
            self.step(name, members, *faults)
        hit = self.generation
        others = [rank for rank in ALL if rank not in rest]
        assert self.step(name, rest) == others, f"{name}: {faults}"
        for fault in faults:
            process = self.processes[fault.rank]
            if fault.how == signal.SIGKILL:
                process.join()
                continue
            os.kill(process.pid, signal.SIGCONT)
            answer = self.answer(fault.rank)
            if fault.phase != RECONCILE:
                check(name, hit, fault.rank, answer)
            else:
                assert isinstance(answer, tuple) or "RankExpelled" in answer, answer
        return rest

    def heal(self, name: str, faults: dict[int, Fault]) -> None:
        """Reconciles until all ranks are in; strikes some as they join."""
        faults, active = dict(faults), {}
        joining: set[int] = set()
        stopped_at: dict[int, float] = {}
        deadline = time.monotonic() + START_S + 10 * TIMEOUT_S

        def join(rank: int, command: str) -> None:
            self.pipes[rank].send((name, command, faults.pop(rank, None)))
            joining.add(rank)

        while list(active.values()) != len(ALL) * [ALL]:
            now = time.monotonic()
            assert now < deadline, (joining, active, self.out)
            for rank, process in list(self.processes.items()):
                if not process.is_alive():
                    self.start(rank)
                    joining.discard(rank)
                elif process_state(process.pid) == "is stopped":
                    if now > stopped_at.setdefault(rank, now) + 1.2 * TIMEOUT_S:
                        os.kill(process.pid, signal.SIGCONT)
                        del stopped_at[rank]
                elif rank in joining and self.pipes[rank].poll():
                    with contextlib.suppress(EOFError):  # was just killed
                        assert (got := self.answer(rank)) == HERE, (rank, got)
                        joining.discard(rank)
                        self.out[name].discard(rank)
                if rank in self.out[name] - joining:
                    join(rank, "join")
            members = [r for r in ALL if r not in joining]
            active = self.reconcile(name, members)
            for rank, got in active.items():
                if isinstance(got, str):
                    join(rank, "rejoin")
            time.sleep(0.01)

    def close(self) -> None:
        for process, _ in self._spares:
            self.processes[len(self.processes)] = process
            process.kill()
        for rank in ALL:
            if self.processes[rank].is_alive():
                self.pipes[rank].send(None)
        for process in self.processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
