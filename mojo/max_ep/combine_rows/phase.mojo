# SPDX-License-Identifier: Apache-2.0
"""Combine of `expert_slots` for GPU ranks.

Every row goes back to the place of its choice, `[token][k]`, on its source
rank, and announces itself there by the flag in its source info. The source
knows from its own dispatch which choices come back, waits for these, and adds
the rows of a token as `cpu/combine.mojo` does:

    acc = 0; for k: acc = fma(weight[k], row[k], acc)       in float32
    result = acc, rounded to the combine dtype
    result = result + shared[token], likewise    with a fused shared expert

After the sending half: every row is on its way to its source. After the
receiving half: the result is there, and every owner knows that its rows have
been read. A launch that fails fills what it cannot compute with NaN.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    barrier,
    block_idx,
    grid_dim,
    lane_id,
    MAX_THREADS_PER_BLOCK_METADATA,
    syncwarp,
    thread_idx,
    warp_id,
    WARP_SIZE,
)
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import size_of
from std.utils import StaticTuple
from std.utils.numerics import nan

from ..counters import EPLocalSyncCounters, NO_EXPERT
from ..device.block import (
    await_done_words,
    await_message,
    can_start,
    is_last_block,
    next_work,
    publish_done,
    rank_of,
)
from ..device.shared import (
    own_of,
    share_addresses,
    shared_ints,
    shared_words,
    SharedAddresses,
    SharedInts,
)
from ..device.warp import any_lane, bytes_at, copy_warp, load16, store16
from ..failures import (
    BAD_N_TOKENS,
    BAD_SOURCE,
    is_fatal,
    NOTHING_DISPATCHED,
    OVERTAKEN,
    record_failure,
    TOO_MANY_ROWS,
    WRONG_EXPERT,
)
from ..flags import (
    count_of,
    DeviceDeadline,
    FlagPointer,
    generation_of,
    message_flag,
    next_generation,
    publish,
    SharedWord,
)
from ..layout import (
    Group,
    is_reduced_protocol,
    MESSAGE_ALIGN,
    message_bytes,
    plain_token_bytes,
)
from ..token_format import BytePointer, LaneBytes, SharedRows
from ..transport import put_message_warp

comptime _SEND = 2
comptime _RECEIVE = 3

# Words of a block's control: next row to send, next part of a token to reduce.
comptime _NEXT_ROW = 0
comptime _NEXT_PART = 1
comptime _N_CONTROL = 2

comptime ROWS_IN_FLIGHT = 8
"""Rows of a token whose loads a lane has under way at once."""


@fieldwise_init
struct _Launch(TrivialRegisterPassable):
    """What the warps of a block know from the start of a launch."""

    var lane: Int
    var warp_idx: Int
    var my_rank: Int
    var deadline: DeviceDeadline
    var sent: UInt32
    var received: UInt32
    var control: SharedWord
    var put_buf: UInt64
    var recv_bufs: SharedAddresses
    var counts: SharedAddresses


@always_inline
def combine_group_of[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens: Int,
    protocol: Int = 0,
    partial_dtype: DType = combine_dtype,
]() -> Group:
    """Lays out the buffers as far as combine needs them."""
    comptime is_reduced = is_reduced_protocol(protocol)
    comptime sent_dtype = partial_dtype if is_reduced else combine_dtype
    return Group.of(
        n_experts,
        n_ranks,
        max_tokens,
        top_k,
        0,
        message_bytes(
            plain_token_bytes(hidden_size, size_of[Scalar[sent_dtype]]())
        ),
        protocol,
    )


@always_inline
def _start[
    p2p_world_size: Int, //, n_ranks: Int, use_shmem: Bool
](
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    counters: EPLocalSyncCounters,
    my_rank: Int,
    put_buf: UInt64 = 0,
) -> _Launch:
    """Sets a block's shared memory up; a block barrier must follow."""
    var control = shared_words[_N_CONTROL]()
    if thread_idx.x < _N_CONTROL:
        control[unsafe_offset=thread_idx.x] = 0
    return _Launch(
        Int(lane_id()),
        Int(warp_id()),
        my_rank,
        DeviceDeadline.after(counters.timeout_ms()),
        next_generation(counters.combine_sent()),
        next_generation(counters.combine_received()),
        control,
        put_buf,
        share_addresses[n_ranks, use_shmem](recv_buf_ptrs, my_rank),
        share_addresses[n_ranks, use_shmem](recv_count_ptrs, my_rank),
    )


