# SPDX-License-Identifier: Apache-2.0
"""The launchers of dispatch: its two halves, both in one, and tokens sent first."""
from layout import TileTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from ..cpu.dispatch import cpu_dispatch_async, cpu_dispatch_wait, GivenTokens
from ..cpu.rank import CpuRank
from ..dispatch_by_expert.phase import dispatch_group_of
from ..gpu_launch import (
    InputScales,
    launch_dispatch,
    launch_dispatch_async,
    launch_dispatch_wait,
)
from ..launch_checks import check_config, counters_of, imm, mut_, peer_buffers
from ..layout import EXPERT_SLOTS
from ..token_format import RouterWeights, TokenFormat
from .checks import (
    check_dispatch_weights,
    check_metadata,
    check_protocol,
    check_tokens,
    n_given_choices,
    n_mapped_ranks,
    row_tables,
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
    fused_shared_expert: Bool = False,
    protocol: Int = EXPERT_SLOTS,
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

    Args:
        atomic_counters: Local words, `[EPLocalSyncCounters.total_size()]`.
        input_tokens: Tokens, `[n_tokens, hidden_size]`.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`. With a format whose
            tokens carry choices, `[n_tokens, router_top_k]`, anything.
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
    comptime n_mapped = n_mapped_ranks[
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
    comptime assert not (
        fused_shared_expert and Bool(input_scales_wrapper)
    ), "max_ep: fused_shared_expert takes no input scales"
    check_protocol[protocol, target, Bool(input_scales_wrapper)]()
    check_metadata[token_fmt_type, n_experts, n_ranks, protocol]()
    comptime op = "dispatch_async"
    comptime dispatch_group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
    ]()
    var counters = counters_of[n_experts, target](
        op, atomic_counters, dispatch_group
    )
    var n_tokens = Int(input_tokens.dim[0]())
    comptime n_choices = n_given_choices[token_fmt_type]()
    check_tokens[target, hidden_size, n_choices, max_token_per_rank](
        op, counters, input_tokens, topk_ids
    )
    check_dispatch_weights[protocol, n_choices](op, router_weights, n_tokens)
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
    else:
        cpu_dispatch_async[
            token_fmt_type, input_scales_wrapper, fused_shared_expert
        ](
            GivenTokens(
                imm(input_tokens),
                imm(topk_ids),
                router_weights.weights,
                n_tokens,
            ),
            CpuRank[dispatch_group](
                op, counters.dispatch_sent(), counters, recv_bufs, counts
            ),
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
    comptime n_mapped = n_mapped_ranks[
        target, use_shmem, n_gpus_per_node, n_ranks
    ]()
    comptime hidden_size = token_fmt_type.hidden_size
    comptime dispatch_group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
    ]()
    comptime n_local_experts = dispatch_group.n_local_experts()
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        token_fmt_type.hidden_multiple,
        token_fmt_type.top_k,
        target,
    ]()
    check_protocol[protocol, target, False]()
    check_metadata[token_fmt_type, n_experts, n_ranks, protocol]()
    comptime op = "dispatch_wait"
    var counters = counters_of[n_experts, target](
        op, atomic_counters, dispatch_group
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
            row_tables[dispatch_group, fused_shared_expert, output_layout](
                op, row_offsets, expert_ids, src_info
            ),
            src_info,
            recv_bufs,
            counts,
            counters,
            context,
        )
    else:
        var tables = row_tables[
            dispatch_group, fused_shared_expert, output_layout
        ](op, row_offsets, expert_ids, src_info)
        cpu_dispatch_wait[token_fmt_type](
            rows,
            Int(src_info.dim[0]()),
            tables,
            mut_(src_info),
            CpuRank[dispatch_group](
                op, counters.dispatch_received(), counters, recv_bufs, counts
            ),
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
        comptime n_mapped = n_mapped_ranks[
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
        check_protocol[protocol, target, Bool(input_scales_wrapper)]()
        check_metadata[token_fmt_type, n_experts, n_ranks, protocol]()
        comptime op = "dispatch"
        comptime dispatch_group = dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_token_per_rank, protocol
        ]()
        var counters = counters_of[n_experts, target](
            op, atomic_counters, dispatch_group
        )
        comptime n_choices = n_given_choices[token_fmt_type]()
        check_tokens[target, hidden_size, n_choices, max_token_per_rank](
            op, counters, input_tokens, topk_ids
        )
        check_dispatch_weights[protocol, n_choices](
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
        ](
            input_tokens,
            topk_ids,
            router_weights,
            rows,
            row_tables[dispatch_group, fused_shared_expert, output_layout](
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
