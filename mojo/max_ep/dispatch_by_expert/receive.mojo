# SPDX-License-Identifier: Apache-2.0
"""The receive phase of dispatch by expert: counts, from which the place of every row
follows, then messages as they arrive, slot by slot over all pairs.
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, grid_dim, syncwarp, WARP_SIZE

from ..device.block import Block
from ..device.shared import shared, SharedInts
from ..device.warp import any_lane, copy_warp
from ..protocol.arguments import DispatchedRows, place_all_scales
from ..protocol.counters import own_row
from ..protocol.failures import Failure, RECEIVE
from ..protocol.flags import (
    count_of,
    flag_at,
    generation_of,
    load_relaxed_sys,
    message_flag,
    store_release_block,
)
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, TokenFormat
from .roles import NEXT_ITEM, PAIRS_READY
from .send import SendSchedule

comptime _IN_FLIGHT = 8
"""Pairs whose counts a lane has under way at once."""


@fieldwise_init
struct SlotReceiver[group_: Group, Format: TokenFormat](TrivialRegisterPassable):
    """The warps of a block that receive."""

    comptime group = Self.group_
    comptime n_pairs = Self.group.n_pairs()

    var block: Block[Self.group]
    var dispatched: DispatchedRows[Self.group, Self.Format]
    var n_shared: Int
    """Rows of the shared expert, in front of all others."""

    @always_inline
    def run(self):
        comptime group = Self.group
        comptime n_pairs = Self.n_pairs
        var lane = self.block.lane
        var pair_rows = shared[Int32, n_pairs + 1]()
        var pair_counts = shared[Int32, n_pairs]()
        if self.block.warp_idx == group.num_threads // WARP_SIZE - 1:
            var largest = self._read_counts(pair_rows, pair_counts)
            syncwarp()
            if lane == 0:
                pair_rows[unsafe_offset=n_pairs] = Int32(largest)
                store_release_block(self.block.word(PAIRS_READY), 1)
        self.block.await_word(PAIRS_READY, 1)
        # Slot by slot over all pairs: about the order in which messages arrive. After a
        # failure the largest count is negative, and there is no item.
        var n_items = Int(pair_rows[unsafe_offset=n_pairs]) * n_pairs
        while True:
            var item = self.block.next_item(NEXT_ITEM)
            if item >= n_items:
                return
            var slot, pair = divmod(item, n_pairs)
            if slot >= Int(pair_counts[unsafe_offset=pair]):
                continue
            var row = Int(pair_rows[unsafe_offset=pair]) + slot
            var rows = self.dispatched.rows
            comptime if Self.Format.Rows.depend_on_expert:
                var expert = pair // group.n_ranks
                var first_row = pair_rows[unsafe_offset=group.pair(expert, 0)]
                rows = rows.of_expert(expert, Int(first_row))
            if not self._receive_message(rows, pair, slot, row):
                return

    @always_inline
    def _receive_message(
        self, rows: Self.Format.Rows, pair: Int, slot: Int, row: Int
    ) -> Bool:
        comptime group = Self.group
        var lane = self.block.lane
        var message = self.block.recv_buf().unsafe_offset(
            group.dispatch_message_offset(pair, slot)
        )
        var word = self.block.await_message(
            message_flag(message, Self.Format.msg_bytes),
            pair % group.n_ranks,
            group.expert_of_pair(self.block.my_rank, pair),
        )
        if any_lane(generation_of(word) != self.block.receiving()):
            return False
        if lane == 0:
            var token_idx, k = divmod(count_of(word), group.top_k)
            self.dispatched.set_source(row, token_idx, k)
            if pair % group.n_ranks == self.block.my_rank:
                # Combine reads the row where it is. The sender has read the
                # expert that stood here before it published the message.
                self.block.counters.choices(self.block.receiving())[
                    unsafe_offset=count_of(word)
                ] = own_row(row)
        self._place(message, rows, row)
        return True

    @always_inline
    def _place(self, message: BytePointer, rows: Self.Format.Rows, row: Int):
        comptime row_bytes = Self.Format.row_bytes
        var to = rows.values().unsafe_offset(row * row_bytes)
        copy_warp[row_bytes](to, message, self.block.lane)
        place_all_scales[Self.Format](message, rows, row, self.block.lane, WARP_SIZE)

    @always_inline
    def _read_counts(self, pair_rows: SharedInts, pair_counts: SharedInts) -> Int:
        """Waits for the counts of all pairs and lays out the rows, with one warp.

        Returns the largest count, or -1 if the launch cannot go on.
        """
        comptime in_flight = _IN_FLIGHT
        var lane = self.block.lane
        var is_first_block = block_idx.x == 0
        var n_rows = self.n_shared
        var largest = 0
        var is_late = False
        for first in range(0, Self.n_pairs, WARP_SIZE * in_flight):
            var counts = Array[Int32, in_flight](fill=0)
            var before = Array[Int32, in_flight](fill=0)
            self._await_counts(first, counts, is_late)
            comptime for i in range(in_flight):
                largest = max(largest, Int(counts[i]))
            # All scans are under way at once; only then they are put together.
            comptime for i in range(in_flight):
                before[i] = warp.prefix_sum[exclusive=True](counts[i])
            comptime for i in range(in_flight):
                var pair = first + i * WARP_SIZE + lane
                if pair < Self.n_pairs:
                    pair_rows[unsafe_offset=pair] = Int32(n_rows) + before[i]
                    pair_counts[unsafe_offset=pair] = counts[i]
                n_rows += Int(
                    warp.shuffle_idx(before[i] + counts[i], UInt32(WARP_SIZE - 1))
                )
        largest = Int(warp.max(Int32(largest)))
        syncwarp()
        self._lay_out_rows(pair_rows, pair_counts)
        var n_needed = self.dispatched.tables.n_rows_needed(n_rows)
        if is_first_block and lane == 0:
            self.dispatched.tables.write_ends(n_rows)
            self.block.counters.set_pair_rows(Self.n_pairs, n_needed, largest)
        var is_missing = any_lane(is_late)
        if not is_missing and n_needed <= self.dispatched.n_rows_max:
            return largest
        if is_first_block:
            syncwarp()
            self.dispatched.tables.write_no_rows(lane, WARP_SIZE)
        if not is_missing and lane == 0:
            self.block.refuse(
                Failure.TOO_MANY_ROWS, RECEIVE, 0, n_needed, self.dispatched.n_rows_max
            )
        return -1

    @always_inline
    def _await_counts(
        self, first: Int, mut counts: Array[Int32, _IN_FLIGHT], mut is_late: Bool
    ):
        """Waits for the counts of some pairs; those that do not come are 0."""
        comptime group = Self.group
        comptime in_flight = _IN_FLIGHT
        var lane = self.block.lane
        var my_rank = self.block.my_rank
        var my_counts = self.block.my_counts()
        var end = group.n_experts_on(my_rank) * group.n_ranks
        var words = Array[UInt64, in_flight](fill=0)
        var n_polls = 0
        var missing = 0
        # All words that are missing are polled again at once.
        while missing >= 0 and not is_late:
            comptime for i in range(in_flight):
                var pair = first + i * WARP_SIZE + lane
                if pair < end and generation_of(words[i]) != self.block.receiving():
                    words[i] = load_relaxed_sys(
                        flag_at(my_counts, group.dispatch_count_offset(pair))
                    )
            missing = -1
            comptime for i in range(in_flight):
                var pair = first + i * WARP_SIZE + lane
                if pair < end and generation_of(words[i]) != self.block.receiving():
                    missing = pair
            if self.block.give_up_if_late(n_polls, missing % group.n_ranks):
                is_late = missing >= 0
        if is_late:
            var flag = flag_at(my_counts, group.dispatch_count_offset(missing))
            self.block.fail(
                Failure.NO_COUNT,
                missing % group.n_ranks,
                group.expert_of_pair(my_rank, missing),
                load_relaxed_sys(flag),
            )
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + lane
            if pair < end and not is_late:
                counts[i] = Int32(count_of(words[i]))

    @always_inline
    def _lay_out_rows(self, pair_rows: SharedInts, pair_counts: SharedInts):
        comptime group = Self.group
        var is_first_block = block_idx.x == 0
        var first_of_lane = self.block.lane
        comptime if not group.is_padded:
            if not is_first_block:
                first_of_lane = group.n_local_experts()
        for local_expert in range(first_of_lane, group.n_local_experts(), WARP_SIZE):
            var first = group.pair(local_expert, 0)
            var n_before = Int(pair_rows[unsafe_offset=first])
            var first_row = self.dispatched.tables.first_row(local_expert, n_before)
            var n_expert_rows = 0
            for pair in range(first, first + group.n_ranks):
                var count = Int(pair_counts[unsafe_offset=pair])
                var row = first_row + n_expert_rows
                comptime if group.is_padded:
                    pair_rows[unsafe_offset=pair] = Int32(row)
                if is_first_block:
                    self.block.counters.set_pair_rows(pair, row, count)
                    self.dispatched.tables.write_pair(pair, n_expert_rows, count)
                n_expert_rows += count
            if is_first_block:
                self.dispatched.tables.write_expert(
                    local_expert, first_row, n_expert_rows
                )

    @always_inline
    def place_own_tokens(self):
        """Copies what this block has staged to the shared expert's rows."""
        comptime group = Self.group
        comptime n_warps = group.num_threads // WARP_SIZE
        var n_blocks = Int(grid_dim.x)
        var n_tokens = min(self.n_shared, self.dispatched.n_rows_max)
        var schedule = SendSchedule.of(self.n_shared, group.top_k, n_blocks)
        var recv_buf = self.block.recv_buf()
        for token_idx in range(self.block.warp_idx, n_tokens, n_warps):
            # The block that sends the first item of a token stages it.
            if token_idx * schedule.n_per_token % n_blocks != Int(block_idx.x):
                continue
            var token = recv_buf.unsafe_offset(group.staged_from_recv(0, token_idx))
            self._place(token, self.dispatched.rows, token_idx)
            if self.block.lane == 0:
                self.dispatched.set_source(token_idx, token_idx, -1)
