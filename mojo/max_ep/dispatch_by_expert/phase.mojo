# SPDX-License-Identifier: Apache-2.0
"""Dispatch of `expert_slots` for GPU ranks.

The same messages in the same slots, and the same rows, as `cpu/dispatch.mojo`
makes; other flags announce them. The count of a pair is published as soon as
it is known; each message then announces itself by the flag in its source info,
so receiving goes on while the wire is busy.

Roles of a block's warps: the first finds the slots of the choices, the next
ones send, the last reads the counts; each then takes part in receiving.

After the sending half: every peer has this generation's counts, and gets its
messages. After the receiving half: this rank's rows stand by local expert,
source rank, token, choice, and every source knows that they have been read.
"""
import max.gpu.primitives.warp as warp
from layout import TensorLayout, TileTensor
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
from std.utils import StaticTuple

from ..arguments import imm
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
from ..device.encode import encode_steps, steps_in_flight
from ..device.shared import (
    own_of,
    share_addresses,
    shared_ints,
    shared_words,
    SharedAddresses,
    SharedInts,
)
from ..device.warp import (
    any_lane,
    bytes_at,
    copy_warp,
    shuffle_address,
    store16,
)
from ..failures import (
    DROPPED,
    NO_COUNT,
    NOT_SENT,
    record_failure,
    TOO_MANY_ROWS,
)
from ..flags import (
    count_of,
    DeviceDeadline,
    fetch_add_block,
    flag_at,
    FlagPointer,
    generation_of,
    load_acquire_block,
    load_relaxed_sys,
    message_flag,
    next_generation,
    publish,
    SharedWord,
    store_relaxed_sys,
    store_release_block,
    Wait,
)
from ..layout import EXPERT_SLOTS, Group, MESSAGE_ALIGN, n_experts_on_rank
from ..row_tables import RowTables
from ..token_format import BytePointer, LaneBytes, TokenFormat
from ..transport import put_flag, put_message_warp

comptime _SEND = 0
comptime _RECEIVE = 1

# Words of a block's control: units whose slots are found, whether the counts
# are there, next item to receive.
comptime _INDEXED = 0
comptime _PAIRS_READY = 1
comptime _NEXT_ITEM = 2
comptime _N_CONTROL = 3

comptime FAILED_PAIRS = UInt32(2)
"""Value of the word `_PAIRS_READY` when the counts did not come."""


@fieldwise_init
struct DispatchUnits(TrivialRegisterPassable):
    """How the choices are dealt to the blocks: a unit is a part of a token.

    Unit `u` belongs to block `u % n_blocks`, so tokens leave in their order.
    """

    var n_units: Int
    """Units of all blocks."""
    var n_chunks: Int
    """Units of one token."""

    @staticmethod
    @always_inline
    def of(n_tokens: Int, top_k: Int, n_blocks: Int) -> Self:
        """Cuts few tokens into parts, so that every block has work."""
        var n_chunks = 1
        while n_chunks < top_k and n_tokens * n_chunks < 2 * n_blocks:
            n_chunks *= 2
        n_chunks = min(n_chunks, top_k)
        return Self(n_tokens * n_chunks, n_chunks)

    @always_inline
    def token(self, unit: Int) -> Int:
        """Names the token of a unit."""
        return unit // self.n_chunks

    @always_inline
    def first_k(self, unit: Int, top_k: Int, next: Int = 0) -> Int:
        """Names the first choice of a unit."""
        return (unit % self.n_chunks + next) * top_k // self.n_chunks


# ------------------------------------------------------------ the sending half


@always_inline
def _count_choices[
    n_experts: Int
](
    histogram: SharedWord,
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    begin: Int,
    end: Int,
    lane: Int,
):
    """Adds a range of choices to the block's histogram, with one warp."""
    comptime in_flight = 8
    for first in range(begin, end, WARP_SIZE * in_flight):
        var ids = Array[Int32, in_flight](fill=NO_EXPERT)
        comptime for i in range(in_flight):
            var choice = first + i * WARP_SIZE + lane
            if choice < end:
                ids[i] = topk_ids[unsafe_offset=choice]
        comptime for i in range(in_flight):
            if ids[i] >= 0 and ids[i] < Int32(n_experts):
                _ = fetch_add_block(histogram.unsafe_offset(Int(ids[i])), 1)


