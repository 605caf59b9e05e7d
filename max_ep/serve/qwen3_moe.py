# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: MAX's architecture with dispatch and combine of max_ep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.nn.linear import MLP
from max.nn.norm import RMSNorm
from max.nn.rotary_embedding import Llama3RotaryEmbedding
from max.pipelines.architectures.qwen3 import model as stock
from max.pipelines.architectures.qwen3 import qwen3 as decoder
from max.pipelines.architectures.qwen3.arch import qwen3_moe_arch
from max.pipelines.architectures.qwen3.batch_processor import Qwen3BatchProcessor
from max.pipelines.architectures.qwen3.layers.attention import Qwen3Attention
from max.pipelines.architectures.qwen3.layers.moe import Qwen3MoEGate
from max.pipelines.lib.graph_specs import GraphSpec

from ..manager import EPBatchManager
from .model import ExpertParallelBatches, ExpertParallelModel
from .one_device import OneDeviceDecoder, OneDeviceMoe, spec_of
from .planner import ExpertParallelPlanner


class Qwen3MoeBatches(ExpertParallelBatches, Qwen3BatchProcessor):
    """Batches of Qwen3, with the group's graph inputs."""

    inputs_type = stock.Qwen3Inputs


class Qwen3MoeModel(ExpertParallelModel, stock.Qwen3Model):
    """Qwen3-MoE, its experts spread by max_ep."""

    batch_processor_cls = Qwen3MoeBatches
    max_modules = (stock, decoder)

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Returns the decoder: MAX's on several GPUs, ours on one device."""
        if len(self.devices) > 1:
            return super().graph_specs(model_config)
        return spec_of(self, _one_device_decoder(model_config), "qwen3_moe")


def _one_device_decoder(config: Any) -> OneDeviceDecoder:
    """Puts Qwen3's attention and router into our decoder."""
    manager = EPBatchManager(config.ep_config)
    rope = Llama3RotaryEmbedding(
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        theta=config.rope_theta,
        max_seq_len=config.max_seq_len,
        head_dim=config.kv_params.head_dim,
        interleaved=config.interleaved_rope_weights,
        scaling_params=config.rope_scaling_params,
    )
    norm_dtype = config.norm_dtype or config.dtype

    def attention_of(layer_idx: int) -> Qwen3Attention:
        return Qwen3Attention(
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            hidden_size=config.hidden_size,
            kv_params=config.kv_params,
            layer_idx=layer_idx,
            dtype=config.dtype,
            rope=rope,
            devices=config.devices,
            scale=config.attention_multiplier,
            has_bias=config.attention_bias,
            norm_dtype=norm_dtype,
        )

    def mlp_of(layer_idx: int) -> OneDeviceMoe | MLP:
        is_dense = (layer_idx + 1) % config.decoder_sparse_step != 0
        if is_dense or layer_idx in config.mlp_only_layers:
            return MLP(
                config.dtype,
                None,
                config.hidden_size,
                config.intermediate_size,
                config.devices,
            )
        return OneDeviceMoe(
            manager,
            gate_dtype=config.dtype,
            devices=config.devices,
            hidden_dim=config.hidden_size,
            num_experts=config.num_experts,
            num_experts_per_token=config.num_experts_per_tok,
            moe_dim=config.moe_intermediate_size,
            gate_cls=Qwen3MoEGate,
            dtype=config.dtype,
        )

    def norm() -> RMSNorm:
        return RMSNorm(
            config.hidden_size,
            dtype=norm_dtype,
            eps=config.rms_norm_eps,
            multiply_before_cast=False,
        )

    return OneDeviceDecoder(config, manager, rope, attention_of, mlp_of, norm)


architecture = replace(
    qwen3_moe_arch,
    pipeline_model=Qwen3MoeModel,
    batching=Qwen3MoeBatches,
    memory_planner=ExpertParallelPlanner,
    supported_encodings={"bfloat16", "float32"},
)
