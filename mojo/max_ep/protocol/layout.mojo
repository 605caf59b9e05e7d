# SPDX-License-Identifier: Apache-2.0
"""The group, and the layout of the memory of one rank that its peers can reach.

Each rank owns one region. All regions have the same layout, so an offset that is
right on one rank is right on all of them. If dispatch addresses *by expert*:

    offset 0
    +---------------------------------------------------------------------+
    | dispatch send    [max_tokens_per_rank]              of dispatch msg  |
    | dispatch recv    [n_local_experts][n_ranks][max_tokens_per_rank]     |
    |                                                     of dispatch msg  |
    | dispatch counts  [n_local_experts][n_ranks] UInt64, done [n_ranks]   |
    +---------------------------------------------------------------------+
    | combine recv     [max_tokens_per_rank][top_k]       of combine msg   |
    | combine counts   [n_experts] UInt64, done [n_ranks] UInt64           |
    +---------------------------------------------------------------------+
    region_bytes

*By rank* there is no dispatch send buffer (a rank encodes its tokens in place, in its
own recv buffer), and dispatch recv and counts are:

    +---------------------------------------------------------------------+
    | dispatch recv    entries [n_ranks][max_tokens_per_rank][top_k]       |
    |                  tokens  [n_ranks][max_tokens_per_rank]              |
    |                                                     of dispatch msg  |
    |                  inline tokens [n_ranks][n_inline_tokens], for GPUs  |
    |                  chunk flags [n_ranks][max_tokens_per_rank][N_CHUNKS]|
    |                                                     UInt64, for GPUs |
    | dispatch counts  as above, then tokens [n_ranks] UInt64              |
    +---------------------------------------------------------------------+

An entry says where a choice goes: one UInt64 with generation, expert, and position
among the choices of that expert. If combine returns *sums*, a second UInt64 follows,
generation and router weight, and combine recv holds partial sums instead of rows:

    | combine recv     [n_ranks][max_tokens_per_rank]     of combine msg   |
    |                  router weights that come late, such words           |
    |                  [n_ranks][max_tokens_per_rank][top_k]               |

If ranks mask a peer that is late (`Group.masks`), each owner has places of its own for
rows, which a late store of another cannot hit, and the dispatch counts end with the
heartbeats. Combine finds them there, for it knows the sizes of both:

    | dispatch counts  as above, then heartbeats [n_ranks] UInt64          |
    | combine recv     [n_ranks][max_tokens_per_rank][top_k]               |

By rank over several hosts (`Group.is_linked`) a rank stages what it puts to others in
its own region, no token is inline, and the counts of a source stand together:

    | dispatch counts  [n_ranks][n_local_experts] UInt64, done and tokens  |
    |                  as above, staged counts [n_ranks][n_local_experts]  |
    | combine recv     as above, then n_ranks times as much, staged        |

If ranks relay (`Group.relays`), a rank stages partial sums only for ranks of its own
place on other hosts. The other staged places are where ranks of its host leave theirs.

Peers write everything but the dispatch send buffer and what is staged. A message is the
encoded token (or expert row) followed by a source info of `SOURCE_INFO_BYTES`. In an
all-gather, routing metadata stands between them: for each choice two words, generation
and expert id, generation and probability. This file knows offsets and sizes: no
pointers, no atomics. Who may write what is in `docs/protocol.md`.
"""
from .addressing import Addressing
from .peer_words import Buf, FLAG_BYTES, Limit, PeerWords

comptime MESSAGE_ALIGN = 16
"""Messages start and end on this many bytes: one 128-bit access."""

comptime SOURCE_INFO_BYTES = 16
"""Bytes after the token of a message: a flag (UInt64), then 8 unused bytes.

A flag as in `flags.mojo`, of the generation that wrote the message. Its count is the
choice, `token_idx * top_k + k`; in a combine row of a GPU rank, the expert id; in a
partial sum of a CPU rank, the rows in it. On GPUs it also announces the message.
"""