# ------------------------------------------------------------ the sending half


@always_inline
def _share_pairs[
    num_threads: Int, n_pairs: Int
](
    pair_rows: SharedInts,
    pair_counts: SharedInts,
    counters: EPLocalSyncCounters,
):
    """Copies where each pair's rows stand to shared memory, and syncs."""
    for pair in range(Int(thread_idx.x), n_pairs, num_threads):
        pair_rows[unsafe_offset=pair] = Int32(counters.pair_row(pair))
        pair_counts[unsafe_offset=pair] = Int32(counters.pair_count(pair))
    barrier()


@always_inline
def _send_rows[
    combine_dtype: DType,
    hidden_size: Int,
    group: Group,
    use_shmem: Bool,
](
    input_tokens: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int,
    src_info: Pointer[Int32, ImmUntrackedOrigin],
    pair_rows: SharedInts,
    pair_counts: SharedInts,
    launch: _Launch,
    counters: EPLocalSyncCounters,
):
    """Sends this block's share of the rows, with one warp of several."""
    comptime n_ranks = group.n_ranks
    comptime n_pairs = group.n_local_experts() * n_ranks
    comptime msg_bytes = group.combine_msg_bytes
    comptime row_bytes = plain_token_bytes(
        hidden_size, size_of[Scalar[combine_dtype]]()
    )
    var lane = launch.lane
    if not await_done_words[group](
        bytes_at(launch.counts[unsafe_offset=launch.my_rank]),
        group.combine_done_offset(0),
        counters.combine_sent(),
        _SEND,
        launch.deadline,
        counters,
        lane,
    ):
        return
    # Slot by slot over all pairs: all sources get rows all the time, and
    # tokens are complete about in their order.
    var n_items = counters.pair_count(n_pairs) * n_pairs
    while True:
        var round = next_work(launch.control.unsafe_offset(_NEXT_ROW), lane)
        var item = round * Int(grid_dim.x) + Int(block_idx.x)
        if item >= n_items:
            return
        var slot, pair = divmod(item, n_pairs)
        if slot >= Int(pair_counts[unsafe_offset=pair]):
            continue
        var row = Int(pair_rows[unsafe_offset=pair]) + slot
        if row >= n_rows_max:
            record_failure(
                counters.failure(),
                TOO_MANY_ROWS,
                _SEND,
                launch.my_rank,
                row,
                launch.sent,
                0,
                row + 1,
                n_rows_max,
            )
            return
        var token_idx = Int(src_info[unsafe_offset=2 * row])
        var k = Int(src_info[unsafe_offset=2 * row + 1])
        if (
            token_idx < 0
            or token_idx >= group.max_tokens_per_rank
            or k < 0
            or k >= group.top_k
        ):
            record_failure(
                counters.failure(),
                BAD_SOURCE,
                _SEND,
                launch.my_rank,
                row,
                launch.sent,
                0,
                token_idx,
                k,
            )
            return
        # I4: a choice has one expert, so one writer.
        var local_expert, src_rank = divmod(pair, n_ranks)
        var expert_id = launch.my_rank * group.n_local_experts() + local_expert
        var offset = UInt64(group.combine_message_offset(token_idx, k))
        var choice = group.choice(token_idx, k)
        var message = launch.recv_bufs[unsafe_offset=src_rank] + offset
        var put_to: UInt64 = 0
        comptime if use_shmem:
            if message == offset:
                message = launch.put_buf + UInt64(
                    group.combine_put_offset(src_rank, choice)
                )
                put_to = launch.recv_bufs[unsafe_offset=launch.my_rank] + offset
        copy_warp[row_bytes](
            bytes_at(message),
            input_tokens.unsafe_offset(row * hidden_size).unsafe_bitcast[
                UInt8
            ](),
            lane,
        )
        syncwarp()
        # I2: a message's flag is published after all of the message.
        comptime if use_shmem:
            if put_to != 0:
                # I3: as in dispatch, a done word ends the use of the put buffer.
                put_message_warp(
                    put_to,
                    message,
                    row_bytes,
                    put_to + UInt64(row_bytes),
                    launch.sent,
                    expert_id,
                    src_rank,
                )
                continue
        if lane == 0:
            publish(
                message_flag(bytes_at(message), msg_bytes),
                launch.sent,
                expert_id,
            )


# ---------------------------------------------------------- the receiving half


