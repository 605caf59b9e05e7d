# SPDX-License-Identifier: Apache-2.0
"""The C ABI, which PyTorch calls: one rank, tensors by address, the caller's stream.

A library is built for one configuration, given by `-D` (`max_ep/torch/library.py`).
Tokens are addressed by rank. Handles, addresses and queues are integers. 0 is success;
otherwise `max_ep_last_error` has the error.

    TARGET              cpu or gpu
    ROWS                padded: rows by expert, each expert's in a block of its own;
                        combine returns rows. plain: a row for each token and rank, with
                        ids and weights. expanded: rows by expert. Of the last two,
                        combine returns sums
    FORMAT              padded: a name of `formats/table.mojo`, what dispatch sends, with
                        `_forwarded` if tokens are given so; else: given
                        (`formats/given.mojo`)
    HIDDEN              elements of a token; given: bytes of a row
    SCALES              given: words of scales of a row
    COMBINE             bfloat16 or float32: elements of expert rows and results
    COMBINE_HIDDEN      how many of them
    PARTIAL             the same of partial sums
    ALIGNMENT           expanded: rows of an expert begin at a multiple of it
    EXPERTS, RANKS, TOP_K, TOKENS      of the group; TOKENS: the most of a rank
    PACKED_SCALES       whether scales are exponents, four in an int32
    WIDE_IDS            whether ids are int64
    MASKS               whether a rank that is late is masked, and the others go on
"""
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.arguments import (
    Call,
    CombinedTokens,
    DispatchedRows,
    Form,
    GivenRows,
    GivenTokens,
)
from max_ep.combine_rows.kernel import CombineRows
from max_ep.combine_sums.kernel import CombineSums
from max_ep.protocol.counters import Counters, N_FAILURE_WORDS
from max_ep.device.kernel import Kernel, kernel_entry, Queue
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.protocol.failures import Caller, raise_failure
from max_ep.formats.given import GivenTokenFormat
from max_ep.formats.table import FormatOf
from max_ep.protocol.kernel_argument import ImmPointer, MutPointer
from max_ep.launch.launch import launch_combine, launch_dispatch
from max_ep.protocol.layout import Group, MESSAGE_ALIGN
from max_ep.protocol.message_sizes import combine_msg_bytes
from max_ep.launch.setup import SetUp, start_set_up
from max_ep.launch.sizes import sizes_of
from max_ep.protocol.token_format import LocalRows, OutputTensors, TokenFormat
from max_ep.protocol.transport import PeerBuffers
from max_ep.launch.watch import launch_watch, watch_kernel
from std.memory.alloc import unsafe_alloc
from std.sys import get_defined_int, get_defined_string, is_defined

comptime TARGET = get_defined_string["TARGET"]()
comptime ROWS = get_defined_string["ROWS"]()
comptime IS_PLAIN = ROWS == "plain"
comptime IS_GIVEN = ROWS != "padded"
comptime HAS_SUMS = IS_GIVEN or is_defined["SUMS"]()
comptime N_RANKS = get_defined_int["RANKS"]()
comptime HIDDEN = get_defined_int["HIDDEN"]()
comptime TOP_K = get_defined_int["TOP_K"]()
comptime WIDE_IDS = is_defined["WIDE_IDS"]()
comptime FORMAT = get_defined_string["FORMAT"]()
comptime SCALES = (
    "packed" if is_defined["PACKED_SCALES"]() else "transposed" if FORMAT.startswith(
        "fp8"
    ) else "rows"
)
comptime N_EXPERTS = get_defined_int["EXPERTS"]()
comptime GROUP_TOP_K = N_RANKS if IS_PLAIN else TOP_K
comptime Format: TokenFormat = (
    GivenTokenFormat[
        HIDDEN,
        get_defined_int["SCALES"](),
        GROUP_TOP_K,
        TOP_K if IS_PLAIN else 0,
        N_EXPERTS // N_RANKS,
    ] if FORMAT
    == "given" else FormatOf[FORMAT, HIDDEN, TOP_K, scales=SCALES]
)
comptime INPUT_DTYPE = (
    DType.float32 if FORMAT == "float32" else DType.uint8 if FORMAT == "given"
    or FORMAT.endswith("_forwarded") else DType.bfloat16
)
comptime _dtype[name: StaticString] = (
    DType.float32 if name == "float32" else DType.bfloat16
)
comptime COMBINE_DTYPE = _dtype[get_defined_string["COMBINE"]()]
comptime PARTIAL_DTYPE = (
    _dtype[get_defined_string["PARTIAL"]()] if HAS_SUMS else COMBINE_DTYPE
)


