# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2 on one device: MAX's attention and router, max_ep's dispatch and combine.

On the CPU in float32, on a GPU in bfloat16. MAX's own model wants quantized weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.moe import SigmoidTopKRouter
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

from ..checkpoint import Rope
from .model import CheckedConfig, ExpertParallelModel
from .one_device import OneDeviceDecoder
from .settings import ExpertParallelPlanner
from .source import config_of
from .tokens import VocabularyReasoningTokenizer
from .weights import reading


class MiniMaxM2Gate(SigmoidTopKRouter):
    """MAX's router, and plain ops on the CPU, where MAX's kernel does not run."""

    def __call__(self, hidden_states: TensorValue) -> tuple[TensorValue, TensorValue]:
        """Returns ids and weights, ``[n_tokens, num_experts_per_token]``."""
        if not hidden_states.device.is_cpu():
            return super().__call__(hidden_states)
        scores = ops.sigmoid(self._gate_logits(hidden_states).cast(DType.float32))
        biased = scores + self.e_score_correction_bias
        _, ids = ops.top_k(biased, k=self.num_experts_per_token, axis=-1)
        chosen = ops.gather_nd(scores, ops.unsqueeze(ids, -1), batch_dims=1)
        return ids, chosen / ops.sum(chosen, axis=-1)


class MiniMaxM2Config(CheckedConfig, stock.MiniMaxM2Config):
    pass


class MiniMaxM2Model(ExpertParallelModel, stock.MiniMaxM2Model):
    model_config_cls = MiniMaxM2Config

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Returns our decoder."""
        # Also where `rope_parameters` alone have it, which MAX does not read.
        rotated = Rope.of(config_of(self.pipeline_config)).dim
        decoder = OneDeviceDecoder(
            model_config,
            rope=partial(
                MiniMaxM2RotaryEmbedding,
                interleaved=False,
                scaling_params=ProportionalScalingParams(
                    partial_rotary_factor=rotated / model_config.kv_params.head_dim
                ),
            ),
            attention=partial(
                MiniMaxM2Attention,
                dtype=model_config.attn_dtype or model_config.dtype,
                qk_norm_eps=model_config.rms_norm_eps,
            ),
            gate_cls=MiniMaxM2Gate,
            moe_dim=model_config.intermediate_size,
        )
        return decoder.graph_specs(self, "minimax_m2")


architecture = replace(
    minimax_m2_arch,
    config=MiniMaxM2Config,
    pipeline_model=MiniMaxM2Model,
    tokenizer=VocabularyReasoningTokenizer,
    memory_planner=ExpertParallelPlanner,
    default_encoding="bfloat16",
    weight_adapters=reading(minimax_m2_arch.weight_adapters),
    supported_encodings={"bfloat16", "float32"},
)
