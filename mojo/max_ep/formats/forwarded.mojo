# SPDX-License-Identifier: Apache-2.0
"""ForwardedTokenFormat: tokens that are quantized when they are given.

A token is given as it stands on the wire: values, then scales, each of whole 16 bytes.
`join_quantized` puts both together, and leaves out what no token of the format has, so
that a word of inline bytes says whether they have arrived (`BlockNumbers`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import lane_id, WARP_SIZE
from std.bit import log2_floor
from std.memory import bitcast, unsafe_memcpy
from std.sys import is_gpu, size_of

from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.token_format import (
    BytePointer,
    LaneBytes,
    LaneWire,
    SENTINEL,
    TokenFormat,
)
from ..work.for_each import Work
from .block_numbers import BlockNumbers
from .block_scaled import BlockScaledTokenFormat
from .casts import WIDTH
from .nvfp4 import NVFP4
from .scale_layouts import RowByRow, ScaledRows
from .unused_words import unused_bytes

comptime NVFP4_MAX = Float32(2688)
"""6 times 448: the largest number with a scale that NVFP4 has."""
comptime LEAST_ROW_MAX = Float32(1e-30)
"""Floor of a token's largest magnitude: its scale and the inverse are finite."""


struct ForwardedTokenFormat[
    Numbers: BlockNumbers, Rows_: ScaledRows, hidden_size_: Int, top_k_: Int
](TokenFormat):
    """Sends values and scales as they are given, and delivers them as the format does. If
    rows have a scale, that of the token comes last: a float32 in 16 bytes."""

    comptime Quantizing = BlockScaledTokenFormat[
        Self.Numbers, Self.Rows_, Self.hidden_size_, Self.top_k_
    ]
    comptime hidden_size = Self.token_bytes
    """In bytes, as they are given."""
    comptime top_k = Self.top_k_
    comptime hidden_multiple = Self.Quantizing.hidden_multiple
    comptime token_bytes = Self.Quantizing.token_bytes + (
        MESSAGE_ALIGN if Self.Rows_.have_row_scales else 0
    )
    comptime value_bytes = Self.token_bytes
    """All of them are sent alike."""
    comptime row_bytes = Self.Quantizing.value_bytes
    comptime lane_elements = MESSAGE_ALIGN
    comptime scale_vectors = 0
    comptime values_flip = SENTINEL ^ unused_bytes[Self.Numbers]()
    comptime Rows = Self.Rows_

    @staticmethod
    @always_inline
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: ImmPointer[Scalar[input_type]],
        input_scale: Float32,
    ):
        unsafe_memcpy(
            dest=message, src=token.unsafe_bitcast[UInt8](), count=Self.token_bytes
        )

    @staticmethod
    @always_inline
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32, lane: Int
    ) -> LaneWire:
        comptime assert (
            size_of[Scalar[input_type]]() == 1 and not is_scaled
        ), "max_ep: quantized tokens are bytes, and are not scaled again"
        return LaneWire(bitcast[DType.uint32, 4](elements), 0)

    @staticmethod
    def is_identity[input_type: DType]() -> Bool:
        return True

    @staticmethod
    @always_inline
    def place_scales(rows: Self.Rows, row: Int, vector: Int, scales: LaneBytes):
        comptime if Self.Rows_.have_row_scales:
            if vector == Self.Quantizing.n_scale_vectors:
                rows.place_row_scale(row, bitcast[DType.float32](scales[0]))
                return
        Self.Quantizing.place_scales(rows, row, vector, scales)


