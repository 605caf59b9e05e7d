# SPDX-License-Identifier: Apache-2.0
from max.nn.comm.ep import (
    calculate_ep_max_tokens_per_rank as calculate_ep_max_tokens_per_rank,
)

from .all_gather import AllGatherTokenDispatcher as AllGatherTokenDispatcher
from .config import EPConfig as EPConfig
from .config import estimate_ep_memory_usage as estimate_ep_memory_usage
from .extension import extension_path as extension_path
from .formats import blockwise_fp8_quant_config as blockwise_fp8_quant_config
from .formats import mxfp4_quant_config as mxfp4_quant_config
from .formats import mxfp8_quant_config as mxfp8_quant_config
from .formats import nvfp4_quant_config as nvfp4_quant_config
from .graph.buffers import EPCommBuffers as EPCommBuffers
from .graph.builders import call_distributed_ep_combine as call_distributed_ep_combine
from .graph.builders import call_distributed_ep_dispatch as call_distributed_ep_dispatch
from .graph.builders import call_ep_combine as call_ep_combine
from .graph.builders import call_ep_combine_async as call_ep_combine_async
from .graph.builders import call_ep_combine_wait as call_ep_combine_wait
from .graph.builders import call_ep_dispatch as call_ep_dispatch
from .graph.builders import call_ep_dispatch_async as call_ep_dispatch_async
from .graph.builders import call_ep_dispatch_wait as call_ep_dispatch_wait
from .graph.builders import call_ep_init as call_ep_init
from .graph.manager import EPBatchManager as EPBatchManager
from .graph.quantized import dequantize as dequantize
from .graph.routing import Replicas as Replicas
from .graph.routing import balance_ids as balance_ids
from .graph.routing import softmax_top_k as softmax_top_k
from .launch import LaunchError as LaunchError
from .launch import launch as launch
from .memory.initializer import EPCommInitializer as EPCommInitializer
from .processes.membership import RankExpelled as RankExpelled

__version__: str
