# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: MAX's architecture with dispatch and combine of max_ep."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from max.graph import TensorType, TensorValue, ops
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import flash_attention_ragged
from max.nn.kv_cache import PagedCacheValues
from max.nn.moe import MoE
from max.pipelines.architectures.qwen3 import model as stock
from max.pipelines.architectures.qwen3 import qwen3 as decoder
from max.pipelines.architectures.qwen3.arch import qwen3_moe_arch
from max.pipelines.architectures.qwen3.batch_processor import Qwen3BatchProcessor
from max.pipelines.architectures.qwen3.layers.attention import Qwen3Attention
from max.pipelines.architectures.qwen3.layers.moe import Qwen3MoEGate
from max.pipelines.lib.graph_specs import GraphSpec

from ..checkpoint import Rope
from ..experts import PACKAGE
from ..extension import add_op
from ..moe_shape import dense_layers
from .model import CheckedConfig, ExpertParallelModel
from .one_device import OneDeviceDecoder
from .rope import CheckpointRope
from .settings import ExpertParallelPlanner, place_experts
from .source import config_of
from .tokens import VocabularyTokenizer
from .weights import reading


class OnePassAttention(Qwen3Attention):
    """MAX's; on GPUs heads are normalized, rotated and cached in one op for four."""

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Returns ``[n_tokens, hidden_size]`` of ``x`` of these sizes."""
        kv = self.kv_params
        takes = kv.dtype == x.dtype and kv.head_dim in (32, 64, 128, 256)
        if self.rope.interleaved or not takes or x.device.is_cpu():
            return super().__call__(
                layer_idx, x, kv_collection, freqs_cis, input_row_offsets
            )
        qkv = self.qkv_proj(x)

        def here(value: Any) -> TensorValue:
            return ops.cast(value, qkv.dtype).to(qkv.device)

        values = [
            kv_collection.kv_blocks,
            qkv,
            input_row_offsets,
            here(freqs_cis),
            kv_collection.cache_lengths,
            kv_collection.lookup_table,
            here(self.q_norm.weight),
            here(self.k_norm.weight),
            kv_collection.page_stride,
            layer_idx.reshape([1]),
        ]
        heads = [qkv.shape[0], self.n_heads, kv.head_dim]
        (q,) = add_op(
            "norm_rope_store",
            qkv.device,
            values,
            [TensorType(qkv.dtype, heads, qkv.device)],
            PACKAGE,
            size=kv.head_dim,
            epsilon_of_one=round(1 / self.qk_norm_eps),
        )
        attended = flash_attention_ragged(
            kv,
            input=q,
            kv_collection=kv_collection,
            layer_idx=layer_idx,
            input_row_offsets=input_row_offsets,
            mask_variant=MHAMaskVariant.CAUSAL_MASK,
            scale=self.scale,
        )
        return self.o_proj(ops.reshape(attended, [x.shape[0], -1]))


class Qwen3MoeBatches(Qwen3BatchProcessor):
    """MAX's, with the group's graph inputs on one device, too."""

    def _make_inputs(self, **inputs: Any) -> stock.Qwen3Inputs:
        return stock.Qwen3Inputs(**inputs, ep_inputs=self._ep_inputs())


def _gate(renormalizes: bool, **sizes: Any) -> Qwen3MoEGate:
    """Makes MAX's gate; ``route`` reads whether weights add up to one."""
    gate = Qwen3MoEGate(**sizes)
    gate.renormalizes = renormalizes
    return gate


class Qwen3MoeConfig(CheckedConfig, stock.Qwen3Config):
    pass


class Qwen3MoeModel(ExpertParallelModel, stock.Qwen3Model):
    batch_processor_cls = Qwen3MoeBatches
    model_config_cls = Qwen3MoeConfig
    max_modules = (stock, decoder)

    @property
    def max_names(self) -> dict[str, Any]:
        """MAX's decoder normalizes heads with an epsilon of its own, and knows fewer
        rotary embeddings."""
        eps = self.huggingface_config.rms_norm_eps
        return {
            "Qwen3Attention": partial(Qwen3Attention, qk_norm_eps=eps),
            "Llama3RotaryEmbedding": CheckpointRope,
        }

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Returns the decoder: MAX's on several GPUs, ours on one device."""
        config = model_config
        config.rope_scaling_params = Rope.of(config_of(self.pipeline_config))
        if len(self.devices) > 1:
            self.state_dict = place_experts(self.state_dict, config.ep_config)
            specs = super().graph_specs(config)
            for spec in specs.values():
                blocks = [x for x in spec.module.layers if isinstance(x.mlp, MoE)]
                for number, block in enumerate(blocks):  # as a placement has them
                    for shard in block.mlp_shards:
                        shard.layer_idx = number
                        shard.gate.renormalizes = config.norm_topk_prob
            return specs
        ours = OneDeviceDecoder(
            config,
            rope=partial(
                CheckpointRope,
                interleaved=config.interleaved_rope_weights,
                scaling_params=config.rope_scaling_params,
            ),
            attention=partial(
                OnePassAttention, dtype=config.dtype, qk_norm_eps=config.rms_norm_eps
            ),
            gate_cls=partial(_gate, config.norm_topk_prob),
            moe_dim=config.moe_intermediate_size,
            dense_layers=dense_layers(config),
        )
        return ours.graph_specs(self, "qwen3_moe")


architecture = replace(
    qwen3_moe_arch,
    config=Qwen3MoeConfig,
    pipeline_model=Qwen3MoeModel,
    tokenizer=VocabularyTokenizer,
    batching=Qwen3MoeBatches,
    memory_planner=ExpertParallelPlanner,
    weight_adapters=reading(qwen3_moe_arch.weight_adapters),
    supported_encodings={"bfloat16", "float32"},
)
