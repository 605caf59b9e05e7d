# SPDX-License-Identifier: Apache-2.0
"""GivenTokenFormat: bytes of a row, and scales, as they are given.

Whoever calls knows what they mean. A token is given as it stands on the wire: values,
then scales of 4 bytes each, both of whole 16 bytes. Each row gets the router weight of
its choice; where choices are ranks, the ids and weights of all choices of its token.
"""
from std.memory import bitcast, unsafe_memcpy

from ..protocol.kernel_argument import ImmPointer, MutPointer
from ..protocol.layout import MESSAGE_ALIGN, round_up
from ..protocol.message_sizes import message_bytes
from ..protocol.token_format import (
    BytePointer,
    LaneBytes,
    LaneWire,
    OutputRows,
    OutputTensors,
    TokenFormat,
)


@fieldwise_init
struct GivenRows(OutputRows):
    """Output tensors; those of ids are written where choices are ranks."""

    var tokens: BytePointer
    var scales: MutPointer[Int32]
    var from_row_to_next: Int
    """Words from the scales of a row to those of the next."""
    var from_scale_to_next: Int
    """Words from a scale of a row to its next."""
    var ids: MutPointer[Int32]
    """What the router chose, `[n_rows_max][router_top_k]`; after the last row, -1."""
    var local_ids: MutPointer[Int64]
    """The same, counted from this rank's first expert; -1 for those of other ranks."""
    var first_expert: Int32
    """The first of this rank's experts."""
    var weights: MutPointer[Float32]
    """`[n_rows_max][router_top_k]`, or where choices are experts `[n_rows_max]`."""

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        return {
            outputs.tokens,
            outputs.scales.unsafe_bitcast[Int32](),
            outputs.scales_step,
            outputs.scales_columns,
            outputs.routing_map,
            outputs.local_ids,
            Int32(outputs.first_expert),
            outputs.probs,
        }

    @always_inline
    def values(self) -> BytePointer:
        return self.tokens


struct GivenTokenFormat[
    row_bytes_: Int, n_scales: Int, top_k_: Int, router_top_k_: Int, n_local: Int
](TokenFormat):
    """Sends rows and scales as they are given; `n_local`: experts of the router on each
    rank."""

    comptime hidden_size = Self.token_bytes
    """In bytes, as they are given."""
    comptime top_k = Self.top_k_
    comptime hidden_multiple = MESSAGE_ALIGN
    comptime token_bytes = Self.row_bytes_ + round_up(4 * Self.n_scales, MESSAGE_ALIGN)
    comptime msg_bytes = message_bytes(Self.token_bytes, Self.router_top_k_)
    comptime value_bytes = Self.token_bytes
    """All of them are sent alike."""
    comptime row_bytes = Self.row_bytes_
    comptime lane_elements = MESSAGE_ALIGN
    comptime scale_vectors = 0
    comptime router_top_k = Self.router_top_k_
    comptime Rows = GivenRows

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
        return LaneWire(bitcast[DType.uint32, 4](elements), 0)

    @staticmethod
    def is_identity[input_type: DType]() -> Bool:
        return True

    @staticmethod
    @always_inline
    def place_scales(rows: Self.Rows, row: Int, vector: Int, scales: LaneBytes):
        comptime for i in range(4):
            var scale = 4 * vector + i
            if scale < Self.n_scales:
                var place = row * rows.from_row_to_next + scale * (
                    rows.from_scale_to_next
                )
                rows.scales[unsafe_offset=place] = Int32(scales[i])

    @staticmethod
    @always_inline
    def place_metadata(
        rows: Self.Rows, row: Int, k: Int, expert_id: Int32, prob: Float32
    ):
        var place = row * Self.router_top_k + k
        var local = expert_id - rows.first_expert
        var is_here = local >= 0 and local < Int32(Self.n_local)
        rows.ids[unsafe_offset=place] = expert_id
        rows.local_ids[unsafe_offset=place] = Int64(local) if is_here else -1
        rows.weights[unsafe_offset=place] = prob

    @staticmethod
    @always_inline
    def place_weight(rows: Self.Rows, row: Int, weight: Float32):
        comptime if Self.router_top_k == 0:
            rows.weights[unsafe_offset=row] = weight

    @staticmethod
    @always_inline
    def end_metadata(
        rows: Self.Rows, n_rows: Int, n_rows_max: Int, worker: Int, n_workers: Int
    ):
        comptime if Self.router_top_k == 0:
            return
        var first = n_rows * Self.router_top_k + worker
        for place in range(first, n_rows_max * Self.router_top_k, n_workers):
            rows.ids[unsafe_offset=place] = -1
            rows.local_ids[unsafe_offset=place] = -1
