# SPDX-License-Identifier: Apache-2.0
"""Groups of processes: their data, their graphs, and a process that is a member.

`max_ep.launch` spawns its processes, so what they run is imported: `scenarios.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gathering
import numpy as np
from cases import Case, Inputs, in_protocols, make_inputs, narrow, token_counts, widen
from harness import (
    RankInputs,
    all_round_trip,
    assert_dispatched,
    assert_same_bits,
    fused_round_trip,
    graph_of,
    round_trip,
    to_buffer,
    to_numpy,
)
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Module, TensorType, TensorValue
from oracle import expected, expected_dispatch

from max_ep import (
    AllGatherTokenDispatcher,
    EPBatchManager,
    EPCommInitializer,
    EPConfig,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
    extension_path,
)
from max_ep.memory.setup_graph import SETUP_GRAPH, setup_graph
from max_ep.reference import DispatchResult

N_RANKS = 4
BF16 = DType.bfloat16


# ------------------------------------------------------------------------- data

# 4 ranks do not divide 14: the last rank holds 2 experts, the others 4.
SMALL = Case("small", N_RANKS, 14, 4, 256, 32)

# A full launch moves 256 * 4 * 4112 bytes: more than STREAM_BYTES of
# cpu_copy.mojo, so its messages are written past the caches, by all workers.
LARGE = Case("large", N_RANKS, 8, 4, 2048, 256)

# The last rank holds no expert. Nobody sends to it, so it waits for nobody and may
# run ahead of all. With a shared expert it receives nobody's rows but its own.
FEW_EXPERTS = Case("few_experts", N_RANKS, 3, 2, 256, 32)
SHARED = replace(FEW_EXPERTS, name="shared", fused_shared_expert=True)

PHASED = in_protocols([SMALL])
"""Groups whose phases are graphs of their own."""

GROUPS = PHASED | in_protocols([LARGE, SHARED]) | {FEW_EXPERTS.name: FEW_EXPERTS}


def config_of(case: Case, node_id: int, **changes: Any) -> EPConfig:
    """A process of one rank, unless changed."""
    one_each = dict(n_nodes=case.n_ranks, n_gpus_per_node=1, timeout_s=10.0)
    return case.config(node_id=node_id, **(one_each | changes))


def inputs_of(case: Case, generation: int, silent_rank: int | None = None) -> Inputs:
    """Draws what all ranks are given, for each generation anew.

    Of every 7 generations, one is full on all ranks with all tokens to the experts of
    rank 0, and one is empty on all ranks; in the others one rank is empty, and some
    choices are -1. Nothing is sent by a silent rank, or to it.
    """
    named = replace(case, name=f"{case.name}/{generation}")
    routing = {3: "full", 5: "all_silent"}.get(generation % 7, "masked")
    counts = token_counts(named, routing)
    if routing == "masked":
        counts[generation % case.n_ranks] = 0
    given = make_inputs(named, routing, counts=counts)
    if silent_rank is not None:
        given.ids[silent_rank][:] = -1
        for ids in given.ids:
            ids[ids // case.n_local_experts == silent_rank] = -1
    return given


def expert(expert_id: int, generation: int, rows: np.ndarray) -> np.ndarray:
    """What an expert makes of its rows (float32, exact in bfloat16).

    A power of two with a sign, another one for each expert: a row that comes
    back from the wrong expert, or from another generation, is a wrong sum.
    """
    sign = -1 if (expert_id + generation) % 2 else 1
    return rows * np.float32(sign * 2.0 ** (expert_id // 2 + generation % 3 - 4))


def apply_experts(
    case: Case, generation: int, rank: int, dispatched: DispatchResult, rows: np.ndarray
) -> np.ndarray:
    """Runs each expert of a rank on its rows, in place."""
    bounds = dispatched.row_offsets
    ids = [rank * case.n_local_experts + i for i in range(case.n_local_experts)]
    if case.fused_shared_expert:
        ids.insert(0, case.n_experts)
    for i, expert_id in enumerate(ids):
        mine = slice(bounds[i], bounds[i + 1])
        rows[mine] = expert(expert_id, generation, rows[mine])
    return rows


@dataclass
class Oracle:
    """What all ranks are given in a generation, and must get."""

    case: Case
    given: Inputs

    def inputs(self, rank: int) -> list:
        tokens = to_buffer(self.given.tokens[rank])
        return [tokens, self.given.ids[rank], self.given.weights[rank]]

    def dispatched(self) -> list[DispatchResult]:
        return expected_dispatch(self.case, self.given)

    def sums(self, rank: int, expert_generation: int) -> np.ndarray:
        """A rank's results, bfloat16 bits, of experts as they are in a generation."""
        rows = [
            narrow(
                apply_experts(self.case, expert_generation, r, x, widen(x.rows)), BF16
            )
            for r, x in enumerate(self.dispatched())
        ]
        given = replace(self.given, expert_rows=rows)
        return expected(self.case, given).combine[rank]


