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
from max.gpu.host.info import is_gpu
from std.sys import size_of

from .counters import EPLocalSyncCounters
from .expert_slots.combine import combine_layout_of
from .expert_slots.dispatch import dispatch_layout_of
from .expert_slots.host_combine import combine_async_host, combine_wait_host
from .expert_slots.host_dispatch import dispatch_async_host, dispatch_wait_host
from .gpu_launch import (
    InputScales,
    launch_combine,
    launch_combine_async,
    launch_combine_wait,
    launch_dispatch,
    launch_dispatch_async,
    launch_dispatch_wait,
    launch_send_tokens,
)
from .launch_checks import (
    check_config,
    check_n_tokens,
    check_shared_rows,
    check_size,
    counters_of,
    imm,
    mut_,
    peer_buffers,
)
from .layout import (
    EXPERT_SLOTS,
    GATHER,
    GATHER_REDUCED,
    MESSAGE_ALIGN,
    RegionLayout,
    is_reduced_protocol,
)
from .rank_slots.host_combine import (
    combine_async_host as reduced_combine_async_host,
    combine_wait_host as reduced_combine_wait_host,
)
from .rank_slots.host_dispatch import (
    dispatch_async_host as rank_slots_dispatch_async_host,
    dispatch_wait_host as rank_slots_dispatch_wait_host,
    send_tokens_host,
)
from .row_tables import RowTables
from .token_format import RouterWeights, SharedRows, TokenFormat


@always_inline
def _n_mapped[
    target: StaticString, use_shmem: Bool, n_gpus_per_node: Int, n_ranks: Int
]() -> Int:
    """Counts the ranks whose buffers must be mapped here."""
    return n_gpus_per_node if is_gpu[target]() and use_shmem else n_ranks


def _check_carried[
    token_fmt_type: TokenFormat, n_experts: Int, n_ranks: Int, protocol: Int
]():
    """Refuses an all-gather that is none, when an op is compiled."""
    comptime assert token_fmt_type.n_carried == 0 or (
        protocol == GATHER_REDUCED
        and n_experts == n_ranks
        and token_fmt_type.top_k == n_ranks
    ), (
        "max_ep: tokens carry choices where each goes to every rank: with"
        " gather_reduced, and each rank as an expert"
    )


def _n_given_choices[token_fmt_type: TokenFormat]() -> Int:
    """Counts the choices of a token that dispatch is given."""
    comptime n_carried = token_fmt_type.n_carried
    return n_carried if n_carried > 0 else token_fmt_type.top_k


def _check_protocol[
    protocol: Int,
    target: StaticString,
    is_scaled: Bool,
    tokens_are_sent: Bool = False,
]():
    """Refuses what `rank_slots` cannot do, when an op is compiled."""
    comptime assert (
        EXPERT_SLOTS <= protocol and protocol <= GATHER_REDUCED
    ), "max_ep: the protocol must be what protocol_of returns"
    comptime assert (
        protocol == EXPERT_SLOTS or not is_scaled
    ), "max_ep: only expert_slots encodes a token for each expert, with scales"
    comptime assert (
        protocol >= GATHER or not tokens_are_sent
    ), "max_ep: only gather sends tokens before their experts are known"


def _check_tokens[
    n_experts: Int,
    //,
    target: StaticString,
    hidden_size: Int,
    top_k: Int,
    max_tokens: Int,
](
    op: StaticString,
    counters: EPLocalSyncCounters[n_experts],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
) raises:
    """Checks what is sent by dispatch; raises if it does not fit."""
    var n_tokens = Int(input_tokens.dim[0]())
    check_n_tokens[target](op, counters, n_tokens, max_tokens)
    check_size(op, "rows of topk_ids", Int(topk_ids.dim[0]()), n_tokens)
    check_size(op, "columns of topk_ids", Int(topk_ids.dim[1]()), top_k)
    check_size(
        op, "columns of input_tokens", Int(input_tokens.dim[1]()), hidden_size
    )


