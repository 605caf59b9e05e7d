# SPDX-License-Identifier: Apache-2.0
"""BlockwiseFP8TokenFormat: float8_e4m3fn values, a float32 scale per block.

For each block of `FP8_BLOCK` channels, all in float32:

    amax   = max(|x|, FP8_MIN_AMAX)
    value  = float8_e4m3fn(x * (FP8_MAX / amax))     nearest even, saturating
    scale  = amax / FP8_MAX

With `power_of_two_scales`, `scale` is rounded up to a power of two and the
values are `x * (1 / scale)`. Definition: DeepEP's low-latency dispatch, which
the seeds describe; the oracle is `quantize_blockwise_fp8` in `reference.py`.
"""
import max.gpu.primitives.warp as warp
from std.math import isnan
from std.memory import bitcast
from std.sys import is_nvidia_gpu

from ..cpu_copy import copy_bytes
from ..kernel_argument import KernelArgument
from ..layout import scaled_token_bytes
from ..token_format import BytePointer, LaneBytes, LaneWire, OutputTensors, TokenFormat

comptime FP8_BLOCK = 128
"""Channels that share one scale."""
comptime FP8_MAX = Float32(448)
"""Largest finite float8_e4m3fn."""
comptime FP8_MIN_AMAX = Float32(1e-4)
"""Floor of a block's `amax`, so that a block of zeros has a usable scale."""

comptime _WIDTH = 16
comptime _LANES = FP8_BLOCK // _WIDTH
"""GPU lanes that share one block."""


@fieldwise_init
struct ScaledRows(KernelArgument, TrivialRegisterPassable):
    """Output tensors of a format with blockwise scales."""

    var tokens: BytePointer
    """Values, `[max_recv_tokens][hidden_size]` of one byte each."""
    var scales: Pointer[Float32, MutUntrackedOrigin]
    """Scales, `[n_groups][hidden_size / FP8_BLOCK][rows_per_group]`: one row's
    scales stand `rows_per_group` apart, as grouped matmuls read them."""
    var rows_per_group: Int
    """Rows whose scales stand together: all of them where rows are packed,
    those of one expert where they are padded."""

    @always_inline
    def scale_index(self, row: Int, block: Int, n_blocks: Int) -> Int:
        """Locates a scale."""
        var group, row_in_group = divmod(row, self.rows_per_group)
        return (group * n_blocks + block) * self.rows_per_group + row_in_group


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
def to_e4m3fn(x: SIMD[DType.float32, _WIDTH]) -> SIMD[DType.uint8, _WIDTH]:
    """Rounds to float8_e4m3fn by the quickest way the device has."""
    comptime if is_nvidia_gpu():
        return bitcast[DType.uint8, _WIDTH](x.cast[DType.float8_e4m3fn]())
    else:
        return encode_e4m3fn(x)


@always_inline
def power_of_two_at_least(x: Float32) -> Float32:
    """Rounds up to a power of two."""
    var bits = bitcast[DType.uint32](x)
    comptime mantissa = UInt32(0x7F_FFFF)
    return bitcast[DType.float32]((bits + mantissa) & ~mantissa)


