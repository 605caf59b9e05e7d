# SPDX-License-Identifier: Apache-2.0
"""The ranks of `processes.py` in one process, in turn: phases in any order.

A graph that is run again does what a captured graph does that is replayed. A step:

    D1   dispatch of the tokens of generation 1 on all ranks; d1, w1: async or wait only
    C1   combine of the last dispatch, which was of these tokens; c1, v1: the same
    r    reset
"""

import numpy as np
from max.driver import Buffer

from max_ep import EPCommInitializer
from tests.harness import assert_same_bits, to_buffer, to_numpy
from tests.oracle.cases import Case
from tests.oracle.drawn import Inputs, make_inputs
from tests.oracle.oracle import expected
from tests.processes.generations import N_RANKS, check_dispatched
from tests.processes.processes import Engine, Member


class InTurn(Member):
    def __init__(self, group: "Group", rank: int) -> None:
        self.engine, self.case = group.engine, group.case
        self.group, self.config, self.rank = group, group.comm.config, rank
        self._sent_rows = self.received = None

    def run(self, graph: str, *inputs) -> list:
        buffers = self.group.buffers or self.group.comm.model_inputs()
        counters = [buffers[self.rank], buffers[N_RANKS + self.rank]]
        model = self.engine.models[graph]
        return model.execute(*inputs, *counters, *buffers[2 * N_RANKS :])

    def step(self, what: str, generation: int, experts: int) -> None:
        """Does a phase; the experts are those of a generation of their own."""
        if what == "d":
            self.dispatch_async(generation)
        elif what == "w":
            self.received = self.dispatch_wait(generation)
        elif what == "c":
            bounds = self.oracle(generation).dispatched[self.rank]
            self.send_rows(experts, bounds, *self.received)
        else:
            self.combine_wait(generation, experts)


class Group:
    """All ranks of a group, which is in the state before generation 1."""

    buffers: list[Buffer] | None = None
    """Buffers of another initializer, if it is to use them."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine, self.case = engine, case
        self.comm = EPCommInitializer(case.config())
        engine.set_up(self.comm)
        self.ranks = [InTurn(self, rank) for rank in range(N_RANKS)]

    def do(self, steps: str) -> None:
        """Does steps on all ranks, and compares what comes out with the oracle."""
        experts = 0
        for step in steps.split():
            if step == "r":
                self.comm.reset()
                continue
            what, generation = step[0], int(step[1:])
            experts += what in "Cc"
            for half in {"D": "dw", "C": "cv"}.get(what, what):
                for rank in self.ranks:
                    rank.step(half, generation, experts)

    def send(self, given: Inputs) -> None:
        """Dispatches whatever is given; so the next three, whose experts do nothing."""
        for rank, *of_rank in zip(self.ranks, given.tokens, given.ids, given.weights):
            rank.run_phase("dispatch_async", *map(to_buffer, of_rank))

    def receive(self) -> list[list[Buffer]]:
        return [list(rank.run_phase("dispatch_wait")) for rank in self.ranks]

    def send_back(self, received: list[list[Buffer]]) -> None:
        for rank, (rows, *_, src_info) in zip(self.ranks, received):
            rank.run_phase("combine_async", rows, src_info)

    def add_up(self, given: Inputs, received: list[list[Buffer]]) -> list[np.ndarray]:
        of_ranks = zip(self.ranks, given.weights, received)
        outputs = [r.run_phase("combine_wait", w, got[0]) for r, w, got in of_ranks]
        return [to_numpy(output) for (output,) in outputs]

    def round_trip(self, given: Inputs) -> None:
        self.send(given)
        received = self.receive()
        self.send_back(received)
        got, want = self.add_up(given, received), expected(self.case, given)
        for rank in range(N_RANKS):
            check_dispatched(f"rank {rank}", received[rank], want.dispatch[rank])
            assert_same_bits(f"rank {rank}: sums", got[rank], want.combine[rank])

    def check_next_run(self) -> None:
        """After `reset` the same buffers are as good as new. Generation 1 is used with
        all choices, then again with few: places of the others hold the old ones."""
        for routing in ("full", "masked", "uniform"):
            self.comm.reset()
            self.round_trip(make_inputs(self.case, routing))
        self.comm.reset()
