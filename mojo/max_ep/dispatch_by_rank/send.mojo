# SPDX-License-Identifier: Apache-2.0
"""How a warp of dispatch sends tokens: which chunks, to whom, with or without flags.

A chunk is encoded once and written to every rank that gets its token, one rank after
another. The choices say who gets it. Other warps publish entries, counts and the
number of tokens (`publish.mojo`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, lane_id, syncwarp, warp_id, WARP_SIZE
from std.bit import count_trailing_zeros, pop_count

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.encode import EncodedSteps, steps_in_flight
from ..device.puts import send_message_warp
from ..device.schedule import (
    Chunk,
    chunk_of,
    inline_split,
    InlineSplit,
    n_steps_of,
    vector_of_lane,
)
from ..device.warp import (
    any_lane,
    bytes_at,
    divmod_32,
    lanes_like,
    shuffle_address,
    take_lane,
)
from ..protocol.counters import blocks_share_work, NO_EXPERT, Taken, Word
from ..protocol.entries import value_word
from ..protocol.flags import flag_at, publish, store_relaxed_sys_16
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import Group, MESSAGE_ALIGN, METADATA_BYTES, N_CHUNKS
from ..protocol.router_ids import load_router_id
from ..protocol.token_format import LaneBytes, TokenFormat
from .choices import Choices
from .publish import two_words
from .roles import chunks_at_once_shift, FIRST_SENDER, NEXT_SEND


@fieldwise_init
struct Targets(TrivialRegisterPassable):
    """The ranks that get a token."""

    var dst_rank: Int32
    """The rank that holds choice `lane`'s expert, or -1."""
    var is_target: Bool
    """Whether this lane is the first of those with its rank, a peer."""
    var lanes: UInt32
    var is_own: Bool
    """Whether this rank gets it through its own region."""

    @staticmethod
    @always_inline
    def of[
        group: Group, reads_in_place: Bool
    ](id: Int32, my_rank: Int, lane: Int) -> Self:
        """All lanes call it."""
        var dst_rank: Int32 = -1
        comptime if group.sends_to_all():
            # Not all sources begin with the same rank.
            comptime n = group.n_ranks
            comptime assert n <= WARP_SIZE, "a lane stands for a rank"
            if lane < n:
                dst_rank = Int32(UInt32(my_rank + 1 + lane) % UInt32(n))
        elif group.finds_ranks():
            dst_rank = id
        else:
            if lane < group.top_k and id >= 0 and id < Int32(group.n_experts):
                dst_rank = id // Int32(group.n_local_experts())
        var is_target = dst_rank >= 0 and dst_rank != Int32(my_rank)
        comptime if not group.sends_to_all():
            var first = count_trailing_zeros(lanes_like(dst_rank))
            is_target = is_target and Int(first) == lane
        var is_own = False
        comptime if not reads_in_place:
            is_own = group.fused_shared_expert or any_lane(dst_rank == Int32(my_rank))
        return Self(dst_rank, is_target, warp.vote[DType.uint32](is_target), is_own)

    @always_inline
    def are_any(self) -> Bool:
        return self.lanes != 0 or self.is_own

    @always_inline
    def go_through_one_of_each_host[
        group: Group
    ](mut self, is_far: Bool, block: Block[group]) -> Bool:
        """Replaces ranks of other hosts by those that relay to them; returns whether this
        lane is the first of those with its rank. All lanes call it."""
        var through = Int32(-1)
        if is_far:
            through = Int32(block.relay_to(Int(self.dst_rank)))
            self.dst_rank = through
        var first = count_trailing_zeros(lanes_like(through))
        return is_far and Int(first) == block.lane

    @always_inline
    def count(self) -> Int:
        return Int(pop_count(self.lanes)) + Int(self.is_own)

    @always_inline
    def rank_of(self, n: Int, my_rank: Int) -> Int:
        """Returns the rank of target `n`, or -1; this rank is the last one. All lanes call
        it, each with an `n` of its own, since they hand ranks to each other."""
        var found = -1
        var i = 0
        var rest = self.lanes
        while rest != 0:
            var rank = warp.shuffle_idx(self.dst_rank, take_lane(rest))
            if n == i:
                found = Int(rank)
            i += 1
        if self.is_own and n == i:
            found = my_rank
        return found


