# SPDX-License-Identifier: Apache-2.0
"""How an EP op is added to a graph: behind those before it, with the group's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Graph,
    TensorType,
    TensorValue,
    ops,
)

from ..config import EPConfig
from ..extension import load_ops

_order_buffers: WeakKeyDictionary[Graph, dict[DeviceRef, BufferValue]] = (
    WeakKeyDictionary()
)


def order_buffer(device: DeviceRef) -> BufferValue:
    """Returns the buffer that puts this graph's EP ops on a device in order.

    MAX runs in-place ops on different buffers concurrently. All EP ops of a
    graph on a device share this one, so they run in the order in which they
    were built: the sends of all its ranks before the first wait.
    """
    of_graph = _order_buffers.setdefault(Graph.current, {})
    if device not in of_graph:
        of_graph[device] = ops.buffer_create(BufferType(DType.int32, [1], device))
    return of_graph[device]


def claim(buffers: Sequence[BufferValue]) -> None:
    """Has MAX give buffers of one device memory before the ops that come next."""
    load_ops(Graph.current)
    device = buffers[0].device
    ops.inplace_custom(
        f"max_ep.claim_{len(buffers)}",
        device=device,
        values=[order_buffer(device), *buffers],
    )


def look(values: Sequence[TensorValue]) -> None:
    """Keeps MAX from copying what was loaded from a device's buffers.

    It copies what no op takes, if the buffer is written again: row tables, say, that
    a graph makes no use of. With an op that takes it, this one, it does not.
    """
    device = values[0].device
    ops.inplace_custom(
        f"max_ep.look_{len(values)}",
        device=device,
        values=[order_buffer(device), *values],
    )


def call_op(
    name: str,
    config: EPConfig,
    counter: BufferValue,
    values: list[TensorValue],
    parameters: dict[str, bool | int | str | DType],
    out_types: list[TensorType] | None = None,
    room: Sequence[BufferValue] = (),
) -> list[TensorValue]:
    """Adds one EP op to the current graph; what it puts into ``room`` is returned."""
    load_ops(Graph.current, with_shmem=config.uses_shmem)
    results = ops.inplace_custom(
        f"max_ep.{name}",
        device=counter.device,
        values=[counter, order_buffer(counter.device), *room, *values],
        out_types=out_types or [],
        parameters={
            **parameters,
            "hidden_size": config.hidden_size,
            "top_k": config.top_k,
            "n_experts": config.n_experts,
            "max_tokens_per_rank": config.max_tokens_per_rank,
            "n_gpus_per_node": config.n_gpus_per_node,
            "n_nodes": config.n_nodes,
            "n_sms": config.n_sms,
        },
    )
    if room:
        loaded = [ops.buffer_load(buffer) for buffer in room]
        look(loaded)
        return loaded
    return [result.tensor for result in results]
