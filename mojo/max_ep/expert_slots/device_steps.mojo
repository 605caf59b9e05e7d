# SPDX-License-Identifier: Apache-2.0
"""Steps that dispatch and combine of GPU ranks share.

A launch is a grid of blocks that are all resident at once, because in the fused
forms some wait for what others send. A warp is the unit of work: it moves one
message, lane by lane, 16 bytes an access. `docs/protocol.md` holds the argument
why waits end and buffers may be reused.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    WARP_SIZE,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    lane_id,
    syncwarp,
    thread_idx,
    warp_id,
)
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import (
    _RegisterPackType,
    align_of,
    inlined_assembly,
    is_nvidia_gpu,
)

from ..counters import (
    BROKEN_WORD,
    EPLocalSyncCounters,
    N_HEADER_WORDS,
    wanted_word,
)
from ..failures import (
    NO_MESSAGE,
    NOT_READ,
    WRONG_COUNTERS,
    is_fatal,
    note_failure,
)
from ..flags import (
    DeviceDeadline,
    FlagPointer,
    SPINS_BETWEEN_LOOKS,
    SharedWord,
    arrive,
    block_add,
    block_peek,
    flag_at,
    generation_of,
    has_reached,
    peek,
    publish,
)
from ..layout import Group, FLAG_BYTES, MESSAGE_ALIGN
from ..layout import n_experts_on_rank
from ..token_format import BytePointer, LaneBytes
from ..transport import mapped_address, put_flag

comptime SharedInts = Pointer[
    Int32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Numbers in the shared memory of a block."""

