# SPDX-License-Identifier: Apache-2.0
"""From PyTorch, one process a rank: DeepEP's interface over the same kernels."""

from .api import Buffer
from .quantized import dequantize
from .streams import Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "dequantize"]
