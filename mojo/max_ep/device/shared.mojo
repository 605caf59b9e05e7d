# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a block: numbers, words, and the addresses of all ranks' buffers."""
import max.gpu.primitives.warp as warp
from max.gpu import block_dim, thread_idx
from std.memory import unsafe_stack_allocation
from std.sys import align_of

from ..protocol.call import Buffers
from ..protocol.counters import Word
from ..protocol.flags import SharedPointer
from ..protocol.kernel_argument import MutPointer
from ..protocol.layout import Group
from ..protocol.transport import mapped_address

comptime SharedInts = SharedPointer[Int32]

comptime SharedAddresses = SharedPointer[UInt64]
"""Addresses of all ranks' buffers, in the shared memory of a block: a kernel
argument that is indexed at run time would be copied to local memory."""


@always_inline
def shared[T: AnyType, n: Int, alignment: Int = align_of[T]()]() -> SharedPointer[T]:
    """Allocates shared memory; it is not initialized."""
    return unsafe_stack_allocation[
        n, T, alignment=alignment, address_space=AddressSpace.SHARED
    ]()


@always_inline
def own_of[
    T: AnyType, p2p_world_size: Int, //
](buffers: Array[MutPointer[T], p2p_world_size], my_rank: Int) -> UInt64:
    """Finds this rank's buffer among those of its host."""
    var own: UInt64 = 0
    comptime for i in range(p2p_world_size):
        if my_rank % p2p_world_size == i:
            own = UInt64(Int(buffers[i]))
    return own


@always_inline
def share_addresses[
    T: AnyType, p2p_world_size: Int, //, n_ranks: Int
](
    buffers: Array[MutPointer[T], p2p_world_size], my_rank: Int, offset: Int = 0
) -> SharedAddresses:
    """Copies kernel arguments to shared memory; a block barrier must follow."""
    var table = shared[UInt64, n_ranks]()
    comptime if p2p_world_size < n_ranks:
        var own = own_of(buffers, my_rank) + UInt64(offset)
        for rank in range(Int(thread_idx.x), n_ranks, Int(block_dim.x)):
            var address: UInt64 = 0
            if rank == my_rank:
                address = own
            elif rank // p2p_world_size == my_rank // p2p_world_size:
                address = mapped_address(own, rank)
            table[unsafe_offset=rank] = address
    else:
        comptime for i in range(n_ranks):
            if thread_idx.x == i:
                table[unsafe_offset=i] = UInt64(Int(buffers[i]) + offset)
    return table


@fieldwise_init
struct SharedBuffers(TrivialRegisterPassable):
    """The buffers of all ranks that a launch uses."""

    var recv_bufs: SharedAddresses
    """Receive buffers, of dispatch or of combine."""
    var counts: SharedAddresses
    """Counts buffers of dispatch: done words of both directions are there."""

    @staticmethod
    @always_inline
    def of[group: Group](buffers: Buffers[group], word: Int32) -> Self:
        """Copies addresses to shared memory; `word`: this lane's of the header."""
        var my_rank = 0
        comptime if group.spans_hosts():
            my_rank = Int(warp.shuffle_idx(word, UInt32(Word.MY_RANK)))
        comptime n_ranks = group.n_ranks
        comptime from_given = group.dispatch_counts_from_combine_counts() if (
            group.is_combine()
        ) else 0
        return {
            share_addresses[n_ranks](buffers.recv_bufs, my_rank),
            share_addresses[n_ranks](buffers.counts, my_rank, from_given),
        }
