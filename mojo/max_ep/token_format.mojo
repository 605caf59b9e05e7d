# SPDX-License-Identifier: Apache-2.0
"""TokenFormat: how one token looks on the wire, as compile-time facts.

A message is `token_bytes` of encoded token and a source info behind it:

    | encoded token (values, then scales if any) | source info |
    0                                      token_bytes   msg_bytes

Each format has a file in `formats/`. A format knows nothing of ranks.
"""
from .kernel_argument import ImmPointer, KernelArgument, MutPointer
from .layout import MESSAGE_ALIGN, message_bytes

comptime BytePointer = MutPointer[UInt8]
"""Bytes of a region or of a tensor."""
comptime LaneBytes = SIMD[DType.uint32, 4]
"""16 bytes in the registers of one GPU lane: what one access moves."""


@fieldwise_init
struct LaneWire(TrivialRegisterPassable):
    """What one GPU lane puts on the wire in one step."""

    var values: LaneBytes
    """16 bytes of values."""
    var scales: LaneBytes
    """Lane `i < scale_vectors` of each 32: the `i`-th 16 bytes of the scales of these
    lanes."""


@fieldwise_init
struct OutputTensors(TrivialRegisterPassable):
    """The tensors that a dispatch op delivers rows into, whatever the format."""

    var tokens: BytePointer
    """Rows, `[n_rows][hidden_size]` in the format's element type."""
    var scales: BytePointer
    """Scales, in the format's layout; written if it has some."""
    var scales_columns: Int
    """Columns of the tensor of scales."""
    var routing_map: MutPointer[Int32]
    """All-gather: `[n_rows][router_top_k]`."""
    var probs: MutPointer[Float32]
    """All-gather: `[n_rows][router_top_k]`."""
    var n_gathered: MutPointer[Int32]
    """All-gather: `[1]`, number of rows."""


trait OutputRows(KernelArgument, TrivialRegisterPassable):
    """Where decoded tokens go: the pointers of a format's output tensors."""

    comptime depend_on_expert: Bool = False
    """Whether `of_expert` must be called for the rows of each expert."""

    @staticmethod
    def of(outputs: OutputTensors) -> Self:
        """Takes those of the op's tensors that the format writes."""
        ...

    def values(self) -> BytePointer:
        """Points to the values, `[n_rows_max]` of the format's `row_bytes`."""
        ...

    @always_inline
    def of_expert(self, local_expert: Int, first_row: Int) -> Self:
        """Finds where the rows of an expert go, the first of which is `first_row`."""
        return self


trait TokenFormat:
    """The wire format of one token; docs/adding_a_format.md describes it.

    On CPU a thread encodes a whole token, on GPU a warp, 16 bytes a lane and step.
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
    lanes. 0: there are none."""
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
    """All-gather: choices of the router in a token's routing metadata; 0: no
    all-gather."""
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
        """Writes a token, `[hidden_size]`, in wire format, `[token_bytes]`, aligned to
        `MESSAGE_ALIGN`. If it `is_scaled`, each element is multiplied by `input_scale`
        first, in float32."""
        ...

    @staticmethod
    def encode_lane[
        input_type: DType, is_scaled: Bool
    ](
        elements: SIMD[input_type, Self.lane_elements], input_scale: Float32, lane: Int
    ) -> LaneWire:
        """Encodes what one GPU lane holds, zeros behind the token's end; all lanes of the
        warp call it. Input scales are as in `encode`."""
        ...

    @staticmethod
    def is_identity[input_type: DType]() -> Bool:
        """Returns whether tokens travel as they are given."""
        return False

    @staticmethod
    @always_inline
    def row_values(rows: Self.Rows, row: Int) -> BytePointer:
        """Points to where the values of a row go, `[row_bytes]`."""
        return rows.values().unsafe_offset(row * Self.row_bytes)

    @staticmethod
    def place_scales(rows: Self.Rows, row: Int, vector: Int, scales: LaneBytes):
        """Puts 16 bytes of a token's scales into the output; `vector` says which ones of
        the message behind the first `row_bytes`."""
        pass

    @staticmethod
    @always_inline
    def place_metadata(
        rows: Self.Rows, row: Int, k: Int, expert_id: Int32, prob: Float32
    ):
        """Puts a choice of the routing metadata into the output: `k` is in
        `[0, router_top_k)`, an `expert_id` of -1 is none."""
        pass

    @staticmethod
    @always_inline
    def end_metadata(
        rows: Self.Rows, n_rows: Int, n_rows_max: Int, worker: Int, n_workers: Int
    ):
        """Writes the number of rows, with one of some threads; rows after the last one get
        no choices."""
        pass


@always_inline
def place_all_scales[
    Format: TokenFormat
](message: BytePointer, rows: Format.Rows, row: Int, worker: Int, n_workers: Int):
    """Puts the scales of a message into the output, with one of some threads."""
    comptime n_vectors = (Format.token_bytes - Format.row_bytes) // MESSAGE_ALIGN
    var words = message.unsafe_offset(Format.row_bytes).unsafe_bitcast[UInt32]()
    for vector in range(worker, n_vectors, n_workers):
        var scales = words.unsafe_load[width=4, alignment=MESSAGE_ALIGN](4 * vector)
        Format.place_scales(rows, row, vector, scales)


@fieldwise_init
struct SharedRows(KernelArgument, TrivialRegisterPassable):
    """Expert rows of this rank that combine reads in place, since they are not sent.

    Those of a fused shared expert, and on GPUs or with sums those that this rank's
    experts made of its own tokens.
    """

    var rows: BytePointer
    """`[n_rows][hidden_size]` of the combine dtype, as the last dispatch put
    them; a fused shared expert's row of token `t` is row `t`."""
    var n_rows: Int
    """Rows that may be read."""
