# SPDX-License-Identifier: Apache-2.0
"""``max-ep demo``: tokens through several MoE layers over four ranks.

A router sends each token to 8 of 64 experts, which four ranks hold. The result is
compared with a plain MoE without ranks, in NumPy.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from .. import reference
from ..config import EPConfig
from ..experts import PACKAGE
from ..extension import extension_path
from ..graph.manager import EPBatchManager
from ..graph.moe import moe_layer
from ..memory.initializer import EPCommInitializer
from ..memory.setup_graph import SETUP_GRAPH, setup_graph

N_RANKS, N_EXPERTS, TOP_K, N_TOKENS = 4, 64, 8, 256
HIDDEN_SIZE, MOE_DIM, N_LAYERS = 256, 128, 4
TOLERANCE = 1e-4
"""Largest difference from the plain MoE, of values of about 1: float32 sums in
another order."""

_EPSILON = 1e-6
_LAYER = "demo_layer"


class LayerWeights(NamedTuple):
    """Weights of one layer, float32."""

    router: np.ndarray  # [N_EXPERTS, HIDDEN_SIZE]
    gate_up: np.ndarray  # [N_EXPERTS, 2 * MOE_DIM, HIDDEN_SIZE]
    down: np.ndarray  # [N_EXPERTS, HIDDEN_SIZE, MOE_DIM]


def draw_weights(seed: int) -> LayerWeights:
    """Draws weights whose outputs keep the size of their inputs."""
    rng = np.random.default_rng(seed)
    shapes = [HIDDEN_SIZE], [2 * MOE_DIM, HIDDEN_SIZE], [HIDDEN_SIZE, MOE_DIM]
    drawn = [rng.standard_normal((N_EXPERTS, *s)) / np.sqrt(s[-1]) for s in shapes]
    return LayerWeights(*(weight.astype(np.float32) for weight in drawn))


def build_layer(config: EPConfig, manager: EPBatchManager, module: Module) -> None:
    """Adds the graph of one layer, ``x + moe(rms_norm(x))`` on every rank."""
    cpu, f32, ranks = DeviceRef.CPU(), DType.float32, range(N_RANKS)
    n_local = config.n_local_experts
    # One size for all ranks: their ops are the same, and compile once.
    types = [TensorType(f32, ["n_tokens", HIDDEN_SIZE], cpu)] * N_RANKS
    types.append(TensorType(f32, [N_EXPERTS, HIDDEN_SIZE], cpu))
    shapes = [n_local, 2 * MOE_DIM, HIDDEN_SIZE], [n_local, HIDDEN_SIZE, MOE_DIM]
    types += [TensorType(f32, shape, cpu) for shape in shapes] * N_RANKS
    inputs = [*types, *manager.input_types()]
    with Graph(_LAYER, input_types=inputs, module=module) as graph:
        values = [value.tensor for value in graph.inputs[: len(types)]]
        manager.fetch_buffers(graph.inputs[len(types) :])
        x, router, weights = values[:N_RANKS], values[N_RANKS], values[N_RANKS + 1 :]
        ones = ops.constant(np.ones(HIDDEN_SIZE, np.float32), f32, cpu)
        routed, topk_ids = moe_layer(
            manager,
            [ops.rms_norm(tokens, ones, _EPSILON) for tokens in x],
            router,
            [(weights[2 * r], weights[2 * r + 1]) for r in ranks],
        )
        graph.output(*(a + b for a, b in zip(x, routed)), *topk_ids)


def compile_graphs(session: InferenceSession, config: EPConfig) -> dict[str, Model]:
    """Compiles the graphs of layer and memory set-up together."""
    with ThreadPoolExecutor() as pool:
        packages = [pool.submit(extension_path, name) for name in ("max_ep", PACKAGE)]
        config.sizes()  # asks Mojo, meanwhile
        paths = [package.result() for package in packages]
    module = Module()
    setup_graph(config, module)
    build_layer(config, EPBatchManager(config), module)
    return session.load_all(module, custom_extensions=paths)


def run_layer(
    model: Model, comm: EPCommInitializer, x: list[np.ndarray], weights: LayerWeights
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs one layer; returns each rank's tokens, and the experts they chose."""
    parts = (np.split(w, N_RANKS) for w in (weights.gate_up, weights.down))
    experts = [w for of_rank in zip(*parts) for w in of_rank]
    outputs = model.execute(*x, weights.router, *experts, *comm.model_inputs())
    arrays = [output.to_numpy() for output in outputs]
    return arrays[:N_RANKS], arrays[N_RANKS:]


def plain_moe(x: np.ndarray, weights: LayerWeights) -> np.ndarray:
    """Computes the same layer without ranks."""
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + _EPSILON)
    ids, top = reference.softmax_top_k(normed @ weights.router.T, TOP_K)

    def expert(i: int, rows: np.ndarray) -> np.ndarray:
        return reference.swiglu(rows, weights.gate_up[i], weights.down[i])

    return x + reference.moe(normed, ids, top.astype(np.float32), expert)


def run_demo(_: Any = None) -> int:
    """Runs the demo; returns 0 if the result agrees with the plain MoE, else 1."""
    begin = time.perf_counter()
    shape = N_RANKS * N_TOKENS, HIDDEN_SIZE
    rng = np.random.default_rng(N_LAYERS)  # smaller seeds are those of the layers
    tokens = rng.standard_normal(shape, np.float32)
    config = EPConfig(
        dispatch_dtype=DType.float32,
        combine_dtype=DType.float32,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        n_experts=N_EXPERTS,
        max_tokens_per_rank=N_TOKENS,
        n_gpus_per_node=N_RANKS,
        n_nodes=1,
        target="cpu",
    )
    print(
        f"{N_TOKENS} tokens on each of {N_RANKS} ranks (CPU), {N_LAYERS} MoE layers, "
        f"{N_EXPERTS} experts top-{TOP_K}\n"
        "compile (half a minute the first time)",
        flush=True,
    )
    layers = [draw_weights(seed) for seed in range(N_LAYERS)]
    session = InferenceSession(devices=[CPU()])
    models = compile_graphs(session, config)
    with EPCommInitializer(config) as comm:
        comm.ep_init(session, models[SETUP_GRAPH])
        x, expected = np.split(tokens, N_RANKS), tokens
        topk_ids: list[np.ndarray] = []
        for i, weights in enumerate(layers):
            print(f"layer {i}: dispatch, experts, combine", flush=True)
            x, topk_ids = run_layer(models[_LAYER], comm, x, weights)
            expected = plain_moe(expected, weights)
    print("\nRows from rank (line) to rank (column), last layer:")
    for src, ids in enumerate(topk_ids):
        to_rank = np.bincount(ids.ravel() // config.n_local_experts, minlength=N_RANKS)
        print(f"  rank {src}  " + "".join(f"{n:>8}" for n in to_rank))
    load = np.bincount(np.concatenate(topk_ids).ravel(), minlength=N_EXPERTS)
    print(f"The busiest expert has {load.max() / load.mean():.2f} times the mean.\n")
    difference = float(np.abs(np.concatenate(x) - expected).max())
    agrees = difference <= TOLERANCE
    print(
        f"{'OK' if agrees else 'WRONG'}: largest difference from a plain MoE is "
        f"{difference:.1e} (allowed {TOLERANCE:.0e}); "
        f"{time.perf_counter() - begin:.1f} s in all"
    )
    return 0 if agrees else 1
