# SPDX-License-Identifier: Apache-2.0
"""A MoE layer over four ranks: router, dispatch, SwiGLU experts, combine.

    python graphs/moe_layer.py [--shared-expert] [--sums] [--allreduce] [--format mxfp8]

The layer is ``max_ep.graph.moe.moe_layer``. With ``--shared-expert`` every token also
goes through one expert of its own rank, computed beside the routed ones. With
``--sums`` combine sends partial sums instead of rows. With ``--format`` dispatch
quantizes tokens, and the experts get them in float32 again. With ``--allreduce`` every
rank has all tokens, and what the ranks' experts make of them is added up. The result is
compared with a plain layer in NumPy.
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
from max_ep.reference import moe, softmax_top_k, swiglu

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


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or the ``words`` of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared-expert", action="store_true")
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--format", choices=list(BY_NAME), default="float32")
    parser.add_argument("--allreduce", action="store_true")
    return parser.parse_args(words)


def config_of(options: argparse.Namespace) -> EPConfig:
    token_format = BY_NAME[options.format]
    return replace(
        CONFIG,
        use_allreduce=options.allreduce,
        combine_mode="sums" if options.sums else "rows",
        dispatch_dtype=token_format.dtype,
        dispatch_quant_config=token_format.make_quant_config(),
    )


def main() -> None:
    """Runs the layer once and compares."""
    options = options_of()
    config = config_of(options)
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
    arrays = [output.to_numpy() for output in outputs]
    n = len(arrays) // 2
    y, ids = np.concatenate(arrays[:n]), np.concatenate(arrays[n:])

    tokens = np.concatenate(x[:n])
    expected_ids, top = softmax_top_k(tokens @ router.T, TOP_K)
    np.testing.assert_array_equal(ids, expected_ids)

    def plain(sent: np.ndarray) -> np.ndarray:
        weights = top.astype(np.float32)
        y = moe(sent, ids, weights, lambda e, rows: swiglu(rows, gate_up[e], down[e]))
        return y + swiglu(tokens, *shared) if options.shared_expert else y

    expected = exact = plain(tokens)
    if config.is_quantized:
        of = config.token_format
        expected = plain(of.dequantize(*of.quantize(tokens)))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    print(f"{len(tokens)} tokens on 4 ranks agree with the plain MoE")
    if config.is_quantized:
        error = np.linalg.norm(expected - exact) / np.linalg.norm(exact)
        print(f"of which {options.format} tokens change {error:.1%}")


if __name__ == "__main__":
    main()
