# SPDX-License-Identifier: Apache-2.0
"""The graphs that groups of processes run. The fixture `graphs` compiles them."""

from collections.abc import Callable, Sequence
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, Module, TensorType, TensorValue

from max_ep import (
    AllGatherTokenDispatcher,
    EPBatchManager,
    EPConfig,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
)
from tests.children import ALL_CASES
from tests.cpu import gathering
from tests.harness import (
    RankInputs,
    all_round_trip,
    fused_round_trip,
    graph_of,
    round_trip,
)
from tests.oracle.cases import BF16, Case
from tests.processes.generations import (
    GROUPS,
    N_RANKS,
    PHASED,
    SMALL,
    SPLITS_ALL,
    config_of,
)


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
    return AllGatherTokenDispatcher(*sizes, **where, timeout_s=60.0)


def add_process_graphs(module: Module) -> None:
    """Adds the graphs of `test_processes.py` and of what runs its ranks in turn."""
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
            build = round_trip if SPLITS_ALL else fused_round_trip
            _add_round_trip(module, name, config_of(case, 0), build)
    if ALL_CASES:
        gathering.add_layer(ALL_GATHER, dispatcher_of(0), module)
