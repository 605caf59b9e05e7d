# SPDX-License-Identifier: Apache-2.0
"""The EP ops as a graph takes them: name, order, parameters, values, result types.

This is the only file that knows how ``mojo/max_ep/ops.mojo`` names and types them.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    TensorType,
    TensorValue,
    ops,
)

from ..config import EPConfig
from ..extension import load_ops

Parameters = dict[str, bool | int | str | DType]


_order_buffers: WeakKeyDictionary[Graph, dict[DeviceRef, BufferValue]] = (
    WeakKeyDictionary()
)


def order_buffer(device: DeviceRef) -> BufferValue:
    """Returns the buffer that puts this graph's EP ops on a device in order.

    MAX runs in-place ops on different buffers concurrently. All EP ops of a graph on a
    device share this one, so they run in the order in which they were built: the sends
    of all its ranks before the first wait.
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
    parameters: Parameters,
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


# ------------------------------------------------------------------------- names


def dispatch_op(config: EPConfig, name: str) -> str:
    """Returns the name of a dispatch op of a token format."""
    return name + (
        ".with_choices" if config.router_top_k else config.token_format.op_suffix
    )


# -------------------------------------------------------------------- parameters


def dispatch_parameters(config: EPConfig) -> Parameters:
    """Returns what all dispatch ops take."""
    routing = {"router_top_k": config.router_top_k} if config.router_top_k else {}
    return {
        "protocol": config.sizes().protocol,
        **config.token_format.op_parameters(config.fp8_power_of_two_scales),
        **routing,
    }


def send_parameters(config: EPConfig, has_input_scales: bool) -> Parameters:
    """Returns what dispatch ops that send take besides."""
    given = {"has_input_scales": has_input_scales}
    return given | shared_expert_parameters(config)


def receive_parameters(config: EPConfig) -> Parameters:
    """Returns what dispatch ops that receive take besides."""
    return {"output_layout": config.output_layout} | shared_expert_parameters(config)


def combine_parameters(config: EPConfig) -> Parameters:
    """Returns what all combine ops take."""
    return {
        "combine_dtype": config.combine_dtype,
        "protocol": config.sizes().protocol,
        "partial_dtype": config.combine_wire_dtype,
    }


def shared_expert_parameters(config: EPConfig) -> Parameters:
    """Returns what ops take that handle the rows of a shared expert."""
    return {"fused_shared_expert": config.fused_shared_expert}


def wait_parameters(config: EPConfig) -> Parameters:
    """Returns what wait ops take besides."""
    return {"shares_gpu": config.ranks_per_gpu > 1}


# ------------------------------------------------------------------------ values


def no_scales(device: DeviceRef) -> TensorValue:
    """Returns the tensor that stands for input scales that are not given."""
    return ops.constant(np.zeros(0, np.float32), DType.float32, device)


def no_weights(device: DeviceRef) -> TensorValue:
    """Returns the tensor that stands for router weights of the other direction."""
    return ops.constant(np.zeros((1, 1), np.float32), DType.float32, device)


def flat_rows(config: EPConfig, value: TensorValue) -> TensorValue:
    """Returns rows as the combine ops take them: in two dimensions."""
    return value.reshape([-1, value.shape[-1]]) if config.is_padded else value


# ----------------------------------------------------------------------- results


def dispatch_types(config: EPConfig, device: DeviceRef) -> list[TensorType]:
    """Returns the types of what the dispatch ops deliver.

    The ops see padded rows as rows with gaps between, so in two dimensions.
    """
    n_rows, n_local = config.n_output_rows, config.n_local_experts
    types = [TensorType(config.output_dtype, [n_rows, config.hidden_size], device)]
    if config.is_quantized:
        n_scales = config.token_format.n_scales(config.hidden_size)
        shape = [n_scales, n_rows]
        if config.is_padded:
            shape = [n_local * n_scales, config.expert_capacity]
        types.append(TensorType(DType.float32, shape, device))
    if config.router_top_k:
        routing = [n_rows, config.router_top_k]
        types += [
            TensorType(DType.int32, routing, device),
            TensorType(DType.float32, routing, device),
            TensorType(DType.int32, [1], device),
        ]
    if config.is_padded:
        types += [
            TensorType(DType.int32, [n_local], device),
            TensorType(DType.int32, [n_local * config.n_ranks, 2], device),
        ]
    else:
        n_groups = n_local + int(config.fused_shared_expert)
        types += [
            TensorType(DType.uint32, [n_groups + 1], device),
            TensorType(DType.int32, [n_groups], device),
        ]
    return [*types, TensorType(DType.int32, [n_rows, 2], device)]


def dispatch_results(
    config: EPConfig, results: list[TensorValue]
) -> tuple[TensorValue, ...]:
    """Gives what the dispatch ops deliver its shapes and order."""
    if not config.is_padded:
        return tuple(results)
    n_local = config.n_local_experts
    *rows_and_scales, recv_counts, recv_ranges, src_info = (
        value.reshape([n_local, -1, value.shape[-1]]) if value.rank == 2 else value
        for value in results
    )
    return (*rows_and_scales, recv_counts, src_info, recv_ranges)


def combine_type(config: EPConfig, num_tokens: Dim, device: DeviceRef) -> TensorType:
    """Returns the type of what the combine ops deliver."""
    return TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)
