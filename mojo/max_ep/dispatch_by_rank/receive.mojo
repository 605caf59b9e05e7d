# SPDX-License-Identifier: Apache-2.0
"""How a warp of dispatch turns tokens into rows, as they arrive.

Of a token it awaits the entries, which say where on this rank it goes, and each of
its parts; the rows of pairs (`row_counts.mojo`) only when something is there to be
put into a row. `SENTINEL` is put back where the data was its own flag.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, WARP_SIZE
from std.bit import count_trailing_zeros
from std.memory import bitcast

from ..counters import NO_ROW, relative_rank, row_elsewhere
from ..device.block import await_message, Block, next_work
from ..device.schedule import (
    Chunk,
    FlaggedSplit,
    inline_split,
    InlineSplit,
    n_steps_of,
    Schedule,
    vector_of_lane,
)
from ..device.shared import SharedInts
from ..device.warp import (
    ACCESSES_IN_FLIGHT,
    any_lane,
    bytes_at,
    divmod_32,
    load16,
    SENTINEL,
    store16,
)
from ..failures import NO_MESSAGE
from ..flags import (
    flag_at,
    flag_word,
    generation_of,
    load_acquire_block,
    load_relaxed_sys,
    load_relaxed_sys_16,
    SharedWord,
    Wait,
)
from ..layout import Group, MESSAGE_ALIGN
from ..row_tables import RowTables
from ..token_format import BytePointer, LaneBytes, TokenFormat
from .counts import n_counting_warps, row_of_pair
from .entries import (
    expert_of_entry,
    id_of_word,
    NO_POSITION,
    position_of_entry,
    weight_of_word,
)
from .roles import COUNTED, FAILED, NEXT_RECEIVE, RECEIVE, receive_schedule


@always_inline
def _load_words[are_two: Bool](words: BytePointer) -> LaneBytes:
    """Reads an entry, or a choice that a token carries, whether it is there or not.
    """
    comptime if are_two:
        return load_relaxed_sys_16(words)
    var word = load_relaxed_sys(flag_at(words, 0))
    return bitcast[DType.uint32, 4](SIMD[DType.uint64, 2](word, 0))


@always_inline
def _await_words[
    are_two: Bool
](
    seen: LaneBytes,
    words: BytePointer,
    src_rank: Int,
    generation: UInt32,
    block: Block[...],
) -> LaneBytes:
    """Waits for an entry, or a choice that a token carries, with one lane."""
    var bytes = seen
    var wait = Wait(block.deadline)
    while True:
        if bytes[1] == generation:
            return bytes
        if wait.has_expired():
            block.fail(
                NO_MESSAGE,
                RECEIVE,
                src_rank,
                -1,
                generation,
                flag_word(bytes[1], 0),
            )
            return bytes
        bytes = _load_words[are_two](words)


@always_inline
def _place_metadata[
    group: Group, token_fmt_type: TokenFormat
](
    rows: token_fmt_type.Rows,
    row: Int,
    recv_buf: BytePointer,
    src_rank: Int,
    token_idx: Int,
    generation: UInt32,
    block: Block[group],
) -> Bool:
    """Puts the choices that a token carries beside its row, with one warp."""
    comptime router_top_k = token_fmt_type.router_top_k
    var is_late = False
    for k in range(block.lane, router_top_k, WARP_SIZE):
        var words_of = recv_buf.unsafe_offset(
            group.metadata_offset(src_rank, token_idx, k, router_top_k)
        )
        var carried = _await_words[True](
            _load_words[True](words_of),
            words_of,
            src_rank,
            generation,
            block,
        )
        is_late = is_late or carried[1] != generation
        var words = bitcast[DType.uint64, 2](carried)
        token_fmt_type.place_metadata(
            rows, row, k, id_of_word(words[0]), weight_of_word(words[1])
        )
    return not any_lane(is_late)


@always_inline
def _load_steps[
    in_flight: Int, //, n_vectors: Int, are_all_inline: Bool
](
    mut parts: Array[LaneBytes, in_flight],
    from_: BytePointer,
    is_inline: Bool,
    first: Int,
    end: Int,
    stride: Int,
):
    """Reads some 16 bytes of a token a lane; early ones whether they are there or not.
    """
    var behind = UInt32(min(end, n_vectors))
    comptime for i in range(in_flight):
        var vector = UInt32(first + i * stride)
        if vector < behind:
            var p = from_.unsafe_offset(Int(vector) * MESSAGE_ALIGN)
            if are_all_inline or is_inline:
                parts[i] = load_relaxed_sys_16(p)
            else:
                parts[i] = load16(p)


@always_inline
def _await_steps[
    in_flight: Int, //, n_vectors: Int
](
    mut parts: Array[LaneBytes, in_flight],
    from_: BytePointer,
    first: Int,
    end: Int,
    stride: Int,
    src_rank: Int,
    generation: UInt32,
    block: Block[...],
) -> Bool:
    """Waits for some 16 bytes a lane of an early token, and puts `SENTINEL` back.
    """
    var behind = UInt32(min(end, n_vectors))
    # All that are missing are looked at again at once.
    var wait = Wait(block.deadline)
    while True:
        var is_missing = False
        comptime for i in range(in_flight):
            var vector = UInt32(first + i * stride)
            if vector < behind and parts[i][3] == SENTINEL:
                is_missing = True
        if not is_missing:
            break
        if wait.has_expired():
            block.fail(
                NO_MESSAGE,
                RECEIVE,
                src_rank,
                -1,
                generation,
                0,
            )
            return False
        comptime for i in range(in_flight):
            var vector = UInt32(first + i * stride)
            if vector < behind and parts[i][3] == SENTINEL:
                parts[i] = load_relaxed_sys_16(
                    from_.unsafe_offset(Int(vector) * MESSAGE_ALIGN)
                )
    comptime for i in range(in_flight):
        var vector = UInt32(first + i * stride)
        if vector < behind:
            # I3: whoever writes here next has seen a later done word.
            store16(
                from_.unsafe_offset(Int(vector) * MESSAGE_ALIGN),
                LaneBytes(SENTINEL),
            )
    return True


@always_inline
def _are_counted[group: Group](control: SharedWord) -> Bool:
    """Waits for the rows of all pairs."""
    comptime n_counting = n_counting_warps[group]()
    while load_acquire_block(control.unsafe_offset(COUNTED)) < UInt32(
        n_counting
    ):
        pass
    return load_acquire_block(control.unsafe_offset(FAILED)) == 0


@always_inline
def n_in_flight[token_fmt_type: TokenFormat, are_all_inline: Bool]() -> Int:
    """Counts the steps of a token that a lane has under way."""
    comptime n_steps = n_steps_of[token_fmt_type]()
    return min(
        InlineSplit[n_steps].most_steps if are_all_inline else n_steps,
        ACCESSES_IN_FLIGHT,
    )


@always_inline
def _inline_token[
    group: Group, token_fmt_type: TokenFormat, has_input: Bool
](
    recv_buf: BytePointer,
    own_tokens: UInt64,
    my_rank: Int,
    src_rank: Int,
    token_idx: Int,
) -> BytePointer:
    """Finds where an early token is read."""
    comptime if has_input:
        if src_rank == my_rank:
            return bytes_at(
                own_tokens
                + UInt64(token_idx) * UInt64(token_fmt_type.value_bytes)
            )
    return recv_buf.unsafe_offset(
        group.inline_token_offset(src_rank, token_idx)
    )


@always_inline
def receive_tokens[
    n_warps: Int,
    group: Group,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
    are_all_inline: Bool,
](
    rows: token_fmt_type.Rows,
    tables: RowTables[group, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    own_tokens: UInt64,
    pair_rows: SharedInts,
    n_tokens_of: SharedInts,
    block: Block[group],
    generation: UInt32,
):
    """Schedule tokens into rows as they arrive, with one warp."""
    comptime n_ranks = group.n_ranks
    comptime top_k = group.top_k
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime n_steps = n_steps_of[token_fmt_type]()
    comptime chunks = FlaggedSplit[n_steps](True)
    comptime in_flight = n_in_flight[token_fmt_type, are_all_inline]()
    var parts = Array[LaneBytes, in_flight](fill=0)
    var scales = Array[LaneBytes, 1](fill=0)
    var lane = block.lane
    var my_rank = block.my_rank
    var first_expert = my_rank * group.n_local_experts()
    var recv_buf = bytes_at(block.recv_bufs[unsafe_offset=my_rank])
    var most = Int(n_tokens_of[unsafe_offset=n_ranks])
    var cut = inline_split[n_steps](most)
    var n_items = (
        most
        * n_ranks
        * (cut.n_chunks() if are_all_inline else chunks.n_chunks())
    )
    var schedule = receive_schedule(block.warp_idx, n_warps)
    # A turn is a trip to shared memory: few items are dealt beforehand, one a warp.
    var are_scheduled = are_all_inline and n_items <= schedule.n_scheduled(
        Int(grid_dim.x)
    )
    var round = schedule.first
    var is_waiting = True
    while True:
        var item: Int
        if are_scheduled:
            item = Schedule.item(round, Int(block_idx.x), Int(grid_dim.x))
            round += schedule.stride
        else:
            item = next_work(
                block.control.unsafe_offset(NEXT_RECEIVE), lane
            ) * Int(grid_dim.x) + Int(block_idx.x)
        if item >= n_items:
            return
        var chunk: Chunk
        comptime if are_all_inline:
            chunk = cut.chunk(item)
        else:
            chunk = chunks.chunk(item)
        var part = chunk.part
        var token_idx, src_rank = divmod_32(chunk.whole, n_ranks)
        var n_tokens = Int(n_tokens_of[unsafe_offset=src_rank])
        if token_idx >= n_tokens:
            continue
        var is_inline = are_all_inline or n_tokens <= group.n_inline_tokens()
        var token = _inline_token[group, token_fmt_type, has_input](
            recv_buf, own_tokens, my_rank, src_rank, token_idx
        )
        var is_input = has_input and src_rank == my_rank
        if is_input:
            is_inline = False
        elif not is_inline:
            token = recv_buf.unsafe_offset(
                group.token_offset(src_rank, token_idx)
            )
        # On its way, or looked at, while its entries are looked at: mostly it is
        # for this rank.
        var is_loaded = is_inline or is_input
        # Lane `i` has the scales of step `i`.
        var its_scales = token.unsafe_offset(token_fmt_type.value_bytes)
        if is_loaded:
            _load_steps[n_vectors, are_all_inline](
                parts,
                token,
                is_inline,
                chunk.begin * WARP_SIZE + lane,
                chunk.end * WARP_SIZE,
                WARP_SIZE,
            )
            comptime if token_fmt_type.has_scales:
                _load_steps[n_steps, are_all_inline](
                    scales,
                    its_scales,
                    is_inline,
                    chunk.begin + lane,
                    min(chunk.end, chunk.begin + in_flight),
                    1,
                )
        var row = NO_ROW
        var has_row = False
        var pair = 0
        var place_in_pair: Int32 = 0
        var weight: Float32 = 0
        var is_sent_here = False
        var is_late = False
        if lane < top_k:
            var choice = group.choice(token_idx, lane)
            var its_entry = recv_buf.unsafe_offset(
                group.entry_offset(src_rank, choice)
            )
            var entry = _await_words[group.has_sums()](
                _load_words[group.has_sums()](its_entry),
                its_entry,
                src_rank,
                generation,
                block,
            )
            is_late = entry[1] != generation
            var words = bitcast[DType.uint64, 2](entry)
            var expert = expert_of_entry(words[0])
            var local_expert = expert - first_expert
            var position = position_of_entry(words[0])
            is_sent_here = (
                0 <= local_expert
                and local_expert < group.n_local_experts()
                and not is_late
            )
            has_row = is_sent_here and position != NO_POSITION
            place_in_pair = Int32(position)
            pair = group.pair(local_expert, src_rank)
            weight = weight_of_word(words[1])
            comptime if group.has_sums():
                if (
                    src_rank == my_rank
                    and not is_sent_here
                    and expert < group.n_experts
                    and position != NO_POSITION
                ):
                    row = row_elsewhere(expert // group.n_local_experts())
        if any_lane(is_late):
            block.counters.set_broken()
            return
        var wanted = warp.vote[DType.uint32](has_row)
        var is_shared = fused_shared_expert and src_rank == my_rank
        var is_here = is_shared or any_lane(is_sent_here)
        comptime if group.sends_to_all():
            # It came, even if no row is made of it: `SENTINEL` is put back.
            if is_inline and my_rank < group.n_ranks_with_experts():
                is_here = True
        var source = relative_rank(my_rank, src_rank, n_ranks)
        if not is_here:
            comptime if group.has_sums():
                if part == 0 and lane < top_k:
                    block.counters.received_rows(group, source)[
                        unsafe_offset=group.choice(token_idx, lane)
                    ] = row
            continue
        if not are_all_inline and not is_loaded:
            var word = await_message(
                flag_at(
                    recv_buf,
                    group.chunk_flag_offset(src_rank, token_idx, part),
                ),
                generation,
                RECEIVE,
                src_rank,
                -1,
                block.deadline,
                block.counters,
            )
            if any_lane(generation_of(word) != generation):
                block.counters.set_broken()
                return

        var begin = chunk.begin
        var end = chunk.end
        for first in range(begin, end, in_flight):
            var end_here = min(end, first + in_flight)
            if first != begin or (not are_all_inline and not is_loaded):
                _load_steps[n_vectors, are_all_inline](
                    parts,
                    token,
                    is_inline,
                    first * WARP_SIZE + lane,
                    end * WARP_SIZE,
                    WARP_SIZE,
                )
                comptime if token_fmt_type.has_scales:
                    _load_steps[n_steps, are_all_inline](
                        scales, its_scales, is_inline, first + lane, end_here, 1
                    )
            var is_there = True
            if is_inline:
                is_there = _await_steps[n_vectors](
                    parts,
                    token,
                    first * WARP_SIZE + lane,
                    end * WARP_SIZE,
                    WARP_SIZE,
                    src_rank,
                    generation,
                    block,
                )
                comptime if token_fmt_type.has_scales:
                    is_there = (
                        _await_steps[n_steps](
                            scales,
                            its_scales,
                            first + lane,
                            end_here,
                            1,
                            src_rank,
                            generation,
                            block,
                        )
                        and is_there
                    )
            if any_lane(not is_there):
                block.counters.set_broken()
                return
            # Only now: what has come by then does not wait for the block.counts.
            if is_waiting:
                if not _are_counted[group](block.control):
                    return
                is_waiting = False
            if first == begin:
                if has_row:
                    row = row_of_pair(tables, pair_rows, pair) + place_in_pair
                if part == 0:
                    if has_row:
                        src_info[unsafe_offset=2 * Int(row)] = Int32(token_idx)
                        src_info[unsafe_offset=2 * Int(row) + 1] = Int32(lane)
                    comptime if group.has_sums():
                        if lane < top_k:
                            var choice = group.choice(token_idx, lane)
                            block.counters.received_rows(group, source)[
                                unsafe_offset=choice
                            ] = row
                            block.counters.received_weights(group, source)[
                                unsafe_offset=choice
                            ] = weight
                    comptime if token_fmt_type.router_top_k > 0:
                        # Of its choices, which are ranks, this rank's alone has
                        # a row here.
                        var k = count_trailing_zeros(wanted)
                        if wanted != 0 and not _place_metadata[
                            group, token_fmt_type
                        ](
                            rows,
                            Int(warp.shuffle_idx(row, k)),
                            recv_buf,
                            src_rank,
                            token_idx,
                            generation,
                            block,
                        ):
                            block.counters.set_broken()
                            return
                    comptime if fused_shared_expert:
                        if is_shared and lane == 0:
                            src_info[unsafe_offset=2 * token_idx] = Int32(
                                token_idx
                            )
                            src_info[unsafe_offset=2 * token_idx + 1] = -1
            var rest = wanted
            var is_shared_left = is_shared
            while rest != 0 or is_shared_left:
                var to_row = token_idx
                if rest != 0:
                    var k = count_trailing_zeros(rest)
                    rest &= rest - 1
                    to_row = Int(warp.shuffle_idx(row, k))
                else:
                    is_shared_left = False
                var to = token_fmt_type.row_values(rows, to_row)
                comptime for i in range(in_flight):
                    var vector, is_in_chunk = vector_of_lane[n_vectors](
                        first + i, end, lane
                    )
                    if is_in_chunk:
                        store16(
                            to.unsafe_offset(vector * MESSAGE_ALIGN), parts[i]
                        )
                comptime if token_fmt_type.has_scales:
                    if lane < in_flight and first + lane < end:
                        token_fmt_type.place_scales(
                            rows, to_row, first + lane, scales[0]
                        )
