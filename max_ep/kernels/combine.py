# SPDX-License-Identifier: Apache-2.0
"""Expert rows back to their tokens: combine in two ops, and in one."""

from __future__ import annotations

from max.graph import BufferValue, Dim, TensorValue

from ..checks import check_buffers, check_rows, check_unsent_rows, refuse_if_in_turn
from ..config import EPConfig
from .op_call import call_op, call_wait
from .op_values import (
    PHASES_DO_NOT_OVERLAP,
    combine_parameters,
    flat_rows,
    result_type,
    weights_for_op,
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

    With ``combine_mode="sums"`` the weighted rows of each token are added
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
    call_op(
        "combine_async",
        config,
        atomic_counter,
        [
            flat_rows(config, input_tokens),
            flat_rows(config, src_info),
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        combine_parameters(config) | PHASES_DO_NOT_OVERLAP,
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
            widened. With ``combine_mode="sums"`` None:
            :func:`call_ep_dispatch_async` takes them.
        input_tokens: With ``fused_shared_expert`` or ``combine_mode="sums"``,
            the expert rows that :func:`call_ep_combine_async` took. Added here
            are the shared expert's, row ``t`` for token ``t``, and with sums
            those of this rank's own tokens. Otherwise None.

    Returns:
        ``[num_tokens, hidden_size]`` of ``config.combine_dtype``: per token the
        sum, in order of choice, of weight times expert row, in float32 by
        fused multiply-add, rounded; if the shared expert is fused then plus its
        row, and rounded again, as MAX does. Choices of ``-1`` add nothing. With
        ``combine_mode="sums"`` the sum of the rows of each other rank was
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
    weights = weights_for_op(config, router_weights, num_tokens, device, "combine")
    check_unsent_rows(config, input_tokens, device)
    values = [weights, recv_buf_ptrs, recv_count_ptrs]
    parameters = combine_parameters(config)
    name = "combine_wait"
    if input_tokens is not None:
        name += ".rows"
        values.insert(0, flat_rows(config, input_tokens))
        parameters["fused_shared_expert"] = config.fused_shared_expert
    types = [result_type(config, num_tokens, device)]
    return call_wait(name, config, atomic_counter, values, parameters, types)[0]


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
    weights = weights_for_op(config, router_weights, num_tokens, device, "combine")
    return call_op(
        "combine",
        config,
        atomic_counter,
        [
            flat_rows(config, input_tokens),
            flat_rows(config, src_info),
            weights,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
        ],
        {
            **combine_parameters(config),
            "fused_shared_expert": config.fused_shared_expert,
        },
        [result_type(config, num_tokens, device)],
    )[0]
