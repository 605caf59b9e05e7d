# SPDX-License-Identifier: Apache-2.0
"""Starts the GPU kernels: grid, block, and arguments in a kernel's form.

The launchers in `api/` have checked what they were given. Nothing here
waits for the device.
"""
from layout import Coord, TileTensor, row_major
from max.gpu.host import DeviceAttribute, DeviceContext, LaunchAttribute
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes

from .counters import EPLocalSyncCounters
from .expert_slots.combine import (
    combine_async_kernel,
    combine_kernel,
    combine_wait_kernel,
)
from .expert_slots.dispatch import (
    dispatch_async_kernel,
    dispatch_kernel,
    dispatch_layout_of,
    dispatch_wait_kernel,
)
from .launch_checks import imm, mut_, p2p_buffers
from .layout import EXPERT_SLOTS, is_gather_protocol, is_reduced_protocol
from .rank_slots.combine import (
    combine_async_kernel as rank_slots_combine_async_kernel,
    combine_kernel as rank_slots_combine_kernel,
    combine_wait_kernel as rank_slots_combine_wait_kernel,
)
from .rank_slots.deal import n_adding_blocks, n_sending_blocks
from .rank_slots.dispatch import (
    dispatch_async_kernel as rank_slots_dispatch_async_kernel,
    dispatch_kernel as rank_slots_dispatch_kernel,
    dispatch_wait_kernel as rank_slots_dispatch_wait_kernel,
    send_tokens_kernel,
)
from .row_tables import RowTables
from .shmem_modules import register_module
from .side_stream import check_sent, fork, join
from .token_format import (
    RouterWeights,
    SharedRows,
    TokenFormat,
)
from .transport import PeerBuffers

comptime NUM_THREADS = 512
"""Threads of a block: 16 warps, with up to 128 registers a thread."""


@always_inline
def n_sms_of_device() -> Int:
    """Counts the multiprocessors of the kind of device that is compiled for.

    A launch has at most one block on each, so that all are resident at once.
    """
    return materialize[DeviceContext.default_device_info.sm_count]()


@always_inline
def _n_blocks[n_sms: Int](context: DeviceContext) raises -> Int:
    """Counts the blocks of a launch: one a multiprocessor, at most `n_sms`.

    A device may have fewer multiprocessors than its kind: another product, or a
    part of one.
    """
    var n = min(
        n_sms_of_device(),
        context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
    )
    comptime if n_sms > 0:
        n = min(n, n_sms)
    return n


@always_inline
def _await_sent_tokens[protocol: Int](context: DeviceContext) raises:
    """Lets a launch wait for `send_tokens`, if the protocol has it."""
    comptime if is_gather_protocol(protocol):
        join(context)


@always_inline
def _check_sent_tokens[
    protocol: Int, tokens_are_sent: Bool
](context: DeviceContext, counters: EPLocalSyncCounters, n_tokens: Int) raises:
    """Lets a dispatch wait for the `send_tokens` of others, not for its own."""
    comptime if is_gather_protocol(protocol):
        check_sent[tokens_are_sent](context, Int(counters.words), n_tokens)
        comptime if not tokens_are_sent:
            join(context)


