# SPDX-License-Identifier: Apache-2.0
"""`AllGatherTokenDispatcher` in processes of a rank each, for `processes.py`."""

from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from max_ep import AllGatherTokenDispatcher, reference

NAME = "all_gather"
"""Of the graph."""


def dispatcher_of(case: Any, n_ranks: int, node_id: int) -> AllGatherTokenDispatcher:
    """Makes a process's dispatcher, of the sizes of a case."""
    return AllGatherTokenDispatcher(
        case.hidden_size,
        case.top_k,
        case.max_tokens_per_rank,
        n_gpus_per_node=1,
        n_nodes=n_ranks,
        node_id=node_id,
        target="cpu",
        timeout_s=10.0,
    )


def add_all_gather(module: Module, case: Any, n_ranks: int) -> None:
    """Adds a graph that gathers, multiplies rows by a factor, and scatters sums."""
    dispatcher = dispatcher_of(case, n_ranks, 0)
    cpu = DeviceRef.CPU()
    types = [
        TensorType(DType.bfloat16, ["n_tokens", case.hidden_size], cpu),
        TensorType(DType.int32, ["n_tokens", case.top_k], cpu),
        TensorType(DType.float32, ["n_tokens", case.top_k], cpu),
        TensorType(DType.float32, [1], cpu),
    ]
    with Graph(
        NAME, input_types=types + dispatcher.input_types(), module=module
    ) as graph:
        tokens, ids, probs, factor = (v.tensor for v in graph.inputs[: len(types)])
        dispatcher.fetch_buffers(graph.inputs[len(types) :])
        (rows,), all_probs = dispatcher.token_dispatch([tokens], [probs], [ids])
        scaled = ops.cast(ops.cast(rows, DType.float32) * factor, DType.bfloat16)
        sums = dispatcher.token_combine([scaled])
        graph.output(
            rows, *all_probs, *dispatcher.routing_map, *dispatcher.n_gathered, *sums
        )


def factor_of(rank: int) -> np.float32:
    """What a rank's experts multiply by: exact, and another for each rank."""
    return np.float32(2.0**rank)


def check_all_gather(
    where: str, got: list[np.ndarray], batches: list[Any], rank: int
) -> None:
    """Compares what came out of the graph on a rank, to the bit."""
    rows, probs, ids, n_gathered, sums = got
    n = sum(len(batch.tokens) for batch in batches)
    assert n_gathered.tolist() == [n], where
    for what, have, want, none in (
        ("tokens", rows, [b.tokens for b in batches], None),
        ("routing map", ids, [b.ids for b in batches], -1),
        ("probabilities", probs, [b.weights for b in batches], 0),
    ):
        np.testing.assert_array_equal(
            have[:n], np.concatenate(want), f"{where}: {what}"
        )
        if none is not None:
            assert (have[n:] == none).all(), f"{where}: {what} behind the last token"
    # Each part is exact, so the sum is rounded once.
    factor = sum(factor_of(r) for r in range(len(batches)))
    own = reference.bfloat16_to_float32(batches[rank].tokens)
    np.testing.assert_array_equal(
        sums, reference.float32_to_bfloat16(own * factor), f"{where}: sums"
    )
