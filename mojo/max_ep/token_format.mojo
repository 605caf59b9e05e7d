# SPDX-License-Identifier: Apache-2.0
"""TokenFormat: how one token looks on the wire, as compile-time facts.

A message is `token_bytes` of encoded token and a source info behind it:

    | encoded token (values, then scales if any) | source info |
    0                                      token_bytes   msg_bytes

This file holds the trait and the format that sends elements as they are; each
further format has a file in `formats/`. A format knows nothing of ranks.
"""
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.memory import bitcast
from std.sys import size_of

from .cpu_copy import copy_bytes
from .layout import MESSAGE_ALIGN, message_bytes, plain_token_bytes

comptime BytePointer = Pointer[UInt8, MutUntrackedOrigin]
"""Bytes of a region or of a tensor."""


comptime LaneBytes = SIMD[DType.uint32, 4]
"""16 bytes in the registers of one GPU lane: what one access moves."""


@fieldwise_init
struct LaneWire(TrivialRegisterPassable):
    """What one GPU lane puts on the wire in one step."""

    var values: LaneBytes
    """16 bytes of values."""
    var scale: Float32
    """Scale of the block that the lane's elements are in, if there is one."""


trait TokenFormat:
    """The wire format of one token.

    On CPU a thread encodes or decodes a whole token. On GPU a warp does, lane
    by lane: in step `s` of a warp of `n` lanes, lane `l` moves the 16 bytes of
    values at `(s * n + l) * 16`.
    """

    comptime hidden_size: Int
    """Elements of a token."""
    comptime top_k: Int
    """Experts of a token."""
    comptime hidden_multiple: Int
    """`hidden_size` must be a multiple of this."""
    comptime token_bytes: Int
    """Bytes of the encoded token, a multiple of `MESSAGE_ALIGN`."""
    comptime msg_bytes: Int = message_bytes(Self.token_bytes)
    """Bytes of a message: token and source info."""
    comptime value_bytes: Int
    """Bytes of the values of a token, without scales; a multiple of 16."""
    comptime lane_elements: Int
    """Elements whose values fill 16 bytes."""
    comptime has_scales: Bool
    """Whether float32 scales follow the values, one for eight lanes."""
    comptime router_top_k: Int = 0
    """Choices of the router that a token carries to every rank, in an all-gather;
    0: its choices say where it goes."""
    comptime Rows: DevicePassable & TrivialRegisterPassable
    """Where decoded tokens go: the pointers of the output tensors."""

    @staticmethod
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
        input_scale: Float32,
    ):
        """Writes a token in wire format.

        Parameters:
            input_type: Element type of the token.
            is_scaled: Whether to multiply by `input_scale` (in float32) first.

        Args:
            message: `[token_bytes]`, aligned to `MESSAGE_ALIGN`.
            token: `[hidden_size]` elements.
            input_scale: Factor of every element; read if `is_scaled`.
        """
        ...

    @staticmethod
    def decode(
        message: BytePointer, rows: Self.Rows, row: Int, is_streaming: Bool
    ):
        """Puts the token of a message into the output tensors.

        Args:
            message: `[msg_bytes]`, aligned to `MESSAGE_ALIGN`.
            rows: The output tensors.
            row: The row that the token takes there.
            is_streaming: Whether to write past the caches.
        """
        ...

    @staticmethod
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32
    ) -> LaneWire:
        """Encodes what one GPU lane holds; all lanes of the warp call it.

        Parameters:
            input_type: Element type of the token.
            is_scaled: Whether to multiply by `input_scale` (in float32) first.

        Args:
            elements: The lane's elements; zeros behind the token's end.
            input_scale: Factor of every element; read if `is_scaled`.

        Returns:
            The lane's part of the wire format.
        """
        ...

    @staticmethod
    def is_identity[input_type: DType]() -> Bool:
        """Tells whether tokens travel as they are given.

        Parameters:
            input_type: Element type of the token.

        Returns:
            Whether an encoded token is the token.
        """
        ...

    @staticmethod
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where the values of a row go.

        Args:
            rows: The output tensors.
            row: The row.

        Returns:
            `[value_bytes]`.
        """
        ...

    @staticmethod
    def place_scales(rows: Self.Rows, row: Int, step: Int, scales: LaneBytes):
        """Puts 16 bytes of scales into the output.

        Args:
            rows: The output tensors.
            row: The row that the token takes there.
            step: Which 16 bytes of the message's scales.
            scales: The bytes.
        """
        ...

    @staticmethod
    def decode_scales_lane(
        message: BytePointer, rows: Self.Rows, row: Int, lane: Int, n_lanes: Int
    ):
        """Puts one GPU lane's part of a message's scales into the output.

        Args:
            message: `[msg_bytes]`.
            rows: The output tensors.
            row: The row that the token takes there.
            lane: This lane.
            n_lanes: Lanes that share the work.
        """
        ...

    @staticmethod
    @always_inline
    def place_metadata(
        rows: Self.Rows, row: Int, k: Int, expert_id: Int32, prob: Float32
    ):
        """Puts a choice that a token carries into the output.

        Args:
            rows: The output tensors.
            row: The row that the token takes there.
            k: Which of its choices, in `[0, router_top_k)`.
            expert_id: What the router chose; -1: nothing.
            prob: With which probability.
        """
        pass

    @staticmethod
    @always_inline
    def end_metadata(
        rows: Self.Rows,
        n_rows: Int,
        n_rows_max: Int,
        worker: Int,
        n_workers: Int,
    ):
        """Says how many rows there are; those behind choose nothing.

        Args:
            rows: The output tensors.
            n_rows: Rows that there are.
            n_rows_max: Rows there is room for.
            worker: Which of those that share the work.
            n_workers: How many they are.
        """
        pass


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
        """Names the type in error messages about kernel arguments.

        Returns:
            The name.
        """
        return "PlainRows"


@fieldwise_init
struct SharedRows(DevicePassable, TrivialRegisterPassable):
    """Expert rows of this rank that combine adds where they stand.

    Those of a fused shared expert, and on GPUs or with a reduced protocol those
    that this rank's own experts made of its own tokens: neither is sent.
    """

    var rows: BytePointer
    """`[n_rows][hidden_size]` of the combine dtype, as the last dispatch put
    them; a fused shared expert's row of token `t` is row `t`."""
    var n_rows: Int
    """Rows that may be read."""

    comptime device_type: AnyType = Self
    """A kernel gets this as it is."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments.

        Returns:
            The name.
        """
        return "SharedRows"

    @staticmethod
    def none() -> Self:
        """Makes what stands for "all rows are sent".

        Returns:
            No rows.
        """
        # A Pointer is never null; nobody reads behind this one.
        return Self(BytePointer(unsafe_from_address=MESSAGE_ALIGN), 0)


