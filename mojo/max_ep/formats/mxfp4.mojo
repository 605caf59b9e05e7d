# SPDX-License-Identifier: Apache-2.0
"""MXFP4: float4_e2m1fn values, two in a byte, a float8_e8m0fnu scale for 32 elements.

    amax   = max(|x|)
    scale  = 2**(floor(log2(amax)) - 2), in [2**-127, 2**126]
    value  = float4_e2m1fn(x / scale)                nearest even, saturating at 6

What rounds to zero is 0, never -0. A block with a NaN has the scale NaN, and values
that are all 6. The oracle is `quantize_mxfp4` in `quantize.py`.
"""
from .block_scaled import BlockNumbers, BlockScale
from .casts import is_nan_of_bits, power_of_e8m0, without_largest_e8m0


struct MXFP4(BlockNumbers):
    """The numbers of MXFP4."""

    comptime block = 32
    comptime value_bits = 4
    comptime scale_type = DType.uint8
    """The exponent of a power of two, 127 more than it is."""
    comptime scales_flip = UInt32(0x0101_0101)
    """Four NaN become four times 2**127, which no block has as its scale."""
    comptime forwarded_flip = UInt32(0x7777_7701)
    """Values have no -0, and scales no 0xFE."""

    @staticmethod
    @always_inline
    def known_scales(bits: UInt32) -> UInt32:
        return without_largest_e8m0(bits)

    @staticmethod
    @always_inline
    def scale_of(amax: UInt32) -> BlockScale:
        var e8m0 = max(amax >> 23, 2) - 2
        if is_nan_of_bits(amax):
            e8m0 = 255
        return {e8m0, power_of_e8m0(e8m0)}
