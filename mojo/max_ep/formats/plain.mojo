# SPDX-License-Identifier: Apache-2.0
"""PlainTokenFormat: elements as they are, or cast once to the type on the wire."""
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.memory import bitcast
from std.sys import size_of

from ..cpu_copy import copy_bytes
from ..layout import MESSAGE_ALIGN, plain_token_bytes
from ..token_format import BytePointer, LaneWire, OutputTensors, TokenFormat


@fieldwise_init
struct PlainRows(DevicePassable, TrivialRegisterPassable):
    """Output tensor of a format without scales."""

    var tokens: BytePointer
    """Rows, `[max_recv_tokens][hidden_size]` in the wire's element type."""

    comptime device_type: AnyType = Self
    """A kernel gets the pointers as they are."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments."""
        return "PlainRows"


struct PlainTokenFormat[wire_type: DType, hidden_size_: Int, top_k_: Int](
    TokenFormat
):
    """Sends elements as they are, or cast once to the wire's type."""

    comptime hidden_size = Self.hidden_size_
    """Elements of a token."""
    comptime top_k = Self.top_k_
    """Experts of a token."""
    comptime hidden_multiple = MESSAGE_ALIGN // size_of[
        Scalar[Self.wire_type]
    ]()
    """Elements of 16 bytes."""
    comptime token_bytes = plain_token_bytes(
        Self.hidden_size, size_of[Scalar[Self.wire_type]]()
    )
    """Bytes of the elements."""
    comptime value_bytes = Self.token_bytes
    """All of them are values."""
    comptime lane_elements = MESSAGE_ALIGN // size_of[Scalar[Self.wire_type]]()
    """Elements of 16 bytes."""
    comptime has_scales = False
    """There are none."""
    comptime Rows = PlainRows
    """One output tensor."""

    @staticmethod
    @always_inline
    def rows_of(outputs: OutputTensors) -> Self.Rows:
        """Takes the tensor of tokens; see `TokenFormat.rows_of`."""
        return PlainRows(outputs.tokens)

    @staticmethod
    @always_inline
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
        input_scale: Float32,
    ):
        """Writes a token in wire format; see `TokenFormat.encode`."""
        comptime if Self.wire_type == input_type and not is_scaled:
            # Read again right away, so never streamed.
            copy_bytes(
                dest=message,
                src=token.unsafe_bitcast[UInt8](),
                count=Self.token_bytes,
                is_streaming=False,
            )
        else:
            # 4 divides every hidden size that is a multiple of 16 bytes.
            comptime width = 4
            var wire = message.unsafe_bitcast[Scalar[Self.wire_type]]()
            for i in range(0, Self.hidden_size, width):
                var x = token.unsafe_load[width=width](i).cast[DType.float32]()
                comptime if is_scaled:
                    x *= input_scale
                wire.unsafe_store(i, x.cast[Self.wire_type]())

    @staticmethod
    @always_inline
    def decode(
        message: BytePointer, rows: Self.Rows, row: Int, is_streaming: Bool
    ):
        """Copies the token of a message; see `TokenFormat.decode`."""
        copy_bytes(
            dest=rows.tokens.unsafe_offset(row * Self.token_bytes),
            src=message,
            count=Self.token_bytes,
            is_streaming=is_streaming,
        )

    @staticmethod
    @always_inline
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32
    ) -> LaneWire:
        """Encodes what one GPU lane holds; see `TokenFormat.encode_lane`."""
        comptime if Self.wire_type == input_type and not is_scaled:
            return LaneWire(bitcast[DType.uint32, 4](elements), 0)
        else:
            var x = elements.cast[DType.float32]()
            comptime if is_scaled:
                x *= input_scale
            return LaneWire(
                bitcast[DType.uint32, 4](x.cast[Self.wire_type]()), 0
            )

    @staticmethod
    @always_inline
    def is_identity[input_type: DType]() -> Bool:
        """Returns whether tokens travel as they are given."""
        return Self.wire_type == input_type

    @staticmethod
    @always_inline
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where a row goes."""
        return rows.tokens.unsafe_offset(row * Self.value_bytes)


comptime BF16TokenFormat[hidden_size: Int, top_k: Int] = PlainTokenFormat[
    DType.bfloat16, hidden_size, top_k
]
"""Sends bfloat16 elements as they are.

Parameters:
    hidden_size: Elements of a token, a multiple of 8.
    top_k: Experts of a token.
"""

comptime Float32TokenFormat[hidden_size: Int, top_k: Int] = PlainTokenFormat[
    DType.float32, hidden_size, top_k
]
"""Sends float32 elements as they are.

Parameters:
    hidden_size: Elements of a token, a multiple of 4.
    top_k: Experts of a token.
"""
