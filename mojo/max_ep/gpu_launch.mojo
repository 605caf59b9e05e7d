# SPDX-License-Identifier: Apache-2.0
"""Starts the GPU kernels: grid, block, and arguments in a kernel's form.

The launchers in `api/` have checked what they were given. Nothing here
waits for the device.
"""
from layout import TileTensor
from max.gpu.host import DeviceContext
from std.sys import size_of

from .combine_rows.phase import CombineRows
from .combine_sums.phase import CombineSums
from .counters import EPLocalSyncCounters
from .device.phase import enqueue, InputScales, unused
from .dispatch_by_expert.phase import dispatch_group_of, DispatchByExpert
from .dispatch_by_rank.phase import DispatchByRank
from .launch_checks import imm, mut_, p2p_buffers
from .layout import (
    addressing_of,
    EXPERT_SLOTS,
    Group,
    is_reduced_protocol,
    MESSAGE_ALIGN,
    message_bytes,
    plain_token_bytes,
    returns_of,
)
from .row_tables import RowTables
from .token_format import RouterWeights, SharedRows, TokenFormat
from .transport import PeerBuffers

comptime NUM_THREADS = 512
"""Threads of a block: 16 warps, with up to 128 registers a thread."""


comptime RANK_OF_COUNTERS = Int32(-1)
"""The rank stands in the counters, in device memory."""


def dispatch_group[
    Format: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    n_sms: Int = 0,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
    n_gpus_per_node: Int = n_ranks,
    use_shmem: Bool = False,
]() -> Group:
    """Describes the group of a dispatch."""
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=Format.top_k,
        hidden_size=Format.hidden_size,
        dispatch_msg_bytes=Format.msg_bytes,
        addressing=addressing_of(protocol),
        returns=returns_of(protocol),
        is_padded=is_padded,
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem,
        num_threads=NUM_THREADS,
        n_sms=n_sms,
    )


def launch_dispatch_async[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    input_scales_wrapper: InputScales,
    use_shmem: Bool,
    fused_shared_expert: Bool,
    protocol: Int,
    n_sms: Int,
](
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    router_weights: RouterWeights,
    send_bufs: PeerBuffers[n_ranks],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `dispatch_async_kernel` of a protocol."""
    comptime if protocol != EXPERT_SLOTS:
        comptime assert not use_shmem, "max_ep: rank_slots is for one host"
        comptime group = dispatch_group[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            n_sms,
            False,
            fused_shared_expert,
        ]()
        enqueue[True, False](
            DispatchByRank[group, token_fmt_type, input_tokens.dtype](
                imm(input_tokens),
                imm(topk_ids),
                router_weights.weights,
                Int32(Int(input_tokens.dim[0]())),
                unused[token_fmt_type.Rows](),
                0,
                {
                    unused[Pointer[UInt32, MutUntrackedOrigin]](),
                    unused[Pointer[Int32, MutUntrackedOrigin]](),
                },
                unused[Pointer[Int32, MutUntrackedOrigin]](),
                p2p_buffers[UInt8, group.n_ranks](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks](recv_counts),
                {counters.words},
            ),
            context,
        )
    else:
        comptime group = dispatch_group[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            n_sms,
            False,
            fused_shared_expert,
            True,
            n_gpus_per_node,
            use_shmem,
        ]()
        enqueue[True, False, input_scales_wrapper](
            DispatchByExpert[group, token_fmt_type, input_tokens.dtype](
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
                p2p_buffers[UInt8, group.n_ranks_per_node](send_bufs),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks_per_node](recv_counts),
                {counters.words},
                RANK_OF_COUNTERS,
            ),
            context,
        )


def launch_dispatch_wait[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    use_shmem: Bool,
    protocol: Int,
    n_sms: Int,
    shares_gpu: Bool,
](
    rows: token_fmt_type.Rows,
    tables: RowTables[
        dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        ...,
    ],
    src_info: TileTensor[DType.int32, ...],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `dispatch_wait_kernel` of a protocol."""
    comptime if protocol != EXPERT_SLOTS:
        comptime group = dispatch_group[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            n_sms,
            tables.is_padded,
            tables.fused_shared_expert,
            shares_gpu,
        ]()
        enqueue[False, True](
            DispatchByRank[group, token_fmt_type, DType.bfloat16](
                unused[Pointer[BFloat16, ImmUntrackedOrigin]](),
                unused[Pointer[Int32, ImmUntrackedOrigin]](),
                unused[Pointer[Float32, ImmUntrackedOrigin]](),
                0,
                rows,
                Int32(Int(src_info.dim[0]())),
                {tables.row_offsets, tables.expert_ids},
                mut_(src_info),
                p2p_buffers[UInt8, group.n_ranks](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks](recv_counts),
                {counters.words},
            ),
            context,
        )
    else:
        comptime group = dispatch_group[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            n_sms,
            tables.is_padded,
            tables.fused_shared_expert,
            True,
            n_gpus_per_node,
            use_shmem,
        ]()
        enqueue[False, True](
            DispatchByExpert[group, token_fmt_type, DType.bfloat16](
                unused[Pointer[BFloat16, ImmUntrackedOrigin]](),
                unused[Pointer[Int32, ImmUntrackedOrigin]](),
                0,
                rows,
                Int32(Int(src_info.dim[0]())),
                {tables.row_offsets, tables.expert_ids},
                mut_(src_info),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks_per_node](recv_counts),
                {counters.words},
                RANK_OF_COUNTERS,
            ),
            context,
        )