@fieldwise_init
struct JoinWords[Numbers: BlockNumbers, hidden_size: Int](Work):
    """Joins tokens of values and scales; an item is 4 bytes of a token."""

    var joined: BytePointer
    """Result, `[n_tokens][token_bytes]`."""
    var values: BytePointer
    """`[n_tokens]` of the format's `value_bytes`."""
    var scales: BytePointer
    """`[n_tokens][n_blocks]`."""

    comptime Format = BlockScaledTokenFormat[
        Self.Numbers, RowByRow, Self.hidden_size, 1
    ]
    comptime words_per_token = Self.Format.token_bytes // 4

    @always_inline
    def do(self, i: Int):
        comptime value_words = Self.Format.value_bytes // 4
        comptime scales_bytes = Self.Format.n_blocks * Self.Format.scale_bytes
        var token_idx, word = divmod(i, Self.words_per_token)
        var bits: UInt32 = 0
        if word < value_words:
            var values = self.values.unsafe_bitcast[UInt32]()
            bits = Self.Numbers.known_values(
                values[unsafe_offset=token_idx * value_words + word]
            )
        else:
            # Their rows need not be whole words.
            var first = (word - value_words) * 4
            var scales = self.scales.unsafe_offset(token_idx * scales_bytes + first)
            for j in range(min(4, scales_bytes - first)):
                bits |= scales[unsafe_offset=j].cast[DType.uint32]() << UInt32(8 * j)
            bits = Self.Numbers.known_scales(bits)
        self.joined.unsafe_bitcast[UInt32]()[unsafe_offset=i] = bits


@fieldwise_init
struct QuantizeTokens[input_type: DType, hidden_size: Int](Work):
    """Quantizes tokens to NVFP4, each with a scale of its own."""

    comptime by_warp = True
    comptime Format = BlockScaledTokenFormat[NVFP4, RowByRow, Self.hidden_size, 1]
    comptime token_bytes = Self.Format.token_bytes + MESSAGE_ALIGN

    var joined: BytePointer
    """Result, `[n_tokens]` of what dispatch forwards."""
    var tokens: ImmPointer[Scalar[Self.input_type]]
    """`[n_tokens][hidden_size]`."""

    @always_inline
    def do(self, i: Int):
        comptime Format = Self.Format
        var lane, n_lanes = 0, 1
        comptime if is_gpu():
            lane, n_lanes = Int(lane_id()), WARP_SIZE
        var joined = self.joined.unsafe_offset(i * Self.token_bytes)
        var token = self.tokens.unsafe_offset(i * Self.hidden_size)
        var row_max = Self._largest(token, lane, n_lanes)
        for block in range(lane, Format.n_blocks, n_lanes):
            Format.encode_block[Self.input_type, True](
                joined, token, NVFP4_MAX / row_max, block
            )
        if lane == 0:
            # Scales of blocks end before their last 16 bytes do.
            for at in range(Format.value_bytes + Format.n_blocks, Format.token_bytes):
                joined[unsafe_offset=at] = 0
            var scale = (row_max / NVFP4_MAX).cast[DType.bfloat16]()
            var bits = bitcast[DType.uint32](scale.cast[DType.float32]())
            joined.unsafe_offset(Format.token_bytes).unsafe_bitcast[
                UInt32
            ]().unsafe_store(0, LaneBytes(bits, 0, 0, 0))

    @staticmethod
    @always_inline
    def _largest(
        token: ImmPointer[Scalar[Self.input_type]], lane: Int, n_lanes: Int
    ) -> Float32:
        """Finds the largest magnitude of a token, with all lanes."""
        var magnitudes = SIMD[DType.uint32, WIDTH](0)
        for first in range(lane * WIDTH, Self.hidden_size, n_lanes * WIDTH):
            var x = token.unsafe_load[width=WIDTH](first).cast[DType.float32]()
            magnitudes = max(magnitudes, NVFP4.magnitude(x))
        var largest = magnitudes.reduce_max()
        comptime if is_gpu():
            comptime for step in range(log2_floor(WARP_SIZE)):
                largest = max(largest, warp.shuffle_xor(largest, UInt32(1 << step)))
        return bitcast[DType.float32](
            max(largest, bitcast[DType.uint32](LEAST_ROW_MAX))
        )
