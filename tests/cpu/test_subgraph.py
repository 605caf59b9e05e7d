# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine in a subgraph, as MAX's larger models have their layers."""

from max.graph import Graph, Module, TensorValue, Value, ops

from max_ep import EPBatchManager, EPCommInitializer, extension_path
from tests.harness import assert_same_bits, flatten, input_types, to_numpy
from tests.oracle.cases import CASES
from tests.oracle.drawn import Inputs, make_inputs
from tests.oracle.oracle import expected

CASE = CASES["two_ranks"]


def add_graphs(module: Module) -> None:
    """Adds a graph of two layers; it is given the ops that its subgraph has."""
    case = CASE
    config, n_ranks = case.config(), case.n_ranks
    types = [*input_types(case), *EPBatchManager(config).input_types()]

    def layer(*values: Value) -> list[TensorValue]:
        manager = EPBatchManager(config)
        manager.fetch_buffers(values[3 * n_ranks :])
        tokens, ids, weights = (
            [value.tensor for value in values[i : 3 * n_ranks : 3]] for i in range(3)
        )
        ranks = list(range(n_ranks))
        rows = manager.ep_dispatch_all(tokens, ids, ranks)
        sums = manager.ep_combine_all([r[0] for r in rows], weights, ranks)
        return [ops.rebind(y, x.shape) for x, y in zip(tokens, sums)]

    with Graph(
        "with_subgraph",
        input_types=types,
        custom_extensions=[extension_path()],
        module=module,
    ) as graph:
        inner = graph.add_subgraph("layer", layer, input_types=types)
        values = list(graph.inputs)
        for _ in range(2):
            for rank, tokens in enumerate(ops.call(inner, *values)):
                values[3 * rank] = tokens
        graph.output(*values[: 3 * n_ranks : 3])


def test_layers_that_share_a_subgraph(session, one_module):
    """The second takes what the first gave, with the same choices and weights."""
    case, model = CASE, one_module.models["with_subgraph"]
    given = make_inputs(case, "masked")
    with EPCommInitializer(case.config()) as comm:
        comm.ep_init(session)
        outputs = model.execute(*flatten(given), *comm.model_inputs())
    first = expected(case, given).combine
    second = expected(case, Inputs(first, given.ids, given.weights, None, None)).combine
    for rank, (got, want) in enumerate(zip(outputs, second, strict=True)):
        assert_same_bits(f"rank {rank}", to_numpy(got), want)