def _check_dispatch_weights[
    protocol: Int, top_k: Int
](op: StaticString, router_weights: RouterWeights, n_tokens: Int) raises:
    """Checks the weights that travel with tokens; raises if they do not fit."""
    comptime if is_reduced_protocol(protocol):
        check_size(
            op, "rows of router_weights", router_weights.n_tokens, n_tokens
        )
        check_size(op, "columns of router_weights", router_weights.top_k, top_k)


@always_inline
def _row_tables[
    layout: RegionLayout,
    fused_shared_expert: Bool,
    output_layout: StaticString,
](
    op: StaticString,
    row_offsets: TileTensor,
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
) raises -> RowTables[layout, output_layout == "padded", fused_shared_expert]:
    """Checks what dispatch delivers into; raises if it does not fit."""
    comptime is_padded = output_layout == "padded"
    comptime assert (
        is_padded or output_layout == "packed"
    ), "max_ep: output_layout must be packed or padded"
    comptime assert not (
        is_padded and fused_shared_expert
    ), "max_ep: fused_shared_expert needs output_layout packed"
    comptime Tables = RowTables[layout, is_padded, fused_shared_expert]
    comptime if is_padded:
        comptime assert row_offsets.dtype == DType.int32, "recv_counts: int32"
        comptime n_local_experts = layout.n_local_experts()
        comptime n_pairs = layout.pair(n_local_experts, 0)
        check_size(
            op, "recv_counts", Int(row_offsets.dim[0]()), n_local_experts
        )
        check_size(op, "recv_ranges", Int(expert_ids.dim[0]()), n_pairs)
    else:
        comptime assert row_offsets.dtype == DType.uint32, "row_offsets: uint32"
        comptime n_groups = Tables.n_groups
        check_size(op, "row_offsets", Int(row_offsets.dim[0]()), n_groups + 1)
        check_size(op, "expert_ids", Int(expert_ids.dim[0]()), n_groups)
    check_size(op, "columns of src_info", Int(src_info.dim[1]()), 2)
    return {
        mut_(row_offsets).unsafe_bitcast[UInt32](),
        mut_(expert_ids),
    }


def _check_expert_rows[
    hidden_size: Int
](
    op: StaticString,
    input_tokens: TileTensor,
    src_info: TileTensor[DType.int32, ...],
) raises:
    """Checks what is sent by combine; raises if it does not fit."""
    check_size(
        op,
        "rows of src_info",
        Int(src_info.dim[0]()),
        Int(input_tokens.dim[0]()),
    )
    check_size(op, "columns of src_info", Int(src_info.dim[1]()), 2)
    check_size(
        op, "columns of input_tokens", Int(input_tokens.dim[1]()), hidden_size
    )


def _check_results[
    n_experts: Int,
    //,
    target: StaticString,
    hidden_size: Int,
    top_k: Int,
    max_tokens: Int,
    protocol: Int,
](
    op: StaticString,
    counters: EPLocalSyncCounters[n_experts],
    output_tokens: TileTensor,
    router_weights: TileTensor[DType.float32, ...],
) raises:
    """Checks what combine delivers into; raises if it does not fit."""
    var n_tokens = Int(output_tokens.dim[0]())
    check_n_tokens[target](op, counters, n_tokens, max_tokens)
    # Reduced, the weights came with dispatch.
    comptime if not is_reduced_protocol(protocol):
        check_size(
            op, "columns of router_weights", Int(router_weights.dim[1]()), top_k
        )
        check_size(
            op, "rows of router_weights", Int(router_weights.dim[0]()), n_tokens
        )
    check_size(
        op, "columns of output_tokens", Int(output_tokens.dim[1]()), hidden_size
    )


