# SPDX-License-Identifier: Apache-2.0
"""Graph builders of single ops: ``call_ep_*``, as in MAX's ``ep_kernels``.

They keep no state. ``EPBatchManager`` builds on them and checks the order of the
calls; use these only where it does not fit. All take the ``config`` of the group,
``atomic_counter``, this rank's counters, and of one direction ``send_buf_ptrs``,
``recv_buf_ptrs`` and ``recv_count_ptrs``: the addresses of all ranks' send buffers,
receive buffers and counts, ``[n_ranks]`` uint64 on the host. They raise a
``TypeError`` for a dtype that does not fit, and a ``ValueError`` for a shape, a device
or a combination.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, Graph, TensorType, TensorValue
from max.graph import ops as graph_ops

from ..config import EPConfig
from ..extension import load_ops
from ..limits import NUM_GROUPS
from . import ops
from .checks import (
    check_buffers,
    check_phase,
    check_rows,
    check_send,
    check_unsent_rows,
    refuse_if_in_turn,
    scales_for_op,
    weights_for_op,
)


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
        setup: ``[setup_words]`` int64 on the host, as ``setup.mojo`` lists them;
            :class:`EPCommInitializer` fills it.

    Returns:
        ``device_ptrs`` ``[NUM_GROUPS, 3]`` uint64 (send, recv and count buffer
        of dispatch and of combine) and ``my_rank`` ``[1]`` int32.
    """
    load_ops(Graph.current)
    cpu = DeviceRef.CPU()
    results = graph_ops.inplace_custom(
        "max_ep.init",
        device=atomic_counter_group_0.device,
        values=[atomic_counter_group_0, atomic_counter_group_1, setup],
        out_types=[
            TensorType(DType.uint64, [NUM_GROUPS, 3], cpu),
            TensorType(DType.int32, [1], cpu),
        ],
    )
    return results[0].tensor, results[1].tensor


# ---------------------------------------------------------------------- dispatch


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
        topk_ids: ``[n_tokens, top_k]`` int32 in ``[-1, n_experts)``. Those of one token
            are distinct; ``-1`` means "no expert". Others are dropped and counted, and
            the op reports them. With :class:`AllGatherConfig`,
            ``[n_tokens, router_top_k]``, any int32.
        input_scales: ``[1]`` or ``[n_experts]`` float32: factor of a token, in float32,
            before it is encoded for an expert. Needs ``protocol="by_expert"`` and no
            ``fused_shared_expert``.
        router_weights: With ``combine_mode="sums"``, ``[n_tokens, top_k]`` float32, or
            bfloat16, which is widened. Otherwise None: :func:`call_ep_combine_wait`
            takes them.
    """
    pointers = check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    given = _given_to_dispatch(
        config, input_tokens, topk_ids, input_scales, router_weights, atomic_counter
    )
    ops.call_op(
        "dispatch_async",
        config,
        atomic_counter,
        given + pointers,
        ops.dispatch_parameters(config)
        | {"has_input_scales": input_scales is not None},
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
        num_tokens: For MAX's all-reduce mode; must be None.

    Returns:
        ``output_tokens`` ``[max_recv_tokens, hidden_size]``, for FP8
        ``output_scales`` ``[hidden_size / 128, max_recv_tokens]`` float32,
        ``row_offsets`` ``[n_local_experts + 1]`` uint32, ``expert_ids``
        ``[n_local_experts]`` int32, ``src_info`` ``[max_recv_tokens, 2]``
        int32 (token, choice). Rows behind ``row_offsets[-1]`` are undefined.

        With ``fused_shared_expert`` there are ``max_tokens_per_rank`` more rows. This
        rank's own tokens come first, in the wire's format, with choice -1. They are
        group 0 of ``row_offsets`` ``[n_local_experts + 2]`` and ``expert_ids``
        ``[n_local_experts + 1]``; local expert ``e`` is group ``e + 1``.

        With ``output_layout="padded"`` and ``capacity`` for
        ``config.expert_capacity``: ``output_tokens`` ``[n_local_experts,
        capacity, hidden_size]``, for FP8 ``output_scales`` ``[n_local_experts,
        hidden_size / 128, capacity]`` float32, ``recv_counts``
        ``[n_local_experts]`` int32, ``src_info`` ``[n_local_experts, capacity,
        2]`` int32 and ``recv_ranges`` ``[n_local_experts, n_ranks, 2]`` int32:
        of each source rank's rows the first, within the expert's, and how many.
        Rows behind ``recv_counts`` are undefined.

        With :class:`AllGatherConfig`, behind ``output_tokens``: the routing map
        ``[n_output_rows, router_top_k]`` int32, probabilities of that shape, float32,
        and the number of tokens of all ranks, ``[1]`` int32. Behind the last token
        the routing map is -1, and probabilities are 0.
    """
    if num_tokens is not None:
        raise ValueError("num_tokens is for all-reduce mode, which max_ep lacks")
    pointers = check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    results = ops.call_op(
        "dispatch_wait",
        config,
        atomic_counter,
        pointers,
        ops.dispatch_parameters(config),
        ops.dispatch_types(config, atomic_counter.device),
    )
    return ops.dispatch_results(config, results)


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
    pointers = check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    given = _given_to_dispatch(
        config, input_tokens, topk_ids, input_scales, router_weights, atomic_counter
    )
    results = ops.call_op(
        "dispatch",
        config,
        atomic_counter,
        given + pointers,
        ops.dispatch_parameters(config)
        | {"has_input_scales": input_scales is not None},
        ops.dispatch_types(config, atomic_counter.device),
    )
    return ops.dispatch_results(config, results)


