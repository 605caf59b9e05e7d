# SPDX-License-Identifier: Apache-2.0
"""Room for the results of a wait that may begin before its async op has ended.

MAX plans the memory of a result for the op that makes it, as if the ops before had
ended by then. A wait that begins beside its async op must not write where that one,
or what runs between the two, still reads: so its results are buffers that are taken
before the async op and live until behind the wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import BufferType, BufferValue, DeviceRef, Dim, TensorType, ops

from ..config import EPConfig
from .op_call import claim
from .op_values import recv_types, result_type


def dispatch_room(config: EPConfig, device: DeviceRef) -> list[BufferValue] | None:
    """Makes room for the results of a dispatch whose halves overlap.

    Args:
        config: The group.
        device: The rank's device.

    Returns:
        A buffer for each result, or None: the halves do not overlap.
    """
    if not config.halves_overlap:
        return None
    return _buffers(recv_types(config, device))


def combine_room(
    config: EPConfig, device: DeviceRef, num_tokens: Dim
) -> list[BufferValue] | None:
    """Makes room for the result of a combine whose halves overlap.

    Args:
        config: The group.
        device: The rank's device.
        num_tokens: Tokens of the rank.

    Returns:
        A buffer for the result, or None: the halves do not overlap.
    """
    if not (config.halves_overlap and config.is_reduced):
        return None
    return _buffers([result_type(config, num_tokens, device)])


def _buffers(types: Sequence[TensorType]) -> list[BufferValue]:
    buffers = [
        ops.buffer_create(BufferType(type.dtype, type.shape, type.device))
        for type in types
    ]
    for buffer in buffers:
        claim(buffer)
    return buffers
