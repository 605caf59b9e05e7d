# SPDX-License-Identifier: Apache-2.0
"""Graph builders of single ops: ``call_ep_*``, as in MAX's ``ep_kernels``.

They keep no state. ``EPBatchManager`` builds on them and checks the order of
the calls; use these only where it does not fit.
"""

from .combine import call_ep_combine, call_ep_combine_async, call_ep_combine_wait
from .dispatch import call_ep_dispatch, call_ep_dispatch_async, call_ep_dispatch_wait
from .distributed import call_distributed_ep_combine, call_distributed_ep_dispatch
from .init import call_ep_init
from .watch import call_ep_watch

__all__ = [
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
]
