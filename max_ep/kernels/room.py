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

from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    TensorType,
    TensorValue,
    ops,
)

from ..config import EPConfig
from .between import last_op, runs_something_since, set_flag
from .op_call import call_op, claim
from .op_values import recv_types, result_type


class Room:
    """Buffers for the results of one wait; it knows the async op in front of it."""

    def __init__(self, types: Sequence[TensorType]) -> None:
        """Notes what is wanted; the graph gets nothing yet.

        Args:
            types: Of the results.
        """
        self._types = types
        self.buffers: list[BufferValue] = []
        self._sender: Any = None

    def claim(self) -> None:
        """Makes the buffers, in front of the async op that is built next."""
        self.buffers = [
            ops.buffer_create(BufferType(type.dtype, type.shape, type.device))
            for type in self._types
        ]
        claim(self.buffers)

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


def call_wait(
    name: str,
    config: EPConfig,
    counter: BufferValue,
    values: list[TensorValue],
    parameters: dict[str, bool | int | str | DType],
    types: list[TensorType],
    room: Room | None,
) -> list[TensorValue]:
    """Adds a wait: in its room if it overlaps, else with results of its own."""
    if room is not None and room.overlaps():
        return call_op(
            name + ".in_room", config, counter, values, parameters, room=room.buffers
        )
    shares = {"shares_gpu": config.ranks_per_gpu > 1}
    return call_op(name, config, counter, values, parameters | shares, types)
