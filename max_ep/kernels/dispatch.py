# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts: dispatch in two ops, and in one."""

from __future__ import annotations

from max.graph import BufferValue, Dim, TensorValue

from ..checks import check_buffers, check_send, refuse_if_in_turn
from ..config import EPConfig
from .op_call import call_op, call_wait
from .op_values import (
    DISPATCH_SENDS_ALL,
    PHASES_DO_NOT_OVERLAP,
    format_parameters,
    format_suffix,
    recv_outputs,
    recv_parameters,
    recv_types,
    scales_for_op,
    weights_for_op,
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
        router_weights: With ``combine_mode="sums"``, ``[n_tokens, top_k]``
            float32, or bfloat16, which is widened. Otherwise None:
            :func:`call_ep_combine_wait` takes them.

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
    device = atomic_counter.device
    check_send(config, input_tokens, topk_ids, device)
    scales = scales_for_op(config, input_scales, device)
    weights = weights_for_op(
        config, router_weights, input_tokens.shape[0], device, "dispatch"
    )
    call_op(
        "dispatch_async" + format_suffix(config),
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
            **format_parameters(config),
            "has_input_scales": input_scales is not None,
            "fused_shared_expert": config.fused_shared_expert,
            **DISPATCH_SENDS_ALL,
            **PHASES_DO_NOT_OVERLAP,
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
    results = call_wait(
        "dispatch_wait" + format_suffix(config),
        config,
        atomic_counter,
        [recv_buf_ptrs, recv_count_ptrs],
        format_parameters(config) | recv_parameters(config),
        recv_types(config, atomic_counter.device),
    )
    return recv_outputs(config, results)


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
    scales = scales_for_op(config, input_scales, device)
    weights = weights_for_op(
        config, router_weights, input_tokens.shape[0], device, "dispatch"
    )
    results = call_op(
        "dispatch" + format_suffix(config),
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
            **format_parameters(config),
            **recv_parameters(config),
            "has_input_scales": input_scales is not None,
            **DISPATCH_SENDS_ALL,
        },
        recv_types(config, device),
    )
    return recv_outputs(config, results)