comptime BUFFER_ALIGN = 256
"""Every buffer of a region starts on this many bytes."""
comptime ENTRY_BYTES = 8
"""Bytes of a word of an entry (`protocol/entries.mojo`)."""
comptime METADATA_BYTES = 2 * ENTRY_BYTES
"""Bytes of routing metadata for one choice: two words of the form of an entry's."""
comptime N_CHUNKS = 4
"""Chunks of a token that GPU ranks send by rank, each with a flag."""

comptime MAX_INLINE_TOKENS = 256
"""Most tokens of a rank that it sends as inline tokens, whose data is its own flag (by
rank on GPUs)."""

comptime MAX_RANKS = 128
"""Largest `n_ranks`; bounds the per-rank words of the counters."""
comptime N_GROUP_WORDS = 7
"""Words that the layout of a region depends on (`Group.words`)."""
comptime MASKS_BIT = 8
"""Added to the number of the protocol if ranks mask (`Group.protocol`)."""
comptime LATE_WEIGHTS_BIT = 16
"""The same if sums get their weights at combine."""
comptime LINKED_BIT = 32
"""The same, if dispatch goes by rank over several hosts (`Group.is_linked`)."""
comptime RELAYS_BIT = 64
"""The same, if ranks relay to others of their host (`Group.relays`)."""
comptime MAX_TOP_K = 32
"""Largest `top_k`."""
comptime MAX_EXPERTS = 1048576
"""Largest `n_experts`."""


def round_up(n: Int, multiple: Int) -> Int:
    return (n + multiple - 1) // multiple * multiple


