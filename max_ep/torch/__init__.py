# SPDX-License-Identifier: Apache-2.0
"""From PyTorch, one process a rank: DeepEP's interface over the same kernels."""

from .. import install

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"max_ep.torch needs PyTorch, which cannot be imported: {error}; "
        f"{install.TORCH}"
    ) from None

from .api import Buffer
from .quantized import dequantize
from .streams import Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "dequantize"]
