# SPDX-License-Identifier: Apache-2.0
"""The tensors of a launch, checked before the first send, as pointers."""
from layout import TileTensor

from .call import Call, check_shape, check_size, imm, mut_
from .kernel_argument import ImmPointer, KernelArgument, MutPointer, unused
from .layout import Group, MESSAGE_ALIGN
from .row_tables import RowTables
from .token_format import BytePointer, LocalRows, TokenFormat

comptime InputScales = Optional[def[dtype: DType](Int) capturing -> Scalar[dtype]]
"""Gives the factor of a token for an expert id, or None."""


# ------------------------------------------------------------- tensors of dispatch


struct GivenTokens[input_type: DType](KernelArgument, TrivialRegisterPassable):
    """What a dispatch sends."""

    var tokens: ImmPointer[Scalar[Self.input_type]]
    """`[n_tokens][hidden_size]`."""
    var topk_ids: ImmPointer[Int32]
    """`[n_tokens][top_k]`; in an all-gather `[n_tokens][router_top_k]`."""
    var router_weights: ImmPointer[Float32]
    """Weights in the shape of `topk_ids`; read if combine returns sums."""
    var n_tokens: Int
    var kept_ids: MutPointer[Int64]
    """Where a copy of `topk_ids` goes, if `Group.is_given` and it is elsewhere."""

    def __init__(
        out self,
        tokens: ImmPointer[Scalar[Self.input_type]],
        topk_ids: ImmPointer[Int32],
        router_weights: ImmPointer[Float32],
        n_tokens: Int,
    ):
        """Takes the tensors of a dispatch that keeps no copy of the ids."""
        self.tokens = tokens
        self.topk_ids = topk_ids
        self.router_weights = router_weights
        self.n_tokens = n_tokens
        self.kept_ids = unused[MutPointer[Int64]]()

    @always_inline
    def keep_ids(self, n_ids: Int, first: Int, step: Int):
        """Copies the ids `first`, `first + step`, ... of `n_ids`."""
        if Int(self.kept_ids) == Int(self.topk_ids):
            return
        var ids = self.topk_ids.unsafe_bitcast[Int64]()
        for i in range(first, n_ids, step):
            self.kept_ids[unsafe_offset=i] = ids[unsafe_offset=i]


def n_choices_of[Format: TokenFormat]() -> Int:
    """Counts the experts that the router gives a token."""
    return Format.router_top_k if Format.router_top_k > 0 else Format.top_k


def given_tokens[
    group: Group, //, Format: TokenFormat, target: StaticString
](
    call: Call[group], tokens: TileTensor, topk_ids: TileTensor[DType.int32, ...]
) raises -> GivenTokens[tokens.dtype]:
    """Checks what dispatch sends, without router weights."""
    var op = call.op
    var n_tokens = Int(tokens.dim[0]())
    call.check_n_tokens[target](n_tokens)
    check_shape(op, "topk_ids", topk_ids, n_tokens, n_choices_of[Format]())
    check_shape(op, "input_tokens", tokens, n_tokens, Format.hidden_size)
    var no_weights = unused[ImmPointer[Float32]]()
    return {imm(tokens), imm(topk_ids), no_weights, n_tokens}


@fieldwise_init
struct DispatchedRows[group: Group, Format: TokenFormat](
    KernelArgument, TrivialRegisterPassable
):
    """What a dispatch delivers."""

    var rows: Self.Format.Rows
    """`[n_rows_max]` rows, and their scales where the format has any."""
    var n_rows_max: Int
    """Rows that have a place."""
    var tables: RowTables[Self.group]
    """Which row is whose."""
    var src_info: MutPointer[Int32]
    """`[n_rows_max][2]`: token on its source rank, and k; -1: of a shared expert."""

    @always_inline
    def set_source(self, row: Int, token_idx: Int, k: Int):
        self.src_info[unsafe_offset=2 * row] = Int32(token_idx)
        self.src_info[unsafe_offset=2 * row + 1] = Int32(k)


@always_inline
def place_all_scales[
    Format: TokenFormat
](message: BytePointer, rows: Format.Rows, row: Int, worker: Int, n_workers: Int):
    """Puts the scales of a message into a row, with one of some threads."""
    comptime n_vectors = (Format.token_bytes - Format.row_bytes) // MESSAGE_ALIGN
    var words = message.unsafe_offset(Format.row_bytes).unsafe_bitcast[UInt32]()
    for vector in range(worker, n_vectors, n_workers):
        var scales = words.unsafe_load[width=4, alignment=MESSAGE_ALIGN](4 * vector)
        Format.place_scales(rows, row, vector, scales)


