# SPDX-License-Identifier: Apache-2.0
"""Graph builders of single ops: ``call_ep_*``, as in MAX's ``ep_kernels``.

They keep no state. ``EPBatchManager`` builds on them and checks the order of
the calls; use these only where it does not fit.
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
    StaticDim,
    TensorType,
    TensorValue,
    ops,
)

from .checks import (
    check_buffers,
    check_rows,
    check_send,
    check_value,
    check_weights,
    refuse_if_in_turn,
)
from .config import FP8_BLOCK, NUM_GROUPS, EPConfig
from .extension import load_ops

_order_buffers: WeakKeyDictionary[Graph, dict[DeviceRef, BufferValue]] = (
    WeakKeyDictionary()
)


def _order_buffer(device: DeviceRef) -> BufferValue:
    """Returns the buffer that puts this graph's EP ops on a device in order.

    MAX runs in-place ops on different buffers concurrently. All EP ops of a
    graph on a device share this one, so they run in the order in which they
    were built: the sends of all its ranks before the first wait.
    """
    of_graph = _order_buffers.setdefault(Graph.current, {})
    if device not in of_graph:
        of_graph[device] = ops.buffer_create(BufferType(DType.int32, [1], device))
    return of_graph[device]


def _call(
    name: str,
    config: EPConfig,
    counter: BufferValue,
    values: list[TensorValue],
    parameters: dict[str, bool | int | DType],
    out_types: list[TensorType] | None = None,
) -> list[TensorValue]:
    """Adds one EP op to the current graph."""
    load_ops(Graph.current)
    results = ops.inplace_custom(
        f"max_ep.{name}",
        device=counter.device,
        values=[counter, _order_buffer(counter.device), *values],
        out_types=out_types or [],
        parameters={
            **parameters,
            "hidden_size": config.hidden_size,
            "top_k": config.top_k,
            "n_experts": config.n_experts,
            "max_tokens_per_rank": config.max_tokens_per_rank,
            "n_gpus_per_node": config.n_gpus_per_node,
            "n_nodes": config.n_nodes,
        },
    )
    return [result.tensor for result in results]


# ------------------------------------------------------- shared parts of the ops


def _format_suffix(config: EPConfig) -> str:
    return ".fp8" if config.is_quantized else ""


def _format_parameters(config: EPConfig) -> dict[str, bool | int | DType]:
    if config.is_quantized:
        return {"power_of_two_scales": config.fp8_power_of_two_scales}
    return {"dispatch_dtype": config.dispatch_dtype}


def _input_scales(
    config: EPConfig, input_scales: TensorValue | None, device: DeviceRef
) -> TensorValue:
    """Returns the input scales, an empty tensor where there are none."""
    if input_scales is None:
        return ops.constant(np.zeros(0, np.float32), DType.float32, device)
    check_value(input_scales, "input_scales", DType.float32, [None], device)
    n = input_scales.shape[0]
    if not isinstance(n, StaticDim) or int(n) not in (1, config.n_experts):
        raise ValueError(
            f"input_scales has shape [{n}], it must be [1] or "
            f"[n_experts={config.n_experts}]"
        )
    return input_scales


def _recv_types(config: EPConfig, device: DeviceRef) -> list[TensorType]:
    n_rows = config.get_max_recv_tokens()
    types = [TensorType(config.output_dtype, [n_rows, config.hidden_size], device)]
    if config.is_quantized:
        n_blocks = config.hidden_size // FP8_BLOCK
        types.append(TensorType(DType.float32, [n_blocks, n_rows], device))
    return types + [
        TensorType(DType.uint32, [config.n_local_experts + 1], device),
        TensorType(DType.int32, [config.n_local_experts], device),
        TensorType(DType.int32, [n_rows, 2], device),
    ]


# ---------------------------------------------------------------------- builders


def call_ep_init(
    atomic_counter_group_0: BufferValue,
    atomic_counter_group_1: BufferValue,
    config: EPConfig,
    *,
    setup: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Prepares a rank's region and counters; nobody may use them yet.

    Args:
        atomic_counter_group_0: The rank's counters.
        atomic_counter_group_1: The counters of MAX's second group.
        config: The group; its sizes arrive through ``setup``.
        setup: ``[setup_words]`` int64 on the host, as ``host_setup.mojo`` lists
            them; :class:`EPCommInitializer` fills it.

    Returns:
        ``device_ptrs`` ``[NUM_GROUPS, 3]`` uint64 (send, recv and count buffer
        of dispatch and of combine) and ``my_rank`` ``[1]`` int32.
    """
    load_ops(Graph.current)
    cpu = DeviceRef.CPU()
    results = ops.inplace_custom(
        "max_ep.init",
        device=atomic_counter_group_0.device,
        values=[atomic_counter_group_0, atomic_counter_group_1, setup],
        out_types=[
            TensorType(DType.uint64, [NUM_GROUPS, 3], cpu),
            TensorType(DType.int32, [1], cpu),
        ],
    )
    return results[0].tensor, results[1].tensor