def check_dispatched(where: str, got: list[Buffer], want: DispatchResult) -> None:
    names = "rows row_offsets expert_ids src_info".split()
    arrays = dict(zip(names, map(to_numpy, got)))
    assert_dispatched(where, [SimpleNamespace(**arrays)], [want])


# ----------------------------------------------------------------------- graphs


def _inputs(config: EPConfig, rank: int = 0) -> list[TensorType]:
    cpu, n = DeviceRef.CPU(), f"n_{rank}"
    return [
        TensorType(BF16, [n, config.hidden_size], cpu),
        TensorType(DType.int32, [n, config.top_k], cpu),
        TensorType(DType.float32, [n, config.top_k], cpu),
        TensorType(BF16, [config.n_output_rows, 1], cpu),
    ]


class WithFactors(RankInputs):
    """Inputs whose expert rows are those dispatched, times `expert_rows`."""

    def rows_of(self, dispatched: Sequence[TensorValue]) -> TensorValue:
        return dispatched[0] * self.expert_rows


def _add_round_trip(
    module: Module, name: str, config: EPConfig, build: Callable
) -> None:
    """Adds a graph that dispatches, runs experts and combines. Outputs, for each local
    rank: rows, row_offsets, expert_ids, stats, src_info, sums."""
    types = [t for i in range(config.n_gpus_per_node) for t in _inputs(config, i)]
    ep = EPBatchManager(config)
    with graph_of(ep, name, types, module) as (graph, values):
        ranks = [
            WithFactors(*values[i : i + 3], expert_rows=values[i + 3])
            for i in range(0, len(types), 4)
        ]
        graph.output(*(v for of_rank in build(ep, ranks) for v in of_rank))


def _add_back_to_back(module: Module, name: str, config: EPConfig) -> None:
    """Adds a graph that dispatches twice, then combines the second twice. Nothing but
    the done words keeps a rank from overwriting, in its second launch, what a peer is
    reading in its first."""
    types = _inputs(config, 1)[:3] + _inputs(config, 2) + _inputs(config)[3:]
    ep = EPBatchManager(config)
    with graph_of(ep, name, types, module) as (graph, values):
        inputs, (factors_1, factors_2) = values[:6], values[6:]
        dispatched = []
        for tokens, ids, weights in (inputs[:3], inputs[3:]):
            sent = weights if config.combines_sums else None
            rows = ep.ep_dispatch(tokens, ids, 0, router_weight=sent)[:3]
            dispatched.append((*rows, ep._src_info[0]))
        first, second = dispatched
        weights = None if config.combines_sums else inputs[5]
        products = [second[0] * factors_1, second[0] * factors_2]
        sums = [ep.ep_combine(rows, weights, 0) for rows in products]
        graph.output(*first, *second, *sums)


