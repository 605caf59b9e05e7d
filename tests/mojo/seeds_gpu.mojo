# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of `kernels.mojo` on a GPU that two ranks share.

All ranks send, then all receive, in one stream, so nobody waits. One generation is
sent by the kernels, one by the launchers, both with MAX's lists alone; the factors of
tokens are read from memory that a closure captures. Prints OK, or raises. Run by
tests/cpu/test_mojo.py.
"""
from layout import Coord, row_major, TileTensor
from max.gpu.host import DeviceBuffer, DeviceContext
from max_ep import (
    ep_combine_async_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_wait_kernel_api,
    EPLocalSyncCounters,
    Float32TokenFormat,
)
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.arguments import InputScales
from max_ep.protocol.flags import FlagPointer
from max_ep.formats.plain import PlainRows
from max_ep.launch.kernels import (
    combine_async_kernel,
    combine_wait_kernel,
    dispatch_async_kernel,
    dispatch_wait_kernel,
)
from max_ep.protocol.layout import Group
from max_ep.protocol.token_format import BytePointer, LocalRows
from ranks import MatrixLayout, set_up, Vector, vector
from std.testing import assert_equal

comptime F32 = DType.float32
comptime HIDDEN = 512
comptime TOP_K = 2
comptime N_EXPERTS = 3
comptime N_RANKS = 2
comptime MAX_TOKENS = 5
comptime MAX_ROWS = N_RANKS * MAX_TOKENS * TOP_K
comptime N_BLOCKS = 4
comptime N_THREADS = 512
comptime Format = Float32TokenFormat[HIDDEN, TOP_K]
comptime group = Group(
    n_experts=N_EXPERTS,
    n_ranks=N_RANKS,
    max_tokens_per_rank=MAX_TOKENS,
    top_k=TOP_K,
    dispatch_msg_bytes=Format.msg_bytes,
    combine_msg_bytes=Format.msg_bytes,
    addressing=Addressing.BY_EXPERT,
)
comptime N_WORDS = EPLocalSyncCounters[N_EXPERTS].total_size(group)

# fmt: off
comptime dispatch_wait = dispatch_wait_kernel[
    N_THREADS, N_BLOCKS, N_EXPERTS, N_RANKS, MAX_TOKENS, N_RANKS, Format
]
comptime combine_async = combine_async_kernel[
    F32, N_THREADS, N_BLOCKS, HIDDEN, TOP_K, N_EXPERTS, N_RANKS, MAX_TOKENS, N_RANKS
]
comptime combine_wait = combine_wait_kernel[
    F32, N_THREADS, N_BLOCKS, HIDDEN, TOP_K, N_EXPERTS, N_RANKS, MAX_TOKENS,
    N_RANKS,
]
# fmt: on


def dispatch_async[
    scales: InputScales
](
    input_tokens: TileTensor[F32, MatrixLayout, ImmUntrackedOrigin],
    topk_ids: TileTensor[DType.int32, MatrixLayout, ImmUntrackedOrigin],
    send_buf_p: BytePointer,
    recv_buf_ptrs: Array[BytePointer, N_RANKS],
    recv_count_ptrs: Array[FlagPointer, N_RANKS],
    ep_counters: EPLocalSyncCounters[N_EXPERTS],
    my_rank: Int32,
):
    """Names parameters and arguments as MAX does, in MAX's order."""
    dispatch_async_kernel[
        input_type=F32,
        num_threads=N_THREADS,
        input_tokens_layout=MatrixLayout,
        topk_ids_layout=MatrixLayout,
        n_sms=N_BLOCKS,
        n_experts=N_EXPERTS,
        n_ranks=N_RANKS,
        max_tokens_per_rank=MAX_TOKENS,
        p2p_world_size=N_RANKS,
        token_fmt_type=Format,
        input_scales_wrapper=scales,
    ](
        input_tokens=input_tokens,
        topk_ids=topk_ids,
        send_buf_p=send_buf_p,
        recv_buf_ptrs=recv_buf_ptrs,
        recv_count_ptrs=recv_count_ptrs,
        ep_counters=ep_counters,
        my_rank=my_rank,
    )


def line[dtype: DType](buffer: DeviceBuffer[dtype], n: Int) -> Vector[dtype]:
    return {at[dtype](buffer), row_major(Coord(Int64(n)))}


def words(buffer: DeviceBuffer[DType.int32]) -> Vector[DType.int32]:
    return line(buffer, N_WORDS)


def at[
    dtype: DType
](buffer: DeviceBuffer[dtype]) -> Pointer[Scalar[dtype], MutUntrackedOrigin]:
    return {unsafe_from_address = Int(buffer.unsafe_ptr())}


def matrix[
    dtype: DType
](buffer: DeviceBuffer[dtype], n: Int, m: Int) -> TileTensor[
    dtype, MatrixLayout, ImmUntrackedOrigin
]:
    return {
        Pointer[Scalar[dtype], ImmUntrackedOrigin](
            unsafe_from_address=Int(buffer.unsafe_ptr())
        ),
        row_major(Coord(Int64(n), Int64(m))),
    }


