# SPDX-License-Identifier: Apache-2.0
"""Adds the EP ops to a graph: name, order, parameters, values, result types.

This is the only file that knows how ``mojo/max_ep/ops.mojo`` names and types them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from ..limits import SOURCE_INFO_BYTES

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
    out_types: Sequence[TensorType] = (),
    **parameters: bool | str | DType,
) -> list[TensorValue]:
    """Adds an EP op to the current graph, after the earlier ones."""
    load_ops(Graph.current, with_shmem=config.uses_shmem)
    if name.startswith("dispatch"):
        parameters["format"] = config.token_format.op_name(
            config.fp8_power_of_two_scales, config.tokens_are_quantized
        )
    else:
        parameters["combine_dtype"] = config.combine_dtype
        parameters["partial_dtype"] = config.combine_wire_dtype
    results = ops.inplace_custom(
        f"max_ep.{name}",
        device=counter.device,
        values=[counter, order_buffer(counter.device), *values],
        out_types=out_types,
        parameters={**parameters, "group": _group(config)},
    )
    return [result.tensor for result in results]


def _group(config: EPConfig) -> str:
    """Describes the group to an op, in the words that ``ops.mojo`` reads."""
    numbers = {
        "n_experts": config.exchange_experts,
        "n_ranks": config.exchange_ranks,
        # Those whose memory is mapped.
        "n_ranks_per_node": (
            config.n_gpus_per_node if config.uses_shmem else config.exchange_ranks
        ),
        "max_tokens_per_rank": config.max_tokens_per_rank,
        "top_k": config.top_k,
        "hidden_size": config.hidden_size,
        "router_top_k": config.router_top_k,
        "n_sms": config.n_sms,
    }
    flags = {
        "padded": config.is_padded,
        "fused_shared_expert": config.fused_shared_expert,
        "masks": config.masks,
        "drops_rows": config.max_output_rows is not None,
        "shares_gpu": config.ranks_per_gpu > 1 and not config.use_allreduce,
        "scales_in_rows": config.scale_layout == "rows",
        "scales_in_tiles": config.scale_layout == "tiles",
        "scales_packed": config.scale_layout == "packed",
    }
    words = [*config.axes, *(f"{name}={number}" for name, number in numbers.items())]
    return " ".join([*words, *(name for name, is_set in flags.items() if is_set)])


def join_quantized(
    config: EPConfig, values: TensorValue, scales: TensorValue
) -> TensorValue:
    """Joins values and scales to tokens as they are sent, bytes."""
    load_ops(Graph.current, with_shmem=config.uses_shmem)
    (joined,) = ops.custom(
        "max_ep.join_quantized",
        device=values.device,
        values=[values, scales],
        out_types=[_sent_type(config, values)],
        parameters={
            "hidden_size": config.hidden_size,
            "format": config.token_format.op_name(False, True),
        },
    )
    return joined.tensor


def quantize_dynamic(config: EPConfig, tokens: TensorValue) -> TensorValue:
    """Quantizes tokens, each with a scale of its own, as they are sent: bytes."""
    load_ops(Graph.current, with_shmem=config.uses_shmem)
    (joined,) = ops.custom(
        "max_ep.quantize_dynamic",
        device=tokens.device,
        values=[tokens],
        out_types=[_sent_type(config, tokens)],
        parameters={"hidden_size": config.hidden_size},
    )
    return joined.tensor


def _sent_type(config: EPConfig, tokens: TensorValue) -> TensorType:
    """Returns the type of tokens as they are sent."""
    n_bytes = config.sizes().dispatch_msg_bytes - SOURCE_INFO_BYTES
    return TensorType(DType.uint8, [tokens.shape[0], n_bytes], tokens.device)


def placeholder(device: DeviceRef, *shape: int) -> TensorValue:
    """Returns an empty tensor for an input that is not given."""
    return ops.constant(np.zeros(shape, np.float32), DType.float32, device)


def dispatch_types(config: EPConfig, device: DeviceRef) -> list[TensorType]:
    """Returns the types of the eight results of the ops that receive a dispatch.

    The ops see padded rows as rows with gaps between, so in two dimensions. Results
    that the format or the layout has not are empty.
    """
    n_rows, n_local = config.n_output_rows, config.n_local_experts
    n_groups = n_local + int(config.fused_shared_expert)
    router_top_k = config.router_top_k
    offsets, ids = [n_groups + 1], [n_groups]
    if config.is_padded:
        offsets, ids = [n_local], [n_local * config.exchange_ranks, 2]
    offsets_dtype = DType.int32 if config.is_padded else DType.uint32
    routing = [n_rows if router_top_k else 0, router_top_k]
    probs = [n_rows, 1] if config.nvfp4_dyn_global_scales else routing
    return [
        TensorType(config.output_dtype, [n_rows, config.row_columns], device),
        TensorType(config.scales_dtype, _scales_shape(config), device),
        TensorType(offsets_dtype, offsets, device),
        TensorType(DType.int32, ids, device),
        TensorType(DType.int32, [n_rows, 2], device),
        TensorType(DType.int32, routing, device),
        TensorType(DType.float32, probs, device),
        TensorType(DType.int32, [1 if router_top_k else 0], device),
    ]


def _scales_shape(config: EPConfig) -> list[int]:
    """Returns the sizes of the scales, in two dimensions."""
    n_rows, n_scales = config.n_output_rows, config.n_scales
    if config.scale_layout == "packed":
        n_scales //= 4
    if config.scale_layout == "tiles":
        return [math.prod(config.scale_tiles[:-1]), config.scale_tiles[-1]]
    if config.scale_layout == "rows":
        return [n_rows, n_scales]
    if config.is_padded and n_scales:
        return [config.n_local_experts * n_scales, config.expert_capacity]
    return [n_scales, n_rows if n_scales else 0]


def dispatch_results(
    config: EPConfig, results: list[TensorValue]
) -> tuple[TensorValue, ...]:
    """Brings the results of a dispatch op into their shapes and order."""
    tokens, scales, offsets, ids, src_info, *gathered = results
    rows = [tokens, scales] if config.is_quantized else [tokens]
    of_rows = []
    if config.nvfp4_dyn_global_scales:
        shape = [config.n_local_experts, -1] if config.is_padded else [-1]
        of_rows = [gathered[1].reshape(shape).cast(DType.bfloat16)]
    if config.scale_layout == "tiles":
        # Local expert `e` begins with tile `row_offsets[e] // 128 + e`.
        experts = np.arange(config.n_local_experts, dtype=np.uint32)
        scales_offsets = ops.constant(experts, DType.uint32, tokens.device)
        tiles = scales.reshape(config.scale_tiles)
        return (tokens, tiles, *of_rows, offsets, scales_offsets, ids, src_info)
    if not config.is_padded:
        rest = gathered if config.router_top_k else []
        return (*rows, *of_rows, *rest, offsets, ids, src_info)
    *rows, ids, src_info = (
        value.reshape([config.n_local_experts, -1, value.shape[-1]])
        for value in (*rows, ids, src_info)
    )
    return (*rows, *of_rows, offsets, src_info, ids)


def combine_type(config: EPConfig, num_tokens: Dim, device: DeviceRef) -> TensorType:
    """Returns the type of the result of a combine op."""
    return TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)
