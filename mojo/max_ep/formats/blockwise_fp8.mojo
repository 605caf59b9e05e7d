# SPDX-License-Identifier: Apache-2.0
"""Blockwise FP8: float8_e4m3fn values, a float32 scale for 128 elements.

All in float32:

    amax   = max(|x|, FP8_MIN_AMAX)
    value  = float8_e4m3fn(x * (FP8_MAX / amax))     nearest even, saturating
    scale  = amax / FP8_MAX

With `power_of_two_scales`, `scale` is rounded up to a power of two and the
values are `x * (1 / scale)`. This is the definition of DeepEP's low-latency
dispatch. The oracle is `quantize_blockwise_fp8` in `max_ep/quantize.py`.
"""
from std.memory import bitcast

from .block_numbers import BlockNumbers, BlockScale
from .block_scaled import BlockScaledTokenFormat
from .casts import FP8_MAX, WIDTH
from .scale_layouts import TransposedRows

comptime FP8_BLOCK = 128
"""Elements that share one scale."""
comptime FP8_MIN_AMAX = Float32(1e-4)
"""Floor of a block's `amax`, so that a block of zeros has a usable scale."""


struct BlockwiseFP8[power_of_two_scales: Bool = False](BlockNumbers):
    """The numbers of blockwise FP8."""

    comptime name = "fp8_power_of_two" if Self.power_of_two_scales else "fp8"
    comptime block = FP8_BLOCK
    comptime value_type = DType.float8_e4m3fn
    comptime scale_type = DType.uint32
    """The bits of float32."""
    comptime magnitude_type = DType.float32
    comptime least = FP8_MIN_AMAX

    @staticmethod
    @always_inline
    def known_scales(bits: UInt32) -> UInt32:
        return 0x7FC0_0000 if (bits & 0x7FFF_FFFF) > 0x7F80_0000 else bits

    @staticmethod
    @always_inline
    def magnitude(x: SIMD[DType.float32, WIDTH]) -> SIMD[DType.float32, WIDTH]:
        return abs(x)

    @staticmethod
    @always_inline
    def scale_of(amax: Float32) -> BlockScale:
        var scale = amax / FP8_MAX
        var factor = FP8_MAX / amax
        comptime if Self.power_of_two_scales:
            comptime mantissa = UInt32(0x7F_FFFF)
            var bits = bitcast[DType.uint32](scale)
            scale = bitcast[DType.float32]((bits + mantissa) & ~mantissa)
            factor = 1 / scale
        return {bitcast[DType.uint32](scale), factor}


comptime BlockwiseFP8TokenFormat[
    hidden_size: Int, top_k: Int, power_of_two_scales: Bool = False
] = BlockScaledTokenFormat[
    BlockwiseFP8[power_of_two_scales], TransposedRows[], hidden_size, top_k
]
"""Blockwise FP8 with transposed scales; `hidden_size` is a multiple of 128."""
