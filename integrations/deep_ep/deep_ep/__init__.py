# SPDX-License-Identifier: Apache-2.0
"""DeepEP's legacy interface over the kernels of max_ep: see ``max_ep.torch``."""

from max_ep.torch import Buffer, Config, EventHandle, EventOverlap  # isort: skip

import torch

from . import utils

topk_idx_t = torch.int64
"""What ``topk_idx`` must be."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
