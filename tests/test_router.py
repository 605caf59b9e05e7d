# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2's router in plain ops against that of Hugging Face transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType
from transformers import MiniMaxM2Config
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

from max_ep.serve.minimax_m2 import MiniMaxM2Gate

N_EXPERTS, TOP_K = 12, 4


def add_graphs(module: Module) -> None:
    """Adds a router of given logits."""
    cpu = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, ["n_tokens", N_EXPERTS], cpu),
        TensorType(DType.float32, [N_EXPERTS], cpu),
    ]
    with Graph("minimax_router", input_types=types, module=module) as graph:
        logits, bias = (value.tensor for value in graph.inputs)
        gate = SimpleNamespace(
            _gate_logits=lambda hidden_states: hidden_states,
            e_score_correction_bias=bias,
            num_experts_per_token=TOP_K,
        )
        graph.output(*MiniMaxM2Gate.__call__(gate, logits))


def test_router_is_that_of_transformers(one_module: SimpleNamespace) -> None:
    """Choices are made with the bias, and weighed without it."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, N_EXPERTS)).astype(np.float32)
    # As large as the differences of scores, so that it matters.
    bias = rng.normal(scale=0.2, size=N_EXPERTS).astype(np.float32)
    ids, weights = (
        out.to_numpy()
        for out in one_module.models["minimax_router"].execute(logits, bias)
    )
    config = MiniMaxM2Config(
        hidden_size=N_EXPERTS, num_local_experts=N_EXPERTS, num_experts_per_tok=TOP_K
    )
    router = MiniMaxM2TopKRouter(config)
    router.weight.data = torch.eye(N_EXPERTS)
    with torch.no_grad():
        _, want_weights, want_ids = router(
            torch.from_numpy(logits), torch.from_numpy(bias)
        )
    unbiased = np.argsort(-logits, 1)[:, :TOP_K]
    assert (np.sort(unbiased, 1) != np.sort(want_ids.numpy(), 1)).any()
    # In whatever order they are, each with its weight.
    order, want_order = (np.argsort(a, 1) for a in (ids, want_ids.numpy()))
    np.testing.assert_array_equal(
        np.take_along_axis(ids, order, 1),
        np.take_along_axis(want_ids.numpy(), want_order, 1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, 1),
        np.take_along_axis(want_weights.numpy(), want_order, 1),
        rtol=1e-6,
    )
