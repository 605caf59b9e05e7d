# SPDX-License-Identifier: Apache-2.0
"""The index of few choices: entries and counts, one by one.

To publish the entry of a choice, a warp counts the earlier choices of the same expert.
To publish the count of an expert, it counts all its choices.

Ids in registers are counted before the launch has read its header. While a block copies
ids to shared memory, it counts the choices of up to four experts, and publishes those
counts before any token: queued behind tokens they would arrive late.
"""
from max.gpu import block_idx, grid_dim, lane_id, WARP_SIZE

from ..device.block import Block
from ..device.shared import SharedInts
from ..device.warp import any_lane, divmod_32, has_bit, sum_of_lanes
from ..protocol.counters import NO_EXPERT
from ..protocol.layout import Group, MESSAGE_ALIGN
from .choices import Choice, Choices, n_counted, N_LANE_CHOICES, nth_expert_of_block
from .publish import publish_count, publish_entry
from .roles import N_INDEX_WARPS
from .token_ranks import RouterLane

comptime _N_LANE_IDS = N_LANE_CHOICES // WARP_SIZE
"""Ids of a lane, if lanes hold them."""

# Ids that a lane loads at once from shared memory.
comptime _IDS_AT_ONCE = 4


@fieldwise_init
struct Item(TrivialRegisterPassable):
    """What a warp publishes at once: an expert's count, or a choice's entry."""

    var number: Int
    """Its number: the counts of all experts come first, because a receiver needs them
    before it places a row; the entries of all choices follow."""
    var choice: Choice
    """For a count, one that holds only the expert."""
    var n_equal: Int
    """How many choices have the expert; for an entry, of those before the choice."""

    @always_inline
    def publish[group: Group](self, block: Block[group]):
        var number = self.number - group.n_experts
        if number >= 0:
            publish_entry(
                number, self.choice, self.n_equal, block, block.lane, WARP_SIZE
            )
        elif block.lane == 0:
            publish_count(self.number, self.n_equal, block)


struct LaneIndex[group: Group]:
    """The ids of all choices in the lanes of a warp, and the next item."""

    var choices: Choices[Self.group]
    var ids: Array[Int32, _N_LANE_IDS]
    """Lane `l` has the ids of the choices `l`, `WARP_SIZE + l`, and so on. Where ranks
    are found, the first lane of each token has the bits of its ranks."""
    var next: Item

    @always_inline
    def __init__(out self, choices: Choices[Self.group]):
        self.choices = choices
        self.ids = Array[Int32, _N_LANE_IDS](fill=NO_EXPERT)
        self.next = Item(Int.MAX, Choice.NONE, 0)

    @always_inline
    def prefetch(mut self, indexer: Int):
        """Loads all ids and counts the first item, with an index warp."""
        comptime if Self.group.finds_ranks():
            self._prefetch_ranks()
            self._count(Int(block_idx.x) + indexer * Int(grid_dim.x))
            return
        comptime for i in range(_N_LANE_IDS):
            var number = i * WARP_SIZE + Int(lane_id())
            if number < self.choices.n_choices:
                self.ids[i] = self.choices.load_id(number)
        self._count(Int(block_idx.x) + indexer * Int(grid_dim.x))

    @always_inline
    def _prefetch_ranks(mut self):
        var n_tokens = self.choices.n_tokens
        comptime for i in range(_N_LANE_IDS):
            self.ids[i] = self._router_lane(i).load[Self.group](
                self.choices.ids, n_tokens
            )
        comptime for i in range(_N_LANE_IDS):
            var mine = self._router_lane(i)
            if mine.first < n_tokens:
                var ranks = mine.ranks[Self.group](self.ids[i])
                self.ids[i] = Int32(ranks) if mine.k == 0 else 0

    @always_inline
    def _router_lane(self, i: Int) -> RouterLane[Self.group.router_top_k]:
        comptime Lane = RouterLane[Self.group.router_top_k]
        return Lane.of(i * Lane.tokens_at_once, Int(lane_id()))

    @always_inline
    def _count_ranks(mut self, number: Int):
        """Counts the tokens that go to the rank of an item."""
        var choice_idx = number - Self.group.n_experts
        var rank = number
        var end = self.choices.n_tokens
        if choice_idx >= 0:
            end, rank = divmod_32(choice_idx, Self.group.n_ranks)
        var n_equal: UInt32 = 0
        var is_chosen = False
        comptime for i in range(_N_LANE_IDS):
            var token_idx = self._router_lane(i).token
            if has_bit(UInt32(self.ids[i]), rank):
                if token_idx < end:
                    n_equal += 1
                is_chosen = is_chosen or token_idx == end
        var id = Int32(rank)
        if choice_idx >= 0 and not any_lane(is_chosen):
            id = NO_EXPERT
        self.next = Item(number, Choice(id, 1), Int(sum_of_lanes(n_equal)))

    @always_inline
    def _count(mut self, number: Int):
        comptime if Self.group.finds_ranks():
            self._count_ranks(number)
            return
        var choice_idx = number - Self.group.n_experts
        var choice = Choice(Int32(number), 0)
        var end = self.choices.n_choices
        if choice_idx >= 0:
            end = min(end, choice_idx)
            if choice_idx < self.choices.n_choices:
                choice = self.choices.load(choice_idx, Int.MAX)
        var n_equal: UInt32 = 0
        comptime for i in range(_N_LANE_IDS):
            if i * WARP_SIZE + Int(lane_id()) < end and self.ids[i] == choice.id:
                n_equal += 1
        self.next = Item(number, choice, Int(sum_of_lanes(n_equal)))

    @always_inline
    def publish(mut self, block: Block[Self.group]):
        while self.next.number < Self.group.n_experts + self.choices.n_choices:
            self.next.publish(block)
            self._count(self.next.number + N_INDEX_WARPS * Int(grid_dim.x))


