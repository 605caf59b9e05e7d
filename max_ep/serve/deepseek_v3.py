# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 on several GPUs: MAX's architecture with dispatch and combine of max_ep.

In bfloat16. Its shared expert rides along (``EPConfig.fused_shared_expert``).
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

from .model import ExpertParallelModel
from .planner import ExpertParallelPlanner
from .settings import n_devices


class DeepseekV3Planner(ExpertParallelPlanner, DeepseekV3MemoryPlanner):
    """MAX's plan of latent attention, and ours of dispatch and combine."""

    def estimate_activation_memory(
        self, pipeline_config: Any, huggingface_config: Any
    ) -> int:
        """Returns the bytes of all devices, attention's and the experts'."""
        if n_devices(pipeline_config) == 1:
            raise ValueError(
                "max_ep serves DeepSeek-V3 on several GPUs; on one, leave "
                "--custom-architectures max_ep.serve out"
            )
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

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        config = super()._create_model_config(state_dict)
        config.ep_config = self._create_ep_config()
        return config


architecture = replace(
    deepseekV3_arch,
    pipeline_model=DeepseekV3Model,
    memory_planner=DeepseekV3Planner,
    supported_encodings={"bfloat16"},
)
