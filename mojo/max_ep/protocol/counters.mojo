# SPDX-License-Identifier: Apache-2.0
"""Counters: what a rank keeps between launches.

The words are in this rank's own memory. Only `max-ep who` reads another rank's. All are
Int32:

    [0, N_HEADER_WORDS)   who this rank is, the four generations, tallies, the
                          failure record of GPU launches
    pairs                 (first row, rows) of each (local expert, source rank)
                          pair in the last `dispatch_wait`, and one end: (rows
                          the tensors must hold, rows of the largest pair).
                          `combine_async` finds each row's source rank by them
    choices [2][max_tokens_per_rank * top_k]
                          GPU only: expert of each choice of the last two
                          dispatches (`sent_choice`), `NO_EXPERT` if it was not
                          sent; halves alternate by generation. If combine sends
                          rows, `dispatch_wait` records `own_row` in its place
                          where this rank has the expert
    slots [max_tokens_per_rank * top_k]
                          GPU only: slot of each choice of this dispatch
    received tokens [n_ranks], rows [n_ranks][max_tokens_per_rank * top_k],
    weights [n_ranks][max_tokens_per_rank * top_k] (float32)
                          by rank with sums only: tokens of each source rank
                          in the last dispatch_wait, and of each of their
                          choices the row here, or that there is none, and the
                          router weight. Sources are counted from this rank on
                          (`Group.relative_rank`)
    taken [3][2], a cache line each
                          more than two ranks; GPU, by rank: how many items the
                          blocks of a launch have taken (`Taken`), by the parity
                          of the generation
    masked [n_ranks], begin of the step
                          if ranks mask (`Group.masks`): not 0 for each rank that
                          this one has masked; CPU: when its last `dispatch_async`
                          began, in ms; GPU: when it last sent heartbeats, in ms
    decided [n_pairs + n_ranks], heard [n_ranks]
                          if ranks mask, 64 bits each. GPU: the counts and numbers of
                          tokens that the first block took. The last heartbeat of
                          each rank, and when it was seen, in ms; CPU: of those of
                          other hosts, and when this rank last sent them its own
    rows found [max_tokens_per_rank], rows dropped [n_local_experts]
                          CPU, and GPU if rows are dropped: rows that came back of
                          each token in the last combine, and rows that did not fit in
                          the last dispatch
    blocks indexed        GPU, by rank over several hosts: blocks of this launch whose
                          entries and counts are staged
"""
import max.gpu.primitives.warp as warp

from .flags import FlagPointer
from .kernel_argument import KernelArgument, MutPointer
from .layout import Group, MAX_RANKS, N_GROUP_WORDS, round_up

comptime COUNTERS_MAGIC = 0x6D657031
"""Value of the magic word once `max_ep.init` has run."""
comptime NO_EXPERT = Int32(-1)
"""Expert of a choice that is not sent."""


@always_inline
def sent_choice(expert_id: Int32, position: Int, group: Group) -> Int32:
    """Encodes an expert; if rows are dropped, also the choice's place in its pair."""
    if group.drops_rows:
        return Int32(position * group.n_experts) + expert_id
    return expert_id


@always_inline
def expert_of_choice(choice: Int32, group: Group) -> Int:
    return Int(choice) % group.n_experts if group.drops_rows else Int(choice)


@always_inline
def position_of_choice(choice: Int32, group: Group) -> Int:
    return Int(choice) // group.n_experts


@always_inline
def own_row(row: Int) -> Int32:
    """Encodes the row of a choice whose expert is on the token's rank."""
    return NO_EXPERT - 1 - Int32(row)


@always_inline
def row_of_own(choice: Int32) -> Int:
    """Decodes `own_row`; negative if the choice has no row on the token's rank."""
    return Int(NO_EXPERT - 1 - choice)


comptime NO_ROW = Int32(-1)
"""Row of a choice whose expert is on another rank, or that has none. GPU ranks
have `row_elsewhere` in its place where they know the rank."""


