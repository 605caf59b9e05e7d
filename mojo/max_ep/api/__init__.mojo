# SPDX-License-Identifier: Apache-2.0
"""The launchers: what a Mojo program calls to dispatch and combine.

Each checks what it was given before anything is sent, takes rank and time-out
from the counters, and starts the kernel of its `target`. Parameters and
arguments follow MAX's `ep_dispatch_async_kernel_api` and its siblings (the
public documentation of `shmem.ep`); `recv_ptrs` and `recv_count_ptrs` hold
one address for each rank of the group.

Those of each phase are in `dispatch.mojo` and `combine.mojo`; `checks.mojo` has what
they check.
"""
from ..gpu_launch import InputScales
from .combine import (
    ep_combine_async_kernel_api,
    ep_combine_kernel_api,
    ep_combine_wait_kernel_api,
)
from .dispatch import (
    ep_dispatch_async_kernel_api,
    ep_dispatch_kernel_api,
    ep_dispatch_wait_kernel_api,
)
