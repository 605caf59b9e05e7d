# SPDX-License-Identifier: Apache-2.0
"""Graph builders of single ops: ``call_ep_*``, as in MAX's ``ep_kernels``.

They keep no state. ``EPBatchManager`` calls them and checks the order of the calls; use
these only where it does not fit. All take the ``config`` of the group and
``atomic_counter``, this rank's counters. ``send_buf_ptrs``, ``recv_buf_ptrs`` and
``recv_count_ptrs`` are the addresses of all ranks' send buffers, receive buffers and
counts of one direction, ``[n_ranks]`` uint64 on the host. They raise a ``TypeError``
for a wrong dtype, and a ``ValueError`` for a wrong shape, device or combination.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, Graph, TensorType, TensorValue
from max.graph import ops as graph_ops

from ..config import EPConfig
from ..extension import load_ops
from ..limits import NUM_GROUPS
from . import ops
from .checks import (
    Tokens,
    check_buffers,
    check_phase,
    check_send,
    check_value,
    refuse_if_in_turn,
    rows_for_op,
    scales_for_op,
    tokens_for_op,
    weights_for_op,
)


def call_ep_init(
    atomic_counter_group_0: BufferValue,
    atomic_counter_group_1: BufferValue,
    config: EPConfig,
    *,
    setup: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Initializes a rank's region and counters; nobody may use them yet.

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
    input_tokens: Tokens,
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
            ``n_tokens <= config.max_tokens_per_rank``. With ``tokens_are_quantized`` a
            pair of values and scales, row by row, of the dtypes that dispatch delivers.
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
        config, atomic_counter, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    )
    given = _given_to_dispatch(
        config, input_tokens, topk_ids, input_scales, router_weights, atomic_counter
    )
    scaled = {"has_input_scales": input_scales is not None}
    ops.call_op("dispatch_async", config, atomic_counter, given + pointers, **scaled)


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
        int32 (token, choice). Rows from ``row_offsets[-1]`` on are undefined.

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
        Rows after ``recv_counts`` are undefined.

        With :class:`AllGatherConfig`, behind ``output_tokens``: the routing map
        ``[n_output_rows, router_top_k]`` int32, probabilities of that shape, float32,
        and the number of tokens of all ranks, ``[1]`` int32. After the last token
        the routing map is -1, and probabilities are 0.
    """
    if num_tokens is not None:
        raise ValueError("num_tokens is for all-reduce mode, which max_ep lacks")
    pointers = check_buffers(config, atomic_counter, recv_buf_ptrs, recv_count_ptrs)
    types = ops.dispatch_types(config, atomic_counter.device)
    results = ops.call_op("dispatch_wait", config, atomic_counter, pointers, types)
    return ops.dispatch_results(config, results)


def call_ep_dispatch(
    input_tokens: Tokens,
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
        config, atomic_counter, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    )
    given = _given_to_dispatch(
        config, input_tokens, topk_ids, input_scales, router_weights, atomic_counter
    )
    results = ops.call_op(
        "dispatch",
        config,
        atomic_counter,
        given + pointers,
        ops.dispatch_types(config, atomic_counter.device),
        has_input_scales=input_scales is not None,
    )
    return ops.dispatch_results(config, results)


def _given_to_dispatch(
    config: EPConfig,
    input_tokens: Tokens,
    topk_ids: TensorValue,
    input_scales: TensorValue | None,
    router_weights: TensorValue | None,
    atomic_counter: BufferValue,
) -> list[TensorValue]:
    """Checks what a dispatch sends; returns it as its ops take it."""
    device = atomic_counter.device
    input_tokens = tokens_for_op(config, input_tokens, device)
    check_send(config, input_tokens, topk_ids, device)
    scales = scales_for_op(config, input_scales, device)
    n_tokens = input_tokens.shape[0]
    weights = weights_for_op(config, router_weights, n_tokens, device, "dispatch")
    return [input_tokens, topk_ids, scales, weights]