@always_inline
def _index_choices[
    group: Group, use_shmem: Bool
](
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_tokens: Int,
    units: DispatchUnits,
    histogram: SharedWord,
    control: SharedWord,
    counts: SharedAddresses,
    counters: EPLocalSyncCounters,
    my_rank: Int,
    generation: UInt32,
    deadline: DeviceDeadline,
    lane: Int,
):
    """Finds the slot of each choice of this block, then publishes counts.

    The slot of a choice is the number of earlier choices of its expert, as on
    CPU. Every block counts for itself, so no block waits for another.
    """
    comptime top_k = group.top_k
    var choices = counters.choices(generation, group)
    var slots = counters.slots(group)
    var block = Int(block_idx.x)
    var n_blocks = Int(grid_dim.x)
    var n_counted = 0
    var n_indexed: UInt32 = 0
    for unit in range(block, units.n_units, n_blocks):
        var token_idx = units.token(unit)
        _count_choices[group.n_experts](
            histogram, topk_ids, n_counted, token_idx * top_k, lane
        )
        n_counted = token_idx * top_k
        syncwarp()
        var expert = NO_EXPERT
        if lane < top_k:
            expert = topk_ids[unsafe_offset=token_idx * top_k + lane]
        var is_expert = expert >= 0 and expert < Int32(group.n_experts)
        var slot = 0
        if is_expert:
            slot = Int(histogram[unsafe_offset=Int(expert)])
        # The same expert twice in a token: the later choice stands behind.
        comptime for k in range(top_k):
            var other = warp.shuffle_idx(expert, UInt32(k))
            if k < lane and other == expert:
                slot += 1
        var first_k = units.first_k(unit, top_k)
        var end_k = units.first_k(unit, top_k, 1)
        if first_k <= lane and lane < end_k:
            var has_slot = is_expert and slot < group.max_tokens_per_rank
            if not has_slot and expert != NO_EXPERT:
                record_failure(
                    counters.failure(),
                    DROPPED,
                    _SEND,
                    my_rank,
                    Int(expert),
                    generation,
                    0,
                    token_idx,
                    lane,
                )
            var choice = group.choice(token_idx, lane)
            choices[unsafe_offset=choice] = expert if has_slot else NO_EXPERT
            slots[unsafe_offset=choice] = Int32(slot)
        syncwarp()
        n_indexed += 1
        if lane == 0:
            store_release_block(control.unsafe_offset(_INDEXED), n_indexed)
    _count_choices[group.n_experts](
        histogram, topk_ids, n_counted, n_tokens * top_k, lane
    )
    syncwarp()
    # A count is one word, so it too must have been read before it changes.
    if not await_done_words[group](
        bytes_at(counts[unsafe_offset=my_rank]),
        group.dispatch_done_offset(0),
        counters.dispatch_sent(),
        _SEND,
        deadline,
        counters,
        lane,
    ):
        return
    # A rank without tokens publishes zeros: its peers wait for every pair.
    for expert_id in range(
        block + n_blocks * lane, group.n_experts, n_blocks * WARP_SIZE
    ):
        var dst_rank, local_expert = divmod(expert_id, group.n_local_experts())
        var offset = group.dispatch_count_offset(
            group.pair(local_expert, my_rank)
        )
        var count = min(
            Int(histogram[unsafe_offset=expert_id]), group.max_tokens_per_rank
        )
        var to = counts[unsafe_offset=dst_rank]
        comptime if use_shmem:
            if to == 0:
                put_flag(
                    counts[unsafe_offset=my_rank] + UInt64(offset),
                    generation,
                    count,
                    dst_rank,
                )
                continue
        store_relaxed_sys(flag_at(bytes_at(to), offset), generation, count)


