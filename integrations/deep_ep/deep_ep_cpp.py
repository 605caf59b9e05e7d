# SPDX-License-Identifier: Apache-2.0
"""Where XTuner looks for the classes that DeepEP has in C++."""

from max_ep.torch import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
