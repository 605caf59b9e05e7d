# SPDX-License-Identifier: Apache-2.0
"""ForwardedTokenFormat: tokens that are quantized when they are given.

A token is given as it stands on the wire: values, then scales, each of whole 16 bytes.
`join_quantized` puts both together, and leaves out what no token of the format has, so
that a word of inline bytes says whether they have arrived (`BlockNumbers`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import block_idx, lane_id, thread_idx, warp_id, WARP_SIZE
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.bit import log2_floor
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of

from ..cpu_copy import copy_bytes
from ..kernel_argument import KernelArgument
from ..layout import MESSAGE_ALIGN
from ..token_format import BytePointer, LaneBytes, LaneWire, OutputTensors, TokenFormat
from .block_scaled import BlockNumbers, BlockScaledTokenFormat
from .casts import WIDTH
from .nvfp4 import NVFP4
from .scale_layouts import RowByRow, ScaledRows

comptime _NUM_THREADS = 256

comptime NVFP4_MAX = Float32(2688)
"""6 times 448: the largest number with a scale that NVFP4 has."""
comptime LEAST_ROW_MAX = Float32(1e-30)
"""Floor of a token's largest magnitude: its scale and the inverse are finite."""


struct ForwardedTokenFormat[
    Numbers: BlockNumbers,
    Rows_: ScaledRows,
    hidden_size_: Int,
    top_k_: Int,
    has_row_scale: Bool = False,
](TokenFormat):
    """Sends values and scales as they are given, and delivers them as the format does.

    Parameters:
        Numbers: What values and scales are.
        Rows_: Where scales go at the receiver.
        hidden_size_: Elements of a token, a multiple of the block.
        top_k_: Experts of a token.
        has_row_scale: Whether a float32 in 16 bytes, a scale of the token, comes last.
    """

    comptime Quantizing = BlockScaledTokenFormat[
        Self.Numbers, Self.Rows_, Self.hidden_size_, Self.top_k_
    ]
    """The format that makes such tokens."""
    comptime hidden_size = Self.token_bytes
    """Bytes of a token, as it is given and sent."""
    comptime top_k = Self.top_k_
    """Experts of a token."""
    comptime hidden_multiple = Self.Quantizing.hidden_multiple
    """Whole blocks, and 16 bytes of values."""
    comptime token_bytes = Self.Quantizing.token_bytes + (
        MESSAGE_ALIGN if Self.has_row_scale else 0
    )
    """Bytes of values and scales."""
    comptime value_bytes = Self.token_bytes
    """All of them are sent alike."""
    comptime row_bytes = Self.Quantizing.value_bytes
    """Bytes of the values alone."""
    comptime lane_elements = MESSAGE_ALIGN
    """Bytes of a vector."""
    comptime scale_vectors = 0
    """They are not sent apart."""
    comptime values_flip = Self.Numbers.forwarded_flip
    """See `TokenFormat`."""
    comptime Rows = Self.Rows_
    """Output tensors of values and scales."""

    @staticmethod
    @always_inline
    def rows_of(outputs: OutputTensors) -> Self.Rows:
        """Takes values and scales; see `TokenFormat.rows_of`."""
        return Self.Rows.of(outputs)

    @staticmethod
    @always_inline
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
        input_scale: Float32,
    ):
        """Copies a token; see `TokenFormat.encode`."""
        copy_bytes(
            dest=message,
            src=token.unsafe_bitcast[UInt8](),
            count=Self.token_bytes,
            is_streaming=False,
        )

    @staticmethod
    @always_inline
    def decode(message: BytePointer, rows: Self.Rows, row: Int, is_streaming: Bool):
        """Copies values and scales."""
        Self.Quantizing.decode(message, rows, row, is_streaming)
        comptime if Self.has_row_scale:
            Self._place_row_scale(message, rows, row)

    @staticmethod
    @always_inline
    def _place_row_scale(message: BytePointer, rows: Self.Rows, row: Int):
        rows.place_row_scale(
            row,
            message.unsafe_offset(Self.Quantizing.token_bytes).unsafe_bitcast[
                Float32
            ]()[],
        )

    @staticmethod
    @always_inline
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32, lane: Int
    ) -> LaneWire:
        """Takes the bytes as they are; see `TokenFormat.encode_lane`."""
        comptime assert (
            size_of[Scalar[input_type]]() == 1 and not is_scaled
        ), "max_ep: quantized tokens are bytes, and are not scaled again"
        return LaneWire(bitcast[DType.uint32, 4](elements), 0)

    @staticmethod
    @always_inline
    def is_identity[input_type: DType]() -> Bool:
        """Returns whether tokens travel as they are given."""
        return True

    @staticmethod
    @always_inline
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where the values of a row go."""
        return rows.values().unsafe_offset(row * Self.row_bytes)

    @staticmethod
    @always_inline
    def place_scales(rows: Self.Rows, row: Int, vector: Int, scales: LaneBytes):
        """Puts 16 bytes of scales into the output."""
        comptime if Self.has_row_scale:
            if vector == Self.Quantizing.n_scale_vectors:
                rows.place_row_scale(row, bitcast[DType.float32](scales[0]))
                return
        Self.Quantizing.place_scales(rows, row, vector, scales)

    @staticmethod
    @always_inline
    def decode_scales_lane(
        message: BytePointer, rows: Self.Rows, row: Int, lane: Int, n_lanes: Int
    ):
        """Copies one GPU lane's part of a message's scales."""
        Self.Quantizing.decode_scales_lane(message, rows, row, lane, n_lanes)
        comptime if Self.has_row_scale:
            if lane == 0:
                Self._place_row_scale(message, rows, row)


# ---------------------------------------------------------------------- the join


@fieldwise_init
struct QuantizedTokens(KernelArgument, TrivialRegisterPassable):
    """Tokens that are given as values and scales."""

    var joined: BytePointer
    """Result, `[n_tokens][token_bytes]`."""
    var values: BytePointer
    """`[n_tokens]` of the format's `value_bytes`."""
    var scales: BytePointer
    """`[n_tokens][n_blocks]`."""
    var n_tokens: Int32
    """Their number."""


