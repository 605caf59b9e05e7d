# SPDX-License-Identifier: Apache-2.0
"""Other work between async and wait: the shared expert while tokens travel.

    python graphs/overlap.py

``ep_dispatch_async`` starts the sending and returns; whatever needs only this
rank's tokens goes between it and ``ep_dispatch_wait``. On GPUs the transfer
goes on meanwhile. On CPU, MAX may run the work on other cores while the EP ops
run in their order; the meaning is the same.
"""

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType

from max_ep import EPBatchManager, EPCommInitializer, EPConfig
from max_ep.experts import linear

N_RANKS, N_TOKENS, HIDDEN_SIZE, TOP_K, N_EXPERTS = 4, 16, 256, 2, 8
RANKS = range(N_RANKS)
CPU_DEVICE, F32 = DeviceRef.CPU(), DType.float32
CONFIG = EPConfig(
    dispatch_dtype=F32,
    combine_dtype=F32,
    hidden_size=HIDDEN_SIZE,
    top_k=TOP_K,
    n_experts=N_EXPERTS,
    max_tokens_per_rank=N_TOKENS,
    n_gpus_per_node=N_RANKS,
    n_nodes=1,
    target="cpu",
)


def build(module: Module | None = None) -> Graph:
    """Builds the graph: each comment names what may run at the same time. With others
    of one ``module`` it compiles in about the time of one."""
    types = [TensorType(F32, [N_TOKENS, HIDDEN_SIZE], CPU_DEVICE) for _ in RANKS]
    types += [TensorType(DType.int32, [N_TOKENS, TOP_K], CPU_DEVICE) for _ in RANKS]
    types += [TensorType(F32, [N_TOKENS, TOP_K], CPU_DEVICE) for _ in RANKS]
    types += [TensorType(F32, [HIDDEN_SIZE, HIDDEN_SIZE], CPU_DEVICE)]
    manager, n = EPBatchManager(CONFIG), len(types)
    types += manager.input_types()
    with Graph("overlap", input_types=types, module=module) as graph:
        values = [value.tensor for value in graph.inputs[:n]]
        manager.fetch_buffers(graph.inputs[n:])
        x, ids, weights, expert = values[0:4], values[4:8], values[8:12], values[12]
        for rank in RANKS:
            manager.ep_dispatch_async(x[rank], ids[rank], rank)
        shared = [linear(tokens, expert) for tokens in x]  # tokens travel
        rows = [manager.ep_dispatch_wait(rank)[0] for rank in RANKS]
        for rank in RANKS:
            manager.ep_combine_async(rows[rank] * 3, rank)
        residual = [a + b for a, b in zip(shared, x)]  # rows travel back
        routed = [manager.ep_combine_wait(weights[rank], rank) for rank in RANKS]
        graph.output(*(a + b for a, b in zip(routed, residual)))
    return graph


def main() -> None:
    """Runs the graph three times: three generations of the same buffers."""
    session = InferenceSession(devices=[CPU()])
    model = session.load(build())
    rng = np.random.default_rng(3)
    shared = rng.standard_normal((HIDDEN_SIZE, HIDDEN_SIZE), np.float32)
    weights = [np.full((N_TOKENS, TOP_K), 0.5, np.float32) for _ in RANKS]
    with EPCommInitializer(CONFIG) as comm:
        comm.ep_init(session)
        for generation in range(1, 4):
            x = rng.standard_normal((N_RANKS, N_TOKENS, HIDDEN_SIZE), np.float32)
            order = np.argsort(rng.random((N_RANKS, N_TOKENS, N_EXPERTS)))
            ids = order[..., :TOP_K].astype(np.int32)
            y = model.execute(*x, *ids, *weights, shared, *comm.model_inputs())
            got = np.stack([of_rank.to_numpy() for of_rank in y])
            expected = x @ shared.T + 4 * x
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
            print(f"generation {generation}: right on all {N_RANKS} ranks")


if __name__ == "__main__":
    main()
