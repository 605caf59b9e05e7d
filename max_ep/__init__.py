# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch and combine for MAX graphs.

The names up to ``estimate_ep_memory_usage`` are those of ``max.nn.comm.ep``.
"""

from max.nn.comm.ep import calculate_ep_max_tokens_per_rank

from .config import EPConfig, estimate_ep_memory_usage
from .extension import extension_path
from .formats import blockwise_fp8_quant_config
from .graph.all_gather import AllGatherConfig, AllGatherTokenDispatcher
from .graph.buffers import EPCommBuffers
from .graph.builders import (
    call_distributed_ep_combine,
    call_distributed_ep_dispatch,
    call_ep_combine,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_dispatch,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
    call_ep_init,
    call_ep_watch,
)
from .graph.fp8 import dequantize_blockwise_fp8
from .graph.manager import EPBatchManager
from .graph.routing import softmax_top_k
from .launch import LaunchError, launch
from .memory.initializer import EPCommInitializer

__all__ = [
    "AllGatherConfig",
    "AllGatherTokenDispatcher",
    "EPBatchManager",
    "EPCommBuffers",
    "EPCommInitializer",
    "EPConfig",
    "LaunchError",
    "blockwise_fp8_quant_config",
    "calculate_ep_max_tokens_per_rank",
    "call_distributed_ep_combine",
    "call_distributed_ep_dispatch",
    "call_ep_combine",
    "call_ep_combine_async",
    "call_ep_combine_wait",
    "call_ep_dispatch",
    "call_ep_dispatch_async",
    "call_ep_dispatch_wait",
    "call_ep_init",
    "call_ep_watch",
    "dequantize_blockwise_fp8",
    "estimate_ep_memory_usage",
    "extension_path",
    "launch",
    "softmax_top_k",
]
__version__ = "0.1.0"
