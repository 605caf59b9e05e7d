# SPDX-License-Identifier: Apache-2.0
"""EPLocalSyncCounters: the local words that launches keep between launches.

They live in this rank's own memory; no peer sees them. Words, all Int32:

    [0, N_HEADER_WORDS)   who this rank is, the four generations, tallies, the
                          failure record of GPU launches
    pairs                 (first row, rows) of each (local expert, source rank)
                          pair in the last `dispatch_wait`, and one end: (rows
                          the tensors must hold, rows of the largest pair).
                          `combine_async` finds each row's source rank by them
    choices [2][max_tokens_per_rank * top_k]
                          GPU only: expert of each choice of the last two
                          dispatches, `NO_EXPERT` if it was not sent; halves
                          alternate by generation. If combine sends rows,
                          `dispatch_wait` records `own_row` in its place where
                          this rank has the expert
    slots [max_tokens_per_rank * top_k]
                          GPU only: slot of each choice of this dispatch
    received tokens [n_ranks], rows [n_ranks][max_tokens_per_rank * top_k],
    weights [n_ranks][max_tokens_per_rank * top_k] (float32)
                          by rank with sums only: tokens of each source rank
                          in the last dispatch_wait, and of each of their
                          choices the row here, or that there is none, and the
                          router weight. Sources are counted from this rank on
                          (`relative_rank`)
"""
import max.gpu.primitives.warp as warp
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from .layout import Group, MAX_RANKS

comptime COUNTERS_MAGIC = 0x6D657031
"""Value of the magic word once `max_ep.init` has run."""

comptime N_HEADER_WORDS = 32
"""Words in front of the pairs."""

comptime NO_EXPERT = Int32(-1)
"""Expert of a choice that is not sent."""


@always_inline
def own_row(row: Int) -> Int32:
    """Names the row of a choice whose expert is on the choice's own rank."""
    return NO_EXPERT - 1 - Int32(row)


@always_inline
def row_of_own(choice: Int32) -> Int:
    """Reads the row; negative if the choice has none on its own rank."""
    return Int(NO_EXPERT - 1 - choice)


comptime NO_ROW = Int32(-1)
"""Row of a choice whose expert is on another rank, or that has none. GPU ranks
have `row_elsewhere` in its place where they know the rank."""


@always_inline
def row_elsewhere(rank: Int) -> Int32:
    """Names the rank of a choice of this rank's that has its row there."""
    return NO_ROW - 1 - Int32(rank)


@always_inline
def rank_elsewhere(row: Int32) -> Int:
    """Reads which rank has the row."""
    return Int(NO_ROW - 1 - row)


@always_inline
def relative_rank(my_rank: Int, src_rank: Int, n_ranks: Int) -> Int:
    """Counts the sources from a rank on: itself is 0, the one after it 1.

    So a launch finds what it has noted of the first ones before it has read which
    rank it is.
    """
    var source = src_rank - my_rank
    return source + n_ranks if source < 0 else source


@always_inline
def rank_of_relative(my_rank: Int, source: Int, n_ranks: Int) -> Int:
    """Finds the rank of a source that is counted so."""
    var rank = my_rank + source
    return rank - n_ranks if rank >= n_ranks else rank


comptime _MAGIC = 0
comptime _MY_RANK = 1
comptime _TIMEOUT_MS = 2
comptime _DISPATCH_SENT = 3
comptime _DISPATCH_RECEIVED = 4
comptime _COMBINE_SENT = 5
comptime _COMBINE_RECEIVED = 6
comptime _N_DROPPED = 7
comptime _SRC_INFO_HASH = 8  # CPU ranks
comptime _N_FIELDS = 7
comptime _LAYOUT = 9  # `_N_FIELDS` words, the fields of Group
comptime _LAYOUT_NAMES: Array[StaticString, _N_FIELDS] = [
    "n_experts",
    "n_ranks",
    "max_tokens_per_rank",
    "top_k",
    "bytes of a dispatch message",
    "bytes of a combine message",
    "protocol",
]
comptime _N_TOKENS = 16  # two words, by the parity of the generation
comptime _COMBINE_OF = 18
comptime BROKEN_WORD = 19
"""Not 0 once a launch on a GPU has failed: later ones do nothing.
By expert the last block of the launch sets it, and it does not change while
warps rely on it; by rank whoever gives up does, and one warp reads it
for its block (`Block.begin`)."""

comptime _BLOCKS_DONE = 28  # GPU ranks
comptime _DISPATCH_DRAINED = 29
comptime _COMBINE_DRAINED = 30
comptime _MOST_RECEIVED = 31

comptime FAILURE_WORD = 20
"""First of the `N_FAILURE_WORDS` of the failure record, see `failures.mojo`."""

