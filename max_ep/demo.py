# SPDX-License-Identifier: Apache-2.0
"""``max-ep demo``: a text through several MoE layers over four ranks.

Every word of a text that ships with the package becomes a token; a seeded
router sends it to 8 of 64 experts, which four ranks hold. The result is
compared with a plain MoE without ranks, in torch, or in NumPy where there is
no torch.
"""

from __future__ import annotations

import importlib.util
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, ops
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .config import EPConfig
from .graph.manager import EPBatchManager
from .graph.moe import ExpertWeights, moe_layer
from .memory.initializer import EPCommInitializer

N_RANKS, N_EXPERTS, TOP_K = 4, 64, 8
HIDDEN_SIZE, MOE_DIM, N_LAYERS = 256, 128, 4
TOLERANCE = 1e-4
"""Largest difference from the plain MoE, of values of about 1: float32 sums in
another order."""

_EPSILON = 1e-6


@dataclass
class LayerWeights:
    """Weights of one layer, float32."""

    router: np.ndarray  # [N_EXPERTS, HIDDEN_SIZE]
    gate_up: np.ndarray  # [N_EXPERTS, 2 * MOE_DIM, HIDDEN_SIZE]
    down: np.ndarray  # [N_EXPERTS, HIDDEN_SIZE, MOE_DIM]

    @staticmethod
    def random(seed: int) -> LayerWeights:
        """Draws weights whose outputs keep the size of their inputs."""
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            scale = 1 / np.sqrt(shape[-1])
            return (rng.standard_normal(shape) * scale).astype(np.float32)

        return LayerWeights(
            draw(N_EXPERTS, HIDDEN_SIZE),
            draw(N_EXPERTS, 2 * MOE_DIM, HIDDEN_SIZE),
            draw(N_EXPERTS, HIDDEN_SIZE, MOE_DIM),
        )


def embed(text: str) -> np.ndarray:
    """Gives each word of a text a vector that depends on the word alone.

    Returns:
        ``[n_words, HIDDEN_SIZE]`` float32.
    """
    words = re.findall(r"[a-z']+|[.,;:]", text.lower())
    rows = [
        np.random.default_rng(zlib.crc32(word.encode())).standard_normal(HIDDEN_SIZE)
        for word in words
    ]
    return np.stack(rows).astype(np.float32)


def build_layer(config: EPConfig, manager: EPBatchManager) -> Graph:
    """Builds one layer, ``x + moe(rms_norm(x))`` on every rank."""
    cpu, f32 = DeviceRef.CPU(), DType.float32
    n_local = config.n_local_experts
    ranks = range(N_RANKS)
    types = [TensorType(f32, [f"n_tokens_{r}", HIDDEN_SIZE], cpu) for r in ranks]
    types.append(TensorType(f32, [N_EXPERTS, HIDDEN_SIZE], cpu))
    for _ in ranks:
        types.append(TensorType(f32, [n_local, 2 * MOE_DIM, HIDDEN_SIZE], cpu))
        types.append(TensorType(f32, [n_local, HIDDEN_SIZE, MOE_DIM], cpu))
    with Graph("demo_layer", input_types=[*types, *manager.input_types()]) as graph:
        values = [value.tensor for value in graph.inputs[: len(types)]]
        manager.fetch_buffers(graph.inputs[len(types) :])
        x, router, weights = values[:N_RANKS], values[N_RANKS], values[N_RANKS + 1 :]
        ones = ops.constant(np.ones(HIDDEN_SIZE, np.float32), f32, cpu)
        routed, topk_ids = moe_layer(
            manager,
            [ops.rms_norm(tokens, ones, _EPSILON) for tokens in x],
            router,
            [ExpertWeights(*weights[2 * r : 2 * r + 2]) for r in ranks],
        )
        graph.output(*(a + b for a, b in zip(x, routed)), *topk_ids)
    return graph


