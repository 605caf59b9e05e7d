# SPDX-License-Identifier: Apache-2.0
"""The kernels of MAX's `ep_comm`, by their names and argument lists.

Each makes a phase of its arguments and runs it. Parameters that MAX's kernels do not
have come last and have defaults. Our launchers do not use them: they start
`phase_kernel` (`device/phase.mojo`).
"""
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA
from std.sys import size_of
from std.utils import StaticTuple

from .combine_rows.phase import CombineRows
from .counters import EPLocalSyncCounters
from .device.phase import unused
from .dispatch_by_expert.phase import DispatchByExpert
from .flags import FlagPointer
from .arguments import imm
from .layout import Addressing, Group, message_bytes, plain_token_bytes, Returns
from .token_format import BytePointer, SharedRows, TokenFormat


@always_inline
def _sized[
    T: AnyType, length: Int, //, n: Int
](buffers: Array[Pointer[T, MutUntrackedOrigin], length]) -> Array[
    Pointer[T, MutUntrackedOrigin], n
]:
    """Copies buffers whose number is the group's, which no type says."""
    comptime assert length == n, "the buffers of another group"
    return rebind[Array[Pointer[T, MutUntrackedOrigin], n]](buffers).copy()


@always_inline
def _dispatch_group[
    token_fmt_type: TokenFormat,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    p2p_world_size: Int,
    use_shmem: Bool,
    is_padded: Bool,
    fused_shared_expert: Bool,
]() -> Group:
    """Describes the group of a dispatch kernel by the kernel's parameters."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=token_fmt_type.top_k,
        dispatch_msg_bytes=token_fmt_type.msg_bytes,
        addressing=Addressing.BY_EXPERT,
        returns=Returns.ROWS,
        is_padded=is_padded,
        fused_shared_expert=fused_shared_expert,
        n_ranks_per_node=p2p_world_size,
        use_shmem=use_shmem,
        num_threads=num_threads,
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
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
    input_scales_wrapper: Optional[
        def[dtype: DType](Int) capturing -> Scalar[dtype]
    ] = None,
    use_shmem: Bool = True,
    fused_shared_expert: Bool = False,
](
    input_tokens: TileTensor[
        input_type, input_tokens_layout, ImmUntrackedOrigin
    ],
    topk_ids: TileTensor[DType.int32, topk_ids_layout, ImmUntrackedOrigin],
    send_buf_p: BytePointer,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends each token to its experts; returns without waiting for receivers.

    Launch: `grid_dim` in `[1, n_sms]`, `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, three warps or more.
        input_tokens_layout: Layout of the tokens.
        topk_ids_layout: Layout of the ids.
        n_sms: Multiprocessors of the device.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Slots of one pair.
        p2p_world_size: Ranks whose memory is reached by pointers.
        token_fmt_type: Wire format of a token.
        input_scales_wrapper: Gives the factor of a token for an expert id.
        use_shmem: Whether the others are reached through SHMEM.
        fused_shared_expert: Whether to stage tokens for `dispatch_wait_kernel`.

    Args:
        input_tokens: `[n_tokens, hidden_size]`, rows aligned to 16 bytes.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`; `-1`: no expert.
        send_buf_p: Where messages wait to be put to other nodes,
            `[max_tokens_per_rank * top_k, msg_bytes]` of symmetric memory. Read
            with `use_shmem`; to the rest, tokens go straight from `input_tokens`.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """
    comptime group = _dispatch_group[
        token_fmt_type,
        num_threads,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        p2p_world_size,
        use_shmem,
        False,
        fused_shared_expert,
    ]()
    DispatchByExpert[group, token_fmt_type, input_type](
        imm(input_tokens),
        imm(topk_ids),
        Int32(Int(input_tokens.dim[0]())),
        unused[token_fmt_type.Rows](),
        0,
        {
            unused[Pointer[UInt32, MutUntrackedOrigin]](),
            unused[Pointer[Int32, MutUntrackedOrigin]](),
        },
        unused[Pointer[Int32, MutUntrackedOrigin]](),
        Array[BytePointer, group.n_ranks_per_node](fill=send_buf_p),
        _sized[group.n_ranks_per_node](recv_buf_ptrs),
        _sized[group.n_ranks_per_node](recv_count_ptrs),
        {ep_counters.words},
        my_rank,
    ).run_scaled[input_scales_wrapper, True, False]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
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
    row_offsets: Pointer[UInt32, MutUntrackedOrigin],
    expert_ids: Pointer[Int32, MutUntrackedOrigin],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sorts the messages into rows by expert, as they arrive.

    Launch: `grid_dim` in `[1, n_sms]`, `block_dim = num_threads`.

    Parameters:
        num_threads: Threads of a block.
        n_sms: Multiprocessors of the device.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Slots of one pair.
        p2p_world_size: Ranks whose memory is reached by pointers.
        token_fmt_type: Wire format of a token.
        use_shmem: Whether the others are reached through SHMEM.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.

    Args:
        rows: The output tensors, `n_rows_max` rows.
        n_rows_max: Rows that the output tensors hold.
        row_offsets: First row of each group and the end, `[n_groups + 1]`. Padded:
            rows of each local expert, `[n_local_experts]`.
        expert_ids: Number of each group, `[n_groups]`. Padded: first row and rows
            of each pair, `[n_pairs, 2]`.
        src_info: `[n_rows_max, 2]`: token on its source rank, k; for the shared
            expert token, -1.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = _dispatch_group[
        token_fmt_type,
        num_threads,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        p2p_world_size,
        use_shmem,
        is_padded,
        fused_shared_expert,
    ]()
    DispatchByExpert[group, token_fmt_type, DType.bfloat16](
        unused[Pointer[BFloat16, ImmUntrackedOrigin]](),
        unused[Pointer[Int32, ImmUntrackedOrigin]](),
        0,
        rows,
        n_rows_max,
        {row_offsets, expert_ids},
        src_info,
        _sized[group.n_ranks_per_node](recv_buf_ptrs),
        _sized[group.n_ranks_per_node](recv_buf_ptrs),
        _sized[group.n_ranks_per_node](recv_count_ptrs),
        {ep_counters.words},
        my_rank,
    ).run[False, True]()