def call_distributed_ep_dispatch(
    input_tokens: Sequence[Tokens],
    topk_ids: Sequence[TensorValue],
    atomic_counters: Sequence[BufferValue],
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    input_scales: Sequence[TensorValue] | None = None,
    router_weights: Sequence[TensorValue] | None = None,
) -> list[tuple[TensorValue, ...]]:
    """Adds the dispatch of all local ranks, in the form that can run.

    The arguments are lists over the local ranks.

    Returns:
        The results of :func:`call_ep_dispatch_wait`, one tuple a rank.
    """
    pointers = (send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs)
    none = [None] * len(atomic_counters)
    given = zip(input_tokens, topk_ids, atomic_counters)
    more = zip(input_scales or none, router_weights or none)
    if not config.runs_ranks_in_turn:
        return [
            call_ep_dispatch(*of_rank, *pointers, config, *optional)
            for of_rank, optional in zip(given, more)
        ]
    for of_rank, optional in zip(given, more):
        call_ep_dispatch_async(*of_rank, *pointers, config, *optional)
    return [
        call_ep_dispatch_wait(counter, *pointers[1:], config)
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
            this rank's last dispatch put them. Those of a fused shared expert, and
            on GPUs those of this rank's own tokens, are not sent:
            :func:`call_ep_combine_wait` reads them where they are.
        src_info: ``src_info`` from that dispatch.
    """
    pointers = check_buffers(
        config, atomic_counter, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    )
    rows = rows_for_op(config, input_tokens, src_info, atomic_counter.device)
    ops.call_op("combine_async", config, atomic_counter, rows + pointers)


def call_ep_combine_wait(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens: Dim,
    router_weights: TensorValue | None,
    input_tokens: TensorValue,
) -> TensorValue:
    """Adds "complete combine" to the current graph.

    Args:
        num_tokens: Tokens that this rank dispatched.
        router_weights: ``[num_tokens, top_k]`` float32, or bfloat16, which is
            widened. With ``combine_mode="sums"`` None:
            :func:`call_ep_dispatch_async` takes them.
        input_tokens: The expert rows that :func:`call_ep_combine_async` took. This op
            reads those that are not sent: a fused shared expert's, row ``t`` for
            token ``t``, and those that this rank's experts made of its own tokens.

    Returns:
        ``[num_tokens, hidden_size]`` of ``config.combine_dtype``: for each token the
        sum, in order of choice, of weight times expert row, in float32 by fused
        multiply-add, rounded. A fused shared expert's row is added to that, and the
        result is rounded again, as MAX does. Choices of ``-1`` add nothing. With
        ``combine_mode="sums"`` the sum of the rows of each other rank is rounded to
        ``partial_dtype`` by itself; these partial sums are added to the own rank's
        in order of rank.
    """
    pointers = check_buffers(config, atomic_counter, recv_buf_ptrs, recv_count_ptrs)
    device = atomic_counter.device
    weights = weights_for_op(config, router_weights, num_tokens, device, "combine")
    values = [*rows_for_op(config, input_tokens, None, device), weights, *pointers]
    types = [ops.combine_type(config, num_tokens, device)]
    return ops.call_op("combine_wait", config, atomic_counter, values, types)[0]


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
        config, atomic_counter, send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    )
    device = atomic_counter.device
    rows = rows_for_op(config, input_tokens, src_info, device)
    weights = weights_for_op(config, router_weights, num_tokens, device, "combine")
    types = [ops.combine_type(config, num_tokens, device)]
    values = [*rows, weights, *pointers]
    return ops.call_op("combine", config, atomic_counter, values, types)[0]


def call_distributed_ep_combine(
    input_tokens: Sequence[TensorValue],
    src_info: Sequence[TensorValue],
    atomic_counters: Sequence[BufferValue],
    send_buf_ptrs: TensorValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens_per_device: Sequence[Dim],
    router_weights: Sequence[TensorValue] | None,
) -> list[TensorValue]:
    """Adds the combine of all local ranks, in the form that can run.

    The arguments are lists over the local ranks.

    Returns:
        The results of :func:`call_ep_combine_wait`, one a rank.
    """
    pointers = (send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs)
    given = list(zip(input_tokens, src_info, atomic_counters))
    weights = router_weights or [None] * len(given)
    rest = zip(num_tokens_per_device, weights)
    if not config.runs_ranks_in_turn:
        return [
            call_ep_combine(*of_rank, *pointers, config, *more)
            for of_rank, more in zip(given, rest)
        ]
    for of_rank in given:
        call_ep_combine_async(*of_rank, *pointers, config)
    return [
        call_ep_combine_wait(counter, *pointers[1:], config, *more, rows)
        for (rows, _, counter), more in zip(given, rest)
    ]


def call_ep_degraded(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    topk_ids: TensorValue,
    router_weights: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Flags the tokens whose result lacks an expert because its rank is masked.

    It belongs behind the combine of these tokens, before the next dispatch. Needs
    ``on_timeout="mask"``. MAX has no such op.

    Args:
        topk_ids: Those that dispatch took.
        router_weights: The weights of these choices, float32 or bfloat16.

    Returns:
        ``degraded`` ``[n_tokens]`` bool: whether a choice of the token is on a masked
        rank; ``live_share`` ``[n_tokens]`` float32: the part of the token's weights
        that its other choices have. A result divided by it is renormalized.
    """
    if not config.masks:
        raise ValueError("ep_degraded needs EPConfig.on_timeout='mask'")
    pointers = check_buffers(config, atomic_counter, recv_buf_ptrs, recv_count_ptrs)
    device, n_tokens = atomic_counter.device, topk_ids.shape[0]
    check_value(topk_ids, "topk_ids", DType.int32, [None, config.top_k], device)
    dtypes, shape = (DType.float32, DType.bfloat16), [None, config.top_k]
    check_value(router_weights, "router_weights", dtypes, shape, device)
    weights = graph_ops.cast(router_weights, DType.float32)
    types = [TensorType(t, [n_tokens], device) for t in (DType.bool, DType.float32)]
    values = [topk_ids, weights, *pointers]
    degraded, share = ops.call_op("degraded", config, atomic_counter, values, types)
    return degraded, share


def call_ep_dropped(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    topk_ids: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Counts what did not fit into ``EPConfig.max_output_rows``.

    It belongs behind the combine of these tokens, before the next dispatch. MAX has no
    such op.

    Args:
        topk_ids: Those that dispatch took, ``[n_tokens, top_k]``.

    Returns:
        ``of_tokens`` ``[n_tokens]`` int32: choices of each token whose row is not in
        its result; ``of_experts`` ``[n_local_experts]`` int32: rows of each that this
        rank dropped.
    """
    if config.max_output_rows is None:
        raise ValueError("ep_dropped needs EPConfig.max_output_rows")
    pointers = check_buffers(config, atomic_counter, recv_buf_ptrs, recv_count_ptrs)
    device, shape = atomic_counter.device, [None, config.top_k]
    check_value(topk_ids, "topk_ids", DType.int32, shape, device)
    numbers = topk_ids.shape[0], config.n_local_experts
    types = [TensorType(DType.int32, [n], device) for n in numbers]
    values = [topk_ids, *pointers]
    of_tokens, of_experts = ops.call_op(
        "dropped", config, atomic_counter, values, types
    )
    return of_tokens, of_experts


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
    if config.masks:
        raise ValueError(
            "ep_watch with on_timeout='mask': a rank that watches gives no heartbeat, "
            "and its peers would mask it; watch with on_timeout='raise'"
        )
    pointers = check_buffers(config, atomic_counter, recv_buf_ptrs, recv_count_ptrs)
    types = [TensorType(DType.int64, [config.exchange_ranks], atomic_counter.device)]
    which = {"is_combine": phase == "combine"}
    return ops.call_op("watch", config, atomic_counter, pointers, types, **which)[0]
