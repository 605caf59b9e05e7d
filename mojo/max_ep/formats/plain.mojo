# SPDX-License-Identifier: Apache-2.0
"""PlainTokenFormat: elements as they are, or cast once to the type on the wire.

In an all-gather each token goes to every rank. Its routing metadata follows it in the
message (`Group.metadata_offset`) and is delivered as a routing map and probabilities.
"""
from std.memory import bitcast, unsafe_memcpy
from std.sys import size_of

from ..protocol.kernel_argument import ImmPointer, MutPointer, unused
from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.message_sizes import message_bytes, plain_token_bytes
from ..protocol.token_format import (
    BytePointer,
    LaneWire,
    OutputRows,
    OutputTensors,
    TokenFormat,
)


@fieldwise_init
struct PlainRows(OutputRows):
    """Output tensors of a format without scales."""

    var tokens: BytePointer
    var expert_ids: MutPointer[Int32]
    """All-gather: routing map, `[n_rows_max][router_top_k]`; after the last row, -1."""
    var probs: MutPointer[Float32]
    """All-gather: probabilities, `[n_rows_max][router_top_k]`; after the last row, 0."""
    var n_gathered: MutPointer[Int32]
    """All-gather: `[1]`, number of rows."""

    def __init__(out self, tokens: BytePointer):
        """Takes the tensor of a dispatch that is no all-gather."""
        self = unused[Self]()
        self.tokens = tokens

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        return {outputs.tokens, outputs.routing_map, outputs.probs, outputs.n_gathered}

    @always_inline
    def values(self) -> BytePointer:
        return self.tokens


struct PlainTokenFormat[
    wire_type: DType, hidden_size_: Int, top_k_: Int, router_top_k_: Int = 0
](TokenFormat):
    """Sends elements of the wire's type."""

    comptime hidden_size = Self.hidden_size_
    comptime top_k = Self.top_k_
    comptime hidden_multiple = MESSAGE_ALIGN // size_of[Scalar[Self.wire_type]]()
    comptime token_bytes = plain_token_bytes(
        Self.hidden_size, size_of[Scalar[Self.wire_type]]()
    )
    comptime msg_bytes = message_bytes(Self.token_bytes, Self.router_top_k_)
    comptime value_bytes = Self.token_bytes
    comptime lane_elements = MESSAGE_ALIGN // size_of[Scalar[Self.wire_type]]()
    comptime scale_vectors = 0
    comptime router_top_k = Self.router_top_k_
    comptime Rows = PlainRows

    @staticmethod
    @always_inline
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: ImmPointer[Scalar[input_type]],
        input_scale: Float32,
    ):
        comptime if Self.wire_type == input_type and not is_scaled:
            # Read again right away, so never streamed.
            unsafe_memcpy(
                dest=message, src=token.unsafe_bitcast[UInt8](), count=Self.token_bytes
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
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32, lane: Int
    ) -> LaneWire:
        comptime if Self.wire_type == input_type and not is_scaled:
            return LaneWire(bitcast[DType.uint32, 4](elements), 0)
        else:
            var x = elements.cast[DType.float32]()
            comptime if is_scaled:
                x *= input_scale
            return LaneWire(bitcast[DType.uint32, 4](x.cast[Self.wire_type]()), 0)

    @staticmethod
    def is_identity[input_type: DType]() -> Bool:
        return Self.wire_type == input_type

    @staticmethod
    @always_inline
    def place_metadata(
        rows: Self.Rows, row: Int, k: Int, expert_id: Int32, prob: Float32
    ):
        var place = row * Self.router_top_k + k
        rows.expert_ids[unsafe_offset=place] = expert_id
        rows.probs[unsafe_offset=place] = prob

    @staticmethod
    @always_inline
    def end_metadata(
        rows: Self.Rows, n_rows: Int, n_rows_max: Int, worker: Int, n_workers: Int
    ):
        comptime if Self.router_top_k == 0:
            return
        if worker == 0:
            rows.n_gathered[] = Int32(n_rows)
        var first = n_rows * Self.router_top_k + worker
        for place in range(first, n_rows_max * Self.router_top_k, n_workers):
            rows.expert_ids[unsafe_offset=place] = -1
            rows.probs[unsafe_offset=place] = 0


comptime BF16TokenFormat[hidden_size: Int, top_k: Int] = PlainTokenFormat[
    DType.bfloat16, hidden_size, top_k
]
"""Sends bfloat16 elements as they are; `hidden_size` is a multiple of 8."""

comptime Float32TokenFormat[hidden_size: Int, top_k: Int] = PlainTokenFormat[
    DType.float32, hidden_size, top_k
]
"""Sends float32 elements as they are; `hidden_size` is a multiple of 4."""
