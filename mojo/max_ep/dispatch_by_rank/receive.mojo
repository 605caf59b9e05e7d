# SPDX-License-Identifier: Apache-2.0
"""How a warp of dispatch makes rows of tokens, as they arrive.

It awaits the entries of a token, which hold its destination on this rank, and each of
its chunks.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, WARP_SIZE
from std.bit import count_trailing_zeros
from std.memory import bitcast

from ..device.block import Block
from ..device.schedule import Chunk, inline_split, n_steps_of, Schedule, Split
from ..device.warp import any_lane, bytes_at, divmod_32, take_lane
from ..protocol.arguments import DispatchedRows
from ..protocol.counters import NO_EXPERT, NO_ROW, own_row, row_elsewhere
from ..protocol.entries import (
    expert_of_entry,
    NO_POSITION,
    position_of_entry,
    value_of_word,
)
from ..protocol.flags import flag_at, generation_of
from ..protocol.layout import Group, N_CHUNKS
from ..protocol.token_format import BytePointer, LaneBytes, TokenFormat
from .relay import Relay
from .incoming import await_loaded, await_words, load_words, Steps, Token
from .roles import NEXT_RECEIVE, token_receive_schedule
from .row_offsets import SharedRowOffsets
from .token_counts import SharedTokenCounts


@fieldwise_init
struct _Destination(TrivialRegisterPassable):
    """Where a token goes; lane `k` holds this for choice `k`."""

    var is_late: Bool
    """Whether the entry has not come."""
    var is_here: Bool
    """Whether the expert is on this rank."""
    var has_row: Bool
    """Whether it is, and the choice was not dropped."""
    var pair: Int
    var position: Int32
    """Its place among the rows of the pair."""
    var row: Int32
    """Its row, once known; `row_elsewhere` if it is on another rank, else `NO_ROW`."""
    var weight: Float32
    var mate: Int32
    """The other rank of this host to which this one relays the token, or -1."""

    comptime NONE = Self(False, False, False, 0, 0, NO_ROW, 0, -1)


@fieldwise_init
struct TokenReceiver[group: Group, Format: TokenFormat, reads_in_place: Bool](
    TrivialRegisterPassable
):
    """How each warp receives."""

    var dispatched: DispatchedRows[Self.group, Self.Format]
    var own_tokens: UInt64
    """This rank's tokens, if `reads_in_place`."""
    var recv_buf: BytePointer
    """Loaded once: the block has it in shared memory."""
    var shared: SharedRowOffsets[Self.group]
    var token_counts: SharedTokenCounts[Self.group]
    var block: Block[Self.group]

    @always_inline
    def receive[are_all_inline: Bool](self):
        comptime n_ranks = Self.group.n_ranks
        comptime n_steps = n_steps_of[Self.Format]()
        comptime flagged = Split[n_steps, N_CHUNKS, N_CHUNKS](True)
        var steps = Steps[Self.Format, are_all_inline]()
        var most = self.token_counts.most_tokens()
        var inline = inline_split[n_steps](most)
        var n_chunks = inline.n_chunks() if are_all_inline else flagged.n_chunks()
        var n_items = most * n_ranks * n_chunks
        var schedule = token_receive_schedule(
            self.block.warp_idx, Self.group.num_threads // WARP_SIZE
        )
        # A counter is a trip to shared memory: few items are scheduled, one a warp.
        var n_few = schedule.stride * Int(grid_dim.x)
        var are_scheduled = are_all_inline and n_items <= n_few
        var round = schedule.first
        var has_pair_rows = False
        while True:
            var item: Int
            if are_scheduled:
                item = Schedule.item(round, Int(block_idx.x), Int(grid_dim.x))
                round += schedule.stride
            else:
                item = self.block.next_item(NEXT_RECEIVE)
            if item >= n_items:
                return
            var chunk = inline.chunk(item) if are_all_inline else flagged.chunk(item)
            var token_idx, src_rank = divmod_32(chunk.whole, n_ranks)
            var n_tokens = self.token_counts.n_tokens(src_rank)
            if token_idx >= n_tokens:
                continue
            var token = self._locate[are_all_inline](src_rank, token_idx, n_tokens)
            if not self._receive_chunk(steps, has_pair_rows, token, chunk):
                return

    @always_inline
    def _locate[
        are_all_inline: Bool
    ](self, src_rank: Int, token_idx: Int, n_tokens: Int) -> Token:
        comptime if Self.reads_in_place:
            if src_rank == self.block.my_rank:
                var bytes = bytes_at(
                    self.own_tokens
                    + UInt64(token_idx) * UInt64(Self.Format.value_bytes)
                )
                return Token(bytes, src_rank, token_idx, False, True)
        comptime if not Self.group.is_linked():
            if are_all_inline or n_tokens <= Self.group.n_inline_tokens():
                var bytes = self.recv_buf.unsafe_offset(
                    Self.group.inline_token_offset(src_rank, token_idx)
                )
                return Token(bytes, src_rank, token_idx, True, True)
        var bytes = self.recv_buf.unsafe_offset(
            Self.group.token_offset(src_rank, token_idx)
        )
        return Token(bytes, src_rank, token_idx, False, False)

    @always_inline
    def _read_entry(self, token: Token) -> _Destination:
        comptime has_sums = Self.group.has_sums
        comptime n_local_experts = Self.group.n_local_experts()
        var my_rank = self.block.my_rank
        var choice = Self.group.choice(token.idx, self.block.lane)
        var at = self.recv_buf.unsafe_offset(
            Self.group.entry_offset(token.src_rank, choice)
        )
        var entry = await_words[has_sums](at, token.src_rank, self.block)
        var is_late = entry[1] != self.block.receiving()
        var words = bitcast[DType.uint64, 2](entry)
        var expert = expert_of_entry(words[0])
        var local_expert = expert - my_rank * n_local_experts
        var position = position_of_entry(words[0])
        var is_here = 0 <= local_expert < n_local_experts and not is_late
        var row = NO_ROW
        var mate = Int32(-1)
        comptime if Self.group.relays:
            var owner = expert // n_local_experts  # past all ranks if there is none
            if self.block.relays_for(token.src_rank) and not is_late:
                mate = Int32(owner if self.block.is_mate(owner) else -1)
        comptime if has_sums:
            if (
                (token.src_rank == my_rank or mate >= 0)
                and not is_here
                and expert < Self.group.n_experts
                and position != NO_POSITION
            ):
                row = row_elsewhere(expert // n_local_experts)
        comptime if Self.group.masks:
            # Its source is masked: the choice has no row.
            is_late = False
        return _Destination(
            is_late,
            is_here,
            is_here and position != NO_POSITION,
            Self.group.pair(local_expert, token.src_rank),
            Int32(position),
            row,
            value_of_word[DType.float32](words[1]),
            mate,
        )

    @always_inline
    def _receive_chunk[
        are_all_inline: Bool, //
    ](
        self,
        mut steps: Steps[Self.Format, are_all_inline],
        mut has_pair_rows: Bool,
        token: Token,
        chunk: Chunk,
    ) -> Bool:
        """Awaits a chunk and places it; false: nothing more can be placed."""
        comptime in_flight = steps.in_flight
        var lane = self.block.lane
        # Loaded before its entries arrive, since it is most likely for this rank.
        if token.is_loaded_early:
            steps.load(token, chunk.begin, chunk.end, lane)
        # Used after the token has come. A put may bring the halves one by one, so over a
        # link it is loaded only then.
        var metadata = LaneBytes(0)
        comptime if Self.Format.router_top_k > 0 and not Self.group.is_linked():
            if chunk.idx == 0 and lane < Self.Format.router_top_k:
                metadata = load_words[True](self._metadata_of_lane(token))
        var to = _Destination.NONE
        var has_entry = lane < Self.group.top_k
        comptime if Self.group.finds_ranks():
            # Others do not come here.
            var my_rank = self.block.my_rank
            has_entry = has_entry and (
                lane == my_rank
                or token.src_rank == my_rank
                or self.block.relays_for(token.src_rank)
            )
        if has_entry:
            to = self._read_entry(token)
        if any_lane(to.is_late):
            return False
        # The lanes whose choices have a row here.
        var with_row = warp.vote[DType.uint32](to.has_row)
        var is_shared = (
            Self.group.fused_shared_expert and token.src_rank == self.block.my_rank
        )
        var is_here = is_shared or any_lane(to.is_here)
        var mates = Relay.of[Self.group](to.mate)
        if not is_here:
            if chunk.idx == 0:
                self._record_choice[has_weight=False](token, to)
            if not mates.are_any():
                return True
        if not are_all_inline and not token.is_loaded_early:
            var chunk_idx = chunk.idx
            comptime if Self.group.spans_hosts():
                if self.block.is_put(token.src_rank):  # one put brought all of it
                    chunk_idx = 0
            var flag = flag_at(
                self.recv_buf,
                Self.group.chunk_flag_offset(token.src_rank, token.idx, chunk_idx),
            )
            var word = self.block.await_message(flag, token.src_rank)
            if any_lane(generation_of(word) != self.block.receiving()):
                return self._go_on_without()
        for first in range(chunk.begin, chunk.end, in_flight):
            if first != chunk.begin or (
                not are_all_inline and not token.is_loaded_early
            ):
                steps.load(token, first, chunk.end, lane)
            var is_there = True
            if token.is_inline:
                is_there = steps.await_inline(token, first, chunk.end, self.block)
            if any_lane(not is_there):
                return self._go_on_without()
            comptime if Self.group.relays:
                mates.store(steps, token, first, chunk.end, self.block)
                if not is_here:
                    continue
            # Awaited only now, so that loading the chunk does not wait for the counts.
            if not has_pair_rows:
                if not self.shared.await_pair_rows():
                    return False
                has_pair_rows = True
            if first == chunk.begin:
                comptime if Self.group.masks or Self.group.drops_rows:
                    # A pair whose count did not come in time has no rows.
                    to.has_row = to.has_row and self.shared.has_row(
                        to.pair, to.position
                    )
                if to.has_row:
                    to.row = self.shared.first_row_of_pair(to.pair) + to.position
                if chunk.idx == 0 and not self._record(
                    token, to, with_row, is_shared, metadata
                ):
                    return False
            var rest = with_row
            comptime if Self.group.masks or Self.group.drops_rows:
                rest = warp.vote[DType.uint32](to.has_row)
            var is_shared_left = is_shared
            while rest != 0 or is_shared_left:
                var row = token.idx
                var rows = self.dispatched.rows
                if rest != 0:
                    var k = take_lane(rest)
                    row = Int(warp.shuffle_idx(to.row, k))
                    comptime if Self.Format.Rows.depend_on_expert:
                        var pair = Int(warp.shuffle_idx(Int32(to.pair), k))
                        rows = self._outputs_of_pair(pair)
                else:
                    is_shared_left = False
                steps.place(rows, row, first, chunk.end, lane)
        comptime if Self.group.relays:
            comptime if Self.Format.router_top_k > 0:
                if chunk.idx == 0:
                    mates.store_metadata[Self.Format.router_top_k](token, self.block)
            mates.publish(token, chunk.idx, self.block)
        return True

    @always_inline
    def _go_on_without(self) -> Bool:
        """Decides what follows a time-out: the launch fails, or, with masking, goes on
        without that source, whose results nobody reads."""
        return Self.group.masks

    @always_inline
    def _outputs_of_pair(self, pair: Int) -> Self.Format.Rows:
        var expert = pair // Self.group.n_ranks
        var first_row = self.shared.first_row_of_pair(Self.group.pair(expert, 0))
        return self.dispatched.rows.of_expert(expert, Int(first_row))

    @always_inline
    def _record_choice[has_weight: Bool](self, token: Token, to: _Destination):
        """Records row and weight of a lane's choice, for sums."""
        comptime if Self.group.has_sums:
            if self.block.lane < Self.group.top_k:
                var counters = self.block.counters
                var choice = Self.group.choice(token.idx, self.block.lane)
                var source = Self.group.relative_rank(
                    self.block.my_rank, token.src_rank
                )
                counters.received_rows(source)[unsafe_offset=choice] = to.row
                comptime if has_weight:
                    counters.received_weights(source)[unsafe_offset=choice] = to.weight

    @always_inline
    def _record(
        self,
        token: Token,
        to: _Destination,
        with_row: UInt32,
        is_shared: Bool,
        metadata: LaneBytes,
    ) -> Bool:
        """Records where the rows of a token come from, with one warp."""
        comptime drops_own = Self.group.drops_rows and not Self.group.has_sums
        var lane = self.block.lane
        if to.has_row:
            self.dispatched.set_source(Int(to.row), token.idx, lane)
            comptime if Self.group.has_sums:
                Self.Format.place_weight(self.dispatched.rows, Int(to.row), to.weight)
            comptime if not Self.group.has_sums:
                # `publish_entry` leaves these choices out.
                if token.src_rank == self.block.my_rank:
                    self.block.counters.choices(self.block.receiving())[
                        unsafe_offset=Self.group.choice(token.idx, lane)
                    ] = own_row(Int(to.row))
        elif drops_own and to.is_here and token.src_rank == self.block.my_rank:
            self.block.counters.choices(self.block.receiving())[
                unsafe_offset=Self.group.choice(token.idx, lane)
            ] = NO_EXPERT
        self._record_choice[has_weight=True](token, to)
        comptime if Self.Format.router_top_k > 0:
            # Choices are ranks: only that of this rank has a row here.
            var k = count_trailing_zeros(with_row)
            if with_row != 0 and not self._place_metadata(
                token, Int(warp.shuffle_idx(to.row, k)), metadata
            ):
                return False
        comptime if Self.group.fused_shared_expert:
            if is_shared and lane == 0:
                self.dispatched.set_source(token.idx, token.idx, -1)
        return True

    @always_inline
    def _metadata_of_lane(self, token: Token) -> BytePointer:
        return self.recv_buf.unsafe_offset(
            Self.group.metadata_offset(
                token.src_rank, token.idx, self.block.lane, Self.Format.router_top_k
            )
        )

    @always_inline
    def _place_metadata(self, token: Token, row: Int, loaded: LaneBytes) -> Bool:
        comptime router_top_k = Self.Format.router_top_k
        comptime assert router_top_k <= WARP_SIZE, "a lane has one choice of the router"
        var is_late = False
        if self.block.lane < router_top_k:
            var found = await_loaded[True](
                loaded, self._metadata_of_lane(token), token.src_rank, self.block
            )
            is_late = found[1] != self.block.receiving()
            var words = bitcast[DType.uint64, 2](found)
            Self.Format.place_metadata(
                self.dispatched.rows,
                row,
                self.block.lane,
                value_of_word[DType.int32](words[0]),
                value_of_word[DType.float32](words[1]),
            )
        return not any_lane(is_late)