def ep_send_tokens_kernel_api[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    protocol: Int,
    n_sms: Int = 0,
](
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor,
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Starts sending tokens to all ranks, before the router has decided.

    A dispatch of the same tokens must follow, with `tokens_are_sent`.

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        protocol: `GATHER` or `GATHER_REDUCED`.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        atomic_counters: As for `ep_dispatch_async_kernel_api`.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit (nothing is sent), or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = _n_mapped[target, False, n_gpus_per_node, n_ranks]()
    comptime hidden_size = token_fmt_type.hidden_size
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        token_fmt_type.hidden_multiple,
        token_fmt_type.top_k,
        target,
    ]()
    _check_protocol[protocol, target, False, True]()
    _check_carried[token_fmt_type, n_experts, n_ranks, protocol]()
    comptime op = "send_tokens"
    comptime dispatch_layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
    ]()
    var counters = counters_of[n_experts, target](
        op, atomic_counters, dispatch_layout
    )
    var n_tokens = Int(input_tokens.dim[0]())
    check_n_tokens[target](op, counters, n_tokens, max_token_per_rank)
    check_size(
        op, "columns of input_tokens", Int(input_tokens.dim[1]()), hidden_size
    )
    var recv_bufs = peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs)
    var counts = peer_buffers[n_ranks, n_mapped](
        op, "recv_count_ptrs", recv_count_ptrs
    )
    comptime if is_gpu[target]():
        launch_send_tokens[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            protocol,
            n_sms,
        ](input_tokens, recv_bufs, counts, counters, context)
    else:
        send_tokens_host[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            dispatch_layout,
            input_tokens.dtype,
        ](imm(input_tokens), n_tokens, recv_bufs, counts, counters)


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
    protocol: Int = EXPERT_SLOTS,
    n_sms: Int = 0,
    tokens_are_sent: Bool = False,
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
        target: Device kind of the tensors, such as `cpu`.
        input_scales_wrapper: Gives the factor (float32) that multiplies a
            token before it is encoded, for an expert id. None: no factor.
        use_shmem: Whether peers are reached through the SHMEM library. On CPU
            every peer's region is mapped and a put is a store, so both values
            mean the same.
        fused_shared_expert: Whether `dispatch_wait` puts this rank's tokens in
            front of its rows. Not together with input scales: they are
            factors of experts, and the shared one has none.
        protocol: The wire protocol, from `protocol_of`; all but `EXPERT_SLOTS`
            are for one host, and without input scales.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.
        tokens_are_sent: Whether `ep_send_tokens_kernel_api` has sent the tokens.

    Args:
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`. With a format whose
            tokens carry choices, `[n_tokens, n_carried]`, anything.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.
        router_weights: Weight of each choice, of the shape of `topk_ids`; read
            with a reduced protocol, whose combine gets none.

    Raises:
        If an argument does not fit (nothing is sent), a peer is late, or ids
        were out of range (everything else is sent).
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = _n_mapped[target, use_shmem, n_gpus_per_node, n_ranks]()
    comptime top_k = token_fmt_type.top_k
    comptime hidden_size = token_fmt_type.hidden_size
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        token_fmt_type.hidden_multiple,
        top_k,
        target,
    ]()
    comptime assert not (
        fused_shared_expert and Bool(input_scales_wrapper)
    ), "max_ep: fused_shared_expert takes no input scales"
    _check_protocol[
        protocol, target, Bool(input_scales_wrapper), tokens_are_sent
    ]()
    _check_carried[token_fmt_type, n_experts, n_ranks, protocol]()
    comptime op = "dispatch_async"
    comptime dispatch_layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
    ]()
    var counters = counters_of[n_experts, target](
        op, atomic_counters, dispatch_layout
    )
    var n_tokens = Int(input_tokens.dim[0]())
    comptime n_choices = _n_given_choices[token_fmt_type]()
    _check_tokens[target, hidden_size, n_choices, max_token_per_rank](
        op, counters, input_tokens, topk_ids
    )
    _check_dispatch_weights[protocol, n_choices](op, router_weights, n_tokens)
    var send_bufs = peer_buffers[n_ranks, n_mapped](op, "send_ptrs", send_ptrs)
    var recv_bufs = peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs)
    var counts = peer_buffers[n_ranks, n_mapped](
        op, "recv_count_ptrs", recv_count_ptrs
    )
    comptime if is_gpu[target]():
        launch_dispatch_async[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            n_gpus_per_node,
            input_scales_wrapper,
            use_shmem,
            fused_shared_expert,
            protocol,
            n_sms,
            tokens_are_sent,
        ](
            input_tokens,
            topk_ids,
            router_weights,
            send_bufs,
            recv_bufs,
            counts,
            counters,
            context,
        )
    elif dispatch_layout.has_rank_slots():
        rank_slots_dispatch_async_host[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            dispatch_layout,
            input_tokens.dtype,
            fused_shared_expert,
            tokens_are_sent,
        ](
            imm(input_tokens),
            imm(topk_ids),
            n_tokens,
            router_weights.weights,
            recv_bufs,
            counts,
            counters,
        )
    else:
        dispatch_async_host[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            dispatch_layout,
            input_tokens.dtype,
            input_scales_wrapper,
            fused_shared_expert,
        ](
            imm(input_tokens),
            imm(topk_ids),
            n_tokens,
            send_bufs[counters.my_rank()],
            recv_bufs,
            counts,
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
    fused_shared_expert: Bool = False,
    output_layout: StaticString = "packed",
    protocol: Int = EXPERT_SLOTS,
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

    Parameters:
        token_fmt_type: Wire format of a token.
        n_experts: Experts of the group.
        max_token_per_rank: Tokens one rank may send.
        n_gpus_per_node: Ranks that one process drives.
        n_nodes: Processes of the group.
        target: Device kind of the tensors, such as `cpu`.
        use_shmem: As in `ep_dispatch_async_kernel_api`.
        fused_shared_expert: Whether this rank's own tokens, as it has encoded
            them, come first: group 0. Local expert `e` is then group `e + 1`.
        output_layout: `packed`: rows without gaps. `padded`: each local expert
            has `expert_capacity` rows of its own.
        protocol: As in `ep_dispatch_async_kernel_api`.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.
        shares_gpu: Whether other ranks may run on this rank's GPU.

    Args:
        rows: Output tensors of the format, as many rows as `src_info`.
        row_offsets: Packed: first row of each group, uint32 `[n_groups + 1]`.
            Padded: `recv_counts`, rows of each local expert, int32
            `[n_local_experts]`.
        expert_ids: Packed: groups in row order, `[n_groups]`. Padded:
            `recv_ranges`, `[n_local_experts * n_ranks, 2]`: the rows of each
            source rank, the first (from the expert's first) and how many.
        src_info: Token and choice of each row, `[n_output_rows, 2]`; `-1` for
            the choice of the shared expert.
        atomic_counters: Local words.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`. The send
            buffer is found from here: `max_ep.init` puts both into one region.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = _n_mapped[target, use_shmem, n_gpus_per_node, n_ranks]()
    comptime hidden_size = token_fmt_type.hidden_size
    comptime dispatch_layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
    ]()
    comptime n_local_experts = dispatch_layout.n_local_experts()
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        token_fmt_type.hidden_multiple,
        token_fmt_type.top_k,
        target,
    ]()
    _check_protocol[protocol, target, False]()
    _check_carried[token_fmt_type, n_experts, n_ranks, protocol]()
    comptime op = "dispatch_wait"
    var counters = counters_of[n_experts, target](
        op, atomic_counters, dispatch_layout
    )
    var recv_bufs = peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs)
    var counts = peer_buffers[n_ranks, n_mapped](
        op, "recv_count_ptrs", recv_count_ptrs
    )
    comptime if is_gpu[target]():
        launch_dispatch_wait[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            n_gpus_per_node,
            use_shmem,
            protocol,
            n_sms,
            shares_gpu,
        ](
            rows,
            _row_tables[dispatch_layout, fused_shared_expert, output_layout](
                op, row_offsets, expert_ids, src_info
            ),
            src_info,
            recv_bufs,
            counts,
            counters,
            context,
        )
    else:
        var tables = _row_tables[
            dispatch_layout, fused_shared_expert, output_layout
        ](op, row_offsets, expert_ids, src_info)
        var recv_buf = recv_bufs[counters.my_rank()]
        comptime if dispatch_layout.has_rank_slots():
            rank_slots_dispatch_wait_host[
                token_fmt_type,
                n_experts,
                n_ranks,
                max_token_per_rank,
                dispatch_layout,
            ](
                rows,
                Int(src_info.dim[0]()),
                tables,
                mut_(src_info),
                recv_buf,
                counts,
                counters,
            )
            return
        dispatch_wait_host[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            dispatch_layout,
        ](
            rows,
            Int(src_info.dim[0]()),
            tables,
            mut_(src_info),
            recv_buf.unsafe_offset(dispatch_layout.staged_from_recv(0)),
            recv_buf,
            counts,
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
    fused_shared_expert: Bool = False,
    output_layout: StaticString = "packed",
    protocol: Int = EXPERT_SLOTS,
    n_sms: Int = 0,
    tokens_are_sent: Bool = False,
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
        fused_shared_expert: As in `ep_dispatch_wait_kernel_api`.
        output_layout: As in `ep_dispatch_wait_kernel_api`.
        protocol: As in `ep_dispatch_async_kernel_api`.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.
        tokens_are_sent: Whether `ep_send_tokens_kernel_api` has sent the tokens.

    Args:
        rows: Output tensors of the format.
        row_offsets: As in `ep_dispatch_wait_kernel_api`.
        expert_ids: As in `ep_dispatch_wait_kernel_api`.
        src_info: Token and choice of each row, `[n_output_rows, 2]`.
        atomic_counters: Local words.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`.
        send_ptrs: Addresses of all ranks' send buffers, `[n_ranks]`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.
        router_weights: As in `ep_dispatch_async_kernel_api`.

    Raises:
        As the two halves do.
    """
    comptime if is_gpu[target]():
        comptime n_ranks = n_gpus_per_node * n_nodes
        comptime n_mapped = _n_mapped[
            target, use_shmem, n_gpus_per_node, n_ranks
        ]()
        comptime top_k = token_fmt_type.top_k
        comptime hidden_size = token_fmt_type.hidden_size
        check_config[
            n_experts,
            n_ranks,
            hidden_size,
            token_fmt_type.hidden_multiple,
            top_k,
            target,
        ]()
        _check_protocol[
            protocol, target, Bool(input_scales_wrapper), tokens_are_sent
        ]()
        _check_carried[token_fmt_type, n_experts, n_ranks, protocol]()
        comptime op = "dispatch"
        comptime dispatch_layout = dispatch_layout_of[
            token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
        ]()
        var counters = counters_of[n_experts, target](
            op, atomic_counters, dispatch_layout
        )
        comptime n_choices = _n_given_choices[token_fmt_type]()
        _check_tokens[target, hidden_size, n_choices, max_token_per_rank](
            op, counters, input_tokens, topk_ids
        )
        _check_dispatch_weights[protocol, n_choices](
            op, router_weights, Int(input_tokens.dim[0]())
        )
        comptime assert not (
            fused_shared_expert and Bool(input_scales_wrapper)
        ), "max_ep: fused_shared_expert takes no input scales"
        launch_dispatch[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_token_per_rank,
            n_gpus_per_node,
            input_scales_wrapper,
            use_shmem,
            protocol,
            n_sms,
            tokens_are_sent,
        ](
            input_tokens,
            topk_ids,
            router_weights,
            rows,
            _row_tables[dispatch_layout, fused_shared_expert, output_layout](
                op, row_offsets, expert_ids, src_info
            ),
            src_info,
            peer_buffers[n_ranks, n_mapped](op, "send_ptrs", send_ptrs),
            peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs),
            peer_buffers[n_ranks, n_mapped](
                op, "recv_count_ptrs", recv_count_ptrs
            ),
            counters,
            context,
        )
        return
    ep_dispatch_async_kernel_api[
        token_fmt_type,
        n_experts,
        max_token_per_rank,
        n_gpus_per_node,
        n_nodes,
        target,
        input_scales_wrapper,
        use_shmem,
        fused_shared_expert,
        protocol,
        tokens_are_sent=tokens_are_sent,
    ](
        atomic_counters,
        input_tokens,
        topk_ids,
        send_ptrs,
        recv_ptrs,
        recv_count_ptrs,
        context,
        router_weights,
    )
    ep_dispatch_wait_kernel_api[
        token_fmt_type,
        n_experts,
        max_token_per_rank,
        n_gpus_per_node,
        n_nodes,
        target,
        use_shmem,
        fused_shared_expert,
        output_layout,
        protocol,
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
    protocol: Int = EXPERT_SLOTS,
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
        protocol: That of the dispatch. With a reduced one the weighted
            rows of a token are added here, and one partial sum of them sent;
            those of this rank's own tokens are left to `combine_wait`.
        partial_dtype: Element type of a partial sum.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        atomic_counters: Local words; they know the last dispatch's rows.
        input_tokens: Expert rows, `[n_output_rows, hidden_size]`, where the
            last dispatch put them.
        src_info: Token and choice of each row, `[n_output_rows, 2]`.
        send_ptrs: Put buffers, where SHMEM reaches other hosts; to the rest,
            rows go out straight from `input_tokens`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        If an argument does not fit (nothing is sent), or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = _n_mapped[target, use_shmem, n_gpus_per_node, n_ranks]()
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        MESSAGE_ALIGN // size_of[Scalar[combine_dtype]](),
        top_k,
        target,
    ]()
    comptime op = "combine_async"
    comptime combine_layout = combine_layout_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_token_per_rank,
        protocol,
        partial_dtype,
    ]()
    var counters = counters_of[n_experts, target](
        op, atomic_counters, combine_layout
    )
    var n_rows = Int(input_tokens.dim[0]())
    _check_expert_rows[hidden_size](op, input_tokens, src_info)
    var recv_bufs = peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs)
    var counts = peer_buffers[n_ranks, n_mapped](
        op, "recv_count_ptrs", recv_count_ptrs
    )
    comptime if is_gpu[target]():
        launch_combine_async[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_token_per_rank,
            n_gpus_per_node,
            use_shmem,
            protocol,
            partial_dtype,
            n_sms,
        ](
            input_tokens,
            src_info,
            peer_buffers[n_ranks, n_mapped](op, "send_ptrs", send_ptrs),
            recv_bufs,
            counts,
            counters,
            context,
        )
    elif combine_layout.is_reduced():
        reduced_combine_async_host[
            combine_dtype,
            partial_dtype,
            hidden_size,
            n_experts,
            n_ranks,
            combine_layout,
        ](
            imm(input_tokens),
            n_rows,
            imm(src_info),
            recv_bufs,
            counts,
            counters,
        )
    else:
        combine_async_host[
            combine_dtype, hidden_size, n_experts, n_ranks, combine_layout
        ](
            imm(input_tokens),
            n_rows,
            imm(src_info),
            recv_bufs,
            counts,
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
    fused_shared_expert: Bool = False,
    protocol: Int = EXPERT_SLOTS,
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
    shared_rows: SharedRows = SharedRows.none(),
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
        fused_shared_expert: Whether to add `shared_rows`.
        protocol: As in `ep_combine_async_kernel_api`.
        partial_dtype: As in `ep_combine_async_kernel_api`.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.
        shares_gpu: Whether other ranks may run on this rank's GPU.

    Args:
        output_tokens: Results, `[n_tokens, hidden_size]`.
        atomic_counters: Local words.
        router_weights: Weight of each choice, `[n_tokens, top_k]`; not read
            with a reduced protocol, whose dispatch has them.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.
        shared_rows: The expert rows that `combine_async` took. Read are the
            shared expert's, which come first, if it is fused, and with
            a reduced protocol those of this rank's own tokens.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = _n_mapped[target, use_shmem, n_gpus_per_node, n_ranks]()
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        MESSAGE_ALIGN // size_of[Scalar[combine_dtype]](),
        top_k,
        target,
    ]()
    comptime op = "combine_wait"
    comptime combine_layout = combine_layout_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_token_per_rank,
        protocol,
        partial_dtype,
    ]()
    var counters = counters_of[n_experts, target](
        op, atomic_counters, combine_layout
    )
    var n_tokens = Int(output_tokens.dim[0]())
    _check_results[target, hidden_size, top_k, max_token_per_rank, protocol](
        op, counters, output_tokens, router_weights
    )
    comptime if fused_shared_expert:
        check_shared_rows[target](op, counters, shared_rows.n_rows, n_tokens)
    var recv_bufs = peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs)
    var counts = peer_buffers[n_ranks, n_mapped](
        op, "recv_count_ptrs", recv_count_ptrs
    )
    comptime if is_gpu[target]():
        launch_combine_wait[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_token_per_rank,
            n_gpus_per_node,
            use_shmem,
            fused_shared_expert,
            protocol,
            partial_dtype,
            n_sms,
            shares_gpu,
        ](
            output_tokens,
            router_weights,
            shared_rows,
            recv_bufs,
            counts,
            counters,
            context,
        )
    elif combine_layout.is_reduced():
        reduced_combine_wait_host[
            combine_dtype,
            partial_dtype,
            hidden_size,
            n_experts,
            n_ranks,
            combine_layout,
            fused_shared_expert,
        ](
            mut_(output_tokens),
            n_tokens,
            shared_rows,
            recv_bufs[counters.my_rank()],
            counts,
            counters,
        )
    else:
        combine_wait_host[
            combine_dtype,
            hidden_size,
            n_experts,
            n_ranks,
            combine_layout,
            fused_shared_expert,
        ](
            mut_(output_tokens),
            imm(router_weights),
            n_tokens,
            shared_rows,
            recv_bufs[counters.my_rank()],
            counts,
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
    fused_shared_expert: Bool = False,
    protocol: Int = EXPERT_SLOTS,
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
        fused_shared_expert: Whether the first rows of `input_tokens` are the
            shared expert's, and are added instead of sent.
        protocol: As in `ep_combine_async_kernel_api`.
        partial_dtype: As in `ep_combine_async_kernel_api`.
        n_sms: Most multiprocessors of a GPU that it may use; 0: all.

    Args:
        output_tokens: Results, `[n_tokens, hidden_size]`.
        atomic_counters: Local words.
        input_tokens: Expert rows, `[n_output_rows, hidden_size]`, where the
            last dispatch put them.
        src_info: Token and choice of each row, `[n_output_rows, 2]`.
        router_weights: As in `ep_combine_wait_kernel_api`.
        send_ptrs: As in `ep_combine_async_kernel_api`.
        recv_ptrs: Addresses of all ranks' recv buffers, `[n_ranks]`.
        recv_count_ptrs: Addresses of all ranks' counts, `[n_ranks]`.
        context: The device.

    Raises:
        As the two halves do.
    """
    comptime if is_gpu[target]():
        comptime n_ranks = n_gpus_per_node * n_nodes
        comptime n_mapped = _n_mapped[
            target, use_shmem, n_gpus_per_node, n_ranks
        ]()
        check_config[
            n_experts,
            n_ranks,
            hidden_size,
            MESSAGE_ALIGN // size_of[Scalar[combine_dtype]](),
            top_k,
            target,
        ]()
        comptime op = "combine"
        comptime combine_layout = combine_layout_of[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_token_per_rank,
            protocol,
            partial_dtype,
        ]()
        var counters = counters_of[n_experts, target](
            op, atomic_counters, combine_layout
        )
        _check_expert_rows[hidden_size](op, input_tokens, src_info)
        _check_results[
            target, hidden_size, top_k, max_token_per_rank, protocol
        ](op, counters, output_tokens, router_weights)
        comptime if fused_shared_expert:
            check_shared_rows[target](
                op,
                counters,
                Int(input_tokens.dim[0]()),
                Int(output_tokens.dim[0]()),
            )
        launch_combine[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_token_per_rank,
            n_gpus_per_node,
            use_shmem,
            fused_shared_expert,
            protocol,
            partial_dtype,
            n_sms,
        ](
            output_tokens,
            input_tokens,
            src_info,
            router_weights,
            peer_buffers[n_ranks, n_mapped](op, "send_ptrs", send_ptrs),
            peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs),
            peer_buffers[n_ranks, n_mapped](
                op, "recv_count_ptrs", recv_count_ptrs
            ),
            counters,
            context,
        )
        return
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
        protocol,
        partial_dtype,
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
        fused_shared_expert,
        protocol,
        partial_dtype,
    ](
        output_tokens,
        atomic_counters,
        router_weights,
        recv_ptrs,
        recv_count_ptrs,
        context,
        SharedRows(
            mut_(input_tokens).unsafe_bitcast[UInt8](),
            Int(input_tokens.dim[0]()),
        ),
    )