def _group(hidden_size: Int, dispatch_msg_bytes: Int, combine_msg_bytes: Int) -> Group:
    return Group(
        n_experts=N_RANKS if IS_PLAIN else N_EXPERTS,
        n_ranks=N_RANKS,
        max_tokens_per_rank=get_defined_int["TOKENS"](),
        top_k=GROUP_TOP_K,
        hidden_size=hidden_size,
        dispatch_msg_bytes=dispatch_msg_bytes,
        combine_msg_bytes=combine_msg_bytes,
        addressing=Addressing.TO_RANKS if IS_PLAIN else Addressing.BY_RANK,
        has_sums=HAS_SUMS,
        is_padded=not IS_GIVEN,
        wide_ids=WIDE_IDS,
        masks=is_defined["MASKS"](),
        router_top_k=TOP_K if IS_PLAIN else 0,
        router_experts=N_EXPERTS,
        row_alignment=get_defined_int["ALIGNMENT"]() if IS_GIVEN else 0,
        late_weights=HAS_SUMS and not IS_GIVEN,
        shares_gpu=not (HAS_SUMS and not IS_GIVEN),
    )


comptime COMBINE_HIDDEN = get_defined_int["COMBINE_HIDDEN"]()
comptime COMBINE_BYTES = combine_msg_bytes[PARTIAL_DTYPE](COMBINE_HIDDEN)
comptime DISPATCH_HIDDEN = HIDDEN if FORMAT.endswith(
    "_forwarded"
) else Format.hidden_size
comptime DISPATCH = _group(DISPATCH_HIDDEN, Format.msg_bytes, 0)
comptime COMBINE = _group(COMBINE_HIDDEN, 0, COMBINE_BYTES)
comptime REGION = _group(DISPATCH_HIDDEN, Format.msg_bytes, COMBINE_BYTES)
comptime NEXT = " Call Buffer.reset() in every process, or restart the group."
comptime TORCH = Caller("topk_idx", "num_experts", "Buffer's timeout_s", NEXT, True)


def _at[T: AnyType](address: Int) -> MutPointer[T]:
    """A pointer is never null."""
    return {unsafe_from_address = address if address != 0 else MESSAGE_ALIGN}


def _imm[T: AnyType](address: Int) -> ImmPointer[T]:
    return {unsafe_from_address = Int(_at[T](address))}


def _load_phase[P: Kernel](context: DeviceContext) raises:
    _ = context.compile_function[kernel_entry[P, True, False]]()
    _ = context.compile_function[kernel_entry[P, False, True]]()
    _ = context.compile_function[kernel_entry[P, True, True]]()


def _load_kernels(context: DeviceContext) raises:
    """The first launch of a kernel may be in a capture, which forbids to load it."""
    _load_phase[DispatchByRank[DISPATCH, Format, INPUT_DTYPE]](context)
    comptime if HAS_SUMS:
        _load_phase[CombineSums[COMBINE, COMBINE_DTYPE, PARTIAL_DTYPE]](context)
    else:
        _load_phase[CombineRows[COMBINE, COMBINE_DTYPE, True]](context)
    _ = context.compile_function[watch_kernel[DISPATCH, False]]()
    _ = context.compile_function[watch_kernel[COMBINE, True]]()


