# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 on several GPUs, in bfloat16: MAX's model with max_ep's dispatch.

Its shared expert goes through dispatch (``EPConfig.fused_shared_expert``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.deepseekV3 import deepseekV3 as decoder
from max.pipelines.architectures.deepseekV3 import model as stock
from max.pipelines.architectures.deepseekV3.arch import deepseekV3_arch
from max.pipelines.architectures.deepseekV3.memory_planner import (
    DeepseekV3MemoryPlanner,
)

from .fp8 import widening
from .model import ExpertParallelModel
from .planner import ExpertParallelPlanner


class DeepseekV3Planner(ExpertParallelPlanner, DeepseekV3MemoryPlanner):
    """MAX plans latent attention, max_ep plans dispatch and combine."""

    name, on_one_device, takes_placement = "DeepSeek-V3", False, False

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


class DeepseekV3Model(ExpertParallelModel, stock.DeepseekV3Model):
    """DeepSeek-V3, its experts spread by max_ep."""

    max_modules = (decoder,)


architecture = replace(
    deepseekV3_arch,
    pipeline_model=DeepseekV3Model,
    memory_planner=DeepseekV3Planner,
    weight_adapters=widening(deepseekV3_arch.weight_adapters),
    supported_encodings={"bfloat16"},
)
