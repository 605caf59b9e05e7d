# SPDX-License-Identifier: Apache-2.0
"""The launchers: what a Mojo program calls to dispatch and combine.

Each checks what it was given before anything is sent, takes rank and time-out
from the counters, and starts the kernel of its `target`. Parameters and
arguments follow MAX's `ep_dispatch_async_kernel_api` and its siblings (the
public documentation of `shmem.ep`); `recv_ptrs` and `recv_count_ptrs` hold
one address for each rank of the group.
"""
from layout import TileTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.sys import size_of

from .counters import EPLocalSyncCounters
from .expert_slots.host_combine import combine_async_host, combine_wait_host
from .expert_slots.host_dispatch import dispatch_async_host, dispatch_wait_host
from .layout import (
    ExpertSlotsLayout,
    MAX_RANKS,
    MAX_TOP_K,
    MESSAGE_ALIGN,
    message_bytes,
    plain_token_bytes,
)
from .token_format import TokenFormat
from .transport import PeerBuffers

comptime InputScales = Optional[def[dtype: DType](Int) capturing -> Scalar[dtype]]
"""Gives the factor of a token for an expert id, or None."""


def _check_config[
    n_experts: Int,
    n_ranks: Int,
    hidden_size: Int,
    top_k: Int,
    wire_type: DType,
    target: StaticString,
]():
    """Refuses, at compile time, what the kernels cannot do.

    Parameters:
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        hidden_size: Elements of a token.
        top_k: Experts of a token.
        wire_type: Element type of a row.
        target: The device kind.
    """
    comptime assert is_cpu[target](), (
        "max_ep: expert_slots has kernels for target 'cpu' only"
    )
    comptime assert 1 <= n_ranks and n_ranks <= MAX_RANKS, (
        "max_ep: n_ranks must be in [1, MAX_RANKS]"
    )
    comptime assert (
        1 <= top_k and top_k <= MAX_TOP_K and top_k <= n_experts
    ), "max_ep: top_k must be in [1, min(MAX_TOP_K, n_experts)]"
    comptime assert (
        hidden_size * size_of[Scalar[wire_type]]() % MESSAGE_ALIGN == 0
    ), "max_ep: a token must be a multiple of 16 bytes"