def _n_side_blocks[n_sms: Int](context: DeviceContext) raises -> Int:
    """Counts the blocks of `send_tokens`: a quarter of all."""
    return max(1, _n_blocks[n_sms](context) // 4)


def _n_dispatch_blocks[
    n_sms: Int, tokens_are_sent: Bool
](context: DeviceContext) raises -> Int:
    """Counts the blocks of a dispatch: all that `send_tokens` does not have.

    It may wait for peers that wait for this rank's `send_tokens`, which may not
    have begun. So it leaves as many multiprocessors as that has blocks.
    """
    var n = _n_blocks[n_sms](context)
    comptime if tokens_are_sent:
        n = max(1, n - _n_side_blocks[n_sms](context))
    return n


def _n_sending_blocks[
    n_sms: Int, halves_overlap: Bool, max_tokens_per_rank: Int
](context: DeviceContext) raises -> Int:
    """Counts the blocks of the sending half of an exchange.

    Halves that overlap share the multiprocessors, so that the waiting half has
    where to begin.
    """
    var n = _n_blocks[n_sms](context)
    comptime if not halves_overlap:
        return n
    return n_sending_blocks(n, max_tokens_per_rank)


def _n_waiting_blocks[
    n_sms: Int, halves_overlap: Bool, max_tokens_per_rank: Int
](context: DeviceContext) raises -> Int:
    """Counts the blocks of the waiting half: what the sending half leaves."""
    var n = _n_blocks[n_sms](context)
    comptime if not halves_overlap:
        return n
    return max(1, n - n_sending_blocks(n, max_tokens_per_rank))


def _overlapping() -> List[LaunchAttribute]:
    """Lets a kernel's blocks begin while the last of the kernel before it end.

    The kernels of `rank_slots` wait for that one's end by themselves
    (`await_launch_before`).
    """
    return pdl_launch_attributes(PDLLevel.ON)


comptime RANK_OF_COUNTERS = Int32(-1)
"""The rank stands in the counters, in device memory."""

comptime InputScales = Optional[
    def[dtype: DType](Int) capturing -> Scalar[dtype]
]
"""Gives the factor of a token for an expert id, or None."""

comptime MatrixLayout = type_of(row_major(Coord(Int64(0), Int64(0))))
"""Layout of tokens and ids as the kernels get them."""


@always_inline
def _matrix[
    dtype: DType
](tensor: TileTensor[dtype, ...]) -> TileTensor[
    dtype, MatrixLayout, ImmUntrackedOrigin
]:
    return {
        imm(tensor),
        row_major(
            Coord(Int64(Int(tensor.dim[0]())), Int64(Int(tensor.dim[1]())))
        ),
    }


def launch_send_tokens[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    n_sms: Int,
](
    input_tokens: TileTensor,
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
    context: DeviceContext,
) raises:
    """Starts the `send_tokens_kernel`."""
    comptime kernel = send_tokens_kernel[
        input_tokens.dtype,
        NUM_THREADS,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        token_fmt_type,
        protocol,
    ]
    var function = context.compile_function[kernel]()
    _await_sent_tokens[protocol](context)
    fork(
        context, Int(counters.words), Int(input_tokens.dim[0]())
    ).enqueue_function(
        function,
        imm(input_tokens),
        Int32(Int(input_tokens.dim[0]())),
        p2p_buffers[UInt8, n_ranks](recv_bufs),
        p2p_buffers[UInt64, n_ranks](recv_counts),
        counters,
        grid_dim=_n_side_blocks[n_sms](context),
        block_dim=NUM_THREADS,
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
    tokens_are_sent: Bool,
    halves_overlap: Bool,
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
    _check_sent_tokens[protocol, tokens_are_sent](
        context, counters, Int(input_tokens.dim[0]())
    )
    comptime if protocol != EXPERT_SLOTS:
        comptime assert not use_shmem, "max_ep: rank_slots is for one host"
        comptime by_rank = rank_slots_dispatch_async_kernel[
            input_tokens.dtype,
            NUM_THREADS,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            token_fmt_type,
            protocol,
            fused_shared_expert,
            tokens_are_sent,
            halves_overlap,
        ]
        var function = context.compile_function[by_rank]()
        context.enqueue_function(
            function,
            imm(input_tokens),
            imm(topk_ids),
            router_weights.weights,
            Int32(Int(input_tokens.dim[0]())),
            p2p_buffers[UInt8, n_ranks](recv_bufs),
            p2p_buffers[UInt64, n_ranks](recv_counts),
            counters,
            grid_dim=min(
                _n_dispatch_blocks[n_sms, tokens_are_sent](context),
                _n_sending_blocks[n_sms, halves_overlap, max_tokens_per_rank](
                    context
                ),
            ),
            block_dim=NUM_THREADS,
            attributes=_overlapping(),
        )
        comptime if tokens_are_sent:
            # What comes next may overwrite the tokens.
            join(context)
    else:
        comptime kernel = dispatch_async_kernel[
            input_tokens.dtype,
            NUM_THREADS,
            MatrixLayout,
            MatrixLayout,
            n_sms_of_device(),
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            n_gpus_per_node,
            token_fmt_type,
            input_scales_wrapper,
            use_shmem,
            fused_shared_expert,
        ]
        var function = context.compile_function[kernel]()
        comptime if use_shmem:
            register_module(function, context)
        context.enqueue_function(
            function,
            _matrix(input_tokens),
            _matrix(topk_ids),
            p2p_buffers[UInt8, n_gpus_per_node](send_bufs),
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt64, n_gpus_per_node](recv_counts),
            counters,
            RANK_OF_COUNTERS,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
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
    halves_overlap: Bool,
](
    rows: token_fmt_type.Rows,
    tables: RowTables[
        dispatch_layout_of[
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
    _await_sent_tokens[protocol](context)
    comptime if protocol != EXPERT_SLOTS:
        comptime by_rank = rank_slots_dispatch_wait_kernel[
            NUM_THREADS,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            token_fmt_type,
            protocol,
            tables.is_padded,
            tables.fused_shared_expert,
            shares_gpu,
            halves_overlap,
        ]
        var function = context.compile_function[by_rank]()
        context.enqueue_function(
            function,
            rows,
            Int32(Int(src_info.dim[0]())),
            tables,
            mut_(src_info),
            p2p_buffers[UInt8, n_ranks](recv_bufs),
            p2p_buffers[UInt64, n_ranks](recv_counts),
            counters,
            grid_dim=_n_waiting_blocks[
                n_sms, halves_overlap, max_tokens_per_rank
            ](context),
            block_dim=NUM_THREADS,
            attributes=_overlapping(),
        )
    else:
        comptime kernel = dispatch_wait_kernel[
            NUM_THREADS,
            n_sms_of_device(),
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            n_gpus_per_node,
            token_fmt_type,
            use_shmem,
            tables.is_padded,
            tables.fused_shared_expert,
        ]
        var function = context.compile_function[kernel]()
        comptime if use_shmem:
            register_module(function, context)
        context.enqueue_function(
            function,
            rows,
            Int32(Int(src_info.dim[0]())),
            tables,
            mut_(src_info),
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt64, n_gpus_per_node](recv_counts),
            counters,
            RANK_OF_COUNTERS,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
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
    tokens_are_sent: Bool,
](
    input_tokens: TileTensor,
    topk_ids: TileTensor[DType.int32, ...],
    router_weights: RouterWeights,
    rows: token_fmt_type.Rows,
    tables: RowTables[
        dispatch_layout_of[
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
    _check_sent_tokens[protocol, tokens_are_sent](
        context, counters, Int(input_tokens.dim[0]())
    )
    comptime if protocol != EXPERT_SLOTS:
        comptime assert not use_shmem, "max_ep: rank_slots is for one host"
        comptime by_rank = rank_slots_dispatch_kernel[
            input_tokens.dtype,
            NUM_THREADS,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            token_fmt_type,
            protocol,
            tables.is_padded,
            tables.fused_shared_expert,
            tokens_are_sent,
        ]
        var function = context.compile_function[by_rank]()
        context.enqueue_function(
            function,
            imm(input_tokens),
            imm(topk_ids),
            router_weights.weights,
            Int32(Int(input_tokens.dim[0]())),
            rows,
            Int32(Int(src_info.dim[0]())),
            tables,
            mut_(src_info),
            p2p_buffers[UInt8, n_ranks](recv_bufs),
            p2p_buffers[UInt64, n_ranks](recv_counts),
            counters,
            grid_dim=_n_dispatch_blocks[n_sms, tokens_are_sent](context),
            block_dim=NUM_THREADS,
            attributes=_overlapping(),
        )
        comptime if tokens_are_sent:
            # What comes next may overwrite the tokens.
            join(context)
    else:
        comptime kernel = dispatch_kernel[
            input_tokens.dtype,
            NUM_THREADS,
            MatrixLayout,
            MatrixLayout,
            n_sms_of_device(),
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            n_gpus_per_node,
            token_fmt_type,
            input_scales_wrapper,
            use_shmem,
            tables.is_padded,
            tables.fused_shared_expert,
        ]
        var function = context.compile_function[kernel]()
        comptime if use_shmem:
            register_module(function, context)
        context.enqueue_function(
            function,
            _matrix(input_tokens),
            _matrix(topk_ids),
            rows,
            Int32(Int(src_info.dim[0]())),
            tables,
            mut_(src_info),
            p2p_buffers[UInt8, n_gpus_per_node](send_bufs),
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt64, n_gpus_per_node](recv_counts),
            counters,
            RANK_OF_COUNTERS,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
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
    halves_overlap: Bool,
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
    _await_sent_tokens[protocol](context)
    comptime if is_reduced_protocol(protocol):
        comptime by_rank = rank_slots_combine_async_kernel[
            combine_dtype,
            partial_dtype,
            NUM_THREADS,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            halves_overlap,
        ]
        var function = context.compile_function[by_rank]()
        context.enqueue_function(
            function,
            imm(input_tokens),
            Int32(Int(input_tokens.dim[0]())),
            p2p_buffers[UInt8, n_ranks](recv_bufs),
            p2p_buffers[UInt64, n_ranks](recv_counts),
            counters,
            grid_dim=_n_sending_blocks[
                n_sms, halves_overlap, max_tokens_per_rank
            ](context),
            block_dim=NUM_THREADS,
            attributes=_overlapping(),
        )
    else:
        comptime kernel = combine_async_kernel[
            combine_dtype,
            NUM_THREADS,
            n_sms_of_device(),
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            n_gpus_per_node,
            use_shmem,
        ]
        var function = context.compile_function[kernel]()
        comptime if use_shmem:
            register_module(function, context)
        context.enqueue_function(
            function,
            imm(input_tokens),
            Int32(Int(input_tokens.dim[0]())),
            imm(src_info),
            p2p_buffers[UInt8, n_gpus_per_node](send_bufs),
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt64, n_gpus_per_node](recv_counts),
            counters,
            RANK_OF_COUNTERS,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
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
    halves_overlap: Bool,
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
    _await_sent_tokens[protocol](context)
    comptime if is_reduced_protocol(protocol):
        comptime by_rank = rank_slots_combine_wait_kernel[
            combine_dtype,
            partial_dtype,
            NUM_THREADS,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            fused_shared_expert,
            shares_gpu,
            halves_overlap,
        ]
        var n_blocks = _n_waiting_blocks[
            n_sms, halves_overlap, max_tokens_per_rank
        ](context)
        comptime if halves_overlap:
            n_blocks = n_adding_blocks(n_blocks, Int(output_tokens.dim[0]()))
        var function = context.compile_function[by_rank]()
        context.enqueue_function(
            function,
            shared_rows,
            mut_(output_tokens),
            Int32(Int(output_tokens.dim[0]())),
            p2p_buffers[UInt8, n_ranks](recv_bufs),
            p2p_buffers[UInt64, n_ranks](recv_counts),
            counters,
            grid_dim=n_blocks,
            block_dim=NUM_THREADS,
            attributes=_overlapping(),
        )
    else:
        comptime kernel = combine_wait_kernel[
            combine_dtype,
            NUM_THREADS,
            n_sms_of_device(),
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            n_gpus_per_node,
            use_shmem,
            fused_shared_expert,
        ]
        var function = context.compile_function[kernel]()
        comptime if use_shmem:
            register_module(function, context)
        context.enqueue_function(
            function,
            mut_(output_tokens),
            imm(router_weights),
            Int32(Int(output_tokens.dim[0]())),
            shared_rows,
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt64, n_gpus_per_node](recv_counts),
            counters,
            RANK_OF_COUNTERS,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
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
    _await_sent_tokens[protocol](context)
    comptime if is_reduced_protocol(protocol):
        comptime by_rank = rank_slots_combine_kernel[
            combine_dtype,
            partial_dtype,
            NUM_THREADS,
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            protocol,
            fused_shared_expert,
        ]
        var function = context.compile_function[by_rank]()
        context.enqueue_function(
            function,
            imm(input_tokens),
            Int32(Int(input_tokens.dim[0]())),
            mut_(output_tokens),
            Int32(Int(output_tokens.dim[0]())),
            p2p_buffers[UInt8, n_ranks](recv_bufs),
            p2p_buffers[UInt64, n_ranks](recv_counts),
            counters,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
            attributes=_overlapping(),
        )
    else:
        comptime kernel = combine_kernel[
            combine_dtype,
            NUM_THREADS,
            n_sms_of_device(),
            hidden_size,
            top_k,
            n_experts,
            n_ranks,
            max_tokens_per_rank,
            n_gpus_per_node,
            use_shmem,
            fused_shared_expert,
        ]
        var function = context.compile_function[kernel]()
        comptime if use_shmem:
            register_module(function, context)
        context.enqueue_function(
            function,
            imm(input_tokens),
            Int32(Int(input_tokens.dim[0]())),
            imm(src_info),
            mut_(output_tokens),
            imm(router_weights),
            Int32(Int(output_tokens.dim[0]())),
            p2p_buffers[UInt8, n_gpus_per_node](send_bufs),
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt64, n_gpus_per_node](recv_counts),
            counters,
            RANK_OF_COUNTERS,
            grid_dim=_n_blocks[n_sms](context),
            block_dim=NUM_THREADS,
        )
