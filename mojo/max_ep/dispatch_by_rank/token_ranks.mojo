# SPDX-License-Identifier: Apache-2.0
"""The ranks of tokens, where choices are ranks: those that have an expert which the
router chose (`Group.finds_ranks`).

Lanes load the router's ids of some tokens, each id once, and combine them to a bit for
each rank. Neighbouring lanes load neighbouring ids, so a load touches few lines.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE
from std.bit import log2_ceil

from ..protocol.counters import NO_EXPERT
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import Group
from ..protocol.router_ids import load_router_id, rank_of_id


def n_lanes_of_token[router_top_k: Int]() -> Int:
    """Counts the lanes that load a token's ids: a power of two."""
    return 1 << log2_ceil(max(router_top_k, 1))


def n_held[group: Group](n_tokens: Int) -> Int:
    """Counts what lanes hold of some tokens: ids, and for each token up to a power of
    two if they find its ranks."""
    comptime if group.finds_ranks():
        return n_tokens * n_lanes_of_token[group.router_top_k]()
    return group.choice(n_tokens, 0)


@fieldwise_init
struct RouterLane[router_top_k: Int](TrivialRegisterPassable):
    """Which id of which token a lane loads."""

    var first: Int
    """The first of the tokens that the warp loads."""
    var token: Int
    var k: Int

    comptime n_lanes = n_lanes_of_token[Self.router_top_k]()
    comptime tokens_at_once = WARP_SIZE // Self.n_lanes
    """Tokens whose ids a warp loads at once."""

    @staticmethod
    @always_inline
    def of(first: Int, lane: Int) -> Self:
        """Describes a lane of a warp that loads the ids of the tokens from `first` on.
        """
        comptime assert Self.router_top_k <= WARP_SIZE, "a lane has one id of a token"
        return Self(
            first,
            first + Int(UInt32(lane) // UInt32(Self.n_lanes)),
            Int(UInt32(lane) % UInt32(Self.n_lanes)),
        )

    @always_inline
    def is_id(self, n_tokens: Int) -> Bool:
        comptime if Self.n_lanes == Self.router_top_k:
            return self.token < n_tokens
        return self.token < n_tokens and self.k < Self.router_top_k

    @always_inline
    def place(self) -> Int:
        return self.token * Self.router_top_k + self.k

    @always_inline
    def load[group: Group](self, ids: ImmPointer[Int32], n_tokens: Int) -> Int32:
        """Loads the id, or returns `NO_EXPERT` if there is none."""
        if not self.is_id(n_tokens):
            return NO_EXPERT
        return load_router_id[group](ids, self.place())

    @always_inline
    def ranks[group: Group](self, id: Int32) -> UInt32:
        """Combines the ids that the lanes of a token hold to the bits of its ranks; all
        lanes call it."""
        comptime assert group.n_ranks <= 32, "a rank has a bit"
        var rank = rank_of_id[group](id)
        var bits = UInt32(1) << UInt32(rank) if rank >= 0 else UInt32(0)
        comptime for step in range(log2_ceil(Self.router_top_k)):
            bits |= warp.shuffle_xor(bits, UInt32(1 << step))
        return bits
