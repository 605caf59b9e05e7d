# SPDX-License-Identifier: Apache-2.0
"""Casts from float32 to the types of values and scales, the same bits everywhere.

`max_ep/quantize.py` has the same casts in NumPy.
"""
from std.math import isnan
from std.utils.numerics import nan
from std.memory import bitcast
from std.sys import is_nvidia_gpu

comptime FP8_MAX = Float32(448)
"""Largest finite float8_e4m3fn."""
comptime WIDTH = 16


@always_inline
def encode_e4m3fn[
    width: SIMDLength, //
](x: SIMD[DType.float32, width]) -> SIMD[DType.uint8, width]:
    """Rounds to float8_e4m3fn, to nearest even and saturating.

    The same bits as `cast[DType.float8_e4m3fn]`, which is scalar on CPU.
    """
    comptime Bits = SIMD[DType.uint32, width]
    # The distance of subnormals is 2**-9: adding 2**14 leaves just that many
    # bits of fraction, and rounds to nearest even on the way.
    comptime magic = Float32(16384)
    # The minimum also keeps the multiplication that made `x` from being fused
    # with this addition.
    var magnitude = min(abs(x), SIMD[DType.float32, width](FP8_MAX))
    var subnormal = bitcast[DType.uint32](magnitude + magic) - Bits(
        bitcast[DType.uint32](magic)
    )
    # Normal numbers: 20 bits of fraction go, half of the last place is added
    # before (less one where the last place is even), the bias changes by 120.
    var bits = bitcast[DType.uint32](magnitude)
    bits += Bits(0x7_FFFF) + ((bits >> 20) & 1)
    var normal = (bits >> 20) - Bits(120 << 3)
    var is_subnormal = magnitude.lt(SIMD[DType.float32, width](0.015625))
    var sign = (bitcast[DType.uint32](x) >> 24) & 0x80
    var result = is_subnormal.select(subnormal, normal) | sign
    return isnan(x).select(Bits(0x7F), result).cast[DType.uint8]()


@always_inline
def to_e4m3fn(x: SIMD[DType.float32, WIDTH]) -> SIMD[DType.uint8, WIDTH]:
    comptime if is_nvidia_gpu():
        return bitcast[DType.uint8, WIDTH](x.cast[DType.float8_e4m3fn]())
    else:
        return encode_e4m3fn(x)


@always_inline
def is_nan_of_bits(magnitude: UInt32) -> Bool:
    return magnitude > 0x7F80_0000


@always_inline
def power_of_e8m0(e8m0: UInt32) -> Float32:
    """Makes the power of two that a scale, at most 253, divides by; 255 is NaN."""
    var bits = (UInt32(254) - e8m0) << 23
    return bitcast[DType.float32](bits if e8m0 != 255 else UInt32(0x7FC0_0000))


@always_inline
def float_of_e8m0(e8m0: UInt32) -> Float32:
    """Widens a scale; 255 is NaN."""
    var bits = e8m0 << 23
    if e8m0 == 0:
        bits = 0x40_0000
    if e8m0 == 255:
        bits = 0x7FC0_0000
    return bitcast[DType.float32](bits)


@always_inline
def from_e4m3fn[
    width: Int, //
](values: SIMD[DType.uint8, width]) -> SIMD[DType.float32, width]:
    comptime if is_nvidia_gpu():
        return bitcast[DType.float8_e4m3fn, width](values).cast[DType.float32]()
    else:
        var bits = values.cast[DType.uint32]()
        var magnitude = bitcast[DType.uint32](float_of_e4m3fn(bits & 0x7F))
        return bitcast[DType.float32](magnitude | (bits & 0x80) << 24)


@always_inline
def to_e2m1fn(x: SIMD[DType.float32, WIDTH]) -> SIMD[DType.uint8, WIDTH // 2]:
    """Rounds to float4_e2m1fn, to nearest even and saturating at 6; two in a byte.

    What rounds to zero is 0, never -0. A NaN is 6.
    """
    comptime Bits = SIMD[DType.uint32, WIDTH]
    # Below 1 values are 0.5 apart: adding 2**22 leaves just that many bits of fraction.
    comptime magic = Float32(4194304)
    # The minimum also keeps the multiplication that made `x` from being fused
    # with this addition.
    var magnitude = min(abs(x), SIMD[DType.float32, WIDTH](6))
    var small = bitcast[DType.uint32](magnitude + magic) - Bits(
        bitcast[DType.uint32](magic)
    )
    # Above, 22 bits of fraction go, and the bias changes by 126.
    var bits = bitcast[DType.uint32](magnitude)
    bits += Bits(0x1F_FFFF) + ((bits >> 22) & 1)
    var values = magnitude.lt(SIMD[DType.float32, WIDTH](1)).select(
        small, (bits >> 22) - Bits(126 << 1)
    )
    values = isnan(x).select(Bits(7), values)
    var is_negative = x.lt(SIMD[DType.float32, WIDTH](0)) & values.ne(Bits(0))
    var first, second = is_negative.select(values | 8, values).deinterleave()
    return (first | (second << 4)).cast[DType.uint8]()


@always_inline
def float_of_e4m3fn[
    width: SIMDLength, //
](bits: SIMD[DType.uint32, width]) -> SIMD[DType.float32, width]:
    """Widens float8_e4m3fn that are not negative."""
    comptime Bits = SIMD[DType.uint32, width]
    var small = bits.cast[DType.float32]() * 0.001953125
    var normal = bitcast[DType.float32]((bits + (120 << 3)) << 20)
    var x = bits.lt(Bits(8)).select(small, normal)
    return bits.eq(Bits(0x7F)).select(nan[DType.float32](), x)


@always_inline
def one_nan_e4m3fn(bits: UInt32) -> UInt32:
    """Clears the sign of each NaN among four float8_e4m3fn."""
    var are_nan = ((bits & 0x7F7F_7F7F) + 0x0101_0101) & 0x8080_8080
    return bits & ~are_nan


@always_inline
def one_zero_e2m1fn(bits: UInt32) -> UInt32:
    """Clears the sign of each zero among eight float4_e2m1fn."""
    var magnitudes = bits & 0x7777_7777
    return magnitudes | (bits & (magnitudes + 0x7777_7777) & 0x8888_8888)


@always_inline
def without_largest_e8m0(bits: UInt32) -> UInt32:
    """Replaces each 2**127 among four float8_e8m0fnu by 2**126."""
    # A byte of `rest` is 0 exactly where one of `bits` is 0xFE.
    var rest = bits ^ 0xFEFE_FEFE
    var are_not = ((rest & 0x7F7F_7F7F) + 0x7F7F_7F7F) | rest
    var are_largest = ~are_not & 0x8080_8080
    # 0xFE to 0xFD: its lowest two bits change.
    return bits ^ (are_largest >> 7) ^ (are_largest >> 6)
