# SPDX-License-Identifier: Apache-2.0
"""A group's buffers in a graph: the inputs that it declares, and their values.

Their memory is :class:`EPCommInitializer`'s, whose ``model_inputs()`` come in
the order of :func:`input_tree`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Graph,
    TensorType,
    TensorValue,
    Value,
)

from ..config import EPConfig
from ..limits import NUM_GROUPS


@dataclass
class EPCommBuffers:
    """The graph values of one group's buffers, to hand on as one thing."""

    atomic_counters: list[list[BufferValue]]
    """Counters, ``[NUM_GROUPS][n_gpus_per_node]``."""
    send_buf_ptrs: list[TensorValue]
    """Send buffers, ``[NUM_GROUPS]`` tensors of ``[n_ranks]`` uint64."""
    recv_buf_ptrs: list[TensorValue]
    """Receive buffers, of the same shape."""
    recv_count_ptrs: list[TensorValue]
    """Counts, of the same shape."""


def input_tree(
    config: EPConfig,
) -> OrderedDict[str, tuple[TensorType | BufferType, ...]]:
    """Returns what :meth:`EPBatchManager.input_tree` does."""
    counters = tuple(
        BufferType(DType.int32, [config.sizes().counters_words], config.device(i))
        for _ in range(NUM_GROUPS)
        for i in range(config.n_gpus_per_node)
    )
    pointers = (
        TensorType(DType.uint64, [config.n_ranks], DeviceRef.CPU()),
    ) * NUM_GROUPS
    return OrderedDict(
        atomic_counters=counters,
        send_buf_ptrs=pointers,
        recv_buf_ptrs=pointers,
        recv_count_ptrs=pointers,
    )


def input_types(config: EPConfig) -> list[TensorType | BufferType]:
    """Returns the types of :func:`input_tree`, flat."""
    return [t for types in input_tree(config).values() for t in types]


def buffers_of_inputs(
    config: EPConfig, input_vals: Iterable[Value[Any]]
) -> EPCommBuffers:
    """Sorts a graph's EP inputs, which :func:`input_types` declares in this order."""
    values = list(input_vals)
    wanted = input_types(config)
    if len(values) != len(wanted):
        raise ValueError(
            f"fetch_buffers got {len(values)} values, input_types() declares "
            f"{len(wanted)}; pass exactly the graph inputs of those types"
        )
    n = NUM_GROUPS * config.n_gpus_per_node
    for i, value in enumerate(values):
        expected = BufferValue if i < n else TensorValue
        if not isinstance(value, expected):
            raise TypeError(
                f"EP input {i} is a {type(value).__name__}, it must be a "
                f"{expected.__name__}; pass the graph inputs in the order "
                "of input_types()"
            )
    per_group = config.n_gpus_per_node
    counters = [values[i : i + per_group] for i in range(0, n, per_group)]
    send, recv, counts = (
        values[i : i + NUM_GROUPS] for i in range(n, len(values), NUM_GROUPS)
    )
    return EPCommBuffers(counters, send, recv, counts)


class BoundBuffers:
    """Buffers that are values of one graph: another cannot have them."""

    def __init__(self, comm: EPCommBuffers) -> None:
        """Takes values of the graph that is being built, if any."""
        graph = _current_graph()
        self._comm = comm
        self._graph = None if graph is None else ref(graph)

    def values(self) -> EPCommBuffers:
        """Returns the values; raises if another graph is being built."""
        graph = _current_graph()
        if self._graph is not None and graph not in (None, self._graph()):
            raise ValueError(
                f"EPBatchManager has the buffers of another graph than {graph.name!r}, "
                "which is being built: pass the inputs of this one to "
                "fetch_buffers(), in a subgraph its own"
            )
        return self._comm


def _current_graph() -> Graph | None:
    """Returns the graph that is being built, if any."""
    try:
        return Graph.current
    except LookupError:
        return None
