# SPDX-License-Identifier: Apache-2.0
"""All-gathers: the graph that tests run, and what must come out of it, to the bit."""

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.graph import Graph, Module, TensorType, ops

from max_ep import AllGatherTokenDispatcher
from tests.harness import assert_same_bits, graph_of, to_buffer
from tests.oracle.cases import BF16, F32
from tests.oracle.drawn import Inputs, narrow, widen


def add_layer(
    name: str, dispatcher: AllGatherTokenDispatcher, module: Module | None = None
) -> Graph:
    """Builds a graph that gathers, multiplies rows by a factor, and scatters sums.
    Outputs, each a tensor a local rank: what `check` takes."""
    config, types = dispatcher.config, []
    for rank in range(config.n_gpus_per_node):
        n, device = f"t{rank}", config.device(rank)
        types += [
            TensorType(BF16, [n, config.hidden_size], device),
            TensorType(DType.int32, [n, dispatcher.top_k], device),
            TensorType(F32, [n, dispatcher.top_k], device),
            TensorType(F32, [1], device),
        ]
    with graph_of(dispatcher, name, types, module) as (graph, values):
        tokens, ids, probs, factors = (values[i::4] for i in range(4))
        gathered = dispatcher.token_dispatch(tokens, probs, ids)
        rows, per_expert, all_probs = dispatcher.dispatch_postprocess(*gathered)
        assert per_expert is None
        scaled = [ops.cast(ops.cast(x, F32) * f, BF16) for x, f in zip(rows, factors)]
        sums = dispatcher.token_combine(dispatcher.combine_preprocess(scaled))
        routes = *all_probs, *dispatcher.routing_map, *dispatcher.n_gathered
        graph.output(*rows, *routes, *sums)
    return graph


def factor_of(rank: int) -> np.float32:
    """What a rank's experts multiply by: exact, and another for each rank."""
    return np.float32(2.0**rank)


def inputs_of(given: Inputs, rank: int, device: Device | None = None) -> list[Buffer]:
    arrays = given.tokens[rank], given.ids[rank], given.weights[rank]
    return [to_buffer(x, device) for x in (*arrays, np.array([factor_of(rank)]))]


def check(where: str, got: list[np.ndarray], given: Inputs, rank: int) -> None:
    """Compares what came out of the graph on a rank: everything, in rank order."""
    rows, probs, ids, n_gathered, sums = got
    n = sum(map(len, given.tokens))
    assert n_gathered.tolist() == [n], where
    for what, have, want, none in (
        ("tokens", rows, given.tokens, None),
        ("routing map", ids, given.ids, -1),
        ("probabilities", probs, given.weights, 0),
    ):
        assert len(have) == len(rows), where
        assert_same_bits(f"{where}: {what}", have[:n], np.concatenate(want))
        if none is not None:
            assert (have[n:] == none).all(), f"{where}: {what} after the last token"
    # Each part is exact, so the sum is rounded once.
    factor = sum(factor_of(r) for r in range(len(given.tokens)))
    got, want = widen(sums) + 0, narrow(widen(given.tokens[rank]) * factor + 0, BF16)
    assert_same_bits(f"{where}: sums", narrow(got, BF16), want)  # -0 is 0
