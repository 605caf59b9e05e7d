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
from typing import Any

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, Dim, TensorType, TensorValue

from ..config import EPConfig
from ..extension import add_op
from ..limits import NUM_GROUPS
from . import ops
from .checks import refuse_if_in_turn
from .ops import Tokens


def call_ep_init(
    atomic_counter_group_0: BufferValue,
    atomic_counter_group_1: BufferValue,
    config: EPConfig,
    *,
    setup: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Initializes a rank's region and counters; nobody may use them yet.

    ``setup`` is ``[setup_words]`` int64 on the host, ``SETUP_WORDS`` of ``setup.mojo``;
    :class:`EPCommInitializer` fills it. Returns ``device_ptrs`` ``[NUM_GROUPS, 3]``
    uint64 (send, recv and count buffer of dispatch and of combine) and ``my_rank``
    ``[1]`` int32.
    """
    values = [atomic_counter_group_0, atomic_counter_group_1, setup]
    device_ptrs = TensorType(DType.uint64, [NUM_GROUPS, 3], DeviceRef.CPU())
    types = [device_ptrs, TensorType(DType.int32, [1], DeviceRef.CPU())]
    return tuple(add_op("init", atomic_counter_group_0.device, values, types))


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
            the op reports them. In an all-gather ``[n_tokens, router_top_k]``, any
            int32.
        input_scales: ``[1]`` or ``[n_experts]`` float32: factor of a token, in float32,
            before it is encoded for an expert. Needs ``protocol="by_expert"`` and no
            ``fused_shared_expert``.
        router_weights: With ``combine_mode="sums"``, ``[n_tokens, top_k]`` float32, or
            bfloat16, which is widened. Otherwise None: :func:`call_ep_combine_wait`
            takes them.
    """
    given = input_tokens, topk_ids, input_scales, router_weights
    pointers = send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    dispatch("dispatch_async", config, atomic_counter, pointers, given)


def call_ep_dispatch_wait(
    atomic_counter: BufferValue,
    recv_buf_ptrs: TensorValue,
    recv_count_ptrs: TensorValue,
    config: EPConfig,
    num_tokens: Dim | None = None,
) -> tuple[TensorValue, ...]:
    """Adds "complete receiving" to the current graph.

    Args:
        num_tokens: For MAX's all-reduce mode; must be None, also with
            ``config.use_allreduce``.

    Returns:
        ``output_tokens`` ``[n_output_rows, hidden_size]``, where dispatch quantizes
        their scales (docs/formats.md has the layouts), ``row_offsets``
        ``[n_local_experts + 1]`` uint32, ``expert_ids`` ``[n_local_experts]`` int32,
        ``src_info`` ``[n_output_rows, 2]`` int32 (token, choice). Rows from
        ``row_offsets[-1]`` on are undefined.

        With ``fused_shared_expert`` this rank's own tokens come first, in the wire's
        format, with choice -1, as group 0 of ``row_offsets`` ``[n_local_experts + 2]``
        and ``expert_ids`` ``[n_local_experts + 1]``; local expert ``e`` is group
        ``e + 1``.

        With ``output_layout="padded"``: ``output_tokens`` ``[n_local_experts,
        expert_capacity, hidden_size]``, scales, ``recv_counts`` ``[n_local_experts]``
        int32, ``src_info`` ``[n_local_experts, expert_capacity, 2]`` and
        ``recv_ranges`` ``[n_local_experts, n_ranks, 2]`` int32: of each source rank's
        rows the first, within the expert's, and how many. Rows after ``recv_counts``
        are undefined.

        In an all-gather, behind ``output_tokens``: routing map
        ``[n_output_rows, router_top_k]`` int32, probabilities of that shape, float32
        (after the last token -1 and 0), and the tokens of all ranks, ``[1]`` int32.
    """
    if num_tokens is not None:
        raise ValueError(
            f"num_tokens={num_tokens}: EPConfig.use_allreduce, max_ep's all-reduce "
            "mode, needs none; pass None"
        )
    pointers = recv_buf_ptrs, recv_count_ptrs
    return dispatch("dispatch_wait", config, atomic_counter, pointers)


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
    given = input_tokens, topk_ids, input_scales, router_weights
    pointers = send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    return dispatch("dispatch", config, atomic_counter, pointers, given)


def dispatch(
    op: str,
    config: EPConfig,
    counter: BufferValue,
    pointers: Sequence[TensorValue],
    given: tuple[Any, ...] = (),
) -> tuple[TensorValue, ...]:
    """Adds the op in a form that sends what is given, or receives, or both."""
    if op == "dispatch":
        refuse_if_in_turn(config, op)
    device = counter.device
    addresses = ops.check_buffers(config, counter, *pointers)
    if given:
        values = ops.dispatch_inputs(config, *given, device)
    else:
        nothing = ops.placeholder(device, 1, 1)
        ids = ops.placeholder(device, 1, 1, dtype=DType.int32)
        values = [nothing, ids, ops.placeholder(device, 0), nothing]
        addresses.insert(0, addresses[0])  # nothing is sent
    types = ops.dispatch_types(config, device)
    if op == "dispatch_async":
        types = [TensorType(kind.dtype, [0] * kind.rank, device) for kind in types]
    more = {"op": op, "has_input_scales": bool(given) and given[2] is not None}
    values += addresses
    results = ops.call_op("dispatch", config, counter, values, types, **more)
    return () if op == "dispatch_async" else ops.dispatch_results(config, results)


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

    Takes and returns lists over the local ranks.
    """
    receive_pointers = recv_buf_ptrs, recv_count_ptrs
    where = send_buf_ptrs, *receive_pointers, config
    none = [None] * len(atomic_counters)
    optional = input_scales or none, router_weights or none
    given = zip(input_tokens, topk_ids, atomic_counters, *optional)
    if not config.runs_ranks_in_turn:
        lists = input_tokens, topk_ids, router_weights
        ops.start_together(config, atomic_counters, *lists)
        return [
            call_ep_dispatch(tokens, ids, counter, *where, *more)
            for tokens, ids, counter, *more in given
        ]
    for tokens, ids, counter, *more in given:
        call_ep_dispatch_async(tokens, ids, counter, *where, *more)
    return [
        call_ep_dispatch_wait(counter, *receive_pointers, config)
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
    pointers = send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    _combine("combine_async", config, atomic_counter, pointers, input_tokens, src_info)


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
    given = input_tokens, None, num_tokens, router_weights
    pointers = recv_buf_ptrs, recv_count_ptrs
    return _combine("combine_wait", config, atomic_counter, pointers, *given)


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
    refuse_if_in_turn(config, "combine")
    given = input_tokens, src_info, num_tokens, router_weights
    pointers = send_buf_ptrs, recv_buf_ptrs, recv_count_ptrs
    return _combine("combine", config, atomic_counter, pointers, *given)


def _combine(
    op: str,
    config: EPConfig,
    counter: BufferValue,
    pointers: Sequence[TensorValue],
    input_tokens: TensorValue,
    src_info: TensorValue | None = None,
    num_tokens: Dim = 0,
    router_weights: TensorValue | None = None,
) -> TensorValue:
    """Adds the op in a form that sends rows, gives sums, or does both."""
    device = counter.device
    addresses = ops.check_buffers(config, counter, *pointers)
    values = ops.rows_for_op(config, input_tokens, src_info, device)
    if op == "combine_wait":
        values.append(ops.placeholder(device, 1, 1, dtype=DType.int32))
        addresses.insert(0, addresses[0])  # nothing is sent
    if op == "combine_async":
        weights = ops.placeholder(device, 1, 1)
    else:
        weights = ops.weights_for_op(
            config, router_weights, num_tokens, device, "combine"
        )
    sums = TensorType(config.combine_dtype, [num_tokens, config.hidden_size], device)
    values += [weights, *addresses]
    return ops.call_op("combine", config, counter, values, [sums], op=op)[0]


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

    Takes and returns lists over the local ranks.
    """
    receive_pointers = recv_buf_ptrs, recv_count_ptrs
    where = send_buf_ptrs, *receive_pointers, config
    weights = router_weights or [None] * len(atomic_counters)
    of_sums = num_tokens_per_device, weights
    given = list(zip(input_tokens, src_info, atomic_counters, *of_sums))
    if not config.runs_ranks_in_turn:
        lists = input_tokens, router_weights
        ops.start_together(config, atomic_counters, *lists)
        return [
            call_ep_combine(rows, source, counter, *where, *more)
            for rows, source, counter, *more in given
        ]
    for rows, source, counter, *_ in given:
        call_ep_combine_async(rows, source, counter, *where)
    return [
        call_ep_combine_wait(counter, *receive_pointers, config, *more, rows)
        for rows, _, counter, *more in given
    ]