def _given_to_dispatch(
    config: EPConfig,
    input_tokens: TensorValue,
    topk_ids: TensorValue,
    input_scales: TensorValue | None,
    router_weights: TensorValue | None,
    atomic_counter: BufferValue,
) -> list[TensorValue]:
    """Checks what a dispatch sends; returns it as its ops take it."""
    device = atomic_counter.device
    check_send(config, input_tokens, topk_ids, device)
    scales = scales_for_op(config, input_scales, device)
    n_tokens = input_tokens.shape[0]
    weights = weights_for_op(config, router_weights, n_tokens, device, "dispatch")
    return [input_tokens, topk_ids, scales, weights]


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
    """Adds the dispatch of all local ranks, in the form that can run.

    The arguments are lists over the local ranks.

    Returns:
        The results of :func:`call_ep_dispatch_wait`, one tuple a rank.
    """
    in_turn = config.runs_ranks_in_turn
    call = call_ep_dispatch_async if in_turn else call_ep_dispatch
    results = [
        call(
            input_tokens[i],
            topk_ids[i],
            counter,
            send_buf_ptrs,
            recv_buf_ptrs,
            recv_count_ptrs,
            config,
            input_scales[i] if input_scales else None,
            router_weights[i] if router_weights else None,
        )
        for i, counter in enumerate(atomic_counters)
    ]
    if not in_turn:
        return results
    return [
        call_ep_dispatch_wait(counter, recv_buf_ptrs, recv_count_ptrs, config)
        for counter in atomic_counters
    ]