def _counters[
    n_experts: Int
](
    op: StaticString,
    atomic_counters: TileTensor[DType.int32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    n_ranks: Int,
) raises -> EPLocalSyncCounters[n_experts]:
    """Finds this rank's local words, if they and the memory are usable.

    Parameters:
        n_experts: Experts of the group.

    Args:
        op: Who asks.
        atomic_counters: The words.
        recv_ptrs: Addresses of all ranks.
        n_ranks: Ranks of the group.

    Returns:
        A view of the words.

    Raises:
        If the words were not initialized or the memory was freed.
    """
    var counters = EPLocalSyncCounters[n_experts](
        rebind[Pointer[Int32, MutUntrackedOrigin]](atomic_counters.ptr)
    )
    if (
        Int(atomic_counters.dim[0]()) < counters.total_size()
        or not counters.is_initialized()
    ):
        raise Error(
            "max_ep: ",
            op,
            ": these atomic_counters are not initialized; pass the model_inputs()",
            " of an EPCommInitializer after its ep_init().",
        )
    if Int(recv_ptrs.dim[0]()) != n_ranks:
        raise Error(
            "max_ep: ",
            op,
            ": recv_ptrs holds ",
            Int(recv_ptrs.dim[0]()),
            " addresses for ",
            n_ranks,
            " ranks.",
        )
    for rank in range(n_ranks):
        if recv_ptrs.ptr[unsafe_offset=rank] == 0:
            raise Error(
                "max_ep: ",
                op,
                ": the symmetric memory was freed (EPCommInitializer.close).",
            )
    return counters


@always_inline
def _imm[
    dtype: DType
](tensor: TileTensor[dtype, ...]) -> Pointer[Scalar[dtype], ImmUntrackedOrigin]:
    """Takes a tensor's address for reading.

    Parameters:
        dtype: Element type.

    Args:
        tensor: A tensor that outlives the launch.

    Returns:
        Its first element.
    """
    return Pointer[Scalar[dtype], ImmUntrackedOrigin](
        unsafe_from_address=Int(tensor.ptr)
    )


@always_inline
def _mut[
    dtype: DType
](tensor: TileTensor[dtype, ...]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    """Takes a tensor's address for writing.

    Parameters:
        dtype: Element type.

    Args:
        tensor: A tensor that outlives the launch.

    Returns:
        Its first element.
    """
    return Pointer[Scalar[dtype], MutUntrackedOrigin](
        unsafe_from_address=Int(tensor.ptr)
    )


def _check_rows(
    op: StaticString, what: StaticString, n_rows: Int, wanted: Int
) raises:
    """Compares a tensor's rows with what they must be.

    Args:
        op: Who asks.
        what: The tensor's name.
        n_rows: Its rows.
        wanted: The rows it must have.

    Raises:
        If they differ.
    """
    if n_rows != wanted:
        raise Error(
            "max_ep: ", op, ": ", what, " has ", n_rows, " rows, not ", wanted, "."
        )


def _check_n_tokens(
    op: StaticString, my_rank: Int, n_tokens: Int, max_tokens_per_rank: Int
) raises:
    """Refuses more tokens than the buffers hold.

    Args:
        op: Who asks.
        my_rank: This rank.
        n_tokens: Tokens given.
        max_tokens_per_rank: Tokens there is room for.

    Raises:
        If there are too many.
    """
    if n_tokens > max_tokens_per_rank:
        raise Error(
            "max_ep: ",
            op,
            " on rank ",
            my_rank,
            ": ",
            n_tokens,
            " tokens given, EPConfig.max_tokens_per_rank is ",
            max_tokens_per_rank,
            ". Send fewer at a time, or raise it. Before the next run call",
            " EPCommInitializer.reset() (or restart the group, where each rank",
            " is a process of its own).",
        )


@always_inline
def _dispatch_layout[
    token_fmt_type: TokenFormat, n_experts: Int, n_ranks: Int, max_tokens: Int
]() -> ExpertSlotsLayout:
    """Lays out the buffers as far as dispatch needs them.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens: Tokens one rank may send.

    Returns:
        A layout whose combine messages have no size.
    """
    return ExpertSlotsLayout(
        n_experts,
        n_ranks,
        max_tokens,
        token_fmt_type.top_k,
        token_fmt_type.msg_bytes,
        0,
    )


@always_inline
def _combine_layout[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens: Int,
]() -> ExpertSlotsLayout:
    """Lays out the buffers as far as combine needs them.

    Parameters:
        combine_dtype: Element type of a row.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens: Tokens one rank may send.

    Returns:
        A layout whose dispatch messages have no size.
    """
    return ExpertSlotsLayout(
        n_experts,
        n_ranks,
        max_tokens,
        top_k,
        0,
        message_bytes(
            plain_token_bytes(hidden_size, size_of[Scalar[combine_dtype]]())
        ),
    )


def ep_dispatch_async_kernel_api[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    input_scales_wrapper: InputScales = None,
    use_shmem: Bool = n_nodes > 1,
](
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Starts sending tokens to their experts.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        input_scales_wrapper: Gives the factor (float32) that multiplies a
            token before it is encoded, for an expert id. None: no factor.
        use_shmem: Whether peers are reached through the SHMEM library. On CPU
            every peer's region is mapped and a put is a store, so both values
            mean the same.

    Args:
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit (nothing is sent), a peer is late, or ids
        were out of range (everything else is sent).
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime top_k = token_fmt_type.top_k
    comptime hidden_size = token_fmt_type.hidden_size
    _check_config[
        n_experts, n_ranks, hidden_size, top_k, DType.float32, target
    ]()
    var counters = _counters[n_experts](
        "dispatch_async", atomic_counters, recv_ptrs, n_ranks
    )
    var n_tokens = Int(input_tokens.dim[0]())
    _check_n_tokens(
        "dispatch_async", counters.my_rank(), n_tokens, max_token_per_rank
    )
    _check_rows(
        "dispatch_async", "topk_ids", Int(topk_ids.dim[0]()), n_tokens
    )
    dispatch_async_host[
        token_fmt_type,
        n_experts,
        n_ranks,
        max_token_per_rank,
        _dispatch_layout[
            token_fmt_type, n_experts, n_ranks, max_token_per_rank
        ](),
        input_tokens.dtype,
        input_scales_wrapper,
    ](
        _imm(input_tokens),
        _imm(topk_ids),
        n_tokens,
        PeerBuffers[n_ranks](_mut(send_ptrs))[counters.my_rank()],
        PeerBuffers[n_ranks](_mut(recv_ptrs)),
        PeerBuffers[n_ranks](_mut(recv_count_ptrs)),
        counters,
    )


def ep_dispatch_wait_kernel_api[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    use_shmem: Bool = n_nodes > 1,
](
    rows: token_fmt_type.Rows,
    row_offsets: TileTensor[DType.uint32, ...],
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Completes receiving: rows by expert, their offsets and their sources.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        use_shmem: As in `ep_dispatch_async_kernel_api`.

    Args:
        rows: Output tensors of the format, as many rows as `src_info`.
        row_offsets: First row of each local expert, `[n_local_experts + 1]`.
        expert_ids: Local experts in row order, `[n_local_experts]`.
        src_info: Token and choice of each row, `[max_recv_tokens, 2]`.
        atomic_counters: Local words.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime hidden_size = token_fmt_type.hidden_size
    comptime dispatch_layout = _dispatch_layout[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank
    ]()
    comptime n_local_experts = dispatch_layout.n_local_experts()
    _check_config[
        n_experts,
        n_ranks,
        hidden_size,
        token_fmt_type.top_k,
        DType.float32,
        target,
    ]()
    var counters = _counters[n_experts](
        "dispatch_wait", atomic_counters, recv_ptrs, n_ranks
    )
    _check_rows(
        "dispatch_wait",
        "row_offsets",
        Int(row_offsets.dim[0]()),
        n_local_experts + 1,
    )
    _check_rows(
        "dispatch_wait", "expert_ids", Int(expert_ids.dim[0]()), n_local_experts
    )
    dispatch_wait_host[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank, dispatch_layout
    ](
        rows,
        Int(src_info.dim[0]()),
        _mut(row_offsets),
        _mut(expert_ids),
        _mut(src_info),
        PeerBuffers[n_ranks](_mut(recv_ptrs))[counters.my_rank()],
        PeerBuffers[n_ranks](_mut(recv_count_ptrs)),
        counters,
    )


def ep_dispatch_kernel_api[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    input_scales_wrapper: InputScales = None,
    use_shmem: Bool = n_nodes > 1,
](
    rows: token_fmt_type.Rows,
    row_offsets: TileTensor[DType.uint32, ...],
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Sends and receives in one launch: async, then wait.

    All ranks must run at the same time: this one waits for its peers' sends.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        input_scales_wrapper: As in `ep_dispatch_async_kernel_api`.
        use_shmem: As in `ep_dispatch_async_kernel_api`.

    Args:
        rows: Output tensors of the format.
        row_offsets: First row of each local expert, `[n_local_experts + 1]`.
        expert_ids: Local experts in row order, `[n_local_experts]`.
        src_info: Token and choice of each row, `[max_recv_tokens, 2]`.
        atomic_counters: Local words.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        As the two halves do.
    """
    ep_dispatch_async_kernel_api[
        token_fmt_type,
        n_experts,
        max_token_per_rank,
        n_gpus_per_node,
        n_nodes,
        target,
        input_scales_wrapper,
        use_shmem,
    ](
        atomic_counters,
        input_tokens,
        topk_ids,
        send_ptrs,
        recv_ptrs,
        recv_count_ptrs,
        context,
    )
    ep_dispatch_wait_kernel_api[
        token_fmt_type,
        n_experts,
        max_token_per_rank,
        n_gpus_per_node,
        n_nodes,
        target,
        use_shmem,
    ](
        rows,
        row_offsets,
        expert_ids,
        src_info,
        atomic_counters,
        recv_ptrs,
        recv_count_ptrs,
        context,
    )


def ep_combine_async_kernel_api[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    use_shmem: Bool = n_nodes > 1,
](
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor[combine_dtype, ...],
    src_info: TileTensor[DType.int32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Starts sending expert rows back to where their tokens came from.

    Parameters:
        combine_dtype: Element type of the rows.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        use_shmem: As in `ep_dispatch_async_kernel_api`.

    Args:
        atomic_counters: Local words; they know the last dispatch's rows.
        input_tokens: Expert rows, `[max_recv_tokens, hidden_size]`.
        src_info: Token and choice of each row, `[max_recv_tokens, 2]`.
        send_ptrs: Unused: rows go out straight from `input_tokens`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit (nothing is sent), or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    _check_config[
        n_experts, n_ranks, hidden_size, top_k, combine_dtype, target
    ]()
    var counters = _counters[n_experts](
        "combine_async", atomic_counters, recv_ptrs, n_ranks
    )
    _check_rows(
        "combine_async",
        "src_info",
        Int(src_info.dim[0]()),
        Int(input_tokens.dim[0]()),
    )
    combine_async_host[
        combine_dtype,
        hidden_size,
        n_experts,
        n_ranks,
        _combine_layout[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_token_per_rank,
        ](),
    ](
        _imm(input_tokens),
        Int(input_tokens.dim[0]()),
        _imm(src_info),
        PeerBuffers[n_ranks](_mut(recv_ptrs)),
        PeerBuffers[n_ranks](_mut(recv_count_ptrs)),
        counters,
    )


def ep_combine_wait_kernel_api[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    use_shmem: Bool = n_nodes > 1,
](
    output_tokens: TileTensor[combine_dtype, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    router_weights: TileTensor[DType.float32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Completes combine: the weighted sum of each token's expert rows.

    Parameters:
        combine_dtype: Element type of rows and result.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        use_shmem: As in `ep_dispatch_async_kernel_api`.

    Args:
        output_tokens: Results, `[n_tokens, hidden_size]`.
        atomic_counters: Local words.
        router_weights: Weight of each choice, `[n_tokens, top_k]`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    _check_config[
        n_experts, n_ranks, hidden_size, top_k, combine_dtype, target
    ]()
    var counters = _counters[n_experts](
        "combine_wait", atomic_counters, recv_ptrs, n_ranks
    )
    var n_tokens = Int(router_weights.dim[0]())
    _check_n_tokens(
        "combine_wait", counters.my_rank(), n_tokens, max_token_per_rank
    )
    _check_rows(
        "combine_wait", "output_tokens", Int(output_tokens.dim[0]()), n_tokens
    )
    combine_wait_host[
        combine_dtype,
        hidden_size,
        n_experts,
        n_ranks,
        _combine_layout[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_token_per_rank,
        ](),
    ](
        _mut(output_tokens),
        _imm(router_weights),
        n_tokens,
        PeerBuffers[n_ranks](_mut(recv_ptrs))[counters.my_rank()],
        PeerBuffers[n_ranks](_mut(recv_count_ptrs)),
        counters,
    )


def ep_combine_kernel_api[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    use_shmem: Bool = n_nodes > 1,
](
    output_tokens: TileTensor[combine_dtype, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor[combine_dtype, ...],
    src_info: TileTensor[DType.int32, ...],
    router_weights: TileTensor[DType.float32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Sends rows back and reduces them in one launch: async, then wait.

    All ranks must run at the same time: this one waits for its peers' sends.

    Parameters:
        combine_dtype: Element type of rows and result.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        use_shmem: As in `ep_dispatch_async_kernel_api`.

    Args:
        output_tokens: Results, `[n_tokens, hidden_size]`.
        atomic_counters: Local words.
        input_tokens: Expert rows, `[max_recv_tokens, hidden_size]`.
        src_info: Token and choice of each row, `[max_recv_tokens, 2]`.
        router_weights: Weight of each choice, `[n_tokens, top_k]`.
        send_ptrs: As in `ep_combine_async_kernel_api`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        As the two halves do.
    """
    ep_combine_async_kernel_api[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        max_token_per_rank,
        n_gpus_per_node,
        n_nodes,
        target,
        use_shmem,
    ](
        atomic_counters,
        input_tokens,
        src_info,
        send_ptrs,
        recv_ptrs,
        recv_count_ptrs,
        context,
    )
    ep_combine_wait_kernel_api[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        max_token_per_rank,
        n_gpus_per_node,
        n_nodes,
        target,
        use_shmem,
    ](
        output_tokens,
        atomic_counters,
        router_weights,
        recv_ptrs,
        recv_count_ptrs,
        context,
    )
