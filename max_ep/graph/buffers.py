# SPDX-License-Identifier: Apache-2.0
"""A group's buffers in a graph: the inputs that it declares, and their values.

:class:`EPCommInitializer` owns their memory. Its ``model_inputs()`` are in the order of
:func:`input_tree`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields
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
    """The graph values of one group's buffers."""

    atomic_counters: list[list[BufferValue]]
    """Counters, ``[NUM_GROUPS][n_gpus_per_node]``."""
    send_buf_ptrs: list[TensorValue]
    """Send buffers, ``[NUM_GROUPS]`` tensors of ``[n_ranks]`` uint64."""
    recv_buf_ptrs: list[TensorValue]
    """Receive buffers, of the same shape."""
    recv_count_ptrs: list[TensorValue]
    """Counts, of the same shape."""
    eplb_log2phy: dict[int, BufferValue] | None = None
    """With balanced experts, of each local rank the physical experts of each logical
    one, int32 ``[num_moe_layers, num_logical_experts, max_replicas]``."""
    eplb_logcnt: dict[int, BufferValue] | None = None
    """How many those are, int32 ``[num_moe_layers, num_logical_experts]``."""


_INPUTS = [field.name for field in fields(EPCommBuffers)]
"""Names of the inputs, in their order."""


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
    tree: OrderedDict[str, tuple[TensorType | BufferType, ...]] = OrderedDict(
        atomic_counters=counters,
        send_buf_ptrs=pointers,
        recv_buf_ptrs=pointers,
        recv_count_ptrs=pointers,
    )
    if config.eplb_enabled:
        sizes = [config.num_moe_layers, config.num_logical_experts]
        for name, shape in (
            ("eplb_log2phy", [*sizes, config.max_replicas]),
            ("eplb_logcnt", sizes),
        ):
            tree[name] = tuple(
                BufferType(DType.int32, shape, config.device(i))
                for i in range(config.n_gpus_per_node)
            )
    return tree


def input_types(config: EPConfig) -> list[TensorType | BufferType]:
    """Returns the types of :func:`input_tree`, flat."""
    return [t for types in input_tree(config).values() for t in types]


def buffers_of_inputs(
    config: EPConfig, input_vals: Iterable[Value[Any]]
) -> EPCommBuffers:
    """Sorts a graph's EP inputs, which :func:`input_types` declares in this order."""
    values, tree = list(input_vals), input_tree(config)
    wanted = [t for types in tree.values() for t in types]
    if len(values) != len(wanted):
        raise ValueError(
            f"fetch_buffers got {len(values)} values, input_types() declares "
            f"{len(wanted)}; pass exactly the graph inputs of those types"
        )
    for i, (value, type_) in enumerate(zip(values, wanted)):
        expected = BufferValue if isinstance(type_, BufferType) else TensorValue
        if not isinstance(value, expected):
            raise TypeError(
                f"EP input {i} is a {type(value).__name__}, it must be a "
                f"{expected.__name__}; pass the graph inputs in the order "
                "of input_types()"
            )
    rest = iter(values)
    counters, *pointers, log2phy, logcnt = (
        [next(rest) for _ in tree.get(name, ())] for name in _INPUTS
    )
    per_group = config.n_gpus_per_node
    return EPCommBuffers(
        [counters[i : i + per_group] for i in range(0, len(counters), per_group)],
        *pointers,
        *(dict(enumerate(x)) if x else None for x in (log2phy, logcnt)),
    )


class BoundBuffers:
    """Buffers as values of one graph; other graphs cannot use them."""

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