def call_ep_dispatch_async(
    input_tokens: TensorValue,
    topk_ids: TensorValue,
    atomic_counter: BufferValue,
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    input_scales: TensorValue | None = None,
) -> None:
    """Adds "send my tokens to their experts" to the current graph.

    Args:
        input_tokens: ``[n_tokens, hidden_size]`` of ``config.dispatch_dtype``
            (bfloat16 or float32 where dispatch quantizes), with
            ``n_tokens <= config.max_tokens_per_rank``.
        topk_ids: ``[n_tokens, top_k]`` int32 in ``[-1, n_experts)``; those of
            one token are distinct; ``-1`` means "no expert". Others are
            dropped, counted and reported by an error of the op.
        atomic_counter: This rank's counters.
        send_buf_ptrs: All ranks' send buffers, ``[n_ranks]`` uint64, host.
        recv_buf_ptrs: All ranks' receive buffers, likewise.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.
        input_scales: ``[1]`` or ``[n_experts]`` float32: factor of a token, in
            float32, before it is encoded for an expert.

    Raises:
        TypeError: If a dtype is not the one above.
        ValueError: If a shape or device is not.
    """
    check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    check_send(config, input_tokens, topk_ids, device)
    scales = _input_scales(config, input_scales, device)
    _call(
        "dispatch_async" + _format_suffix(config),
        config,
        atomic_counter,
        [
            input_tokens,
            topk_ids,
            scales,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        {**_format_parameters(config), "has_input_scales": input_scales is not None},
    )


def call_ep_dispatch_wait(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens: Dim | None = None,
) -> tuple[TensorValue, ...]:
    """Adds "complete receiving" to the current graph.

    Args:
        atomic_counter: This rank's counters.
        recv_buf_ptrs: All ranks' receive buffers, ``[n_ranks]`` uint64, host.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.
        num_tokens: MAX's all-reduce mode; must be None.

    Returns:
        ``output_tokens`` ``[max_recv_tokens, hidden_size]``, for FP8
        ``output_scales`` ``[hidden_size / 128, max_recv_tokens]`` float32,
        ``row_offsets`` ``[n_local_experts + 1]`` uint32, ``expert_ids``
        ``[n_local_experts]`` int32, ``src_info`` ``[max_recv_tokens, 2]``
        int32 (token, choice). Rows behind ``row_offsets[-1]`` are undefined.
    """
    if num_tokens is not None:
        raise ValueError("num_tokens is for all-reduce mode, which max_ep lacks")
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    return tuple(
        _call(
            "dispatch_wait" + _format_suffix(config),
            config,
            atomic_counter,
            [recv_buf_ptrs, recv_count_ptrs],
            _format_parameters(config),
            _recv_types(config, atomic_counter.device),
        )
    )


def call_ep_dispatch(
    input_tokens: TensorValue,
    topk_ids: TensorValue,
    atomic_counter: BufferValue,
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    input_scales: TensorValue | None = None,
) -> tuple[TensorValue, ...]:
    """Adds a dispatch in one launch; all ranks must run at the same time.

    Args and results are those of :func:`call_ep_dispatch_async` and
    :func:`call_ep_dispatch_wait`.
    """
    refuse_if_in_turn(
        config,
        "call_ep_dispatch",
        "call_ep_dispatch_async of all ranks, then call_ep_dispatch_wait",
    )
    check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    check_send(config, input_tokens, topk_ids, device)
    scales = _input_scales(config, input_scales, device)
    return tuple(
        _call(
            "dispatch" + _format_suffix(config),
            config,
            atomic_counter,
            [
                input_tokens,
                topk_ids,
                scales,
                send_buf_ptrs,
                recv_buf_ptrs,
                recv_count_ptrs,
            ],
            {
                **_format_parameters(config),
                "has_input_scales": input_scales is not None,
            },
            _recv_types(config, device),
        )
    )


def call_ep_combine_async(
    input_tokens: TensorValue,
    src_info: TensorValue,
    atomic_counter: BufferValue,
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
) -> None:
    """Adds "send expert rows back to their tokens' ranks" to the current graph.

    Args:
        input_tokens: Expert rows, ``[max_recv_tokens, hidden_size]`` of
            ``config.combine_dtype``, in the order of this rank's last dispatch.
        src_info: ``[max_recv_tokens, 2]`` int32 from that dispatch.
        atomic_counter: This rank's counters.
        send_buf_ptrs: All ranks' send buffers, ``[n_ranks]`` uint64, host.
        recv_buf_ptrs: All ranks' receive buffers, likewise.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.
    """
    check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    check_rows(config, input_tokens, src_info, atomic_counter.device)
    _call(
        "combine_async",
        config,
        atomic_counter,
        [input_tokens, src_info, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs],
        {"combine_dtype": config.combine_dtype},
    )


def call_ep_combine_wait(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens: Dim,
    router_weights: TensorValue,
) -> TensorValue:
    """Adds "complete combine" to the current graph.

    Args:
        atomic_counter: This rank's counters.
        recv_buf_ptrs: All ranks' receive buffers, ``[n_ranks]`` uint64, host.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.
        num_tokens: Tokens this rank dispatched.
        router_weights: ``[num_tokens, top_k]`` float32.

    Returns:
        ``[num_tokens, hidden_size]`` of ``config.combine_dtype``: per token the
        sum, in order of choice, of weight times expert row, in float32 by
        fused multiply-add, rounded once. Choices of ``-1`` add nothing.
    """
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    check_weights(config, router_weights, num_tokens, device)
    return _call(
        "combine_wait",
        config,
        atomic_counter,
        [router_weights, recv_buf_ptrs, recv_count_ptrs],
        {"combine_dtype": config.combine_dtype},
        [TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)],
    )[0]


