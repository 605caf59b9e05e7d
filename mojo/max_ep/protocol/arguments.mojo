# SPDX-License-Identifier: Apache-2.0
"""Arguments of a launcher: tensors, checked before the first send, as pointers."""
from layout import TileTensor
from max.gpu.host.info import is_cpu, is_gpu

from .counters import (
    Counters,
    COUNTERS_MAGIC,
    local_sync_counters_words,
    wanted_word,
    Word,
)
from .failures import Caller, Failure, GRAPH, NEXT, what_failed
from .flags import FlagPointer
from .kernel_argument import ImmPointer, KernelArgument, MutPointer, unused
from .layout import Group, MAX_RANKS, MAX_TOP_K, MESSAGE_ALIGN, N_GROUP_WORDS
from .row_tables import RowTables
from .token_format import BytePointer, LocalRows, TokenFormat
from .transport import PeerBuffers

comptime InputScales = Optional[def[dtype: DType](Int) capturing -> Scalar[dtype]]
"""Gives the factor of a token for an expert id, or None."""


@fieldwise_init
struct Form(TrivialRegisterPassable):
    """Which part of a phase a launch does: one of three."""

    var sends: Bool
    var receives: Bool

    comptime ASYNC = Self(True, False)
    comptime WAIT = Self(False, True)
    comptime FUSED = Self(True, True)
    """Both in one launch; all ranks must run at the same time."""

    @staticmethod
    def of(op: StaticString) -> Self:
        return Self(not op.endswith("_wait"), not op.endswith("_async"))


def imm[dtype: DType](tensor: TileTensor[dtype, ...]) -> ImmPointer[Scalar[dtype]]:
    return ImmPointer[Scalar[dtype]](unsafe_from_address=Int(tensor.ptr))


def mut_[dtype: DType](tensor: TileTensor[dtype, ...]) -> MutPointer[Scalar[dtype]]:
    return MutPointer[Scalar[dtype]](unsafe_from_address=Int(tensor.ptr))


def mapped_buffers[
    group: Group, T: AnyType
](buffers: PeerBuffers) -> Array[MutPointer[T], group.n_mapped]:
    # Without a mapped rank, the last possible one: the bounds of the table hold.
    comptime last = group.n_ranks - group.n_mapped
    var first_rank = 0
    while first_rank < last and buffers.addresses[unsafe_offset=first_rank] == 0:
        first_rank += 1
    var result = Array[MutPointer[T], group.n_mapped](
        fill=buffers[first_rank].unsafe_bitcast[T]()
    )
    for i in range(group.n_mapped):
        result[i] = buffers[first_rank + i].unsafe_bitcast[T]()
    return result^


@fieldwise_init
struct Buffers[group: Group](Copyable, KernelArgument):
    """The group's buffers that a kernel can access."""

    var recv_bufs: Array[BytePointer, Self.group.n_mapped]
    """Recv buffers of the ranks that are mapped, of dispatch or of combine."""
    var counts: Array[FlagPointer, Self.group.n_mapped]
    """Counts buffers of the same ranks."""
    var counters: Counters[Self.group]
    """Words of this rank alone."""


# -------------------------------------------------------------------------- checks


def check_group[group: Group, target: StaticString, hidden_multiple: Int]():
    comptime assert (
        is_cpu[target]() or is_gpu[target]()
    ), "max_ep: there are kernels for targets 'cpu' and 'gpu'"
    comptime assert (
        group.n_experts > 0 and group.max_tokens_per_rank > 0 and group.hidden_size > 0
    ), "max_ep: n_experts, max_tokens_per_rank and hidden_size must be above 0"
    comptime assert (
        1 <= group.n_ranks and group.n_ranks <= MAX_RANKS
    ), "max_ep: n_ranks must be in [1, MAX_RANKS]"
    comptime assert (
        group.n_mapped <= group.n_ranks
    ), "max_ep: a node has more ranks than the group"
    comptime assert (
        1 <= group.top_k and group.top_k <= MAX_TOP_K
    ), "max_ep: top_k must be in [1, MAX_TOP_K]"
    comptime assert group.hidden_size % hidden_multiple == 0, String(
        "max_ep: hidden_size must be a multiple of ", hidden_multiple
    )
    comptime assert not group.is_linked() or not (
        group.masks or group.chooses_ranks() or group.is_given() or group.late_weights
    ), "max_ep: masks, all-gathers and PyTorch are for one host"
    comptime assert (
        is_gpu[target]() or group.is_by_rank() or not group.spans_hosts()
    ), "max_ep: CPU ranks of several hosts dispatch by rank"
    comptime assert (
        group.is_by_rank() or not group.has_sums
    ), "max_ep: sums need by rank"
    comptime is_more = group.masks or group.drops_rows or group.spans_hosts()
    comptime assert not group.late_weights or (
        group.has_sums and not (is_more or group.shares_gpu)
    ), "max_ep: only sums get weights at combine, of a host's ranks with a GPU each"