def run_layer(
    model: Model,
    comm: EPCommInitializer,
    x: list[np.ndarray],
    weights: LayerWeights,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs one layer.

    Returns:
        The tokens of each rank, and the experts they chose.
    """
    experts: list[np.ndarray] = []
    for gate_up, down in zip(
        np.split(weights.gate_up, N_RANKS), np.split(weights.down, N_RANKS)
    ):
        experts += [gate_up, down]
    outputs = model.execute(*x, weights.router, *experts, *comm.model_inputs())
    arrays = [output.to_numpy() for output in outputs]
    return arrays[:N_RANKS], arrays[N_RANKS:]


def plain_moe_numpy(x: np.ndarray, weights: LayerWeights) -> np.ndarray:
    """Computes the same layer without ranks, in NumPy."""
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + _EPSILON)
    logits = normed @ weights.router.T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :TOP_K]
    top = np.take_along_axis(p, ids, axis=1)
    top /= top.sum(axis=1, keepdims=True)
    result = x.copy()
    for expert in range(N_EXPERTS):
        tokens, choice = np.nonzero(ids == expert)
        gate, up = np.split(normed[tokens] @ weights.gate_up[expert].T, 2, axis=1)
        y = (gate / (1 + np.exp(-gate)) * up) @ weights.down[expert].T
        result[tokens] += top[tokens, choice, None] * y
    return result


def plain_moe_torch(x: np.ndarray, weights: LayerWeights) -> np.ndarray:
    """Computes the same layer without ranks, in torch."""
    import torch

    router, gate_up, down = (
        torch.from_numpy(w) for w in (weights.router, weights.gate_up, weights.down)
    )
    tokens = torch.from_numpy(x)
    normed = torch.nn.functional.rms_norm(tokens, [HIDDEN_SIZE], eps=_EPSILON)
    top, ids = torch.topk(torch.softmax(normed @ router.T, dim=1), TOP_K, dim=1)
    top = top / top.sum(dim=1, keepdim=True)
    result = tokens.clone()
    for expert in range(N_EXPERTS):
        rows, choice = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (normed[rows] @ gate_up[expert].T).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        result.index_add_(0, rows, top[rows, choice, None] * y)
    return result.numpy()


def _spread_tables(console: Console, topk_ids: list[np.ndarray]) -> None:
    """Prints how the tokens of the last layer spread."""
    n_local = N_EXPERTS // N_RANKS
    to_rank = np.array(
        [[(ids // n_local == dst).sum() for dst in range(N_RANKS)] for ids in topk_ids]
    )
    table = Table(title="Rows from rank to rank, last layer", title_justify="left")
    table.add_column("from \\ to")
    for dst in range(N_RANKS):
        table.add_column(f"rank {dst}", justify="right")
    table.add_column("tokens", justify="right")
    for src in range(N_RANKS):
        cells = [str(n) for n in to_rank[src]]
        table.add_row(f"rank {src}", *cells, str(len(topk_ids[src])))
    table.add_section()
    table.add_row("received", *(str(n) for n in to_rank.sum(axis=0)), "")
    console.print(table)

    load = np.bincount(np.concatenate(topk_ids).ravel(), minlength=N_EXPERTS)
    blocks = " ▁▂▃▄▅▆▇█"
    console.print("Rows of each expert, last layer:")
    for rank in range(N_RANKS):
        part = load[rank * n_local : (rank + 1) * n_local]
        bars = "".join(blocks[-(-8 * n // load.max())] for n in part)
        console.print(f"  rank {rank}  |{bars}|  {part.min()} to {part.max()}")
    console.print(
        f"  busiest expert: {load.max() / load.mean():.2f} times the mean of "
        f"{load.mean():.0f} rows"
    )


def run_demo() -> int:
    """Runs the demo.

    Returns:
        0 if the result agrees with the plain MoE, else 1.
    """
    console = Console()
    begin = time.perf_counter()
    text = resources.files("max_ep").joinpath("data/declaration.txt").read_text()
    tokens = embed(text)
    config = EPConfig(
        dispatch_dtype=DType.float32,
        combine_dtype=DType.float32,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        n_experts=N_EXPERTS,
        max_tokens_per_rank=-(-len(tokens) // N_RANKS),
        n_gpus_per_node=N_RANKS,
        n_nodes=1,
        target="cpu",
    )
    console.print(
        f"{len(tokens)} words of the Declaration of Independence, {N_LAYERS} MoE "
        f"layers, {N_EXPERTS} experts top-{TOP_K} on {N_RANKS} ranks (CPU)"
    )
    layers = [LayerWeights.random(seed) for seed in range(N_LAYERS)]
    progress = Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
    )
    session = InferenceSession(devices=[CPU()])
    with progress, EPCommInitializer(config) as comm:
        task = progress.add_task(
            "compile (about a minute the first time)", total=N_LAYERS + 2
        )
        graph = build_layer(config, EPBatchManager(config))
        # ep_init compiles a graph too: one core for each.
        with ThreadPoolExecutor() as pool:
            joined = pool.submit(comm.ep_init, InferenceSession(devices=[CPU()]))
            model = session.load(graph)
            progress.update(task, advance=1, description="symmetric memory")
            joined.result()
        progress.update(task, advance=1)
        # np.array_split: the last ranks have a token fewer.
        x = np.array_split(tokens, N_RANKS)
        topk_ids: list[np.ndarray] = []
        for i, weights in enumerate(layers):
            progress.update(task, description=f"layer {i}: dispatch, experts, combine")
            x, topk_ids = run_layer(model, comm, x, weights)
            progress.update(task, advance=1)
        progress.update(task, description="done")
    _spread_tables(console, topk_ids)

    has_torch = importlib.util.find_spec("torch") is not None
    plain_moe = plain_moe_torch if has_torch else plain_moe_numpy
    expected = tokens
    for weights in layers:
        expected = plain_moe(expected, weights)
    difference = float(np.abs(np.concatenate(x) - expected).max())
    agrees = difference <= TOLERANCE
    console.print(
        f"{'OK' if agrees else 'WRONG'}: largest difference from a plain MoE in "
        f"{'torch' if has_torch else 'NumPy'} is {difference:.1e} (allowed "
        f"{TOLERANCE:.0e}); {time.perf_counter() - begin:.1f} s in all"
    )
    return 0 if agrees else 1