def launch_dispatch[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    input_scales_wrapper: InputScales,
    use_shmem: Bool,
    protocol: Int,
    n_sms: Int,
](
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    router_weights: RouterWeights,
    rows: token_fmt_type.Rows,
    tables: RowTables[
        dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        ...,
    ],
    src_info: TileTensor[DType.int32, ...],
    send_bufs: PeerBuffers[n_ranks],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `dispatch_kernel` of a protocol."""
    comptime if protocol != EXPERT_SLOTS:
        comptime assert not use_shmem, "max_ep: rank_slots is for one host"
        comptime group = dispatch_group[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            n_sms,
            tables.is_padded,
            tables.fused_shared_expert,
        ]()
        enqueue[True, True](
            DispatchByRank[group, token_fmt_type, input_tokens.dtype](
                imm(input_tokens),
                imm(topk_ids),
                router_weights.weights,
                Int32(Int(input_tokens.dim[0]())),
                rows,
                Int32(Int(src_info.dim[0]())),
                {tables.row_offsets, tables.expert_ids},
                mut_(src_info),
                p2p_buffers[UInt8, group.n_ranks](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks](recv_counts),
                {counters.words},
            ),
            context,
        )
    else:
        comptime group = dispatch_group[
            token_fmt_type,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            n_sms,
            tables.is_padded,
            tables.fused_shared_expert,
            True,
            n_gpus_per_node,
            use_shmem,
        ]()
        enqueue[True, True, input_scales_wrapper](
            DispatchByExpert[group, token_fmt_type, input_tokens.dtype](
                imm(input_tokens),
                imm(topk_ids),
                Int32(Int(input_tokens.dim[0]())),
                rows,
                Int32(Int(src_info.dim[0]())),
                {tables.row_offsets, tables.expert_ids},
                mut_(src_info),
                p2p_buffers[UInt8, group.n_ranks_per_node](send_bufs),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks_per_node](recv_counts),
                {counters.words},
                RANK_OF_COUNTERS,
            ),
            context,
        )


def combine_group[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    use_shmem: Bool,
    protocol: Int,
    partial_dtype: DType,
    n_sms: Int,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
]() -> Group:
    """Describes the group of a combine. Rows go back alike for each addressing.
    """
    comptime has_sums = is_reduced_protocol(protocol)
    comptime sent_dtype = partial_dtype if has_sums else combine_dtype
    return Group(
        n_experts=n_experts,
        n_ranks=n_ranks,
        max_tokens_per_rank=max_tokens_per_rank,
        top_k=top_k,
        hidden_size=hidden_size,
        combine_msg_bytes=message_bytes(
            plain_token_bytes(hidden_size, size_of[Scalar[sent_dtype]]())
        ),
        addressing=addressing_of(protocol if has_sums else 0),
        returns=returns_of(protocol if has_sums else 0),
        fused_shared_expert=fused_shared_expert,
        shares_gpu=shares_gpu,
        n_ranks_per_node=n_gpus_per_node,
        use_shmem=use_shmem,
        num_threads=NUM_THREADS,
        n_sms=n_sms,
    )


def launch_combine_async[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    use_shmem: Bool,
    protocol: Int,
    partial_dtype: DType,
    n_sms: Int,
](
    input_tokens: TileTensor[combine_dtype, ...],
    src_info: TileTensor[DType.int32, ...],
    send_bufs: PeerBuffers[n_ranks],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `combine_async_kernel` of a protocol."""
    comptime group = combine_group[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        n_gpus_per_node,
        use_shmem,
        protocol,
        partial_dtype,
        n_sms,
    ]()
    comptime if is_reduced_protocol(protocol):
        enqueue[True, False](
            CombineSums[
                group,
                combine_dtype,
                partial_dtype,
            ](
                mut_(input_tokens).unsafe_bitcast[UInt8](),
                Int32(Int(input_tokens.dim[0]())),
                Pointer[Scalar[combine_dtype], MutUntrackedOrigin](
                    unsafe_from_address=MESSAGE_ALIGN
                ),
                Int32(0),
                p2p_buffers[UInt8, group.n_ranks](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks](recv_counts),
                {counters.words},
            ),
            context,
        )
    else:
        enqueue[True, False](
            CombineRows[group, combine_dtype](
                mut_(input_tokens).unsafe_bitcast[UInt8](),
                Int32(Int(input_tokens.dim[0]())),
                imm(src_info),
                Pointer[Scalar[combine_dtype], MutUntrackedOrigin](
                    unsafe_from_address=MESSAGE_ALIGN
                ),
                Pointer[Float32, ImmUntrackedOrigin](
                    unsafe_from_address=MESSAGE_ALIGN
                ),
                Int32(0),
                p2p_buffers[UInt8, group.n_ranks_per_node](send_bufs),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks_per_node](recv_counts),
                {counters.words},
                RANK_OF_COUNTERS,
            ),
            context,
        )


