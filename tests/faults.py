# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that lose ranks and go on: `test_faults.py` drives them.

A member waits for commands; it is stopped or killed at a phase, or whenever the driver
sends the signal. `max_ep.launch` would end with the first that dies.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, in_protocols, narrow, widen
from harness import assert_same_bits, to_buffer, to_numpy
from max.engine import InferenceSession, Model
from max.graph import Module
from processes import (
    BF16,
    SMALL,
    Engine,
    Member,
    Oracle,
    add_phases,
    apply_experts,
    config_of,
    inputs_of,
)

from max_ep import EPCommInitializer, extension_path
from max_ep.limits import GROUP_VARIABLE
from max_ep.memory.setup_graph import SETUP_GRAPH, setup_graph
from max_ep.reference import degraded

PHASES = ("dispatch_async", "dispatch_wait", "combine_async", "combine_wait")
TIMEOUT_S = 2.0
SLACK_S = 1.0
"""How much longer than the time-out a step may take that loses ranks."""

N_RANKS = int(os.environ.get("MAX_EP_FAULT_RANKS", 4))
MASKING = in_protocols([replace(SMALL, name="masking", n_ranks=N_RANKS)])
if not {"MAX_EP_ALL_CASES", "MAX_EP_FAULTS"} & set(os.environ):
    del MASKING["masking"]  # by expert: slow to compile


def compile_graphs(path: Path, session: InferenceSession) -> dict[str, Model]:
    """Compiles what members run into one file."""
    module = Module()
    for case in MASKING.values():
        add_phases(module, case, on_timeout="mask")
    setup_graph(config_of(SMALL, 0), module)
    compiled = session.compile(module, custom_extensions=[extension_path()])
    compiled.export_mef(path)
    return session.init_all(compiled)


@dataclass
class Fault:
    """A rank gets a signal."""

    rank: int
    how: signal.Signals = signal.SIGKILL
    phase: str | None = None
    """In front of this phase; None: whenever the delay is over."""
    delay_s: float = 0


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
    """A generation of one rank, phase by phase."""

    def __init__(
        self, run_op: Callable, case: Case, rank: int, generation: int
    ) -> None:
        """`run_op` runs the graph of an op on the rank."""
        self._run_op, self._case = run_op, case
        self._rank, self._generation = rank, generation
        given = Oracle(case, inputs_of(case, generation))
        self._inputs = given.inputs(rank)
        self._bounds = given.dispatched()[rank]
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
    """A process of a group that masks."""

    def step(self, generation: int, fault: Fault | None) -> Step:
        """Runs a generation: dispatch, experts, combine."""
        step = RankStep(self.run_phase, self.case, self.rank, generation)
        begin = time.monotonic()
        for phase in PHASES:
            if fault is not None and fault.phase == phase:
                os.kill(os.getpid(), fault.how)
            step.run(phase)
        seconds = time.monotonic() - begin
        return Step(seconds, *step.results, lost_ranks(self.comm))

    def reconcile(self) -> list[int]:
        return self.comm.reconcile()

    def mask(self, rank: int) -> list[int]:
        self.comm.mask(rank)
        return self.comm.active_ranks()

    def rejoin(self) -> list[int]:
        self.comm.rejoin()
        return self.comm.active_ranks()


def serve(node_id: int, graphs: str, group: str, pipe: Connection) -> None:
    """Is a member of a group for each protocol: does what it is asked, and answers."""
    os.environ[GROUP_VARIABLE] = group
    engine, members = Engine(graphs), {}
    # The time-out is for those that are late, not for slow starters.
    pipe.send(LOADED)
    pipe.recv()
    try:
        for name, case in MASKING.items():
            config = config_of(case, node_id, timeout_s=TIMEOUT_S, on_timeout="mask")
            given = case, f"{group}-{name}", engine.models[SETUP_GRAPH]
            members[name] = FaultMember(engine, config, *given)
        pipe.send(HERE)
    except Exception:
        pipe.send(traceback.format_exc())
        return
    while (request := pipe.recv()) is not None:
        name, command, *args = request
        try:
            pipe.send(getattr(members[name], command)(*args))
        except Exception:
            pipe.send(traceback.format_exc())
    for member in members.values():
        member.comm.close()


