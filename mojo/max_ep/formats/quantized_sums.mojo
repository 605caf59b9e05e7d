# SPDX-License-Identifier: Apache-2.0
"""QuantizedSums: partial sums of float8_e4m3fn, with a scale for each block.

    sent:   values and scales of the sum, as dispatch quantizes a token
    added:  acc = fma(value, scale, acc)                        in float32

A block of 128 elements has the numbers of blockwise FP8, one of 32 those of MXFP8.
"""
from std.math import fma
from std.memory import bitcast
from std.sys import size_of

from ..protocol.kernel_argument import ImmPointer
from ..protocol.token_format import BytePointer, LaneBytes, LaneWire
from .block_numbers import BlockNumbers
from .block_scaled import BlockScaledTokenFormat
from .blockwise_fp8 import BlockwiseFP8, FP8_BLOCK
from .casts import float_of_e8m0, from_e4m3fn
from .mxfp8 import MXFP8
from .scale_layouts import RowByRow


struct QuantizedSums[block: Int, hidden_size: Int]:
    """How a partial sum is laid out; `block` is `Group.partial_block`."""

    comptime Numbers: BlockNumbers = (
        BlockwiseFP8[] if Self.block == FP8_BLOCK else MXFP8
    )
    comptime Format = BlockScaledTokenFormat[
        Self.Numbers, RowByRow, Self.hidden_size, 1
    ]
    comptime scale_bytes = size_of[Scalar[Self.Numbers.scale_type]]()

    @staticmethod
    @always_inline
    def encode(message: BytePointer, sum: List[Float32]):
        var elements = ImmPointer[Float32](unsafe_from_address=Int(sum.unsafe_ptr()))
        Self.Format.encode[DType.float32, False](message, elements, 1)

    @staticmethod
    @always_inline
    def add[
        width: Int
    ](acc: SIMD[DType.float32, width], message: BytePointer, column: Int) -> SIMD[
        DType.float32, width
    ]:
        """Adds some columns of a sum, all of one block."""
        var scale = (
            message.unsafe_offset(Self.Format.value_bytes)
            .unsafe_bitcast[Scalar[Self.Numbers.scale_type]]()
            .unsafe_load(column // Self.block)
        )
        return Self.add_values(
            acc, message.unsafe_load[width=width](column), UInt32(scale)
        )

    @staticmethod
    @always_inline
    def add_values[
        width: Int
    ](
        acc: SIMD[DType.float32, width], values: SIMD[DType.uint8, width], scale: UInt32
    ) -> SIMD[DType.float32, width]:
        var is_e8m0 = Self.scale_bytes == 1
        var factor = float_of_e8m0(scale) if is_e8m0 else bitcast[DType.float32](scale)
        return fma(from_e4m3fn(values), SIMD[DType.float32, width](factor), acc)

    @staticmethod
    @always_inline
    def encode_lane[width: Int](sum: SIMD[DType.float32, width], lane: Int) -> LaneWire:
        """Quantizes what a GPU lane holds; all lanes of a warp call it."""
        return Self.Format.encode_lane[DType.float32, False](
            rebind[SIMD[DType.float32, Self.Format.lane_elements]](sum), 1, lane
        )

    @staticmethod
    @always_inline
    def scale_of_lane(scales: LaneBytes, lane: Int) -> UInt32:
        """Finds a GPU lane's scale among those of 32 lanes, as they were sent."""
        comptime word_lanes = Self.Format.word_lanes
        var word = scales[0]
        comptime for i in range(1, 4):
            if lane // word_lanes == i:
                word = scales[i]
        comptime if Self.scale_bytes == 1:
            return (word >> UInt32(lane // Self.Format.block_lanes % 4 * 8)) & 0xFF
        else:
            return word
