# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch and combine for MAX graphs.

It has the names of ``max.nn.comm.ep``, and some more.
"""

import importlib
from typing import Any

# A submodule of the same name: imported here, so that the function wins.
from .launch import LaunchError, launch

_HOMES = {
    "max.nn.comm.ep": ["calculate_ep_max_tokens_per_rank"],
    ".config": ["EPConfig", "estimate_ep_memory_usage"],
    ".extension": ["extension_path"],
    ".formats": ["blockwise_fp8_quant_config"],
    ".graph.all_gather": ["AllGatherConfig", "AllGatherTokenDispatcher"],
    ".graph.buffers": ["EPCommBuffers"],
    ".graph.builders": [
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
    ],
    ".graph.fp8": ["dequantize_blockwise_fp8"],
    ".graph.manager": ["EPBatchManager"],
    ".graph.routing": ["softmax_top_k"],
    ".memory.initializer": ["EPCommInitializer"],
}
"""Where names come from. They are imported when they are asked for: ``max_ep.torch``
and the command line load no MAX."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["LaunchError", "launch", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name], __name__), name)
    globals()[name] = value
    return value


__version__ = "0.1.0"