def check_dispatch[
    group: Group, Format: TokenFormat, target: StaticString, has_input_scales: Bool
]():
    check_group[group, target, Format.hidden_multiple]()
    comptime assert not group.is_by_rank() or not has_input_scales, (
        "max_ep: input_scales needs dispatch by expert: by rank, a token is encoded"
        " once for all its experts"
    )
    comptime assert not (
        group.fused_shared_expert and has_input_scales
    ), "max_ep: fused_shared_expert takes no input scales"
    comptime assert not (
        group.is_padded and group.fused_shared_expert
    ), "max_ep: fused_shared_expert needs packed rows"
    comptime has_metadata = Format.router_top_k > 0
    comptime is_each_rank_an_expert = (
        group.n_experts == group.n_ranks and group.top_k == group.n_ranks
    )
    comptime assert has_metadata == group.chooses_ranks() and (
        not has_metadata or (group.has_sums and is_each_rank_an_expert)
    ), (
        "max_ep: where a token chooses ranks, as in an all-gather, it takes routing"
        " metadata along, and combine returns sums; each rank is an expert"
    )


def check_size(op: StaticString, what: String, size: Int, wanted: Int) raises:
    if size != wanted:
        raise Error(t"max_ep: {op}: {what} are {size}, not {wanted}.", NEXT)


def check_shape(
    op: StaticString,
    what: StaticString,
    tensor: TileTensor,
    n_rows: Int,
    n_columns: Int,
) raises:
    var sizes = (Int(tensor.dim[0]()), Int(tensor.dim[1]()))
    if sizes[0] != n_rows:
        check_size(op, String("rows of ", what), sizes[0], n_rows)
    if sizes[1] != n_columns:
        check_size(op, String("columns of ", what), sizes[1], n_columns)