struct Rank(Movable):
    """What a process keeps of one region."""

    var context: DeviceContext
    var my_rank: Int
    var timeout_ms: Int
    var region: Int
    var counters: Counters[REGION]
    var addresses: Array[UInt64, 6 * N_RANKS]
    """`[dispatch, combine][send, recv, counts][rank]`."""
    var queue: Queue
    var queue_address: Int
    var n_sms: Int
    """Most multiprocessors that the next launches may use; 0: all."""
    var error: String

    def __init__(
        out self, device: Int, rank: Int, timeout_ms: Int, region: Int, words: Int
    ) raises:
        comptime if is_gpu[TARGET]():
            self.context = DeviceContext(device_id=device)
            _load_kernels(self.context)
        else:
            self.context = DeviceContext(api="cpu")
        self.my_rank = rank
        self.timeout_ms = timeout_ms
        self.region = region
        self.counters = {_at[Int32](words)}
        self.addresses = Array[UInt64, 6 * N_RANKS](fill=0)
        self.queue = Queue(self.context)
        self.queue_address = -1
        self.n_sms = 0
        self.error = String()

    def failed(mut self, error: Error) -> Int32:
        self.error = String(error)
        return 1

    def queue_at(mut self, address: Int) raises -> Queue:
        """Finds a queue of the caller's; CPU ranks have none."""
        if address != self.queue_address:
            self.queue = Queue(self.context, address)
            self.queue_address = address
        self.queue.n_sms = self.n_sms
        return self.queue.copy()

    def clear(self) raises:
        """Puts the memory in the state before generation 1, and waits for that."""
        var words = self.counters.words
        var setup = SetUp(
            {unsafe_from_address = self.region},
            Int32(self.my_rank),
            Int32(self.timeout_ms),
            True,
            REGION.words(),
            -1,
            0,
            0,
        )
        start_set_up[TARGET](words, words, setup, self.context)
        comptime if is_gpu[TARGET]():
            self.context.synchronize()

    def buffers(self, i: Int) -> PeerBuffers:
        return {_at[UInt64](Int(Pointer(to=self.addresses)) + 8 * N_RANKS * i)}

    def call[group: Group, direction: Int](self, op: StaticString) -> Call[group]:
        """Makes a call of an op; direction 0: dispatch, 1: combine."""
        return {
            op,
            {self.counters.words},
            self.buffers(3 * direction),
            self.buffers(3 * direction + 1),
            self.buffers(3 * direction + 2),
            TORCH,
        }


def _rank(handle: Int) -> MutPointer[Rank]:
    return {unsafe_from_address = handle}


def _copy(said: String, text: Int, size: Int32) -> Int32:
    """Copies what fits; returns the bytes of all."""
    var bytes = said.as_bytes()
    for i in range(min(len(bytes), Int(size))):
        _at[UInt8](text)[unsafe_offset=i] = bytes[i]
    return Int32(len(bytes))


@export
def max_ep_sizes(text: Int, size: Int32) abi("C") -> Int32:
    """Copies what `sizes_of` says of the group; returns its bytes."""
    return _copy(sizes_of(REGION), text, size)


@export
def max_ep_open(
    device: Int32, rank: Int32, timeout_ms: Int32, region: Int, counters: Int
) abi("C") -> Int:
    """Clears a rank's memory; returns its handle, 0 after an error, printed."""
    try:
        var opened = Rank(Int(device), Int(rank), Int(timeout_ms), region, counters)
        opened.clear()
        var handle = unsafe_alloc[Rank](1)
        handle.unsafe_write(opened^)
        return Int(handle)
    except error:
        print("max_ep_open:", error)
        return 0


@export
def max_ep_connect(handle: Int, regions: Int) abi("C"):
    """Takes the address of every rank's region, uint64 `[n_ranks]`."""
    ref rank = _rank(handle)[]
    var bases = _at[UInt64](regions)
    for i in range(6):
        for peer in range(N_RANKS):
            rank.addresses[i * N_RANKS + peer] = bases[unsafe_offset=peer] + UInt64(
                REGION.buffer_offset(i)
            )


@export
def max_ep_use_sms(handle: Int, n_sms: Int32) abi("C"):
    """Lets later launches use so many multiprocessors at most; 0: all."""
    _rank(handle)[].n_sms = Int(n_sms)


@export
def max_ep_clear(handle: Int) abi("C") -> Int32:
    """Puts the rank before generation 1; no rank may be in a launch."""
    ref rank = _rank(handle)[]
    try:
        rank.clear()
        return 0
    except error:
        return rank.failed(error)


