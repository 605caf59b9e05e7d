# SPDX-License-Identifier: Apache-2.0
"""From PyTorch, one process a rank: DeepEP's interface over the same kernels."""

from .api import Buffer
from .events import Config, EventHandle, EventOverlap
from .quantized import dequantize

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "dequantize"]
