# SPDX-License-Identifier: Apache-2.0
"""NVFP4: float4_e2m1fn values, two in a byte, a float8_e4m3fn scale for 16 elements.

All in float32, of elements that are multiplied by the input scale of their expert, if
there are input scales:

    amax   = max(|x|)
    scale  = float8_e4m3fn(amax / 6)                 nearest even, saturating at 448
    value  = float4_e2m1fn(x * (1 / scale))          nearest even, saturating at 6

Where `scale` is 0, all values are 0. What rounds to zero is 0, never -0. A block with
a NaN has the scale NaN, and values that are all 6. The oracle is `quantize_nvfp4` in
`quantize.py`.
"""
from std.memory import bitcast

from .block_numbers import BlockNumbers, BlockScale
from .casts import encode_e4m3fn, float_of_e4m3fn


struct NVFP4(BlockNumbers):
    """The numbers of NVFP4."""

    comptime name = "nvfp4"
    comptime block = 16
    comptime value_type = DType.float4_e2m1fn
    comptime scale_type = DType.uint8
    """The bits of float8_e4m3fn, never negative."""

    @staticmethod
    @always_inline
    def known_scales(bits: UInt32) -> UInt32:
        return bits & 0x7F7F_7F7F

    @staticmethod
    @always_inline
    def scale_of(amax: UInt32) -> BlockScale:
        var e4m3 = UInt32(encode_e4m3fn(bitcast[DType.float32](amax) / 6))
        return {e4m3, 1 / float_of_e4m3fn(e4m3) if e4m3 != 0 else Float32(0)}