@export
def max_ep_close(handle: Int) abi("C"):
    """Frees the handle, not the memory."""
    var rank = _rank(handle)
    rank.unsafe_deinit_pointee()
    rank.unsafe_free()


@export
def max_ep_last_error(handle: Int, text: Int, size: Int32) abi("C") -> Int32:
    """Copies what the last call that failed says; returns its bytes."""
    return _copy(_rank(handle)[].error, text, size)


@export
def max_ep_failure(handle: Int, record: Int) abi("C") -> Int32:
    """Fails as a failure record says, int32 words in host memory."""
    ref rank = _rank(handle)[]
    var words = Array[Int32, N_FAILURE_WORDS](fill=0)
    for i in range(N_FAILURE_WORDS):
        words[i] = _at[Int32](record)[unsafe_offset=i]
    try:
        raise_failure(words, rank.my_rank, rank.timeout_ms, TORCH)
        return 0
    except error:
        return rank.failed(error)


comptime FORMS = [Form.ASYNC, Form.WAIT, Form.FUSED]


@fieldwise_init
struct DispatchArguments(TrivialRegisterPassable):
    """The tensors of a dispatch, by address; 0: not there."""

    var tokens: Int
    """`[n_tokens][HIDDEN]`, bfloat16, or float32 if that is the format. Given and
    forwarded: rows of bytes, and behind each its scales, of whole 16 bytes."""
    var topk_ids: Int
    """`[n_tokens][TOP_K]`, int32 or int64."""
    var n_tokens: Int
    var rows: Int
    """`[n_local_experts][capacity][HIDDEN]`; plain and expanded `[n_rows][HIDDEN]`."""
    var scales: Int
    """Given: `[n_rows][SCALES]` words, of any strides. Padded: float32
    `[n_local_experts][HIDDEN / 128][capacity]`; with `PACKED_SCALES` Int32, `HIDDEN /
    512`; of other formats bytes `[n_local_experts][capacity][n_blocks]`."""
    var recv_counts: Int
    """Int32 `[n_local_experts]`. Expanded: where the rows of each end. Plain: where
    those of each source rank end, `[n_ranks]`."""
    var recv_ranges: Int
    """Int32 `[n_local_experts][n_ranks][2]`. Expanded: rows of each local expert,
    then of each from each rank."""
    var src_info: Int
    """Int32 `[n_local_experts][capacity][2]`, or `[n_rows][2]`."""
    # Plain and expanded have these, too.
    var n_rows: Int
    """Rows that the outputs hold."""
    var topk_weights: Int
    """Float32 `[n_tokens][TOP_K]`."""
    var weights: Int
    """Float32 `[n_rows][TOP_K]`, expanded `[n_rows]`."""
    var ids: Int
    """Plain: int32 `[n_rows][TOP_K]`, as they were sent; -1 after the last row."""
    var local_ids: Int
    """Plain: int64 `[n_rows][TOP_K]`, local experts, or -1."""
    var scales_step: Int
    """Words from the scales of a row to those of the next."""
    var scale_step: Int
    """Words from a scale of a row to its next."""
    var kept_ids: Int
    """Where a copy of `topk_ids` goes, or the same address: none."""