@always_inline
def _join_word[
    Numbers: BlockNumbers, hidden_size: Int
](given: QuantizedTokens, token_idx: Int, word: Int):
    """Writes 4 bytes of a joined token."""
    comptime Format = BlockScaledTokenFormat[Numbers, RowByRow, hidden_size, 1]
    comptime value_words = Format.value_bytes // 4
    comptime scales_bytes = Format.n_blocks * Format.scale_bytes
    var joined = given.joined.unsafe_offset(token_idx * Format.token_bytes)
    var bits: UInt32 = 0
    if word < value_words:
        bits = Numbers.known_values(
            given.values.unsafe_offset(token_idx * Format.value_bytes)
            .unsafe_bitcast[UInt32]()
            .unsafe_load(word)
        )
    else:
        # Their rows need not be whole words.
        var first = (word - value_words) * 4
        var scales = given.scales.unsafe_offset(token_idx * scales_bytes)
        for i in range(min(4, scales_bytes - first)):
            bits |= scales[unsafe_offset=first + i].cast[DType.uint32]() << UInt32(
                8 * i
            )
        bits = Numbers.known_scales(bits)
    joined.unsafe_bitcast[UInt32]().unsafe_store(word, bits)


def join_kernel[Numbers: BlockNumbers, hidden_size: Int](given: QuantizedTokens):
    """Joins values and scales. Launch: a block of `_NUM_THREADS` for each token."""
    comptime Format = BlockScaledTokenFormat[Numbers, RowByRow, hidden_size, 1]
    for word in range(Int(thread_idx.x), Format.token_bytes // 4, _NUM_THREADS):
        _join_word[Numbers, hidden_size](given, Int(block_idx.x), word)


def launch_join[
    target: StaticString, Numbers: BlockNumbers, hidden_size: Int
](given: QuantizedTokens, context: DeviceContext) raises:
    """Joins the values and scales of a rank's tokens, on CPU or GPU."""
    comptime Format = BlockScaledTokenFormat[Numbers, RowByRow, hidden_size, 1]
    if given.n_tokens == 0:
        return
    comptime if is_gpu[target]():
        var function = context.compile_function[join_kernel[Numbers, hidden_size]]()
        context.enqueue_function(
            function, given, grid_dim=Int(given.n_tokens), block_dim=_NUM_THREADS
        )
    else:
        for token_idx in range(Int(given.n_tokens)):
            for word in range(Format.token_bytes // 4):
                _join_word[Numbers, hidden_size](given, token_idx, word)


# -------------------------------------------------------- scales of whole tokens


@always_inline
def _largest[
    input_type: DType
](
    token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    first: Int,
    n: Int,
    step: Int,
) -> UInt32:
    """Finds the largest magnitude of some elements, as bits."""
    var largest = SIMD[DType.uint32, WIDTH](0)
    for i in range(first, n, step):
        var x = token.unsafe_load[width=WIDTH](i).cast[DType.float32]()
        largest = max(largest, NVFP4.magnitude(x))
    return largest.reduce_max()


@always_inline
def _quantize_part[
    input_type: DType, hidden_size: Int
](
    joined: BytePointer,
    token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    largest: UInt32,
    lane: Int,
    n_lanes: Int,
):
    """Quantizes every `n_lanes`-th block of a token; lane 0 writes its scale."""
    comptime Format = BlockScaledTokenFormat[NVFP4, RowByRow, hidden_size, 1]
    var row_max = bitcast[DType.float32](
        max(largest, bitcast[DType.uint32](LEAST_ROW_MAX))
    )
    for block in range(lane, Format.n_blocks, n_lanes):
        Format.encode_block[input_type, True](joined, token, NVFP4_MAX / row_max, block)
    if lane == 0:
        comptime end = Format.value_bytes + Format.n_blocks
        for i in range(end, Format.token_bytes):
            joined[unsafe_offset=i] = 0
        var inverse = (row_max / NVFP4_MAX).cast[DType.bfloat16]().cast[DType.float32]()
        joined.unsafe_offset(Format.token_bytes).unsafe_bitcast[UInt32]().unsafe_store(
            0, LaneBytes(bitcast[DType.uint32](inverse), 0, 0, 0)
        )


def quantize_kernel[
    input_type: DType, hidden_size: Int
](
    joined: BytePointer,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    n_tokens: Int32,
):
    """Quantizes tokens to NVFP4 with a scale of each token.

    Launch: blocks of `_NUM_THREADS`, a warp for each token.

    Args:
        joined: Result, `[n_tokens]` of what dispatch forwards.
        tokens: `[n_tokens][hidden_size]`.
        n_tokens: Their number.
    """
    comptime Format = ForwardedTokenFormat[NVFP4, RowByRow, hidden_size, 1, True]
    var token_idx = Int(block_idx.x) * (_NUM_THREADS // WARP_SIZE) + Int(warp_id())
    if token_idx >= Int(n_tokens):
        return
    var lane = Int(lane_id())
    var token = tokens.unsafe_offset(token_idx * hidden_size)
    var largest = _largest(token, lane * WIDTH, hidden_size, WARP_SIZE * WIDTH)
    comptime for i in range(log2_floor(WARP_SIZE)):
        largest = max(largest, warp.shuffle_xor(largest, UInt32(1 << i)))
    _quantize_part[input_type, hidden_size](
        joined.unsafe_offset(token_idx * Format.token_bytes),
        token,
        largest,
        lane,
        WARP_SIZE,
    )


def launch_quantize[
    target: StaticString, input_type: DType, hidden_size: Int
](
    joined: BytePointer,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    n_tokens: Int,
    context: DeviceContext,
) raises:
    """Quantizes a rank's tokens, on CPU or GPU."""
    comptime Format = ForwardedTokenFormat[NVFP4, RowByRow, hidden_size, 1, True]
    if n_tokens == 0:
        return
    comptime if is_gpu[target]():
        var function = context.compile_function[
            quantize_kernel[input_type, hidden_size]
        ]()
        context.enqueue_function(
            function,
            joined,
            tokens,
            Int32(n_tokens),
            grid_dim=ceildiv(n_tokens, _NUM_THREADS // WARP_SIZE),
            block_dim=_NUM_THREADS,
        )
    else:
        for token_idx in range(n_tokens):
            var token = tokens.unsafe_offset(token_idx * hidden_size)
            _quantize_part[input_type, hidden_size](
                joined.unsafe_offset(token_idx * Format.token_bytes),
                token,
                _largest(token, 0, hidden_size, WIDTH),
                0,
                1,
            )