@always_inline
def index_one_by_one[
    group: Group
](choices: Choices[group], block: Block[group], indexer: Int):
    """Publishes counts and entries of shared choices, with an index warp."""
    # Counts first: a receiver needs all of them before it places a row.
    comptime n_own = n_counted[group]()
    comptime assert n_own <= N_INDEX_WARPS, "a counted expert has no warp"
    comptime for n in range(n_own):
        var expert = nth_expert_of_block(n)
        if indexer == N_INDEX_WARPS - 1 - n and expert < group.n_experts:
            var count = choices.n_counted_of(n, block.lane)
            if block.lane == 0:
                publish_count(expert, count, block)
    for number in range(
        min(n_own * Int(grid_dim.x), group.n_experts)
        + Int(block_idx.x)
        + indexer * Int(grid_dim.x),
        group.n_experts + choices.n_choices,
        N_INDEX_WARPS * Int(grid_dim.x),
    ):
        var choice = Choice(Int32(number), 0)
        var end = choices.n_choices
        if number >= group.n_experts:
            end = number - group.n_experts
            choice = choices.shared(end)
        comptime are_bits = group.finds_ranks()
        comptime if are_bits:
            end = Int(UInt32(end) // UInt32(group.n_ranks))
        var n_equal = _count_equal[are_bits](
            choices.shared_ids, choice.id, end, block.lane
        )
        Item(number, choice, n_equal).publish(block)


@always_inline
def _count_equal[
    are_bits: Bool
](ids: SharedInts, id: Int32, end: Int, lane: Int) -> Int:
    """Counts the ids that are equal to one, or that have its bit, with one warp."""

    @always_inline
    def is_equal(found: Int32) {imm} -> Bool:
        comptime if are_bits:
            return id >= 0 and has_bit(UInt32(found), Int(id))
        return found == id

    var n_equal: UInt32 = 0
    var whole = end // _IDS_AT_ONCE * _IDS_AT_ONCE
    for first in range(lane * _IDS_AT_ONCE, whole, WARP_SIZE * _IDS_AT_ONCE):
        var some = ids.unsafe_load[width=_IDS_AT_ONCE, alignment=MESSAGE_ALIGN](first)
        comptime for i in range(_IDS_AT_ONCE):
            if is_equal(some[i]):
                n_equal += 1
    # Fewer than a vector has.
    if whole + lane < end and is_equal(ids[unsafe_offset=whole + lane]):
        n_equal += 1
    return Int(sum_of_lanes(n_equal))