LOADED, HERE = "loaded", "here"
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

    def __init__(self, graphs: str, group: str) -> None:
        self._given = graphs, group
        self._context = multiprocessing.get_context("spawn")
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.generation = 0
        self.start(*ALL)
        for rank in ALL:
            self.expect(rank, HERE)

    def start(self, *ranks: int) -> None:
        """Starts processes, which join, and say that they are here once they are."""
        for rank in ranks:
            self.pipes[rank], theirs = self._context.Pipe()
            self.processes[rank] = self._context.Process(
                target=serve, args=(rank, *self._given, theirs), daemon=True
            )
            self.processes[rank].start()
            theirs.close()
        for rank in ranks:
            self.expect(rank, LOADED)
        for rank in ranks:
            self.pipes[rank].send("join")

    def expect(self, rank: int, answer: Any) -> None:
        got = self.answer(rank)
        assert got == answer, f"rank {rank}: {got}"

    def answer(self, rank: int, timeout_s: float = 60) -> Any:
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def ask(self, ranks: list[int], name: str, command: str, *args: Any) -> list[Any]:
        for rank in ranks:
            self.pipes[rank].send((name, command, *args))
        return [self.answer(rank) for rank in ranks]

    def step(self, name: str, ranks: list[int], *faults: Fault) -> list[int]:
        """Runs the next generation on some ranks, and checks those without a fault.
        Returns the ranks that all of them mask."""
        self.generation += 1
        at = {fault.rank: fault for fault in faults}
        # A rank that is hit in a later phase is hit when the others have gone on.
        n_waits = len(faults) if any(fault.phase for fault in faults) else 1
        limit_s = n_waits * TIMEOUT_S + SLACK_S
        for rank in ranks:
            self.pipes[rank].send((name, "step", self.generation, at.get(rank)))
        begin = time.monotonic()
        for fault in sorted(faults, key=lambda fault: fault.delay_s):
            if fault.phase is None:
                time.sleep(max(0, begin + fault.delay_s - time.monotonic()))
                os.kill(self.processes[fault.rank].pid, fault.how)
        steps = {rank: self.answer(rank) for rank in ranks if rank not in at}
        for rank, step in steps.items():
            check(name, self.generation, rank, step)
            assert step.seconds < limit_s, (rank, step.seconds)
        return sorted(set.intersection(*(set(step.masked) for step in steps.values())))

    def survive(self, name: str, *faults: Fault) -> None:
        """Loses ranks in a step, goes on without them, takes them in again."""
        lost = sorted(fault.rank for fault in faults)
        rest = [rank for rank in ALL if rank not in lost]
        self.step(name, ALL, *faults)
        hit = self.generation
        assert self.step(name, rest) == lost, f"{name}: {faults}"
        killed = [f.rank for f in faults if f.how == signal.SIGKILL]
        for rank in killed:
            self.processes[rank].join()
        stopped = [rank for rank in lost if rank not in killed]
        for rank in stopped:
            os.kill(self.processes[rank].pid, signal.SIGCONT)
            check(name, hit, rank, self.answer(rank))
        for rank in stopped:
            self.pipes[rank].send((name, "reconcile"))
        got = self.ask(rest, name, "reconcile")
        assert all(set(stopped).isdisjoint(active) for active in got), got
        for rank in stopped:
            error = self.answer(rank)
            assert "RankExpelled: max_ep: the group goes on without" in error, error
        there = {other: [r for r in ALL if r not in killed] for other in MASKING}
        there[name] = rest
        for rank in stopped:
            self.pipes[rank].send((name, "rejoin"))
            self.admit(name, there[name], rank)
            assert rank in self.answer(rank)
        for rank in killed:
            self.start(rank)
            for other in MASKING:
                self.admit(other, there[other], rank)
            self.expect(rank, HERE)
        for other in MASKING:
            assert self.step(other, ALL) == []

    def admit(self, name: str, members: list[int], rank: int) -> None:
        """Reconciles until a rank that waits has joined."""
        deadline = time.monotonic() + 30
        active: list[int] = []
        while rank not in active:
            if time.monotonic() > deadline:
                pytest.fail(f"{active} without rank {rank}: {self.answer(rank, 0)}")
            got = self.ask(members, name, "reconcile")
            active = got[0]
            assert all(x == active for x in got), got
            time.sleep(0.02)
        members.append(rank)

    def close(self) -> None:
        """Ends the processes; those that do not answer are killed."""
        for rank, process in self.processes.items():
            if process.is_alive():
                self.pipes[rank].send(None)
        for process in self.processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
