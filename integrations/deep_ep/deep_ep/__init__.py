# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interfaces over the kernels of max_ep: see ``max_ep.torch``."""

from max_ep.torch import (
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    get_logical_domain_size,
    get_physical_domain_size,
    topk_idx_t,
)

from . import buffers, utils

__version__ = "2.1.0"
"""The version of DeepEP whose interface this is."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "buffers",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