struct Group(TrivialRegisterPassable):
    """The compile-time facts about a group, for one op.

    Its methods are the layout of the region. Offsets are in bytes: those of an item
    count from the start of its buffer, those of a buffer from the start of the
    region.
    """

    var n_experts: Int
    """Experts of the group."""
    var n_ranks: Int
    """Ranks of the group."""
    var max_tokens_per_rank: Int
    """Tokens one rank may send in one generation."""
    var top_k: Int
    """Experts of one token."""
    var hidden_size: Int
    """Elements of a token."""
    var dispatch_msg_bytes: Int
    """Bytes of one dispatch message; 0: this op does not use them."""
    var combine_msg_bytes: Int
    """Bytes of one combine message; 0: this op does not use them."""
    var addressing: Addressing
    """How dispatch addresses a token."""
    var has_sums: Bool
    """Whether combine returns sums of each token and rank, not rows of choices."""
    var is_padded: Bool
    """Whether the rows of each expert have a block of their own."""
    var fused_shared_expert: Bool
    """Whether this rank's own tokens come first, as rows of a shared expert."""
    var shares_gpu: Bool
    """Whether other ranks may run on this rank's GPU."""
    var n_mapped: Int
    """Ranks of a host, whose memory is mapped; a link reaches the others."""
    var wide_ids: Bool
    """Whether expert ids are int64: by rank, and on CPU."""
    var num_threads: Int
    """Threads of a GPU block."""
    var n_sms: Int
    """Most multiprocessors of a GPU that a launch may use; 0: all."""
    var masks: Bool
    """Whether a rank that is late is masked, and the others go on without it."""
    var drops_rows: Bool
    """Whether rows that do not fit into the outputs are dropped."""
    var partial_block: Int
    """Elements of a partial sum that share a scale; 0: there are no scales."""
    var router_top_k: Int
    """Choices of the router in each token, if those of this group are their ranks."""
    var router_experts: Int
    """Experts that the router chooses from, if it does not choose this group's."""
    var row_alignment: Int
    """Rows travel as given, and those of an expert begin at a multiple; 0: neither."""
    var late_weights: Bool
    """Whether sums get their router weights at combine."""
    var relays: Bool
    """Whether tokens and sums cross once to each other host, where one rank relays or
    adds them (0037)."""

    def __init__(
        out self,
        *,
        n_experts: Int,
        n_ranks: Int,
        max_tokens_per_rank: Int,
        top_k: Int,
        hidden_size: Int = 0,
        dispatch_msg_bytes: Int = 0,
        combine_msg_bytes: Int = 0,
        addressing: Addressing = Addressing.BY_EXPERT,
        has_sums: Bool = False,
        is_padded: Bool = False,
        fused_shared_expert: Bool = False,
        shares_gpu: Bool = True,
        n_mapped: Int = 0,
        wide_ids: Bool = False,
        num_threads: Int = 512,
        n_sms: Int = 0,
        masks: Bool = False,
        drops_rows: Bool = False,
        partial_block: Int = 0,
        router_top_k: Int = 0,
        router_experts: Int = 0,
        row_alignment: Int = 0,
        late_weights: Bool = False,
        relays: Bool = False,
    ):
        """Describes a group; `n_mapped` 0: all ranks."""
        self.n_experts = n_experts
        self.n_ranks = n_ranks
        self.max_tokens_per_rank = max_tokens_per_rank
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.dispatch_msg_bytes = dispatch_msg_bytes
        self.combine_msg_bytes = combine_msg_bytes
        self.addressing = addressing
        self.has_sums = has_sums
        self.is_padded = is_padded
        self.fused_shared_expert = fused_shared_expert
        self.shares_gpu = shares_gpu
        self.n_mapped = n_mapped or n_ranks
        self.wide_ids = wide_ids
        self.num_threads = num_threads
        self.n_sms = n_sms
        self.masks = masks
        self.drops_rows = drops_rows
        self.partial_block = partial_block
        self.router_top_k = router_top_k
        self.router_experts = router_experts
        self.row_alignment = row_alignment
        self.late_weights = late_weights
        self.relays = relays

    @staticmethod
    def of(words: Array[Int32, N_GROUP_WORDS]) -> Self:
        var axes = Int(words[6]) % MASKS_BIT
        var has_sums = axes > 1 and axes % 2 == 1
        return Self(
            n_experts=Int(words[0]),
            n_ranks=Int(words[1]),
            max_tokens_per_rank=Int(words[2]),
            top_k=Int(words[3]),
            dispatch_msg_bytes=Int(words[4]),
            combine_msg_bytes=Int(words[5]),
            addressing=Addressing(axes - Int(has_sums)),
            has_sums=has_sums,
            masks=Int(words[6]) & MASKS_BIT != 0,
            late_weights=Int(words[6]) & LATE_WEIGHTS_BIT != 0,
            n_mapped=Int(Int(words[6]) & LINKED_BIT != 0),
            relays=Int(words[6]) & RELAYS_BIT != 0,
        )

    def words(self) -> Array[Int32, N_GROUP_WORDS]:
        """Lists the numbers that the layout depends on, as the counters keep them."""
        return [
            Int32(self.n_experts),
            Int32(self.n_ranks),
            Int32(self.max_tokens_per_rank),
            Int32(self.top_k),
            Int32(self.dispatch_msg_bytes),
            Int32(self.combine_msg_bytes),
            Int32(self.protocol()),
        ]

    def protocol(self) -> Int:
        """Numbers the axes, and whether ranks mask, weights come late, a link is used, or
        ranks relay."""
        return (
            self.addressing.value
            + Int(self.has_sums)
            + (MASKS_BIT if self.masks else 0)
            + (LATE_WEIGHTS_BIT if self.late_weights else 0)
            + (LINKED_BIT if self.is_linked() else 0)
            + (RELAYS_BIT if self.relays else 0)
        )

    def is_combine(self) -> Bool:
        return self.dispatch_msg_bytes == 0

    def is_by_rank(self) -> Bool:
        """Returns whether dispatch sends a token once per rank."""
        return self.addressing != Addressing.BY_EXPERT

    def sends_to_all(self) -> Bool:
        return self.addressing == Addressing.TO_ALL

    def is_given(self) -> Bool:
        """Returns whether rows have their weights when they come back (0032)."""
        return self.row_alignment > 0

    def chooses_ranks(self) -> Bool:
        """Returns whether choices are ranks, and tokens have routing metadata."""
        return self.sends_to_all() or self.finds_ranks()

    def finds_ranks(self) -> Bool:
        """Returns whether a token's ranks are found in its router's choices."""
        return self.addressing == Addressing.TO_RANKS

    def n_local_experts(self) -> Int:
        """Counts the experts that each rank has places for.

        Expert `e` lives on rank `e // n_local_experts`. If the ranks do not divide the
        experts, the last ranks hold fewer (`n_experts_on`).
        """
        return (self.n_experts + self.n_ranks - 1) // self.n_ranks

    def n_experts_on(self, rank: Int) -> Int:
        """Counts the experts that a rank really holds, `[0, n_local_experts]`."""
        var n_local = self.n_local_experts()
        return max(0, min(n_local, self.n_experts - rank * n_local))

    def relative_rank(self, my_rank: Int, src_rank: Int) -> Int:
        """Numbers the sources relative to a rank: itself is 0, the next one 1.

        So a launch finds what it has recorded of the first ones before it has read which
        rank it is.
        """
        var source = src_rank - my_rank
        return source + self.n_ranks if source < 0 else source

    def rank_of_relative(self, my_rank: Int, source: Int) -> Int:
        var rank = my_rank + source
        return rank - self.n_ranks if rank >= self.n_ranks else rank

    def expert_id(self, rank: Int, local_expert: Int) -> Int:
        return rank * self.n_local_experts() + local_expert

    def expert_of_pair(self, rank: Int, pair: Int) -> Int:
        return self.expert_id(rank, pair // self.n_ranks)

    def n_shared_max(self) -> Int:
        return self.max_tokens_per_rank if self.fused_shared_expert else 0

    def spans_hosts(self) -> Bool:
        return self.n_mapped < self.n_ranks

    def is_linked(self) -> Bool:
        """Returns whether dispatch goes by rank over several hosts (0034)."""
        return self.is_by_rank() and self.spans_hosts()

    def relay_to(self, my_rank: Int, rank: Int, ranks_per_host: Int) -> Int:
        """Names the rank through which a rank reaches all of another one's host: it has the
        same place there."""
        return rank - rank % ranks_per_host + my_rank % ranks_per_host

    def choice(self, token_idx: Int, k: Int) -> Int:
        """Numbers a rank's choices; `divmod` by `top_k` takes one apart."""
        return token_idx * self.top_k + k

    def n_choices(self) -> Int:
        return self.choice(self.max_tokens_per_rank, 0)

    def pair(self, local_expert: Int, src_rank: Int) -> Int:
        return local_expert * self.n_ranks + src_rank

    def n_pairs(self) -> Int:
        return self.pair(self.n_local_experts(), 0)

    def expert_capacity(self) -> Int:
        """Counts the rows that a local expert can get."""
        return self.n_ranks * self.max_tokens_per_rank

    def entry_offset(self, src_rank: Int, choice: Int) -> Int:
        """Locates an entry: a word, or two with a router weight."""
        var n_words = 2 if self.has_sums else 1
        return (src_rank * self.n_choices() + choice) * n_words * ENTRY_BYTES

    def token_offset(self, src_rank: Int, token_idx: Int) -> Int:
        return (
            round_up(self.entry_offset(self.n_ranks, 0), BUFFER_ALIGN)
            + (src_rank * self.max_tokens_per_rank + token_idx)
            * self.dispatch_msg_bytes
        )

    def metadata_offset(
        self, src_rank: Int, token_idx: Int, k: Int, router_top_k: Int
    ) -> Int:
        """Locates the routing metadata of a choice, of inline tokens, too."""
        return (
            self.token_offset(src_rank, token_idx + 1)
            - SOURCE_INFO_BYTES
            - (router_top_k - k) * METADATA_BYTES
        )

    def n_inline_tokens(self) -> Int:
        return min(self.max_tokens_per_rank, MAX_INLINE_TOKENS)

    def inline_token_offset(self, src_rank: Int, token_idx: Int) -> Int:
        """Locates a token of a source whose data is its own flag."""
        return (
            round_up(self.token_offset(self.n_ranks, 0), BUFFER_ALIGN)
            + (src_rank * self.n_inline_tokens() + token_idx) * self.dispatch_msg_bytes
        )

    def chunk_flag_offset(self, src_rank: Int, token_idx: Int, chunk: Int) -> Int:
        return (
            round_up(self.inline_token_offset(self.n_ranks, 0), BUFFER_ALIGN)
            + ((src_rank * self.max_tokens_per_rank + token_idx) * N_CHUNKS + chunk)
            * FLAG_BYTES
        )

    def dispatch_message_offset(self, pair: Int, slot: Int) -> Int:
        return (pair * self.max_tokens_per_rank + slot) * self.dispatch_msg_bytes

    def dispatch_count_offset(self, pair: Int) -> Int:
        return pair * FLAG_BYTES

    def linked_count_offset(self, pair: Int) -> Int:
        """Locates a count if the group is linked: a source puts all its counts at once.
        """
        var local_expert, src_rank = divmod(pair, self.n_ranks)
        return self.dispatch_count_offset(
            src_rank * self.n_local_experts() + local_expert
        )

    def dispatch_done_offset(self, reader_rank: Int) -> Int:
        return self.dispatch_count_offset(self.n_pairs() + reader_rank)

    def staged_count_offset(self, expert_id: Int) -> Int:
        """Locates a count that waits to be put, among the dispatch counts."""
        var first = self.heartbeat_offset(self.n_ranks if self.masks else 0)
        return first + expert_id * FLAG_BYTES

    def dispatch_n_tokens_offset(self, src_rank: Int) -> Int:
        return self.dispatch_done_offset(self.n_ranks + src_rank)

    def heartbeat_offset(self, rank: Int) -> Int:
        if self.is_by_rank():
            return self.dispatch_n_tokens_offset(self.n_ranks + rank)
        return self.dispatch_done_offset(self.n_ranks + rank)

    def combine_message_offset(
        self, token_idx: Int, k: Int, owner_rank: Int = 0
    ) -> Int:
        """Locates the row of a choice; only if ranks mask, each owner has its own."""
        var place = self.choice(token_idx, k)
        if self.masks:
            place += owner_rank * self.n_choices()
        return place * self.combine_msg_bytes

    def partial_offset(self, owner_rank: Int, token_idx: Int) -> Int:
        """Locates the partial sum of an owner, the rank of the experts."""
        return (
            owner_rank * self.max_tokens_per_rank + token_idx
        ) * self.combine_msg_bytes

    def late_weight_offset(self, src_rank: Int, choice: Int) -> Int:
        """Locates the word of a choice's weight, behind all partial sums."""
        var place = src_rank * self.n_choices() + choice
        var n_staged = self.n_ranks if self.is_linked() else 0
        return self.staged_partial_offset(n_staged, 0) + place * ENTRY_BYTES

    def staged_partial_offset(self, src_rank: Int, token_idx: Int) -> Int:
        """Locates a partial sum that waits to be put, in the owner's recv buffer."""
        return self.partial_offset(self.n_ranks + src_rank, token_idx)

    def gathered_partial_offset(
        self, src_rank: Int, owner_rank: Int, token_idx: Int, ranks_per_host: Int
    ) -> Int:
        """Locates the partial sum that an owner leaves with the rank of its host that adds
        those for a source, among its staged ones."""
        var place = self.relay_to(owner_rank, src_rank, ranks_per_host)
        return self.staged_partial_offset(place, token_idx)

    def staged_row_offset(self, src_rank: Int, token_idx: Int, k: Int) -> Int:
        """Locates a row that waits to be put, behind the rows that come."""
        var n_owners = self.n_ranks if self.masks else 1
        return self.combine_message_offset(
            (n_owners + src_rank) * self.max_tokens_per_rank + token_idx, k
        )

    def combine_count_offset(self, expert_id: Int) -> Int:
        return expert_id * FLAG_BYTES

    def combine_done_offset(self, reader_rank: Int) -> Int:
        return self.combine_count_offset(self.n_experts + reader_rank)

    def dispatch_send_bytes(self) -> Int:
        if self.is_by_rank():
            return 0
        return self.max_tokens_per_rank * self.dispatch_msg_bytes

    def dispatch_recv_bytes(self) -> Int:
        if self.is_by_rank():
            return self.chunk_flag_offset(self.n_ranks, 0, 0)
        return self.dispatch_message_offset(self.n_pairs(), 0)

    def dispatch_counts_bytes(self) -> Int:
        if self.is_linked():
            return self.staged_count_offset(self.n_pairs())
        return self.heartbeat_offset(self.n_ranks if self.masks else 0)

    def combine_recv_bytes(self) -> Int:
        if self.has_sums:
            return self.late_weight_offset(self.n_ranks if self.late_weights else 0, 0)
        return self.staged_row_offset(self.n_ranks if self.is_linked() else 0, 0, 0)

    def combine_counts_bytes(self) -> Int:
        return self.combine_done_offset(self.n_ranks)

    def dispatch_recv_offset(self) -> Int:
        return round_up(self.dispatch_send_bytes(), BUFFER_ALIGN)

    def staged_from_recv(self, rank: Int, token_idx: Int) -> Int:
        """Locates one of a rank's own encoded tokens from the start of its recv buffer:
        by expert, in the send buffer before it."""
        if self.is_by_rank():
            return self.token_offset(rank, token_idx)
        return token_idx * self.dispatch_msg_bytes - self.dispatch_recv_offset()

    def dispatch_counts_offset(self) -> Int:
        return self.dispatch_recv_offset() + round_up(
            self.dispatch_recv_bytes(), BUFFER_ALIGN
        )

    def dispatch_counts_from_combine_counts(self) -> Int:
        """Locates the dispatch counts from the combine counts, whatever messages are.
        """
        return self.dispatch_counts_offset() - self.combine_counts_offset()

    def combine_recv_offset(self) -> Int:
        return self.dispatch_counts_offset() + round_up(
            self.dispatch_counts_bytes(), BUFFER_ALIGN
        )

    def combine_counts_offset(self) -> Int:
        return self.combine_recv_offset() + round_up(
            self.combine_recv_bytes(), BUFFER_ALIGN
        )

    def region_bytes(self) -> Int:
        return self.combine_counts_offset() + round_up(
            self.combine_counts_bytes(), BUFFER_ALIGN
        )

    @always_inline
    def buffer_offset(self, buffer: Int) -> Int:
        if buffer == Buf.DISPATCH_SEND:
            return 0
        if buffer == Buf.DISPATCH_RECV:
            return self.dispatch_recv_offset()
        if buffer == Buf.DISPATCH_COUNTS:
            return self.dispatch_counts_offset()
        if buffer == Buf.COMBINE_COUNTS:
            return self.combine_counts_offset()
        return self.combine_recv_offset()

    # ------------------------------------------------------- words that peers write

    @always_inline
    def n_words_of(self, words: PeerWords, reader: Int, peer: Int) -> Int:
        """Counts the words of a peer that exist in the region of a rank."""
        if words.limit == Limit.EXPERTS_OF_READER:
            return min(words.n, self.n_experts_on(reader))
        if words.limit == Limit.EXPERTS_OF_PEER:
            return min(words.n, self.n_experts_on(peer))
        return words.n


@always_inline
def count_offset[group: Group](pair: Int) -> Int:
    """Locates a count, among the dispatch counts."""
    comptime if group.is_linked():
        return group.linked_count_offset(pair)
    else:
        return group.dispatch_count_offset(pair)
