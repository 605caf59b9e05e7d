# SPDX-License-Identifier: Apache-2.0
"""TokenFormat: how one token looks on the wire, as compile-time facts.

A message is `token_bytes` of encoded token and a source info behind it:

    | encoded token (values, then scales if any) | source info |
    0                                      token_bytes   msg_bytes

Each format has a file in `formats/`. A format knows nothing of ranks.
"""
from .kernel_argument import ImmPointer, KernelArgument, MutPointer, unused
from .layout import MESSAGE_ALIGN
from .message_sizes import message_bytes

comptime BytePointer = MutPointer[UInt8]
"""Bytes of a region or of a tensor."""
comptime LaneBytes = SIMD[DType.uint32, 4]
"""16 bytes in the registers of one GPU lane: what one access moves."""
comptime SENTINEL = UInt32(0xFFFF_FFFF)
"""Last word of 16 bytes that have not arrived yet, where data is its own flag.

The reader restores it. Data does not have it there (`avoid_sentinel`).
"""


@fieldwise_init
struct LaneWire(TrivialRegisterPassable):
    """What one GPU lane puts on the wire in one step."""

    var values: LaneBytes
    """16 bytes of values."""
    var scales: LaneBytes
    """Lane `i < scale_vectors` of each 32: the `i`-th 16 bytes of the scales of these
    lanes."""


struct OutputTensors(TrivialRegisterPassable):
    """The tensors that a dispatch op delivers rows into, whatever the format."""

    var tokens: BytePointer
    """Rows, `[n_rows][hidden_size]` in the format's element type."""
    var scales: BytePointer
    """Scales, in the format's layout; written if it has some."""
    var scales_columns: Int
    """Columns of the tensor of scales; `formats/given.mojo`: from a scale of a row to
    its next."""
    var routing_map: MutPointer[Int32]
    """All-gather: `[n_rows][router_top_k]`."""
    var probs: MutPointer[Float32]
    """All-gather: `[n_rows][router_top_k]`."""
    var n_gathered: MutPointer[Int32]
    """All-gather: `[1]`, number of rows."""
    var local_ids: MutPointer[Int64]
    """`formats/given.mojo`: `[n_rows][router_top_k]`."""
    var first_expert: Int
    """`formats/given.mojo`: the first of this rank's experts."""
    var scales_step: Int
    """`formats/given.mojo`: from the scales of a row to those of the next."""

    def __init__(out self, tokens: BytePointer, scales: BytePointer):
        """Takes the tensors of a format without routing metadata.

        Args:
            tokens: Rows.
            scales: Scales, if the format has some.
        """
        self = unused[Self]()
        self.tokens = tokens
        self.scales = scales


trait OutputRows(KernelArgument, TrivialRegisterPassable):
    """Where decoded tokens go: the pointers of a format's output tensors."""

    comptime depend_on_expert: Bool = False
    """Whether `of_expert` must be called for the rows of each expert."""

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        """Takes those of the op's tensors that the format writes.

        Args:
            outputs: All of them.

        Returns:
            Its own.
        """
        ...

    def values(self) -> BytePointer:
        """Points to the values.

        Returns:
            `[n_rows_max]` of the format's `row_bytes`.
        """
        ...

    @always_inline
    def of_expert(self, local_expert: Int, first_row: Int) -> Self:
        """Finds where the rows of an expert go.

        Args:
            local_expert: The expert.
            first_row: The first of its rows.

        Returns:
            The pointers to use for them.
        """
        return self


trait TokenFormat:
    """The wire format of one token.

    On CPU a thread encodes a whole token. On GPU a warp does, lane
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
    comptime row_bytes: Int = Self.value_bytes
    """Bytes of them that go to the row; scales of quantized tokens may follow."""
    comptime lane_elements: Int
    """Elements whose values fill 16 bytes."""
    comptime scale_vectors: Int
    """Scales follow the values. This many times 16 bytes belong to the values of 32
    lanes, 4 at most. 0: there are none."""
    comptime n_scale_vectors: Int = (
        Self.token_bytes - Self.value_bytes
    ) // MESSAGE_ALIGN
    """16 bytes of scales of a token."""
    comptime values_flip: UInt32 = 0
    """Bits (xor) that change in the last word of 16 inline bytes of values on the way,
    so that no value looks as if it had not arrived (`SENTINEL`)."""
    comptime scales_flip: UInt32 = 0
    """The same for 16 bytes of scales."""
    comptime router_top_k: Int = 0
    """Choices of the router in a token's routing metadata, if its choices are ranks; 0:
    there is none."""
    comptime Rows: OutputRows
    """Where decoded tokens go."""

    @staticmethod
    def encode[
        input_type: DType, is_scaled: Bool
    ](
        message: BytePointer,
        token: ImmPointer[Scalar[input_type]],
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
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32, lane: Int
    ) -> LaneWire:
        """Encodes what one GPU lane holds; all lanes of the warp call it.

        Parameters:
            input_type: Element type of the token.
            is_scaled: Whether to multiply by `input_scale` (in float32) first.

        Args:
            elements: The lane's elements; zeros behind the token's end.
            input_scale: Factor of every element; read if `is_scaled`.
            lane: This lane.

        Returns:
            The lane's part of the wire format.
        """
        ...

    @staticmethod
    def is_identity[input_type: DType]() -> Bool:
        """Returns whether tokens travel as they are given.

        Parameters:
            input_type: Element type of the token.

        Returns:
            Whether an encoded token is the token.
        """
        return False

    @staticmethod
    def place_scales(rows: Self.Rows, row: Int, vector: Int, scales: LaneBytes):
        """Puts 16 bytes of a token's scales into the output.

        Args:
            rows: The output tensors.
            row: The row that the token takes there.
            vector: Which 16 bytes of the message behind the first `row_bytes`.
            scales: The bytes.
        """
        pass

    @staticmethod
    @always_inline
    def place_metadata(
        rows: Self.Rows, row: Int, k: Int, expert_id: Int32, prob: Float32
    ):
        """Puts a choice of the routing metadata into the output.

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
    def place_weight(rows: Self.Rows, row: Int, weight: Float32):
        """Puts the router weight of a row into the output, if combine returns sums.

        Args:
            rows: The output tensors.
            row: The row.
            weight: The weight of its choice.
        """
        pass

    @staticmethod
    @always_inline
    def end_metadata(
        rows: Self.Rows, n_rows: Int, n_rows_max: Int, worker: Int, n_workers: Int
    ):
        """Writes the number of rows; rows after the last one get no choices.

        Args:
            rows: The output tensors.
            n_rows: Number of rows.
            n_rows_max: Rows that the output tensors hold.
            worker: Index of this thread among those that share the work.
            n_workers: Number of these threads.
        """
        pass


@fieldwise_init
struct LocalRows(KernelArgument, TrivialRegisterPassable):
    """Expert rows of this rank that combine reads in place, since they are not sent.

    They are rows of the shared expert; also, on GPUs or with sums, the results of this
    rank's experts for its own tokens.
    """

    var rows: BytePointer
    """`[n_rows][hidden_size]` of the combine dtype, as the last dispatch put
    them; a fused shared expert's row of token `t` is row `t`."""
    var n_rows: Int
    """Rows that may be read."""
