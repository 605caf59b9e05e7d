# SPDX-License-Identifier: Apache-2.0
"""Chains of ``AllGatherTokenDispatcher`` as MAX graphs, see ``gpu_graphs_max``."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue

from max_ep import AllGatherTokenDispatcher

from .gpu_shapes import Config


def dispatcher_of(config: Config) -> AllGatherTokenDispatcher:
    """Makes the dispatcher of ``ours_all_gather``."""
    return AllGatherTokenDispatcher(
        config.shape.hidden_size,
        config.shape.top_k,
        config.max_tokens,
        config.n_ranks,
        target="gpu",
        timeout_s=5.0,
    )


def graph_of(config: Config) -> Graph:
    """Builds a chain of ``AllGatherTokenDispatcher``.

    Inputs, each a list with one tensor a rank: tokens ``[n_tokens, hidden]``
    bfloat16, ids ``[n_tokens, top_k]`` int32, probabilities likewise float32; the
    EP inputs.

    Outputs, likewise: the last layer's sums, the first layer's, and the tokens it
    gathered; then of each layer the routing map and the probabilities.
    """
    shape, n = config.shape, config.n_ranks
    n_layers = config.n_layers("all_gather")
    dispatcher = dispatcher_of(config)
    columns = {
        DType.bfloat16: shape.hidden_size,
        DType.int32: shape.top_k,
        DType.float32: shape.top_k,
    }
    inputs = [
        TensorType(dtype, ["n_tokens", width], DeviceRef.GPU(i))
        for dtype, width in columns.items()
        for i in range(n)
    ]
    types = [*inputs, *dispatcher.input_types()]
    with Graph(f"{config.name}_l{n_layers}", input_types=types) as graph:
        values = [value.tensor for value in graph.inputs[: len(inputs)]]
        dispatcher.fetch_buffers(graph.inputs[len(inputs) :])
        x, ids, probs = (values[i : i + n] for i in range(0, len(values), n))
        first: list[TensorValue] = []
        kept: list[TensorValue] = []
        for _ in range(n_layers):
            tokens, all_probs = dispatcher.token_dispatch(x, probs, ids)
            x = dispatcher.token_combine(tokens)
            first = first or [*x, *tokens]
            kept += [*dispatcher.routing_map, *all_probs]
        graph.output(*x, *first, *kept)
    return graph
