# SPDX-License-Identifier: Apache-2.0
"""From PyTorch, one process a rank: DeepEP's interface over the same kernels."""

from .. import install

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(
        f"max_ep.torch needs PyTorch, which cannot be imported: {error}; "
        f"{install.TORCH}"
    ) from None

from .api import Buffer
from .elastic_api import ElasticBuffer
from .elastic_handle import EPHandle
from .elastic_layout import get_logical_domain_size, get_physical_domain_size
from .quantized import dequantize, quantize
from .streams import Config, EventHandle, EventOverlap

topk_idx_t = _torch.int64
"""What ``topk_idx`` must be."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "dequantize",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "quantize",
    "topk_idx_t",
]