@always_inline
def _send_unit[
    input_type: DType,
    token_fmt_type: TokenFormat,
    input_scales_wrapper: Optional[
        def[dtype: DType](Int) capturing -> Scalar[dtype]
    ],
](
    token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    message: UInt64,
    expert: Int32,
    first_k: Int,
    end_k: Int,
    staged: UInt64,
    lane: Int,
):
    """Encodes a token and writes it to the messages of a unit, with one warp.
    """
    comptime n_elements = token_fmt_type.lane_elements
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime in_flight = steps_in_flight[token_fmt_type]()
    comptime Elements = SIMD[input_type, n_elements]
    comptime is_scaled = Bool(input_scales_wrapper)
    for first in range(0, n_vectors, WARP_SIZE * in_flight):
        var elements = Array[Elements, in_flight](fill=0)
        comptime for i in range(in_flight):
            var vector = first + i * WARP_SIZE + lane
            if vector < n_vectors:
                elements[i] = token.unsafe_load[
                    width=n_elements, alignment=MESSAGE_ALIGN
                ](vector * n_elements)
        var values = Array[LaneBytes, in_flight](fill=0)
        var scales = Array[LaneBytes, in_flight](fill=0)
        comptime if not is_scaled:
            encode_steps[input_type, token_fmt_type, False](
                elements, values, scales, 1, lane
            )
        for k in range(first_k, end_k):
            var to = shuffle_address(message, k)
            if to == 0:
                continue
            comptime if is_scaled:
                comptime scale_of = input_scales_wrapper.value()
                var id = Int(warp.shuffle_idx(expert, UInt32(k)))
                encode_steps[input_type, token_fmt_type, True](
                    elements, values, scales, scale_of[DType.float32](id), lane
                )
            _store_encoded[token_fmt_type](to, first, values, scales, lane)
        if staged != 0:
            _store_encoded[token_fmt_type](staged, first, values, scales, lane)


@always_inline
def _store_encoded[
    token_fmt_type: TokenFormat
](
    to: UInt64,
    first: Int,
    values: Array[LaneBytes, steps_in_flight[token_fmt_type]()],
    scales: Array[LaneBytes, steps_in_flight[token_fmt_type]()],
    lane: Int,
):
    """Writes some steps of an encoded token, with one warp."""
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime for i in range(steps_in_flight[token_fmt_type]()):
        var vector = first + i * WARP_SIZE + lane
        if vector < n_vectors:
            store16(
                bytes_at(to).unsafe_offset(vector * MESSAGE_ALIGN), values[i]
            )
            comptime if token_fmt_type.has_scales:
                # Eight lanes share a scale: 32 have 16 bytes of them.
                if lane % 32 == 0:
                    store16(
                        bytes_at(to).unsafe_offset(
                            token_fmt_type.value_bytes + vector // 2
                        ),
                        scales[i],
                    )


@always_inline
def _staged[group: Group](recv_buf: BytePointer, token_idx: Int) -> BytePointer:
    """Locates where a token waits for its place among this rank's rows."""
    return recv_buf.unsafe_offset(
        group.staged_from_recv(0) + group.dispatch_staged_offset(token_idx)
    )


