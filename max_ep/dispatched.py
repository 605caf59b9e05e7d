# SPDX-License-Identifier: Apache-2.0
"""The tuple that a dispatch of ``EPBatchManager`` returns for a rank: what stands
where in it.
"""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops

from .config import EPConfig


def outputs_and_src_info(
    config: EPConfig, results: tuple[TensorValue, ...]
) -> tuple[tuple[TensorValue, ...], TensorValue]:
    """Makes of an op's results what the manager returns.

    Args:
        config: The group.
        results: What :func:`call_ep_dispatch_wait` returned.

    Returns:
        The tuple, see :meth:`EPBatchManager.ep_dispatch_wait`; and ``src_info``.
    """
    if config.is_padded:
        return results, results[-2]
    *outputs, src_info = results
    n_groups = config.n_local_experts + int(config.fused_shared_expert)
    stats = np.array([config.expert_capacity, n_groups], np.uint32)
    usage = ops.constant(stats, DType.uint32, DeviceRef.CPU())
    return (*outputs, usage), src_info


def received_rows(config: EPConfig, dispatched: tuple[TensorValue, ...]) -> TensorValue:
    """Counts the rows of each expert, see :meth:`EPBatchManager.ep_received`."""
    is_one_rank = isinstance(dispatched, (tuple, list))
    if not is_one_rank or not isinstance(dispatched[0], TensorValue):
        raise TypeError(
            f"dispatched is a {type(dispatched).__name__}, it must be the tuple "
            "of a rank: what ep_dispatch_wait or ep_dispatch returned, or one of "
            "those of ep_dispatch_all"
        )
    counts = dispatched[2 if config.is_quantized else 1]
    if config.is_padded:
        return counts
    offsets = ops.cast(counts, DType.int32)
    rows = offsets[1:] - offsets[:-1]
    # The shared expert's group, if any, comes first; experts stand in order.
    return rows[1:] if config.fused_shared_expert else rows
