# SPDX-License-Identifier: Apache-2.0
"""The kernels of MAX's `ep_comm`, by their names and argument lists.

They are for callers of MAX's kernels. Our own launchers start `kernel_entry`
(`device/kernel.mojo`); the kernels' code is in the folders of the four phases. Launch:
`grid_dim` in `[1, n_sms]`, `block_dim = num_threads`, three warps or more. Parameters
that MAX's kernels do not have come last and have defaults. What `api.mojo` does not list:

    send_buf_p      where messages wait to be put to other nodes, symmetric memory:
                    `[max_tokens_per_rank * top_k]` dispatch messages, `n_ranks` times as
                    many of combine. Read with `use_shmem`; to the rest, tokens and rows
                    go straight from where they are given
    recv_buf_ptrs   recv buffers of the p2p world, and
    recv_count_ptrs its counts buffers; all mapped and peer-writable until every receiver
                    has returned
    my_rank         this rank; not read, for the counters know it
"""
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA
from std.utils import StaticTuple

from ..combine_rows.kernel import CombineRows
from ..dispatch_by_expert.kernel import DispatchByExpert
from ..protocol.addressing import Addressing
from ..protocol.arguments import (
    CombinedTokens,
    DispatchedRows,
    GivenTokens,
    InputScales,
)
from ..protocol.call import Buffers, imm
from ..protocol.counters import EPLocalSyncCounters
from ..protocol.flags import FlagPointer
from ..protocol.kernel_argument import ImmPointer, MutPointer, unused
from ..protocol.layout import Group
from ..protocol.message_sizes import combine_msg_bytes
from ..protocol.token_format import BytePointer, LocalRows, TokenFormat


comptime _MostThreads[n: Int] = StaticTuple[Int32, 1](Int32(n))


@always_inline
def _sized[
    T: AnyType, length: Int, //, n: Int
](buffers: Array[MutPointer[T], length]) -> Array[MutPointer[T], n]:
    """Copies buffers whose number is the group's, which no type says."""
    comptime assert length == n, "the buffers of another group"
    return rebind[Array[MutPointer[T], n]](buffers).copy()


@always_inline
def _buffers[
    n_experts: Int, p2p_world_size: Int, //, group: Group
](
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
) -> Buffers[group]:
    return {
        _sized[group.n_mapped](recv_buf_ptrs),
        _sized[group.n_mapped](recv_count_ptrs),
        {ep_counters.words},
    }


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=_MostThreads[num_threads])
def dispatch_async_kernel[
    input_type: DType,
    num_threads: Int,
    input_tokens_layout: TensorLayout,
    topk_ids_layout: TensorLayout,
    n_sms: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    p2p_world_size: Int,
    token_fmt_type: TokenFormat,
    input_scales_wrapper: InputScales = None,
    use_shmem: Bool = True,
    fused_shared_expert: Bool = False,
](
    input_tokens: TileTensor[input_type, input_tokens_layout, ImmUntrackedOrigin],
    topk_ids: TileTensor[DType.int32, topk_ids_layout, ImmUntrackedOrigin],
    send_buf_p: BytePointer,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends each token to its experts; does not wait for receivers."""
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=token_fmt_type.top_k,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=Addressing.BY_EXPERT,
        fused_shared_expert=fused_shared_expert,
        n_mapped=p2p_world_size if use_shmem else 0,
        num_threads=num_threads,
    )
    DispatchByExpert[group, token_fmt_type, input_type](
        {
            imm(input_tokens),
            imm(topk_ids),
            unused[ImmPointer[Float32]](),
            Int(input_tokens.dim[0]()),
        },
        unused[DispatchedRows[group, token_fmt_type]](),
        _buffers[group](recv_buf_ptrs, recv_count_ptrs, ep_counters),
        Array[BytePointer, group.n_mapped](fill=send_buf_p),
    ).run_scaled[input_scales_wrapper, True, False]()


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=_MostThreads[num_threads])
def dispatch_wait_kernel[
    num_threads: Int,
    n_sms: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    p2p_world_size: Int,
    token_fmt_type: TokenFormat,
    use_shmem: Bool = True,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    row_offsets: MutPointer[UInt32],
    expert_ids: MutPointer[Int32],
    src_info: MutPointer[Int32],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sorts the messages into rows by expert, as they arrive."""
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=token_fmt_type.top_k,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=Addressing.BY_EXPERT,
        is_padded=is_padded,
        fused_shared_expert=fused_shared_expert,
        n_mapped=p2p_world_size if use_shmem else 0,
        num_threads=num_threads,
    )
    DispatchByExpert[group, token_fmt_type, DType.bfloat16](
        unused[GivenTokens[DType.bfloat16]](),
        {rows, Int(n_rows_max), {row_offsets, expert_ids}, src_info},
        _buffers[group](recv_buf_ptrs, recv_count_ptrs, ep_counters),
        _sized[group.n_mapped](recv_buf_ptrs),
    ).run[False, True]()


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=_MostThreads[num_threads])
def combine_async_kernel[
    combine_dtype: DType,
    num_threads: Int,
    n_sms: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    p2p_world_size: Int,
    use_shmem: Bool = True,
](
    input_tokens: ImmPointer[Scalar[combine_dtype]],
    n_rows_max: Int32,
    src_info: ImmPointer[Int32],
    send_buf_p: BytePointer,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends each expert row back to the rank its token came from."""
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[combine_dtype](hidden_size),
        n_mapped=p2p_world_size if use_shmem else 0,
        num_threads=num_threads,
    )
    CombineRows[group, combine_dtype](
        {{{unsafe_from_address = Int(input_tokens)}, Int(n_rows_max)}, src_info},
        unused[CombinedTokens[combine_dtype]](),
        _buffers[group](recv_buf_ptrs, recv_count_ptrs, ep_counters),
        Array[BytePointer, group.n_mapped](fill=send_buf_p),
    ).run[True, False]()


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=_MostThreads[num_threads])
def combine_wait_kernel[
    combine_dtype: DType,
    num_threads: Int,
    n_sms: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    p2p_world_size: Int,
    use_shmem: Bool = True,
    fused_shared_expert: Bool = False,
](
    output_tokens: MutPointer[Scalar[combine_dtype]],
    router_weights: ImmPointer[Float32],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
    shared_rows: LocalRows,
):
    """Adds the weighted rows of each token, as they arrive."""
    comptime group = Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=combine_msg_bytes[combine_dtype](hidden_size),
        fused_shared_expert=fused_shared_expert,
        n_mapped=p2p_world_size if use_shmem else 0,
        num_threads=num_threads,
    )
    CombineRows[group, combine_dtype](
        {shared_rows, unused[ImmPointer[Int32]]()},
        CombinedTokens(output_tokens, Int(n_tokens), router_weights),
        _buffers[group](recv_buf_ptrs, recv_count_ptrs, ep_counters),
        _sized[group.n_mapped](recv_buf_ptrs),
    ).run[False, True]()
