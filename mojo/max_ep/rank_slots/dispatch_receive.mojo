# SPDX-License-Identifier: Apache-2.0
"""How a warp of dispatch turns tokens into rows, as they arrive.

Of a token it awaits the entries, which say where on this rank it goes, and each of
its parts; the rows of pairs (`row_counts.mojo`) only when something is there to be
put into a row. `EMPTY` is put back where the data was its own flag.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE, block_idx, grid_dim
from std.bit import count_trailing_zeros
from std.math import ceildiv
from std.memory import bitcast

from ..counters import EPLocalSyncCounters, NO_ROW
from ..expert_slots.device_steps import (
    ACCESSES_IN_FLIGHT,
    SharedAddresses,
    SharedInts,
    any_lane,
    await_message,
    bytes_at,
    load16,
    store16,
    take_turn,
)
from ..expert_slots.host_steps import flag_at
from ..failures import NO_MESSAGE, note_failure
from ..flags import (
    SPINS_BETWEEN_LOOKS,
    SharedWord,
    block_peek,
    flag_word,
    generation_of,
    peek_16,
    peek_number,
)
from ..layout import MESSAGE_ALIGN, N_CHUNKS, RegionLayout
from ..row_tables import RowTables
from ..token_format import BytePointer, LaneBytes, TokenFormat
from .deal import n_early_parts
from .device_steps import EMPTY, Launch, divmod_32
from .dispatch_roles import COUNTED, FAILED, NEXT_ITEM, N_INDEX_WARPS, RECEIVE
from .entries import (
    NO_POSITION,
    expert_of_entry,
    id_of_word,
    position_of_entry,
    weight_of_word,
)
from .row_counts import row_of_pair


@always_inline
def _await_words[
    n_experts: Int, are_two: Bool
](
    words: BytePointer,
    src_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> LaneBytes:
    """Waits for an entry, or a choice that a token carries, with one lane.

    Parameters:
        n_experts: Experts of the group.
        are_two: Whether it is two words, or one.

    Args:
        words: Where it comes.
        src_rank: Rank of the token.
        generation: The generation to wait for.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Its words; of another generation if it did not come.
    """
    var spins = 0
    while True:
        var bytes: LaneBytes
        comptime if are_two:
            bytes = peek_16(words)
        else:
            var word = peek_number(flag_at(words, 0))
            bytes = bitcast[DType.uint32, 4](SIMD[DType.uint64, 2](word, 0))
        if bytes[1] == generation:
            return bytes
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                RECEIVE,
                src_rank,
                -1,
                generation,
                flag_word(bytes[1], 0),
            )
            return bytes


@always_inline
def _place_carried[
    n_experts: Int, layout: RegionLayout, token_fmt_type: TokenFormat
](
    rows: token_fmt_type.Rows,
    row: Int,
    recv_buf: BytePointer,
    src_rank: Int,
    token_idx: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Puts the choices that a token carries beside its row, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.

    Args:
        rows: The output tensors.
        row: The token's row.
        recv_buf: This rank's recv buffer.
        src_rank: Rank of the token.
        token_idx: The token there.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether all came; the same in all lanes.
    """
    comptime n_carried = token_fmt_type.n_carried
    var is_late = False
    for k in range(launch.lane, n_carried, WARP_SIZE):
        var carried = _await_words[n_experts, True](
            recv_buf.unsafe_offset(
                layout.carried_choice_offset(src_rank, token_idx, k, n_carried)
            ),
            src_rank,
            generation,
            launch,
            counters,
        )
        is_late = is_late or carried[1] != generation
        var words = bitcast[DType.uint64, 2](carried)
        token_fmt_type.place_choice(
            rows, row, k, id_of_word(words[0]), weight_of_word(words[1])
        )
    return not any_lane(is_late)