@fieldwise_init
struct TokenLane[Format: TokenFormat, input_type: DType, in_flight: Int]:
    """What a lane has of some steps of a token, as it is given."""

    var tokens: ImmPointer[Scalar[Self.input_type]]
    """`[n_tokens][hidden_size]`."""
    var elements: Array[
        SIMD[Self.input_type, Self.Format.lane_elements], Self.in_flight
    ]

    @always_inline
    def __init__(out self, tokens: ImmPointer[Scalar[Self.input_type]]):
        self.tokens = tokens
        self.elements = {fill = 0}

    @always_inline
    def load(mut self, token_idx: Int, first: Int, end: Int, lane: Int):
        comptime n_elements = Self.Format.lane_elements
        comptime for i in range(Self.in_flight):
            var vector, is_in_chunk = vector_of_lane[Self.Format](first + i, end, lane)
            if is_in_chunk:
                # Not as constants: when this block began, the kernel that wrote
                # the tokens may not have ended (PDL).
                self.elements[i] = self.tokens.unsafe_load[
                    width=n_elements, alignment=MESSAGE_ALIGN, invariant=False
                ](token_idx * Self.Format.hidden_size + vector * n_elements)

    @always_inline
    def _store[
        is_inline: Bool
    ](
        self,
        first: Int,
        end: Int,
        targets: Targets,
        address: UInt64,
        own: UInt64,
        lane: Int,
    ):
        """Encodes the loaded steps once, writes them to all who get them."""
        var encoded = EncodedSteps[Self.Format, Self.in_flight]()
        encoded.encode[is_scaled=False](self.elements, 1, lane)
        var rest = targets.lanes
        while rest != 0:
            var to = shuffle_address(address, Int(take_lane(rest)))
            encoded.store[is_inline](to, first, end, lane)
        if targets.is_own:
            encoded.store[is_inline](own, first, end, lane)

    @always_inline
    def send[
        group: Group, //, is_inline: Bool
    ](mut self, chunk: Chunk, is_loaded: Bool, targets: Targets, block: Block[group]):
        var offset: UInt64
        comptime if is_inline:
            offset = UInt64(group.inline_token_offset(block.my_rank, chunk.whole))
        else:
            offset = UInt64(group.token_offset(block.my_rank, chunk.whole))
        var address: UInt64 = 0
        if targets.is_target:
            address = block.recv_bufs[unsafe_offset=Int(targets.dst_rank)] + offset
        var own = block.recv_bufs[unsafe_offset=block.my_rank] + offset
        comptime split = InlineSplit[n_steps_of[Self.Format]()]
        comptime if is_inline and split.most_steps <= Self.in_flight:
            # Less code than a loop.
            if not is_loaded:
                self.load(chunk.whole, chunk.begin, chunk.end, block.lane)
            self._store[True](chunk.begin, chunk.end, targets, address, own, block.lane)
        else:
            for first in range(chunk.begin, chunk.end, Self.in_flight):
                if first != chunk.begin or not is_loaded:
                    self.load(chunk.whole, first, chunk.end, block.lane)
                self._store[is_inline](
                    first, chunk.end, targets, address, own, block.lane
                )


