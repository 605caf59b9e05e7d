# SPDX-License-Identifier: Apache-2.0
"""Experts of gpt-oss, with biases and a clamped activation, against transformers."""

from types import SimpleNamespace

import numpy as np
import torch
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType

from max_ep.serve.moe import DecoderMoe

N_EXPERTS, HIDDEN, INNER = 5, 64, 32
COUNTS = [3, 0, 4, 2, 6]
"""Rows of each group."""
EXPERT_IDS = [2, 0, 4, 1, 3]
"""Expert of each group."""


def add_graphs(module: Module) -> None:
    cpu, f32 = DeviceRef.CPU(), DType.float32
    types = [
        TensorType(f32, ["n_rows", HIDDEN], cpu),
        TensorType(DType.uint32, [N_EXPERTS + 1], cpu),
        TensorType(DType.int32, [N_EXPERTS], cpu),
        TensorType(f32, [N_EXPERTS, 2 * INNER, HIDDEN], cpu),
        TensorType(f32, [N_EXPERTS, HIDDEN, INNER], cpu),
        TensorType(f32, [N_EXPERTS, 2 * INNER], cpu),
        TensorType(f32, [N_EXPERTS, HIDDEN], cpu),
    ]
    with Graph("clamped", input_types=types, module=module) as graph:
        rows, *groups, gate_up, down, gate_up_bias, down_bias = (
            value.tensor for value in graph.inputs
        )
        layer = SimpleNamespace(
            gate_up_proj=gate_up,
            down_proj=down,
            gate_up_proj_bias=gate_up_bias,
            down_proj_bias=down_bias,
            moe_dim=INNER,
        )
        every = slice(0, None)
        graph.output(DecoderMoe._clamped(layer, 0, every, rows, *groups))


def test_experts_are_those_of_transformers(one_module):
    """Fails if a row has the biases of another expert, or nothing is clamped."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=INNER)
    experts = GptOssExperts(GptOssConfig(**sizes, num_local_experts=N_EXPERTS))
    for values in experts.parameters():
        values.data.normal_(std=0.6)
    x = 2 * torch.randn(sum(COUNTS), HIDDEN)
    offsets = np.cumsum([0, *COUNTS])
    alternating = experts.gate_up_proj.data
    halves = torch.cat([alternating[:, :, 0::2], alternating[:, :, 1::2]], 2)
    given = [
        x.numpy(),
        offsets.astype(np.uint32),
        np.array(EXPERT_IDS, np.int32),
        *(w.transpose(1, 2).numpy() for w in (halves, experts.down_proj.data)),
        experts.gate_up_proj_bias.data.numpy(),
        experts.down_proj_bias.data.numpy(),
    ]
    inputs = [Buffer.from_numpy(np.ascontiguousarray(values)) for values in given]
    (found,) = one_module.models["clamped"].execute(*inputs)
    wanted = []
    with torch.no_grad():
        for i, expert in enumerate(EXPERT_IDS):
            rows = x[offsets[i] : offsets[i + 1]]
            both = rows @ alternating[expert] + experts.gate_up_proj_bias[expert]
            assert not len(rows) or (both.abs() > experts.limit).any()
            activated = experts._apply_gate(both)
            down = activated @ experts.down_proj[expert]
            wanted.append(down + experts.down_proj_bias[expert])
    np.testing.assert_allclose(
        found.to_numpy(), torch.cat(wanted).numpy(), rtol=1e-4, atol=1e-3
    )