comptime N_FAILURE_WORDS = 8
"""Words of the failure record."""


def _choices_word(n_experts: Int) -> Int:
    # A rank has at most n_experts + n_ranks - 1 pairs.
    return N_HEADER_WORDS + 2 * (n_experts + MAX_RANKS + 1)


@always_inline
def _received_word(group: Group) -> Int:
    return _choices_word(group.n_experts) + 3 * group.n_choices()


def local_sync_counters_words(group: Group) -> Int:
    """Counts the words of `EPLocalSyncCounters`."""
    var n_words = _received_word(group)
    if group.has_sums():
        n_words += group.n_ranks * (1 + 2 * group.n_choices())
    return n_words


@always_inline
def _fields(group: Group) -> Array[Int, _N_FIELDS]:
    return [
        group.n_experts,
        group.n_ranks,
        group.max_tokens_per_rank,
        group.top_k,
        group.dispatch_msg_bytes,
        group.combine_msg_bytes,
        group.protocol(),
    ]


@always_inline
def wanted_word(i: Int, found: Int32, group: Group) -> Int32:
    """States what a word must be if the words are those of a launch."""
    var wanted = found
    if i == _MAGIC:
        wanted = COUNTERS_MAGIC
    var fields = _fields(group)
    comptime for field in range(_N_FIELDS):
        if i == _LAYOUT + field and fields[field] != 0:
            wanted = Int32(fields[field])
    return wanted


def name_of_word(i: Int) -> String:
    """Names a word for which `wanted_word` can want another value."""
    if i == _MAGIC:
        return "mark of max_ep.init"
    var names = materialize[_LAYOUT_NAMES]()
    return String(names[i - _LAYOUT])


@fieldwise_init
struct LaunchHeader(TrivialRegisterPassable):
    """What the header of a rank's counters says when a launch begins."""

    var my_rank: Int
    """The rank that owns the counters."""
    var timeout_ms: Int
    """How long a launch may wait; 0: not at all."""
    var dispatch_sent: UInt32
    """The last generation that dispatch sent; 0 before the first."""
    var dispatch_received: UInt32
    """The last generation that dispatch received."""
    var combine_sent: UInt32
    """The last generation that combine sent."""
    var combine_received: UInt32
    """The last generation that combine received."""
    var combine_of: UInt32
    """Which dispatch the last `combine_async` answered."""
    var dispatch_drained: UInt32
    """The last generation of dispatch that all ranks are known to have read."""
    var combine_drained: UInt32
    """The last generation of combine that all ranks are known to have read."""
    var most_received: Int
    """Tokens of the source that had most in the last dispatch."""
    var n_tokens_even: Int
    """Tokens of the last dispatch of an even generation."""
    var n_tokens_odd: Int
    """Tokens of the last dispatch of an odd generation."""

    @staticmethod
    @always_inline
    def my_rank_of(word: Int32) -> Int:
        """Hands the rank alone to all lanes of a warp."""
        return Int(warp.shuffle_idx(word, UInt32(_MY_RANK)))

    @staticmethod
    @always_inline
    def of(word: Int32) -> Self:
        """Hands the header that a warp has read to all of its lanes."""

        # All lanes take part in a shuffle, so all words are taken here, where
        # all lanes come.
        @always_inline
        @__parameter
        def get(i: Int) -> Int32:
            return warp.shuffle_idx(word, UInt32(i))

        return Self._of[get]()

    @staticmethod
    @always_inline
    def read(counters: EPLocalSyncCounters) -> Self:
        """Reads the header with each lane; what nobody uses is not loaded."""

        @always_inline
        @__parameter
        def get(i: Int) -> Int32:
            return counters.words[unsafe_offset=i]

        return Self._of[get]()

    @staticmethod
    @always_inline
    def _of[get: def(Int) capturing[_] -> Int32]() -> Self:
        return Self(
            Int(get(_MY_RANK)),
            Int(get(_TIMEOUT_MS)),
            get(_DISPATCH_SENT).cast[DType.uint32](),
            get(_DISPATCH_RECEIVED).cast[DType.uint32](),
            get(_COMBINE_SENT).cast[DType.uint32](),
            get(_COMBINE_RECEIVED).cast[DType.uint32](),
            get(_COMBINE_OF).cast[DType.uint32](),
            get(_DISPATCH_DRAINED).cast[DType.uint32](),
            get(_COMBINE_DRAINED).cast[DType.uint32](),
            Int(get(_MOST_RECEIVED)),
            Int(get(_N_TOKENS)),
            Int(get(_N_TOKENS + 1)),
        )

    @always_inline
    def n_tokens(self, generation: UInt32) -> Int:
        """Returns how many tokens a dispatch sent."""
        if generation & UInt32(1) == 0:
            return self.n_tokens_even
        return self.n_tokens_odd


