# SPDX-License-Identifier: Apache-2.0
"""The C ABI, which PyTorch calls: one rank, tensors by address, the caller's stream.

A library is built for one configuration (`configuration.mojo`). Handles, addresses and
queues are integers. 0 is success; otherwise `max_ep_last_error` has the error.
"""
from configuration import (
    COMBINE,
    COMBINE_DTYPE,
    DISPATCH,
    Format,
    INPUT_DTYPE,
    IS_GIVEN,
    N_EXPERTS,
    N_RANKS,
    PARTIAL_DTYPE,
    REGION,
    TARGET,
)
from max_ep.launch.launch import launch_combine, launch_dispatch
from max_ep.launch.sizes import sizes_of
from max_ep.launch.watch import launch_watch
from max_ep.protocol.arguments import (
    CombinedTokens,
    DispatchedRows,
    GivenRows,
    GivenTokens,
)
from max_ep.protocol.call import Form
from max_ep.protocol.counters import N_FAILURE_WORDS
from max_ep.protocol.failures import raise_failure
from max_ep.protocol.kernel_argument import MutPointer
from max_ep.protocol.token_format import LocalRows, OutputTensors
from rank import at, imm_at, Rank, TORCH
from std.memory.alloc import unsafe_alloc


def _rank(handle: Int) -> MutPointer[Rank]:
    return {unsafe_from_address = handle}


def _copy(said: String, text: Int, size: Int32) -> Int32:
    """Copies what fits; returns the bytes of all."""
    var bytes = said.as_bytes()
    for i in range(min(len(bytes), Int(size))):
        at[UInt8](text)[unsafe_offset=i] = bytes[i]
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
    """Takes the address of every rank's region, uint64 `[n_ranks]`; 0: of another host.
    """
    ref rank = _rank(handle)[]
    var bases = at[UInt64](regions)
    for i in range(6):
        var offset = UInt64(REGION.buffer_offset(i))
        for peer in range(N_RANKS):
            var base = bases[unsafe_offset=peer]
            rank.addresses[i * N_RANKS + peer] = base + offset if base != 0 else 0


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
        words[i] = at[Int32](record)[unsafe_offset=i]
    try:
        raise_failure(words, rank.my_rank, rank.timeout_ms, TORCH)
        return 0
    except error:
        return rank.failed(error)


comptime FORMS = [Form.ASYNC, Form.WAIT, Form.FUSED]


@fieldwise_init
struct DispatchArguments(TrivialRegisterPassable):
    """A dispatch, and its tensors by address; 0: not there."""

    var handle: Int
    var queue: Int
    var form: Int
    """1: sends, 2: receives, 3: both."""
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


def _dispatch[form: Form](mut rank: Rank, given: DispatchArguments) raises:
    var outputs = OutputTensors(at[UInt8](given.rows), at[UInt8](given.scales))
    outputs.scales_columns = REGION.expert_capacity()
    var n_rows = REGION.n_local_experts() * REGION.expert_capacity()
    comptime if IS_GIVEN:
        outputs.scales_columns = given.scale_step
        outputs.scales_step = given.scales_step
        outputs.routing_map = at[Int32](given.ids)
        outputs.probs = at[Float32](given.weights)
        outputs.local_ids = at[Int64](given.local_ids)
        outputs.first_expert = rank.my_rank * (N_EXPERTS // N_RANKS)
        n_rows = given.n_rows
    var tokens = GivenTokens[INPUT_DTYPE](
        imm_at[Scalar[INPUT_DTYPE]](given.tokens),
        imm_at[Int32](given.topk_ids),
        imm_at[Float32](given.topk_weights),
        given.n_tokens,
    )
    tokens.kept_ids = at[Int64](given.kept_ids)
    launch_dispatch[Format, TARGET, form](
        rank.call[DISPATCH, 0]("dispatch"),
        tokens,
        DispatchedRows[DISPATCH, Format](
            Format.Rows.of(outputs),
            n_rows,
            {at[UInt32](given.recv_counts), at[Int32](given.recv_ranges)},
            at[Int32](given.src_info),
        ),
        rank.queue_at(given.queue),
    )


@export
def max_ep_dispatch(arguments: Int) abi("C") -> Int32:
    """Dispatches; `arguments` is the address of `DispatchArguments`."""
    ref given = at[DispatchArguments](arguments)[]
    ref rank = _rank(given.handle)[]
    try:
        comptime for i in range(3):
            if given.form == i + 1:
                _dispatch[FORMS[i]](rank, given)
                return 0
        raise Error(t"max_ep_dispatch: there is no form {given.form}")
    except error:
        return rank.failed(error)


@fieldwise_init
struct CombineArguments(TrivialRegisterPassable):
    """A combine, as `DispatchArguments`."""

    var handle: Int
    var queue: Int
    var form: Int
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


def _combine[form: Form](mut rank: Rank, given: CombineArguments) raises:
    var n_rows = REGION.n_local_experts() * REGION.expert_capacity()
    var combined = CombinedTokens[COMBINE_DTYPE](
        at[Scalar[COMBINE_DTYPE]](given.combined),
        given.n_tokens,
        imm_at[Float32](given.weights),
    )
    comptime if IS_GIVEN:
        n_rows = given.n_rows
        combined.n_biases = given.n_biases
        combined.bias_0 = imm_at[Scalar[COMBINE_DTYPE]](given.bias_0)
        combined.bias_1 = imm_at[Scalar[COMBINE_DTYPE]](given.bias_1)
    # Where rows are sent, a caller may write over its own once they are.
    launch_combine[PARTIAL_DTYPE, TARGET, form, True](
        rank.call[COMBINE, 1]("combine"),
        GivenRows(
            LocalRows(at[UInt8](given.rows), n_rows), imm_at[Int32](given.src_info)
        ),
        combined,
        rank.queue_at(given.queue),
    )


@export
def max_ep_combine(arguments: Int) abi("C") -> Int32:
    """Combines; `arguments` is the address of `CombineArguments`."""
    ref given = at[CombineArguments](arguments)[]
    ref rank = _rank(given.handle)[]
    try:
        comptime for i in range(3):
            if given.form == i + 1:
                _combine[FORMS[i]](rank, given)
                return 0
        raise Error(t"max_ep_combine: there is no form {given.form}")
    except error:
        return rank.failed(error)


@export
def max_ep_watch(
    handle: Int, queue: Int, is_combine: Int32, waits_ns: Int
) abi("C") -> Int32:
    """Measures, between the halves, the wait for each peer: int64 `[n_ranks]`."""
    ref rank = _rank(handle)[]
    var waits = at[Int64](waits_ns)
    try:
        var to = rank.queue_at(queue)
        if is_combine == 0:
            launch_watch[TARGET, False](rank.call[DISPATCH, 0]("watch"), waits, to)
        else:
            launch_watch[TARGET, True](rank.call[COMBINE, 1]("watch"), waits, to)
        return 0
    except error:
        return rank.failed(error)
