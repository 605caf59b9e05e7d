# SPDX-License-Identifier: Apache-2.0
"""The launchers that Mojo programs call: thin faces over `launch.mojo`.

Names, parameters and arguments are those of MAX's `shmem.ep` (its public
documentation). Parameters of ours stand behind them, with defaults. Each checks what
it is given before anything is sent, and takes rank and time-out from the counters.
"""
from layout import TileTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .arguments import (
    Call,
    combined_tokens,
    CombinedTokens,
    dispatched_rows,
    DispatchedRows,
    Form,
    given_rows,
    given_tokens,
    GivenRows,
    GivenTokens,
    RouterWeights,
)
from .device.phase import InputScales
from .launch import launch_combine, launch_dispatch
from .layout import Addressing, combine_msg_bytes, Group, Returns
from .token_format import SharedRows, TokenFormat

# ------------------------------------------------------------------------ dispatch


def ep_dispatch_async_kernel_api[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    input_scales_wrapper: InputScales = None,
    use_shmem: Bool = n_nodes > 1,
    fused_shared_expert: Bool = False,
    addressing: Addressing = Addressing.BY_EXPERT,
    returns: Returns = Returns.ROWS,
    n_sms: Int = 0,
](
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
    router_weights: RouterWeights = RouterWeights.none(),
) raises:
    """Starts sending tokens to their experts.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, `cpu` or `gpu`.
        input_scales_wrapper: Gives the float32 factor of a token for an expert id, applied
            before the token is encoded; None: no factor. By expert only.
        use_shmem: Whether ranks of other nodes are reached through the SHMEM
            library; CPU ranks map all regions and do not need it.
        fused_shared_expert: Whether this rank's own tokens come first in its rows.
        addressing: How dispatch addresses a token.
        returns: What combine returns.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`; -1: no expert. In an
            all-gather `[n_tokens, router_top_k]`, any number.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' receive buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.
        router_weights: Weights of the shape of `topk_ids`, if combine returns sums.

    Raises:
        If an argument does not fit (nothing is sent), a peer is late, or ids
        were out of range (everything else is sent).
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=token_fmt_type.top_k,
        hidden_size=token_fmt_type.hidden_size,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=addressing,
        returns=returns,
        fused_shared_expert=fused_shared_expert,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem and is_gpu[target](),
        n_sms=n_sms,
    )
    var call = Call[group].of[target](
        "dispatch_async", atomic_counters, send_ptrs, recv_ptrs, recv_count_ptrs
    )
    launch_dispatch[token_fmt_type, target, Form.ASYNC, input_scales_wrapper](
        call,
        given_tokens[token_fmt_type, target](
            call, input_tokens, topk_ids, router_weights
        ),
        DispatchedRows[group, token_fmt_type].none(),
        context,
    )


def ep_dispatch_wait_kernel_api[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    use_shmem: Bool = n_nodes > 1,
    fused_shared_expert: Bool = False,
    output_layout: StaticString = "packed",
    addressing: Addressing = Addressing.BY_EXPERT,
    returns: Returns = Returns.ROWS,
    n_sms: Int = 0,
    shares_gpu: Bool = True,
](
    rows: token_fmt_type.Rows,
    row_offsets: TileTensor,
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Completes receiving: rows by expert, their offsets and their sources.

    On CPU the send buffer is found from the receive buffer: `max_ep.init` puts both
    into one region.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, `cpu` or `gpu`.
        use_shmem: Whether ranks of other nodes are reached through the SHMEM
            library; CPU ranks map all regions and do not need it.
        fused_shared_expert: Whether this rank's own tokens come first in its rows.
        output_layout: `packed`, or `padded`: each expert has `expert_capacity` rows.
        addressing: How dispatch addresses a token.
        returns: What combine returns.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.
        shares_gpu: Whether other ranks may run on this rank's GPU.

    Args:
        rows: The tensors of rows.
        row_offsets: Packed: first row of each expert, and the end, uint32
            `[n_groups + 1]`. Padded: rows of each expert, int32
            `[n_local_experts]`.
        expert_ids: Packed: number of each expert, `[n_groups]`. Padded: first row
            within the expert's, and rows, of each (expert, source rank),
            `[n_local_experts * n_ranks, 2]`.
        src_info: Token and choice of each row, `[n_output_rows, 2]`; choice -1: the
            row of the shared expert.
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        recv_ptrs: Addresses of all ranks' receive buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime assert (
        output_layout == "packed" or output_layout == "padded"
    ), "max_ep: output_layout must be packed or padded"
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=token_fmt_type.top_k,
        hidden_size=token_fmt_type.hidden_size,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=addressing,
        returns=returns,
        is_padded=output_layout == "padded",
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem and is_gpu[target](),
        n_sms=n_sms,
    )
    var call = Call[group].of_wait[target](
        "dispatch_wait", atomic_counters, recv_ptrs, recv_count_ptrs
    )
    launch_dispatch[token_fmt_type, target, Form.WAIT](
        call,
        GivenTokens[DType.bfloat16].none(),
        dispatched_rows[token_fmt_type](
            call, rows, row_offsets, expert_ids, src_info
        ),
        context,
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
    fused_shared_expert: Bool = False,
    output_layout: StaticString = "packed",
    addressing: Addressing = Addressing.BY_EXPERT,
    returns: Returns = Returns.ROWS,
    n_sms: Int = 0,
](
    rows: token_fmt_type.Rows,
    row_offsets: TileTensor,
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
    router_weights: RouterWeights = RouterWeights.none(),
) raises:
    """Sends and receives in one launch: async, then wait.

    All ranks must run at the same time: this one waits for its peers.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, `cpu` or `gpu`.
        input_scales_wrapper: Gives the float32 factor of a token for an expert id, applied
            before the token is encoded; None: no factor. By expert only.
        use_shmem: Whether ranks of other nodes are reached through the SHMEM
            library; CPU ranks map all regions and do not need it.
        fused_shared_expert: Whether this rank's own tokens come first in its rows.
        output_layout: `packed`, or `padded`: each expert has `expert_capacity` rows.
        addressing: How dispatch addresses a token.
        returns: What combine returns.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        rows: The tensors of rows.
        row_offsets: Packed: first row of each expert, and the end, uint32
            `[n_groups + 1]`. Padded: rows of each expert, int32
            `[n_local_experts]`.
        expert_ids: Packed: number of each expert, `[n_groups]`. Padded: first row
            within the expert's, and rows, of each (expert, source rank),
            `[n_local_experts * n_ranks, 2]`.
        src_info: Token and choice of each row, `[n_output_rows, 2]`; choice -1: the
            row of the shared expert.
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`; -1: no expert. In an
            all-gather `[n_tokens, router_top_k]`, any number.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' receive buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.
        router_weights: Weights of the shape of `topk_ids`, if combine returns sums.

    Raises:
        As the two phases do.
    """
    comptime assert (
        output_layout == "packed" or output_layout == "padded"
    ), "max_ep: output_layout must be packed or padded"
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=token_fmt_type.top_k,
        hidden_size=token_fmt_type.hidden_size,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=addressing,
        returns=returns,
        is_padded=output_layout == "padded",
        fused_shared_expert=fused_shared_expert,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem and is_gpu[target](),
        n_sms=n_sms,
    )
    var call = Call[group].of[target](
        "dispatch", atomic_counters, send_ptrs, recv_ptrs, recv_count_ptrs
    )
    launch_dispatch[token_fmt_type, target, Form.FUSED, input_scales_wrapper](
        call,
        given_tokens[token_fmt_type, target](
            call, input_tokens, topk_ids, router_weights
        ),
        dispatched_rows[token_fmt_type](
            call, rows, row_offsets, expert_ids, src_info
        ),
        context,
    )


# ------------------------------------------------------------------------- combine


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
    addressing: Addressing = Addressing.BY_EXPERT,
    returns: Returns = Returns.ROWS,
    partial_dtype: DType = combine_dtype,
    n_sms: Int = 0,
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

    With sums the weighted rows of a token are added here, and one partial sum of
    them is sent. Rows of this rank's own tokens are left to the wait.

    Parameters:
        combine_dtype: Element type of rows and results.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, `cpu` or `gpu`.
        use_shmem: Whether ranks of other nodes are reached through the SHMEM
            library; CPU ranks map all regions and do not need it.
        addressing: How dispatch addresses a token.
        returns: What combine returns.
        partial_dtype: Element type of a partial sum.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Expert rows, `[n_output_rows, hidden_size]`, where the last
            dispatch put them.
        src_info: Token and choice of each row, `[n_output_rows, 2]`; choice -1: the
            row of the shared expert.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' receive buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit (nothing is sent), or a peer is late.
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[
            partial_dtype if returns == Returns.SUMS else combine_dtype
        ](hidden_size),
        addressing=addressing,
        returns=returns,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem and is_gpu[target](),
        n_sms=n_sms,
    )
    var call = Call[group].of[target](
        "combine_async", atomic_counters, send_ptrs, recv_ptrs, recv_count_ptrs
    )
    var given = given_rows(call, input_tokens, src_info)
    launch_combine[partial_dtype, target, Form.ASYNC](
        call, given, CombinedTokens[combine_dtype].none(), context
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
    fused_shared_expert: Bool = False,
    addressing: Addressing = Addressing.BY_EXPERT,
    returns: Returns = Returns.ROWS,
    partial_dtype: DType = combine_dtype,
    n_sms: Int = 0,
    shares_gpu: Bool = True,
](
    output_tokens: TileTensor[combine_dtype, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    router_weights: TileTensor[DType.float32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
    expert_rows: SharedRows = SharedRows.none(),
) raises:
    """Completes combine: the weighted sum of each token's expert rows.

    Rows that were not sent are read in `expert_rows`: the shared expert's and, with
    sums, this rank's own.

    Parameters:
        combine_dtype: Element type of rows and results.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, `cpu` or `gpu`.
        use_shmem: Whether ranks of other nodes are reached through the SHMEM
            library; CPU ranks map all regions and do not need it.
        fused_shared_expert: Whether this rank's own tokens come first in its rows.
        addressing: How dispatch addresses a token.
        returns: What combine returns.
        partial_dtype: Element type of a partial sum.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.
        shares_gpu: Whether other ranks may run on this rank's GPU.

    Args:
        output_tokens: Results, `[n_tokens, hidden_size]`.
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        router_weights: Weight of each choice, `[n_tokens, top_k]`; not read with sums,
            whose dispatch takes them.
        recv_ptrs: Addresses of all ranks' receive buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.
        expert_rows: The expert rows that `ep_combine_async_kernel_api` took.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[
            partial_dtype if returns == Returns.SUMS else combine_dtype
        ](hidden_size),
        addressing=addressing,
        returns=returns,
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem and is_gpu[target](),
        n_sms=n_sms,
    )
    var call = Call[group].of_wait[target](
        "combine_wait", atomic_counters, recv_ptrs, recv_count_ptrs
    )
    var given = GivenRows.unsent(expert_rows)
    launch_combine[partial_dtype, target, Form.WAIT](
        call,
        given,
        combined_tokens[target](call, output_tokens, router_weights, given),
        context,
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
    fused_shared_expert: Bool = False,
    addressing: Addressing = Addressing.BY_EXPERT,
    returns: Returns = Returns.ROWS,
    partial_dtype: DType = combine_dtype,
    n_sms: Int = 0,
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

    All ranks must run at the same time: this one waits for its peers.

    Parameters:
        combine_dtype: Element type of rows and results.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, `cpu` or `gpu`.
        use_shmem: Whether ranks of other nodes are reached through the SHMEM
            library; CPU ranks map all regions and do not need it.
        fused_shared_expert: Whether this rank's own tokens come first in its rows.
        addressing: How dispatch addresses a token.
        returns: What combine returns.
        partial_dtype: Element type of a partial sum.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        output_tokens: Results, `[n_tokens, hidden_size]`.
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Expert rows, `[n_output_rows, hidden_size]`, where the last
            dispatch put them.
        src_info: Token and choice of each row, `[n_output_rows, 2]`; choice -1: the
            row of the shared expert.
        router_weights: Weight of each choice, `[n_tokens, top_k]`; not read with sums,
            whose dispatch takes them.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' receive buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        As the two phases do.
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[
            partial_dtype if returns == Returns.SUMS else combine_dtype
        ](hidden_size),
        addressing=addressing,
        returns=returns,
        fused_shared_expert=fused_shared_expert,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem and is_gpu[target](),
        n_sms=n_sms,
    )
    var call = Call[group].of[target](
        "combine", atomic_counters, send_ptrs, recv_ptrs, recv_count_ptrs
    )
    var given = given_rows(call, input_tokens, src_info)
    launch_combine[partial_dtype, target, Form.FUSED](
        call,
        given,
        combined_tokens[target](call, output_tokens, router_weights, given),
        context,
    )
