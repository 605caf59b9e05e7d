# SPDX-License-Identifier: Apache-2.0
"""The EP inputs of a graph: their types, and the buffers that are their values."""

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

from ..config import EPConfig, check_is_config
from ..limits import NUM_GROUPS
from ..plural import counted
from .routing import Replicas

DISPATCH, COMBINE = range(NUM_GROUPS)


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


class GraphBuffers:
    """The EP inputs of a graph of a group: the base of :class:`EPBatchManager`."""

    def __init__(self, config: EPConfig) -> None:
        """Describes the inputs of a group; there are no buffers yet."""
        check_is_config(config, "EPBatchManager")
        self.config = config
        self._comm: EPCommBuffers | None = None
        self._start()

    def _start(self) -> None:
        """Is called where a new graph begins."""

    def input_tree(self) -> OrderedDict[str, tuple[TensorType | BufferType, ...]]:
        """Returns the EP inputs of the graph by name, in their order.

        ``atomic_counters``: ``[NUM_GROUPS][n_gpus_per_node]`` buffers, flat;
        ``send_buf_ptrs``, ``recv_buf_ptrs``, ``recv_count_ptrs``: one host tensor
        ``[n_ranks]`` a group; with ``eplb_enabled`` ``eplb_log2phy`` and
        ``eplb_logcnt``, one buffer a local rank.
        """
        config = self.config
        devices = [config.device(i) for i in range(config.n_gpus_per_node)]

        def buffers(*shape: int) -> tuple[BufferType, ...]:
            return tuple(BufferType(DType.int32, shape, device) for device in devices)

        pointers = TensorType(DType.uint64, [config.n_ranks], DeviceRef.CPU())
        kinds = "send_buf_ptrs", "recv_buf_ptrs", "recv_count_ptrs"
        tree: OrderedDict[str, tuple[TensorType | BufferType, ...]] = OrderedDict(
            atomic_counters=buffers(config.sizes().counters_words) * NUM_GROUPS,
            **dict.fromkeys(kinds, (pointers,) * NUM_GROUPS),
        )
        if config.eplb_enabled:
            sizes = config.num_moe_layers, config.num_logical_experts
            tree["eplb_log2phy"] = buffers(*sizes, config.max_replicas)
            tree["eplb_logcnt"] = buffers(*sizes)
        return tree

    def input_types(self) -> list[TensorType | BufferType]:
        """Returns the types of the EP inputs, to be declared by the graph."""
        return [t for types in self.input_tree().values() for t in types]

    def comm_buffers(self, input_vals: Iterable[Value[Any]]) -> EPCommBuffers:
        """Takes the buffers as :meth:`fetch_buffers`; returns them as one value."""
        if not isinstance(input_vals, Iterable):
            raise TypeError(
                f"fetch_buffers got a {type(input_vals).__name__}; pass the graph "
                "inputs of input_types(), in their order"
            )
        values, tree = list(input_vals), self.input_tree()
        wanted = self.input_types()
        if len(values) != len(wanted):
            raise ValueError(
                f"fetch_buffers got {counted(len(values), 'value')}, input_types() "
                f"declares {len(wanted)}; pass exactly the graph inputs of those types"
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
        counters, *kinds = ([next(rest) for _ in types] for types in tree.values())
        n = self.config.n_gpus_per_node
        by_rank = [dict(enumerate(tables)) for tables in kinds[3:]]
        comm = EPCommBuffers([counters[:n], counters[n:]], *kinds[:3], *by_rank)
        self.bind_comm_buffers(comm)
        return comm

    def fetch_buffers(self, _input_vals: Iterable[Value[Any]]) -> None:
        """Takes the graph's inputs that :meth:`input_types` declares, in order."""
        self.comm_buffers(_input_vals)

    def bind_comm_buffers(self, comm: EPCommBuffers) -> None:
        """Uses buffers of :meth:`comm_buffers`, as values of the current graph."""
        graph = _current_graph()
        self._comm, self._graph = comm, graph and ref(graph)
        self._start()

    def _fetched(self) -> EPCommBuffers:
        if self._comm is None:
            raise ValueError(
                "EPBatchManager has no buffers yet: declare input_types() as "
                "inputs of the graph and pass their values to fetch_buffers()"
            )
        graph = _current_graph()
        if self._graph is not None and graph not in (None, self._graph()):
            raise ValueError(
                f"EPBatchManager has the buffers of another graph than {graph.name!r}, "
                "which is being built: pass the inputs of this one to "
                "fetch_buffers(), in a subgraph its own"
            )
        return self._comm

    @property
    def atomic_counters(self) -> list[list[BufferValue]]:
        """Counters, ``[NUM_GROUPS][n_gpus_per_node]``."""
        return self._fetched().atomic_counters

    @property
    def send_buf_ptrs(self) -> list[TensorValue]:
        """Send buffers, one tensor a group."""
        return self._fetched().send_buf_ptrs

    @property
    def recv_buf_ptrs(self) -> list[TensorValue]:
        """Receive buffers, one tensor a group."""
        return self._fetched().recv_buf_ptrs

    @property
    def recv_count_ptrs(self) -> list[TensorValue]:
        """Counts, one tensor a group."""
        return self._fetched().recv_count_ptrs

    def eplb_replicas(self, device_id: int, layer: int | TensorValue) -> Replicas:
        """Returns the placement of an MoE layer's experts, with balanced experts.

        For :meth:`ep_balance_ids`, ``softmax_top_k`` and ``balance_ids``.
        """
        comm = self._fetched()
        if comm.eplb_log2phy is None or comm.eplb_logcnt is None:
            raise ValueError(
                "there is no placement of experts: set EPConfig.eplb_enabled=True"
            )
        self.config.device(device_id)  # raises if there is no such rank
        tables = comm.eplb_log2phy[device_id], comm.eplb_logcnt[device_id]
        return Replicas(*tables, layer)

    def _counter(self, device_id: int) -> BufferValue:
        self.config.device(device_id)  # raises if there is no such rank
        # As in MAX, both phases of a rank share the counters of group 0:
        # combine needs what dispatch recorded there.
        return self.atomic_counters[DISPATCH][device_id]

    def _pointers(self, group: int, device_id: int = 0) -> tuple[TensorValue, ...]:
        comm = self._fetched()
        kinds = comm.send_buf_ptrs, comm.recv_buf_ptrs, comm.recv_count_ptrs
        of_group = tuple(of_kind[group] for of_kind in kinds)
        if not self.config.use_allreduce:
            return of_group
        return tuple(pointers[device_id : device_id + 1] for pointers in of_group)


def _current_graph() -> Graph | None:
    try:
        return Graph.current
    except LookupError:
        return None
