# SPDX-License-Identifier: Apache-2.0
"""How a warp of dispatch sends tokens: which parts, to whom, with or without flags.

A part is encoded once and written to every rank that gets its token, then the next
one's turn comes (`deal.mojo`). Who gets it is read off the choices; entries, counts
and the number of tokens are written by other warps (`index.mojo`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE, block_idx, grid_dim, syncwarp
from std.bit import count_trailing_zeros, pop_count
from std.math import ceildiv

from ..counters import EPLocalSyncCounters
from ..expert_slots.device_steps import (
    SharedAddresses,
    any_lane,
    bytes_at,
    shuffle_address,
    store16,
    take_turn,
)
from ..expert_slots.dispatch import encode_steps, steps_in_flight
from ..expert_slots.host_steps import flag_at
from ..flags import block_peek, next_generation, publish, put_16
from ..layout import MESSAGE_ALIGN, N_CHUNKS, RegionLayout
from ..token_format import LaneBytes, TokenFormat
from .deal import Deal, n_early_parts, parts_at_once_shift
from .device_steps import Launch, await_readers, divmod_32, without_empty
from .dispatch_roles import INDEXED, NEXT_TURN, N_INDEX_WARPS, SEND
from .index import Choices


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
            fused_shared_expert: As for `send_by_number`.
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
        fused_shared_expert: As for `send_by_number`.
        has_input: Likewise.
        to_peers: Likewise.
        waits_for_index: Likewise.
        is_early: Whether the data is its own flag.

    Args:
        tokens: As for `send_by_number`.
        choices: Likewise.
        n_tokens: Likewise.
        recv_bufs: Likewise.
        counts: Likewise.
        launch: Likewise.
        counters: Likewise.
        sender: Likewise.
        n_senders: Likewise.
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
def send_by_number[
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
        fused_shared_expert: Whether this rank receives all of its tokens.
        has_input: Whether this rank reads its own tokens from `tokens`, so that
            none is sent to it.
        to_peers: Whether peers get them, or this rank alone.
        waits_for_index: Whether index warps of this block go first, up to
            `_ENTRIES_FIRST` tokens.

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
