# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2 on one device: MAX's attention and router, max_ep's dispatch and combine.

On CPU in float32, on a GPU in bfloat16. MAX's own model wants quantized weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.moe import SigmoidTopKRouter
from max.nn.norm import RMSNorm
from max.pipelines.architectures.gemma4.layers.rotary_embedding import (
    ProportionalScalingParams,
)
from max.pipelines.architectures.minimax_m2 import model as stock
from max.pipelines.architectures.minimax_m2.arch import minimax_m2_arch
from max.pipelines.architectures.minimax_m2.layers.attention import MiniMaxM2Attention
from max.pipelines.architectures.minimax_m2.layers.rotary_embedding import (
    MiniMaxM2RotaryEmbedding,
)
from max.pipelines.lib.graph_specs import GraphSpec

from ..manager import EPBatchManager
from .model import ExpertParallelModel
from .one_device import OneDeviceDecoder, OneDeviceMoe, spec_of
from .planner import ExpertParallelPlanner
from .settings import n_devices


class MiniMaxM2Planner(ExpertParallelPlanner):
    """Our plan, which refuses several devices."""

    def estimate_activation_memory(
        self, pipeline_config: Any, huggingface_config: Any
    ) -> int:
        """Returns the bytes of dispatch, combine and expert rows."""
        if n_devices(pipeline_config) > 1:
            raise ValueError(
                "max_ep serves MiniMax-M2 on one device; on several GPUs leave "
                "--custom-architectures max_ep.serve out"
            )
        return super().estimate_activation_memory(pipeline_config, huggingface_config)


class MiniMaxM2Gate(SigmoidTopKRouter):
    """MAX's router; on CPU, which its kernel is not for, in plain ops."""

    def __call__(self, hidden_states: TensorValue) -> tuple[TensorValue, TensorValue]:
        """Routes tokens.

        Args:
            hidden_states: ``[n_tokens, hidden_dim]``.

        Returns:
            Expert ids and weights, each ``[n_tokens, num_experts_per_token]``.
        """
        if not hidden_states.device.is_cpu():
            return super().__call__(hidden_states)
        scores = ops.sigmoid(self._gate_logits(hidden_states).cast(DType.float32))
        biased = scores + self.e_score_correction_bias
        _, ids = ops.top_k(biased, k=self.num_experts_per_token, axis=-1)
        chosen = ops.gather_nd(scores, ops.unsqueeze(ids, -1), batch_dims=1)
        return ids, chosen / ops.sum(chosen, axis=-1)


class MiniMaxM2Model(ExpertParallelModel, stock.MiniMaxM2Model):
    """MiniMax-M2, its experts spread by max_ep."""

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        config = super()._create_model_config(state_dict)
        config.ep_config = self._create_ep_config()
        return config

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Casts the routers' biases to float32, in which scores are added to them, as
        transformers does, and returns our decoder."""
        for name, weight in self.state_dict.items():
            if name.endswith("e_score_correction_bias"):
                self.state_dict[name] = weight.astype(DType.float32)
        return spec_of(self, _decoder(model_config), "minimax_m2")


def _decoder(config: Any) -> OneDeviceDecoder:
    """Puts MiniMax-M2's attention and router into our decoder."""
    manager = EPBatchManager(config.ep_config)
    rope = MiniMaxM2RotaryEmbedding(
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        theta=config.rope_theta,
        max_seq_len=config.max_seq_len,
        head_dim=config.kv_params.head_dim,
        interleaved=False,
        scaling_params=ProportionalScalingParams(
            partial_rotary_factor=config.partial_rotary_factor
        ),
    )

    def attention_of(layer_idx: int) -> MiniMaxM2Attention:
        return MiniMaxM2Attention(
            rope=rope,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            hidden_size=config.hidden_size,
            kv_params=config.kv_params,
            layer_idx=layer_idx,
            dtype=config.attn_dtype or config.dtype,
            devices=config.devices,
            scale=config.attention_multiplier,
            norm_dtype=config.norm_dtype or config.dtype,
        )

    def mlp_of(layer_idx: int) -> OneDeviceMoe:
        return OneDeviceMoe(
            manager,
            gate_dtype=config.gate_dtype or config.dtype,
            devices=config.devices,
            hidden_dim=config.hidden_size,
            num_experts=config.num_local_experts,
            num_experts_per_token=config.num_experts_per_tok,
            moe_dim=config.intermediate_size,
            gate_cls=MiniMaxM2Gate,
            dtype=config.dtype,
        )

    def norm() -> RMSNorm:
        return RMSNorm(
            config.hidden_size,
            dtype=config.norm_dtype or config.dtype,
            eps=config.rms_norm_eps,
            multiply_before_cast=False,
        )

    return OneDeviceDecoder(config, manager, rope, attention_of, mlp_of, norm)


architecture = replace(
    minimax_m2_arch,
    pipeline_model=MiniMaxM2Model,
    memory_planner=MiniMaxM2Planner,
    default_encoding="bfloat16",
    supported_encodings={"bfloat16", "float32"},
)