@always_inline
def row_elsewhere(rank: Int) -> Int32:
    """Encodes the rank that has the row of one of this rank's choices."""
    return NO_ROW - 1 - Int32(rank)


@always_inline
def rank_elsewhere(row: Int32) -> Int:
    return Int(NO_ROW - 1 - row)


comptime N_HEADER_WORDS = 32
comptime N_FAILURE_WORDS = 8


struct Word:
    """The words of the header."""

    comptime MAGIC = 0
    comptime MY_RANK = 1
    comptime TIMEOUT_MS = 2
    """How long a launch may wait; 0: not at all."""
    comptime DISPATCH_SENT = 3
    """The last generation that dispatch sent; 0 before the first."""
    comptime DISPATCH_RECEIVED = 4
    comptime COMBINE_SENT = 5
    comptime COMBINE_RECEIVED = 6
    comptime SRC_INFO_HASH = 8
    """CPU: digest of the last dispatch's `src_info`."""
    comptime GROUP = 9
    """First of the words of `Group.words`."""
    comptime N_TOKENS = 16
    """Tokens of the last two dispatches, by the parity of the generation."""
    comptime COMBINE_OF = 18
    """Generation of the dispatch that the last `combine_async` answered."""
    comptime BROKEN = 19
    """Not 0 once a launch on a GPU has failed: later ones do nothing. Whoever gives up
    sets it; one warp reads it for its block (`Block.begin`)."""
    comptime FAILURE = 20
    """First of the `N_FAILURE_WORDS` of the failure record, see `failures.mojo`."""
    comptime BLOCKS_ARRIVED = 28
    """GPU: blocks of this launch that have begun, or that have ended."""
    comptime DISPATCH_DRAINED = 29
    """GPU: the last generation of dispatch that all ranks are known to have read."""
    comptime COMBINE_DRAINED = 30
    """GPU: the last generation of combine that all ranks are known to have read."""
    comptime MOST_RECEIVED = 31
    """GPU: the most tokens of any source in the last dispatch."""
    comptime LINK = 20
    """CPU: where the queue of the link to other hosts is, two words; 0: nowhere."""
    comptime LAUNCH = 28
    """CPU: 1 + the number in `PHASES` of what runs; negative once it has ended, 0
    before the first. Other processes read it (`max_ep/waits.py`)."""
    comptime LAUNCH_SINCE = 30
    """CPU: since when, in ns of the monotonic clock: two words."""


struct Taken:
    """What all blocks of a launch take from one counter if tokens are many: chunks of
    sums to add up, of sums to send, of tokens to send."""

    comptime SUMS = 0
    comptime SUM_SENDS = 1
    comptime TOKEN_SENDS = 2


comptime _LINE_WORDS = 32


@always_inline
def blocks_share_work(group: Group) -> Bool:
    """Returns whether blocks take many items from one counter. Blocks are not equally
    fast, so otherwise the slowest one ends last; two ranks gain nothing."""
    return group.n_ranks > 2


@always_inline
def choices_word(n_experts: Int) -> Int:
    """Locates the choices; a rank has at most n_experts + n_ranks - 1 pairs."""
    return N_HEADER_WORDS + 2 * (n_experts + MAX_RANKS + 1)


@always_inline
def _received_word(group: Group) -> Int:
    return choices_word(group.n_experts) + 3 * group.n_choices()


@always_inline
def _taken_word(group: Group) -> Int:
    var n_words = _received_word(group)
    if group.has_sums:
        n_words += group.n_ranks * (1 + 2 * group.n_choices())
    return round_up(n_words, _LINE_WORDS) if blocks_share_work(group) else n_words


def masked_word(group: Group) -> Int:
    return _taken_word(group) + (6 * _LINE_WORDS if blocks_share_work(group) else 0)


@always_inline
def _decided_word(group: Group) -> Int:
    var n_words = masked_word(group)
    return round_up(n_words + group.n_ranks + 1, 2) if group.masks else n_words


