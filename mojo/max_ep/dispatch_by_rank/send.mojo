# SPDX-License-Identifier: Apache-2.0
"""How a warp of dispatch sends tokens: which parts, to whom, with or without flags.

A part is encoded once and written to every rank that gets its token, then the next
one's turn comes (`deal.mojo`). Who gets it is read off the choices; entries, counts
and the number of tokens are written by other warps (`index.mojo`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, lane_id, syncwarp, WARP_SIZE
from std.bit import count_trailing_zeros, pop_count

from ..counters import LaunchHeader, NO_EXPERT
from ..device.block import Block, next_work
from ..device.encode import encode_steps, steps_in_flight
from ..device.schedule import (
    Chunk,
    inline_split,
    InlineSplit,
    n_steps_of,
    vector_of_lane,
)
from ..device.warp import (
    any_lane,
    avoid_sentinel,
    bytes_at,
    divmod_32,
    lanes_like,
    shuffle_address,
    store16,
)
from ..flags import flag_at, next_generation, publish, store_relaxed_sys_16
from ..layout import Group, MESSAGE_ALIGN, N_CHUNKS
from ..token_format import LaneBytes, TokenFormat
from .index import Choices
from .roles import chunks_at_once_shift, NEXT_SEND, SEND


@always_inline
def _inline_in_flight[token_fmt_type: TokenFormat]() -> Int:
    """Counts the steps of an early token that a lane has under way."""
    comptime n_steps = n_steps_of[token_fmt_type]()
    return min(
        InlineSplit[n_steps].most_steps, steps_in_flight[token_fmt_type]()
    )


comptime InlineElements[input_type: DType, token_fmt_type: TokenFormat] = Array[
    SIMD[input_type, token_fmt_type.lane_elements],
    _inline_in_flight[token_fmt_type](),
]
"""What a lane has of some steps of an early token, as it is given.

Parameters:
    input_type: Element type of the tokens.
    token_fmt_type: Wire format of a token.
