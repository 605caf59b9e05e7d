# SPDX-License-Identifier: Apache-2.0
"""The ranks of `processes.py` in one process, in turn: phases in any order.

A graph that is run again does what a captured graph does that is replayed. A step:

    D1   dispatch of the tokens of generation 1 on all ranks; d1, w1: async or wait only
    C1   combine of the last dispatch, which was of these tokens; c1, v1: the same
"""

from cases import Case
from processes import N_RANKS, Engine, Member

from max_ep import EPCommInitializer


class InTurn(Member):
    """One of the ranks of this process."""

    def __init__(self, engine: Engine, case: Case, rank: int, comm) -> None:  # noqa: ANN001
        self.engine, self.case, self.config = engine, case, comm.config
        self.comm, self.rank = comm, rank
        self._sent_rows = self.received = None

    def run(self, graph: str, *inputs) -> list:  # noqa: ANN002
        buffers = self.comm.model_inputs()
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
            bounds = self.oracle(generation).dispatched()[self.rank]
            self.send_rows(experts, bounds, *self.received)
        else:
            self.combine_wait(generation, experts)


class Group:
    """All ranks of a group, which is in the state before generation 1."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self.comm = EPCommInitializer(case.config())
        self.comm.ep_init(engine.session)
        self.ranks = [InTurn(engine, case, r, self.comm) for r in range(N_RANKS)]

    def do(self, steps: str) -> None:
        """Does steps on all ranks, and compares what comes out with the oracle."""
        experts = 0
        for step in steps.split():
            what, generation = step[0], int(step[1:])
            experts += what in "Cc"
            for half in {"D": "dw", "C": "cv"}.get(what, what):
                for rank in self.ranks:
                    rank.step(half, generation, experts)