@fieldwise_init
struct RouterWeights(DevicePassable, TrivialRegisterPassable):
    """Router weights that go with the tokens of a dispatch."""

    var weights: Pointer[Float32, ImmUntrackedOrigin]
    """`[n_tokens][top_k]`."""
    var n_tokens: Int
    """Tokens whose weights may be read."""
    var top_k: Int
    """Weights of a token."""

    comptime device_type: AnyType = Self
    """A kernel gets this as it is."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments.

        Returns:
            The name.
        """
        return "RouterWeights"

    @staticmethod
    def none() -> Self:
        """Makes what stands for "combine gets the weights".

        Returns:
            No weights.
        """
        # A Pointer is never null; nobody reads behind this one.
        return Self(
            Pointer[Float32, ImmUntrackedOrigin](
                unsafe_from_address=MESSAGE_ALIGN
            ),
            0,
            0,
        )


struct PlainTokenFormat[wire_type: DType, hidden_size_: Int, top_k_: Int](
    TokenFormat
):
    """Sends elements as they are, or cast once to the wire's type.

    Parameters:
        wire_type: Element type on the wire and of the output rows.
        hidden_size_: Elements of a token, a multiple of 16 bytes.
        top_k_: Experts of a token.
    """

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
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: Pointer[Scalar[input_type], ImmUntrackedOrigin],
        input_scale: Float32,
    ):
        """Writes a token in wire format; see `TokenFormat.encode`.

        Parameters:
            input_type: Element type of the token.
            is_scaled: Whether to multiply by `input_scale` (in float32) first.

        Args:
            message: `[token_bytes]`.
            token: `[hidden_size]` elements.
            input_scale: Factor of every element; read if `is_scaled`.
        """
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
        """Copies the token of a message; see `TokenFormat.decode`.

        Args:
            message: `[msg_bytes]`.
            rows: The output tensor.
            row: The row that the token takes there.
            is_streaming: Whether to write past the caches.
        """
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
        """Encodes what one GPU lane holds; see `TokenFormat.encode_lane`.

        Parameters:
            input_type: Element type of the token.
            is_scaled: Whether to multiply by `input_scale` (in float32) first.

        Args:
            elements: The lane's elements.
            input_scale: Factor of every element; read if `is_scaled`.

        Returns:
            The elements in the wire's type.
        """
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
        """Tells whether tokens travel as they are given.

        Parameters:
            input_type: Element type of the token.

        Returns:
            Whether that is the wire's type.
        """
        return Self.wire_type == input_type

    @staticmethod
    @always_inline
    def place_scales(rows: Self.Rows, row: Int, step: Int, scales: LaneBytes):
        """Does nothing: there are no scales.

        Args:
            rows: The output tensor.
            row: The row that the token takes there.
            step: Which 16 bytes.
            scales: The bytes.
        """
        pass

    @staticmethod
    @always_inline
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where a row goes.

        Args:
            rows: The output tensor.
            row: The row.

        Returns:
            `[value_bytes]`.
        """
        return rows.tokens.unsafe_offset(row * Self.value_bytes)

    @staticmethod
    @always_inline
    def decode_scales_lane(
        message: BytePointer, rows: Self.Rows, row: Int, lane: Int, n_lanes: Int
    ):
        """Does nothing: there are no scales.

        Args:
            message: `[msg_bytes]`.
            rows: The output tensor.
            row: The row that the token takes there.
            lane: This lane.
            n_lanes: Lanes that share the work.
        """
        pass


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
