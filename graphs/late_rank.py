# SPDX-License-Identifier: Apache-2.0
"""A group that goes on without a rank that is late, and takes it in again.

    python graphs/late_rank.py

Four processes, a rank each. Rank 2 pauses for longer than ``timeout_s``. The others
mask it, and their tokens that chose its experts are marked as degraded. They expel it
when they agree on who is active, and it joins again.
"""

import itertools
import time

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType

import max_ep
from max_ep import EPBatchManager, EPCommInitializer, EPConfig, launch

N_RANKS, N_TOKENS, HIDDEN_SIZE, TOP_K, N_EXPERTS = 4, 16, 128, 2, 8
LATE_RANK, LATE_STEP = 2, 20
CPU_DEVICE, F32 = DeviceRef.CPU(), DType.float32

CONFIG = EPConfig(
    dispatch_dtype=F32,
    combine_dtype=F32,
    hidden_size=HIDDEN_SIZE,
    top_k=TOP_K,
    n_experts=N_EXPERTS,
    max_tokens_per_rank=N_TOKENS,
    n_gpus_per_node=1,  # ranks of a process
    n_nodes=N_RANKS,  # processes
    target="cpu",
    timeout_s=4,
    on_timeout="mask",
)


def build(module: Module | None = None) -> Graph:
    """Builds a layer whose experts double their rows."""
    manager = EPBatchManager(CONFIG)
    types = [
        TensorType(F32, [N_TOKENS, HIDDEN_SIZE], CPU_DEVICE),
        TensorType(DType.int32, [N_TOKENS, TOP_K], CPU_DEVICE),
        TensorType(F32, [N_TOKENS, TOP_K], CPU_DEVICE),
    ]
    types += manager.input_types()
    with Graph("late_rank", input_types=types, module=module) as graph:
        x, topk_ids, weights = (value.tensor for value in graph.inputs[:3])
        manager.fetch_buffers(graph.inputs[3:])
        rows, *_ = manager.ep_dispatch(x, topk_ids, 0)
        y = manager.ep_combine(rows * 2, weights, 0)
        degraded, live_share = manager.ep_degraded(topk_ids, weights, 0)
        graph.output(y, degraded)
    return graph


def run_rank(rank: int) -> list[int]:
    """Runs until all ranks are active again; returns how many tokens of each step were
    degraded."""
    session = InferenceSession(devices=[CPU()])
    model = session.load(build())
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((N_TOKENS, HIDDEN_SIZE), np.float32)
    ids = np.argsort(rng.random((N_TOKENS, N_EXPERTS)))[:, :TOP_K].astype(np.int32)
    inputs = x, ids, np.full((N_TOKENS, TOP_K), 0.5, np.float32)
    n_degraded = []
    with EPCommInitializer(CONFIG) as comm:
        comm.ep_init(session)
        is_whole = False
        for step in itertools.count():
            if step == LATE_STEP and rank == LATE_RANK:
                time.sleep(3 * CONFIG.timeout_s)
            y, degraded = model.execute(*inputs, *comm.model_inputs())
            is_right = np.isclose(y.to_numpy(), 2 * x).all(axis=1)
            assert (is_right | degraded.to_numpy()).all()
            n_degraded.append(int(degraded.to_numpy().sum()))
            if is_whole:
                break
            if step % 16 == 15:
                try:
                    active = comm.reconcile()
                except max_ep.RankExpelled:
                    active = comm.rejoin()
                # All ranks see the same list after the same step.
                is_whole = step > LATE_STEP and len(active) == N_RANKS
            time.sleep(0.02)
    return n_degraded


def main() -> None:
    """Runs the ranks, and prints what they saw."""
    n_degraded = launch(run_rank, N_RANKS)  # a process for each rank
    for rank, counts in enumerate(n_degraded):
        first = next(step for step, count in enumerate(counts) if count)
        print(
            f"rank {rank}: {N_TOKENS} tokens, from step {first} on {max(counts)} of "
            f"them degraded; {len(counts)} steps"
        )
    print(f"rank {LATE_RANK} was late, was expelled, and is active again")


if __name__ == "__main__":
    main()
