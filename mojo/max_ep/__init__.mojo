# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch and combine: formats, launchers, MAX ops.

Layers, each knowing only those before it:
layout, flags, counters, failures, row_tables, token_format (and formats/), transport,
launch_checks, device/, dispatch_by_expert/, dispatch_by_rank/, combine_rows/,
combine_sums/, kernels, cpu/, gpu_setup, setup, shmem_modules, gpu_launch, watch, api,
ops, all_gather_ops; and routing and routing_ops, which know `layout` alone.
"""
from .all_gather_ops import *
from .api import (
    ep_combine_async_kernel_api,
    ep_combine_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_kernel_api,
    ep_dispatch_wait_kernel_api,
)
from .counters import EPLocalSyncCounters
from .formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from .formats.with_metadata import WithMetadataTokenFormat
from .ops import *
from .routing_ops import *
from .token_format import (
    BF16TokenFormat,
    Float32TokenFormat,
    PlainTokenFormat,
    TokenFormat,
)
from .watch import ep_watch_kernel_api
from .watch_ops import *
