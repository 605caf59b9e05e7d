# SPDX-License-Identifier: Apache-2.0
"""How an EP op is added to a graph: behind those before it, with the group's sizes."""

from __future__ import annotations

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


def call_op(
    name: str,
    config: EPConfig,
    counter: BufferValue,
    values: list[TensorValue],
    parameters: dict[str, bool | int | str | DType],
    out_types: list[TensorType] | None = None,
) -> list[TensorValue]:
    """Adds one EP op to the current graph, behind those before it."""
    load_ops(Graph.current, with_shmem=config.uses_shmem)
    results = ops.inplace_custom(
        f"max_ep.{name}",
        device=counter.device,
        values=[counter, order_buffer(counter.device), *values],
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
    return [result.tensor for result in results]


def call_wait(
    name: str,
    config: EPConfig,
    counter: BufferValue,
    values: list[TensorValue],
    parameters: dict[str, bool | int | str | DType],
    out_types: list[TensorType],
) -> list[TensorValue]:
    """Adds a wait, which must know whether its rank has a GPU of its own."""
    parameters = parameters | {"shares_gpu": config.ranks_per_gpu > 1}
    return call_op(name, config, counter, values, parameters, out_types)
