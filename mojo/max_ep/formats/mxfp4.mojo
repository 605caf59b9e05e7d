# SPDX-License-Identifier: Apache-2.0
"""MXFP4: float4_e2m1fn values, two in a byte, a float8_e8m0fnu scale for 32 elements.

    amax   = max(|x|)
    scale  = 2**(floor(log2(amax)) - 2), in [2**-127, 2**126]
    value  = float4_e2m1fn(x / scale)                nearest even, saturating at 6

What rounds to zero is 0, never -0. A block with a NaN has the scale NaN, and values
that are all 6. The oracle is `quantize_mxfp4` in `quantize.py`.
"""
from .block_numbers import BlockNumbers, BlockScale
from .casts import is_nan_of_bits, power_of_e8m0, without_largest_e8m0


struct MXFP4(BlockNumbers):
    """The numbers of MXFP4."""

    comptime name = "mxfp4"
    comptime block = 32
    comptime value_type = DType.float4_e2m1fn
    comptime scale_type = DType.uint8
    """The exponent of a power of two, 127 more than it is."""

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