def _dispatch[form: Form](mut rank: Rank, queue: Int, given: DispatchArguments) raises:
    var outputs = OutputTensors(_at[UInt8](given.rows), _at[UInt8](given.scales))
    outputs.scales_columns = REGION.expert_capacity()
    var n_rows = REGION.n_local_experts() * REGION.expert_capacity()
    comptime if IS_GIVEN:
        outputs.scales_columns = given.scale_step
        outputs.scales_step = given.scales_step
        outputs.routing_map = _at[Int32](given.ids)
        outputs.probs = _at[Float32](given.weights)
        outputs.local_ids = _at[Int64](given.local_ids)
        outputs.first_expert = rank.my_rank * (N_EXPERTS // N_RANKS)
        n_rows = given.n_rows
    var tokens = GivenTokens[INPUT_DTYPE](
        _imm[Scalar[INPUT_DTYPE]](given.tokens),
        _imm[Int32](given.topk_ids),
        _imm[Float32](given.topk_weights),
        given.n_tokens,
    )
    tokens.kept_ids = _at[Int64](given.kept_ids)
    launch_dispatch[Format, TARGET, form](
        rank.call[DISPATCH, 0]("dispatch"),
        tokens,
        DispatchedRows[DISPATCH, Format](
            Format.Rows.of(outputs),
            n_rows,
            {_at[UInt32](given.recv_counts), _at[Int32](given.recv_ranges)},
            _at[Int32](given.src_info),
        ),
        rank.queue_at(queue),
    )


@export
def max_ep_dispatch(
    handle: Int, queue: Int, form: Int32, arguments: Int
) abi("C") -> Int32:
    """Dispatches; `arguments` is the address of `DispatchArguments`. Form 1: sends,
    2: receives, 3: both."""
    ref rank = _rank(handle)[]
    try:
        comptime for i in range(3):
            if Int(form) == i + 1:
                _dispatch[FORMS[i]](rank, queue, _at[DispatchArguments](arguments)[])
                return 0
        raise Error(t"max_ep_dispatch: there is no form {form}")
    except error:
        return rank.failed(error)


@fieldwise_init
struct CombineArguments(TrivialRegisterPassable):
    """The tensors of a combine, by address."""

    var rows: Int
    """`[n_local_experts][capacity][COMBINE_HIDDEN]`, or `[n_rows][COMBINE_HIDDEN]`."""
    var src_info: Int
    """`src_info` of the dispatch."""
    var combined: Int
    """`[n_tokens][COMBINE_HIDDEN]`."""
    var n_tokens: Int
    var weights: Int
    """Float32 `[n_tokens][TOP_K]`; padded."""
    # Plain and expanded have these, too.
    var n_rows: Int
    var n_biases: Int
    var bias_0: Int
    """As `combined`."""
    var bias_1: Int
    """As `combined`."""


def _combine[form: Form](mut rank: Rank, queue: Int, given: CombineArguments) raises:
    var n_rows = REGION.n_local_experts() * REGION.expert_capacity()
    var combined = CombinedTokens[COMBINE_DTYPE](
        _at[Scalar[COMBINE_DTYPE]](given.combined),
        given.n_tokens,
        _imm[Float32](given.weights),
    )
    comptime if IS_GIVEN:
        n_rows = given.n_rows
        combined.n_biases = given.n_biases
        combined.bias_0 = _imm[Scalar[COMBINE_DTYPE]](given.bias_0)
        combined.bias_1 = _imm[Scalar[COMBINE_DTYPE]](given.bias_1)
    # Where rows are sent, a caller may write over its own once they are.
    launch_combine[PARTIAL_DTYPE, TARGET, form, True](
        rank.call[COMBINE, 1]("combine"),
        GivenRows(
            LocalRows(_at[UInt8](given.rows), n_rows), _imm[Int32](given.src_info)
        ),
        combined,
        rank.queue_at(queue),
    )


@export
def max_ep_combine(
    handle: Int, queue: Int, form: Int32, arguments: Int
) abi("C") -> Int32:
    """Combines; as `max_ep_dispatch`, with `CombineArguments`."""
    ref rank = _rank(handle)[]
    try:
        comptime for i in range(3):
            if Int(form) == i + 1:
                _combine[FORMS[i]](rank, queue, _at[CombineArguments](arguments)[])
                return 0
        raise Error(t"max_ep_combine: there is no form {form}")
    except error:
        return rank.failed(error)


@export
def max_ep_watch(
    handle: Int, queue: Int, is_combine: Int32, waits_ns: Int
) abi("C") -> Int32:
    """Measures, between the halves, the wait for each peer: int64 `[n_ranks]`."""
    ref rank = _rank(handle)[]
    var waits = _at[Int64](waits_ns)
    try:
        var to = rank.queue_at(queue)
        if is_combine == 0:
            launch_watch[TARGET, False](rank.call[DISPATCH, 0]("watch"), waits, to)
        else:
            launch_watch[TARGET, True](rank.call[COMBINE, 1]("watch"), waits, to)
        return 0
    except error:
        return rank.failed(error)