def _found_word(group: Group) -> Int:
    return _decided_word(group) + (
        2 * (2 * group.n_ranks + group.n_pairs()) if group.masks else 0
    )


def local_sync_counters_words(group: Group) -> Int:
    return _indexed_word(group) + Int(group.is_linked())


def _indexed_word(group: Group) -> Int:
    return _found_word(group) + group.max_tokens_per_rank + group.n_local_experts()


@always_inline
def wanted_word(i: Int, found: Int32, group: Group) -> Int32:
    var wanted = found
    if i == Word.MAGIC:
        wanted = COUNTERS_MAGIC
    var words = group.words()
    comptime for word in range(N_GROUP_WORDS):
        if i == Word.GROUP + word and words[word] != 0:
            wanted = words[word]
    return wanted


def name_of_word(i: Int) -> String:
    var names: Array[StaticString, N_GROUP_WORDS] = [
        "n_experts",
        "n_ranks",
        "max_tokens_per_rank",
        "top_k",
        "bytes of a dispatch message",
        "bytes of a combine message",
        "protocol",
    ]
    if i == Word.MAGIC:
        return "mark of max_ep.init"
    return String(names[i - Word.GROUP])


comptime _HEADER_WORDS_OF_LAUNCH = [
    Word.MY_RANK,
    Word.TIMEOUT_MS,
    Word.DISPATCH_SENT,
    Word.DISPATCH_RECEIVED,
    Word.COMBINE_SENT,
    Word.COMBINE_RECEIVED,
    Word.COMBINE_OF,
    Word.DISPATCH_DRAINED,
    Word.COMBINE_DRAINED,
    Word.MOST_RECEIVED,
    Word.N_TOKENS,
    Word.N_TOKENS + 1,
]


@fieldwise_init
struct LaunchHeader(TrivialRegisterPassable):
    """What a launch uses of the header, as it was when the launch began."""

    var _words: SIMD[DType.int32, N_HEADER_WORDS]

    @staticmethod
    @always_inline
    def of(word: Int32) -> Self:
        """Broadcasts what a warp's lanes have read; all lanes call it."""
        var words = SIMD[DType.int32, N_HEADER_WORDS](0)
        comptime for i in _HEADER_WORDS_OF_LAUNCH:
            words[i] = warp.shuffle_idx(word, UInt32(i))
        return Self(words)

    @always_inline
    def number[word: Int](self) -> Int:
        comptime assert word in _HEADER_WORDS_OF_LAUNCH, "launches do not read it"
        return Int(self._words[word])

    @always_inline
    def generation[word: Int](self) -> UInt32:
        comptime assert word in _HEADER_WORDS_OF_LAUNCH, "launches do not read it"
        return self._words[word].cast[DType.uint32]()

    @always_inline
    def n_tokens(self, generation: UInt32) -> Int:
        if generation & UInt32(1) == 0:
            return self.number[Word.N_TOKENS]()
        return self.number[Word.N_TOKENS + 1]()


@fieldwise_init
struct EPLocalSyncCounters[n_experts: Int](KernelArgument, TrivialRegisterPassable):
    """The local words of one rank, as MAX's kernels take them; see `Counters`."""

    var words: MutPointer[Int32]
    """`[total_size(group)]`; `Word` has their places."""

    @staticmethod
    def total_size(group: Group) -> Int:
        """Returns the number of words; Python asks through `layout_query.mojo`."""
        return local_sync_counters_words(group)


