# SPDX-License-Identifier: Apache-2.0
"""Statistics on request: who waits for whom, and which experts get how much.

    python graphs/who_waits.py --save waits.npz
    max-ep stats waits.npz

Four processes, a rank each. Rank 2 comes late every time, and experts are chosen by
Zipf's law. ``ep_watch`` is an op of its own in front of a wait: graphs without it have
the same dispatch and combine.
"""

import argparse
import time

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from max_ep import EPBatchManager, EPCommInitializer, EPConfig, launch
from max_ep.stats import Statistics

N_RANKS, N_TOKENS, HIDDEN_SIZE, TOP_K, N_EXPERTS = 4, 64, 128, 2, 32
N_RUNS, LATE_RANK, LATE_S = 20, 2, 5e-3
CPU_DEVICE, F32 = DeviceRef.CPU(), DType.float32


CONFIG = EPConfig(
    dispatch_dtype=F32,
    combine_dtype=F32,
    hidden_size=HIDDEN_SIZE,
    top_k=TOP_K,
    n_experts=N_EXPERTS,
    max_tokens_per_rank=N_TOKENS,
    n_gpus_per_node=1,  # a process for each rank
    n_nodes=N_RANKS,
    target="cpu",
    timeout_s=60,
)


def build() -> Graph:
    """Builds a round trip whose waits are watched."""
    manager = EPBatchManager(CONFIG)
    types = [
        TensorType(F32, [N_TOKENS, HIDDEN_SIZE], CPU_DEVICE),
        TensorType(DType.int32, [N_TOKENS, TOP_K], CPU_DEVICE),
        TensorType(F32, [N_TOKENS, TOP_K], CPU_DEVICE),
    ]
    types += manager.input_types()
    with Graph("who_waits", input_types=types) as graph:
        x, ids, weights = (value.tensor for value in graph.inputs[:3])
        manager.fetch_buffers(graph.inputs[3:])
        manager.ep_dispatch_async(x, ids, 0)
        dispatch_ns = manager.ep_watch("dispatch", 0)  # [n_ranks] int64, nanoseconds
        dispatched = manager.ep_dispatch_wait(0)
        received = manager.ep_received(dispatched)  # [n_local_experts] int32, rows
        manager.ep_combine_async(dispatched[0], 0)
        combine_ns = manager.ep_watch("combine", 0)
        y = manager.ep_combine_wait(weights, 0)
        graph.output(y, dispatch_ns, combine_ns, received)
    return graph


def run_rank(rank: int) -> list[list[np.ndarray]]:
    """Runs a rank; returns its three statistics of each run."""
    session = InferenceSession(devices=[CPU()])
    model = session.load(build())
    rng = np.random.default_rng(rank)
    likely = 1 / np.arange(1, N_EXPERTS + 1)
    kept = []
    with EPCommInitializer(CONFIG) as comm:
        comm.ep_init(session)
        for _ in range(N_RUNS + 1):
            x = rng.standard_normal((N_TOKENS, HIDDEN_SIZE), np.float32)
            noise = rng.gumbel(size=(N_TOKENS, N_EXPERTS))
            ids = np.argsort(-(np.log(likely) + noise), axis=1)[:, :TOP_K]
            weights = np.full((N_TOKENS, TOP_K), 0.5, np.float32)
            if rank == LATE_RANK:
                time.sleep(LATE_S)
            y, *statistics = model.execute(
                x, ids.astype(np.int32), weights, *comm.model_inputs()
            )
            np.testing.assert_allclose(y.to_numpy(), x, rtol=1e-5)
            kept.append([tensor.to_numpy() for tensor in statistics])
    return kept[1:]  # in the first run some ranks have started later


def main() -> None:
    """Runs the ranks, and prints or saves what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", help="a file for max-ep stats")
    options = parser.parse_args()
    ranks = launch(run_rank, N_RANKS)
    print(f"{N_TOKENS} tokens on {N_RANKS} ranks: right in {N_RUNS + 1} runs")
    kinds = ([[run[i] for run in runs] for runs in ranks] for i in range(3))
    stacked = (np.stack(of_ranks, axis=1) for of_ranks in kinds)
    statistics = Statistics(*stacked, N_EXPERTS)
    if options.save:
        statistics.save(options.save)
        print(f"saved: {options.save}")
    else:
        print(statistics.text())


if __name__ == "__main__":
    main()
