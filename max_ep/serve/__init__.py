# SPDX-License-Identifier: Apache-2.0
"""MoE models served by MAX with dispatch and combine of max_ep.

Run ``max serve --custom-architectures max_ep.serve ...``; see
docs/serving.md, and what to install there.
"""

from . import deepseek_v3, minimax_m2, qwen3_moe

ARCHITECTURES = [x.architecture for x in (qwen3_moe, minimax_m2, deepseek_v3)]
"""What MAX registers, in place of its own architectures of these names."""
