# SPDX-License-Identifier: Apache-2.0
"""What a time-out or another failure of a launch says, and its record on GPUs.

A kernel cannot raise. It writes the failure record in its rank's counters, unless one
with the same code or a higher one is there, and ends. After a fatal failure later
launches of that rank do nothing (combine fills its result with NaN).
`EPCommInitializer.check` reads the record, and `raise_failure` writes the error. A CPU
rank raises the same.

    word 0  code     1  phase           2  missing rank     3  expert id, or row
    4, 5    generation wanted, found    6, 7  two numbers, by the code
"""
from .counters import Counters, N_FAILURE_WORDS, name_of_word, Word
from .flags import fetch_max, generation_of
from .layout import MAX_EXPERTS
from .peer_words import PHASES


struct Failure:
    """Failure codes, the worst last."""

    comptime DROPPED = Int32(1)
    """Some ids were dropped; everything else went on. Numbers: token, `k`."""
    comptime BAD_SOURCE = Int32(2)
    """`src_info` is not that of the last dispatch. Numbers: token, `k`."""
    comptime BAD_N_TOKENS = Int32(3)
    """`router_weights` are for another number of tokens. Numbers: given, sent."""
    comptime TOO_MANY_ROWS = Int32(4)
    """The outputs are too small. Numbers: rows that arrived, rows that fit."""
    comptime NOTHING_DISPATCHED = Int32(5)
    comptime NO_COUNT = Int32(6)
    """A pair's count did not come in time; expert -1: a rank's number of tokens."""
    comptime NO_MESSAGE = Int32(7)
    comptime NOT_READ = Int32(8)
    """A peer has not read what it was sent last."""
    comptime WRONG_COUNTERS = Int32(9)
    """The counters are those of another configuration. Instead of an expert id:
    which of their words. Numbers: what it is, what it should be."""
    comptime WRONG_EXPERT = Int32(10)
    """A row came back from another expert than was chosen. Numbers: token, `k`."""
    comptime OVERTAKEN = Int32(11)
    """Combine came after two more dispatches. Numbers: none."""
    comptime NOT_SENT = Int32(12)
    """`dispatch_wait` came before `dispatch_async`, whose tokens it needs."""
    comptime OTHER_ROWS = Int32(14)
    """Another dispatch was received since the one that combine answered. Numbers: the
    one that is answered, the last one received."""


comptime SEND = 0
comptime RECEIVE = 1


@always_inline
def is_fatal(code: Int32) -> Bool:
    return code > Failure.DROPPED


@always_inline
def is_missing(code: Int32) -> Bool:
    """Returns whether a peer is late, which ranks that mask do not record."""
    return Failure.NO_COUNT <= code and code <= Failure.NOT_READ


@always_inline
def record_failure(
    counters: Counters[...],
    code: Int32,
    phase: Int,
    missing_rank: Int,
    expert_or_row: Int,
    wanted: UInt32,
    found: UInt64,
    a: Int = 0,
    b: Int = 0,
):
    """Records a failure of the `SEND` or `RECEIVE` phase of an op, unless one of the same
    or a higher code is recorded."""
    var record = counters.at(Word.FAILURE)
    if not fetch_max(record, code):
        return
    record[unsafe_offset=1] = Int32(2 * Int(counters.group.is_combine()) + phase)
    record[unsafe_offset=2] = Int32(missing_rank)
    record[unsafe_offset=3] = Int32(expert_or_row)
    record[unsafe_offset=4] = wanted.cast[DType.int32]()
    record[unsafe_offset=5] = generation_of(found).cast[DType.int32]()
    record[unsafe_offset=6] = Int32(a)
    record[unsafe_offset=7] = Int32(b)


@always_inline
def as_no_expert(id: Int32) -> Int32:
    """Makes of an id that no logical expert has one that no physical expert has; dispatch
    drops it, and `what_failed` says the id that was given."""
    return id if id >= Int32(MAX_EXPERTS) else Int32.MIN + id


def _is_logical(id: Int) -> Bool:
    """Returns whether an id comes from `as_no_expert`."""
    return Int(Int32.MIN) < id and id < Int(Int32.MIN) + MAX_EXPERTS


comptime NEXT = (
    " Before the next run call EPCommInitializer.reset() (or restart the group,"
    " where each rank is a process of its own)."
)


@fieldwise_init
struct Caller(TrivialRegisterPassable):
    """The words of who calls, in errors: names of arguments, and what to do."""

    var topk_ids: StaticString
    var n_experts: StaticString
    var timeout_s: StaticString
    var more_rows: StaticString
    """What to change so that more rows fit."""
    var next: StaticString
    """A sentence, after a space: how later calls work again."""
    var has_wide_ids: Bool
    """Whether ids have 64 bits; a record has 32 of them."""