@always_inline
def _send[
    input_type: DType,
    group: Group,
    token_fmt_type: TokenFormat,
    input_scales_wrapper: Optional[
        def[dtype: DType](Int) capturing -> Scalar[dtype]
    ],
    fused_shared_expert: Bool,
    use_shmem: Bool,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    units: DispatchUnits,
    control: SharedWord,
    put_buf: UInt64,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    counters: EPLocalSyncCounters,
    my_rank: Int,
    generation: UInt32,
    deadline: DeviceDeadline,
    sender: Int,
    n_senders: Int,
    lane: Int,
):
    """Sends this block's units with some of its warps."""
    comptime top_k = group.top_k
    if not await_done_words[group](
        bytes_at(counts[unsafe_offset=my_rank]),
        group.dispatch_done_offset(0),
        counters.dispatch_sent(),
        _SEND,
        deadline,
        counters,
        lane,
    ):
        return
    var choices = counters.choices(generation, group)
    var slots = counters.slots(group)
    var recv_buf = bytes_at(recv_bufs[unsafe_offset=my_rank])
    var n_blocks = Int(grid_dim.x)
    var first_unit = Int(block_idx.x) + sender * n_blocks
    var position = UInt32(sender)
    for unit in range(first_unit, units.n_units, n_senders * n_blocks):
        while load_acquire_block(control.unsafe_offset(_INDEXED)) <= position:
            pass
        position += UInt32(n_senders)
        var token_idx = units.token(unit)
        var first_k = units.first_k(unit, top_k)
        var end_k = units.first_k(unit, top_k, 1)
        var choice = group.choice(token_idx, lane)
        var expert = NO_EXPERT
        var message: UInt64 = 0
        var put_to: UInt64 = 0
        if first_k <= lane and lane < end_k:
            expert = choices[unsafe_offset=choice]
            if expert != NO_EXPERT:
                var dst_rank, local_expert = divmod(
                    Int(expert), group.n_local_experts()
                )
                # I1: only this rank writes the slots of pair (_, my_rank).
                var offset = UInt64(
                    group.dispatch_message_offset(
                        group.pair(local_expert, my_rank),
                        Int(slots[unsafe_offset=choice]),
                    )
                )
                message = recv_bufs[unsafe_offset=dst_rank] + offset
                comptime if use_shmem:
                    if message == offset:
                        message = put_buf + UInt64(
                            group.dispatch_put_offset(choice)
                        )
                        put_to = recv_bufs[unsafe_offset=my_rank] + offset
        var staged: UInt64 = 0
        comptime if fused_shared_expert:
            if first_k == 0:
                # I3: this rank's own done word, too, was awaited above.
                staged = UInt64(Int(_staged[group](recv_buf, token_idx)))
        _send_unit[input_type, token_fmt_type, input_scales_wrapper](
            tokens.unsafe_offset(token_idx * token_fmt_type.hidden_size),
            message,
            expert,
            first_k,
            end_k,
            staged,
            lane,
        )
        syncwarp()
        # I2: a message's flag is published after all of the message.
        comptime if use_shmem:
            comptime token_bytes = token_fmt_type.token_bytes
            for k in range(first_k, end_k):
                var to = shuffle_address(put_to, k)
                var from_ = shuffle_address(message, k)
                var id = Int(warp.shuffle_idx(expert, UInt32(k)))
                if to != 0:
                    # I3: the receiver's done word says that all was read, so
                    # nothing is put from here any more when it is reused.
                    put_message_warp(
                        to,
                        from_,
                        token_bytes,
                        to + UInt64(token_bytes),
                        generation,
                        group.choice(token_idx, k),
                        id // group.n_local_experts(),
                    )
        if message != 0 and put_to == 0:
            publish(
                message_flag(bytes_at(message), token_fmt_type.msg_bytes),
                generation,
                choice,
            )


# ---------------------------------------------------------- the receiving half