def call_ep_combine(
    input_tokens: TensorValue,
    src_info: TensorValue,
    atomic_counter: BufferValue,
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens: Dim,
    router_weights: TensorValue,
    topk_ids: TensorValue | None = None,
) -> TensorValue:
    """Adds a combine in one launch; all ranks must run at the same time.

    Args and result are those of :func:`call_ep_combine_async` and
    :func:`call_ep_combine_wait`; ``topk_ids`` is for MAX's all-reduce mode and
    not read.
    """
    refuse_if_in_turn(
        config,
        "call_ep_combine",
        "call_ep_combine_async of all ranks, then call_ep_combine_wait",
    )
    check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    check_rows(config, input_tokens, src_info, device)
    check_weights(config, router_weights, num_tokens, device)
    return _call(
        "combine",
        config,
        atomic_counter,
        [
            input_tokens,
            src_info,
            router_weights,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        {"combine_dtype": config.combine_dtype},
        [TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)],
    )[0]


def call_distributed_ep_dispatch(
    input_tokens: list[TensorValue],
    topk_ids: list[TensorValue],
    atomic_counters: list[BufferValue],
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    input_scales: list[TensorValue] | None = None,
) -> list[tuple[TensorValue, ...]]:
    """Adds the dispatch of all local ranks: every send, then every wait.

    The arguments are lists over the local ranks.

    Returns:
        The results of :func:`call_ep_dispatch_wait`, one tuple a rank.
    """
    if not config.runs_ranks_in_turn:
        return [
            call_ep_dispatch(
                tokens,
                ids,
                counter,
                send_buf_ptrs,
                recv_buf_ptrs,
                recv_count_ptrs,
                config,
                input_scales[i] if input_scales else None,
            )
            for i, (tokens, ids, counter) in enumerate(
                zip(input_tokens, topk_ids, atomic_counters)
            )
        ]
    for i, (tokens, ids, counter) in enumerate(
        zip(input_tokens, topk_ids, atomic_counters)
    ):
        call_ep_dispatch_async(
            tokens,
            ids,
            counter,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
            config,
            input_scales[i] if input_scales else None,
        )
    return [
        call_ep_dispatch_wait(counter, recv_buf_ptrs, recv_count_ptrs, config)
        for counter in atomic_counters
    ]


def call_distributed_ep_combine(
    input_tokens: list[TensorValue],
    src_info: list[TensorValue],
    atomic_counters: list[BufferValue],
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens_per_device: list[Dim],
    router_weights: list[TensorValue],
) -> list[TensorValue]:
    """Adds the combine of all local ranks: every send, then every wait.

    The arguments are lists over the local ranks.

    Returns:
        The results of :func:`call_ep_combine_wait`, one a rank.
    """
    pointers = (send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs)
    local_ranks = range(len(atomic_counters))
    if not config.runs_ranks_in_turn:
        return [
            call_ep_combine(
                input_tokens[i],
                src_info[i],
                atomic_counters[i],
                *pointers,
                config,
                num_tokens_per_device[i],
                router_weights[i],
            )
            for i in local_ranks
        ]
    for i in local_ranks:
        call_ep_combine_async(
            input_tokens[i], src_info[i], atomic_counters[i], *pointers, config
        )
    return [
        call_ep_combine_wait(
            atomic_counters[i],
            *pointers[1:],
            config,
            num_tokens_per_device[i],
            router_weights[i],
        )
        for i in local_ranks
    ]
