# SPDX-License-Identifier: Apache-2.0
"""Room for the results of a wait that may begin before its async op has ended.

MAX plans the memory of a result for the op that makes it, as if the ops before had
ended by then. A wait that begins beside its async op must not write where that one,
or what still runs of another, reads: so its results are buffers that are taken before
the async op and live until behind the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.graph import BufferType, BufferValue, DeviceRef, Dim, TensorType, ops

from ..config import EPConfig
from .between import last_op, runs_something_since, set_flag
from .op_call import claim
from .op_values import recv_types, result_type


class Room:
    """Buffers for the results of one wait; it knows the async op in front of it."""

    def __init__(self, types: Sequence[TensorType]) -> None:
        """Makes the buffers, in the current graph.

        Args:
            types: Of the results.
        """
        self.buffers: list[BufferValue] = [
            ops.buffer_create(BufferType(type.dtype, type.shape, type.device))
            for type in types
        ]
        claim(self.buffers)
        self._sender: Any = None

    def note_sender(self) -> None:
        """Notes that the op that was built last is the async op."""
        self._sender = last_op()

    def overlaps(self) -> bool:
        """Decides whether a wait that comes next runs beside its async op.

        It does if its device has nothing to run between the two. Then the async op is
        told so, too.

        Returns:
            Whether it does.

        Raises:
            ValueError: If no async op had this room.
        """
        if self._sender is None:
            raise ValueError(
                "a wait got room that its async op did not get; pass the same to both, "
                "or to none"
            )
        if runs_something_since(self._sender, self.buffers[0].device):
            return False
        set_flag(self._sender, "halves_overlap")
        return True


def dispatch_room(config: EPConfig, device: DeviceRef) -> Room | None:
    """Makes room for the results of a dispatch whose halves may overlap.

    Args:
        config: The group.
        device: The rank's device.

    Returns:
        The room, or None: the halves never overlap.
    """
    if not config.halves_may_overlap:
        return None
    return Room(recv_types(config, device))


def combine_room(config: EPConfig, device: DeviceRef, num_tokens: Dim) -> Room | None:
    """Makes room for the result of a combine whose halves may overlap.

    Args:
        config: The group.
        device: The rank's device.
        num_tokens: Tokens of the rank.

    Returns:
        The room, or None: the halves never overlap.
    """
    if not (config.halves_may_overlap and config.is_reduced):
        return None
    return Room([result_type(config, num_tokens, device)])