comptime GRAPH = Caller(
    topk_ids="topk_ids",
    n_experts="n_experts",
    timeout_s="EPConfig.timeout_s",
    more_rows="declare them with EPConfig.n_output_rows rows.",
    next=NEXT,
    has_wide_ids=False,
)


def what_failed(
    code: Int32,
    rank: Int,
    expert_or_row: Int,
    a: Int,
    b: Int,
    caller: Caller = GRAPH,
    is_recorded: Bool = False,
) -> String:
    """Says what a rank was given, or got from `rank`, and cannot take."""
    if code == Failure.DROPPED:
        var id = String(expert_or_row)
        var most = caller.n_experts
        if caller.has_wide_ids:
            # `load_id` has put them into this range.
            if is_recorded and expert_or_row == Int(Int32.MAX):
                id = String("2147483647 or more")
            elif is_recorded and expert_or_row < -1:
                id = String("-2 or less")
        elif _is_logical(expert_or_row):
            id = String(expert_or_row - Int(Int32.MIN))
            most = "num_logical_experts"
        return String(
            t"{caller.topk_ids} were dropped; one of them is token {a}, k {b}: expert"
            t" {id}. Ids must be in [-1, {most}) and those of one token distinct. Fix"
            t" the router's output."
        )
    if code == Failure.BAD_SOURCE:
        return String(
            t"src_info (row {expert_or_row}: token {a}, k {b}) is not that of"
            t" this rank's last dispatch_wait. Pass the src_info of that"
            t" dispatch, and combine before the next dispatch of the same"
            t" buffers."
        )
    if code == Failure.BAD_N_TOKENS:
        return String(
            t"{a} tokens are combined, {b} were dispatched; pass the router_weights,"
            t" or the number, of all of them."
        )
    if code == Failure.TOO_MANY_ROWS:
        return String(t"{a} rows arrived and the tensors hold {b}; {caller.more_rows}")
    if code == Failure.NOTHING_DISPATCHED:
        return (
            "nothing was dispatched to this rank yet; combine sends back the"
            " rows of the last dispatch_wait."
        )
    if code == Failure.WRONG_EXPERT:
        return String(
            t"the row of token {a}, k {b} did not come from its expert"
            t" {expert_or_row}: rank {rank} has combined with the src_info of"
            t" another dispatch than its last."
        )
    if code == Failure.OVERTAKEN:
        return (
            "two dispatches have been sent since the one that is combined;"
            " combine before the second of them."
        )
    if code == Failure.OTHER_ROWS:
        return String(
            t"combine_async answered dispatch {a}, the last dispatch_wait was"
            t" of {b}. With sums, combine finds the rows of its own tokens by"
            t" the last dispatch_wait: call combine_async, then combine_wait,"
            t" before the next one."
        )
    if code == Failure.NOT_SENT:
        return (
            "before its dispatch_async: the shared expert's tokens are not"
            " there. Send first."
        )
    if code == Failure.WRONG_COUNTERS:
        return String(
            t"the symmetric memory belongs to another EPConfig than the graph"
            t" ({name_of_word(expert_or_row)}: {a} there, {b} in the graph);"
            t" pass the model_inputs() of an EPCommInitializer with the same."
        )
    return String()


def place_of(phase: Int, rank: Int) -> String:
    var phases = materialize[PHASES]()
    return String("max_ep: ", phases[phase], " on rank ", rank)


def raise_failure(
    record: Array[Int32, N_FAILURE_WORDS], my_rank: Int, timeout_ms: Int, caller: Caller
) raises:
    """Raises the error of a failure record, if it holds a failure."""
    var code = record[0]
    if code == 0:
        return
    var place = place_of(Int(record[1]), my_rank)
    var rank = Int(record[2])
    var expert_or_row = Int(record[3])
    if not is_missing(code):
        var a, b = Int(record[6]), Int(record[7])
        var text = what_failed(code, rank, expert_or_row, a, b, caller, True)
        raise Error(place, ": ", text, caller.next)
    var what: StaticString = "count"
    if code == Failure.NO_MESSAGE:
        what = "message"
    if code == Failure.NOT_READ:
        what = "done word"
    var expert = String()
    if expert_or_row >= 0:
        expert = String(" for expert ", expert_or_row)
    var wanted = record[4].cast[DType.uint32]()
    var found = record[5].cast[DType.uint32]()
    var missing = String(
        t"{what}{expert} of generation {wanted} from rank {rank} (last seen:"
        t" generation {found})"
    )
    if timeout_ms == 0:
        raise Error(
            t"{place}: no {missing}. The ranks of one process run one after"
            t" another, so waiting cannot help: put the async op of every rank"
            t" before the first wait, and wait on every rank before sending"
            t" again.{caller.next}"
        )
    raise Error(
        t"{place}: timed out after {timeout_ms} ms waiting for {missing}. Rank"
        t" {rank} has died, is later than {caller.timeout_s}, or"
        t" runs other EP ops than this rank.{caller.next}"
    )
