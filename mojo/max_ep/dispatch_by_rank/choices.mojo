# SPDX-License-Identifier: Apache-2.0
"""The choices of this rank's tokens: where their ids and weights are read from.

Up to `N_LANE_CHOICES` ids are in the registers of each index warp, up to
`N_SHARED_CHOICES` in the shared memory of each block. More stay in global memory. Where
choices are ranks that must be found, the bits of a token's ranks stand in place of ids
(`token_ranks.mojo`).
"""
from max.gpu import block_dim, block_idx, grid_dim, lane_id, thread_idx, WARP_SIZE
from std.math import ceildiv
from std.memory import bitcast

from ..device.shared import shared, SharedInts
from ..device.warp import divmod_32, has_bit, sum_of_lanes
from ..protocol.counters import NO_EXPERT
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import Group, MESSAGE_ALIGN
from ..protocol.router_ids import load_id, load_router_id, rank_of_id
from .roles import N_INDEX_WARPS
from .token_ranks import n_held, RouterLane

comptime N_LANE_CHOICES = 256
"""Choices up to which the lanes of a warp hold all ids."""
comptime N_SHARED_CHOICES = 2048
"""Choices up to which a block keeps ids and weights in its shared memory, if they are
more. For more, `index_large.mojo` is faster."""

# Blocks that a grid on a whole GPU has at least; and the most experts that a block counts
# while it copies ids. On a smaller grid, index warps count the other experts.
comptime _FULL_GRID = 128
comptime _MOST_COUNTED = 4


def n_shared_ids[group: Group]() -> Int:
    comptime n_most = n_held[group](group.max_tokens_per_rank)
    comptime if n_most <= N_SHARED_CHOICES:
        return n_most
    return max(N_SHARED_CHOICES, (N_INDEX_WARPS + 1) * WARP_SIZE + group.n_experts)


def n_counted[group: Group]() -> Int:
    """Returns how many experts a block counts while it copies ids (`share`)."""
    if n_held[group](group.max_tokens_per_rank) <= N_LANE_CHOICES:
        return 0
    return min(ceildiv(group.n_experts, _FULL_GRID), _MOST_COUNTED)


@always_inline
def nth_expert_of_block(n: Int) -> Int:
    """It may be past the last one."""
    return Int(block_idx.x) + n * Int(grid_dim.x)


@fieldwise_init
struct Choice(TrivialRegisterPassable):
    """A choice, as the router gave it; the weight is 0 if combine returns rows."""

    var id: Int32
    var weight: Float32

    comptime NONE = Self(NO_EXPERT, 0)

    @always_inline
    def is_expert[group: Group](self) -> Bool:
        return self.id >= 0 and self.id < Int32(group.n_experts)


