# SPDX-License-Identifier: Apache-2.0
"""The op that prepares a rank, before there are peers."""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Graph, TensorType, TensorValue, ops

from ..config import EPConfig
from ..extension import load_ops
from ..limits import NUM_GROUPS


def call_ep_init(
    atomic_counter_group_0: BufferValue,
    atomic_counter_group_1: BufferValue,
    config: EPConfig,
    *,
    setup: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Prepares a rank's region and counters; nobody may use them yet.

    Args:
        atomic_counter_group_0: The rank's counters.
        atomic_counter_group_1: The counters of MAX's second group.
        config: The group; its sizes arrive through ``setup``.
        setup: ``[setup_words]`` int64 on the host, as ``setup.mojo`` lists
            them; :class:`EPCommInitializer` fills it.

    Returns:
        ``device_ptrs`` ``[NUM_GROUPS, 3]`` uint64 (send, recv and count buffer
        of dispatch and of combine) and ``my_rank`` ``[1]`` int32.
    """
    load_ops(Graph.current)
    cpu = DeviceRef.CPU()
    results = ops.inplace_custom(
        "max_ep.init",
        device=atomic_counter_group_0.device,
        values=[atomic_counter_group_0, atomic_counter_group_1, setup],
        out_types=[
            TensorType(DType.uint64, [NUM_GROUPS, 3], cpu),
            TensorType(DType.int32, [1], cpu),
        ],
    )
    return results[0].tensor, results[1].tensor
