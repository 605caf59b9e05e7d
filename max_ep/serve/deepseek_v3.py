# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 on several GPUs, in bfloat16: MAX's model with max_ep's dispatch.

Its shared expert goes through dispatch (``EPConfig.fused_shared_expert``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.dtype import DType
from max.graph import TensorValue
from max.pipelines.architectures.deepseekV3 import deepseekV3 as decoder
from max.pipelines.architectures.deepseekV3 import model as stock
from max.pipelines.architectures.deepseekV3.arch import deepseekV3_arch
from max.pipelines.architectures.deepseekV3.memory_planner import (
    DeepseekV3MemoryPlanner,
)

from .model import CheckedConfig, ExpertParallelModel
from .replaced import DEEPSEEK_LAYER
from .settings import ExpertParallelPlanner
from .source import decoder_of
from .tokens import VocabularyTokenizer
from .weights import reading


class DeepseekV3Config(CheckedConfig, stock.DeepseekV3Config):
    @classmethod
    def initialize(cls, pipeline_config: Any, *args: Any, **more: Any) -> Any:
        """Gives MAX the rotary embeddings that were checked, wherever they stand."""
        made = super().initialize(pipeline_config, *args, **more)
        rope = decoder_of(pipeline_config).layers[0].attention.rope
        scaling = {"rope_type": rope.kind, **rope.parameters}
        theta = rope.parameters["rope_theta"]
        return replace(made, rope_scaling=scaling, rope_theta=theta)


class DeepseekV3Planner(ExpertParallelPlanner, DeepseekV3MemoryPlanner):
    """MAX plans latent attention, max_ep plans dispatch and combine."""

    def estimate_activation_memory(
        self, pipeline_config: Any, huggingface_config: Any
    ) -> int:
        """Returns the bytes of all devices, attention's and the experts'."""
        ours = super().estimate_activation_memory(pipeline_config, huggingface_config)
        one_rank = pipeline_config.runtime.model_copy(update={"ep_size": 1})
        without_ep = pipeline_config.model_copy(update={"runtime": one_rank})
        attention = DeepseekV3MemoryPlanner.estimate_activation_memory(
            self, without_ep, huggingface_config
        )
        return ours + attention


class NumberedLayer(decoder.DeepseekV3DecoderLayer):
    """MAX's; its experts know which layer they are.

    Layers share a subgraph, so the number is an input of it.
    """

    def __call__(
        self, layer_idx: TensorValue, *args: Any, **more: Any
    ) -> list[TensorValue]:
        """Returns the hidden states of each device."""
        group = self.config.ep_config
        if group is not None and group.eplb_enabled:
            # Only the first layers are dense: the frequency of DeepSeek-V3's is 1.
            number = layer_idx.cast(DType.int32) - self.config.first_k_dense_replace
            for shard in self.mlp_shards:
                shard.layer_idx = number
        return super().__call__(layer_idx, *args, **more)


class DeepseekV3Model(ExpertParallelModel, stock.DeepseekV3Model):
    model_config_cls = DeepseekV3Config
    also_replaced = {DEEPSEEK_LAYER: NumberedLayer}


architecture = replace(
    deepseekV3_arch,
    config=DeepseekV3Config,
    pipeline_model=DeepseekV3Model,
    tokenizer=VocabularyTokenizer,
    memory_planner=DeepseekV3Planner,
    weight_adapters=reading(deepseekV3_arch.weight_adapters),
    supported_encodings={"bfloat16"},
)
