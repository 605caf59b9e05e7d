# SPDX-License-Identifier: Apache-2.0
"""The launchers of combine: its two halves, and both in one."""
from layout import TileTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.sys import size_of

from ..combine_rows.phase import combine_group_of
from ..cpu.combine import cpu_combine_async, cpu_combine_wait
from ..cpu.rank import CpuRank
from ..gpu_launch import (
    launch_combine,
    launch_combine_async,
    launch_combine_wait,
)
from ..launch_checks import (
    check_config,
    check_shared_rows,
    counters_of,
    imm,
    mut_,
    peer_buffers,
)
from ..layout import EXPERT_SLOTS, MESSAGE_ALIGN
from ..token_format import SharedRows
from .checks import check_expert_rows, check_results, n_mapped_ranks


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
    comptime n_mapped = n_mapped_ranks[
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
    comptime op = "combine_async"
    comptime combine_group = combine_group_of[
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
        op, atomic_counters, combine_group
    )
    var n_rows = Int(input_tokens.dim[0]())
    check_expert_rows[hidden_size](op, input_tokens, src_info)
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
    else:
        cpu_combine_async[combine_dtype, partial_dtype, hidden_size](
            SharedRows(mut_(input_tokens).unsafe_bitcast[UInt8](), n_rows),
            imm(src_info),
            CpuRank[combine_group](
                op, counters.combine_sent(), counters, recv_bufs, counts
            ),
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
            shared expert's, which come first, if it is fused, and those of
            this rank's own tokens, on GPUs and with a reduced protocol.

    Raises:
        If an argument does not fit, or a peer is late.
    """
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = n_mapped_ranks[
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
    comptime op = "combine_wait"
    comptime combine_group = combine_group_of[
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
        op, atomic_counters, combine_group
    )
    var n_tokens = Int(output_tokens.dim[0]())
    check_results[target, hidden_size, top_k, max_token_per_rank, protocol](
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
    else:
        cpu_combine_wait[partial_dtype, hidden_size, fused_shared_expert](
            mut_(output_tokens),
            n_tokens,
            imm(router_weights),
            shared_rows,
            CpuRank[combine_group](
                op, counters.combine_received(), counters, recv_bufs, counts
            ),
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
        comptime n_mapped = n_mapped_ranks[
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
        comptime combine_group = combine_group_of[
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
            op, atomic_counters, combine_group
        )
        check_expert_rows[hidden_size](op, input_tokens, src_info)
        check_results[target, hidden_size, top_k, max_token_per_rank, protocol](
            op, counters, output_tokens, router_weights
        )
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