@always_inline
def read_counts[
    group: Group
](
    pair_rows: SharedInts,
    pair_counts: SharedInts,
    tables: RowTables[group, ...],
    n_shared: Int,
    n_rows_max: Int,
    my_counts: BytePointer,
    counters: EPLocalSyncCounters,
    my_rank: Int,
    generation: UInt32,
    deadline: DeviceDeadline,
    lane: Int,
) -> Int:
    """Waits for the counts of all pairs and lays out the rows, with one warp.
    """
    comptime n_ranks = group.n_ranks
    comptime n_local_experts = group.n_local_experts()
    comptime n_pairs = n_local_experts * n_ranks
    comptime in_flight = 8
    var is_first_block = block_idx.x == 0
    var n_held = n_experts_on_rank(group.n_experts, n_ranks, my_rank)
    var n_rows = n_shared
    var largest = 0
    var is_late = False
    for first in range(0, n_pairs, WARP_SIZE * in_flight):
        var words = Array[UInt64, in_flight](fill=0)
        var counts = Array[Int32, in_flight](fill=0)
        var before = Array[Int32, in_flight](fill=0)
        var wait = Wait(deadline)
        var missing = 0
        # All words that are missing are looked at again at once.
        while missing >= 0 and not is_late:
            comptime for i in range(in_flight):
                var pair = first + i * WARP_SIZE + lane
                if pair < n_held * n_ranks and (
                    generation_of(words[i]) != generation
                ):
                    words[i] = load_relaxed_sys(
                        flag_at(my_counts, group.dispatch_count_offset(pair))
                    )
            missing = -1
            comptime for i in range(in_flight):
                var pair = first + i * WARP_SIZE + lane
                if pair < n_held * n_ranks and (
                    generation_of(words[i]) != generation
                ):
                    missing = pair
            if wait.has_expired():
                is_late = missing >= 0
        if is_late:
            record_failure(
                counters.failure(),
                NO_COUNT,
                _RECEIVE,
                missing % n_ranks,
                my_rank * n_local_experts + missing // n_ranks,
                generation,
                load_relaxed_sys(
                    flag_at(my_counts, group.dispatch_count_offset(missing))
                ),
            )
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + lane
            if pair < n_held * n_ranks and not is_late:
                counts[i] = Int32(count_of(words[i]))
                largest = max(largest, count_of(words[i]))
        # All scans are under way at once; only then they are put together.
        comptime for i in range(in_flight):
            before[i] = warp.prefix_sum[exclusive=True](counts[i])
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + lane
            if pair < n_pairs:
                pair_rows[unsafe_offset=pair] = Int32(n_rows) + before[i]
                pair_counts[unsafe_offset=pair] = counts[i]
            n_rows += Int(
                warp.shuffle_idx(before[i] + counts[i], UInt32(WARP_SIZE - 1))
            )
    largest = Int(warp.max(Int32(largest)))
    syncwarp()
    # Packed rows already stand there; the first block also tells of them.
    var first_of_lane = lane
    comptime if not tables.is_padded:
        if not is_first_block:
            first_of_lane = n_local_experts
    for local_expert in range(first_of_lane, n_local_experts, WARP_SIZE):
        var first = group.pair(local_expert, 0)
        var n_before = Int(pair_rows[unsafe_offset=first])
        var first_row = tables.first_row(local_expert, n_before)
        var n_expert_rows = 0
        for pair in range(first, first + n_ranks):
            var count = Int(pair_counts[unsafe_offset=pair])
            pair_rows[unsafe_offset=pair] = Int32(first_row + n_expert_rows)
            if is_first_block:
                counters.set_pair_rows(pair, first_row + n_expert_rows, count)
                tables.write_pair(pair, n_expert_rows, count)
            n_expert_rows += count
        if is_first_block:
            tables.write_expert(local_expert, first_row, n_expert_rows)
    var n_rows_needed = tables.n_rows_needed(n_rows)
    if is_first_block and lane == 0:
        tables.write_ends(n_rows)
        counters.set_pair_rows(n_pairs, n_rows_needed, largest)
    if any_lane(is_late):
        if is_first_block:
            syncwarp()
            tables.write_no_rows(lane, WARP_SIZE)
        return -1
    if n_rows_needed > n_rows_max:
        if is_first_block:
            syncwarp()
            tables.write_no_rows(lane, WARP_SIZE)
        if lane == 0:
            record_failure(
                counters.failure(),
                TOO_MANY_ROWS,
                _RECEIVE,
                my_rank,
                0,
                generation,
                0,
                n_rows_needed,
                n_rows_max,
            )
        return -1
    return largest


