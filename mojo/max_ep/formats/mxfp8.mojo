# SPDX-License-Identifier: Apache-2.0
"""MXFP8: float8_e4m3fn values, a float8_e8m0fnu scale for 32 elements.

    amax   = max(|x|)
    scale  = amax / 448, rounded up to a power of two, in [2**-127, 2**120]
    value  = float8_e4m3fn(x / scale)                nearest even, saturating

A block with a NaN has the scale NaN, and values that are all NaN. An infinity becomes
448 times the largest scale, which is above all of float32. The oracle is
`quantize_mxfp8` in `max_ep/quantize.py`.
"""
from .block_numbers import BlockNumbers, BlockScale
from .casts import is_nan_of_bits, power_of_e8m0, without_largest_e8m0


struct MXFP8(BlockNumbers):
    """The numbers of MXFP8."""

    comptime name = "mxfp8"
    comptime block = 32
    comptime value_type = DType.float8_e4m3fn
    comptime scale_type = DType.uint8
    """The exponent of a power of two, 127 more than it is."""

    @staticmethod
    @always_inline
    def known_scales(bits: UInt32) -> UInt32:
        return without_largest_e8m0(bits)

    @staticmethod
    @always_inline
    def scale_of(amax: UInt32) -> BlockScale:
        """Makes the scale of a block: 448 is 1.75 * 2**8."""
        var above = max((amax + 0x1F_FFFF) >> 23, 8) - 8
        var e8m0 = UInt32(255) if is_nan_of_bits(amax) else above
        return {e8m0, power_of_e8m0(e8m0)}
