# SPDX-License-Identifier: Apache-2.0
"""BlockScaledTokenFormat: small values, and a scale for each block of elements.

`BlockNumbers` are a format's values and scales; this file lays them out on the wire.
"""
import max.gpu.primitives.warp as warp
from std.bit import log2_floor
from std.memory import bitcast
from std.sys import size_of

from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.message_sizes import scaled_token_bytes
from ..protocol.token_format import (
    BytePointer,
    LaneBytes,
    LaneWire,
    SENTINEL,
    TokenFormat,
)
from .block_numbers import BlockNumbers, checked_block
from .casts import WIDTH
from .scale_layouts import ScaledRows
from .unused_words import unused_scales, unused_values


struct BlockScaledTokenFormat[
    Numbers: BlockNumbers, Rows_: ScaledRows, hidden_size_: Int, top_k_: Int
](TokenFormat):
    """Quantizes on sending; `Rows_` says where scales go."""

    comptime hidden_size = Self.hidden_size_
    comptime top_k = Self.top_k_
    comptime hidden_multiple = max(Self.block, MESSAGE_ALIGN * 8 // Self.value_bits)
    """Whole blocks, and 16 bytes of values."""
    comptime token_bytes = scaled_token_bytes(
        Self.hidden_size, Self.value_bits, Self.block, Self.scale_bytes
    )
    comptime value_bytes = Self.hidden_size * Self.value_bits // 8
    comptime lane_elements = MESSAGE_ALIGN * 8 // Self.value_bits
    comptime scale_vectors = 8 // Self.word_lanes
    comptime values_flip = SENTINEL ^ unused_values[Self.Numbers]()
    comptime scales_flip = SENTINEL ^ unused_scales[Self.Numbers]()
    comptime Rows = Self.Rows_

    comptime block = checked_block[Self.Numbers]()
    comptime value_bits = Self.Numbers.value_bits
    comptime scale_type = Self.Numbers.scale_type
    comptime scale_bytes = size_of[Scalar[Self.scale_type]]()
    comptime n_blocks = Self.hidden_size_ // Self.block
    comptime block_lanes = max(1, Self.block // Self.lane_elements)
    """GPU lanes that share one block."""
    comptime lane_blocks = max(1, Self.lane_elements // Self.block)
    """Blocks that one GPU lane holds."""
    comptime word_lanes = 4 // Self.scale_bytes * Self.block_lanes // Self.lane_blocks
    """GPU lanes whose scales fill a word of 32 bits."""

    @staticmethod
    @always_inline
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: ImmPointer[Scalar[input_type]],
        input_scale: Float32,
    ):
        for block in range(Self.n_blocks):
            Self.encode_block[input_type, is_scaled](message, token, input_scale, block)

    @staticmethod
    @always_inline
    def encode_block[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: ImmPointer[Scalar[input_type]],
        input_scale: Float32,
        block: Int,
    ):
        """Quantizes a block of a token, with one thread."""
        comptime n_parts = Self.block // WIDTH
        comptime part_bytes = 2 * Self.value_bits
        var parts = Array[SIMD[DType.float32, WIDTH], n_parts](fill=0)
        var largest = SIMD[Self.Numbers.magnitude_type, WIDTH](Self.Numbers.least)
        comptime for part in range(n_parts):
            var x = token.unsafe_load[width=WIDTH](
                block * Self.block + part * WIDTH
            ).cast[DType.float32]()
            comptime if is_scaled:
                x *= input_scale
            parts[part] = x
            largest = max(largest, Self.Numbers.magnitude(x))
        var scale = Self.Numbers.scale_of(largest.reduce_max())
        comptime for part in range(n_parts):
            message.unsafe_store(
                (block * n_parts + part) * part_bytes,
                Self.Numbers.values_of(parts[part] * scale.factor),
            )
        message.unsafe_offset(Self.value_bytes).unsafe_bitcast[
            Scalar[Self.scale_type]
        ]()[unsafe_offset=block] = scale.bits.cast[Self.scale_type]()

    @staticmethod
    @always_inline
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32, lane: Int
    ) -> LaneWire:
        comptime n_parts = Self.lane_elements // WIDTH
        comptime part_bytes = 2 * Self.value_bits
        var x = elements.cast[DType.float32]()
        comptime if is_scaled:
            x *= input_scale
        var values = SIMD[DType.uint8, MESSAGE_ALIGN](0)
        var word: UInt32 = 0
        comptime for block in range(Self.lane_blocks):
            comptime of_block = range(
                block * n_parts // Self.lane_blocks,
                (block + 1) * n_parts // Self.lane_blocks,
            )
            var amax = Self.Numbers.least
            comptime for part in of_block:
                var some = x.slice[WIDTH, offset=part * WIDTH]()
                amax = max(Self.Numbers.magnitude(some).reduce_max(), amax)
            comptime for i in range(log2_floor(Self.block_lanes)):
                amax = max(amax, warp.shuffle_xor(amax, UInt32(1 << i)))
            var scale = Self.Numbers.scale_of(amax)
            word |= scale.bits << UInt32(8 * Self.scale_bytes * block)
            comptime for part in of_block:
                var some = x.slice[WIDTH, offset=part * WIDTH]()
                values = values.insert[offset=part * part_bytes](
                    Self.Numbers.values_of(some * scale.factor)
                )
        return LaneWire(
            bitcast[DType.uint32, 4](values), Self._gather_scales(word, lane)
        )

    @staticmethod
    @always_inline
    def _gather_scales(of_lane: UInt32, lane: Int) -> LaneBytes:
        """Puts the scales of 32 lanes together, as `LaneWire.scales` has them."""
        comptime n_bits = 8 * Self.scale_bytes * Self.lane_blocks
        comptime n_vectors = Self.scale_vectors
        var word = of_lane
        comptime if n_bits < 32:
            word <<= UInt32(lane // Self.block_lanes * n_bits % 32)
            comptime for i in range(
                log2_floor(Self.block_lanes), log2_floor(Self.word_lanes)
            ):
                word |= warp.shuffle_xor(word, UInt32(1 << i))
        var vector: LaneBytes = 0
        comptime for i in range(4):
            var from_lane = lane // 32 * 32 + Self.word_lanes * i
            comptime if n_vectors > 1:
                from_lane += lane % n_vectors * (32 // n_vectors)
            vector[i] = warp.shuffle_idx(word, UInt32(from_lane))
        return vector

    @staticmethod
    @always_inline
    def place_scales(rows: Self.Rows, row: Int, vector: Int, scales: LaneBytes):
        comptime n = MESSAGE_ALIGN // Self.scale_bytes
        rows.place[Self.n_blocks](row, vector * n, bitcast[Self.scale_type, n](scales))
