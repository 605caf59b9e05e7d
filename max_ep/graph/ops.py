# SPDX-License-Identifier: Apache-2.0
"""Adds the EP ops to a graph: name, order, parameters, values, result types.

This is the only file that knows how ``launch/ops.mojo`` names and types them.
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
    StaticDim,
    TensorType,
    TensorValue,
    ops,
)

from ..config import EPConfig
from ..extension import add_op
from ..formats import PLAIN_DTYPES
from ..limits import SOURCE_INFO_BYTES
from ..plural import counted
from .checks import check_n_tokens, check_same_rows, check_value, differ

_order_buffers: WeakKeyDictionary[Graph, dict[DeviceRef, BufferValue]] = (
    WeakKeyDictionary()
)


_N_AWAITED = 4
"""As many values does the op ``ready`` take: values and scales, ids, weights."""


def order_buffer(device: DeviceRef) -> BufferValue:
    """Returns the buffer that all EP ops of this graph on a device share: MAX runs
    in-place ops on one buffer in the order in which they were built."""
    of_graph = _order_buffers.setdefault(Graph.current, {})
    if device not in of_graph:
        of_graph[device] = ops.buffer_create(BufferType(DType.int32, [1], device))
    return of_graph[device]


def start_together(
    config: EPConfig,
    counters: Sequence[BufferValue],
    *values: Sequence[Tokens] | None,
) -> None:
    """Has the launches of several GPUs that are added next begin together: the host
    launches none before the values of all ranks are there. ``values`` are lists of one
    a rank.

    CUDA loads a kernel only once the GPU has nothing to do, and MAX launches all GPUs
    from one thread. If a rank waited on its GPU for one whose launch is not enqueued,
    the next kernel that the thread loads there would block it until the time-out.
    """
    devices = list(dict.fromkeys(counter.device for counter in counters))
    if len(devices) < 2 or config.use_allreduce:
        return
    for given in zip(*filter(None, values)):
        pairs = (x if isinstance(x, (tuple, list)) else [x] for x in given)
        there = [x for pair in pairs for x in pair if isinstance(x, TensorValue)]
        if there:  # what is wrong with the values, the launch's own checks say
            _when_ready(config, devices, there)


def _when_ready(
    config: EPConfig, devices: Sequence[DeviceRef], values: list[TensorValue]
) -> None:
    """Has EP ops that are added next on these devices launched once the values are
    there, and all EP ops that were added before are launched."""
    values += values[:1] * (_N_AWAITED - len(values))
    given = [*map(order_buffer, devices), *values[:_N_AWAITED]]
    chains, host = Graph.current.device_chains, DeviceRef.CPU()
    chains.merge_for(devices)
    # An op of a GPU would become one with the launch behind it.
    add_op("ready", host, given, [], with_shmem=config.uses_shmem)
    for device in devices:
        chains[device] = chains[host]


def call_op(
    name: str,
    config: EPConfig,
    counter: BufferValue,
    values: list[TensorValue],
    out_types: Sequence[TensorType],
    **parameters: bool | str | DType,
) -> list[TensorValue]:
    """Adds an EP op to the current graph, after the earlier ones."""
    words = group_of_ops(config)
    if name.startswith("dispatch"):
        words += config.token_format.words()
        parameters["format"] = _format_name(config)
    elif name in ("combine", "watch"):
        parameters["combine_dtype"] = config.combine_dtype
        parameters["partial_dtype"] = config.combine_wire_dtype
    device = counter.device
    values = [counter, order_buffer(device), *values]
    if name == "watch" or str(parameters.get("op")).endswith("_wait"):
        others = list(_order_buffers[Graph.current])
        if len(others) > 1:  # the launches that it waits for are in their queues then
            _when_ready(config, others, [placeholder(DeviceRef.CPU(), 1, 1)])
    parameters["config"] = " ".join(words)
    shmem = config.uses_shmem
    return add_op(name, device, values, out_types, with_shmem=shmem, **parameters)


def group_of_ops(config: EPConfig) -> list[str]:
    """Describes the group to an op, in the words that ``op_config.mojo`` reads."""
    numbers = [f"n_sms={config.n_sms}"]
    flags = {
        "padded": config.is_padded,
        "fused_shared_expert": config.fused_shared_expert,
        "drops_rows": config.max_output_rows is not None,
        "shares_gpu": config.ranks_per_gpu > 1 and not config.use_allreduce,
        "scales_in_rows": config.scale_layout == "rows",
        "scales_in_tiles": config.scale_layout == "tiles",
        "scales_packed": config.scale_layout == "packed",
    }
    set_flags = (name for name, is_set in flags.items() if is_set)
    return [*config.group_words(), *numbers, *set_flags]


def _format_name(config: EPConfig) -> str:
    of = config.token_format
    if config.tokens_are_quantized:
        return f"{of.name}_forwarded"
    is_rounded = of.rounds_scales and config.fp8_power_of_two_scales
    return of.name + "_power_of_two" * is_rounded


def check_buffers(
    config: EPConfig, counter: BufferValue, *pointers: TensorValue
) -> list[TensorValue]:
    """Checks counters and addresses; returns the latter: all kinds, or the last."""
    if not isinstance(counter, BufferValue):
        raise TypeError(
            f"atomic_counter is a {type(counter).__name__}; it must be a "
            "BufferValue: an input declared by EPBatchManager.input_types()"
        )
    words = config.sizes().counters_words
    check_value(counter, "atomic_counter", DType.int32, [words], None)
    kinds = ("send_buf_ptrs", "recv_buf_ptrs", "recv_count_ptrs")[-len(pointers) :]
    for what, value in zip(kinds, pointers):
        shape = [config.exchange_ranks]
        check_value(value, what, DType.uint64, shape, DeviceRef.CPU())
    return list(pointers)


def as_sent(
    op: str, config: EPConfig, given: list[TensorValue], **parameters: str
) -> TensorValue:
    """Makes tokens as they are sent, bytes."""
    n_bytes = config.sizes().dispatch_msg_bytes - SOURCE_INFO_BYTES
    device = given[0].device
    types = [TensorType(DType.uint8, [given[0].shape[0], n_bytes], device)]
    parameters["hidden_size"] = config.hidden_size
    shmem = config.uses_shmem
    return add_op(op, device, given, types, with_shmem=shmem, **parameters)[0]


def placeholder(
    device: DeviceRef, *shape: int, dtype: DType = DType.float32
) -> TensorValue:
    """Returns a tensor for an input that is not given."""
    return ops.constant(np.zeros(shape, dtype.to_numpy()), dtype, device)


Tokens = TensorValue | tuple[TensorValue, TensorValue]
"""Tokens of a rank, or with ``tokens_are_quantized`` their values and scales."""


def n_tokens_of(given: Tokens) -> Dim:
    return (given if isinstance(given, TensorValue) else given[0]).shape[0]


def tokens_for_op(config: EPConfig, given: Tokens, device: DeviceRef) -> TensorValue:
    """Checks tokens; returns them as the ops take them, quantized ones joined."""
    is_pair = isinstance(given, (tuple, list))
    if is_pair != config.tokens_are_quantized:
        raise TypeError(
            f"input_tokens are {'a pair' if is_pair else 'one tensor'} with "
            f"tokens_are_quantized={config.tokens_are_quantized}: dispatch takes "
            "(values, scales) exactly if that is set"
        )
    if not is_pair:
        shape = [None, config.hidden_size]
        dtypes = PLAIN_DTYPES if config.is_quantized else config.dispatch_dtype
        check_value(given, "input_tokens", dtypes, shape, device)
        if config.nvfp4_dyn_global_scales:
            return as_sent("quantize_dynamic", config, [given])
        return given
    values, scales = given
    shape = [None, config.row_columns]
    check_value(values, "values of input_tokens", config.output_dtype, shape, device)
    shape = [None, config.n_scales]
    check_value(scales, "scales of input_tokens", config.scales_dtype, shape, device)
    check_same_rows("values of input_tokens", values, "scales", scales)
    given = [values, scales]
    return as_sent("join_quantized", config, given, format=_format_name(config))


def dispatch_inputs(
    config: EPConfig,
    input_tokens: Tokens,
    topk_ids: TensorValue,
    input_scales: TensorValue | None,
    router_weights: TensorValue | None,
    device: DeviceRef,
) -> list[TensorValue]:
    """Checks what a dispatch sends; returns it as its ops take it."""
    tokens = tokens_for_op(config, input_tokens, device)
    n_tokens = tokens.shape[0]
    check_n_tokens(config, "input_tokens", n_tokens)
    shape = [None, config.router_top_k or config.top_k]
    if isinstance(topk_ids, TensorValue) and topk_ids.dtype.is_float():
        raise TypeError(
            f"topk_ids has dtype {topk_ids.dtype}, it must be {DType.int32}: pass the "
            "ids of the experts here, and the router's weights where they belong"
        )
    check_value(topk_ids, "topk_ids", DType.int32, shape, device)
    check_same_rows("input_tokens", tokens, "topk_ids", topk_ids)
    scales = scales_for_op(config, input_scales, device)
    weights = weights_for_op(config, router_weights, n_tokens, device, "dispatch")
    return [tokens, topk_ids, scales, weights]


def rows_for_op(
    config: EPConfig,
    input_tokens: TensorValue,
    src_info: TensorValue | None,
    device: DeviceRef,
) -> list[TensorValue]:
    """Checks expert rows, and src_info if given; returns them in two dimensions."""
    rows: list[int | None] = [None]
    if config.is_padded:
        rows = [config.n_local_experts, config.expert_capacity]
    is_tensor = isinstance(input_tokens, TensorValue)
    if config.is_quantized and is_tensor and input_tokens.dtype == config.output_dtype:
        raise TypeError(
            f"input_tokens of combine has dtype {input_tokens.dtype}, as the "
            f"{config.token_format.name.upper()} rows that dispatch delivers; "
            "pass what the experts made of them, in "
            f"{config.combine_dtype}. max_ep.dequantize(rows, scales, config) makes "
            "rows for experts; a cast alone leaves the scales out"
        )
    shape = [*rows, config.hidden_size]
    check_value(input_tokens, "input_tokens", config.combine_dtype, shape, device)
    values = [input_tokens]
    if src_info is not None:
        check_value(src_info, "src_info", DType.int32, [*rows, 2], device)
        have, want = input_tokens.shape[0], src_info.shape[0]
        if differ(have, want):
            raise ValueError(
                f"input_tokens of combine has {counted(have, 'row')} and src_info of "
                f"the dispatch has {want}; pass the experts' rows of what dispatch "
                f"delivered, all {want}, each where it was"
            )
        values.append(src_info)
    return [v.reshape([-1, v.shape[-1]]) if config.is_padded else v for v in values]


def weights_for_op(
    config: EPConfig,
    router_weights: TensorValue | None,
    num_tokens: Dim,
    device: DeviceRef,
    phase: str,
) -> TensorValue:
    """Checks router weights, which one direction takes; returns them as ops do."""
    used_by = "dispatch" if config.combines_sums else "combine"
    if (router_weights is not None) != (phase == used_by):
        needs, what = "needs", "those of all tokens"
        if phase != used_by:
            needs, what = "takes no", "None"
        raise ValueError(
            f"{phase} with combine_mode={config.combine_mode!r} {needs} router "
            f"weights: {used_by} takes them; pass {what} to {phase}, or choose another "
            "EPConfig.combine_mode"
        )
    if router_weights is None:
        return placeholder(device, 1, 1)
    shape = [None, config.router_top_k or config.top_k]
    check_value(router_weights, "router_weights", PLAIN_DTYPES, shape, device)
    n_rows = router_weights.shape[0]
    check_n_tokens(config, "router_weights", n_rows)
    if differ(n_rows, num_tokens):
        raise ValueError(
            f"router_weights has {counted(n_rows, 'row')}, num_tokens is {num_tokens}; "
            "pass the weights of the tokens that were dispatched, a row each"
        )
    return ops.cast(router_weights, DType.float32)


def scales_for_op(
    config: EPConfig, input_scales: TensorValue | None, device: DeviceRef
) -> TensorValue:
    """Checks input scales; returns them, or an empty tensor where there are none."""
    if input_scales is None:
        return placeholder(device, 0)
    if config.tokens_are_quantized or config.nvfp4_dyn_global_scales:
        raise ValueError(
            "input_scales with tokens_are_quantized or nvfp4_dyn_global_scales: such "
            "tokens have their scales; pass None"
        )
    if config.combines_sums:
        raise ValueError(
            "input_scales are factors of experts, which combine_mode='sums' does "
            "not take; scale the tokens before dispatch. If these are the router's "
            "weights, pass them by name, as router_weight (of all ranks: "
            "router_weights)"
        )
    if config.fused_shared_expert or config.is_by_rank:
        raise ValueError(
            "input_scales are factors of experts, and with fused_shared_expert="
            f"{config.fused_shared_expert} and protocol={config.protocol!r} a token is "
            "encoded once for several experts; scale the tokens before dispatch, or "
            "pass protocol='by_expert' without a fused shared expert"
        )
    check_value(input_scales, "input_scales", DType.float32, [None], device)
    n = input_scales.shape[0]
    if not isinstance(n, StaticDim) or int(n) not in (1, config.exchange_experts):
        wanted = f"[1] or [n_experts={config.exchange_experts}]"
        raise ValueError(f"input_scales has shape [{n}], it must be {wanted}")
    return input_scales


def dispatch_types(config: EPConfig, device: DeviceRef) -> list[TensorType]:
    """Returns the types of the eight results of the ops that receive a dispatch, with
    padded rows in two dimensions; those that a format or layout has not are empty."""
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


def _scale_tiles(config: EPConfig) -> list[int]:
    """Returns the sizes of scales in tiles: each expert begins a tile of its own."""
    n_rows = config.n_output_rows + 128 * config.n_local_experts
    return [math.ceil(n_rows / 128), math.ceil(config.n_scales / 4), 32, 4, 4]


def _scales_shape(config: EPConfig) -> list[int]:
    """Returns the sizes of the scales, in two dimensions."""
    n_rows, n_scales = config.n_output_rows, config.n_scales
    if config.scale_layout == "packed":
        n_scales //= 4
    if config.scale_layout == "tiles":
        *outer, n_inner = _scale_tiles(config)
        return [math.prod(outer), n_inner]
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
        tiles = scales.reshape(_scale_tiles(config))
        return (tokens, tiles, *of_rows, offsets, scales_offsets, ids, src_info)
    if not config.is_padded:
        rest = gathered if config.router_top_k else []
        return (*rows, *of_rows, *rest, offsets, ids, src_info)
    *rows, ids, src_info = (
        value.reshape([config.n_local_experts, -1, value.shape[-1]])
        for value in (*rows, ids, src_info)
    )
    return (*rows, *of_rows, offsets, src_info, ids)