@always_inline
def _reduce_chunk[
    combine_dtype: DType,
    hidden_size: Int,
    group: Group,
    fused_shared_expert: Bool,
](
    result: BytePointer,
    rows: BytePointer,
    shared_row: BytePointer,
    weight: Float32,
    has_row: Bool,
    is_broken: Bool,
    begin: Int,
    end: Int,
    lane: Int,
):
    """Adds the weighted rows of a part of one token, in choice order."""
    comptime top_k = group.top_k
    comptime width = MESSAGE_ALIGN // size_of[Scalar[combine_dtype]]()
    comptime n_batches = ceildiv(top_k, ROWS_IN_FLIGHT)
    var weights = Array[Float32, top_k](fill=0)
    var has = Array[Bool, top_k](fill=False)
    comptime for k in range(top_k):
        weights[k] = warp.shuffle_idx(weight, UInt32(k))
        has[k] = (
            warp.shuffle_idx(Int32(1) if has_row else Int32(0), UInt32(k)) != 0
        )
    for vector in range(begin + lane, end, WARP_SIZE):
        var acc = SIMD[DType.float32, width](0)
        var shared = LaneBytes(0)
        comptime if fused_shared_expert:
            shared = load16(shared_row.unsafe_offset(vector * MESSAGE_ALIGN))
        comptime for batch in range(n_batches):
            comptime first = batch * ROWS_IN_FLIGHT
            comptime n = min(ROWS_IN_FLIGHT, top_k - first)
            var parts = Array[LaneBytes, n](fill=0)
            comptime for i in range(n):
                if has[first + i]:
                    parts[i] = load16(
                        rows.unsafe_offset(
                            group.combine_message_offset(0, first + i)
                            + vector * MESSAGE_ALIGN
                        )
                    )
            comptime for i in range(n):
                if has[first + i]:
                    acc = fma(
                        SIMD[DType.float32, width](weights[first + i]),
                        bitcast[combine_dtype, width](parts[i]).cast[
                            DType.float32
                        ](),
                        acc,
                    )
        comptime if fused_shared_expert:
            acc = acc.cast[combine_dtype]().cast[DType.float32]()
            acc += bitcast[combine_dtype, width](shared).cast[DType.float32]()
        if is_broken:
            acc = nan[DType.float32]()
        store16(
            result.unsafe_offset(vector * MESSAGE_ALIGN),
            bitcast[DType.uint32, 4](acc.cast[combine_dtype]()),
        )


