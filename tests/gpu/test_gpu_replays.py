# SPDX-License-Identifier: Apache-2.0
"""Captured graphs on GPU ranks, with random delays and in any order."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.graph import BufferType, Graph, ops

from max_ep import EPBatchManager, EPCommInitializer, EPConfig
from max_ep.graph.ops import order_buffer
from tests.children import MOJO_PROGRAMS
from tests.harness import (
    all_round_trip,
    assert_round_trip,
    assert_same_bits,
    building,
    flatten,
    fused_round_trip,
    graph_of,
    input_types,
    round_trip,
    take_inputs,
    take_outputs,
    to_numpy,
    weights_of,
)
from tests.oracle.cases import (
    CAPPED,
    CAPPED_MANY,
    CAPPED_ON_TWO,
    PROTOCOLS,
    TIGHT,
    Case,
    capped,
    in_protocols,
)
from tests.oracle.drawn import make_inputs
from tests.oracle.oracle import expected

DELAYS_PACKAGE = MOJO_PROGRAMS / "max_ep_tests"
N_DELAYS = 4
REPLAYED = in_protocols(
    [
        Case("alone", 1, 5, 3, 512, 7),
        Case("two", 2, 5, 3, 512, 7),
        # More tokens than those whose data is its own flag.
        Case("two_more", 2, 5, 3, 128, 300),
        Case("four", 4, 10, 3, 512, 7),
    ]
)
REPLAYED |= capped(CAPPED_ON_TWO)
SHARED = capped([CAPPED, TIGHT, CAPPED_MANY])
"""Their ranks share one GPU, which runs them one after another."""


# Each phase: which delay it has, and which of its arguments is the rank, or all ranks.
PHASES = {
    "ep_dispatch_async": (0, 2),
    "ep_dispatch": (0, 2),
    "ep_dispatch_all": (0, 2),
    "ep_dispatch_wait": (1, 0),
    "ep_combine_async": (2, 1),
    "ep_combine": (2, 2),
    "ep_combine_all": (2, 2),
    "ep_combine_wait": (3, 1),
}


class Delayed:
    """An `EPBatchManager` whose phases come late, or only those that send."""

    def __init__(self, manager: EPBatchManager, delays: list, only_sends: bool) -> None:
        self._manager, self._delays, self._only_sends = manager, delays, only_sends

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._manager, name)
        if name not in PHASES or (self._only_sends and name.endswith("_wait")):
            return method
        which, place = PHASES[name]

        def call(*args: Any) -> Any:
            ranks = args[place]
            for rank in ranks if isinstance(ranks, list) else [ranks]:
                delay = self._delays[rank]
                ops.inplace_custom(
                    "max_ep_tests.delay",
                    device=delay.device,
                    values=[delay, order_buffer(delay.device)],
                    parameters={"which": which},
                )
            return method(*args)

        return call


# With `sends` nothing is between async and wait, not even a delay. Ranks in turn have
# no fused form. Where single ranks of one process launch, one may wait for another in
# the first run; `together` they do not.
FORMS = {
    "split": round_trip,
    "sends": round_trip,
    "fused": fused_round_trip,
    "together": all_round_trip,
}
REPLAYS = [
    pytest.param(case, case.on_gpus(), form, id=f"{name}-{form}", marks=gpu)
    for name, case in REPLAYED.items()
    for gpu in [pytest.mark.gpu(case.n_ranks)]
    for form in FORMS
]
REPLAYS += [
    pytest.param(case, case.on_one_gpu(), form, id=f"{name}-shared-{form}", marks=gpu)
    for gpu in [pytest.mark.gpu(1)]
    for name, case in SHARED.items()
    for form in ("split", "sends")
]


@pytest.mark.parametrize("case, config, form", REPLAYS)
def test_1000_replays_with_delays(gpu_session, case, config, form):
    """A captured graph, replayed with other tokens, routings and delays."""
    name, build = case.name, FORMS[form]
    manager = EPBatchManager(config)
    ranks = range(case.n_ranks)
    counts = [case.max_tokens_per_rank] * case.n_ranks
    types = input_types(case, config=config)
    n_given = len(types)
    # Captured graphs have fixed shapes: every run has as many tokens.
    types = [
        type(t)(t.dtype, [case.max_tokens_per_rank, *t.shape[1:]], t.device)
        for t in types
    ]
    types += [BufferType(DType.int32, [N_DELAYS], config.device(r)) for r in ranks]
    types += manager.input_types()
    with Graph(
        f"replays_{name}_{form}", input_types=types, custom_extensions=[DELAYS_PACKAGE]
    ) as graph:
        values = graph.inputs
        delays = [v.buffer for v in values[n_given : n_given + case.n_ranks]]
        manager.fetch_buffers(values[n_given + case.n_ranks :])
        given_values = take_inputs(case, iter(values[:n_given]))
        built = build(Delayed(manager, delays, form == "sends"), given_values)
        graph.output(*[v for rank in built for v in rank])
    model = gpu_session.load(graph)
    rng = np.random.default_rng(5)
    runs = [
        make_inputs(case, routing, data, counts)
        for routing in ("uniform", "zipf", "masked", "full")
        for data in ("telling", "random")
    ]
    wants = [expected(case, given) for given in runs]
    inputs = [flatten(given, config) for given in runs]
    with EPCommInitializer(config) as comm:
        comm.ep_init(gpu_session)
        place = [buffer.copy() for buffer in inputs[0]]
        waits = [
            Buffer.zeros([N_DELAYS], DType.int32, Accelerator(config.device(r).id))
            for r in ranks
        ]
        arguments = [*place, *waits, *comm.model_inputs()]
        # Warm: nothing may be compiled or allocated during capture.
        model.execute(*arguments)
        comm.check()
        outputs = model.capture(1, *arguments)
        comm.check()
        for i in range(1000):
            which = int(rng.integers(len(runs)))
            for to, buffer in zip(place, inputs[which]):
                to.inplace_copy_from(buffer)
            if i % 4 != 0:
                for wait in waits:
                    nanoseconds = rng.integers(0, 60_000, N_DELAYS).astype(np.int32)
                    nanoseconds *= rng.integers(0, 2, N_DELAYS).astype(np.int32)
                    wait.inplace_copy_from(Buffer.from_numpy(nanoseconds))
            model.replay(1, *arguments)
            if i % 10 == 0 or i > 990:
                comm.check()
                got = take_outputs(case, iter(outputs))
                assert_round_trip(f"replay {i}", got, wants[which])


def graphs_of_orders(case: Case, config: EPConfig) -> Iterator[tuple[str, Graph]]:
    """A graph that dispatches, one that combines what it is given, and one of both."""
    with building(f"{case.name}_dispatch", case, config) as (manager, ranks, graph):
        dispatched = []
        for i, x in enumerate(ranks):
            weights = weights_of(config, x)[0]
            d = manager.ep_dispatch(x.tokens, x.ids, i, router_weight=weights)
            dispatched += [d[0], manager._src_info[i]]
        graph.output(*dispatched)
    yield "D", graph
    manager, types = EPBatchManager(config), input_types(case, "", config)
    given = [value.type for value in dispatched]
    name = f"{case.name}_combine"
    with graph_of(manager, name, [*types, *given]) as (graph, values):
        ranks, rows = take_inputs(case, iter(values)), values[len(types) :]
        results = []
        for i, x in enumerate(ranks):
            manager._src_info[i] = rows[2 * i + 1]
            manager._num_tokens[i] = x.tokens.shape[0]
            results.append(manager.ep_combine(rows[2 * i], weights_of(config, x)[1], i))
        graph.output(*results)
    yield "C", graph
    with building(f"{case.name}_both", case, config) as (manager, ranks, graph):
        graph.output(*(of_rank[-1] for of_rank in all_round_trip(manager, ranks)))
    yield "B", graph


@pytest.mark.gpu(2)
@pytest.mark.parametrize("suffix", PROTOCOLS)
def test_captured_graphs_in_any_order(gpu_session, suffix):
    """Dispatch without combine, combine again, and a second model in between."""
    case = in_protocols([Case("orders", 2, 5, 3, 512, 7)])[f"orders{suffix}"]
    config = case.config(target="gpu", timeout_s=2)
    models = {k: gpu_session.load(g) for k, g in graphs_of_orders(case, config)}
    given = make_inputs(case, "full")
    wants = expected(case, given).combine
    with EPCommInitializer(config) as comm:
        comm.ep_init(gpu_session)
        inputs = {k: flatten(given, config) for k in models}
        buffers = comm.model_inputs()
        dispatched = models["D"].execute(*inputs["D"], *buffers)
        inputs["C"] += dispatched
        models["C"].execute(*inputs["C"], *buffers)
        comm.check()
        models["B"].execute(*inputs["B"], *buffers)
        outputs = {}
        for number, (k, model) in enumerate(models.items()):
            outputs[k] = model.capture(number, *inputs[k], *buffers)
        comm.check()
        for step, k in enumerate("BDCBDDCCBBDCCCDDDB"):
            if k == "C":  # of the rows that the last dispatch has delivered
                for to, rows in zip(dispatched, outputs["D"]):
                    to.inplace_copy_from(rows)
            number = list(models).index(k)
            models[k].replay(number, *inputs[k], *buffers)
            comm.check()
            if k != "D":
                for got, want in zip(outputs[k], wants):
                    assert_same_bits(f"step {step} ({k})", to_numpy(got), want)
