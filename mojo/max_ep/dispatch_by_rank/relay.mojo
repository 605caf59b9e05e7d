# SPDX-License-Identifier: Apache-2.0
"""How a rank relays tokens of another host to the other ranks of its own.

One rank of each host gets a token (0037). It has the entries of all choices, so it knows
whose they are. It writes a token where its source would have written it, and publishes
its chunks as the source would have, so nobody else awaits anything new.
"""
import max.gpu.primitives.warp as warp
from max.gpu import lane_id, syncwarp
from std.bit import count_trailing_zeros

from ..device.block import Block
from ..device.warp import bytes_at, has_bit, lanes_like, take_lane
from ..protocol.flags import flag_at, load_relaxed_sys_16, publish, store_relaxed_sys_16
from ..protocol.layout import Group
from .incoming import Steps, Token


@fieldwise_init
struct Relay(TrivialRegisterPassable):
    """The ranks of this host that get a token through this one."""

    var rank: Int32
    """The one that holds choice `lane`'s expert, or -1."""
    var lanes: UInt32
    """The lanes that are the first of those with their rank."""

    @staticmethod
    @always_inline
    def of[group: Group](rank: Int32) -> Self:
        """All lanes call it."""
        comptime if not group.relays:
            return Self(-1, 0)
        var first = count_trailing_zeros(lanes_like(rank))
        var is_first = rank >= 0 and Int(first) == Int(lane_id())
        return Self(rank, warp.vote[DType.uint32](is_first))

    @always_inline
    def are_any(self) -> Bool:
        return self.lanes != 0

    @always_inline
    def store[
        group: Group, //
    ](self, steps: Steps[...], token: Token, first: Int, end: Int, block: Block[group]):
        """Writes some steps, with a warp."""
        var offset = UInt64(group.token_offset(token.src_rank, token.idx))
        var rest = self.lanes
        while rest != 0:
            var rank = Int(warp.shuffle_idx(self.rank, take_lane(rest)))
            # I1: only this rank writes what that source sends to its host. I3: the source
            # has seen that the reader is done before it sent the token here.
            var to = bytes_at(block.recv_bufs[unsafe_offset=rank] + offset)
            var there = Token(to, token.src_rank, token.idx, False, False)
            steps.store(there, first, end, block.lane)

    @always_inline
    def store_metadata[
        group: Group, //, router_top_k: Int
    ](self, token: Token, block: Block[group]):
        """Writes the routing metadata of a token that has come."""
        var k = block.lane
        var offset = UInt64(
            group.metadata_offset(token.src_rank, token.idx, k, router_top_k)
        )
        var own = block.recv_bufs[unsafe_offset=block.my_rank]
        var rest = self.lanes
        while rest != 0:
            var rank = Int(warp.shuffle_idx(self.rank, take_lane(rest)))
            if k < router_top_k:
                var to = block.recv_bufs[unsafe_offset=rank]
                store_relaxed_sys_16(
                    bytes_at(to + offset), load_relaxed_sys_16(bytes_at(own + offset))
                )

    @always_inline
    def publish[group: Group, //](self, token: Token, chunk: Int, block: Block[group]):
        """Publishes a chunk that is stored; the lanes that name ranks do."""
        if self.lanes == 0:
            return
        syncwarp()
        if has_bit(self.lanes, block.lane):
            # I2: after all of the chunk.
            var offset = group.chunk_flag_offset(token.src_rank, token.idx, chunk)
            var recv_buf = block.recv_bufs[unsafe_offset=Int(self.rank)]
            publish(flag_at(bytes_at(recv_buf), offset), block.receiving(), 0)