@always_inline
def _combine_group[
    combine_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    p2p_world_size: Int,
    use_shmem: Bool,
    fused_shared_expert: Bool,
]() -> Group:
    """Describes the group of a combine kernel by the kernel's parameters."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=message_bytes(
            plain_token_bytes(hidden_size, size_of[Scalar[combine_dtype]]())
        ),
        fused_shared_expert=fused_shared_expert,
        n_ranks_per_node=p2p_world_size,
        use_shmem=use_shmem,
        num_threads=num_threads,
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
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
    input_tokens: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int32,
    src_info: Pointer[Int32, ImmUntrackedOrigin],
    send_buf_p: BytePointer,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends each expert row back to the rank its token came from.

    Launch: `grid_dim` in `[1, n_sms]`, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and results.
        num_threads: Threads of a block, two warps or more.
        n_sms: Multiprocessors of the device.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        p2p_world_size: Ranks whose memory is reached by pointers.
        use_shmem: Whether the others are reached through SHMEM.

    Args:
        input_tokens: Expert rows, `[n_rows_max, hidden_size]`, in the order of
            the last dispatch, aligned to 16 bytes.
        n_rows_max: Rows of `input_tokens` and `src_info`.
        src_info: `[n_rows_max, 2]` from that dispatch.
        send_buf_p: Where rows wait to be put to other nodes, `[n_ranks *
            max_tokens_per_rank * top_k]` combine messages of symmetric memory.
            Read with `use_shmem`; to the rest, rows go straight from
            `input_tokens`.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = _combine_group[
        combine_dtype,
        num_threads,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        p2p_world_size,
        use_shmem,
        False,
    ]()
    CombineRows[group, combine_dtype](
        BytePointer(unsafe_from_address=Int(input_tokens)),
        n_rows_max,
        src_info,
        unused[Pointer[Scalar[combine_dtype], MutUntrackedOrigin]](),
        unused[Pointer[Float32, ImmUntrackedOrigin]](),
        0,
        Array[BytePointer, group.n_ranks_per_node](fill=send_buf_p),
        _sized[group.n_ranks_per_node](recv_buf_ptrs),
        _sized[group.n_ranks_per_node](recv_count_ptrs),
        {ep_counters.words},
        my_rank,
    ).run[True, False]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
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
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
    shared_rows: SharedRows,
):
    """Adds the weighted rows of each token, as they arrive.

    Launch: `grid_dim` in `[1, n_sms]`, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and results.
        num_threads: Threads of a block.
        n_sms: Multiprocessors of the device.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        p2p_world_size: Ranks whose memory is reached by pointers.
        use_shmem: Whether the others are reached through SHMEM.
        fused_shared_expert: Whether to add the shared expert's rows.

    Args:
        output_tokens: `[n_tokens, hidden_size]`.
        router_weights: `[n_tokens, top_k]`.
        n_tokens: Tokens that this rank dispatched.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
        shared_rows: The expert rows that `combine_async_kernel` took. Read are
            those of this rank's own tokens, and a fused shared expert's.
    """
    comptime group = _combine_group[
        combine_dtype,
        num_threads,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        p2p_world_size,
        use_shmem,
        fused_shared_expert,
    ]()
    CombineRows[group, combine_dtype](
        shared_rows.rows,
        Int32(shared_rows.n_rows),
        unused[Pointer[Int32, ImmUntrackedOrigin]](),
        output_tokens,
        router_weights,
        n_tokens,
        _sized[group.n_ranks_per_node](recv_buf_ptrs),
        _sized[group.n_ranks_per_node](recv_buf_ptrs),
        _sized[group.n_ranks_per_node](recv_count_ptrs),
        {ep_counters.words},
        my_rank,
    ).run[False, True]()
