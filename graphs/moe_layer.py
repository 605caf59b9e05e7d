# SPDX-License-Identifier: Apache-2.0
"""A MoE layer over four ranks: router, dispatch, SwiGLU experts, combine.

    python graphs/moe_layer.py [--shared-expert] [--sums] [--allreduce] [--format mxfp8]

The layer is ``max_ep.graph.moe.moe_layer``; with ``--shared-expert`` every token
also goes through one expert of its own rank, computed beside the routed ones
and added; with ``--sums`` combine sends partial sums instead of rows
(``EPConfig.combine_mode``); with ``--format`` dispatch quantizes tokens, and the
experts get them in float32 again; with ``--allreduce`` every rank has all tokens, and
what the ranks' experts make of them is added up (``EPConfig.use_allreduce``). The
result is compared with that of ``max_ep.reference.moe`` for the same quantized tokens,
and for the tokens themselves.
"""

import argparse
import functools
import operator
from dataclasses import replace

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue, ops

from max_ep import EPBatchManager, EPCommInitializer, EPConfig
from max_ep.experts import linear
from max_ep.formats import BY_NAME
from max_ep.graph.moe import moe_layer
from max_ep.reference import moe

N_RANKS, N_EXPERTS, TOP_K, HIDDEN_SIZE, MOE_DIM = 4, 16, 4, 128, 64
CPU_DEVICE, F32 = DeviceRef.CPU(), DType.float32
CONFIG = EPConfig(
    dispatch_dtype=F32,
    combine_dtype=F32,
    hidden_size=HIDDEN_SIZE,
    top_k=TOP_K,
    n_experts=N_EXPERTS,
    max_tokens_per_rank=64,
    n_gpus_per_node=N_RANKS,
    n_nodes=1,
    target="cpu",
)


def shared_expert(
    x: TensorValue, gate_up: TensorValue, down: TensorValue
) -> TensorValue:
    """Runs one SwiGLU expert on all tokens of a rank."""
    gate, up = ops.split(linear(x, gate_up), [MOE_DIM, MOE_DIM], axis=1)
    return linear(ops.silu(gate) * up, down)


def build(options: argparse.Namespace, module: Module | None = None) -> Graph:
    """Builds the layer for all ranks. With other graphs of one ``module`` it compiles
    in about the time of one."""
    config = config_of(options)
    n_local = config.n_local_experts
    rows = ["n"] * 4 if config.use_allreduce else [f"n_{r}" for r in range(4)]
    types = [TensorType(F32, [n, HIDDEN_SIZE], CPU_DEVICE) for n in rows]
    types += [TensorType(F32, [N_EXPERTS, HIDDEN_SIZE], CPU_DEVICE)]
    types += [TensorType(F32, [n_local, 2 * MOE_DIM, HIDDEN_SIZE], CPU_DEVICE)] * 4
    types += [TensorType(F32, [n_local, HIDDEN_SIZE, MOE_DIM], CPU_DEVICE)] * 4
    types += [
        TensorType(F32, [2 * MOE_DIM, HIDDEN_SIZE], CPU_DEVICE),
        TensorType(F32, [HIDDEN_SIZE, MOE_DIM], CPU_DEVICE),
    ]
    manager, n = EPBatchManager(config), len(types)
    name = "moe_layer_allreduce" if config.use_allreduce else "moe_layer"
    types += manager.input_types()
    with Graph(name, input_types=types, module=module) as graph:
        values = [value.tensor for value in graph.inputs[:n]]
        manager.fetch_buffers(graph.inputs[n:])
        x, router = values[:4], values[4]
        experts = list(zip(values[5:9], values[9:13]))
        routed, topk_ids = moe_layer(manager, x, router, experts)
        if config.use_allreduce:
            # On GPUs: ops.allreduce.sum(routed, signal_buffers).
            routed = [functools.reduce(operator.add, routed)]
        if options.shared_expert:
            routed = [y + shared_expert(t, *values[13:]) for y, t in zip(routed, x)]
        graph.output(*routed, *topk_ids[: len(routed)])
    return graph


def swiglu(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Computes one SwiGLU expert in NumPy."""
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or the ``words`` of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared-expert", action="store_true")
    parser.add_argument("--sums", action="store_true")
    formats = [name for name, f in BY_NAME.items() if f.is_quantized]
    parser.add_argument("--format", choices=formats)
    parser.add_argument("--allreduce", action="store_true")
    return parser.parse_args(words)


def config_of(options: argparse.Namespace) -> EPConfig:
    """Makes the group."""
    config = replace(CONFIG, use_allreduce=options.allreduce)
    if options.sums:
        config = replace(config, combine_mode="sums")
    if options.format:
        token_format = BY_NAME[options.format]
        config = replace(
            config,
            dispatch_dtype=token_format.dtype,
            dispatch_quant_config=token_format.make_quant_config(),
        )
    return config


def main() -> None:
    """Runs the layer once and compares."""
    options = options_of()
    config, has_shared_expert = config_of(options), options.shared_expert
    rng = np.random.default_rng(7)

    def draw(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        return values.astype(np.float32)

    x = [draw(n, HIDDEN_SIZE) * 10 for n in (64, 17, 0, 40)]  # uneven on purpose
    if options.allreduce:
        x = x[:1] * N_RANKS
    router = draw(N_EXPERTS, HIDDEN_SIZE)
    gate_up = draw(N_EXPERTS, 2 * MOE_DIM, HIDDEN_SIZE)
    down = draw(N_EXPERTS, HIDDEN_SIZE, MOE_DIM)
    shared = draw(2 * MOE_DIM, HIDDEN_SIZE), draw(HIDDEN_SIZE, MOE_DIM)

    session = InferenceSession(devices=[CPU()])
    model = session.load(build(options))
    with EPCommInitializer(config) as comm:
        comm.ep_init(session)
        weights = [*np.split(gate_up, N_RANKS), *np.split(down, N_RANKS), *shared]
        outputs = model.execute(*x, router, *weights, *comm.model_inputs())
    n = len(outputs) // 2
    y, ids = (
        np.concatenate([a.to_numpy() for a in o]) for o in (outputs[:n], outputs[n:])
    )

    tokens = np.concatenate(x[:n])
    logits = tokens @ router.T
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    top = np.take_along_axis(p, ids, axis=1)
    top = (top / top.sum(axis=1, keepdims=True)).astype(np.float32)

    def plain(sent: np.ndarray) -> np.ndarray:
        y = moe(sent, ids, top, lambda e, rows: swiglu(rows, gate_up[e], down[e]))
        return y + swiglu(tokens, *shared) if has_shared_expert else y

    expected = exact = plain(tokens)
    if options.format:
        token_format = BY_NAME[options.format]
        expected = plain(token_format.dequantize(*token_format.quantize(tokens)))
    np.testing.assert_array_equal(np.sort(ids), np.sort(np.argsort(-p)[:, :TOP_K]))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    print(f"{len(tokens)} tokens on 4 ranks agree with the plain MoE")
    if options.format:
        error = np.linalg.norm(expected - exact) / np.linalg.norm(exact)
        print(f"of which {options.format} tokens change {error:.1%}")


if __name__ == "__main__":
    main()