@always_inline
def _load_steps[
    n_experts: Int, layout: RegionLayout, in_flight: Int, n_vectors: Int
](
    mut parts: Array[LaneBytes, in_flight],
    from_: BytePointer,
    is_early: Bool,
    first: Int,
    end: Int,
    stride: Int,
    src_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Loads some 16 bytes of a token a lane; early ones as they come.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.
        in_flight: Loads of a lane.
        n_vectors: 16 bytes that there are.

    Args:
        parts: Result.
        from_: Where from.
        is_early: Whether the data is its own flag, to be put back.
        first: First 16 bytes of this lane.
        end: Behind the last of the part.
        stride: 16 bytes from one load of a lane to its next.
        src_rank: Whose token it is.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether all came; this lane's.
    """
    if not is_early:
        comptime for i in range(in_flight):
            var vector = first + i * stride
            if vector < end and vector < n_vectors:
                parts[i] = load16(from_.unsafe_offset(vector * MESSAGE_ALIGN))
        return True
    comptime for i in range(in_flight):
        var vector = first + i * stride
        if vector < end and vector < n_vectors:
            parts[i] = peek_16(from_.unsafe_offset(vector * MESSAGE_ALIGN))
    # All that are missing are looked at again at once.
    var spins = 0
    while True:
        var is_missing = False
        comptime for i in range(in_flight):
            var vector = first + i * stride
            if vector < end and vector < n_vectors and parts[i][3] == EMPTY:
                is_missing = True
        if not is_missing:
            break
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                RECEIVE,
                src_rank,
                -1,
                generation,
                0,
            )
            return False
        comptime for i in range(in_flight):
            var vector = first + i * stride
            if vector < end and vector < n_vectors and parts[i][3] == EMPTY:
                parts[i] = peek_16(from_.unsafe_offset(vector * MESSAGE_ALIGN))
    comptime for i in range(in_flight):
        var vector = first + i * stride
        if vector < end and vector < n_vectors:
            # I3: whoever writes here next has seen a later done word.
            store16(
                from_.unsafe_offset(vector * MESSAGE_ALIGN), LaneBytes(EMPTY)
            )
    return True


@always_inline
def _are_counted(control: SharedWord) -> Bool:
    """Waits for the rows of all pairs.

    Args:
        control: The block's control words.

    Returns:
        Whether there are rows to fill.
    """
    while block_peek(control.unsafe_offset(COUNTED)) < N_INDEX_WARPS:
        pass
    return block_peek(control.unsafe_offset(FAILED)) == 0


@always_inline
def receive_tokens[
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
](
    rows: token_fmt_type.Rows,
    tables: RowTables[layout, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    own_tokens: UInt64,
    pair_rows: SharedInts,
    n_tokens_of: SharedInts,
    recv_bufs: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
):
    """Turns tokens into rows as they arrive, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: Whether this rank's tokens come first.
        has_input: Whether its tokens are read from `own_tokens`.

    Args:
        rows: The output tensors.
        tables: Which row is whose.
        src_info: `[n_rows_max][2]`.
        own_tokens: Address of this rank's tokens; read if `has_input`.
        pair_rows: Rows before each pair.
        n_tokens_of: Tokens of each source, and the most.
        recv_bufs: All ranks' recv buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        generation: The generation to receive.
    """
    comptime n_ranks = layout.n_ranks
    comptime top_k = layout.top_k
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime n_steps = ceildiv(n_vectors, WARP_SIZE)
    comptime in_flight = ACCESSES_IN_FLIGHT
    var lane = launch.lane
    var my_rank = launch.my_rank
    var first_expert = my_rank * layout.n_local_experts()
    var recv_buf = bytes_at(recv_bufs[unsafe_offset=my_rank])
    var most = Int(n_tokens_of[unsafe_offset=n_ranks])
    var n_parts = min(N_CHUNKS, n_steps)
    if most <= layout.n_early_tokens():
        n_parts = n_early_parts(most, n_steps)
    var n_items = most * n_ranks * n_parts
    var is_waiting = True
    while True:
        var turn = take_turn(launch.control.unsafe_offset(NEXT_ITEM), lane)
        var item = turn * Int(grid_dim.x) + Int(block_idx.x)
        if item >= n_items:
            return
        var place, part = divmod_32(item, n_parts)
        var token_idx, src_rank = divmod(place, n_ranks)
        var n_tokens = Int(n_tokens_of[unsafe_offset=src_rank])
        if token_idx >= n_tokens:
            continue
        var row = NO_ROW
        var has_row = False
        var pair = 0
        var place_in_pair: Int32 = 0
        var weight: Float32 = 0
        var is_sent_here = False
        var is_late = False
        if lane < top_k:
            var choice = layout.choice(token_idx, lane)
            var entry = _await_words[n_experts, layout.is_reduced()](
                recv_buf.unsafe_offset(layout.entry_offset(src_rank, choice)),
                src_rank,
                generation,
                launch,
                counters,
            )
            is_late = entry[1] != generation
            var words = bitcast[DType.uint64, 2](entry)
            var local_expert = expert_of_entry(words[0]) - first_expert
            var position = position_of_entry(words[0])
            is_sent_here = (
                0 <= local_expert
                and local_expert < layout.n_local_experts()
                and not is_late
            )
            has_row = is_sent_here and position != NO_POSITION
            place_in_pair = Int32(position)
            pair = layout.pair(local_expert, src_rank)
            weight = weight_of_word(words[1])
        if any_lane(is_late):
            counters.set_broken()
            return
        var wanted = warp.vote[DType.uint32](has_row)
        var is_shared = fused_shared_expert and src_rank == my_rank
        var is_here = is_shared or any_lane(is_sent_here)
        comptime if layout.sends_to_all():
            # It came, even if no row is made of it: `EMPTY` is put back.
            if (
                n_tokens <= layout.n_early_tokens()
                and my_rank < layout.n_ranks_with_experts()
                and not (has_input and src_rank == my_rank)
            ):
                is_here = True
        if not is_here:
            comptime if layout.is_reduced():
                if part == 0 and lane < top_k:
                    counters.received_rows(layout, src_rank)[
                        unsafe_offset=layout.choice(token_idx, lane)
                    ] = NO_ROW
            continue
        var is_early = n_tokens <= layout.n_early_tokens()
        var token = recv_buf.unsafe_offset(
            layout.early_token_offset(
                src_rank, token_idx
            ) if is_early else layout.token_offset(src_rank, token_idx)
        )
        var is_input = False
        comptime if has_input:
            if src_rank == my_rank:
                is_input = True
                is_early = False
                token = bytes_at(
                    own_tokens
                    + UInt64(token_idx) * UInt64(token_fmt_type.value_bytes)
                )
        if not is_early and not is_input:
            var word = await_message[n_experts](
                flag_at(
                    recv_buf,
                    layout.chunk_flag_offset(src_rank, token_idx, part),
                ),
                generation,
                RECEIVE,
                src_rank,
                -1,
                launch.deadline,
                counters,
            )
            if any_lane(generation_of(word) != generation):
                counters.set_broken()
                return

        var begin = part * n_steps // n_parts
        var end = (part + 1) * n_steps // n_parts
        for first in range(begin, end, in_flight):
            var parts = Array[LaneBytes, in_flight](fill=0)
            var is_there = _load_steps[n_experts, layout, in_flight, n_vectors](
                parts,
                token,
                is_early,
                first * WARP_SIZE + lane,
                end * WARP_SIZE,
                WARP_SIZE,
                src_rank,
                generation,
                launch,
                counters,
            )
            # Lane `i` has the scales of step `i`.
            var scales = Array[LaneBytes, 1](fill=0)
            comptime if token_fmt_type.has_scales:
                var end_here = min(end, first + in_flight)
                is_there = (
                    _load_steps[n_experts, layout, 1, n_steps](
                        scales,
                        token.unsafe_offset(token_fmt_type.value_bytes),
                        is_early,
                        first + lane,
                        end_here,
                        1,
                        src_rank,
                        generation,
                        launch,
                        counters,
                    )
                    and is_there
                )
            if any_lane(not is_there):
                counters.set_broken()
                return
            # Only now: what has come by then does not wait for the counts.
            if is_waiting:
                if not _are_counted(launch.control):
                    return
                is_waiting = False
            if first == begin:
                if has_row:
                    row = row_of_pair(tables, pair_rows, pair) + place_in_pair
                if part == 0:
                    if has_row:
                        src_info[unsafe_offset=2 * Int(row)] = Int32(token_idx)
                        src_info[unsafe_offset=2 * Int(row) + 1] = Int32(lane)
                    comptime if layout.is_reduced():
                        if lane < top_k:
                            var choice = layout.choice(token_idx, lane)
                            counters.received_rows(layout, src_rank)[
                                unsafe_offset=choice
                            ] = row
                            counters.received_weights(layout, src_rank)[
                                unsafe_offset=choice
                            ] = weight
                    comptime if token_fmt_type.n_carried > 0:
                        # Of its choices, which are ranks, this rank's alone has
                        # a row here.
                        var k = count_trailing_zeros(wanted)
                        if wanted != 0 and not _place_carried[
                            n_experts, layout, token_fmt_type
                        ](
                            rows,
                            Int(warp.shuffle_idx(row, k)),
                            recv_buf,
                            src_rank,
                            token_idx,
                            generation,
                            launch,
                            counters,
                        ):
                            counters.set_broken()
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
                    var vector = (first + i) * WARP_SIZE + lane
                    if first + i < end and vector < n_vectors:
                        store16(
                            to.unsafe_offset(vector * MESSAGE_ALIGN), parts[i]
                        )
                comptime if token_fmt_type.has_scales:
                    if lane < in_flight and first + lane < end:
                        token_fmt_type.place_scales(
                            rows, to_row, first + lane, scales[0]
                        )
