# SPDX-License-Identifier: Apache-2.0
"""WithMetadataTokenFormat: a token, and what the router chose for it.

For an all-gather: each token goes to every rank, so its choices do not say where.
They travel behind it (`Group.metadata_offset`), and come out beside
it as a routing map and probabilities.
"""
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from ..layout import message_bytes
from ..token_format import BytePointer, LaneWire, OutputTensors, TokenFormat
from .plain import PlainRows, PlainTokenFormat


@fieldwise_init
struct RowsWithMetadata(DevicePassable, TrivialRegisterPassable):
    """Output tensors of an all-gather."""

    var tokens: BytePointer
    """Rows, `[n_rows_max][hidden_size]` in the wire's element type."""
    var expert_ids: Pointer[Int32, MutUntrackedOrigin]
    """The routing map, `[n_rows_max][router_top_k]`; behind the last row, -1."""
    var probs: Pointer[Float32, MutUntrackedOrigin]
    """Probabilities, `[n_rows_max][router_top_k]`; behind the last row, 0."""
    var n_gathered: Pointer[Int32, MutUntrackedOrigin]
    """`[1]`: rows that there are."""

    comptime device_type: AnyType = Self
    """A kernel gets the pointers as they are."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments."""
        return "RowsWithMetadata"


struct WithMetadataTokenFormat[
    wire_type: DType, hidden_size_: Int, n_ranks: Int, n_carried_: Int
](TokenFormat):
    """Sends elements as they are to every rank, with the router's choices.

    To dispatch each rank is an expert, and each token chooses all of them, with a
    weight of 1.

    Parameters:
        wire_type: Element type on the wire and of the output rows.
        hidden_size_: Elements of a token, a multiple of 16 bytes.
        n_ranks: Ranks of the group.
        n_carried_: Choices of the router for a token.
    """

    comptime _Plain = PlainTokenFormat[
        Self.wire_type, Self.hidden_size_, Self.n_ranks
    ]
    comptime hidden_size = Self._Plain.hidden_size
    """Elements of a token."""
    comptime top_k = Self.n_ranks
    """A token goes to every rank."""
    comptime hidden_multiple = Self._Plain.hidden_multiple
    """Elements of 16 bytes."""
    comptime token_bytes = Self._Plain.token_bytes
    """Bytes of the elements."""
    comptime msg_bytes = message_bytes(Self.token_bytes, Self.n_carried_)
    """Bytes of elements, choices and source info."""
    comptime value_bytes = Self._Plain.value_bytes
    """All elements are values."""
    comptime lane_elements = Self._Plain.lane_elements
    """Elements of 16 bytes."""
    comptime has_scales = False
    """There are none."""
    comptime router_top_k = Self.n_carried_
    """Choices of the router for a token."""
    comptime Rows = RowsWithMetadata
    """Tokens, routing map, probabilities, and how many."""

    @staticmethod
    @always_inline
    def rows_of(outputs: OutputTensors) -> Self.Rows:
        """Takes tokens and routing metadata; see `TokenFormat.rows_of`."""
        return {
            outputs.tokens,
            outputs.routing_map,
            outputs.probs,
            outputs.n_gathered,
        }

    @staticmethod
    @always_inline
    def _tokens(rows: Self.Rows) -> PlainRows:
        return PlainRows(rows.tokens)

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
        Self._Plain.encode[input_type, is_scaled](message, token, input_scale)

    @staticmethod
    @always_inline
    def decode(
        message: BytePointer, rows: Self.Rows, row: Int, is_streaming: Bool
    ):
        """Copies the token of a message; see `TokenFormat.decode`."""
        Self._Plain.decode(message, Self._tokens(rows), row, is_streaming)

    @staticmethod
    @always_inline
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32
    ) -> LaneWire:
        """Encodes what one GPU lane holds; see `TokenFormat.encode_lane`."""
        return Self._Plain.encode_lane[input_type, is_scaled](
            rebind[SIMD[input_type, Self._Plain.lane_elements]](elements),
            input_scale,
        )

    @staticmethod
    @always_inline
    def is_identity[input_type: DType]() -> Bool:
        """Returns whether tokens travel as they are given."""
        return Self._Plain.is_identity[input_type]()

    @staticmethod
    @always_inline
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where a row goes."""
        return Self._Plain.row_values(Self._tokens(rows), row)

    @staticmethod
    @always_inline
    def place_metadata(
        rows: Self.Rows, row: Int, k: Int, expert_id: Int32, prob: Float32
    ):
        """Puts a choice into routing map and probabilities."""
        var place = row * Self.router_top_k + k
        rows.expert_ids[unsafe_offset=place] = expert_id
        rows.probs[unsafe_offset=place] = prob

    @staticmethod
    @always_inline
    def end_metadata(
        rows: Self.Rows,
        n_rows: Int,
        n_rows_max: Int,
        worker: Int,
        n_workers: Int,
    ):
        """Says how many rows there are; those behind choose nothing."""
        if worker == 0:
            rows.n_gathered[] = Int32(n_rows)
        for place in range(
            n_rows * Self.router_top_k + worker,
            n_rows_max * Self.router_top_k,
            n_workers,
        ):
            rows.expert_ids[unsafe_offset=place] = -1
            rows.probs[unsafe_offset=place] = 0
