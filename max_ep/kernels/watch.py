# SPDX-License-Identifier: Apache-2.0
"""The op that measures waiting, in front of a wait."""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, TensorType, TensorValue

from ..checks import check_buffers, check_phase
from ..config import EPConfig
from .op_call import call_op
from .op_values import combine_parameters


def call_ep_watch(
    phase: str,
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
) -> TensorValue:
    """Measures how long a rank waits for each peer; changes nothing.

    Belongs between the async op of a direction and its wait. MAX has no such op. Its
    waiting is bounded by ``EPConfig.timeout_s``, and that of the wait behind it again:
    a peer that is late by less than both is no error.

    Args:
        phase: ``"dispatch"`` or ``"combine"``.
        atomic_counter: This rank's counters.
        recv_buf_ptrs: Receive buffers of that direction, ``[n_ranks]`` uint64.
        recv_count_ptrs: Counts, likewise.
        config: The group.

    Returns:
        ``[n_ranks]`` int64: nanoseconds from the begin of the watch until all was
        there that the peer sends (on GPUs with dispatch its counts, with reduced
        combine the first bytes of each of its sums), -1 if time was up before.

    Raises:
        ValueError: If there is no such phase, or a buffer does not fit.
    """
    check_phase(phase)
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    return call_op(
        "watch",
        config,
        atomic_counter,
        [recv_buf_ptrs, recv_count_ptrs],
        combine_parameters(config) | {"is_combine": phase == "combine"},
        [TensorType(DType.int64, [config.n_ranks], atomic_counter.device)],
    )[0]