def launch_combine_wait[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    use_shmem: Bool,
    fused_shared_expert: Bool,
    protocol: Int,
    partial_dtype: DType,
    n_sms: Int,
    shares_gpu: Bool,
](
    output_tokens: TileTensor[combine_dtype, ...],
    router_weights: TileTensor[DType.float32, ...],
    shared_rows: SharedRows,
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `combine_wait_kernel` of a protocol."""
    comptime group = combine_group[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        n_gpus_per_node,
        use_shmem,
        protocol,
        partial_dtype,
        n_sms,
        fused_shared_expert,
        shares_gpu,
    ]()
    comptime if is_reduced_protocol(protocol):
        enqueue[False, True](
            CombineSums[
                group,
                combine_dtype,
                partial_dtype,
            ](
                shared_rows.rows,
                Int32(shared_rows.n_rows),
                mut_(output_tokens),
                Int32(Int(output_tokens.dim[0]())),
                p2p_buffers[UInt8, group.n_ranks](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks](recv_counts),
                {counters.words},
            ),
            context,
        )
    else:
        enqueue[False, True](
            CombineRows[group, combine_dtype](
                shared_rows.rows,
                Int32(shared_rows.n_rows),
                Pointer[Int32, ImmUntrackedOrigin](
                    unsafe_from_address=MESSAGE_ALIGN
                ),
                mut_(output_tokens),
                imm(router_weights),
                Int32(Int(output_tokens.dim[0]())),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks_per_node](recv_counts),
                {counters.words},
                RANK_OF_COUNTERS,
            ),
            context,
        )


def launch_combine[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    n_gpus_per_node: Int,
    use_shmem: Bool,
    fused_shared_expert: Bool,
    protocol: Int,
    partial_dtype: DType,
    n_sms: Int,
](
    output_tokens: TileTensor[combine_dtype, ...],
    input_tokens: TileTensor[combine_dtype, ...],
    src_info: TileTensor[DType.int32, ...],
    router_weights: TileTensor[DType.float32, ...],
    send_bufs: PeerBuffers[n_ranks],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `combine_kernel` of a protocol."""
    comptime group = combine_group[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        n_gpus_per_node,
        use_shmem,
        protocol,
        partial_dtype,
        n_sms,
        fused_shared_expert,
    ]()
    comptime if is_reduced_protocol(protocol):
        enqueue[True, True](
            CombineSums[
                group,
                combine_dtype,
                partial_dtype,
            ](
                mut_(input_tokens).unsafe_bitcast[UInt8](),
                Int32(Int(input_tokens.dim[0]())),
                mut_(output_tokens),
                Int32(Int(output_tokens.dim[0]())),
                p2p_buffers[UInt8, group.n_ranks](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks](recv_counts),
                {counters.words},
            ),
            context,
        )
    else:
        enqueue[True, True](
            CombineRows[group, combine_dtype](
                mut_(input_tokens).unsafe_bitcast[UInt8](),
                Int32(Int(input_tokens.dim[0]())),
                imm(src_info),
                mut_(output_tokens),
                imm(router_weights),
                Int32(Int(output_tokens.dim[0]())),
                p2p_buffers[UInt8, group.n_ranks_per_node](send_bufs),
                p2p_buffers[UInt8, group.n_ranks_per_node](recv_bufs),
                p2p_buffers[UInt64, group.n_ranks_per_node](recv_counts),
                {counters.words},
                RANK_OF_COUNTERS,
            ),
            context,
        )
