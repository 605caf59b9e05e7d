# SPDX-License-Identifier: Apache-2.0
"""What MAX registers: an entry for each architecture that max_ep serves.

Most are served by our decoder, from the description that ``max_ep.checkpoint`` makes;
of them MAX only has to know how to read prompts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from max.pipelines.architectures.qwen3.arch import qwen3_moe_arch

from ..checkpoint import ARCHITECTURES
from . import deepseek_v3
from .model import OurBatches, OurConfig, OurModel
from .settings import ExpertParallelPlanner
from .tokens import VocabularyReasoningTokenizer, VocabularyTokenizer


def _ours(name: str) -> Any:
    """Returns the entry of an architecture that our decoder serves."""
    parser = ARCHITECTURES[name].parser
    return replace(
        qwen3_moe_arch,
        name=name,
        config=OurConfig,
        pipeline_model=OurModel,
        tokenizer=VocabularyReasoningTokenizer if parser else VocabularyTokenizer,
        tool_parser=parser,
        reasoning_parser=parser,
        batching=OurBatches,
        memory_planner=ExpertParallelPlanner,
        supported_encodings={"bfloat16", "float32"},
    )


OF_MAX = {"DeepseekV3ForCausalLM": deepseek_v3.architecture}
"""Entries with MAX's layers, and our dispatch and combine."""

SERVED = [OF_MAX.get(name) or _ours(name) for name in ARCHITECTURES]
