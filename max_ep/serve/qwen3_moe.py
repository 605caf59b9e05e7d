# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: MAX's architecture with dispatch and combine of max_ep."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from max.nn.moe import MoE
from max.nn.rotary_embedding import Llama3RotaryEmbedding
from max.pipelines.architectures.qwen3 import model as stock
from max.pipelines.architectures.qwen3 import qwen3 as decoder
from max.pipelines.architectures.qwen3.arch import qwen3_moe_arch
from max.pipelines.architectures.qwen3.batch_processor import Qwen3BatchProcessor
from max.pipelines.architectures.qwen3.layers.moe import Qwen3MoEGate
from max.pipelines.lib.graph_specs import GraphSpec

from .attention import OnePassAttention
from .fp8 import widening
from .model import ExpertParallelModel
from .one_device import OneDeviceDecoder
from .planner import ExpertParallelPlanner
from .settings import place_experts


class Qwen3MoeBatches(Qwen3BatchProcessor):
    """MAX's, with the group's graph inputs on one device, too."""

    def _make_inputs(self, **inputs: Any) -> stock.Qwen3Inputs:
        return stock.Qwen3Inputs(**inputs, ep_inputs=self._ep_inputs())


class Qwen3MoeModel(ExpertParallelModel, stock.Qwen3Model):
    """Qwen3-MoE, its experts spread by max_ep."""

    batch_processor_cls = Qwen3MoeBatches
    max_modules = (stock, decoder)

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Returns the decoder: MAX's on several GPUs, ours on one device."""
        if len(self.devices) > 1:
            group = model_config.ep_config
            if group is not None:
                self.state_dict = place_experts(self.state_dict, group)
            specs = super().graph_specs(model_config)
            for spec in specs.values():
                blocks = [x for x in spec.module.layers if isinstance(x.mlp, MoE)]
                for number, block in enumerate(blocks):  # as a placement has them
                    for shard in block.mlp_shards:
                        shard.layer_idx = number
            return specs
        config = model_config
        ours = OneDeviceDecoder(
            config,
            rope=partial(
                Llama3RotaryEmbedding,
                interleaved=config.interleaved_rope_weights,
                scaling_params=config.rope_scaling_params,
            ),
            attention=partial(
                OnePassAttention, dtype=config.dtype, has_bias=config.attention_bias
            ),
            gate_cls=Qwen3MoEGate,
            moe_dim=config.moe_intermediate_size,
            dense_layers=[
                i
                for i in range(config.num_hidden_layers)
                if (i + 1) % config.decoder_sparse_step or i in config.mlp_only_layers
            ],
        )
        return ours.graph_specs(self, "qwen3_moe")


architecture = replace(
    qwen3_moe_arch,
    pipeline_model=Qwen3MoeModel,
    batching=Qwen3MoeBatches,
    memory_planner=ExpertParallelPlanner,
    weight_adapters=widening(qwen3_moe_arch.weight_adapters),
    supported_encodings={"bfloat16", "float32"},
)
