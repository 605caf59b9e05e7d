# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch and combine: formats, launchers, MAX ops.

`layout` describes a group and the memory of a rank. `device/` has what GPU phases
share; the four phases have a folder each. `launch` runs one on a GPU or on the CPU,
for `ops` (MAX graphs) and `api` (Mojo programs).
"""
from .launch.api import (
    ep_combine_async_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_wait_kernel_api,
)
from .protocol.counters import EPLocalSyncCounters
from .formats.block_scaled import BlockScaledTokenFormat
from .formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from .launch.ops import *
from .router.routing_ops import *
from .formats.plain import BF16TokenFormat, Float32TokenFormat, PlainTokenFormat
from .protocol.token_format import TokenFormat