struct BlockwiseFP8TokenFormat[
    hidden_size_: Int, top_k_: Int, power_of_two_scales: Bool = False
](TokenFormat):
    """Quantizes on sending: float8_e4m3fn values and float32 scales.

    Parameters:
        hidden_size_: Elements of a token, a multiple of `FP8_BLOCK`.
        top_k_: Experts of a token.
        power_of_two_scales: Whether scales are rounded up to powers of two.
    """

    comptime hidden_size = Self.hidden_size_
    """Elements of a token."""
    comptime top_k = Self.top_k_
    """Experts of a token."""
    comptime hidden_multiple = FP8_BLOCK
    """Whole blocks."""
    comptime token_bytes = scaled_token_bytes(Self.hidden_size, 1, FP8_BLOCK)
    """Bytes of values and scales."""
    comptime value_bytes = Self.hidden_size
    """One byte a value."""
    comptime lane_elements = _WIDTH
    """16 values of one byte."""
    comptime has_scales = True
    """One for `FP8_BLOCK` elements."""
    comptime Rows = ScaledRows
    """Output tensors of values and scales."""
    comptime n_blocks = Self.hidden_size_ // FP8_BLOCK
    """Scales of one token."""

    @staticmethod
    @always_inline
    def rows_of(outputs: OutputTensors) -> Self.Rows:
        """Takes values and scales; see `TokenFormat.rows_of`."""
        return {outputs.tokens, outputs.scales, outputs.rows_per_group}

    @staticmethod
    @always_inline
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
        input_scale: Float32,
    ):
        """Quantizes a token; see the module's docstring."""
        comptime n_chunks = FP8_BLOCK // _WIDTH
        var scales = message.unsafe_offset(Self.hidden_size).unsafe_bitcast[Float32]()
        for block in range(Self.n_blocks):
            var parts = Array[SIMD[DType.float32, _WIDTH], n_chunks](fill=0)
            var largest = SIMD[DType.float32, _WIDTH](FP8_MIN_AMAX)
            comptime for part in range(n_chunks):
                var x = token.unsafe_load[width=_WIDTH](
                    block * FP8_BLOCK + part * _WIDTH
                ).cast[DType.float32]()
                comptime if is_scaled:
                    x *= input_scale
                parts[part] = x
                largest = max(largest, abs(x))
            var amax = largest.reduce_max()
            var scale, factor = Self._scale_and_factor(amax)
            comptime for part in range(n_chunks):
                message.unsafe_store(
                    block * FP8_BLOCK + part * _WIDTH,
                    encode_e4m3fn(parts[part] * factor),
                )
            scales[unsafe_offset=block] = scale

    @staticmethod
    @always_inline
    def decode(message: BytePointer, rows: Self.Rows, row: Int, is_streaming: Bool):
        """Copies values and scales; nothing is dequantized."""
        copy_bytes(
            dest=rows.tokens.unsafe_offset(row * Self.hidden_size),
            src=message,
            count=Self.hidden_size,
            is_streaming=is_streaming,
        )
        var scales = message.unsafe_offset(Self.hidden_size).unsafe_bitcast[Float32]()
        var first = rows.scale_index(row, 0, Self.n_blocks)
        for block in range(Self.n_blocks):
            rows.scales[unsafe_offset=first + block * rows.rows_per_group] = scales[
                unsafe_offset=block
            ]

    @staticmethod
    @always_inline
    def _scale_and_factor(amax: Float32) -> Tuple[Float32, Float32]:
        var scale = amax / FP8_MAX
        var factor = FP8_MAX / amax
        comptime if Self.power_of_two_scales:
            scale = power_of_two_at_least(scale)
            factor = 1 / scale
        return (scale, factor)

    @staticmethod
    @always_inline
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](elements: SIMD[input_type, Self.lane_elements], input_scale: Float32) -> LaneWire:
        """Quantizes what one GPU lane holds; see `TokenFormat.encode_lane`.

        Eight neighbouring lanes hold one block.
        """
        var x = rebind[SIMD[DType.float32, _WIDTH]](elements.cast[DType.float32]())
        comptime if is_scaled:
            x *= input_scale
        var amax = max(abs(x).reduce_max(), FP8_MIN_AMAX)
        comptime for i in range(3):
            comptime assert 1 << 3 == _LANES
            amax = max(amax, warp.shuffle_xor(amax, UInt32(1 << i)))
        var scale, factor = Self._scale_and_factor(amax)
        return LaneWire(bitcast[DType.uint32, 4](to_e4m3fn(x * factor)), scale)

    @staticmethod
    @always_inline
    def is_identity[input_type: DType]() -> Bool:
        """Returns whether tokens travel as they are given."""
        return False

    @staticmethod
    @always_inline
    def place_scales(rows: Self.Rows, row: Int, step: Int, scales: LaneBytes):
        """Puts four scales into the output."""
        var first = rows.scale_index(row, 0, Self.n_blocks)
        comptime for i in range(4):
            var block = 4 * step + i
            if block < Self.n_blocks:
                rows.scales[
                    unsafe_offset=first + block * rows.rows_per_group
                ] = bitcast[DType.float32](scales[i])

    @staticmethod
    @always_inline
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where the values of a row go."""
        return rows.tokens.unsafe_offset(row * Self.value_bytes)

    @staticmethod
    @always_inline
    def decode_scales_lane(
        message: BytePointer, rows: Self.Rows, row: Int, lane: Int, n_lanes: Int
    ):
        """Copies one GPU lane's part of a message's scales."""
        var scales = message.unsafe_offset(Self.hidden_size).unsafe_bitcast[Float32]()
        var first = rows.scale_index(row, 0, Self.n_blocks)
        for block in range(lane, Self.n_blocks, n_lanes):
            rows.scales[unsafe_offset=first + block * rows.rows_per_group] = scales[
                unsafe_offset=block
            ]