"""


@always_inline
def _store_steps[
    in_flight: Int, //, token_fmt_type: TokenFormat, is_inline: Bool
](
    to: UInt64,
    first: Int,
    end: Int,
    values: Array[LaneBytes, in_flight],
    scales: Array[LaneBytes, in_flight],
    lane: Int,
):
    """Writes some steps of an encoded token, with one warp."""
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime for i in range(in_flight):
        var step = first + i
        var vector, is_in_chunk = vector_of_lane[n_vectors](step, end, lane)
        if is_in_chunk:
            var p = bytes_at(to).unsafe_offset(vector * MESSAGE_ALIGN)
            comptime if is_inline:
                store_relaxed_sys_16(p, avoid_sentinel(values[i]))
            else:
                store16(p, values[i])
            comptime if token_fmt_type.has_scales:
                if lane == 0:
                    p = bytes_at(to).unsafe_offset(
                        token_fmt_type.value_bytes + step * MESSAGE_ALIGN
                    )
                    comptime if is_inline:
                        store_relaxed_sys_16(p, avoid_sentinel(scales[i]))
                    else:
                        store16(p, scales[i])


@fieldwise_init
struct Receivers(TrivialRegisterPassable):
    """Who gets a token, as a lane of a warp knows it."""

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
        group: Group,
        fused_shared_expert: Bool,
        has_input: Bool,
    ](id: Int32, my_rank: Int, lane: Int) -> Self:
        """Finds out who gets a token; all lanes call it."""
        var dst_rank: Int32 = -1
        comptime if group.sends_to_all():
            # Not all sources begin with the same rank.
            comptime n = group.n_ranks_with_experts()
            comptime assert n <= WARP_SIZE, "a lane stands for a rank"
            if lane < n:
                dst_rank = Int32(UInt32(my_rank + 1 + lane) % UInt32(n))
        else:
            if lane < group.top_k and id >= 0 and id < Int32(group.n_experts):
                dst_rank = id // Int32(group.n_local_experts())
        var is_target = dst_rank >= 0 and dst_rank != Int32(my_rank)
        comptime if not group.sends_to_all():
            var first = count_trailing_zeros(lanes_like(dst_rank))
            is_target = is_target and Int(first) == lane
        var is_own = False
        comptime if not has_input:
            is_own = fused_shared_expert or any_lane(dst_rank == Int32(my_rank))
        return Self(
            dst_rank, is_target, warp.vote[DType.uint32](is_target), is_own
        )

    @always_inline
    def are_any(self) -> Bool:
        """Tells whether the token is sent at all."""
        return self.targets != 0 or self.is_own


@always_inline
def _load_elements[
    input_type: DType, in_flight: Int, //, token_fmt_type: TokenFormat
](
    mut elements: Array[
        SIMD[input_type, token_fmt_type.lane_elements], in_flight
    ],
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    token_idx: Int,
    first: Int,
    end: Int,
    lane: Int,
):
    """Loads some steps of a token, with one warp."""
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime n_elements = token_fmt_type.lane_elements
    comptime for i in range(in_flight):
        var vector, is_in_chunk = vector_of_lane[n_vectors](
            first + i, end, lane
        )
        if is_in_chunk:
            # Not as constants: when this block began, the kernel that wrote the
            # tokens may not have ended (PDL).
            elements[i] = tokens.unsafe_load[
                width=n_elements, alignment=MESSAGE_ALIGN, invariant=False
            ](token_idx * token_fmt_type.hidden_size + vector * n_elements)


@fieldwise_init
struct FirstChunk(TrivialRegisterPassable):
    """The first part of an early token that a warp sends.

    Which part it is depends on the arguments alone, so it is found before the launch
    before has ended. After that its elements and ids are loaded, beside the header;
    who gets it is known once both are there.
    """

    var number: Int
    """Which of all parts; there may be none for this warp."""
    var chunk: Chunk
    """The part."""
    var is_sent: Bool
    """Whether this warp sends it."""

    @staticmethod
    @always_inline
    def of[
        group: Group, token_fmt_type: TokenFormat
    ](n_tokens: Int, sender: Int, n_senders: Int) -> Self:
        """Finds it; this reads nothing."""
        var number = Int(block_idx.x) + sender * Int(grid_dim.x)
        var cut = inline_split[n_steps_of[token_fmt_type]()](n_tokens)
        return Self(
            number,
            cut.chunk(number),
            0 <= sender
            and sender < n_senders
            and n_tokens <= group.n_inline_tokens()
            and number < n_tokens * cut.n_chunks(),
        )

    @always_inline
    def load[
        input_type: DType, //, group: Group, token_fmt_type: TokenFormat
    ](
        self,
        mut elements: InlineElements[input_type, token_fmt_type],
        tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
        choices: Choices[...],
    ) -> Int32:
        """Begins to load it."""
        var id = NO_EXPERT
        if self.is_sent:
            var lane = Int(lane_id())
            _load_elements[token_fmt_type](
                elements,
                tokens,
                self.chunk.whole,
                self.chunk.begin,
                self.chunk.end,
                lane,
            )
            comptime if not group.sends_to_all():
                if lane < group.top_k:
                    id = choices.id_in_memory(
                        group.choice(self.chunk.whole, lane)
                    )
        return id

    @always_inline
    def receivers[
        group: Group,
        fused_shared_expert: Bool,
        has_input: Bool,
    ](self, id: Int32, header_word: Int32) -> Receivers:
        """Finds out who gets it, as soon as the header is there."""
        if not self.is_sent:
            return Receivers(-1, False, 0, False)
        return Receivers.of[group, fused_shared_expert, has_input](
            id, LaunchHeader.my_rank_of(header_word), Int(lane_id())
        )


@always_inline
def _store_loaded[
    input_type: DType,
    in_flight: Int,
    //,
    token_fmt_type: TokenFormat,
    is_inline: Bool,
](
    elements: Array[SIMD[input_type, token_fmt_type.lane_elements], in_flight],
    first: Int,
    end: Int,
    receivers: Receivers,
    address: UInt64,
    offset: Int,
    block: Block[...],
):
    """Encodes some steps of a token once, and writes them to all who get it."""
    var values = Array[LaneBytes, in_flight](fill=0)
    var scales = Array[LaneBytes, in_flight](fill=0)
    encode_steps[input_type, token_fmt_type, False](
        elements, values, scales, 1, block.lane
    )
    var rest = receivers.targets
    while rest != 0:
        var k = Int(count_trailing_zeros(rest))
        rest &= rest - 1
        _store_steps[token_fmt_type, is_inline](
            shuffle_address(address, k), first, end, values, scales, block.lane
        )
    if receivers.is_own:
        _store_steps[token_fmt_type, is_inline](
            block.recv_bufs[unsafe_offset=block.my_rank] + UInt64(offset),
            first,
            end,
            values,
            scales,
            block.lane,
        )


@always_inline
def _store_chunk[
    input_type: DType,
    in_flight: Int,
    //,
    token_fmt_type: TokenFormat,
    is_inline: Bool,
](
    mut elements: Array[
        SIMD[input_type, token_fmt_type.lane_elements], in_flight
    ],
    is_loaded: Bool,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    chunk: Chunk,
    receivers: Receivers,
    offset: Int,
    block: Block[...],
):
    """Encodes a part of a token once, and writes it to all who get it."""
    var address: UInt64 = 0
    if receivers.is_target:
        address = block.recv_bufs[
            unsafe_offset=Int(receivers.dst_rank)
        ] + UInt64(offset)
    comptime n_steps = n_steps_of[token_fmt_type]()
    comptime if is_inline and InlineSplit[n_steps].most_steps <= in_flight:
        # Less code than a loop.
        if not is_loaded:
            _load_elements[token_fmt_type](
                elements,
                tokens,
                chunk.whole,
                chunk.begin,
                chunk.end,
                block.lane,
            )
        _store_loaded[token_fmt_type, True](
            elements,
            chunk.begin,
            chunk.end,
            receivers,
            address,
            offset,
            block,
        )
    else:
        for first in range(chunk.begin, chunk.end, in_flight):
            if first != chunk.begin or not is_loaded:
                _load_elements[token_fmt_type](
                    elements, tokens, chunk.whole, first, chunk.end, block.lane
                )
            _store_loaded[token_fmt_type, is_inline](
                elements,
                first,
                chunk.end,
                receivers,
                address,
                offset,
                block,
            )


@always_inline
def _send_inline_tokens[
    input_type: DType,
    //,
    group: Group,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
](
    mut elements: InlineElements[input_type, token_fmt_type],
    first_chunk: FirstChunk,
    first_receivers: Receivers,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    block: Block[group],
    n_senders: Int,
):
    """Sends this block's share of early tokens with one of its sending warps.
    """
    var my_rank = block.my_rank
    var cut = inline_split[n_steps_of[token_fmt_type]()](n_tokens)
    var n_all = n_tokens * cut.n_chunks()
    if not first_chunk.is_sent:
        return
    var number = first_chunk.number
    var chunk = first_chunk.chunk
    # I3, for tokens.
    if not block.await_readers[is_combine=False](SEND):
        return
    var receivers = first_receivers
    var is_loaded = True
    while True:
        if receivers.are_any():
            # I1: only this rank writes the tokens of its number.
            _store_chunk[token_fmt_type, True](
                elements,
                is_loaded,
                tokens,
                chunk,
                receivers,
                group.inline_token_offset(my_rank, chunk.whole),
                block,
            )
        # Shares, not turns: a turn is one more trip to shared memory.
        number += n_senders * Int(grid_dim.x)
        if number >= n_all:
            return
        is_loaded = False
        chunk = cut.chunk(number)
        receivers = Receivers.of[group, fused_shared_expert, has_input](
            choices.id_of_lane[group](chunk.whole, block.lane),
            my_rank,
            block.lane,
        )


@always_inline
def _send_tokens_in_chunks[
    input_type: DType,
    //,
    group: Group,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    block: Block[group],
    sender: Int,
    n_senders: Int,
):
    """Sends this block's share of tokens whose parts have flags, with one warp.
    """
    comptime n_steps = n_steps_of[token_fmt_type]()
    comptime n_chunks = min(N_CHUNKS, n_steps)
    var elements = Array[
        SIMD[input_type, token_fmt_type.lane_elements],
        steps_in_flight[token_fmt_type](),
    ](fill=0)
    var lane = block.lane
    var my_rank = block.my_rank
    var generation = next_generation(block.before.dispatch_sent)
    var shift = chunks_at_once_shift[group, n_steps](n_tokens, n_senders)
    var n_units = n_chunks >> shift
    var number = sender * Int(grid_dim.x) + Int(block_idx.x)
    if number >= n_tokens * n_units:
        return
    # I3, for tokens.
    if not block.await_readers[is_combine=False](SEND):
        return
    while True:
        var token_idx, unit = divmod_32(number, n_units)
        var chunk = Chunk(
            token_idx,
            unit,
            divmod_32(unit * n_steps, n_units)[0],
            divmod_32((unit + 1) * n_steps, n_units)[0],
        )
        var receivers = Receivers.of[group, fused_shared_expert, has_input](
            choices.id_of_lane[group](token_idx, lane), my_rank, lane
        )
        if receivers.are_any():
            # I1: only this rank writes the tokens of its number.
            _store_chunk[token_fmt_type, False](
                elements,
                False,
                tokens,
                chunk,
                receivers,
                group.token_offset(my_rank, token_idx),
                block,
            )
        syncwarp()
        # I2: a part's flag is published after all of the part. A lane for
        # each flag: a publish waits until all has arrived, for a warp once.
        var n_receivers = Int(pop_count(receivers.targets)) + Int(
            receivers.is_own
        )
        for first in range(0, n_receivers << shift, WARP_SIZE):
            var mine = (first + lane) >> shift
            var dst_rank = -1
            var receiver = 0
            var rest = receivers.targets
            while rest != 0:
                var k = count_trailing_zeros(rest)
                rest &= rest - 1
                var rank = warp.shuffle_idx(receivers.dst_rank, k)
                if mine == receiver:
                    dst_rank = Int(rank)
                receiver += 1
            if receivers.is_own and mine == receiver:
                dst_rank = my_rank
            if dst_rank >= 0:
                var part = (unit << shift) + (lane & ((1 << shift) - 1))
                publish(
                    flag_at(
                        bytes_at(block.recv_bufs[unsafe_offset=dst_rank]),
                        group.chunk_flag_offset(my_rank, token_idx, part),
                    ),
                    generation,
                    0,
                )
        var round = next_work(block.control.unsafe_offset(NEXT_SEND), lane)
        number = (n_senders + round) * Int(grid_dim.x) + Int(block_idx.x)
        if number >= n_tokens * n_units:
            return


@always_inline
def send_by_number[
    input_type: DType,
    //,
    group: Group,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
](
    mut elements: InlineElements[input_type, token_fmt_type],
    first_chunk: FirstChunk,
    first_receivers: Receivers,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    block: Block[group],
    sender: Int,
    n_senders: Int,
):
    """Sends tokens as their number says, early or with flags, with one warp."""
    if n_tokens <= group.n_inline_tokens():
        _send_inline_tokens[
            group,
            token_fmt_type,
            fused_shared_expert,
            has_input,
        ](
            elements,
            first_chunk,
            first_receivers,
            tokens,
            choices,
            n_tokens,
            block,
            n_senders,
        )
        return
    comptime if group.max_tokens_per_rank > group.n_inline_tokens():
        _send_tokens_in_chunks[
            group,
            token_fmt_type,
            fused_shared_expert,
            has_input,
        ](
            tokens,
            choices,
            n_tokens,
            block,
            sender,
            n_senders,
        )