@fieldwise_init
struct Counters[group: Group](KernelArgument, TrivialRegisterPassable):
    """View of the local words of one rank."""

    var words: MutPointer[Int32]
    """`[local_sync_counters_words(group)]`; `Word` has their places."""

    @always_inline
    def at(self, word: Int) -> MutPointer[Int32]:
        return self.words.unsafe_offset(word)

    @always_inline
    def generation(self, word: Int) -> UInt32:
        return self.at(word)[].cast[DType.uint32]()

    @always_inline
    def set_generation(self, word: Int, generation: UInt32):
        self.at(word)[] = generation.cast[DType.int32]()

    @always_inline
    def my_rank(self) -> Int:
        return Int(self.at(Word.MY_RANK)[])

    @always_inline
    def timeout_ms(self) -> Int:
        return Int(self.at(Word.TIMEOUT_MS)[])

    @always_inline
    def set_broken(self):
        """Marks this rank as broken: later launches do nothing."""
        self.at(Word.BROKEN)[] = 1

    @always_inline
    def n_tokens_of(self, generation: UInt32) -> MutPointer[Int32]:
        return self.at(Word.N_TOKENS + Int(generation & UInt32(1)))

    @always_inline
    def pair_row(self, pair: Int) -> Int:
        return Int(self.at(N_HEADER_WORDS + 2 * pair)[])

    @always_inline
    def pair_count(self, pair: Int) -> Int:
        return Int(self.at(N_HEADER_WORDS + 2 * pair + 1)[])

    @always_inline
    def set_pair_rows(self, pair: Int, row: Int, count: Int):
        self.at(N_HEADER_WORDS + 2 * pair)[] = Int32(row)
        self.at(N_HEADER_WORDS + 2 * pair + 1)[] = Int32(count)

    @always_inline
    def taken(self, what: Int, generation: UInt32) -> MutPointer[Int32]:
        var line = 2 * what + Int(generation & UInt32(1))
        return self.at(_taken_word(Self.group) + line * _LINE_WORDS)

    @always_inline
    def choices(self, generation: UInt32) -> MutPointer[Int32]:
        return self.at(
            choices_word(Self.group.n_experts)
            + Int(generation & UInt32(1)) * Self.group.n_choices()
        )

    @always_inline
    def slots(self) -> MutPointer[Int32]:
        return self.at(choices_word(Self.group.n_experts) + 2 * Self.group.n_choices())

    @always_inline
    def is_masked(self, rank: Int) -> Bool:
        return Self.group.masks and self.masked(rank)[] != 0

    @always_inline
    def masked(self, rank: Int) -> MutPointer[Int32]:
        return self.at(masked_word(Self.group) + rank)

    @always_inline
    def step_began_ms(self) -> MutPointer[Int32]:
        return self.at(masked_word(Self.group) + Self.group.n_ranks)

    def rows_found(self, token_idx: Int) -> MutPointer[Int32]:
        return self.at(_found_word(Self.group) + token_idx)

    def rows_dropped(self, local_expert: Int) -> MutPointer[Int32]:
        return self.rows_found(Self.group.max_tokens_per_rank + local_expert)

    @always_inline
    def blocks_indexed(self) -> MutPointer[Int32]:
        """Counts the blocks of a launch that have staged entries and counts."""
        return self.at(_indexed_word(Self.group))

    @always_inline
    def decided(self, place: Int) -> FlagPointer:
        """Points to what the first block has decided of a count, then of a number of
        tokens (GPU): the flag that it took, with a count of 0 if none came."""
        return self.at(_decided_word(Self.group) + 2 * place).unsafe_bitcast[UInt64]()

    @always_inline
    def heard(self, rank: Int) -> FlagPointer:
        """Points to the last heartbeat of a rank, and when it was seen."""
        return self.decided(Self.group.n_pairs() + Self.group.n_ranks + rank)

    @always_inline
    def received_tokens(self) -> MutPointer[Int32]:
        return self.at(_received_word(Self.group))

    @always_inline
    def received_rows(self, source: Int) -> MutPointer[Int32]:
        return self.at(
            _received_word(Self.group)
            + Self.group.n_ranks
            + source * Self.group.n_choices()
        )

    @always_inline
    def received_weights(self, source: Int) -> MutPointer[Float32]:
        return self.received_rows(Self.group.n_ranks + source).unsafe_bitcast[Float32]()