struct Rank:
    """The memory of one rank, and what it sends."""

    var n_tokens: Int
    var region: DeviceBuffer[DType.uint8]
    var counters: DeviceBuffer[DType.int32]
    var spare_counters: DeviceBuffer[DType.int32]
    var tokens: DeviceBuffer[F32]
    var ids: DeviceBuffer[DType.int32]
    var weights: DeviceBuffer[F32]
    var rows: DeviceBuffer[F32]
    var row_offsets: DeviceBuffer[DType.uint32]
    var expert_ids: DeviceBuffer[DType.int32]
    var src_info: DeviceBuffer[DType.int32]
    var result: DeviceBuffer[F32]
    var buffers: Vector[DType.uint64]
    """[send, recv, counts] of dispatch, then of combine."""

    def __init__(out self, rank: Int, ctx: DeviceContext) raises:
        comptime I32 = DType.int32
        comptime N_VALUES = MAX_TOKENS * HIDDEN
        comptime N_CHOICES = MAX_TOKENS * TOP_K
        self.n_tokens = MAX_TOKENS - 2 * rank
        self.region = ctx.enqueue_create_buffer[DType.uint8](group.region_bytes())
        self.counters = ctx.enqueue_create_buffer[I32](N_WORDS)
        self.spare_counters = ctx.enqueue_create_buffer[I32](N_WORDS)
        self.tokens = ctx.enqueue_create_buffer[F32](N_VALUES)
        self.ids = ctx.enqueue_create_buffer[I32](N_CHOICES)
        self.weights = ctx.enqueue_create_buffer[F32](N_CHOICES)
        self.rows = ctx.enqueue_create_buffer[F32](MAX_ROWS * HIDDEN)
        self.row_offsets = ctx.enqueue_create_buffer[DType.uint32](N_EXPERTS)
        self.expert_ids = ctx.enqueue_create_buffer[I32](N_EXPERTS)
        self.src_info = ctx.enqueue_create_buffer[I32](2 * MAX_ROWS)
        self.result = ctx.enqueue_create_buffer[F32](N_VALUES)
        self.weights.enqueue_fill(1)
        self.buffers = set_up["gpu"](
            group,
            rank,
            Int(self.region.unsafe_ptr()),
            words(self.counters),
            words(self.spare_counters),
            ctx,
        )
        with self.tokens.map_to_host() as tokens:
            for t in range(MAX_TOKENS):
                for i in range(HIDDEN):
                    tokens[t * HIDDEN + i] = token(rank, t, i)
        with self.ids.map_to_host() as ids:
            for choice in range(MAX_TOKENS * TOP_K):
                var t, k = divmod(choice, TOP_K)
                ids[choice] = Int32((t + k) % N_EXPERTS)

    def counters_view(self) -> EPLocalSyncCounters[N_EXPERTS]:
        """Looks at its local words."""
        return {at[DType.int32](self.counters)}


def token(rank: Int, t: Int, i: Int) -> Float32:
    """Says what an element is."""
    return Float32(100 * rank + 10 * t + i % 7)


def addresses(ranks: List[Rank], which: Int) -> Vector[DType.uint64]:
    """Says where the same buffer of all ranks is."""
    var result = vector[DType.uint64](N_RANKS)
    for i in range(N_RANKS):
        result.ptr[unsafe_offset=i] = ranks[i].buffers.ptr[unsafe_offset=which]
    return result


def buffers[
    T: AnyType
](ranks: List[Rank], which: Int) -> Array[Pointer[T, MutUntrackedOrigin], N_RANKS]:
    """Finds the same buffer of all ranks."""
    var found = addresses(ranks, which)
    return [
        Pointer[T, MutUntrackedOrigin](unsafe_from_address=Int(found.ptr[])),
        Pointer[T, MutUntrackedOrigin](
            unsafe_from_address=Int(found.ptr[unsafe_offset=1])
        ),
    ]


def dispatch_all(
    ranks: List[Rank],
    scales: Pointer[Float32, MutUntrackedOrigin],
    by_launcher: Bool,
    ctx: DeviceContext,
) raises:
    """Sends the tokens of all ranks."""

    @__parameter
    @always_inline
    def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
        return scales[unsafe_offset=expert_id].cast[dtype]()

    for i in range(N_RANKS):
        ref rank = ranks[i]
        if by_launcher:
            ep_dispatch_async_kernel_api[
                Format, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "gpu", scale_of
            ](
                words(rank.counters),
                matrix(rank.tokens, rank.n_tokens, HIDDEN),
                matrix(rank.ids, rank.n_tokens, TOP_K),
                addresses(ranks, 0),
                addresses(ranks, 1),
                addresses(ranks, 2),
                ctx,
            )
            continue
        ctx.enqueue_function[dispatch_async[scale_of]](
            matrix(rank.tokens, rank.n_tokens, HIDDEN),
            matrix(rank.ids, rank.n_tokens, TOP_K),
            buffers[UInt8](ranks, 0)[i],
            buffers[UInt8](ranks, 1),
            buffers[UInt64](ranks, 2),
            rank.counters_view(),
            Int32(i),
            grid_dim=N_BLOCKS,
            block_dim=N_THREADS,
        )