struct TokenSender[
    group: Group, Format: TokenFormat, input_type: DType, reads_in_place: Bool
]:
    """A warp that sends tokens.

    Its first inline chunk depends on the arguments alone, so it is chosen before the
    previous launch has ended. Its elements and ids are loaded together with the header.
    """

    comptime inline_in_flight = min(
        InlineSplit[n_steps_of[Self.Format]()].most_steps,
        steps_in_flight[Self.Format](),
    )

    var choices: Choices[Self.group]
    var n_tokens: Int
    var sender: Int
    """Which of the sending warps of the block this is."""
    var n_senders: Int
    var number: Int
    """Which of all inline chunks is the next."""
    var chunk: Chunk
    var has_chunk: Bool
    var inline: TokenLane[Self.Format, Self.input_type, Self.inline_in_flight]
    """Elements of the first steps of the first inline chunk."""
    var id: Int32
    """Expert id of choice `lane` of its token."""
    var targets: Targets

    @always_inline
    def __init__(
        out self,
        tokens: ImmPointer[Scalar[Self.input_type]],
        choices: Choices[Self.group],
        n_tokens: Int,
        n_senders: Int,
    ):
        var split = inline_split[n_steps_of[Self.Format]()](n_tokens)
        self.choices = choices
        self.n_tokens = n_tokens
        self.sender = Int(warp_id()) - FIRST_SENDER
        self.n_senders = n_senders
        self.number = Int(block_idx.x) + self.sender * Int(grid_dim.x)
        self.chunk = split.chunk(self.number)
        self.has_chunk = (
            0 <= self.sender < n_senders
            and n_tokens <= Self.group.n_inline_tokens()
            and self.number < n_tokens * split.n_chunks()
        )
        self.inline = {tokens}
        self.id = NO_EXPERT
        self.targets = Targets(-1, False, 0, False)

    @always_inline
    def prefetch(mut self):
        if self.has_chunk:
            var lane = Int(lane_id())
            self.inline.load(self.chunk.whole, self.chunk.begin, self.chunk.end, lane)
            comptime if Self.group.finds_ranks():
                self.id = self.choices.load_rank(self.chunk.whole, lane)
            elif not Self.group.sends_to_all():
                if lane < Self.group.top_k:
                    self.id = self.choices.load_id(
                        Self.group.choice(self.chunk.whole, lane)
                    )

    @always_inline
    def find_targets(mut self, header_word: Int32):
        if self.has_chunk:
            var my_rank = warp.shuffle_idx(header_word, UInt32(Word.MY_RANK))
            self.targets = Targets.of[Self.group, Self.reads_in_place](
                self.id, Int(my_rank), Int(lane_id())
            )

    @always_inline
    def _targets_of(self, token_idx: Int, block: Block[Self.group]) -> Targets:
        return Targets.of[Self.group, Self.reads_in_place](
            self.choices.id_of_lane(token_idx, block.lane), block.my_rank, block.lane
        )

    @always_inline
    def send(mut self, block: Block[Self.group]):
        if self.sender >= self.n_senders:
            return
        comptime if Self.group.is_linked():
            self._send_whole(block)
            return
        if self.n_tokens <= Self.group.n_inline_tokens():
            self._send_inline(block)
            return
        comptime if Self.group.max_tokens_per_rank > Self.group.n_inline_tokens():
            self._send_chunks(block)

    @always_inline
    def _send_inline(mut self, block: Block[Self.group]):
        """Sends this warp's chunks of tokens whose data is its own flag."""
        var split = inline_split[n_steps_of[Self.Format]()](self.n_tokens)
        var n_all = self.n_tokens * split.n_chunks()
        if not self.has_chunk:
            return
        # I3, for tokens.
        if not await_readers(block):
            return
        var is_loaded = True
        while True:
            if self.targets.are_any():
                # I1: only this rank writes the tokens of its number.
                self.inline.send[True](self.chunk, is_loaded, self.targets, block)
            # Strides, no counter: that would be one more trip to shared memory.
            self.number += self.n_senders * Int(grid_dim.x)
            if self.number >= n_all:
                return
            is_loaded = False
            self.chunk = split.chunk(self.number)
            self.targets = self._targets_of(self.chunk.whole, block)

    @always_inline
    def _send_chunks(self, block: Block[Self.group]):
        comptime n_steps = n_steps_of[Self.Format]()
        var shift = chunks_at_once_shift[Self.group, n_steps](
            self.n_tokens, self.n_senders
        )
        # A warp sends `1 << shift` chunks before it publishes their flags.
        var n_bundles = min(N_CHUNKS, n_steps) >> shift
        var lane = TokenLane[
            Self.Format, Self.input_type, steps_in_flight[Self.Format]()
        ](self.inline.tokens)
        var number = self.sender * Int(grid_dim.x) + Int(block_idx.x)
        if number >= self.n_tokens * n_bundles:
            return
        # I3, for tokens.
        if not await_readers(block):
            return
        while True:
            var token_idx, bundle = divmod_32(number, n_bundles)
            var chunk = chunk_of[n_steps](token_idx, bundle, n_bundles)
            var targets = self._targets_of(token_idx, block)
            if targets.are_any():
                # I1: only this rank writes the tokens of its number.
                lane.send[False](chunk, False, targets, block)
            var taken = block.take[Taken.TOKEN_SENDS](
                NEXT_SEND, blocks_share_work(Self.group)
            )
            syncwarp()
            # I2: a chunk's flag is published after all of the chunk. Each lane
            # publishes a flag, so the warp waits only once until its stores arrive.
            for first in range(0, targets.count() << shift, WARP_SIZE):
                var n = (first + block.lane) >> shift
                var dst_rank = targets.rank_of(n, block.my_rank)
                if dst_rank >= 0:
                    var chunk_idx = block.lane & ((1 << shift) - 1)
                    var offset = Self.group.chunk_flag_offset(
                        block.my_rank, token_idx, (bundle << shift) + chunk_idx
                    )
                    var recv_buf = block.recv_bufs[unsafe_offset=dst_rank]
                    publish(flag_at(bytes_at(recv_buf), offset), block.sending(), 0)
            number = self.n_senders * Int(grid_dim.x) + block.of_lane_0(taken)
            if number >= self.n_tokens * n_bundles:
                return

    @always_inline
    def _send_whole(self, block: Block[Self.group]):
        """Sends tokens whole: to ranks of this host by stores, to others by puts of what
        is staged in the place of this rank's own tokens. If ranks relay, one on each
        other host gets a token."""
        comptime n_steps = n_steps_of[Self.Format]()
        comptime n_flags = min(N_CHUNKS, n_steps)
        comptime n_put_bytes = (
            Self.Format.token_bytes + Self.Format.router_top_k * METADATA_BYTES
        )
        comptime assert n_put_bytes % MESSAGE_ALIGN == 0, "whole vectors are sent"
        var lane = TokenLane[
            Self.Format, Self.input_type, steps_in_flight[Self.Format]()
        ](self.inline.tokens)
        var first = self.sender * Int(grid_dim.x) + Int(block_idx.x)
        if first >= self.n_tokens:
            return
        # I3, for tokens, and for what is staged: a done word ends its use.
        if not await_readers(block):
            return
        var recv = block.recv_bufs[unsafe_offset=block.my_rank]
        for token_idx in range(first, self.n_tokens, self.n_senders * Int(grid_dim.x)):
            var targets = self._targets_of(token_idx, block)
            var is_far = targets.is_target and block.is_far(Int(targets.dst_rank))
            var far = warp.vote[DType.uint32](is_far)
            targets.lanes &= ~far
            targets.is_own = targets.is_own or far != 0
            targets.is_target = targets.is_target and not is_far
            comptime if Self.group.relays:
                is_far = targets.go_through_one_of_each_host[Self.group](is_far, block)
                far = warp.vote[DType.uint32](is_far)
            comptime if Self.Format.router_top_k > 0:
                var is_here = any_lane(targets.dst_rank == Int32(block.my_rank))
                self._send_metadata(token_idx, targets, is_here or far != 0, block)
            if not targets.are_any():
                continue
            # I1: only this rank writes the tokens of its number.
            lane.send[False](chunk_of[n_steps](token_idx, 0, 1), False, targets, block)
            syncwarp()
            # I2: flags are published, and puts begin, after all of the token.
            var n_all = targets.count() * n_flags
            for begin in range(0, n_all, WARP_SIZE):
                var n, chunk_idx = divmod_32(begin + block.lane, n_flags)
                var dst_rank = targets.rank_of(n, block.my_rank)
                if dst_rank >= 0:
                    var offset = Self.group.chunk_flag_offset(
                        block.my_rank, token_idx, chunk_idx
                    )
                    var recv_buf = block.recv_bufs[unsafe_offset=dst_rank]
                    publish(flag_at(bytes_at(recv_buf), offset), block.sending(), 0)
            while far != 0:
                var dst_rank = Int(warp.shuffle_idx(targets.dst_rank, take_lane(far)))
                var at = recv + UInt64(
                    Self.group.token_offset(block.my_rank, token_idx)
                )
                var flag = recv + UInt64(
                    Self.group.chunk_flag_offset(block.my_rank, token_idx, 0)
                )
                send_message_warp(
                    at, at, n_put_bytes, flag, block.sending(), 0, dst_rank
                )

    @always_inline
    def _send_metadata(
        self, token_idx: Int, targets: Targets, is_own: Bool, block: Block[Self.group]
    ):
        """Writes a token's routing metadata to its ranks of this host, and behind what is
        staged."""
        comptime router_top_k = Self.Format.router_top_k
        var k = block.lane
        var words = LaneBytes(0)
        if k < router_top_k:
            var place = token_idx * router_top_k + k
            var id = load_router_id[Self.group](self.choices.ids, place)
            var weight = self.choices.weights[unsafe_offset=place]
            words = two_words(
                value_word(block.sending(), id), value_word(block.sending(), weight)
            )
        var offset = UInt64(
            Self.group.metadata_offset(block.my_rank, token_idx, k, router_top_k)
        )
        var rest = targets.lanes
        while rest != 0:
            var rank = Int(warp.shuffle_idx(targets.dst_rank, take_lane(rest)))
            if k < router_top_k:
                # I1: only this rank writes the metadata of its tokens.
                var to = block.recv_bufs[unsafe_offset=rank]
                store_relaxed_sys_16(bytes_at(to + offset), words)
        if is_own and k < router_top_k:
            var own = block.recv_bufs[unsafe_offset=block.my_rank]
            store_relaxed_sys_16(bytes_at(own + offset), words)
