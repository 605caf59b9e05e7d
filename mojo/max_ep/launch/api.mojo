# SPDX-License-Identifier: Apache-2.0
"""The launchers that Mojo programs call: thin wrappers over `launch.mojo`.

Names, parameters and arguments are those of MAX's `shmem.ep` (its public
documentation). Our own parameters come last and have defaults. For what they lack, such
as sums and fused forms, a program makes a `Group` and a `Call`, and uses `launch.mojo`, as
ops do.

A launcher raises if an argument does not fit (then nothing is sent), if a peer is
late, or if ids were out of range (then everything else is sent). Rank and time-out come
from the counters.

Parameters, here and in `kernels.mojo`:

    input_type             element type of the tokens
    token_fmt_type         wire format of a token
    combine_dtype          element type of expert rows and results
    hidden_size, top_k     elements of a row, experts of a token
    n_experts, n_ranks     of the group
    max_token_per_rank, max_tokens_per_rank
                           tokens that a rank may send
    n_gpus_per_node, p2p_world_size
                           ranks that one process drives, whose memory is mapped
    n_nodes                processes of the group
    target                 device kind of the tensors, `cpu` or `gpu`
    input_scales_wrapper   gives the float32 factor of a token for an expert id, applied
                           before the token is encoded; None: no factor. By expert only
    use_shmem              whether ranks of other nodes are reached through the SHMEM
                           library; CPU ranks map all regions and do not need it
    fused_shared_expert    whether this rank's own tokens come first in its rows
    is_padded              whether each expert has `expert_capacity` rows of its own
    addressing             how dispatch addresses a token
    num_threads, n_sms     threads of a block, multiprocessors of the device
    input_tokens_layout, topk_ids_layout
                           layouts of the two tensors

Arguments:

    atomic_counters, ep_counters
                           local words, `[EPLocalSyncCounters.total_size()]`
    input_tokens           dispatch: tokens `[n_tokens, hidden_size]`; combine: expert
                           rows `[n_rows_max, hidden_size]`, where the last dispatch put
                           them. Aligned to 16 bytes
    topk_ids               `[n_tokens, top_k]`, in `[-1, n_experts)`; -1: no expert
    router_weights         `[n_tokens, top_k]`
    rows, n_rows_max       the tensors of rows, of `token_fmt_type`; rows they hold
    row_offsets            packed: first row of each segment, and the end, uint32
                           `[n_segments + 1]`. Padded: rows of each local expert, int32
                           `[n_local_experts]`
    expert_ids             packed: number of each segment, `[n_segments]`. Padded: first
                           row within the expert's, and rows, of each (expert, source
                           rank), `[n_local_experts * n_ranks, 2]`
    src_info               token and choice of each row, `[n_rows_max, 2]`; choice -1: the
                           row of the shared expert
    output_tokens          results, `[n_tokens, hidden_size]`
    n_tokens               tokens that this rank dispatched
    expert_rows, shared_rows
                           the expert rows that the async part took: those of own tokens,
                           and of a fused shared expert, are not sent
    send_ptrs, recv_ptrs, recv_count_ptrs
                           addresses of all ranks' buffers, of dispatch or of combine,
                           `[n_ranks]` each
    context                the device
"""
from layout import TileTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from ..protocol.addressing import Addressing
from ..protocol.arguments import (
    combined_tokens,
    CombinedTokens,
    dispatched_rows,
    DispatchedRows,
    given_rows,
    given_tokens,
    GivenRows,
    GivenTokens,
    InputScales,
)
from ..protocol.call import Call, Form, peer_buffers
from ..protocol.kernel_argument import ImmPointer, unused
from ..protocol.layout import Group
from ..protocol.message_sizes import combine_msg_bytes
from ..protocol.token_format import LocalRows, TokenFormat
from .launch import launch_combine, launch_dispatch


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
](
    atomic_counters: TileTensor[DType.int32, ...],
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    send_ptrs: TileTensor[DType.uint64, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Starts sending tokens to their experts."""
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=token_fmt_type.top_k,
        hidden_size=token_fmt_type.hidden_size,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=addressing,
        fused_shared_expert=fused_shared_expert,
        n_mapped=n_gpus_per_node if use_shmem and is_gpu[target]() else 0,
    )
    var call = Call[group].of[target](
        "dispatch_async", atomic_counters, recv_ptrs, recv_count_ptrs
    )
    call.send_bufs = peer_buffers[group](call.op, "send_ptrs", send_ptrs)
    launch_dispatch[token_fmt_type, target, Form.ASYNC, input_scales_wrapper](
        call,
        given_tokens[token_fmt_type, target](call, input_tokens, topk_ids),
        unused[DispatchedRows[group, token_fmt_type]](),
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
    is_padded: Bool = False,
    addressing: Addressing = Addressing.BY_EXPERT,
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
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=token_fmt_type.top_k,
        hidden_size=token_fmt_type.hidden_size,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=addressing,
        is_padded=is_padded,
        fused_shared_expert=fused_shared_expert,
        n_mapped=n_gpus_per_node if use_shmem and is_gpu[target]() else 0,
    )
    var call = Call[group].of[target](
        "dispatch_wait", atomic_counters, recv_ptrs, recv_count_ptrs
    )
    launch_dispatch[token_fmt_type, target, Form.WAIT](
        call,
        unused[GivenTokens[DType.bfloat16]](),
        dispatched_rows[token_fmt_type](call, rows, row_offsets, expert_ids, src_info),
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
    addressing: Addressing = Addressing.BY_EXPERT,
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

    Rows of this rank's own tokens are left to the wait.
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[combine_dtype](hidden_size),
        addressing=addressing,
        n_mapped=n_gpus_per_node if use_shmem and is_gpu[target]() else 0,
    )
    var call = Call[group].of[target](
        "combine_async", atomic_counters, recv_ptrs, recv_count_ptrs
    )
    call.send_bufs = peer_buffers[group](call.op, "send_ptrs", send_ptrs)
    var given = given_rows[True](call, input_tokens, src_info)
    launch_combine[combine_dtype, target, Form.ASYNC](
        call, given, unused[CombinedTokens[combine_dtype]](), context
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
](
    output_tokens: TileTensor[combine_dtype, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    router_weights: TileTensor[DType.float32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
    expert_rows: LocalRows = unused[LocalRows](),
) raises:
    """Completes combine: the weighted sum of each token's expert rows.

    Rows that were not sent are read in `expert_rows`: the shared expert's and, on GPUs,
    those that this rank's experts made of its own tokens.
    """
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_gpus_per_node * n_nodes,
        max_tokens_per_rank=max_token_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[combine_dtype](hidden_size),
        addressing=addressing,
        fused_shared_expert=fused_shared_expert,
        n_mapped=n_gpus_per_node if use_shmem and is_gpu[target]() else 0,
    )
    var call = Call[group].of[target](
        "combine_wait", atomic_counters, recv_ptrs, recv_count_ptrs
    )
    var given = GivenRows(expert_rows, unused[ImmPointer[Int32]]())
    launch_combine[combine_dtype, target, Form.WAIT](
        call,
        given,
        combined_tokens[target](call, output_tokens, router_weights, given),
        context,
    )