struct Choices[group: Group](TrivialRegisterPassable):
    """Ids and router weights of this rank's choices.

    Where a token chooses ranks (in an all-gather every rank), their weights are 1.
    """

    var ids: ImmPointer[Int32]
    """`[n_choices]`; where choices are ranks `[n_tokens][router_top_k]`."""
    var weights: ImmPointer[Float32]
    """`[n_choices]`; read if combine returns sums."""
    var n_choices: Int
    var n_tokens: Int
    var shared_ids: SharedInts
    """Where ranks are found, the bits of each token's."""
    var shared_weights: SharedInts
    """The weights' bits."""
    var counted: SharedInts
    """`[n_counted][WARP_SIZE]`: for each expert that this block counts, how many of the
    ids that each of its warps has copied are of that expert."""

    comptime _loads_weights = Self.group.has_sums and not (
        Self.group.chooses_ranks() or Self.group.late_weights
    )

    @always_inline
    def __init__(
        out self,
        topk_ids: ImmPointer[Int32],
        router_weights: ImmPointer[Float32],
        n_tokens: Int,
    ):
        comptime n_weights = min(N_SHARED_CHOICES, Self.group.n_choices())
        self.ids = topk_ids
        self.weights = router_weights
        self.n_choices = n_tokens * Self.group.top_k
        self.n_tokens = n_tokens
        self.shared_ids = shared[Int32, n_shared_ids[Self.group](), MESSAGE_ALIGN]()
        self.shared_weights = shared[Int32, n_weights if Self._loads_weights else 1]()
        self.counted = shared[Int32, max(n_counted[Self.group]() * WARP_SIZE, 1)]()

    @always_inline
    def are_in_lanes(self) -> Bool:
        """Returns whether the registers of each index warp hold all ids."""
        return self._are_at_most[N_LANE_CHOICES]()

    @always_inline
    def are_shared(self) -> Bool:
        return not self.are_in_lanes() and self._are_at_most[N_SHARED_CHOICES]()

    @always_inline
    def _are_at_most[n: Int](self) -> Bool:
        comptime if n_held[Self.group](Self.group.max_tokens_per_rank) <= n:
            return True
        return n_held[Self.group](self.n_tokens) <= n

    @always_inline
    def load_id(self, choice: Int) -> Int32:
        return load_id[Self.group](self.ids, choice)

    @always_inline
    def id_of_lane(self, token_idx: Int, lane: Int) -> Int32:
        comptime if Self.group.sends_to_all():
            return NO_EXPERT
        comptime if Self.group.finds_ranks():
            return self._rank_of_lane(token_idx, lane)
        if lane >= Self.group.top_k:
            return NO_EXPERT
        var choice = Self.group.choice(token_idx, lane)
        if self.are_shared():
            return self.shared_ids[unsafe_offset=choice]
        return self.load_id(choice)

    @always_inline
    def _rank_of_lane(self, token_idx: Int, lane: Int) -> Int32:
        """Returns a rank of a token, or `NO_EXPERT`; several lanes may return the same.
        """
        if self.are_shared():
            var ranks = UInt32(self.shared_ids[unsafe_offset=token_idx])
            return Int32(lane) if has_bit(ranks, lane) else NO_EXPERT
        return self.load_rank(token_idx, lane)

    @always_inline
    def load_rank(self, token_idx: Int, k: Int) -> Int32:
        """Loads the rank of what the router chose, or returns `NO_EXPERT`."""
        if k >= Self.group.router_top_k:
            return NO_EXPERT
        var place = token_idx * Self.group.router_top_k + k
        return rank_of_id[Self.group](load_router_id[Self.group](self.ids, place))

    @always_inline
    def load_weight(self, choice: Int) -> Float32:
        comptime if not Self.group.has_sums or Self.group.late_weights:
            return 0
        comptime if Self.group.chooses_ranks():
            return 1
        return self.weights[unsafe_offset=choice]

    @always_inline
    def load(self, choice: Int, end: Int) -> Choice:
        if choice >= end:
            return Choice.NONE
        return Choice(self.load_id(choice), self.load_weight(choice))

    @always_inline
    def shared(self, choice: Int) -> Choice:
        comptime if Self.group.finds_ranks():
            var token_idx, rank = divmod_32(choice, Self.group.n_ranks)
            var ranks = UInt32(self.shared_ids[unsafe_offset=token_idx])
            return Choice(Int32(rank) if has_bit(ranks, rank) else NO_EXPERT, 1)
        var id = self.shared_ids[unsafe_offset=choice]
        comptime if Self._loads_weights:
            var bits = self.shared_weights[unsafe_offset=choice]
            return Choice(id, bitcast[DType.float32](bits))
        return Choice(id, self.load_weight(choice))

    @always_inline
    def n_counted_of(self, n: Int, lane: Int) -> Int:
        """Adds up what the warps have counted of an expert, with one warp."""
        var count: Int32 = 0
        if lane < Int(block_dim.x) // WARP_SIZE:
            count = self.counted[unsafe_offset=n * WARP_SIZE + lane]
        return Int(sum_of_lanes(UInt32(count)))

    @always_inline
    def share(self):
        """Copies ids to shared memory if they fit; a block barrier must follow.

        On the way the block counts the choices of its own experts.
        """
        if not self.are_shared():
            return
        comptime if Self.group.finds_ranks():
            self._share_ranks()
            return
        comptime num_threads = Self.group.num_threads
        comptime n_own = n_counted[Self.group]()
        var me = Int(thread_idx.x)
        var last = self.n_choices - 1
        comptime n_of_thread = ceildiv(
            min(N_SHARED_CHOICES, Self.group.n_choices()), num_threads
        )
        comptime n_weights = n_of_thread if Self._loads_weights else 0
        var n_of_own = Array[UInt32, n_own](fill=0)
        # All loads at once; there is nothing after the last choice.
        var ids = Array[Int32, n_of_thread](fill=0)
        var weights = Array[Float32, n_weights](fill=0)
        comptime for i in range(n_of_thread):
            ids[i] = self.load_id(min(me + i * num_threads, last))
        comptime for i in range(n_weights):
            weights[i] = self.weights[unsafe_offset=min(me + i * num_threads, last)]
        comptime for i in range(n_of_thread):
            var choice = me + i * num_threads
            if choice <= last:
                self.shared_ids[unsafe_offset=choice] = ids[i]
                comptime if i < n_weights:
                    var bits = bitcast[DType.int32](weights[i])
                    self.shared_weights[unsafe_offset=choice] = bits
                comptime for n in range(n_own):
                    if ids[i] == Int32(nth_expert_of_block(n)):
                        n_of_own[n] += 1
        comptime for n in range(n_own):
            var count = sum_of_lanes(n_of_own[n])
            if lane_id() == 0:
                var place = n * WARP_SIZE + me // WARP_SIZE
                self.counted[unsafe_offset=place] = Int32(count)

    @always_inline
    def _share_ranks(self):
        """Finds the ranks of all tokens, and copies their bits to shared memory."""
        comptime Lane = RouterLane[Self.group.router_top_k]
        comptime n_warps = Self.group.num_threads // WARP_SIZE
        comptime n_own = n_counted[Self.group]()
        comptime tokens_at_once = n_warps * Lane.tokens_at_once
        comptime most = min(
            N_SHARED_CHOICES // Lane.n_lanes, Self.group.max_tokens_per_rank
        )
        comptime n_loads = ceildiv(most, tokens_at_once)
        var warp_idx = Int(thread_idx.x) // WARP_SIZE
        var first = warp_idx * Lane.tokens_at_once
        var n_of_own = Array[UInt32, n_own](fill=0)
        # All loads at once.
        var ids = Array[Int32, n_loads](fill=NO_EXPERT)
        comptime for i in range(n_loads):
            var mine = Lane.of(first + i * tokens_at_once, Int(lane_id()))
            ids[i] = mine.load[Self.group](self.ids, self.n_tokens)
        comptime for i in range(n_loads):
            if first + i * tokens_at_once < self.n_tokens:
                var mine = Lane.of(first + i * tokens_at_once, Int(lane_id()))
                var ranks = mine.ranks[Self.group](ids[i])
                if mine.k == 0 and mine.token < self.n_tokens:
                    self.shared_ids[unsafe_offset=mine.token] = Int32(ranks)
                    comptime for n in range(n_own):
                        var rank = nth_expert_of_block(n)
                        if rank < Self.group.n_ranks and has_bit(ranks, rank):
                            n_of_own[n] += 1
        comptime for n in range(n_own):
            var count = sum_of_lanes(n_of_own[n])
            if lane_id() == 0:
                self.counted[unsafe_offset=n * WARP_SIZE + warp_idx] = Int32(count)