def dispatched_rows[
    group: Group, //, Format: TokenFormat
](
    call: Call[group],
    rows: Format.Rows,
    row_offsets: TileTensor,
    expert_ids: TileTensor[DType.int32, ...],
    src_info: TileTensor[DType.int32, ...],
) raises -> DispatchedRows[group, Format]:
    var op = call.op
    comptime if group.is_padded:
        comptime assert row_offsets.dtype == DType.int32, "recv_counts: int32"
        check_size(
            op, "recv_counts", Int(row_offsets.dim[0]()), group.n_local_experts()
        )
        check_size(op, "recv_ranges", Int(expert_ids.dim[0]()), group.n_pairs())
    else:
        comptime assert row_offsets.dtype == DType.uint32, "row_offsets: uint32"
        comptime n_segments = RowTables[group].n_segments
        check_size(op, "row_offsets", Int(row_offsets.dim[0]()), n_segments + 1)
        check_size(op, "expert_ids", Int(expert_ids.dim[0]()), n_segments)
    check_size(op, "columns of src_info", Int(src_info.dim[1]()), 2)
    return {
        rows,
        Int(src_info.dim[0]()),
        {mut_(row_offsets).unsafe_bitcast[UInt32](), mut_(expert_ids)},
        mut_(src_info),
    }


# -------------------------------------------------------------- tensors of combine


@fieldwise_init
struct GivenRows(KernelArgument, TrivialRegisterPassable):
    """The expert rows of a combine."""

    var rows: LocalRows
    """`[n_rows][hidden_size]` of the combine dtype."""
    var src_info: ImmPointer[Int32]
    """`[n_rows][2]`: token on its source rank, and k; a wait does not read it."""


def given_rows[
    group: Group, //, sends: Bool
](
    call: Call[group], rows: TileTensor, src_info: TileTensor[DType.int32, ...]
) raises -> GivenRows:
    """Checks rows that are sent; a wait gets no `src_info`."""
    var n_rows = Int(rows.dim[0]())
    comptime if sends:
        check_shape(call.op, "src_info", src_info, n_rows, 2)
        check_shape(call.op, "input_tokens", rows, n_rows, group.hidden_size)
    return {LocalRows(mut_(rows).unsafe_bitcast[UInt8](), n_rows), imm(src_info)}


struct CombinedTokens[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """What a combine delivers."""

    var tokens: MutPointer[Scalar[Self.dtype]]
    """`[n_tokens][hidden_size]`."""
    var n_tokens: Int
    var router_weights: ImmPointer[Float32]
    """`[n_tokens][top_k]`; with sums they came with dispatch, unless they come late."""
    var n_biases: Int
    """How many of the two biases are added to the sums, if `Group.is_given`."""
    var bias_0: ImmPointer[Scalar[Self.dtype]]
    """In the shape of `tokens`."""
    var bias_1: ImmPointer[Scalar[Self.dtype]]
    """In the shape of `tokens`."""

    def __init__(
        out self,
        tokens: MutPointer[Scalar[Self.dtype]],
        n_tokens: Int,
        router_weights: ImmPointer[Float32],
    ):
        """Takes the tensors of a combine without biases."""
        self.tokens = tokens
        self.n_tokens = n_tokens
        self.router_weights = router_weights
        self.n_biases = 0
        self.bias_0 = unused[ImmPointer[Scalar[Self.dtype]]]()
        self.bias_1 = self.bias_0

    @always_inline
    def bias(self, i: Int) -> ImmPointer[Scalar[Self.dtype]]:
        return self.bias_0 if i == 0 else self.bias_1


def combined_tokens[
    dtype: DType, group: Group, //, target: StaticString
](
    call: Call[group],
    tokens: TileTensor[dtype, ...],
    router_weights: TileTensor[DType.float32, ...],
    given: GivenRows,
) raises -> CombinedTokens[dtype]:
    var op = call.op
    var n_tokens = Int(tokens.dim[0]())
    call.check_n_tokens[target](n_tokens)
    comptime if not group.has_sums or group.late_weights:
        check_shape(op, "router_weights", router_weights, n_tokens, group.top_k)
    check_shape(op, "output_tokens", tokens, n_tokens, group.hidden_size)
    comptime if group.fused_shared_expert:
        if given.rows.n_rows < n_tokens:
            raise Error(
                t"max_ep: {call.place[target]()}: {n_tokens} tokens, but"
                t" input_tokens holds {given.rows.n_rows} rows; the shared"
                t" expert's come first there."
            )
    return {mut_(tokens), n_tokens, imm(router_weights)}
