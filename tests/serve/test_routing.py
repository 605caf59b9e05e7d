# SPDX-License-Identifier: Apache-2.0
"""Experts that are chosen by sigmoids, from groups: of sizes where MAX's kernel is
wrong, too."""

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from max_ep.checkpoint import described
from max_ep.serve import routing
from tests.serve.serving_configs import PUBLISHED

SIZES = [(12, 5, 3, 2), (16, 4, 8, 2), (24, 3, 1, 1)]
"""Experts, those of a token, groups, and those that are chosen."""
SCALE = 2.5


def add_graphs(module: Module) -> None:
    cpu, f32 = DeviceRef.CPU(), DType.float32
    for n, *how in SIZES:
        types = [TensorType(f32, ["n_tokens", n], cpu), TensorType(f32, [n], cpu)]
        with Graph(f"chosen_of_{n}", input_types=types, module=module) as graph:
            scores, bias = (value.tensor for value in graph.inputs)
            graph.output(*routing.router_anywhere(scores, bias, n, *how, True, SCALE))


@pytest.mark.parametrize("sizes", SIZES)
def test_experts_are_those_that_transformers_chooses(sizes, one_module):
    """Biases are below 0, too: fails if groups that are left out have scores of 0."""
    n, top_k, n_group, topk_group = sizes
    config = DeepseekV3Config(
        hidden_size=8,
        moe_intermediate_size=8,
        n_routed_experts=n,
        num_experts_per_tok=top_k,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=SCALE,
    )
    theirs = DeepseekV3MoE(config)
    draw = torch.Generator().manual_seed(n)
    bias = torch.randn(n, generator=draw) - 1
    theirs.gate.e_score_correction_bias.copy_(bias)
    logits = torch.randn(50, n, generator=draw)
    wanted = theirs.route_tokens_to_experts(logits)
    model = one_module.models[f"chosen_of_{n}"]
    given = logits.sigmoid().numpy(), bias.numpy()
    found = [torch.from_dlpack(x) for x in model.execute(*given)]
    in_order = []
    for ids, weights in (found, wanted):
        order = ids.long().argsort(1)
        in_order.append((ids.long().gather(1, order), weights.gather(1, order)))
    (ids, weights), (of_them, their_weights) = in_order
    assert torch.equal(ids, of_them)
    np.testing.assert_allclose(weights, their_weights, rtol=1e-5)


@pytest.mark.parametrize(
    "sizes, takes",
    [
        ((256, 8, 8, 4), True),  # DeepSeek-V3
        ((384, 8, 1, 1), True),  # Kimi-K2
        ((64, 8, 8, 4), True),
        *((sizes, False) for sizes in SIZES),
        ((64, 8, 16, 4), False),  # entries of groups of four are not written
        ((64, 8, 8, 1), False),  # scores of groups lie behind what is left
        ((64, 8, 4, 2), True),
        ((96, 8, 8, 4), False),
        ((256, 6, 8, 4), False),
        ((160, 8, 1, 1), False),
        ((2048, 8, 1, 1), False),
    ],
)
def test_kernel_of_max_is_used_where_it_is_right(sizes, takes, monkeypatch):
    """Fails if a published model lost it, or another one got it."""
    assert routing.kernel_takes(*sizes) == takes
    monkeypatch.setattr(routing, "moe_router_group_limited", lambda *_: "MAX's")
    monkeypatch.setattr(routing, "chosen_by", lambda *_: "ours")
    n, *how = sizes
    found = routing.router_anywhere(None, None, n, *how, True, SCALE)
    assert found == ("MAX's" if takes else "ours")


def test_deepseek_v3_is_among_them():
    moe = described(PUBLISHED["DeepSeek-V3"] | {"quantization_config": None}).moe
    router = moe.router
    assert routing.kernel_takes(
        moe.n_experts, moe.top_k, router.n_groups, router.n_chosen_groups
    )