# ----------------------------------------------------------------------- combine


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

    With ``combine_mode="sums"`` the weighted rows of each token are added first, and
    one partial sum of them is sent.

    Args:
        input_tokens: Expert rows, of the shape of ``output_tokens`` (see
            :func:`call_ep_dispatch_wait`) and of ``config.combine_dtype``, where
            this rank's last dispatch put them. Those of a fused shared expert
            are not sent: :func:`call_ep_combine_wait` adds them.
        src_info: ``src_info`` from that dispatch.
    """
    pointers = check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    check_rows(config, input_tokens, src_info, atomic_counter.device)
    rows = [ops.flat_rows(config, value) for value in (input_tokens, src_info)]
    ops.call_op(
        "combine_async",
        config,
        atomic_counter,
        rows + pointers,
        ops.combine_parameters(config),
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
        num_tokens: Tokens that this rank dispatched.
        router_weights: ``[num_tokens, top_k]`` float32, or bfloat16, which is
            widened. With ``combine_mode="sums"`` None:
            :func:`call_ep_dispatch_async` takes them.
        input_tokens: With ``fused_shared_expert`` or ``combine_mode="sums"``, the
            expert rows that :func:`call_ep_combine_async` took. This op adds the
            shared expert's, row ``t`` for token ``t``, and with sums those of this
            rank's own tokens. Otherwise None.

    Returns:
        ``[num_tokens, hidden_size]`` of ``config.combine_dtype``: for each token the
        sum, in order of choice, of weight times expert row, in float32 by fused
        multiply-add, rounded. A fused shared expert's row is added to that, and the
        result is rounded again, as MAX does. Choices of ``-1`` add nothing. With
        ``combine_mode="sums"`` the sum of the rows of each other rank is rounded to
        ``partial_dtype`` by itself; these partial sums are added to the own rank's
        in order of rank.
    """
    pointers = check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    weights = weights_for_op(config, router_weights, num_tokens, device, "combine")
    check_unsent_rows(config, input_tokens, device)
    rows = ops.no_rows(config, device) if input_tokens is None else input_tokens
    return ops.call_op(
        "combine_wait",
        config,
        atomic_counter,
        [ops.flat_rows(config, rows), weights, *pointers],
        ops.combine_parameters(config),
        [ops.combine_type(config, num_tokens, device)],
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
    pointers = check_buffers(
        config,
        atomic_counter,
        send_buf_ptrs=send_buf_ptrs,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    device = atomic_counter.device
    check_rows(config, input_tokens, src_info, device)
    weights = weights_for_op(config, router_weights, num_tokens, device, "combine")
    rows = [ops.flat_rows(config, value) for value in (input_tokens, src_info)]
    return ops.call_op(
        "combine",
        config,
        atomic_counter,
        [*rows, weights, *pointers],
        ops.combine_parameters(config),
        [ops.combine_type(config, num_tokens, device)],
    )[0]


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
    """Adds the combine of all local ranks, in the form that can run.

    The arguments are lists over the local ranks.

    Returns:
        The results of :func:`call_ep_combine_wait`, one a rank.
    """
    pointers = (send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs)
    local_ranks = range(len(atomic_counters))
    given = [(input_tokens[i], src_info[i], atomic_counters[i]) for i in local_ranks]
    rest = [
        (num_tokens_per_device[i], router_weights[i] if router_weights else None)
        for i in local_ranks
    ]
    if not config.runs_ranks_in_turn:
        return [
            call_ep_combine(*given[i], *pointers, config, *rest[i]) for i in local_ranks
        ]
    for i in local_ranks:
        call_ep_combine_async(*given[i], *pointers, config)
    return [
        call_ep_combine_wait(
            atomic_counters[i],
            *pointers[1:],
            config,
            *rest[i],
            input_tokens[i] if config.adds_unsent_rows else None,
        )
        for i in local_ranks
    ]


# --------------------------------------------------------------------- measuring


def call_ep_watch(
    phase: str,
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
) -> TensorValue:
    """Measures how long a rank waits for each peer; changes nothing.

    It belongs between the async op of a direction and its wait. MAX has no such op.
    ``EPConfig.timeout_s`` bounds its waiting, and again that of the wait behind it: a
    peer that is late by less than both is no error.

    Args:
        phase: ``"dispatch"`` or ``"combine"``.

    Returns:
        ``[n_ranks]`` int64: nanoseconds from the begin of the watch until all was
        there that the peer sends (on GPUs with dispatch its counts, with sums the
        first bytes of each of its sums), -1 if time was up before.
    """
    check_phase(phase)
    pointers = check_buffers(
        config,
        atomic_counter,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
    )
    return ops.call_op(
        "watch",
        config,
        atomic_counter,
        pointers,
        ops.combine_parameters(config) | {"is_combine": phase == "combine"},
        [TensorType(DType.int64, [config.n_ranks], atomic_counter.device)],
    )[0]
