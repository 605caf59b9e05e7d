# SPDX-License-Identifier: Apache-2.0
"""Warp primitives: reductions, votes, 16-byte accesses, copies, the sentinel.

All lanes call reductions. They are intrinsics, which the compiler treats as convergent.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE
from std.bit import count_trailing_zeros
from std.sys import _RegisterPackType, inlined_assembly, is_nvidia_gpu, llvm_intrinsic

from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.token_format import BytePointer, LaneBytes, SENTINEL


@always_inline
def sum_of_lanes(n: UInt32) -> UInt32:
    return UInt32(
        llvm_intrinsic["llvm.nvvm.redux.sync.add", Int32](Int32(n), Int32(-1))
    )


@always_inline
def max_of_lanes(n: Int32) -> Int32:
    return llvm_intrinsic["llvm.nvvm.redux.sync.max", Int32](n, Int32(-1))


@always_inline
def any_of_lanes(bits: UInt32) -> UInt32:
    return UInt32(
        llvm_intrinsic["llvm.nvvm.redux.sync.or", Int32](Int32(bits), Int32(-1))
    )


@always_inline
def has_bit(bits: UInt32, i: Int) -> Bool:
    return (bits >> UInt32(i)) & 1 != 0


@always_inline
def take_lane(mut lanes: UInt32) -> UInt32:
    """Removes the first of some lanes; returns it."""
    var lane = count_trailing_zeros(lanes)
    lanes &= lanes - 1
    return lane


@always_inline
def lanes_like(n: Int32) -> UInt32:
    return UInt32(llvm_intrinsic["llvm.nvvm.match.any.sync.i32", Int32](Int32(-1), n))


comptime ACCESSES_IN_FLIGHT = 7
"""16-byte loads a lane has under way: 28 registers, and it divides the 28
steps of the 7168 bfloat16 of a large model's token."""


@always_inline
def load16(p: Pointer[mut=_, UInt8, _]) -> LaneBytes:
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
def load16_now(p: Pointer[mut=_, UInt8, _], is_there: Bool) -> LaneBytes:
    """As `load16_if`, where there is that; else with a branch."""
    comptime if is_nvidia_gpu():
        return load16_if(p, is_there)
    return load16(p) if is_there else LaneBytes(0)


@always_inline
def store16(p: BytePointer, bytes: LaneBytes):
    p.unsafe_bitcast[UInt32]().unsafe_store[alignment=MESSAGE_ALIGN](0, bytes)


@always_inline
def shuffle_address(address: UInt64, src_lane: Int) -> UInt64:
    var low = warp.shuffle_idx(UInt32(address & 0xFFFF_FFFF), UInt32(src_lane))
    var high = warp.shuffle_idx(UInt32(address >> 32), UInt32(src_lane))
    return (UInt64(high) << 32) | UInt64(low)


@always_inline
def bytes_at(address: UInt64) -> BytePointer:
    return BytePointer(unsafe_from_address=Int(address))


@always_inline
def copy_warp[n_bytes: Int](dest: BytePointer, src: Pointer[UInt8, _], lane: Int):
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
def any_lane(condition: Bool) -> Bool:
    comptime if WARP_SIZE == 32:
        return warp.vote[DType.uint32](condition) != 0
    else:
        return warp.vote[DType.uint64](condition) != 0


comptime _SENTINEL_STAND_IN = UInt32(0x7FFF_FFFF)
"""Sent in place of `SENTINEL`: as that, NaN in bfloat16, float32 and float8_e4m3fn.
Other types flip bits on the way, so that `SENTINEL` is what they do not have."""


@always_inline
def avoid_sentinel[flip: UInt32 = 0](bytes: LaneBytes) -> LaneBytes:
    """Makes data that does not look missing: flips bits of the last word
    (`TokenFormat.values_flip`), and replaces a `SENTINEL`."""
    var sent = bytes
    comptime if flip != 0:
        sent[3] ^= flip
    if sent[3] == SENTINEL:
        sent[3] = _SENTINEL_STAND_IN
    return sent


@always_inline
def divmod_32(a: Int, b: Int) -> Tuple[Int, Int]:
    """Divides numbers that fit into 32 bits, which is faster."""
    var quotient = UInt32(a) // UInt32(b)
    return (Int(quotient), Int(UInt32(a) - quotient * UInt32(b)))


@always_inline
def in_32_bits(n: Int) -> Int:
    """Returns the lower 32 bits of a number that fits into them, which is faster."""
    return Int(Int32(n))
