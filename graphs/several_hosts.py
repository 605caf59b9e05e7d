# SPDX-License-Identifier: Apache-2.0
"""Tokens go to experts on all hosts, and come back doubled.

    mpirun -np 2 --host a,b python graphs/several_hosts.py --hosts 2 --gpus 8

Each process drives the GPUs of its host, and has the tokens of their ranks. Without
GPUs (``--gpus 0``) a process is a rank on the CPU, and all are on one host.
"""

import argparse

import numpy as np
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, TensorType

from max_ep import EPBatchManager, EPCommInitializer, EPConfig

N_TOKENS, HIDDEN_SIZE, TOP_K, N_EXPERTS_PER_RANK = 16, 256, 2, 4
F32 = DType.float32


def make_config(n_hosts: int, n_gpus: int) -> EPConfig:
    """Describes the group; the same on all hosts."""
    n_local = n_gpus or 1
    return EPConfig(
        dispatch_dtype=F32,
        combine_dtype=F32,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        n_experts=n_hosts * n_local * N_EXPERTS_PER_RANK,
        max_tokens_per_rank=N_TOKENS,
        n_gpus_per_node=n_local,
        n_nodes=n_hosts,
        target="gpu" if n_gpus else "cpu",
    )


def build(config: EPConfig) -> Graph:
    """Builds the layer for the ranks of one host."""
    manager, ranks = EPBatchManager(config), list(range(config.n_gpus_per_node))
    types = []
    for rank in ranks:
        device = config.device(rank)
        types += [
            TensorType(F32, [N_TOKENS, HIDDEN_SIZE], device),  # tokens
            TensorType(DType.int32, [N_TOKENS, TOP_K], device),  # their experts
            TensorType(F32, [N_TOKENS, TOP_K], device),  # router weights
        ]
    inputs = [*types, *manager.input_types()]
    with Graph("several_hosts", input_types=inputs) as graph:
        values = [value.tensor for value in graph.inputs[: len(types)]]
        manager.fetch_buffers(graph.inputs[len(types) :])
        x, ids, weights = (values[i::3] for i in range(3))
        dispatched = manager.ep_dispatch_all(x, ids, ranks)
        rows = [rows * 2 for rows, *_ in dispatched]  # every expert doubles its rows
        graph.output(*manager.ep_combine_all(rows, weights, ranks))
    return graph


def main() -> None:
    """Runs the layer once and compares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, required=True, help="processes")
    parser.add_argument("--gpus", type=int, required=True, help="of each host")
    options = parser.parse_args()
    config = make_config(options.hosts, options.gpus)
    gpus = [Accelerator(i) for i in range(options.gpus)]
    session = InferenceSession(devices=[CPU(), *gpus])
    model = session.load(build(config))
    rng, inputs, tokens = np.random.default_rng(), [], []
    for device in gpus or [CPU()]:
        tokens.append(rng.standard_normal((N_TOKENS, HIDDEN_SIZE), np.float32))
        experts = np.tile(np.arange(config.n_experts, dtype=np.int32), (N_TOKENS, 1))
        ids = np.ascontiguousarray(rng.permuted(experts, axis=1)[:, :TOP_K])
        halves = np.full((N_TOKENS, TOP_K), 0.5, np.float32)
        arrays = tokens[-1], ids, halves
        inputs += [Buffer.from_numpy(array).to(device) for array in arrays]
    with EPCommInitializer(config) as comm:
        comm.ep_init(session)
        results = model.execute(*inputs, *comm.model_inputs())
        comm.check()
        for x, y in zip(tokens, results):
            np.testing.assert_array_equal(y.to(CPU()).to_numpy(), 2 * x)
    print(f"{len(tokens) * N_TOKENS} tokens of this process came back doubled")


if __name__ == "__main__":
    main()
