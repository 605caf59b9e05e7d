# SPDX-License-Identifier: Apache-2.0
"""Experts of your own: ten experts with a squared ReLU, on three ranks.

    python graphs/own_experts.py            # all ranks on the CPU
    python graphs/own_experts.py --gpus 3   # on three Hopper GPUs
    python graphs/own_experts.py --gpus 1   # all ranks on one of them

The result is compared with a plain layer in NumPy.
"""

import argparse

import numpy as np
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, Module, TensorType, TensorValue, ops

from max_ep import EPBatchManager, EPCommInitializer, EPConfig, softmax_top_k
from max_ep.experts import grouped_matmul
from max_ep.reference import bfloat16_to_float32, float32_to_bfloat16, moe
from max_ep.reference import softmax_top_k as plain_softmax_top_k

N_RANKS, N_EXPERTS, TOP_K, N_TOKENS, HIDDEN_SIZE, INNER = 3, 10, 2, 40, 128, 64
BF16, F32 = DType.bfloat16, DType.float32


def make_config(n_gpus: int) -> EPConfig:
    """Describes the group: all that differs between CPU and GPUs."""
    return EPConfig(
        dispatch_dtype=BF16,
        combine_dtype=BF16,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        n_experts=N_EXPERTS,
        max_tokens_per_rank=N_TOKENS,
        n_gpus_per_node=N_RANKS,
        n_nodes=1,
        target="gpu" if n_gpus else "cpu",
        ranks_per_gpu=N_RANKS // n_gpus if n_gpus else 1,
    )


def experts_of(rank: int, config: EPConfig) -> range:
    """Lists the experts of a rank: 4, 4 and 2 of ten."""
    first = rank * config.n_local_experts
    return range(first, min(first + config.n_local_experts, N_EXPERTS))


def run_experts(
    dispatched: tuple[TensorValue, ...], up: TensorValue, down: TensorValue
) -> TensorValue:
    """Runs a rank's experts on the rows that dispatch has delivered."""
    rows, row_offsets, expert_ids, _ = dispatched
    hidden = ops.relu(grouped_matmul(rows, up, row_offsets, expert_ids))
    return grouped_matmul(hidden * hidden, down, row_offsets, expert_ids)


def build(config: EPConfig, module: Module | None = None) -> Graph:
    """Builds the layer for all ranks; inputs are in the order of ``main``."""
    manager, ranks = EPBatchManager(config), list(range(N_RANKS))
    types = []
    for rank in ranks:
        device, n_here = config.device(rank), len(experts_of(rank, config))
        types += [
            TensorType(BF16, [f"n_{rank}", HIDDEN_SIZE], device),  # tokens
            TensorType(F32, [f"n_{rank}", N_EXPERTS], device),  # the router's logits
            TensorType(BF16, [n_here, INNER, HIDDEN_SIZE], device),  # up
            TensorType(BF16, [n_here, HIDDEN_SIZE, INNER], device),  # down
        ]
    inputs = [*types, *manager.input_types()]
    with Graph("own_experts", input_types=inputs, module=module) as graph:
        values = [value.tensor for value in graph.inputs[: len(types)]]
        manager.fetch_buffers(graph.inputs[len(types) :])
        xs, logits, ups, downs = (values[i::4] for i in range(4))
        ids, weights = zip(*(softmax_top_k(of_rank, TOP_K) for of_rank in logits))
        dispatched = manager.ep_dispatch_all(xs, list(ids), ranks)
        rows = [run_experts(*given) for given in zip(dispatched, ups, downs)]
        graph.output(*manager.ep_combine_all(rows, list(weights), ranks))
    return graph


def to_buffer(values: np.ndarray, device: Device, dtype: DType = BF16) -> Buffer:
    """Copies float32 values to a device; NumPy holds bfloat16 as its bits."""
    if dtype == F32:
        return Buffer.from_numpy(values).to(device)
    bits = Buffer.from_numpy(float32_to_bfloat16(values))
    return bits.view(BF16, values.shape).to(device)


def from_buffer(buffer: Buffer) -> np.ndarray:
    """Copies a bfloat16 buffer into a float32 array."""
    bits = buffer.to(CPU()).view(DType.uint16, tuple(buffer.shape))
    return bfloat16_to_float32(bits.to_numpy())


def main(words: list[str] | None = None) -> None:
    """Runs the layer once and compares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, choices=[0, 1, N_RANKS], default=0)
    n_gpus = parser.parse_args(words).gpus
    config = make_config(n_gpus)
    gpus = [Accelerator(i) for i in range(n_gpus)]
    session = InferenceSession(devices=[CPU(), *gpus])
    model = session.load(build(config))

    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        return bfloat16_to_float32(float32_to_bfloat16(values.astype(np.float32)))

    up, down = draw(N_EXPERTS, INNER, HIDDEN_SIZE), draw(N_EXPERTS, HIDDEN_SIZE, INNER)
    tokens = [draw(n, HIDDEN_SIZE) * 8 for n in (40, 17, 0)]  # of each rank
    logits = [draw(len(x), N_EXPERTS) * 8 for x in tokens]
    inputs = []
    for rank, (x, of_rank) in enumerate(zip(tokens, logits)):
        device = gpus[rank // config.ranks_per_gpu] if n_gpus else CPU()
        here = list(experts_of(rank, config))
        inputs += [to_buffer(x, device), to_buffer(of_rank, device, F32)]
        inputs += [to_buffer(up[here], device), to_buffer(down[here], device)]
    with EPCommInitializer(config) as comm:
        comm.ep_init(session)
        results = model.execute(*inputs, *comm.model_inputs())
        comm.check()

    def plain_expert(i: int, rows: np.ndarray) -> np.ndarray:
        return np.maximum(rows @ up[i].T, 0) ** 2 @ down[i].T

    for x, of_rank, y in zip(tokens, logits, results):
        ids, weights = plain_softmax_top_k(of_rank, TOP_K)
        expected = moe(x, ids, weights.astype(np.float32), plain_expert)
        # bfloat16 has 8 bits, and rows are rounded four times.
        np.testing.assert_allclose(from_buffer(y), expected, rtol=0.05, atol=0.05)
    n_tokens = sum(map(len, tokens))
    place = f"{n_gpus} GPU{'s' * (n_gpus > 1)}" if n_gpus else "the CPU"
    print(f"{n_tokens} tokens on {N_RANKS} ranks of {place} agree with the plain layer")


if __name__ == "__main__":
    main()