comptime SharedAddresses = Pointer[
    UInt64, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Addresses of all ranks' buffers, in the shared memory of a block: a kernel
argument that is indexed at run time would be copied to local memory."""

comptime ACCESSES_IN_FLIGHT = 7
"""16-byte loads a lane has under way: 28 registers, and it divides the 28
steps of the 7168 bfloat16 of a large model's token."""


@always_inline
def load16(p: Pointer[mut=_, UInt8, _]) -> LaneBytes:
    """Loads 16 bytes."""
    return p.unsafe_bitcast[UInt32]().unsafe_load[
        width=4, alignment=MESSAGE_ALIGN, invariant=False
    ]()


@always_inline
def load16_if(p: Pointer[mut=_, UInt8, _], is_there: Bool) -> LaneBytes:
    """Loads 16 bytes, or none, without a branch; NVIDIA only.

    Of memory that this launch does not write: nothing orders it with stores.
    """
    comptime assert is_nvidia_gpu(), "this is PTX"
    var words = inlined_assembly[
        (
            "{ .reg .pred p; setp.ne.u32 p, $5, 0;"
            " @p ld.global.v4.u32 {$0, $1, $2, $3}, [$4]; }"
        ),
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,l,r",
        has_side_effect=True,
    ](p, UInt32(1) if is_there else UInt32(0))
    return {words[0], words[1], words[2], words[3]}


@always_inline
def store16(p: BytePointer, bytes: LaneBytes):
    """Stores 16 bytes."""
    p.unsafe_bitcast[UInt32]().unsafe_store[alignment=MESSAGE_ALIGN](0, bytes)


@always_inline
def shuffle_address(address: UInt64, src_lane: Int) -> UInt64:
    """Hands one lane's address to the whole warp."""
    var low = warp.shuffle_idx(UInt32(address & 0xFFFF_FFFF), UInt32(src_lane))
    var high = warp.shuffle_idx(UInt32(address >> 32), UInt32(src_lane))
    return (UInt64(high) << 32) | UInt64(low)


@always_inline
def bytes_at(address: UInt64) -> BytePointer:
    """Makes a pointer of an address."""
    return BytePointer(unsafe_from_address=Int(address))


@always_inline
def shared_words[n: Int]() -> SharedWord:
    """Allocates words in shared memory; they are not initialized."""
    return unsafe_stack_allocation[
        n, UInt32, address_space=AddressSpace.SHARED
    ]()


@always_inline
def shared_ints[n: Int, alignment: Int = align_of[Int32]()]() -> SharedInts:
    """Allocates numbers in shared memory; they are not initialized."""
    return unsafe_stack_allocation[
        n, Int32, alignment=alignment, address_space=AddressSpace.SHARED
    ]()


@always_inline
def rank_of(counters: EPLocalSyncCounters, my_rank: Int32) -> Int:
    """Finds out which rank a launch is for."""
    return Int(my_rank) if my_rank >= 0 else counters.my_rank()


@always_inline
def own_of[
    T: AnyType, p2p_world_size: Int, //
](
    buffers: Array[Pointer[T, MutUntrackedOrigin], p2p_world_size], my_rank: Int
) -> UInt64:
    """Finds this rank's buffer among those of its host."""
    var own: UInt64 = 0
    comptime for i in range(p2p_world_size):
        if my_rank % p2p_world_size == i:
            own = UInt64(Int(buffers[i]))
    return own


@always_inline
def share_addresses[
    T: AnyType, p2p_world_size: Int, //, n_ranks: Int, use_shmem: Bool
](
    buffers: Array[Pointer[T, MutUntrackedOrigin], p2p_world_size],
    my_rank: Int,
    offset: Int = 0,
) -> SharedAddresses:
    """Copies kernel arguments to shared memory; a block barrier must follow."""
    var table = unsafe_stack_allocation[
        n_ranks, UInt64, address_space=AddressSpace.SHARED
    ]()
    comptime if use_shmem:
        var own = own_of(buffers, my_rank)
        for rank in range(Int(thread_idx.x), n_ranks, Int(block_dim.x)):
            var address: UInt64 = 0
            if rank == my_rank:
                address = own
            elif rank // p2p_world_size == my_rank // p2p_world_size:
                address = mapped_address(own, rank)
            table[unsafe_offset=rank] = address
    else:
        comptime assert p2p_world_size == n_ranks, "no pointers to other hosts"
        comptime for i in range(n_ranks):
            if thread_idx.x == i:
                table[unsafe_offset=i] = UInt64(Int(buffers[i]) + offset)
    return table


@always_inline
def copy_warp[
    n_bytes: Int
](dest: BytePointer, src: Pointer[UInt8, _], lane: Int):
    """Copies bytes with all lanes of a warp."""
    comptime n_vectors = n_bytes // MESSAGE_ALIGN
    comptime in_flight = ACCESSES_IN_FLIGHT
    for first in range(0, n_vectors, WARP_SIZE * in_flight):
        var parts = Array[LaneBytes, in_flight](fill=0)
        comptime for i in range(in_flight):
            var vector = first + i * WARP_SIZE + lane
            if vector < n_vectors:
                parts[i] = load16(src.unsafe_offset(vector * MESSAGE_ALIGN))
        comptime for i in range(in_flight):
            var vector = first + i * WARP_SIZE + lane
            if vector < n_vectors:
                store16(dest.unsafe_offset(vector * MESSAGE_ALIGN), parts[i])


@always_inline
def take_turn(next: SharedWord, lane: Int) -> Int:
    """Takes the next of what a block's warps share out; all lanes call it."""
    var turn: UInt32 = 0
    if lane == 0:
        turn = block_add(next, 1)
    return Int(warp.shuffle_idx(turn, UInt32(0)))


@always_inline
def any_lane(condition: Bool) -> Bool:
    """Tells whether a condition holds in any lane of the warp."""
    comptime if WARP_SIZE == 32:
        return warp.vote[DType.uint32](condition) != 0
    else:
        return warp.vote[DType.uint64](condition) != 0


@always_inline
def can_start[group: Group](counters: EPLocalSyncCounters, phase: Int) -> Bool:
    """Tells whether a launch may touch anything but its counters and results.

    The launcher has made sure that the counters are as many as the launch
    needs, so their header may be read, and the failure noted there, whoever
    they belong to. No word that is looked at changes during a launch, unless
    all its warps leave early: so none waits for one that has left.
    """
    var found: Int32 = 0
    if lane_id() < N_HEADER_WORDS:
        found = counters.words[unsafe_offset=lane_id()]
    return is_in_order[group](found, counters, phase)


@always_inline
def is_in_order[
    group: Group
](found: Int32, counters: EPLocalSyncCounters, phase: Int) -> Bool:
    """Tells whether the header of counters allows a launch; see `can_start`."""
    comptime assert N_HEADER_WORDS <= WARP_SIZE, "a lane looks at one word"
    var lane = Int(lane_id())
    var wanted: Int32 = 0
    if lane < N_HEADER_WORDS:
        wanted = wanted_word(lane, found, group)
    if any_lane(found != wanted):
        if found != wanted:
            note_failure(
                counters.failure(),
                WRONG_COUNTERS,
                phase,
                -1,
                lane,
                0,
                0,
                Int(found),
                Int(wanted),
            )
        return False
    return not any_lane(lane == BROKEN_WORD and found != 0)


@always_inline
def await_done_words[
    group: Group
](
    my_counts: BytePointer,
    done_offset: Int,
    generation: UInt32,
    phase: Int,
    deadline: DeviceDeadline,
    counters: EPLocalSyncCounters,
    lane: Int,
) -> Bool:
    """Waits until every peer has read what this rank sent it last."""
    var is_met = True
    for rank in range(lane, group.n_ranks, WARP_SIZE):
        # I3: no slot is written before its last reader is done with it.
        var flag = flag_at(my_counts, done_offset + rank * FLAG_BYTES)
        var word = peek(flag)
        var spins = 0
        while not has_reached(word, generation):
            spins += 1
            if spins % SPINS_BETWEEN_LOOKS == 0 and deadline.has_passed():
                note_failure(
                    counters.failure(),
                    NOT_READ,
                    phase,
                    rank,
                    -1,
                    generation,
                    word,
                )
                is_met = False
                break
            word = peek(flag)
    # What each lane has seen of its ranks, all lanes may build on.
    syncwarp()
    return not any_lane(not is_met)


@always_inline
def await_message(
    flag: FlagPointer,
    generation: UInt32,
    phase: Int,
    missing_rank: Int,
    expert_id: Int,
    deadline: DeviceDeadline,
    counters: EPLocalSyncCounters,
) -> UInt64:
    """Waits until a message has arrived."""
    var word = peek(flag)
    var spins = 0
    while generation_of(word) != generation:
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                phase,
                missing_rank,
                expert_id,
                generation,
                word,
            )
            break
        word = peek(flag)
    return word