@always_inline
def _reduce_tokens[
    combine_dtype: DType,
    hidden_size: Int,
    num_threads: Int,
    group: Group,
    fused_shared_expert: Bool,
](
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int,
    shared_rows: SharedRows,
    generation: UInt32,
    launch: _Launch,
    counters: EPLocalSyncCounters,
):
    """Reduces this block's share of the tokens, with one warp of several."""
    comptime top_k = group.top_k
    comptime row_bytes = plain_token_bytes(
        hidden_size, size_of[Scalar[combine_dtype]]()
    )
    comptime n_vectors = row_bytes // MESSAGE_ALIGN
    comptime n_steps = ceildiv(n_vectors, WARP_SIZE)
    comptime n_warps = num_threads // WARP_SIZE
    var lane = launch.lane
    var recv_buf = bytes_at(launch.recv_bufs[unsafe_offset=launch.my_rank])
    var choices = counters.choices(generation, group)
    # Few tokens are cut into parts, so that every warp has work.
    var n_chunks = 1
    while n_chunks < n_steps and n_tokens * n_chunks < 2 * n_warps * Int(
        grid_dim.x
    ):
        n_chunks *= 2
    n_chunks = min(n_chunks, n_steps)
    var n_sent = counters.n_tokens(generation)
    if n_sent != n_tokens:
        record_failure(
            counters.failure(),
            BAD_N_TOKENS,
            _RECEIVE,
            launch.my_rank,
            -1,
            launch.received,
            0,
            n_tokens,
            n_sent,
        )
    # Choices are kept for two dispatches.
    var dispatch_sent = counters.dispatch_sent()
    if dispatch_sent != generation and dispatch_sent != next_generation(
        generation
    ):
        record_failure(
            counters.failure(),
            OVERTAKEN,
            _RECEIVE,
            launch.my_rank,
            -1,
            launch.received,
            0,
        )
    var is_broken = is_fatal(counters.failure()[])
    while True:
        var round = next_work(launch.control.unsafe_offset(_NEXT_PART), lane)
        var item = round * Int(grid_dim.x) + Int(block_idx.x)
        if item >= n_tokens * n_chunks:
            return
        var token_idx, part = divmod(item, n_chunks)
        var rows = recv_buf.unsafe_offset(
            group.combine_message_offset(token_idx, 0)
        )
        var expert = NO_EXPERT
        var weight: Float32 = 0
        if lane < top_k:
            expert = choices[unsafe_offset=token_idx * top_k + lane]
            weight = router_weights[unsafe_offset=token_idx * top_k + lane]
        var has_row = expert != NO_EXPERT
        if has_row and not is_broken:
            var word = await_message(
                message_flag(
                    rows.unsafe_offset(group.combine_message_offset(0, lane)),
                    group.combine_msg_bytes,
                ),
                launch.received,
                _RECEIVE,
                Int(expert) // group.n_local_experts(),
                Int(expert),
                launch.deadline,
                counters,
            )
            is_broken = generation_of(word) != launch.received
            if not is_broken and count_of(word) != Int(expert):
                record_failure(
                    counters.failure(),
                    WRONG_EXPERT,
                    _RECEIVE,
                    Int(expert) // group.n_local_experts(),
                    Int(expert),
                    launch.received,
                    word,
                    token_idx,
                    lane,
                )
                is_broken = True
        is_broken = any_lane(is_broken)
        syncwarp()
        _reduce_chunk[combine_dtype, hidden_size, group, fused_shared_expert](
            output_tokens.unsafe_offset(token_idx * hidden_size).unsafe_bitcast[
                UInt8
            ](),
            rows,
            shared_rows.rows.unsafe_offset(token_idx * row_bytes),
            weight,
            has_row,
            is_broken,
            part * n_steps // n_chunks * WARP_SIZE,
            min((part + 1) * n_steps // n_chunks * WARP_SIZE, n_vectors),
            lane,
        )


@always_inline
def fill_with_nan[
    combine_dtype: DType, //, num_threads: Int
](result: Pointer[Scalar[combine_dtype], MutUntrackedOrigin], n_elements: Int):
    """Fills a result that is not computed, with all blocks."""
    var value = nan[DType.float32]().cast[combine_dtype]()
    for i in range(
        Int(block_idx.x) * num_threads + Int(thread_idx.x),
        n_elements,
        Int(grid_dim.x) * num_threads,
    ):
        result[unsafe_offset=i] = value


@always_inline
def _finish[
    group: Group,
    is_sending: Bool,
    is_receiving: Bool,
    use_shmem: Bool,
](launch: _Launch, counters: EPLocalSyncCounters):
    """Ends a launch: its last block notes the generation and tells the peers.
    """
    if not is_last_block(counters):
        return
    comptime if is_sending:
        if launch.lane == 0:
            counters.set_combine_sent(launch.sent)
            counters.set_combine_of(counters.dispatch_received())
        # AFTER: this generation's rows are on their way to their sources.
    comptime if is_receiving:
        if launch.lane == 0:
            counters.set_combine_received(launch.received)
        publish_done[group.n_ranks, use_shmem](
            launch.counts,
            launch.my_rank,
            group.combine_done_offset(launch.my_rank),
            launch.received,
            launch.lane,
        )
        # AFTER: the result is complete; every owner may overwrite its rows
        # here.


# ------------------------------------------------------------------ the kernels


@always_inline
def n_send_warps(n_tokens: Int, n_warps: Int) -> Int:
    """Chooses how many warps of a block send while the others reduce."""
    return min(4 if n_tokens > 256 else 8, n_warps - 1)


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
    put_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends each expert row back to the rank its token came from.

    Launch: `grid_dim` in `[1, n_sms]`, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and result.
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
        input_tokens: Expert rows, `[n_rows_max][hidden_size]`, in the order of
            the last dispatch, aligned to 16 bytes.
        n_rows_max: Rows of `input_tokens` and `src_info`.
        src_info: `[n_rows_max][2]` from that dispatch.
        put_buf_ptrs: Put buffers of the p2p world; read with `use_shmem`.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
    ]()
    if not can_start[group](ep_counters, _SEND):
        return
    var rank = rank_of(ep_counters, my_rank)
    var launch = _start[n_ranks, use_shmem](
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        rank,
        own_of(put_buf_ptrs, rank),
    )
    if ep_counters.dispatch_received() == 0:
        record_failure(
            ep_counters.failure(),
            NOTHING_DISPATCHED,
            _SEND,
            launch.my_rank,
            -1,
            launch.sent,
            0,
        )
        ep_counters.set_broken()
        return
    comptime n_pairs = group.n_local_experts() * n_ranks
    var pair_rows = shared_ints[n_pairs]()
    var pair_counts = shared_ints[n_pairs]()
    _share_pairs[num_threads, n_pairs](pair_rows, pair_counts, ep_counters)
    _send_rows[combine_dtype, hidden_size, group, use_shmem](
        input_tokens,
        Int(n_rows_max),
        src_info,
        pair_rows,
        pair_counts,
        launch,
        ep_counters,
    )
    _finish[group, True, False, use_shmem](launch, ep_counters)


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
    shared_rows: SharedRows,
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Adds the weighted rows of each token, as they arrive.

    Launch: `grid_dim` in `[1, n_sms]`, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and result.
        num_threads: Threads of a block, two warps or more.
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
        output_tokens: `[n_tokens][hidden_size]`.
        router_weights: `[n_tokens][top_k]`.
        n_tokens: Tokens that this rank dispatched.
        shared_rows: The shared expert's rows; read if it is fused.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
    ]()
    if not can_start[group](ep_counters, _RECEIVE):
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        return
    var rank = rank_of(ep_counters, my_rank)
    var launch = _start[n_ranks, use_shmem](
        recv_buf_ptrs, recv_count_ptrs, ep_counters, rank
    )
    barrier()
    _reduce_tokens[
        combine_dtype,
        hidden_size,
        num_threads,
        group,
        fused_shared_expert,
    ](
        output_tokens,
        router_weights,
        Int(n_tokens),
        shared_rows,
        ep_counters.combine_of(),
        launch,
        ep_counters,
    )
    _finish[group, False, True, use_shmem](launch, ep_counters)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def combine_kernel[
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
    input_tokens: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int32,
    src_info: Pointer[Int32, ImmUntrackedOrigin],
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    put_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends and reduces in one launch; all ranks must run at the same time.

    Launch: `grid_dim` in `[1, n_sms]`, all blocks resident at once,
    `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and result.
        num_threads: Threads of a block, two warps or more.
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
        input_tokens: Expert rows, `[n_rows_max][hidden_size]`, in the order of
            the last dispatch, aligned to 16 bytes.
        n_rows_max: Rows of `input_tokens` and `src_info`.
        src_info: `[n_rows_max][2]` from that dispatch.
        output_tokens: `[n_tokens][hidden_size]`.
        router_weights: `[n_tokens][top_k]`.
        n_tokens: Tokens that this rank dispatched.
        put_buf_ptrs: Put buffers of the p2p world; read with `use_shmem`.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
    ]()
    # Row `t` of the expert rows is the shared expert's of token `t`.
    var shared_rows = SharedRows(
        BytePointer(unsafe_from_address=Int(input_tokens)), Int(n_rows_max)
    )
    if not can_start[group](ep_counters, _SEND):
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        return
    var rank = rank_of(ep_counters, my_rank)
    var launch = _start[n_ranks, use_shmem](
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        rank,
        own_of(put_buf_ptrs, rank),
    )
    if ep_counters.dispatch_received() == 0:
        record_failure(
            ep_counters.failure(),
            NOTHING_DISPATCHED,
            _SEND,
            launch.my_rank,
            -1,
            launch.sent,
            0,
        )
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        ep_counters.set_broken()
        return
    comptime n_pairs = group.n_local_experts() * n_ranks
    var pair_rows = shared_ints[n_pairs]()
    var pair_counts = shared_ints[n_pairs]()
    _share_pairs[num_threads, n_pairs](pair_rows, pair_counts, ep_counters)
    comptime n_warps = num_threads // WARP_SIZE
    if launch.warp_idx < n_send_warps(Int(n_tokens), n_warps):
        _send_rows[combine_dtype, hidden_size, group, use_shmem](
            input_tokens,
            Int(n_rows_max),
            src_info,
            pair_rows,
            pair_counts,
            launch,
            ep_counters,
        )
    _reduce_tokens[
        combine_dtype,
        hidden_size,
        num_threads,
        group,
        fused_shared_expert,
    ](
        output_tokens,
        router_weights,
        Int(n_tokens),
        shared_rows,
        ep_counters.dispatch_received(),
        launch,
        ep_counters,
    )
    _finish[group, True, True, use_shmem](launch, ep_counters)