struct EPLocalSyncCounters[n_experts: Int](
    DevicePassable, TrivialRegisterPassable
):
    """View of the local words of one rank.

    Parameters:
        n_experts: Experts of the group.
    """

    var words: Pointer[Int32, MutUntrackedOrigin]
    """The words, `[total_size()]`."""

    comptime device_type: AnyType = Self
    """A kernel gets the view as it is."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments."""
        return "EPLocalSyncCounters"

    @always_inline
    def __init__(out self, words: Pointer[Int32, MutUntrackedOrigin]):
        """Looks at words that somebody else owns."""
        self.words = words

    @staticmethod
    @always_inline
    def total_size(group: Group) -> Int:
        """States the size; Python asks for it through `layout_query.mojo`."""
        return local_sync_counters_words(group)

    def reset(
        self,
        my_rank: Int,
        timeout_ms: Int,
        n_words: Int,
        group: Group,
    ):
        """Puts the words in the state before the first generation."""
        for i in range(n_words):
            self.words[unsafe_offset=i] = self.word_after_reset(
                i, my_rank, timeout_ms, group
            )

    @always_inline
    def word_after_reset(
        self, i: Int, my_rank: Int, timeout_ms: Int, group: Group
    ) -> Int32:
        """States a word before the first generation."""
        if i == _MAGIC:
            return COUNTERS_MAGIC
        if i == _MY_RANK:
            return Int32(my_rank)
        if i == _TIMEOUT_MS:
            return Int32(timeout_ms)
        var fields = _fields(group)
        comptime for field in range(_N_FIELDS):
            if i == _LAYOUT + field:
                return Int32(fields[field])
        return 0

    def matches_layout(self, group: Group) -> Bool:
        """Returns whether the regions are cut as a launch expects."""
        for i in range(_LAYOUT, _LAYOUT + _N_FIELDS):
            var found = self.words[unsafe_offset=i]
            if found != wanted_word(i, found, group):
                return False
        return True

    @always_inline
    def is_initialized(self) -> Bool:
        """Returns whether `max_ep.init` has run on these words."""
        return self.words[unsafe_offset=_MAGIC] == COUNTERS_MAGIC

    @always_inline
    def my_rank(self) -> Int:
        """Names the rank that owns these words."""
        return Int(self.words[unsafe_offset=_MY_RANK])

    @always_inline
    def timeout_ms(self) -> Int:
        """Returns how long a launch may wait."""
        return Int(self.words[unsafe_offset=_TIMEOUT_MS])

    @always_inline
    def _generation(self, word: Int) -> UInt32:
        return self.words[unsafe_offset=word].cast[DType.uint32]()

    @always_inline
    def dispatch_sent(self) -> UInt32:
        """Reads the last generation that `dispatch_async` sent."""
        return self._generation(_DISPATCH_SENT)

    @always_inline
    def dispatch_received(self) -> UInt32:
        """Reads the last generation that `dispatch_wait` received."""
        return self._generation(_DISPATCH_RECEIVED)

    @always_inline
    def combine_sent(self) -> UInt32:
        """Reads the last generation that `combine_async` sent."""
        return self._generation(_COMBINE_SENT)

    @always_inline
    def combine_received(self) -> UInt32:
        """Reads the last generation that `combine_wait` received."""
        return self._generation(_COMBINE_RECEIVED)

    @always_inline
    def set_dispatch_sent(self, generation: UInt32):
        """Notes that `dispatch_async` has sent a generation."""
        self.words[unsafe_offset=_DISPATCH_SENT] = generation.cast[
            DType.int32
        ]()

    @always_inline
    def set_dispatch_received(self, generation: UInt32):
        """Notes that `dispatch_wait` has received a generation."""
        self.words[unsafe_offset=_DISPATCH_RECEIVED] = generation.cast[
            DType.int32
        ]()

    @always_inline
    def set_combine_sent(self, generation: UInt32):
        """Notes that `combine_async` has sent a generation."""
        self.words[unsafe_offset=_COMBINE_SENT] = generation.cast[DType.int32]()

    @always_inline
    def set_combine_received(self, generation: UInt32):
        """Notes that `combine_wait` has received a generation."""
        self.words[unsafe_offset=_COMBINE_RECEIVED] = generation.cast[
            DType.int32
        ]()

    @always_inline
    def add_dropped(self, n: Int):
        """Counts choices that were dropped: a bad id, or a full pair."""
        self.words[unsafe_offset=_N_DROPPED] += Int32(n)

    @always_inline
    def src_info_hash(self) -> Int32:
        """Reads the digest of the last dispatch's `src_info`."""
        return self.words[unsafe_offset=_SRC_INFO_HASH]

    @always_inline
    def set_src_info_hash(self, digest: Int32):
        """Notes the digest of the last dispatch's `src_info`."""
        self.words[unsafe_offset=_SRC_INFO_HASH] = digest

    @always_inline
    def pair_row(self, pair: Int) -> Int:
        """Reads where a pair's rows begin in the last dispatched rows."""
        return Int(self.words[unsafe_offset=N_HEADER_WORDS + 2 * pair])

    @always_inline
    def pair_count(self, pair: Int) -> Int:
        """Reads how many rows a pair has in the last dispatched rows."""
        return Int(self.words[unsafe_offset=N_HEADER_WORDS + 2 * pair + 1])

    @always_inline
    def set_pair_rows(self, pair: Int, row: Int, count: Int):
        """Notes where a pair's rows begin and how many they are."""
        self.words[unsafe_offset=N_HEADER_WORDS + 2 * pair] = Int32(row)
        self.words[unsafe_offset=N_HEADER_WORDS + 2 * pair + 1] = Int32(count)

    # ------------------------------------------------- words of GPU launches

    @always_inline
    def blocks_done(self) -> Pointer[Int32, MutUntrackedOrigin]:
        """Points to the number of blocks that have ended in this launch."""
        return self.words.unsafe_offset(_BLOCKS_DONE)

    @always_inline
    def failure(self) -> Pointer[Int32, MutUntrackedOrigin]:
        """Points to the failure record."""
        return self.words.unsafe_offset(FAILURE_WORD)

    @always_inline
    def set_broken(self):
        """Notes that launches of this rank can no longer go on."""
        self.words[unsafe_offset=BROKEN_WORD] = 1

    @always_inline
    def n_tokens(self, generation: UInt32) -> Int:
        """Reads how many tokens a dispatch sent."""
        return Int(
            self.words[unsafe_offset=_N_TOKENS + Int(generation & UInt32(1))]
        )

    @always_inline
    def set_n_tokens(self, generation: UInt32, n_tokens: Int):
        """Notes how many tokens a dispatch sent."""
        self.words[
            unsafe_offset=_N_TOKENS + Int(generation & UInt32(1))
        ] = Int32(n_tokens)

    @always_inline
    def combine_of(self) -> UInt32:
        """Reads which dispatch the last `combine_async` answered."""
        return self._generation(_COMBINE_OF)

    @always_inline
    def set_combine_of(self, generation: UInt32):
        """Notes which dispatch `combine_async` answers."""
        self.words[unsafe_offset=_COMBINE_OF] = generation.cast[DType.int32]()

    @always_inline
    def set_most_received(self, n_tokens: Int):
        """Notes how many tokens the source had that had most."""
        self.words[unsafe_offset=_MOST_RECEIVED] = Int32(n_tokens)

    @always_inline
    def set_dispatch_drained(self, generation: UInt32):
        """Notes that all ranks have read a generation of dispatch."""
        self.words[unsafe_offset=_DISPATCH_DRAINED] = generation.cast[
            DType.int32
        ]()

    @always_inline
    def set_combine_drained(self, generation: UInt32):
        """Notes that all ranks have read a generation of combine."""
        self.words[unsafe_offset=_COMBINE_DRAINED] = generation.cast[
            DType.int32
        ]()

    @always_inline
    def choices(
        self, generation: UInt32, group: Group
    ) -> Pointer[Int32, MutUntrackedOrigin]:
        """Points to the experts of a dispatch's choices."""
        return self.words.unsafe_offset(
            _choices_word(group.n_experts)
            + Int(generation & UInt32(1)) * group.n_choices()
        )

    @always_inline
    def slots(self, group: Group) -> Pointer[Int32, MutUntrackedOrigin]:
        """Points to the slots of this dispatch's choices."""
        return self.words.unsafe_offset(
            _choices_word(group.n_experts) + 2 * group.n_choices()
        )

    # --------------------------------------------- words of reduced combine

    @always_inline
    def received_tokens(
        self, group: Group
    ) -> Pointer[Int32, MutUntrackedOrigin]:
        """Points to how many tokens each source had in the last dispatch."""
        return self.words.unsafe_offset(_received_word(group))

    @always_inline
    def received_rows(
        self, group: Group, source: Int
    ) -> Pointer[Int32, MutUntrackedOrigin]:
        """Points to the rows of a source's choices in the last dispatch."""
        return self.words.unsafe_offset(
            _received_word(group) + group.n_ranks + source * group.n_choices()
        )

    @always_inline
    def received_weights(
        self, group: Group, source: Int
    ) -> Pointer[Float32, MutUntrackedOrigin]:
        """Points to the router weights of a source's choices."""
        return self.received_rows(group, group.n_ranks + source).unsafe_bitcast[
            Float32
        ]()