def add_phases(module: Module, case: Case, **changes: Any) -> None:
    """Adds graphs of one op each: whatever happens, happens between them. If ranks
    mask, the last also says which tokens are degraded."""
    config = config_of(case, 0, **changes)
    is_sums = config.combines_sums
    cpu = DeviceRef.CPU()
    # Sizes are left open, so that tests may give wrong ones.
    tokens = TensorType(BF16, ["n", "hidden_size"], cpu)
    ids = TensorType(DType.int32, ["n_ids", "top_k"], cpu)
    weights = TensorType(DType.float32, ["n_weights", config.top_k], cpu)
    rows = TensorType(BF16, ["n_rows", config.hidden_size], cpu)
    src_info = TensorType(DType.int32, ["n_rows", 2], cpu)

    def dispatch_async(ep, counter, tokens, ids, weights):
        given = tokens, ids, counter, *ep._pointers(0), config
        call_ep_dispatch_async(*given, router_weights=weights if is_sums else None)
        return ()

    def dispatch_wait(ep, counter):
        return call_ep_dispatch_wait(counter, *ep._pointers(0)[1:], config)

    def combine_async(ep, counter, rows, src_info):
        call_ep_combine_async(rows, src_info, counter, *ep._pointers(1), config)
        return ()

    def combine_wait(ep, counter, weights, rows, ids=None):
        given = counter, *ep._pointers(1)[1:], config
        sent = None if is_sums else weights
        sums = call_ep_combine_wait(*given, weights.shape[0], sent, rows)
        if ids is None:
            return (sums,)
        return (sums, *ep.ep_degraded(ids, weights, 0))

    for build, types in (
        (dispatch_async, [tokens, ids, weights]),
        (dispatch_wait, []),
        (combine_async, [rows, src_info]),
        (combine_wait, [weights, rows, *([ids] if config.masks else [])]),
    ):
        ep = EPBatchManager(config)
        name = f"{build.__name__}_{case.name}"
        with graph_of(ep, name, types, module) as (graph, values):
            graph.output(*build(ep, ep.atomic_counters[0][0], *values))


# --------------------------------------------------------------------- all-gather

ALL_GATHER = "all_gather"
"""Its graph."""


def dispatcher_of(node_id: int) -> AllGatherTokenDispatcher:
    where = dict(n_gpus_per_node=1, n_nodes=N_RANKS, node_id=node_id, target="cpu")
    sizes = SMALL.hidden_size, SMALL.top_k, SMALL.max_tokens_per_rank
    return AllGatherTokenDispatcher(*sizes, **where, timeout_s=10.0)


def compile_graphs(path: Path, session: InferenceSession) -> None:
    """Compiles all graphs into one file. One module: they compile in about the time of
    one."""
    module = Module()
    setup_graph(config_of(SMALL, 0), module)
    for form, build in (("async_wait", round_trip), ("fused", fused_round_trip)):
        _add_round_trip(module, form, config_of(SMALL, 0), build)
    two_by_two = config_of(SMALL, 0, n_nodes=2, n_gpus_per_node=2)
    _add_round_trip(module, "two_by_two", two_by_two, all_round_trip)
    for name, case in GROUPS.items():
        if name in PHASED:
            add_phases(module, case)
        elif name.startswith("large"):
            _add_back_to_back(module, name, config_of(case, 0))
        else:
            _add_round_trip(module, name, config_of(case, 0), round_trip)
    gathering.add_layer(ALL_GATHER, dispatcher_of(0), module)
    compiled = session.compile(module, custom_extensions=[extension_path()])
    compiled.export_mef(path)


# ----------------------------------------------------------------------- member


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
        return Oracle(self.case, inputs_of(self.case, generation, self.silent_rank))

    # ---------------------------------------------------------- whole generations

    def factors(self, rank: int, generation: int, dispatched: DispatchResult) -> Buffer:
        """What a graph multiplies rows by, for it to be the experts."""
        factors = np.ones((self.config.n_output_rows, 1), np.float32)
        apply_experts(self.case, generation, rank, dispatched, factors)
        return to_buffer(narrow(factors, BF16))

    def prepare(self, generation: int) -> list[Prepared]:
        want, prepared = self.oracle(generation), []
        for rank in self.ranks:
            dispatched = want.dispatched()[rank]
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
        want = self.oracle(generation).dispatched()[self.rank]
        where = f"rank {self.rank}, generation {generation} (dispatch_wait)"
        check_dispatched(where, got, want)
        return to_numpy(got[0]), got[3]

    def combine_async(
        self, generation: int, rows: np.ndarray, src_info: Buffer
    ) -> None:
        """Sends back what the experts make of the rows that were received."""
        bounds = self.oracle(generation).dispatched()[self.rank]
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
