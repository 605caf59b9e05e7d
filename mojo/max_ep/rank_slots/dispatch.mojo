# SPDX-License-Identifier: Apache-2.0
"""Dispatch of `rank_slots` for GPU ranks.

Each token goes once to each rank that has an expert of it; with `gather`, to each
that has experts at all, maybe by a launch of its own, before the router has
decided (`send_tokens_kernel`). An entry for each
choice goes to every rank, and tells by itself of which generation it is, as do
counts and numbers of tokens: none of them waits for another store. Rows and
tables are those of `expert_slots`, bit for bit.

How a token announces itself depends on how many its source sends:

* *early* (at most `MAX_EARLY_TOKENS`): every 16 bytes are their own flag. The
  receiver puts `EMPTY` back.
* more: each of `N_CHUNKS` parts has a flag, published after it.

Who does what in a block is in `dispatch_roles.mojo`; entries and counts are
written by `index.mojo` and read by `row_counts.mojo`.

After the sending half: every rank gets entries, counts and tokens. After the
receiving half: rows stand as those of `expert_slots`; sources hear of it from
the next launch (`publish_earlier_reads`), or from the end of this one if ranks
share a GPU.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    syncwarp,
    thread_idx,
)
from std.bit import count_trailing_zeros, pop_count
from std.math import ceildiv
from std.memory import bitcast
from std.utils import StaticTuple

from ..counters import (
    EPLocalSyncCounters,
    NO_ROW,
    TOKENS_SENT,
)
from ..expert_slots.device_steps import (
    ACCESSES_IN_FLIGHT,
    SharedAddresses,
    SharedInts,
    any_lane,
    await_message,
    bytes_at,
    is_last_block,
    load16,
    share_addresses,
    shared_ints,
    shuffle_address,
    store16,
    take_turn,
)
from ..expert_slots.dispatch import (
    dispatch_layout_of,
    encode_steps,
    steps_in_flight,
    write_no_rows,
)
from ..expert_slots.host_steps import flag_at
from ..failures import (
    NO_MESSAGE,
    OTHER_TOKENS,
    note_failure,
)
from ..flags import (
    FlagPointer,
    SPINS_BETWEEN_LOOKS,
    SharedWord,
    arrive,
    block_add,
    block_peek,
    block_publish,
    flag_word,
    generation_of,
    leave_word,
    look_at,
    next_generation,
    peek_16,
    peek_number,
    publish,
    put_16,
)
from ..layout import (
    MESSAGE_ALIGN,
    N_CHUNKS,
    RegionLayout,
)
from ..row_tables import RowTables
from ..token_format import (
    BytePointer,
    LaneBytes,
    TokenFormat,
)
from .deal import (
    Deal,
    n_async_send_warps,
    n_early_parts,
    n_send_warps,
    parts_at_once_shift,
)
from .device_steps import (
    EMPTY,
    Launch,
    await_launch_before,
    await_readers,
    divmod_32,
    header_word,
    is_last_to_start,
    note_readers,
    publish_earlier_reads,
    publish_reads,
    start_launch,
    without_empty,
)
from .dispatch_roles import (
    COUNTED,
    COUNTING_WARP,
    FAILED,
    FIRST_SENDER,
    INDEXED,
    NEXT_ITEM,
    NEXT_TURN,
    NO_NUMBERS,
    NUMBERS_WARP,
    N_CONTROL,
    N_INDEX_WARPS,
    N_WARPS_MIN,
    RECEIVE,
    SEND,
    TELLING_WARP,
    TOKENS_READY,
)
from .entries import (
    NO_POSITION,
    expert_of_entry,
    id_of_word,
    position_of_entry,
    weight_of_word,
)
from .index import (
    Choices,
    index_choices,
    send_carried,
    share_choices,
    tell_n_tokens,
)
from .row_counts import (
    lay_out_rows,
    read_numbers,
    row_of_pair,
)


# ------------------------------------------------------------ the sending half

comptime _ENTRIES_FIRST = 64
"""Tokens up to which a block sends none before its entries."""


@always_inline
def _store_steps[
    token_fmt_type: TokenFormat, is_early: Bool
](
    to: UInt64,
    first: Int,
    end: Int,
    values: Array[LaneBytes, steps_in_flight[token_fmt_type]()],
    scales: Array[LaneBytes, steps_in_flight[token_fmt_type]()],
    lane: Int,
):
    """Writes some steps of an encoded token, with one warp.

    Parameters:
        token_fmt_type: Wire format of a token.
        is_early: Whether the data is its own flag.

    Args:
        to: Address of the token.
        first: First step.
        end: Behind the last.
        values: From `encode_steps`.
        scales: From `encode_steps`.
        lane: This lane.
    """
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime for i in range(steps_in_flight[token_fmt_type]()):
        var step = first + i
        var vector = step * WARP_SIZE + lane
        if step < end and vector < n_vectors:
            var p = bytes_at(to).unsafe_offset(vector * MESSAGE_ALIGN)
            comptime if is_early:
                put_16(p, without_empty(values[i]))
            else:
                store16(p, values[i])
            comptime if token_fmt_type.has_scales:
                if lane == 0:
                    p = bytes_at(to).unsafe_offset(
                        token_fmt_type.value_bytes + step * MESSAGE_ALIGN
                    )
                    comptime if is_early:
                        put_16(p, without_empty(scales[i]))
                    else:
                        store16(p, scales[i])


@fieldwise_init
struct _Part(TrivialRegisterPassable):
    """A part of a token, and who gets it, as a lane of its warp knows it."""

    var token_idx: Int
    var part: Int
    var dst_rank: Int32
    """Of choice `lane`: its rank, or -1."""
    var is_target: Bool
    """Whether this lane is the first of those with its rank, a peer."""
    var targets: UInt32
    """Which lanes are."""
    var is_own: Bool
    """Whether this rank gets it through its own region."""

    @staticmethod
    @always_inline
    def of[
        n_experts: Int,
        layout: RegionLayout,
        fused_shared_expert: Bool,
        has_input: Bool,
        to_peers: Bool,
    ](
        unit: Int, n_parts: Int, choices: Choices[...], my_rank: Int, lane: Int
    ) -> Self:
        """Finds out who gets a part; all lanes call it.

        Parameters:
            n_experts: Experts of the group.
            layout: How the regions are cut.
            fused_shared_expert: As for `_send_tokens`.
            has_input: Likewise.
            to_peers: Likewise.

        Args:
            unit: Which part of all parts of all tokens.
            n_parts: Parts of a token.
            choices: Ids and weights; not read with `gather`.
            my_rank: This rank.
            lane: This lane.

        Returns:
            The part.
        """
        comptime top_k = layout.top_k
        var token_idx, part = divmod_32(unit, n_parts)
        var dst_rank: Int32 = -1
        comptime if layout.sends_to_all():
            # Not all sources begin with the same rank.
            comptime n = layout.n_ranks_with_experts()
            comptime assert n <= WARP_SIZE, "a lane stands for a rank"
            if lane < n:
                dst_rank = Int32(UInt32(my_rank + 1 + lane) % UInt32(n))
        else:
            if lane < top_k:
                var id = choices.id(token_idx * top_k + lane)
                if id >= 0 and id < Int32(n_experts):
                    dst_rank = id // Int32(layout.n_local_experts())
        var is_target = (
            to_peers and dst_rank >= 0 and dst_rank != Int32(my_rank)
        )
        comptime if not layout.sends_to_all():
            comptime for k in range(top_k):
                var earlier = warp.shuffle_idx(dst_rank, UInt32(k))
                if k < lane and earlier == dst_rank:
                    is_target = False
        var is_own = False
        comptime if not has_input:
            is_own = fused_shared_expert or any_lane(dst_rank == Int32(my_rank))
        return Self(
            token_idx,
            part,
            dst_rank,
            is_target,
            warp.vote[DType.uint32](is_target),
            is_own,
        )

    @always_inline
    def has_receivers(self) -> Bool:
        """Tells whether it is sent at all.

        Returns:
            Whether; the same in all lanes.
        """
        return self.targets != 0 or self.is_own

    @always_inline
    def begin(self, n_parts: Int, n_steps: Int) -> Int:
        """Says where it begins.

        Args:
            n_parts: Parts of a token.
            n_steps: Steps of a token.

        Returns:
            Its first step.
        """
        return divmod_32(self.part * n_steps, n_parts)[0]

    @always_inline
    def end(self, n_parts: Int, n_steps: Int) -> Int:
        """Says where it ends.

        Args:
            n_parts: Parts of a token.
            n_steps: Steps of a token.

        Returns:
            Behind its last step.
        """
        return divmod_32((self.part + 1) * n_steps, n_parts)[0]


@always_inline
def _load_elements[
    input_type: DType,
    n_elements: Int,
    in_flight: Int,
    //,
    token_fmt_type: TokenFormat,
](
    mut elements: Array[SIMD[input_type, n_elements], in_flight],
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    token_idx: Int,
    first: Int,
    end: Int,
    lane: Int,
):
    """Loads some steps of a token, with one warp.

    Parameters:
        input_type: Element type of the tokens.
        n_elements: Elements of a lane in one step.
        in_flight: Steps at most.
        token_fmt_type: Wire format of a token.

    Args:
        elements: Result; what is behind the last step stays.
        tokens: `[n_tokens][hidden_size]`.
        token_idx: Which token.
        first: First step.
        end: Behind the last of the part.
        lane: This lane.
    """
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime for i in range(in_flight):
        var vector = (first + i) * WARP_SIZE + lane
        if first + i < end and vector < n_vectors:
            # Not as constants: when this block began, the kernel that wrote the
            # tokens may not have ended (PDL).
            elements[i] = tokens.unsafe_load[
                width=n_elements, alignment=MESSAGE_ALIGN, invariant=False
            ](token_idx * token_fmt_type.hidden_size + vector * n_elements)


@always_inline
def _send_tokens[
    input_type: DType,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
    to_peers: Bool,
    waits_for_index: Bool,
    is_early: Bool,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    sender: Int,
    n_senders: Int,
):
    """Sends this block's share of the tokens with one of its sending warps.

    Parameters:
        input_type: Element type of the tokens.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: Whether this rank receives all of its tokens.
        has_input: Whether this rank reads its own tokens from `tokens`, so that
            none is sent to it.
        to_peers: Whether peers get them, or this rank alone.
        waits_for_index: Whether index warps of this block go first, up to
            `_ENTRIES_FIRST` tokens.
        is_early: Whether the data is its own flag.

    Args:
        tokens: `[n_tokens][hidden_size]`.
        choices: Ids and weights.
        n_tokens: Tokens to send.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        sender: This warp among those that send.
        n_senders: How many do.
    """
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime n_steps = ceildiv(n_vectors, WARP_SIZE)
    comptime in_flight = steps_in_flight[token_fmt_type]()
    comptime Elements = SIMD[input_type, token_fmt_type.lane_elements]
    var lane = launch.lane
    var my_rank = launch.my_rank
    var generation = next_generation(launch.before.dispatch_sent)
    var n_blocks = Int(grid_dim.x)
    var n_parts = min(N_CHUNKS, n_steps)
    comptime if is_early:
        n_parts = n_early_parts(n_tokens, n_steps)
    var n_all = n_tokens * n_parts
    # Of tokens with flags; early ones have shares.
    var deal = Deal.of(
        n_all,
        parts_at_once_shift[layout, n_steps](n_tokens, n_senders),
        n_senders,
        Int(block_idx.x),
        n_blocks,
    )
    var first_part = Int(block_idx.x) + sender * n_blocks
    var shift = 0
    comptime if not is_early:
        first_part, shift = deal.unit(sender)
    if first_part >= n_all:
        return
    # Parts that are sent at once are one, from here on.
    var n_units = n_parts >> shift
    var sent = _Part.of[
        n_experts, layout, fused_shared_expert, has_input, to_peers
    ](first_part >> shift, n_units, choices, my_rank, lane)
    var elements = Array[Elements, in_flight](fill=0)
    if sent.has_receivers():
        _load_elements[token_fmt_type](
            elements,
            tokens,
            sent.token_idx,
            sent.begin(n_units, n_steps),
            sent.end(n_units, n_steps),
            lane,
        )
    var is_loaded = True
    # I3, for tokens.
    if not await_readers[layout, False](launch, counts, counters, SEND):
        return
    comptime if is_early and waits_for_index:
        # Entries first: receivers need them all. Many tokens take longer than
        # they do, so the link starts at once.
        if n_tokens <= _ENTRIES_FIRST:
            while (
                block_peek(launch.control.unsafe_offset(INDEXED))
                < N_INDEX_WARPS
            ):
                pass
    while True:
        # I1: only this rank writes the tokens of its number.
        var offset = UInt64(layout.token_offset(my_rank, sent.token_idx))
        comptime if is_early:
            offset = UInt64(layout.early_token_offset(my_rank, sent.token_idx))
        var address: UInt64 = 0
        if sent.is_target:
            address = recv_bufs[unsafe_offset=Int(sent.dst_rank)] + offset
        var begin = sent.begin(n_units, n_steps)
        var end = sent.end(n_units, n_steps)
        if not sent.has_receivers():
            end = begin
        for first in range(begin, end, in_flight):
            if first != begin or not is_loaded:
                _load_elements[token_fmt_type](
                    elements, tokens, sent.token_idx, first, end, lane
                )
            var values = Array[LaneBytes, in_flight](fill=0)
            var scales = Array[LaneBytes, in_flight](fill=0)
            encode_steps[input_type, token_fmt_type, False](
                elements, values, scales, 1, lane
            )
            var rest = sent.targets
            while rest != 0:
                var k = Int(count_trailing_zeros(rest))
                rest &= rest - 1
                _store_steps[token_fmt_type, is_early](
                    shuffle_address(address, k),
                    first,
                    end,
                    values,
                    scales,
                    lane,
                )
            if sent.is_own:
                _store_steps[token_fmt_type, is_early](
                    recv_bufs[unsafe_offset=my_rank] + offset,
                    first,
                    end,
                    values,
                    scales,
                    lane,
                )
        comptime if not is_early:
            syncwarp()
            # I2: a part's flag is published after all of the part. A lane for
            # each flag: a publish waits until all has arrived, for a warp once.
            var n_receivers = Int(pop_count(sent.targets)) + Int(sent.is_own)
            for first in range(0, n_receivers << shift, WARP_SIZE):
                var mine = (first + lane) >> shift
                var dst_rank = -1
                var receiver = 0
                var rest = sent.targets
                while rest != 0:
                    var k = count_trailing_zeros(rest)
                    rest &= rest - 1
                    var rank = warp.shuffle_idx(sent.dst_rank, k)
                    if mine == receiver:
                        dst_rank = Int(rank)
                    receiver += 1
                if sent.is_own and mine == receiver:
                    dst_rank = my_rank
                if dst_rank >= 0:
                    var part = (sent.part << shift) + (
                        lane & ((1 << shift) - 1)
                    )
                    publish(
                        flag_at(
                            bytes_at(recv_bufs[unsafe_offset=dst_rank]),
                            layout.chunk_flag_offset(
                                my_rank, sent.token_idx, part
                            ),
                        ),
                        generation,
                        0,
                    )
        comptime if is_early:
            # Few: a turn is one more trip to shared memory.
            first_part += n_senders * n_blocks
        else:
            var turn = take_turn(launch.control.unsafe_offset(NEXT_TURN), lane)
            first_part, shift = deal.unit(n_senders + turn)
        if first_part >= n_all:
            return
        n_units = n_parts >> shift
        sent = _Part.of[
            n_experts, layout, fused_shared_expert, has_input, to_peers
        ](first_part >> shift, n_units, choices, my_rank, lane)
        is_loaded = False


@always_inline
def _send_by_number[
    input_type: DType,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
    to_peers: Bool,
    waits_for_index: Bool,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    sender: Int,
    n_senders: Int,
):
    """Sends tokens as their number says, early or with flags, with one warp.

    Parameters:
        input_type: Element type of the tokens.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: As for `_send_tokens`.
        has_input: Likewise.
        to_peers: Likewise.
        waits_for_index: Likewise.

    Args:
        tokens: As for `_send_tokens`.
        choices: Likewise.
        n_tokens: Likewise.
        recv_bufs: Likewise.
        counts: Likewise.
        launch: Likewise.
        counters: Likewise.
        sender: Likewise.
        n_senders: Likewise.
    """
    if n_tokens <= layout.n_early_tokens():
        _send_tokens[
            input_type,
            n_experts,
            layout,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            to_peers,
            waits_for_index,
            True,
        ](
            tokens,
            choices,
            n_tokens,
            recv_bufs,
            counts,
            launch,
            counters,
            sender,
            n_senders,
        )
        return
    comptime if layout.max_tokens_per_rank > layout.n_early_tokens():
        _send_tokens[
            input_type,
            n_experts,
            layout,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            to_peers,
            waits_for_index,
            False,
        ](
            tokens,
            choices,
            n_tokens,
            recv_bufs,
            counts,
            launch,
            counters,
            sender,
            n_senders,
        )


@always_inline
def _send[
    input_type: DType,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
    tokens_are_sent: Bool,
    n_warps: Int,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    n_senders: Int,
):
    """Deals the sending half to the warps of a block.

    Parameters:
        input_type: Element type of the tokens.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: Whether this rank receives all of its tokens.
        has_input: Whether this rank reads its own tokens from `tokens`.
        tokens_are_sent: Whether peers have them from `send_tokens_kernel`.
        n_warps: Warps of a block.

    Args:
        tokens: `[n_tokens][hidden_size]`.
        choices: Ids and weights.
        n_tokens: Tokens to send.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        n_senders: Warps that send.
    """
    var indexer = launch.warp_idx - (n_warps - N_INDEX_WARPS)
    if indexer >= 0:
        index_choices[n_experts, layout](
            choices, recv_bufs, counts, launch, counters, indexer
        )
        # Also if it has failed: senders of the block wait for it without end.
        syncwarp()
        if launch.lane == 0:
            _ = block_add(launch.control.unsafe_offset(INDEXED), 1)
        comptime if token_fmt_type.n_carried > 0:
            send_carried[layout, token_fmt_type.n_carried](
                choices, n_tokens, recv_bufs, counts, launch, counters, indexer
            )
    elif launch.warp_idx == NUMBERS_WARP:
        if block_idx.x == 0:
            tell_n_tokens[layout](n_tokens, counts, launch, counters)
        return
    var sender = launch.warp_idx - FIRST_SENDER
    if sender >= n_senders:
        return
    comptime if not (tokens_are_sent and has_input):
        _send_by_number[
            input_type,
            n_experts,
            layout,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            not tokens_are_sent,
            True,
        ](
            tokens,
            choices,
            n_tokens,
            recv_bufs,
            counts,
            launch,
            counters,
            sender,
            n_senders,
        )


# ---------------------------------------------------------- the receiving half


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
def _receive_tokens[
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


@always_inline
def _receive[
    num_threads: Int,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    has_input: Bool,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int,
    tables: RowTables[layout, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    own_tokens: UInt64,
    n_own_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Has a warp of a block take its part in the receiving half.

    Parameters:
        num_threads: Threads of a block.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        has_input: Whether own tokens are read from `own_tokens`.

    Args:
        rows: The output tensors.
        n_rows_max: Rows they hold.
        tables: Which row is whose.
        src_info: `[n_rows_max][2]`.
        own_tokens: Address of this rank's tokens; read if `has_input`.
        n_own_tokens: How many they are; read with a fused shared expert.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    comptime n_warps = num_threads // WARP_SIZE
    comptime n_pairs = layout.n_local_experts() * layout.n_ranks
    comptime fused_shared_expert = tables.fused_shared_expert
    var pair_rows = shared_ints[n_pairs]()
    var sums = shared_ints[N_INDEX_WARPS]()
    var n_tokens_of = shared_ints[layout.n_ranks + 1]()
    var control = launch.control
    var generation = next_generation(launch.before.dispatch_received)
    var counter = launch.warp_idx - (n_warps - N_INDEX_WARPS)
    if counter >= 0:
        lay_out_rows[n_experts, layout](
            pair_rows,
            sums,
            tables,
            n_own_tokens if fused_shared_expert else 0,
            n_rows_max,
            counts,
            launch,
            counters,
            generation,
            counter,
        )
    elif launch.warp_idx == NUMBERS_WARP:
        var are_there = read_numbers[n_experts, layout](
            n_tokens_of, counts, launch, counters, generation
        )
        if not are_there:
            counters.set_broken()
        syncwarp()
        if launch.lane == 0:
            block_publish(
                control.unsafe_offset(TOKENS_READY),
                1 if are_there else NO_NUMBERS,
            )
        comptime if token_fmt_type.n_carried > 0:
            # Each rank gets every token.
            var n_rows = 0
            if are_there:
                for src_rank in range(layout.n_ranks):
                    n_rows += Int(n_tokens_of[unsafe_offset=src_rank])
            token_fmt_type.end_choices(
                rows,
                n_rows,
                n_rows_max,
                Int(block_idx.x) * WARP_SIZE + launch.lane,
                Int(grid_dim.x) * WARP_SIZE,
            )
    while block_peek(control.unsafe_offset(TOKENS_READY)) == 0:
        pass
    if block_peek(control.unsafe_offset(TOKENS_READY)) == NO_NUMBERS:
        return
    _receive_tokens[
        n_experts, layout, token_fmt_type, fused_shared_expert, has_input
    ](
        rows,
        tables,
        src_info,
        own_tokens,
        pair_rows,
        n_tokens_of,
        recv_bufs,
        launch,
        counters,
        generation,
    )


# ------------------------------------------------------------------ the kernels


@always_inline
def _tell_dispatch(n_tokens: Int, counters: EPLocalSyncCounters):
    """Tells the dispatch that all blocks of `send_tokens` have read the header.

    One thread of each block calls it, once.

    Args:
        n_tokens: Tokens that are sent.
        counters: This rank's local words.
    """
    var word = counters.tokens_sent_on_gpu()
    if arrive(word) == Int(grid_dim.x) - 1:
        leave_word(word, TOKENS_SENT + Int32(n_tokens))


@always_inline
def _await_send_tokens[
    n_experts: Int, //
](n_tokens: Int, launch: Launch, counters: EPLocalSyncCounters[n_experts]):
    """Waits until all blocks of `send_tokens` have begun, with one thread.

    They read the generations that this thread is about to move. Dispatch leaves
    them the multiprocessors they need (`gpu_launch.mojo`), so they do begin.

    Args:
        n_tokens: Tokens of this dispatch.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    var word = counters.tokens_sent_on_gpu()
    var found = look_at(word)
    var spins = 0
    while found < TOKENS_SENT:
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            break
        found = look_at(word)
    if found != TOKENS_SENT + Int32(n_tokens):
        note_failure(
            counters.failure(),
            OTHER_TOKENS,
            SEND,
            launch.my_rank,
            -1,
            next_generation(launch.before.dispatch_sent),
            0,
            n_tokens,
            Int(found - TOKENS_SENT) if found >= TOKENS_SENT else -1,
        )
        counters.set_broken()
    word[] = 0


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def send_tokens_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends each token to all peers, before the router has decided.

    Moves no generation: the dispatch after it, with `tokens_are_sent`, does, and
    sends all else. Both may run at once, on different multiprocessors.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: `GATHER` or `GATHER_REDUCED`.

    Args:
        input_tokens: As in `dispatch_async_kernel`.
        n_tokens: Likewise.
        recv_buf_ptrs: Likewise.
        recv_count_ptrs: Likewise.
        ep_counters: Likewise.

    Safety:
        As for `dispatch_async_kernel`.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime assert (
        layout.sends_to_all()
    ), "which ranks get a token is not known"
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    comptime n_warps = num_threads // WARP_SIZE
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var launch = start_launch[layout, N_CONTROL](word, ep_counters, SEND)
    if not launch.can_go:
        return
    if launch.warp_idx == COUNTING_WARP and launch.lane == 0:
        _tell_dispatch(Int(n_tokens), ep_counters)
    # Peers that send early, too, wait for this.
    publish_earlier_reads[layout](launch, counts, TELLING_WARP)
    _send_by_number[
        input_type,
        n_experts,
        layout,
        token_fmt_type,
        False,
        True,
        True,
        False,
    ](
        input_tokens,
        Choices[].none(),
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
        launch.warp_idx,
        n_warps,
    )
    # AFTER: the tokens are on their way; nobody looks for them yet.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_async_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    fused_shared_expert: Bool = False,
    tokens_are_sent: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends each token to its ranks; returns without waiting for receivers.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: Any but `EXPERT_SLOTS`.
        fused_shared_expert: Whether this rank receives all of its tokens.
        tokens_are_sent: Whether peers have them from `send_tokens_kernel`.

    Args:
        input_tokens: `[n_tokens][hidden_size]`, rows aligned to 16 bytes.
        topk_ids: `[n_tokens][top_k]`, in `[-1, n_experts)`; `-1`: no expert.
        router_weights: `[n_tokens][top_k]`; read by a reduced protocol.
        n_tokens: In `[0, max_tokens_per_rank]`.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var choices = share_choices[
        num_threads, layout, n_ranks if token_fmt_type.n_carried > 0 else 0
    ](topk_ids, router_weights, Int(n_tokens))
    var launch = start_launch[layout, N_CONTROL](word, ep_counters, SEND)
    if not launch.can_go:
        return
    if is_last_to_start(launch, ep_counters, COUNTING_WARP):
        comptime if tokens_are_sent:
            _await_send_tokens(Int(n_tokens), launch, ep_counters)
        var generation = next_generation(launch.before.dispatch_sent)
        ep_counters.set_n_tokens(generation, Int(n_tokens))
        ep_counters.set_dispatch_sent(generation)
    publish_earlier_reads[layout](launch, counts, TELLING_WARP)
    _send[
        input_type,
        n_experts,
        layout,
        token_fmt_type,
        fused_shared_expert,
        False,
        tokens_are_sent,
        n_warps,
    ](
        input_tokens,
        choices,
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
        n_async_send_warps[layout](
            Int(n_tokens) <= layout.n_early_tokens(), n_warps
        ),
    )
    # AFTER: this generation's entries, counts and tokens are on their way.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_wait_kernel[
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_layout_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Turns the tokens into rows sorted by expert, as they arrive.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: Any but `EXPERT_SLOTS`.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.
        shares_gpu: Whether other ranks may run on this rank's GPU. If so, this
            launch tells at its end what it has read: the next launch of this
            rank, which would tell otherwise, may be queued behind theirs.

    Args:
        rows: The output tensors, `n_rows_max` rows.
        n_rows_max: Rows there is room for.
        tables: The output tensors that say which row is whose.
        src_info: `[n_rows_max][2]`: token on its source rank, k; for the shared
            expert token, -1.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var launch = start_launch[layout, N_CONTROL](word, ep_counters, RECEIVE)
    if not launch.can_go:
        if block_idx.x == 0:
            write_no_rows(tables, Int(thread_idx.x), num_threads)
            token_fmt_type.end_choices(
                rows, 0, Int(n_rows_max), Int(thread_idx.x), num_threads
            )
        return
    # Un-reduced, the next launch is a combine that tells nobody.
    comptime tells_at_end = shares_gpu or not layout.is_reduced()
    var generation = next_generation(launch.before.dispatch_received)
    comptime if not tells_at_end:
        if is_last_to_start(launch, ep_counters, COUNTING_WARP):
            ep_counters.set_dispatch_received(generation)
        if block_idx.x == 0 and launch.warp_idx == TELLING_WARP:
            note_readers[layout, True](launch, counts, ep_counters)
    _receive[num_threads, n_experts, layout, token_fmt_type, False](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        0,
        launch.before.n_tokens(generation),
        recv_bufs,
        counts,
        launch,
        ep_counters,
    )
    comptime if tells_at_end:
        if not is_last_block(ep_counters):
            return
        if launch.lane == 0:
            ep_counters.set_dispatch_received(generation)
        publish_reads[layout](
            launch, counts, generation, launch.before.combine_received
        )
    # AFTER: rows are complete; every source may overwrite its tokens here, once
    # it is told.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
    tokens_are_sent: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_layout_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends and receives in one launch; all ranks must run at the same time.

    Launch: a grid whose blocks are all resident at once,
    `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: Any but `EXPERT_SLOTS`.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.
        tokens_are_sent: Whether peers have them from `send_tokens_kernel`.

    Args:
        input_tokens: As in `dispatch_async_kernel`.
        topk_ids: Likewise.
        router_weights: Likewise.
        n_tokens: Likewise.
        rows: As in `dispatch_wait_kernel`.
        n_rows_max: Likewise.
        tables: Likewise.
        src_info: Likewise.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime has_input = token_fmt_type.is_identity[input_type]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var choices = share_choices[
        num_threads, layout, n_ranks if token_fmt_type.n_carried > 0 else 0
    ](topk_ids, router_weights, Int(n_tokens))
    var launch = start_launch[layout, N_CONTROL](word, ep_counters, SEND)
    if not launch.can_go:
        if block_idx.x == 0:
            write_no_rows(tables, Int(thread_idx.x), num_threads)
            token_fmt_type.end_choices(
                rows, 0, Int(n_rows_max), Int(thread_idx.x), num_threads
            )
        return
    if is_last_to_start(launch, ep_counters, COUNTING_WARP):
        comptime if tokens_are_sent:
            _await_send_tokens(Int(n_tokens), launch, ep_counters)
        var generation = next_generation(launch.before.dispatch_sent)
        ep_counters.set_n_tokens(generation, Int(n_tokens))
        ep_counters.set_dispatch_sent(generation)
        ep_counters.set_dispatch_received(
            next_generation(launch.before.dispatch_received)
        )
    publish_earlier_reads[layout](launch, counts, TELLING_WARP)
    _send[
        input_type,
        n_experts,
        layout,
        token_fmt_type,
        fused_shared_expert,
        has_input,
        tokens_are_sent,
        n_warps,
    ](
        input_tokens,
        choices,
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
        n_send_warps(Int(n_tokens) <= layout.n_early_tokens(), n_warps),
    )
    comptime if layout.is_reduced():
        if block_idx.x == 0 and launch.warp_idx == TELLING_WARP:
            note_readers[layout, True](launch, counts, ep_counters)
    _receive[num_threads, n_experts, layout, token_fmt_type, has_input](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        UInt64(Int(input_tokens)),
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
    )
    # AFTER: rows are complete; the next launch of this rank says so.
