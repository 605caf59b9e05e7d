# SPDX-License-Identifier: Apache-2.0
"""The send phase of dispatch by expert: the first warp of a block finds the slots of the
block's choices, and publishes counts; the next warps send.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, syncwarp, thread_idx, WARP_SIZE

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.encode import EncodedSteps, steps_in_flight
from ..device.schedule import n_steps_of, vector_of_lane
from ..device.shared import shared
from ..device.warp import bytes_at, in_32_bits, shuffle_address
from ..protocol.arguments import GivenTokens, InputScales
from ..protocol.counters import NO_EXPERT
from ..protocol.failures import Failure, SEND
from ..protocol.flags import (
    fetch_add_block,
    flag_at,
    load_acquire_block,
    message_flag,
    publish,
    SharedWord,
    store_relaxed_sys,
    store_release_block,
)
from ..protocol.layout import Group, MESSAGE_ALIGN
from ..protocol.token_format import TokenFormat
from ..protocol.transport import dispatch_put_offset, put_flag, put_message_warp
from .roles import INDEXED


@always_inline
def empty_histogram[group: Group]() -> SharedWord:
    """Makes the block's count of choices for each expert; a block barrier must follow.
    """
    var histogram = shared[UInt32, group.n_experts]()
    for i in range(Int(thread_idx.x), group.n_experts, group.num_threads):
        histogram[unsafe_offset=i] = 0
    return histogram


@fieldwise_init
struct SendSchedule(TrivialRegisterPassable):
    """How the choices are scheduled over blocks: an item is some choices of a token.

    Item `i` belongs to block `i % n_blocks`, so tokens leave in their order.
    """

    var n_items: Int
    var n_per_token: Int

    @staticmethod
    @always_inline
    def of(n_tokens: Int, top_k: Int, n_blocks: Int) -> Self:
        """Splits the choices of few tokens, so that every block has work."""
        var n = 1
        while n < top_k and n_tokens * n < 2 * n_blocks:
            n *= 2
        n = min(n, top_k)
        return Self(n_tokens * n, n)

    @always_inline
    def token(self, item: Int) -> Int:
        return item // self.n_per_token

    @always_inline
    def first_k(self, item: Int, top_k: Int, next: Int = 0) -> Int:
        return (item % self.n_per_token + next) * top_k // self.n_per_token


@fieldwise_init
struct _Place(TrivialRegisterPassable):
    """Where the choice of a lane goes."""

    var expert: Int32
    """Its expert; `NO_EXPERT`: it is not sent."""
    var message: UInt64
    """Where its message is written; 0: nowhere."""
    var put_to: UInt64
    """Where SHMEM then puts the message; 0: nowhere."""


@fieldwise_init
struct Sender[
    group_: Group, Format_: TokenFormat, input_type: DType, input_scales: InputScales
](TrivialRegisterPassable):
    """The warps of a block that send."""

    comptime group = Self.group_
    comptime Format = Self.Format_

    var block: Block[Self.group]
    var given: GivenTokens[Self.input_type]
    var put_buf: UInt64
    """This rank's put buffer; used with SHMEM."""
    var schedule: SendSchedule

    @always_inline
    def run(self, histogram: SharedWord, n_senders: Int):
        """Sends with the warps behind the first; all threads of a block call it."""
        if self.block.warp_idx == 0:
            self._index_choices(histogram)
        elif self.block.warp_idx <= n_senders:
            self._send(self.block.warp_idx - 1, n_senders)

    @always_inline
    def _count_choices(self, histogram: SharedWord, begin: Int, end: Int):
        """Adds a range of choices to the block's histogram, with one warp."""
        comptime in_flight = 8
        for first in range(begin, end, WARP_SIZE * in_flight):
            var ids = Array[Int32, in_flight](fill=NO_EXPERT)
            comptime for i in range(in_flight):
                var choice = first + i * WARP_SIZE + self.block.lane
                if choice < end:
                    ids[i] = self.given.topk_ids[unsafe_offset=choice]
            comptime for i in range(in_flight):
                if ids[i] >= 0 and ids[i] < Int32(Self.group.n_experts):
                    _ = fetch_add_block(histogram.unsafe_offset(Int(ids[i])), 1)

    @always_inline
    def _index_choices(self, histogram: SharedWord):
        """Finds the slot of each choice of this block, then publishes counts.

        The slot of a choice is the number of earlier choices of its expert, as on
        CPU. Every block counts for itself, so no block waits for another.
        """
        comptime group = Self.group
        comptime top_k = group.top_k
        var lane = self.block.lane
        var choices = self.block.counters.choices(self.block.sending())
        var slots = self.block.counters.slots()
        var n_counted = 0
        var n_indexed: UInt32 = 0
        for item in range(Int(block_idx.x), self.schedule.n_items, Int(grid_dim.x)):
            var token_idx = self.schedule.token(item)
            self._count_choices(histogram, n_counted, token_idx * top_k)
            n_counted = token_idx * top_k
            syncwarp()
            var expert = NO_EXPERT
            if lane < top_k:
                expert = self.given.topk_ids[unsafe_offset=token_idx * top_k + lane]
            var is_expert = expert >= 0 and expert < Int32(group.n_experts)
            var slot = 0
            if is_expert:
                slot = Int(histogram[unsafe_offset=Int(expert)])
            # The same expert twice in a token: the later choice stands behind.
            comptime for k in range(top_k):
                var other = warp.shuffle_idx(expert, UInt32(k))
                if k < lane and other == expert:
                    slot += 1
            var first_k = self.schedule.first_k(item, top_k)
            var end_k = self.schedule.first_k(item, top_k, 1)
            if first_k <= lane and lane < end_k:
                var has_slot = is_expert and slot < group.max_tokens_per_rank
                if not has_slot and expert != NO_EXPERT:
                    self.block.refuse(
                        Failure.DROPPED, SEND, Int(expert), token_idx, lane
                    )
                var choice = group.choice(token_idx, lane)
                choices[unsafe_offset=choice] = expert if has_slot else NO_EXPERT
                slots[unsafe_offset=choice] = Int32(slot)
            syncwarp()
            n_indexed += 1
            if lane == 0:
                store_release_block(self.block.word(INDEXED), n_indexed)
        self._count_choices(
            histogram, n_counted, in_32_bits(self.given.n_tokens) * top_k
        )
        syncwarp()
        self._publish_counts(histogram)

    @always_inline
    def _publish_counts(self, histogram: SharedWord):
        comptime group = Self.group
        var my_rank = self.block.my_rank
        var counts = self.block.counts
        # I3: a count is one word, so it too must have been read before it changes.
        if not await_readers(self.block):
            return
        # A rank without tokens publishes zeros: its peers wait for every pair.
        var n_blocks = Int(grid_dim.x)
        var first = Int(block_idx.x) + n_blocks * self.block.lane
        for expert_id in range(first, group.n_experts, n_blocks * WARP_SIZE):
            var dst_rank, local_expert = divmod(expert_id, group.n_local_experts())
            var offset = group.dispatch_count_offset(group.pair(local_expert, my_rank))
            var count = min(
                Int(histogram[unsafe_offset=expert_id]), group.max_tokens_per_rank
            )
            var to = counts[unsafe_offset=dst_rank]
            comptime if group.spans_hosts():
                if to == 0:
                    put_flag(
                        counts[unsafe_offset=my_rank] + UInt64(offset),
                        self.block.sending(),
                        count,
                        dst_rank,
                    )
                    continue
            store_relaxed_sys(
                flag_at(bytes_at(to), offset), self.block.sending(), count
            )

    @always_inline
    def _send(self, sender: Int, n_senders: Int):
        comptime group = Self.group
        comptime top_k = group.top_k
        # I3: all that this rank sent before has been read.
        if not await_readers(self.block):
            return
        var recv_buf = self.block.recv_buf()
        var n_blocks = Int(grid_dim.x)
        var item_in_block = UInt32(sender)
        var first = Int(block_idx.x) + sender * n_blocks
        for item in range(first, self.schedule.n_items, n_senders * n_blocks):
            while load_acquire_block(self.block.word(INDEXED)) <= item_in_block:
                pass
            item_in_block += UInt32(n_senders)
            var token_idx = self.schedule.token(item)
            var first_k = self.schedule.first_k(item, top_k)
            var end_k = self.schedule.first_k(item, top_k, 1)
            var choice = group.choice(token_idx, self.block.lane)
            var place = _Place(NO_EXPERT, 0, 0)
            if first_k <= self.block.lane and self.block.lane < end_k:
                place = self._place_of(choice)
            var staged_at: UInt64 = 0
            comptime if group.fused_shared_expert:
                if first_k == 0:
                    # I3: this rank's own done word, too, was awaited above.
                    var offset = group.staged_from_recv(0, token_idx)
                    staged_at = UInt64(Int(recv_buf.unsafe_offset(offset)))
            self._write_messages(token_idx, place, first_k, end_k, staged_at)
            syncwarp()
            # I2: a message's flag is published after all of the message.
            comptime if group.spans_hosts():
                self._put_messages(token_idx, place, first_k, end_k)
            if place.message != 0 and place.put_to == 0:
                publish(
                    message_flag(bytes_at(place.message), Self.Format.msg_bytes),
                    self.block.sending(),
                    choice,
                )

    @always_inline
    def _place_of(self, choice: Int) -> _Place:
        comptime group = Self.group
        var my_rank = self.block.my_rank
        var recv_bufs = self.block.recv_bufs
        var choices = self.block.counters.choices(self.block.sending())
        var slots = self.block.counters.slots()
        var place = _Place(choices[unsafe_offset=choice], 0, 0)
        if place.expert != NO_EXPERT:
            var dst_rank, local_expert = divmod(
                Int(place.expert), group.n_local_experts()
            )
            # I1: only this rank writes the slots of pair (_, my_rank).
            var offset = UInt64(
                group.dispatch_message_offset(
                    group.pair(local_expert, my_rank), Int(slots[unsafe_offset=choice])
                )
            )
            place.message = recv_bufs[unsafe_offset=dst_rank] + offset
            comptime if group.spans_hosts():
                if place.message == offset:
                    place.message = self.put_buf + UInt64(
                        dispatch_put_offset(group, choice)
                    )
                    place.put_to = recv_bufs[unsafe_offset=my_rank] + offset
        return place

    @always_inline
    def _write_messages(
        self, token_idx: Int, place: _Place, first_k: Int, end_k: Int, staged_at: UInt64
    ):
        """Encodes a token into the messages of an item, with one warp."""
        comptime n_elements = Self.Format.lane_elements
        comptime n_steps = n_steps_of[Self.Format]()
        comptime in_flight = steps_in_flight[Self.Format]()
        comptime Elements = SIMD[Self.input_type, n_elements]
        comptime is_scaled = Bool(Self.input_scales)
        var lane = self.block.lane
        var token = self.given.tokens.unsafe_offset(token_idx * Self.Format.hidden_size)
        for first in range(0, n_steps, in_flight):
            var elements = Array[Elements, in_flight](fill=0)
            comptime for i in range(in_flight):
                var vector, has = vector_of_lane[Self.Format](first + i, n_steps, lane)
                if has:
                    elements[i] = token.unsafe_load[
                        width=n_elements, alignment=MESSAGE_ALIGN, invariant=False
                    ](vector * n_elements)
            var encoded = EncodedSteps[Self.Format, in_flight]()
            comptime if not is_scaled:
                encoded.encode[is_scaled=False](elements, 1, lane)
            for k in range(first_k, end_k):
                var to = shuffle_address(place.message, k)
                if to == 0:
                    continue
                comptime if is_scaled:
                    comptime scale_of = Self.input_scales.value()
                    var id = Int(warp.shuffle_idx(place.expert, UInt32(k)))
                    encoded.encode[is_scaled=True](
                        elements, scale_of[DType.float32](id), lane
                    )
                encoded.store[False](to, first, n_steps, lane)
            if staged_at != 0:
                encoded.store[False](staged_at, first, n_steps, lane)

    @always_inline
    def _put_messages(self, token_idx: Int, place: _Place, first_k: Int, end_k: Int):
        """Has SHMEM put an item's messages to other nodes, with one warp."""
        comptime token_bytes = Self.Format.token_bytes
        for k in range(first_k, end_k):
            var to = shuffle_address(place.put_to, k)
            var from_ = shuffle_address(place.message, k)
            var id = Int(warp.shuffle_idx(place.expert, UInt32(k)))
            if to != 0:
                # I3: the receiver's done word says that all was read, so
                # nothing is put from here any more when it is reused.
                put_message_warp(
                    to,
                    from_,
                    token_bytes,
                    to + UInt64(token_bytes),
                    self.block.sending(),
                    Self.group.choice(token_idx, k),
                    id // Self.group.n_local_experts(),
                )