def combine_all(ranks: List[Rank], by_launcher: Bool, ctx: DeviceContext) raises:
    """Sends the rows of all ranks back; the experts return what they get."""
    for i in range(N_RANKS):
        ref rank = ranks[i]
        if by_launcher:
            ep_combine_async_kernel_api[
                F32, HIDDEN, TOP_K, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "gpu"
            ](
                words(rank.counters),
                matrix(rank.rows, MAX_ROWS, HIDDEN),
                matrix(rank.src_info, MAX_ROWS, 2),
                addresses(ranks, 3),
                addresses(ranks, 4),
                addresses(ranks, 5),
                ctx,
            )
            continue
        ctx.enqueue_function[combine_async](
            at[F32](rank.rows),
            Int32(MAX_ROWS),
            at[DType.int32](rank.src_info),
            buffers[UInt8](ranks, 3)[i],
            buffers[UInt8](ranks, 4),
            buffers[UInt64](ranks, 5),
            rank.counters_view(),
            Int32(i),
            grid_dim=N_BLOCKS,
            block_dim=N_THREADS,
        )


def receive_tokens(ranks: List[Rank], by_launcher: Bool, ctx: DeviceContext) raises:
    """Receives the tokens of all ranks."""
    for i in range(N_RANKS):
        ref rank = ranks[i]
        if by_launcher:
            comptime n_local = group.n_local_experts()
            ep_dispatch_wait_kernel_api[
                Format, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "gpu"
            ](
                PlainRows(at[F32](rank.rows).unsafe_bitcast[UInt8]()),
                line(rank.row_offsets, n_local + 1),
                line(rank.expert_ids, n_local),
                matrix(rank.src_info, MAX_ROWS, 2),
                words(rank.counters),
                addresses(ranks, 1),
                addresses(ranks, 2),
                ctx,
            )
            continue
        ctx.enqueue_function[dispatch_wait](
            PlainRows(at[F32](rank.rows).unsafe_bitcast[UInt8]()),
            Int32(MAX_ROWS),
            at[DType.uint32](rank.row_offsets),
            at[DType.int32](rank.expert_ids),
            at[DType.int32](rank.src_info),
            buffers[UInt8](ranks, 1),
            buffers[UInt64](ranks, 2),
            rank.counters_view(),
            Int32(i),
            grid_dim=N_BLOCKS,
            block_dim=N_THREADS,
        )


def receive_rows(ranks: List[Rank], by_launcher: Bool, ctx: DeviceContext) raises:
    """Adds up the rows of all ranks."""
    for i in range(N_RANKS):
        ref rank = ranks[i]
        var rows = LocalRows(at[F32](rank.rows).unsafe_bitcast[UInt8](), MAX_ROWS)
        if by_launcher:
            ep_combine_wait_kernel_api[
                F32, HIDDEN, TOP_K, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "gpu"
            ](
                matrix(rank.result, rank.n_tokens, HIDDEN),
                words(rank.counters),
                matrix(rank.weights, rank.n_tokens, TOP_K),
                addresses(ranks, 4),
                addresses(ranks, 5),
                ctx,
                rows,
            )
            continue
        ctx.enqueue_function[combine_wait](
            at[F32](rank.result),
            at[F32](rank.weights),
            Int32(rank.n_tokens),
            buffers[UInt8](ranks, 4),
            buffers[UInt64](ranks, 5),
            rank.counters_view(),
            Int32(i),
            rows,
            grid_dim=N_BLOCKS,
            block_dim=N_THREADS,
        )


def main() raises:
    """Compares two generations with what they must give."""
    var ctx = DeviceContext()
    var ranks = List[Rank]()
    for i in range(N_RANKS):
        ranks.append(Rank(i, ctx))
    var scales = ctx.enqueue_create_buffer[F32](N_EXPERTS)
    with scales.map_to_host() as factors:
        for expert_id in range(N_EXPERTS):
            factors[expert_id] = Float32(1 << expert_id)
    for by_launcher in [False, True]:
        for i in range(N_RANKS):
            ranks[i].result.enqueue_fill(-1)
        dispatch_all(ranks, at[F32](scales), by_launcher, ctx)
        receive_tokens(ranks, by_launcher, ctx)
        combine_all(ranks, by_launcher, ctx)
        receive_rows(ranks, by_launcher, ctx)
        ctx.synchronize()
        for i in range(N_RANKS):
            with ranks[i].result.map_to_host() as result:
                for t in range(ranks[i].n_tokens):
                    # Scale 2**e for expert e, summed over the two experts.
                    var factor = Float32(
                        (1 << (t % N_EXPERTS)) + (1 << ((t + 1) % N_EXPERTS))
                    )
                    for e in range(HIDDEN):
                        assert_equal(result[t * HIDDEN + e], factor * token(i, t, e))
    _ = scales^
    print("OK")
