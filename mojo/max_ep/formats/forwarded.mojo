# SPDX-License-Identifier: Apache-2.0
"""ForwardedTokenFormat: tokens that are quantized when they are given.

A token is given as it stands on the wire: values, then scales, each of whole 16 bytes.
`join_quantized` puts both together, and leaves out what no token of the format has, so
that a word of inline bytes says whether they have arrived (`BlockNumbers`).
"""
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.memory import bitcast
from std.sys import size_of

from ..cpu_copy import copy_bytes
from ..kernel_argument import KernelArgument
from ..layout import MESSAGE_ALIGN
from ..token_format import BytePointer, LaneBytes, LaneWire, OutputTensors, TokenFormat
from .block_scaled import BlockNumbers, BlockScaledTokenFormat
from .scale_layouts import RowByRow, ScaledRows

comptime _NUM_THREADS = 256


struct ForwardedTokenFormat[
    Numbers: BlockNumbers, Rows_: ScaledRows, hidden_size_: Int, top_k_: Int
](TokenFormat):
    """Sends values and scales as they are given, and delivers them as the format does.

    Parameters:
        Numbers: What values and scales are.
        Rows_: Where scales go at the receiver.
        hidden_size_: Elements of a token, a multiple of the block.
        top_k_: Experts of a token.
    """

    comptime Quantizing = BlockScaledTokenFormat[
        Self.Numbers, Self.Rows_, Self.hidden_size_, Self.top_k_
    ]
    """The format that makes such tokens."""
    comptime hidden_size = Self.Quantizing.token_bytes
    """Bytes of a token, as it is given and sent."""
    comptime top_k = Self.top_k_
    """Experts of a token."""
    comptime hidden_multiple = Self.Quantizing.hidden_multiple
    """Whole blocks, and 16 bytes of values."""
    comptime token_bytes = Self.Quantizing.token_bytes
    """Bytes of values and scales."""
    comptime value_bytes = Self.Quantizing.token_bytes
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
        Self.Quantizing.place_scales(rows, row, vector, scales)

    @staticmethod
    @always_inline
    def decode_scales_lane(
        message: BytePointer, rows: Self.Rows, row: Int, lane: Int, n_lanes: Int
    ):
        """Copies one GPU lane's part of a message's scales."""
        Self.Quantizing.decode_scales_lane(message, rows, row, lane, n_lanes)


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
