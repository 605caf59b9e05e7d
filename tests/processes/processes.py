# SPDX-License-Identifier: Apache-2.0
"""A process that is a member of a group.

`max_ep.launch` spawns its processes, so what they run is imported: `scenarios.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.engine import InferenceSession, Model

from max_ep import EPCommInitializer, EPConfig
from max_ep.memory.setup_graph import SETUP_GRAPH
from max_ep.reference import DispatchResult
from tests.harness import assert_same_bits, to_buffer, to_numpy
from tests.oracle.cases import BF16, Case
from tests.oracle.drawn import narrow, widen
from tests.processes.generations import (
    SMALL,
    Oracle,
    apply_experts,
    check_dispatched,
    inputs_of,
)


class Engine:
    """A session and the graphs that the parent compiled."""

    def __init__(self, graphs: str) -> None:
        self.session = InferenceSession(devices=[CPU()])
        self.models: dict[str, Model] = self.session.load_all(graphs)

    def set_up(self, comm: EPCommInitializer) -> None:
        comm.ep_init(self.session, self.models[SETUP_GRAPH])


@dataclass
class Prepared:
    """A generation's inputs on one rank, and what it must get."""

    inputs: list[Any]
    dispatched: DispatchResult
    sums: np.ndarray


@functools.lru_cache(maxsize=4)
def _oracle(case: Case, generation: int, silent_rank: int | None) -> Oracle:
    """Asked at each phase of a generation, of one or of two groups."""
    return Oracle(case, inputs_of(case, generation, silent_rank))


class Member:
    """A process that has joined a group, with all it needs to run."""

    silent_rank: int | None = None

    def __init__(
        self,
        engine: Engine,
        config: EPConfig,
        case: Case = SMALL,
        group: str | None = None,
    ) -> None:
        self.engine, self.case, self.config = engine, case, config
        self.comm = EPCommInitializer(config, group)
        engine.set_up(self.comm)
        self.rank = config.node_id * config.n_gpus_per_node
        self.ranks = range(self.rank, self.rank + config.n_gpus_per_node)
        self._sent_rows: Buffer | None = None

    def run(self, graph: str, *inputs: Any) -> list[Buffer]:
        return self.engine.models[graph].execute(*inputs, *self.comm.model_inputs())

    def oracle(self, generation: int) -> Oracle:
        return _oracle(self.case, generation, self.silent_rank)

    # ---------------------------------------------------------- whole generations

    def factors(self, rank: int, generation: int, dispatched: DispatchResult) -> Buffer:
        """What a graph multiplies rows by, for it to be the experts."""
        factors = np.ones((self.config.n_output_rows, 1), np.float32)
        apply_experts(self.case, generation, rank, dispatched, factors)
        return to_buffer(narrow(factors, BF16))

    def prepare(self, generation: int) -> list[Prepared]:
        want, prepared = self.oracle(generation), []
        for rank in self.ranks:
            dispatched = want.dispatched[rank]
            inputs = [*want.inputs(rank), self.factors(rank, generation, dispatched)]
            prepared.append(Prepared(inputs, dispatched, want.sums(rank, generation)))
        return prepared

    def round_trip(
        self, graph: str, generation: int, prepared: list[Prepared] | None = None
    ) -> None:
        """Runs a generation in one graph, and compares it with the oracle. What
        `prepare` made of this generation, or of another, may be given."""
        prepared = prepared or self.prepare(generation)
        outputs = self.run(graph, *(x for of_rank in prepared for x in of_rank.inputs))
        for i, (rank, want) in enumerate(zip(self.ranks, prepared)):
            where = f"rank {rank}, generation {generation} ({graph})"
            *got, _, src_info, sums = outputs[6 * i : 6 * i + 6]
            check_dispatched(where, [*got, src_info], want.dispatched)
            assert_same_bits(f"{where}: sums", to_numpy(sums), want.sums)

    def run_phase(self, phase: str, *inputs: Any) -> list[Buffer]:
        return self.run(f"{phase}_{self.case.name}", *inputs)

    def phases(self, generation: int, pause: Callable[[str], None]) -> None:
        """Runs a generation in graphs of one op, with something between them."""
        pause("dispatch_async")
        self.dispatch_async(generation)
        pause("dispatch_wait")
        rows, src_info = self.dispatch_wait(generation)
        pause("combine_async")
        self.combine_async(generation, rows, src_info)
        pause("combine_wait")
        self.combine_wait(generation, generation)

    # ------------------------------------------------------------------ its phases

    def dispatch_async(self, generation: int) -> None:
        self.run_phase("dispatch_async", *self.oracle(generation).inputs(self.rank))

    def dispatch_wait(self, generation: int) -> tuple[np.ndarray, Buffer]:
        """Returns the rows (bits) and `src_info`, after comparing them."""
        got = self.run_phase("dispatch_wait")
        want = self.oracle(generation).dispatched[self.rank]
        where = f"rank {self.rank}, generation {generation} (dispatch_wait)"
        check_dispatched(where, got, want)
        return to_numpy(got[0]), got[3]

    def combine_async(
        self, generation: int, rows: np.ndarray, src_info: Buffer
    ) -> None:
        """Sends back what the experts make of the rows that were received."""
        bounds = self.oracle(generation).dispatched[self.rank]
        rows[len(bounds.rows) :] = 0xFFFF  # NaN: nobody may read these
        self.send_rows(generation, bounds, rows, src_info)

    def send_rows(
        self,
        generation: int,
        bounds: DispatchResult,
        rows: np.ndarray,
        src_info: Buffer,
    ) -> None:
        """Sends back rows, given as bits, as the experts of a generation do."""
        rows = apply_experts(self.case, generation, self.rank, bounds, widen(rows))
        self._sent_rows = to_buffer(narrow(rows, BF16))
        self.run_phase("combine_async", self._sent_rows, src_info)

    def combine_wait(self, generation: int, expert_generation: int) -> None:
        want = self.oracle(generation)
        weights = want.given.weights[self.rank]
        (got,) = self.run_phase("combine_wait", weights, self._sent_rows)
        where = f"rank {self.rank}, generation {generation} (combine_wait): sums"
        sums = want.sums(self.rank, expert_generation)
        assert_same_bits(where, to_numpy(got), sums)
