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
    check_phase,
    check_rows,
    check_send,
    check_sent,
    check_tokens,
    check_unsent_rows,
    check_value,
    check_weights,
    check_weights_come_once,
    refuse_if_in_turn,
)
from .config import EPConfig
from .extension import load_ops
from .limits import FP8_BLOCK, NUM_GROUPS

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
    parameters: dict[str, bool | int | str | DType],
    out_types: list[TensorType] | None = None,
) -> list[TensorValue]:
    """Adds one EP op to the current graph."""
    load_ops(Graph.current, with_shmem=config.uses_shmem)
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
            "n_sms": config.n_sms,
        },
    )
    return [result.tensor for result in results]


# ------------------------------------------------------- shared parts of the ops


def _format_suffix(config: EPConfig) -> str:
    if config.n_carried:
        return ".with_choices"
    return ".fp8" if config.is_quantized else ""


def _format_parameters(config: EPConfig) -> dict[str, bool | int | DType]:
    protocol = {"protocol": config.sizes().protocol}
    if config.is_quantized:
        return protocol | {"power_of_two_scales": config.fp8_power_of_two_scales}
    plain = protocol | {"dispatch_dtype": config.dispatch_dtype}
    return plain | {"n_carried": config.n_carried} if config.n_carried else plain


def _input_scales(
    config: EPConfig, input_scales: TensorValue | None, device: DeviceRef
) -> TensorValue:
    """Returns the input scales, an empty tensor where there are none."""
    if input_scales is None:
        return ops.constant(np.zeros(0, np.float32), DType.float32, device)
    if config.fused_shared_expert:
        raise ValueError(
            "input_scales are factors of routed experts, and with "
            "fused_shared_expert=True a token is encoded once for all experts; "
            "scale the tokens before dispatch, or compute the shared expert "
            "beside the routed ones"
        )
    if config.is_reduced:
        raise ValueError(
            "input_scales are factors of experts, which combine_mode='reduced' does "
            "not take; scale the tokens before dispatch. If these are the router's "
            "weights, pass them by name, as router_weight (of all ranks: "
            "router_weights)"
        )
    if config.has_rank_slots:
        raise ValueError(
            "input_scales are factors of experts, and with "
            f"protocol={config.protocol!r} a token is encoded once for all experts "
            "of a rank; pass protocol='expert_slots', or scale the tokens before "
            "dispatch"
        )
    check_value(input_scales, "input_scales", DType.float32, [None], device)
    n = input_scales.shape[0]
    if not isinstance(n, StaticDim) or int(n) not in (1, config.n_experts):
        raise ValueError(
            f"input_scales has shape [{n}], it must be [1] or "
            f"[n_experts={config.n_experts}]"
        )
    return input_scales


def _router_weights(
    config: EPConfig,
    router_weights: TensorValue | None,
    num_tokens: Dim,
    device: DeviceRef,
    phase: str,
) -> TensorValue:
    """Returns the weights as the ops take them; a bfloat16 router's, widened.

    Where the other phase takes them: a tensor in their place that nobody reads.
    """
    check_weights_come_once(config, router_weights, phase)
    if router_weights is None:
        return ops.constant(np.zeros((1, 1), np.float32), DType.float32, device)
    check_weights(config, router_weights, num_tokens, device)
    return ops.cast(router_weights, DType.float32)


def _combine_parameters(config: EPConfig) -> dict[str, int | DType]:
    return {
        "combine_dtype": config.combine_dtype,
        "protocol": config.sizes().protocol,
        "partial_dtype": config.combine_wire_dtype,
    }


