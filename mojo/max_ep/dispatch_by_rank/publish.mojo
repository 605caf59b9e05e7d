# SPDX-License-Identifier: Apache-2.0
"""Publishes entries, counts, numbers of tokens and routing metadata.

Each word holds its generation, so they need no order between their stores. To ranks of
other hosts they are put together once they are staged (`put_index.mojo`).
"""
from max.gpu import block_idx, grid_dim, lane_id, WARP_SIZE
from std.memory import bitcast

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.warp import bytes_at, divmod_32, has_bit
from ..protocol.counters import NO_EXPERT, sent_choice
from ..protocol.entries import entry_word, NO_ENTRY_EXPERT, NO_POSITION, value_word
from ..protocol.failures import Failure, SEND
from ..protocol.flags import count_of, flag_at, store_relaxed_sys, store_relaxed_sys_16
from ..protocol.layout import count_offset, Group
from ..protocol.router_ids import load_router_id
from ..protocol.token_format import LaneBytes
from .choices import Choice, Choices
from .roles import N_INDEX_WARPS
from .token_ranks import RouterLane


@always_inline
def two_words(first: UInt64, second: UInt64) -> LaneBytes:
    return bitcast[DType.uint32, 4](SIMD[DType.uint64, 2](first, second))


@always_inline
def publish_n_tokens[group: Group](n_tokens: Int, block: Block[group]):
    """Publishes to every rank how many tokens this one sends, with one warp."""
    # I3, for numbers of tokens.
    if not await_readers(block):
        return
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        comptime if group.spans_hosts():
            if block.is_far(rank):  # `put_index` says it
                continue
        store_relaxed_sys(
            block.flag(rank, group.dispatch_n_tokens_offset(block.my_rank)),
            block.sending(),
            n_tokens,
        )


@always_inline
def publish_count[group: Group](expert: Int, n_choices: Int, block: Block[group]):
    """Publishes to an expert's rank how many choices it gets, with one lane."""
    var dst_rank, local_expert = divmod_32(expert, group.n_local_experts())
    var pair = group.pair(local_expert, block.my_rank)
    var rank = dst_rank
    var offset = count_offset[group](pair)
    comptime if group.spans_hosts():
        if block.is_far(dst_rank):  # it waits for `put_index`
            rank = block.my_rank
            offset = group.staged_count_offset(expert)
    store_relaxed_sys(
        block.flag(rank, offset),
        block.sending(),
        min(n_choices, group.max_tokens_per_rank),
    )


@always_inline
def publish_entry[
    group: Group
](
    number: Int,
    choice: Choice,
    position: Int,
    block: Block[group],
    lane: Int,
    n_lanes: Int,
):
    """Publishes a choice's entry to every rank, even if the choice has no expert. Where
    ranks are found, to the choice's rank and this one. `n_lanes` lanes share the ranks.
    """
    var generation = block.sending()
    var is_expert = choice.is_expert[group]()
    var has_place = is_expert and position < group.max_tokens_per_rank
    # A choice that gets a row on this rank is recorded by who makes the row.
    var owner_rank = Int(choice.id) // group.n_local_experts()
    var is_recorded = group.has_sums or not has_place or owner_rank != block.my_rank
    if lane == 0 and is_recorded:
        block.counters.choices(generation)[unsafe_offset=number] = sent_choice(
            choice.id, position, group
        ) if has_place else NO_EXPERT
    # The token of a choice without a place is sent like any other, so its entry
    # names the expert.
    var word = entry_word(
        generation,
        Int(choice.id) if is_expert else NO_ENTRY_EXPERT,
        position if has_place else NO_POSITION,
    )
    var offset = UInt64(group.entry_offset(block.my_rank, number))
    comptime n_readers = 2 if group.finds_ranks() else group.n_ranks
    for i in range(lane, n_readers, n_lanes):
        # Not all sources begin with the same rank.
        var rank = group.rank_of_relative(block.my_rank, 1 + i)
        comptime if group.finds_ranks():
            rank = number % group.n_ranks if i == 0 else block.my_rank
            if i == 1 and number % group.n_ranks == rank:
                continue
        comptime if group.spans_hosts():
            if block.is_far(rank):  # `put_index` sends this rank's own entries
                continue
        var to = bytes_at(block.recv_bufs[unsafe_offset=rank] + offset)
        # I1: only this rank writes entries of its choices.
        comptime if group.has_sums:
            store_relaxed_sys_16(
                to, two_words(word, value_word(generation, choice.weight))
            )
        else:
            store_relaxed_sys(flag_at(to, 0), generation, count_of(word))
    if not has_place:
        if choice.id != NO_EXPERT and lane == 0:
            block.refuse(
                Failure.DROPPED,
                SEND,
                Int(choice.id),
                number // group.top_k,
                number % group.top_k,
            )


@fieldwise_init
struct MetadataLane[group: Group, router_top_k: Int](TrivialRegisterPassable):
    """How a lane of an index warp sends routing metadata, of which the first depends on
    arguments alone."""

    comptime Lane = RouterLane[Self.router_top_k]

    var choices: Choices[Self.group]
    var id: Int32
    var weight: Float32

    @always_inline
    def __init__(out self, choices: Choices[Self.group]):
        self.choices = choices
        self.id = NO_EXPERT
        self.weight = 0

    @always_inline
    def prefetch(mut self, indexer: Int):
        self._load(self._first(indexer, Int(lane_id())))

    @always_inline
    def _first(self, indexer: Int, lane: Int) -> Self.Lane:
        var warp_idx = Int(block_idx.x) + indexer * Int(grid_dim.x)
        return Self.Lane.of(warp_idx * Self.Lane.tokens_at_once, lane)

    @always_inline
    def _load(mut self, mine: Self.Lane):
        if mine.is_id(self.choices.n_tokens):
            self.id = load_router_id[Self.group](self.choices.ids, mine.place())
            self.weight = self.choices.weights[unsafe_offset=mine.place()]

    @always_inline
    def send(mut self, block: Block[Self.group], indexer: Int):
        """Sends metadata to each rank that gets its token, with one of the index warps.
        """
        # I3, for routing metadata.
        if not await_readers(block):
            return
        var mine = self._first(indexer, block.lane)
        while mine.first < self.choices.n_tokens:
            self._send(mine, block)
            comptime of_warps = N_INDEX_WARPS * Self.Lane.tokens_at_once
            mine = Self.Lane.of(mine.first + of_warps * Int(grid_dim.x), block.lane)
            self.id = NO_EXPERT
            self._load(mine)

    @always_inline
    def _send(self, mine: Self.Lane, block: Block[Self.group]):
        var ranks = UInt32.MAX
        comptime if Self.group.finds_ranks():
            ranks = mine.ranks[Self.group](self.id)
        if not mine.is_id(self.choices.n_tokens):
            return
        var generation = block.sending()
        var words = two_words(
            value_word(generation, self.id), value_word(generation, self.weight)
        )
        var offset = UInt64(
            Self.group.metadata_offset(
                block.my_rank, mine.token, mine.k, Self.router_top_k
            )
        )
        for i in range(Self.group.n_ranks):
            var rank = Self.group.rank_of_relative(block.my_rank, 1 + i)
            comptime if Self.group.finds_ranks():
                if not has_bit(ranks, rank):
                    continue
            # I1: only this rank writes the metadata of its tokens.
            store_relaxed_sys_16(
                bytes_at(block.recv_bufs[unsafe_offset=rank] + offset), words
            )