@always_inline
def _receive[
    group: Group,
    token_fmt_type: TokenFormat,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int,
    tables: RowTables[group, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    n_shared: Int,
    control: SharedWord,
    pair_rows: SharedInts,
    pair_counts: SharedInts,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    counters: EPLocalSyncCounters,
    my_rank: Int,
    generation: UInt32,
    deadline: DeviceDeadline,
    is_counter: Bool,
    lane: Int,
):
    """Schedule messages into rows as they arrive, with one warp."""
    comptime n_ranks = group.n_ranks
    comptime n_local_experts = group.n_local_experts()
    comptime n_pairs = n_local_experts * n_ranks
    if is_counter:
        var largest = read_counts[group](
            pair_rows,
            pair_counts,
            tables,
            n_shared,
            n_rows_max,
            bytes_at(counts[unsafe_offset=my_rank]),
            counters,
            my_rank,
            generation,
            deadline,
            lane,
        )
        syncwarp()
        if lane == 0:
            pair_rows[unsafe_offset=n_pairs] = Int32(largest)
            store_release_block(
                control.unsafe_offset(_PAIRS_READY),
                1 if largest >= 0 else FAILED_PAIRS,
            )
    while load_acquire_block(control.unsafe_offset(_PAIRS_READY)) == 0:
        pass
    if load_acquire_block(control.unsafe_offset(_PAIRS_READY)) == FAILED_PAIRS:
        return
    # Slot by slot over all pairs: about the order in which messages arrive.
    var n_items = Int(pair_rows[unsafe_offset=n_pairs]) * n_pairs
    var recv_buf = bytes_at(recv_bufs[unsafe_offset=my_rank])
    while True:
        var round = next_work(control.unsafe_offset(_NEXT_ITEM), lane)
        var item = round * Int(grid_dim.x) + Int(block_idx.x)
        if item >= n_items:
            return
        var slot, pair = divmod(item, n_pairs)
        if slot >= Int(pair_counts[unsafe_offset=pair]):
            continue
        var message = recv_buf.unsafe_offset(
            group.dispatch_message_offset(pair, slot)
        )
        var word = await_message(
            message_flag(message, token_fmt_type.msg_bytes),
            generation,
            _RECEIVE,
            pair % n_ranks,
            my_rank * n_local_experts + pair // n_ranks,
            deadline,
            counters,
        )
        if any_lane(generation_of(word) != generation):
            return
        var row = Int(pair_rows[unsafe_offset=pair]) + slot
        copy_warp[token_fmt_type.value_bytes](
            token_fmt_type.row_values(rows, row), message, lane
        )
        token_fmt_type.decode_scales_lane(message, rows, row, lane, WARP_SIZE)
        if lane == 0:
            var token_idx, k = divmod(count_of(word), group.top_k)
            src_info[unsafe_offset=2 * row] = Int32(token_idx)
            src_info[unsafe_offset=2 * row + 1] = Int32(k)


# ------------------------------------------------------------------ the kernels


@always_inline
def dispatch_group_of[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens: Int,
    protocol: Int = EXPERT_SLOTS,
]() -> Group:
    """Lays out the buffers as far as dispatch needs them."""
    return Group.of(
        n_experts,
        n_ranks,
        max_tokens,
        token_fmt_type.top_k,
        token_fmt_type.msg_bytes,
        0,
        protocol,
    )


@always_inline
def n_send_warps(n_tokens: Int, n_warps: Int) -> Int:
    """Chooses how many warps of a block send while the others receive.

    Stores to peers queue up in a multiprocessor and delay all its other
    traffic, so few warps send when there is much to send
    (docs/performance.md).
    """
    return min(3 if n_tokens > 256 else 6, n_warps - 2)


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
        next_generation(counters.dispatch_sent()),
        next_generation(counters.dispatch_received()),
        control,
        put_buf,
        share_addresses[n_ranks, use_shmem](recv_buf_ptrs, my_rank),
        share_addresses[n_ranks, use_shmem](recv_count_ptrs, my_rank),
    )


@always_inline
def _send[
    input_type: DType,
    num_threads: Int,
    group: Group,
    token_fmt_type: TokenFormat,
    input_scales_wrapper: Optional[
        def[dtype: DType](Int) capturing -> Scalar[dtype]
    ],
    fused_shared_expert: Bool,
    use_shmem: Bool,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_tokens: Int,
    n_senders: Int,
    launch: _Launch,
    counters: EPLocalSyncCounters,
):
    """Deals the sending half to the warps of a block."""
    var histogram = shared_words[group.n_experts]()
    for i in range(Int(thread_idx.x), group.n_experts, num_threads):
        histogram[unsafe_offset=i] = 0
    barrier()
    var units = DispatchUnits.of(n_tokens, group.top_k, Int(grid_dim.x))
    if launch.warp_idx == 0:
        _index_choices[group, use_shmem](
            topk_ids,
            n_tokens,
            units,
            histogram,
            launch.control,
            launch.counts,
            counters,
            launch.my_rank,
            launch.sent,
            launch.deadline,
            launch.lane,
        )
    elif launch.warp_idx <= n_senders:
        _send[
            input_type,
            group,
            token_fmt_type,
            input_scales_wrapper,
            fused_shared_expert,
            use_shmem,
        ](
            input_tokens,
            units,
            launch.control,
            launch.put_buf,
            launch.recv_bufs,
            launch.counts,
            counters,
            launch.my_rank,
            launch.sent,
            launch.deadline,
            launch.warp_idx - 1,
            n_senders,
            launch.lane,
        )