def _recv_types(config: EPConfig, device: DeviceRef) -> list[TensorType]:
    """Returns the types of what the ops of dispatch deliver.

    To the ops padded rows are rows with gaps between, so in two dimensions.
    """
    n_rows, n_local = config.n_output_rows, config.n_local_experts
    types = [TensorType(config.output_dtype, [n_rows, config.hidden_size], device)]
    if config.is_quantized:
        n_scales = config.hidden_size // FP8_BLOCK
        shape = [n_scales, n_rows]
        if config.is_padded:
            shape = [n_local * n_scales, config.expert_capacity]
        types.append(TensorType(DType.float32, shape, device))
    if config.n_carried:
        carried = [n_rows, config.n_carried]
        types += [
            TensorType(DType.int32, carried, device),
            TensorType(DType.float32, carried, device),
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


def _recv_parameters(config: EPConfig) -> dict[str, bool | str]:
    return {
        "fused_shared_expert": config.fused_shared_expert,
        "output_layout": config.output_layout,
    }


def _recv_outputs(
    config: EPConfig, results: list[TensorValue]
) -> tuple[TensorValue, ...]:
    """Gives what the ops of dispatch deliver its shapes and order."""
    if not config.is_padded:
        return tuple(results)
    n_local = config.n_local_experts
    *tokens_and_scales, recv_counts, recv_ranges, src_info = (
        value.reshape([n_local, -1, value.shape[-1]]) if value.rank == 2 else value
        for value in results
    )
    return (*tokens_and_scales, recv_counts, src_info, recv_ranges)


def _flat_rows(config: EPConfig, value: TensorValue) -> TensorValue:
    """Returns rows as the ops of combine take them: in two dimensions."""
    return value.reshape([-1, value.shape[-1]]) if config.is_padded else value


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


def call_ep_send_tokens(
    input_tokens: TensorValue,
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
) -> None:
    """Adds "send my tokens to all ranks that have experts" to the current graph.

    With ``protocol="gather"``, where the experts of a token need not be known: a
    graph can have it before the router. A dispatch of the same tokens must follow
    in this graph, with ``tokens_are_sent=True``; until then nobody looks at them.

    Args:
        input_tokens: As for :func:`call_ep_dispatch_async`.
        atomic_counter: This rank's counters.
        recv_buf_ptrs: All ranks' receive buffers, ``[n_ranks]`` uint64, host.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.

    Raises:
        TypeError: If a dtype is not that of :func:`call_ep_dispatch_async`.
        ValueError: If a shape or device is not, or with another protocol.
    """
    if not config.is_gather:
        raise ValueError(
            f"call_ep_send_tokens with protocol={config.protocol!r}: which ranks get "
            "a token is not known before its experts are; pass protocol='gather', or "
            "leave it to dispatch"
        )
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    check_tokens(config, input_tokens, atomic_counter.device)
    _call(
        "send_tokens" + _format_suffix(config),
        config,
        atomic_counter,
        [input_tokens, recv_buf_ptrs, recv_count_ptrs],
        _format_parameters(config),
    )


def call_ep_dispatch_async(
    input_tokens: TensorValue,
    topk_ids: TensorValue,
    atomic_counter: BufferValue,
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    input_scales: TensorValue | None = None,
    router_weights: TensorValue | None = None,
    tokens_are_sent: bool = False,
) -> None:
    """Adds "send my tokens to their experts" to the current graph.

    Args:
        input_tokens: ``[n_tokens, hidden_size]`` of ``config.dispatch_dtype``
            (bfloat16 or float32 where dispatch quantizes), with
            ``n_tokens <= config.max_tokens_per_rank``.
        topk_ids: ``[n_tokens, top_k]`` int32 in ``[-1, n_experts)``; those of
            one token are distinct; ``-1`` means "no expert". Others are
            dropped, counted and reported by an error of the op. With
            :class:`AllGatherConfig`, ``[n_tokens, n_carried]``, any int32.
        atomic_counter: This rank's counters.
        send_buf_ptrs: All ranks' send buffers, ``[n_ranks]`` uint64, host.
        recv_buf_ptrs: All ranks' receive buffers, likewise.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.
        input_scales: ``[1]`` or ``[n_experts]`` float32: factor of a token, in
            float32, before it is encoded for an expert. Not with
            ``fused_shared_expert``.
        router_weights: With ``combine_mode="reduced"``, ``[n_tokens, top_k]``
            float32, or bfloat16, which is widened. Otherwise None:
            :func:`call_ep_combine_wait` takes them.
        tokens_are_sent: Whether :func:`call_ep_send_tokens` has sent them, in this
            graph and since the last dispatch; with ``protocol="gather"``. If it is
            not so, the op raises.

    Raises:
        TypeError: If a dtype is not the one above.
        ValueError: If a shape or device is not, or if weights are missing, or
            given where combine takes them.
    """
    check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    check_sent(config, tokens_are_sent)
    device = atomic_counter.device
    check_send(config, input_tokens, topk_ids, device)
    scales = _input_scales(config, input_scales, device)
    weights = _router_weights(
        config, router_weights, input_tokens.shape[0], device, "dispatch"
    )
    _call(
        "dispatch_async" + _format_suffix(config),
        config,
        atomic_counter,
        [
            input_tokens,
            topk_ids,
            scales,
            weights,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        {
            **_format_parameters(config),
            "has_input_scales": input_scales is not None,
            "fused_shared_expert": config.fused_shared_expert,
            "tokens_are_sent": tokens_are_sent,
        },
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

        With ``fused_shared_expert``, ``max_tokens_per_rank`` more rows: this
        rank's own tokens come first, in the wire's format, with choice -1.
        They are group 0 of ``row_offsets`` ``[n_local_experts + 2]`` and
        ``expert_ids`` ``[n_local_experts + 1]``, local expert ``e`` is group
        ``e + 1``.

        With ``output_layout="padded"`` and ``capacity`` for
        ``config.expert_capacity``: ``output_tokens`` ``[n_local_experts,
        capacity, hidden_size]``, for FP8 ``output_scales`` ``[n_local_experts,
        hidden_size / 128, capacity]`` float32, ``recv_counts``
        ``[n_local_experts]`` int32, ``src_info`` ``[n_local_experts, capacity,
        2]`` int32 and ``recv_ranges`` ``[n_local_experts, n_ranks, 2]`` int32:
        of each source rank's rows the first, within the expert's, and how many.
        Rows behind ``recv_counts`` are undefined.

        With :class:`AllGatherConfig`, behind ``output_tokens``: the routing map
        ``[n_output_rows, n_carried]`` int32, probabilities of that shape, float32,
        and the number of tokens of all ranks, ``[1]`` int32. Behind the last token
        the routing map is -1, and probabilities are 0.
    """
    if num_tokens is not None:
        raise ValueError("num_tokens is for all-reduce mode, which max_ep lacks")
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    results = _call(
        "dispatch_wait" + _format_suffix(config),
        config,
        atomic_counter,
        [recv_buf_ptrs, recv_count_ptrs],
        {
            **_format_parameters(config),
            **_recv_parameters(config),
            "shares_gpu": config.ranks_per_gpu > 1,
        },
        _recv_types(config, atomic_counter.device),
    )
    return _recv_outputs(config, results)


def call_ep_dispatch(
    input_tokens: TensorValue,
    topk_ids: TensorValue,
    atomic_counter: BufferValue,
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    input_scales: TensorValue | None = None,
    router_weights: TensorValue | None = None,
    tokens_are_sent: bool = False,
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
    check_sent(config, tokens_are_sent)
    device = atomic_counter.device
    check_send(config, input_tokens, topk_ids, device)
    scales = _input_scales(config, input_scales, device)
    weights = _router_weights(
        config, router_weights, input_tokens.shape[0], device, "dispatch"
    )
    results = _call(
        "dispatch" + _format_suffix(config),
        config,
        atomic_counter,
        [
            input_tokens,
            topk_ids,
            scales,
            weights,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        {
            **_format_parameters(config),
            **_recv_parameters(config),
            "has_input_scales": input_scales is not None,
            "tokens_are_sent": tokens_are_sent,
        },
        _recv_types(config, device),
    )
    return _recv_outputs(config, results)


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

    With ``combine_mode="reduced"`` the weighted rows of each token are added
    first, and one partial sum of them is sent.

    Args:
        input_tokens: Expert rows, of the shape of ``output_tokens`` (see
            :func:`call_ep_dispatch_wait`) and of ``config.combine_dtype``, where
            this rank's last dispatch put them. Those of a fused shared expert
            are not sent: :func:`call_ep_combine_wait` adds them.
        src_info: ``src_info`` from that dispatch.
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
        [
            _flat_rows(config, input_tokens),
            _flat_rows(config, src_info),
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        _combine_parameters(config),
    )


def call_ep_combine_wait(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens: Dim,
    router_weights: TensorValue | None,
    input_tokens: TensorValue | None = None,
) -> TensorValue:
    """Adds "complete combine" to the current graph.

    Args:
        atomic_counter: This rank's counters.
        recv_buf_ptrs: All ranks' receive buffers, ``[n_ranks]`` uint64, host.
        recv_count_ptrs: All ranks' counts, likewise.
        config: The group.
        num_tokens: Tokens this rank dispatched.
        router_weights: ``[num_tokens, top_k]`` float32, or bfloat16, which is
            widened. With ``combine_mode="reduced"`` None:
            :func:`call_ep_dispatch_async` takes them.
        input_tokens: With ``fused_shared_expert`` or ``combine_mode="reduced"``,
            the expert rows that :func:`call_ep_combine_async` took. Added here
            are the shared expert's, row ``t`` for token ``t``, and with reduced
            combine those of this rank's own tokens. Otherwise None.

    Returns:
        ``[num_tokens, hidden_size]`` of ``config.combine_dtype``: per token the
        sum, in order of choice, of weight times expert row, in float32 by
        fused multiply-add, rounded; if the shared expert is fused then plus its
        row, and rounded again, as MAX does. Choices of ``-1`` add nothing. With
        ``combine_mode="reduced"`` the sum of the rows of each other rank was
        rounded to ``partial_dtype`` by itself, and these partial sums are added
        to the own rank's in order of rank.
    """
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    weights = _router_weights(config, router_weights, num_tokens, device, "combine")
    check_unsent_rows(config, input_tokens, device)
    values = [weights, recv_buf_ptrs, recv_count_ptrs]
    parameters = {"shares_gpu": config.ranks_per_gpu > 1}
    if input_tokens is not None:
        values.insert(0, _flat_rows(config, input_tokens))
        parameters["fused_shared_expert"] = config.fused_shared_expert
    return _call(
        "combine_wait" if input_tokens is None else "combine_wait.rows",
        config,
        atomic_counter,
        values,
        _combine_parameters(config) | parameters,
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
    router_weights: TensorValue | None,
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
    weights = _router_weights(config, router_weights, num_tokens, device, "combine")
    return _call(
        "combine",
        config,
        atomic_counter,
        [
            _flat_rows(config, input_tokens),
            _flat_rows(config, src_info),
            weights,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        {
            **_combine_parameters(config),
            "fused_shared_expert": config.fused_shared_expert,
        },
        [TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)],
    )[0]


def call_ep_watch(
    phase: str,
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
) -> TensorValue:
    """Measures how long a rank waits for each peer; changes nothing.

    Belongs between the async op of a direction and its wait. MAX has no such op. Its
    waiting is bounded by ``EPConfig.timeout_s``, and that of the wait behind it again:
    a peer that is late by less than both is no error.

    Args:
        phase: ``"dispatch"`` or ``"combine"``.
        atomic_counter: This rank's counters.
        recv_buf_ptrs: Receive buffers of that direction, ``[n_ranks]`` uint64.
        recv_count_ptrs: Counts, likewise.
        config: The group.

    Returns:
        ``[n_ranks]`` int64: nanoseconds from the begin of the watch until all was
        there that the peer sends (on GPUs with dispatch its counts, with reduced
        combine the first bytes of each of its sums), -1 if time was up before.

    Raises:
        ValueError: If there is no such phase, or a buffer does not fit.
    """
    check_phase(phase)
    check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    return _call(
        "watch",
        config,
        atomic_counter,
        [recv_buf_ptrs, recv_count_ptrs],
        _combine_parameters(config) | {"is_combine": phase == "combine"},
        [TensorType(DType.int64, [config.n_ranks], atomic_counter.device)],
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
    router_weights: list[TensorValue] | None = None,
    tokens_are_sent: bool = False,
) -> list[tuple[TensorValue, ...]]:
    """Adds the dispatch of all local ranks: every send, then every wait.

    The arguments are lists over the local ranks, but for ``tokens_are_sent``,
    which is for all of them.

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
                router_weights[i] if router_weights else None,
                tokens_are_sent,
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
            router_weights[i] if router_weights else None,
            tokens_are_sent,
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
    router_weights: list[TensorValue] | None,
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
                router_weights[i] if router_weights else None,
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
            router_weights[i] if router_weights else None,
            input_tokens[i] if config.adds_unsent_rows else None,
        )
        for i in local_ranks
    ]