@always_inline
def is_last_block(counters: EPLocalSyncCounters) -> Bool:
    """Tells one warp of the grid that all blocks have done their work.

    Every thread of every block calls it, once, at the end of a launch. If one
    has failed, no warp is told, and later launches do nothing.
    """
    barrier()
    if warp_id() != 0:
        return False
    var all_done: UInt32 = 0
    if lane_id() == 0:
        if arrive(counters.blocks_done()) == Int(grid_dim.x) - 1:
            counters.blocks_done()[] = 0
            if is_fatal(counters.failure()[]):
                counters.set_broken()
            else:
                all_done = 1
    return warp.shuffle_idx(all_done, UInt32(0)) != 0


@always_inline
def publish_done[
    n_ranks: Int, use_shmem: Bool
](
    counts: SharedAddresses,
    my_rank: Int,
    offset: Int,
    generation: UInt32,
    lane: Int,
):
    """Tells every rank that its messages have been read."""
    syncwarp()
    for rank in range(lane, n_ranks, WARP_SIZE):
        var to = counts[unsafe_offset=rank]
        comptime if use_shmem:
            if to == 0:
                put_flag(
                    counts[unsafe_offset=my_rank] + UInt64(offset),
                    generation,
                    0,
                    rank,
                )
                continue
        publish(flag_at(bytes_at(to), offset), generation, 0)