@fieldwise_init
struct Call[group: Group](TrivialRegisterPassable):
    """An op on one rank: its name, its counters, and the buffers of all ranks."""

    var op: StaticString
    var counters: Counters[Self.group]
    var send_bufs: PeerBuffers
    """Every rank's send buffer; an op that only receives does not use them."""
    var recv_bufs: PeerBuffers
    var counts: PeerBuffers
    var caller: Caller

    @staticmethod
    def of[
        target: StaticString
    ](
        op: StaticString,
        atomic_counters: TileTensor[DType.int32, ...],
        recv_ptrs: TileTensor[DType.uint64, ...],
        recv_count_ptrs: TileTensor[DType.uint64, ...],
    ) raises -> Self:
        """Checks counters and buffers; raises if they belong to another group. An op that
        sends also sets `send_bufs`."""
        var call = Self.of_counters[target](op, atomic_counters)
        call.recv_bufs = peer_buffers[Self.group](op, "recv_ptrs", recv_ptrs)
        call.counts = peer_buffers[Self.group](op, "recv_count_ptrs", recv_count_ptrs)
        call.send_bufs = call.recv_bufs
        return call

    @staticmethod
    def of_counters[
        target: StaticString
    ](op: StaticString, atomic_counters: TileTensor[DType.int32, ...]) raises -> Self:
        """The same for an op that reads only counters."""
        # On a GPU the kernels check what they hold.
        var counters = Counters[Self.group](mut_(atomic_counters))
        var n_words = Int(atomic_counters.dim[0]())
        if n_words < local_sync_counters_words(Self.group) or (
            is_cpu[target]() and counters.at(Word.MAGIC)[] != COUNTERS_MAGIC
        ):
            raise Error(
                t"max_ep: {op}: these atomic_counters are not initialized; pass the"
                t" model_inputs() of an EPCommInitializer after its ep_init()."
            )
        comptime if is_cpu[target]():
            for i in range(Word.GROUP, Word.GROUP + N_GROUP_WORDS):
                var found = counters.at(i)[]
                var wanted = wanted_word(i, found, Self.group)
                if found != wanted:
                    raise Error(
                        t"max_ep: {op} on rank {counters.my_rank()}: ",
                        what_failed(
                            Failure.WRONG_COUNTERS, -1, i, Int(found), Int(wanted)
                        ),
                    )
        var none = unused[PeerBuffers]()
        return Self(op, counters, none, none, none, GRAPH)

    def buffers(self) -> Buffers[Self.group]:
        return {
            mapped_buffers[Self.group, UInt8](self.recv_bufs),
            mapped_buffers[Self.group, UInt64](self.counts),
            self.counters,
        }

    def place[target: StaticString](self) -> String:
        """Names the op, and on CPU the rank: on a GPU it is out of reach."""
        comptime if is_cpu[target]():
            return String(self.op, " on rank ", self.counters.my_rank())
        return String(self.op)

    def check_n_tokens[target: StaticString](self, n_tokens: Int) raises:
        comptime most = Self.group.max_tokens_per_rank
        if n_tokens > most:
            raise Error(
                t"max_ep: {self.place[target]()}: {n_tokens}",
                t" tokens given, EPConfig.max_tokens_per_rank is {most}. Send",
                t" fewer at a time, or raise it.",
                NEXT,
            )


def peer_buffers[
    group: Group
](
    op: StaticString, what: StaticString, ptrs: TileTensor[DType.uint64, ...]
) raises -> PeerBuffers:
    comptime n_ranks = group.n_ranks
    var n = Int(ptrs.dim[0]())
    if n != n_ranks:
        raise Error(t"max_ep: {op}: {what} holds {n} addresses for {n_ranks} ranks.")
    var buffers = PeerBuffers(mut_(ptrs))
    var n_mapped = 0
    for rank in range(n_ranks):
        n_mapped += Int(buffers.addresses[unsafe_offset=rank] != 0)
    if n_mapped < group.n_mapped:
        raise Error(
            t"max_ep: {op}: the symmetric memory of these inputs was freed"
            t" (EPCommInitializer.close); run before close(), or with the"
            t" model_inputs() of a new ep_init()."
        )
    return buffers


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


@always_inline
def load_id[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int32:
    """Loads the expert of a choice; where ranks are experts, the rank."""
    comptime if group.sends_to_all():
        return Int32(UInt32(choice) % UInt32(group.n_ranks))
    comptime if group.router_top_k > 0:
        return _load_rank[group](ids, choice)
    return load_router_id[group](ids, choice)


@always_inline
def load_router_id[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int32:
    """Loads what the router chose."""
    comptime if group.wide_ids:
        var wide = ids.unsafe_bitcast[Int64]()[unsafe_offset=choice]
        # What does not fit is out of range in any case.
        return Int32(max(min(wide, Int64(Int32.MAX)), -2))
    return ids[unsafe_offset=choice]


@always_inline
def _load_rank[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int32:
    """Returns the rank of a choice, or -1 if no expert of the token is there."""
    comptime n_local = group.router_experts // group.n_ranks
    var token_idx = UInt32(choice) // UInt32(group.n_ranks)
    var rank = Int32(UInt32(choice) % UInt32(group.n_ranks))
    var first = rank * Int32(n_local)
    var is_chosen = False
    comptime for k in range(group.router_top_k):
        var id = load_router_id[group](ids, Int(token_idx) * group.router_top_k + k)
        is_chosen = is_chosen or (first <= id and id < first + Int32(n_local))
    return rank if is_chosen else -1


def given_id[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int:
    """Returns the expert of a choice as it was given, in 64 bits if it has them."""
    comptime if group.wide_ids:
        return Int(ids.unsafe_bitcast[Int64]()[unsafe_offset=choice])
    return Int(load_id[group](ids, choice))


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
