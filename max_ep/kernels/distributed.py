# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of all local ranks, in the form that can run."""

from __future__ import annotations

from max.graph import BufferValue, Dim, TensorValue

from ..config import EPConfig
from .combine import call_ep_combine, call_ep_combine_async, call_ep_combine_wait
from .dispatch import call_ep_dispatch, call_ep_dispatch_async, call_ep_dispatch_wait


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
                router_weights[i] if router_weights else None,
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