@always_inline
def _receive[
    num_threads: Int,
    group: Group,
    token_fmt_type: TokenFormat,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int,
    tables: RowTables[group, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    n_shared: Int,
    launch: _Launch,
    counters: EPLocalSyncCounters,
):
    """Has a warp of a block take its part in the receiving half."""
    comptime n_pairs = group.n_local_experts() * group.n_ranks
    _receive[group, token_fmt_type](
        rows,
        n_rows_max,
        tables,
        src_info,
        n_shared,
        launch.control,
        shared_ints[n_pairs + 1](),
        shared_ints[n_pairs](),
        launch.recv_bufs,
        launch.counts,
        counters,
        launch.my_rank,
        launch.received,
        launch.deadline,
        launch.warp_idx == num_threads // WARP_SIZE - 1,
        launch.lane,
    )


@always_inline
def _place_own_tokens[
    num_threads: Int, group: Group, token_fmt_type: TokenFormat
](
    rows: token_fmt_type.Rows,
    n_tokens: Int,
    src_info: Pointer[Int32, MutUntrackedOrigin],
    launch: _Launch,
):
    """Copies what this block has put aside to the shared expert's rows."""
    comptime n_warps = num_threads // WARP_SIZE
    var n_blocks = Int(grid_dim.x)
    var units = DispatchUnits.of(n_tokens, group.top_k, n_blocks)
    var recv_buf = bytes_at(launch.recv_bufs[unsafe_offset=launch.my_rank])
    for token_idx in range(launch.warp_idx, n_tokens, n_warps):
        # The block that sends the first part of a token puts it aside.
        if token_idx * units.n_chunks % n_blocks != Int(block_idx.x):
            continue
        var staged = _staged[group](recv_buf, token_idx)
        copy_warp[token_fmt_type.value_bytes](
            token_fmt_type.row_values(rows, token_idx), staged, launch.lane
        )
        token_fmt_type.decode_scales_lane(
            staged, rows, token_idx, launch.lane, WARP_SIZE
        )
        if launch.lane == 0:
            src_info[unsafe_offset=2 * token_idx] = Int32(token_idx)
            src_info[unsafe_offset=2 * token_idx + 1] = -1


@always_inline
def _finish[
    group: Group,
    is_sending: Bool,
    is_receiving: Bool,
    use_shmem: Bool,
](launch: _Launch, counters: EPLocalSyncCounters, n_tokens: Int):
    """Ends a launch: its last block notes the generation and tells the peers.
    """
    if not is_last_block(counters):
        return
    comptime if is_sending:
        if launch.lane == 0:
            counters.set_n_tokens(launch.sent, n_tokens)
            counters.set_dispatch_sent(launch.sent)
        # AFTER: this generation's counts are with their receivers, and its
        # messages are on their way.
    comptime if is_receiving:
        if launch.lane == 0:
            counters.set_dispatch_received(launch.received)
        publish_done[group.n_ranks, use_shmem](
            launch.counts,
            launch.my_rank,
            group.dispatch_done_offset(launch.my_rank),
            launch.received,
            launch.lane,
        )
        # AFTER: rows are complete; every source may overwrite its slots here.


@always_inline
def _deliver_nothing[num_threads: Int](tables: RowTables):
    """Leaves outputs without rows, after a failure of this rank."""
    if block_idx.x == 0:
        tables.write_no_rows(Int(thread_idx.x), num_threads)


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
    put_buf_ptrs: Array[BytePointer, p2p_world_size],
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
        fused_shared_expert: Whether to put tokens aside for `dispatch_wait`.

    Args:
        input_tokens: `[n_tokens, hidden_size]`, rows aligned to 16 bytes.
        topk_ids: `[n_tokens, top_k]`, in `[-1, n_experts)`; `-1`: no expert.
        put_buf_ptrs: Put buffers of the p2p world; read with `use_shmem`. The
            send buffer is found from the recv buffer, in the same region.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """
    comptime group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank
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
    var n_tokens = Int(input_tokens.dim[0]())
    _send[
        input_type,
        num_threads,
        group,
        token_fmt_type,
        input_scales_wrapper,
        fused_shared_expert,
        use_shmem,
    ](
        imm(input_tokens),
        imm(topk_ids),
        n_tokens,
        num_threads // WARP_SIZE - 1,
        launch,
        ep_counters,
    )
    _finish[group, True, False, use_shmem](launch, ep_counters, n_tokens)


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
    tables: RowTables[
        dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Schedule the messages into rows sorted by expert, as they arrive.

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
        n_rows_max: Rows there is room for.
        tables: The output tensors that say which row is whose.
        src_info: `[n_rows_max][2]`: token on its source rank, k; for the shared
            expert token, -1.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank
    ]()
    if not can_start[group](ep_counters, _RECEIVE):
        _deliver_nothing[num_threads](tables)
        return
    var rank = rank_of(ep_counters, my_rank)
    comptime if fused_shared_expert:
        var received = next_generation(ep_counters.dispatch_received())
        if ep_counters.dispatch_sent() != received:
            record_failure(
                ep_counters.failure(), NOT_SENT, _RECEIVE, rank, -1, received, 0
            )
            ep_counters.set_broken()
            _deliver_nothing[num_threads](tables)
            return
    var launch = _start[n_ranks, use_shmem](
        recv_buf_ptrs, recv_count_ptrs, ep_counters, rank
    )
    barrier()
    var n_shared = 0
    comptime if fused_shared_expert:
        n_shared = ep_counters.n_tokens(launch.received)
        _place_own_tokens[num_threads, group, token_fmt_type](
            rows, min(n_shared, Int(n_rows_max)), src_info, launch
        )
    _receive[num_threads, group, token_fmt_type](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        n_shared,
        launch,
        ep_counters,
    )
    _finish[group, False, True, use_shmem](launch, ep_counters, 0)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_kernel[
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
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
](
    input_tokens: TileTensor[
        input_type, input_tokens_layout, ImmUntrackedOrigin
    ],
    topk_ids: TileTensor[DType.int32, topk_ids_layout, ImmUntrackedOrigin],
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    put_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[FlagPointer, p2p_world_size],
    ep_counters: EPLocalSyncCounters[n_experts],
    my_rank: Int32,
):
    """Sends and receives in one launch; all ranks must run at the same time.

    Launch: `grid_dim` in `[1, n_sms]`, all blocks resident at once,
    `block_dim = num_threads`.

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
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.

    Args:
        input_tokens: As in `dispatch_async_kernel`.
        topk_ids: Likewise.
        rows: As in `dispatch_wait_kernel`.
        n_rows_max: Likewise.
        tables: Likewise.
        src_info: Likewise.
        put_buf_ptrs: Put buffers of the p2p world; read with `use_shmem`. The
            send buffer is found from the recv buffer, in the same region.
        recv_buf_ptrs: Recv buffers of the p2p world.
        recv_count_ptrs: Counts buffers of the p2p world.
        ep_counters: This rank's local words.
        my_rank: This rank, in `[0, n_ranks)`; -1: as the counters say.
    """
    comptime group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank
    ]()
    if not can_start[group](ep_counters, _SEND):
        _deliver_nothing[num_threads](tables)
        return
    var rank = rank_of(ep_counters, my_rank)
    var launch = _start[n_ranks, use_shmem](
        recv_buf_ptrs,
        recv_count_ptrs,
        ep_counters,
        rank,
        own_of(put_buf_ptrs, rank),
    )
    var n_tokens = Int(input_tokens.dim[0]())
    _send[
        input_type,
        num_threads,
        group,
        token_fmt_type,
        input_scales_wrapper,
        fused_shared_expert,
        use_shmem,
    ](
        imm(input_tokens),
        imm(topk_ids),
        n_tokens,
        n_send_warps(n_tokens, num_threads // WARP_SIZE),
        launch,
        ep_counters,
    )
    _receive[num_threads, group, token_fmt_type](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        n_tokens if fused_shared_expert else 0,
        launch,
        ep_counters,
    )
    comptime if fused_shared_expert:
        # Whatever this block's warps have put aside is there after this.
        barrier()
        _place_own_tokens[num_threads, group, token_fmt_type](
            rows, min(n_tokens, Int(n_rows_max)), src_info, launch
        )
    _finish[group, True, True, use_shmem](launch, ep_counters, n_tokens)
