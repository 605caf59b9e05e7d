# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 on GPUs, in bfloat16: MAX's model with max_ep's dispatch.

Its shared expert goes through dispatch (``EPConfig.fused_shared_expert``). Where
MAX's latent attention does not take the number of heads, heads of zeros are loaded
behind those of the checkpoint: their values are zeros, and so are their columns of the
output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from max.driver import Buffer, is_virtual_device_mode
from max.dtype import DType
from max.graph import Shape, TensorValue
from max.graph.weights import WeightData
from max.pipelines.architectures.deepseekV3 import deepseekV3 as decoder
from max.pipelines.architectures.deepseekV3 import model as stock
from max.pipelines.architectures.deepseekV3.arch import deepseekV3_arch
from max.pipelines.architectures.deepseekV3.memory_planner import (
    DeepseekV3MemoryPlanner,
)

from ..checkpoint.decoder import LatentAttention
from .model import CheckedConfig, ExpertParallelModel
from .replaced import DEEPSEEK_CONFIG, DEEPSEEK_LAYER
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

    def estimate_signal_buffer_memory(
        self, pipeline_config: Any, arch_config: Any | None = None
    ) -> int:
        """Returns the bytes of MAX's signal buffers, which one device has, too."""
        planner = DeepseekV3MemoryPlanner
        return planner.estimate_signal_buffer_memory(self, pipeline_config, arch_config)


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
    also_replaced = {
        DEEPSEEK_LAYER: NumberedLayer,
        DEEPSEEK_CONFIG: DeepseekV3Config,
    }

    @property
    def signal_buffers(self) -> list[Buffer]:
        """MAX's buffers of collectives; its embedding has one on one device, too."""
        return stock.DeepseekV3Model.signal_buffers.__get__(self)

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        """Gives one device a group, too: MAX has none there."""
        config = super()._create_model_config(state_dict)
        config.ep_config = config.ep_config or self._group()
        return config


def with_filled_heads(
    weights: Mapping[str, WeightData], of: LatentAttention
) -> dict[str, WeightData]:
    """Fills up matrices that have a part for each head, in bfloat16; others, and all
    where MAX takes the number of heads, stay as they are."""
    filled = dict(weights)
    for name, weight in weights.items():
        before = tuple(int(n) for n in weight.shape)
        after = of.filled(name, before)
        if after == before:
            continue
        if is_virtual_device_mode():  # Nobody reads the values
            buffer = Buffer(weight.dtype, after)
        else:
            bits = weight.to_buffer().view(DType.uint16).to_numpy()
            more = [(0, n - m) for m, n in zip(before, after)]
            buffer = Buffer.from_numpy(np.pad(bits, more)).view(weight.dtype)
        filled[name] = WeightData(buffer, name, weight.dtype, Shape(after))
    return filled


def _filled(
    adapter: Callable[..., dict[str, WeightData]],
    *weights: Any,
    pipeline_config: Any,
    **more: Any,
) -> dict[str, WeightData]:
    """Calls a weight adapter, which widens, then fills up heads."""
    adapted = adapter(*weights, pipeline_config=pipeline_config, **more)
    of = decoder_of(pipeline_config).layers[0].attention
    return with_filled_heads(adapted, of)


architecture = replace(
    deepseekV3_arch,
    config=DeepseekV3Config,
    pipeline_model=DeepseekV3Model,
    tokenizer=VocabularyTokenizer,
    memory_planner=DeepseekV3Planner,
    weight_adapters={
        file_kind: partial(_filled, adapter)
        for file_kind, adapter in reading(deepseekV3_arch.weight_adapters).items()
    },
    supported_encodings={"bfloat16"},
)
