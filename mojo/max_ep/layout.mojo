# SPDX-License-Identifier: Apache-2.0
"""The symmetric region: the memory of one rank that its peers can reach.

Each rank owns one region; all regions have the same group, so an offset that
is right on one rank is right on all of them. `expert_slots` cuts it so:

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

`rank_slots` has no dispatch send buffer (a token is encoded into its place in the
owner's own recv buffer), and cuts dispatch recv and counts so:

    +---------------------------------------------------------------------+
    | dispatch recv    entries [n_ranks][max_tokens_per_rank][top_k]       |
    |                  tokens  [n_ranks][max_tokens_per_rank]              |
    |                                                     of dispatch msg  |
    |                  early tokens [n_ranks][n_inline_tokens], GPUs only   |
    |                  chunk flags [n_ranks][max_tokens_per_rank][N_CHUNKS]|
    |                                                     UInt64, GPUs only|
    | dispatch counts  as above, then tokens [n_ranks] UInt64              |
    +---------------------------------------------------------------------+

An entry says where a choice goes: one UInt64 with generation, expert, and position
among the choices of that expert. With `rank_slots` *reduced* a second UInt64 follows,
generation and router weight, and combine recv holds partial sums instead of rows:

    | combine recv     [n_ranks][max_tokens_per_rank]     of combine msg   |

Peers write everything but the dispatch send buffer, which is the owner's staging
place. A message is the encoded token (or expert row) followed by a source info of
`SOURCE_INFO_BYTES`; in an all-gather, choices that the token carries stand between
them, each two words like a reduced entry: generation and expert id, generation and
probability. This file knows offsets and sizes: no pointers, no
atomics. Who may write what is in `docs/protocol.md`.
"""

comptime MESSAGE_ALIGN = 16
"""Messages start and end on this many bytes: one 128-bit access."""

comptime SOURCE_INFO_BYTES = 16
"""Bytes behind the token of a message: a flag (UInt64), and as much unused.

The flag has the form of all flags (`flags.mojo`): the generation that wrote
the message, and as its count the choice, `token_idx * top_k + k`, that it is
of, or, of a partial sum, how many rows are in it. On GPUs it also says that the message has arrived.
"""

comptime BUFFER_ALIGN = 256
"""Every buffer of a region starts on this many bytes."""

comptime FLAG_BYTES = 8
"""Bytes of one flag or done word (UInt64)."""

comptime ENTRY_BYTES = 8
"""Bytes of a word of an entry of `rank_slots` (see `rank_slots/entries.mojo`)."""

comptime METADATA_BYTES = 2 * ENTRY_BYTES
"""Bytes of a choice that a token of an all-gather carries: two words, as an entry's."""

comptime N_CHUNKS = 4
"""Flags of a token that GPU ranks of `rank_slots` send: one for each part."""

comptime MAX_INLINE_TOKENS = 256
"""Tokens of a rank up to which GPU ranks of `rank_slots` send data that is its
own flag, into a place of its own."""

comptime EXPERT_SLOTS = 1
"""Protocol: a message for each (token, choice), in a slot of its expert."""

comptime RANK_SLOTS = 2
"""Protocol: a message for each (token, destination rank), and entries."""

comptime RANK_SLOTS_REDUCED = 3
"""The same, and combine sends one partial sum for each (token, rank)."""

comptime GATHER = 4
"""Protocol: a message for each (token, rank of the group), and entries."""

comptime GATHER_REDUCED = 5
"""The same, and combine sends one partial sum for each (token, rank) that has an
expert of it."""


@always_inline
def is_gather_protocol(protocol: Int) -> Bool:
    """Tells whether tokens go to all ranks that have experts.

    Args:
        protocol: The wire protocol.

    Returns:
        Whether it is `GATHER` or `GATHER_REDUCED`.
    """
    return protocol == GATHER or protocol == GATHER_REDUCED


@always_inline
def is_reduced_protocol(protocol: Int) -> Bool:
    """Tells whether combine sends partial sums.

    Args:
        protocol: The wire protocol.

    Returns:
        Whether it is `RANK_SLOTS_REDUCED` or `GATHER_REDUCED`.
    """
    return protocol == RANK_SLOTS_REDUCED or protocol == GATHER_REDUCED


comptime MAX_RANKS = 128
"""Largest `n_ranks`; bounds the per-rank words of `EPLocalSyncCounters`."""

comptime MAX_TOP_K = 32
"""Largest `top_k`."""


def protocol_of(name: StringSlice) raises -> Int:
    """Finds a protocol by its name in `EPConfig`.

    Args:
        name: The name.

    Returns:
        `EXPERT_SLOTS`, `RANK_SLOTS`, `GATHER`, or one of the latter two reduced.

    Raises:
        If there is none of that name.
    """
    if name == "expert_slots":
        return EXPERT_SLOTS
    if name == "rank_slots":
        return RANK_SLOTS
    if name == "rank_slots_reduced":
        return RANK_SLOTS_REDUCED
    if name == "gather":
        return GATHER
    if name == "gather_reduced":
        return GATHER_REDUCED
    raise Error("max_ep: no protocol is called ", name, ".")


@always_inline
def round_up(n: Int, multiple: Int) -> Int:
    """Rounds `n` up to a whole multiple.

    Args:
        n: A size, `>= 0`.
        multiple: The step, `> 0`.

    Returns:
        The smallest multiple of `multiple` that is not below `n`.
    """
    return (n + multiple - 1) // multiple * multiple


@always_inline
def plain_token_bytes(hidden_size: Int, element_bytes: Int) -> Int:
    """Counts the bytes of a token that travels as it is.

    Args:
        hidden_size: Elements of the token.
        element_bytes: Bytes of one element.

    Returns:
        Bytes, a multiple of `MESSAGE_ALIGN` for every supported size.
    """
    return round_up(hidden_size * element_bytes, MESSAGE_ALIGN)


@always_inline
def blockwise_fp8_token_bytes(hidden_size: Int, block_size: Int) -> Int:
    """Counts the bytes of a blockwise FP8 token: values, then float32 scales.

    Args:
        hidden_size: Elements of the token, a multiple of `block_size`.
        block_size: Elements that share one scale.

    Returns:
        Bytes, a multiple of `MESSAGE_ALIGN`.
    """
    return hidden_size + round_up(hidden_size // block_size * 4, MESSAGE_ALIGN)


@always_inline
def message_bytes(token_bytes: Int, router_top_k: Int = 0) -> Int:
    """Counts the bytes of a message.

    Args:
        token_bytes: Bytes of the encoded token.
        router_top_k: Choices that it carries.

    Returns:
        Bytes of token, choices and source info.
    """
    return token_bytes + router_top_k * METADATA_BYTES + SOURCE_INFO_BYTES


@always_inline
def n_local_experts_of(n_experts: Int, n_ranks: Int) -> Int:
    """Counts the experts that a rank has room for.

    Expert `e` lives on rank `e // n_local_experts`. When the ranks do not
    divide the experts, the last ranks hold fewer (`n_experts_on_rank`), but
    all regions are cut for this many.

    Args:
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.

    Returns:
        `n_experts / n_ranks`, rounded up.
    """
    return (n_experts + n_ranks - 1) // n_ranks


@always_inline
def n_experts_on_rank(n_experts: Int, n_ranks: Int, rank: Int) -> Int:
    """Counts the experts that a rank really holds.

    Args:
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        rank: The rank asked about, in `[0, n_ranks)`.

    Returns:
        A number in `[0, n_local_experts]`.
    """
    var n_local = n_local_experts_of(n_experts, n_ranks)
    return max(0, min(n_local, n_experts - rank * n_local))


@always_inline
def source_info_offset(msg_bytes: Int) -> Int:
    """Locates the source info of a message.

    Args:
        msg_bytes: Bytes of the message.

    Returns:
        Bytes from the start of the message: where its token ends.
    """
    return msg_bytes - SOURCE_INFO_BYTES


@fieldwise_init
struct Group(TrivialRegisterPassable):
    """Sizes and offsets of a region, all in bytes."""

    var n_experts: Int
    """Experts of the group."""
    var n_ranks: Int
    """Ranks of the group."""
    var max_tokens_per_rank: Int
    """Tokens one rank may send in one generation."""
    var top_k: Int
    """Experts of one token."""
    var dispatch_msg_bytes: Int
    """Bytes of one dispatch message."""
    var combine_msg_bytes: Int
    """Bytes of one combine message."""
    var protocol: Int
    """What `protocol_of` returns, or 0 where it does not matter."""

    @always_inline
    def has_rank_slots(self) -> Bool:
        """Tells whether a token goes to a rank once, to a place of its number.

        Returns:
            Whether the protocol is `RANK_SLOTS` or `GATHER`, reduced or not.
        """
        return self.protocol >= RANK_SLOTS

    @always_inline
    def n_ranks_with_experts(self) -> Int:
        """Counts the ranks that hold experts: the first ones.

        Returns:
            Ranks.
        """
        return (
            self.n_experts + self.n_local_experts() - 1
        ) // self.n_local_experts()

    @always_inline
    def sends_to_all(self) -> Bool:
        """Tells whether a token also goes to ranks that have no expert of it.

        Returns:
            Whether the protocol is `GATHER`, reduced or not.
        """
        return is_gather_protocol(self.protocol)

    @always_inline
    def is_reduced(self) -> Bool:
        """Tells whether combine sends partial sums.

        Returns:
            Whether the protocol is a reduced one.
        """
        return is_reduced_protocol(self.protocol)

    # ------------------------------------------------- inside dispatch buffers

    @always_inline
    def entry_bytes(self) -> Int:
        """Counts the bytes of an entry of `rank_slots`.

        Returns:
            Those of one word, or of two with a router weight.
        """
        return 2 * ENTRY_BYTES if self.is_reduced() else ENTRY_BYTES

    @always_inline
    def entry_offset(self, src_rank: Int, choice: Int) -> Int:
        """Locates an entry of `rank_slots`.

        Args:
            src_rank: Rank of the token.
            choice: From `choice`, on that rank.

        Returns:
            Bytes from the start of the dispatch recv buffer.
        """
        return (src_rank * self.n_choices() + choice) * self.entry_bytes()

    @always_inline
    def token_offset(self, src_rank: Int, token_idx: Int) -> Int:
        """Locates a token of `rank_slots`.

        Args:
            src_rank: Rank of the token.
            token_idx: In `[0, max_tokens_per_rank)`.

        Returns:
            Bytes from the start of the dispatch recv buffer.
        """
        return (
            round_up(self.entry_offset(self.n_ranks, 0), BUFFER_ALIGN)
            + (src_rank * self.max_tokens_per_rank + token_idx)
            * self.dispatch_msg_bytes
        )

    @always_inline
    def metadata_offset(
        self, src_rank: Int, token_idx: Int, k: Int, router_top_k: Int
    ) -> Int:
        """Locates a choice that a token of an all-gather carries.

        Early tokens, too, carry theirs here: a choice is its own flag.

        Args:
            src_rank: Rank of the token.
            token_idx: In `[0, max_tokens_per_rank)`.
            k: In `[0, router_top_k)`.
            router_top_k: Choices of a token.

        Returns:
            Bytes from the start of the dispatch recv buffer.
        """
        return (
            self.token_offset(src_rank, token_idx + 1)
            - SOURCE_INFO_BYTES
            - (router_top_k - k) * METADATA_BYTES
        )

    @always_inline
    def n_inline_tokens(self) -> Int:
        """Counts the early tokens that a source has room for.

        Returns:
            At most `MAX_INLINE_TOKENS`.
        """
        return min(self.max_tokens_per_rank, MAX_INLINE_TOKENS)

    @always_inline
    def inline_token_offset(self, src_rank: Int, token_idx: Int) -> Int:
        """Locates a token of `rank_slots` whose data is its own flag.

        Args:
            src_rank: Rank of the token.
            token_idx: In `[0, n_inline_tokens)`.

        Returns:
            Bytes from the start of the dispatch recv buffer.
        """
        return (
            round_up(self.token_offset(self.n_ranks, 0), BUFFER_ALIGN)
            + (src_rank * self.n_inline_tokens() + token_idx)
            * self.dispatch_msg_bytes
        )

    @always_inline
    def chunk_flag_offset(
        self, src_rank: Int, token_idx: Int, chunk: Int
    ) -> Int:
        """Locates the flag of a part of a token of `rank_slots`.

        Args:
            src_rank: Rank of the token.
            token_idx: In `[0, max_tokens_per_rank)`.
            chunk: In `[0, N_CHUNKS)`.

        Returns:
            Bytes from the start of the dispatch recv buffer.
        """
        return (
            round_up(self.inline_token_offset(self.n_ranks, 0), BUFFER_ALIGN)
            + (
                (src_rank * self.max_tokens_per_rank + token_idx) * N_CHUNKS
                + chunk
            )
            * FLAG_BYTES
        )

    @always_inline
    def dispatch_n_tokens_offset(self, src_rank: Int) -> Int:
        """Locates the word by which a source of `rank_slots` says how many tokens.

        Args:
            src_rank: The source, in `[0, n_ranks)`.

        Returns:
            Bytes from the start of the dispatch counts buffer.
        """
        return self.dispatch_done_offset(self.n_ranks + src_rank)

    @always_inline
    def dispatch_staged_offset(self, token_idx: Int) -> Int:
        """Locates a token's place in the send buffer.

        Args:
            token_idx: In `[0, max_tokens_per_rank)`.

        Returns:
            Bytes from the start of the dispatch send buffer.
        """
        return token_idx * self.dispatch_msg_bytes

    @always_inline
    def choice(self, token_idx: Int, k: Int) -> Int:
        """Numbers the choices of a rank.

        Args:
            token_idx: In `[0, max_tokens_per_rank)`.
            k: In `[0, top_k)`.

        Returns:
            The choice; `divmod` by `top_k` takes it apart.
        """
        return token_idx * self.top_k + k

    @always_inline
    def n_choices(self) -> Int:
        """Counts the choices that a rank has room for.

        Returns:
            `max_tokens_per_rank * top_k`.
        """
        return self.choice(self.max_tokens_per_rank, 0)

    @always_inline
    def n_local_experts(self) -> Int:
        """Counts the experts that each rank has room for.

        Returns:
            The ceiling of `n_experts / n_ranks`.
        """
        return n_local_experts_of(self.n_experts, self.n_ranks)

    @always_inline
    def pair(self, local_expert: Int, src_rank: Int) -> Int:
        """Numbers the (local expert, source rank) pairs.

        Args:
            local_expert: In `[0, n_local_experts)`.
            src_rank: In `[0, n_ranks)`.

        Returns:
            The position of the pair in `[0, n_local_experts * n_ranks)`.
        """
        return local_expert * self.n_ranks + src_rank

    @always_inline
    def expert_capacity(self) -> Int:
        """Counts the rows that a local expert can get.

        Returns:
            `n_ranks * max_tokens_per_rank`.
        """
        return self.n_ranks * self.max_tokens_per_rank

    @always_inline
    def dispatch_message_offset(self, pair: Int, slot: Int) -> Int:
        """Locates a dispatch message in the recv buffer.

        Args:
            pair: From `pair()`.
            slot: In `[0, max_tokens_per_rank)`.

        Returns:
            Bytes from the start of the dispatch recv buffer.
        """
        return (
            pair * self.max_tokens_per_rank + slot
        ) * self.dispatch_msg_bytes

    @always_inline
    def dispatch_count_offset(self, pair: Int) -> Int:
        """Locates the count word of a pair.

        Args:
            pair: From `pair()`.

        Returns:
            Bytes from the start of the dispatch counts buffer.
        """
        return pair * FLAG_BYTES

    @always_inline
    def dispatch_done_offset(self, reader_rank: Int) -> Int:
        """Locates the word by which a reader says "I have read it all".

        Args:
            reader_rank: The peer that has read, in `[0, n_ranks)`.

        Returns:
            Bytes from the start of the dispatch counts buffer.
        """
        return self.dispatch_count_offset(
            self.pair(self.n_local_experts(), 0) + reader_rank
        )

    # -------------------------------------------------- inside combine buffers

    @always_inline
    def combine_message_offset(self, token_idx: Int, k: Int) -> Int:
        """Locates the message of one choice in the combine recv buffer.

        Args:
            token_idx: Token on this rank, in `[0, max_tokens_per_rank)`.
            k: Choice of the token, in `[0, top_k)`.

        Returns:
            Bytes from the start of the combine recv buffer.
        """
        return (token_idx * self.top_k + k) * self.combine_msg_bytes

    @always_inline
    def partial_offset(self, owner_rank: Int, token_idx: Int) -> Int:
        """Locates a partial sum in the combine recv buffer.

        Args:
            owner_rank: Rank of the experts whose rows were added.
            token_idx: Token on this rank, in `[0, max_tokens_per_rank)`.

        Returns:
            Bytes from the start of the combine recv buffer.
        """
        return (
            owner_rank * self.max_tokens_per_rank + token_idx
        ) * self.combine_msg_bytes

    @always_inline
    def combine_count_offset(self, expert_id: Int) -> Int:
        """Locates the count word of an expert.

        Args:
            expert_id: In `[0, n_experts)`.

        Returns:
            Bytes from the start of the combine counts buffer.
        """
        return expert_id * FLAG_BYTES

    @always_inline
    def combine_done_offset(self, reader_rank: Int) -> Int:
        """Locates the word by which a reader says "I have read it all".

        Args:
            reader_rank: The peer that has read, in `[0, n_ranks)`.

        Returns:
            Bytes from the start of the combine counts buffer.
        """
        return self.combine_count_offset(self.n_experts + reader_rank)

    # ------------------------------------------- inside SHMEM's put buffers

    @always_inline
    def dispatch_put_offset(self, choice: Int) -> Int:
        """Locates where a dispatch message waits to be put to another host.

        Args:
            choice: From `choice`.

        Returns:
            Bytes from the start of the dispatch put buffer.
        """
        return choice * self.dispatch_msg_bytes

    @always_inline
    def combine_put_offset(self, src_rank: Int, choice: Int) -> Int:
        """Locates where a combine message waits to be put to another host.

        Args:
            src_rank: Rank the token came from.
            choice: From `choice`, on that rank.

        Returns:
            Bytes from the start of the combine put buffer.
        """
        return (src_rank * self.n_choices() + choice) * self.combine_msg_bytes

    @always_inline
    def put_bytes(self) -> Int:
        """Counts the bytes of both put buffers, dispatch's first.

        They stand behind the region, and only where SHMEM is used.

        Returns:
            Bytes.
        """
        return self.combine_put_from_region_end() + round_up(
            self.combine_put_offset(self.n_ranks, 0), BUFFER_ALIGN
        )

    @always_inline
    def combine_put_from_region_end(self) -> Int:
        """Locates the combine put buffer.

        Returns:
            Bytes from the end of the region, where the dispatch put buffer is.
        """
        return round_up(
            self.dispatch_put_offset(self.n_choices()), BUFFER_ALIGN
        )

    # ------------------------------------------------------ sizes of the buffers

    @always_inline
    def dispatch_send_bytes(self) -> Int:
        """Counts the bytes of the dispatch send buffer.

        Returns:
            Bytes.
        """
        if self.has_rank_slots():
            return 0
        return self.dispatch_staged_offset(self.max_tokens_per_rank)

    @always_inline
    def dispatch_recv_bytes(self) -> Int:
        """Counts the bytes of the dispatch recv buffer.

        Returns:
            Bytes.
        """
        if self.has_rank_slots():
            return self.chunk_flag_offset(self.n_ranks, 0, 0)
        return self.dispatch_message_offset(
            self.pair(self.n_local_experts(), 0), 0
        )

    @always_inline
    def dispatch_counts_bytes(self) -> Int:
        """Counts the bytes of the dispatch counts and done words.

        Returns:
            Bytes.
        """
        if self.has_rank_slots():
            return self.dispatch_n_tokens_offset(self.n_ranks)
        return self.dispatch_done_offset(self.n_ranks)

    @always_inline
    def combine_recv_bytes(self) -> Int:
        """Counts the bytes of the combine recv buffer.

        Returns:
            Bytes.
        """
        if self.is_reduced():
            return self.partial_offset(self.n_ranks, 0)
        return self.combine_message_offset(self.max_tokens_per_rank, 0)

    @always_inline
    def combine_counts_bytes(self) -> Int:
        """Counts the bytes of the combine counts and done words.

        Returns:
            Bytes.
        """
        return self.combine_done_offset(self.n_ranks)

    # --------------------------------------------- where the buffers stand

    @always_inline
    def dispatch_send_offset(self) -> Int:
        """Locates the dispatch send buffer.

        Returns:
            Bytes from the start of the region.
        """
        return 0

    @always_inline
    def dispatch_recv_offset(self) -> Int:
        """Locates the dispatch recv buffer.

        Returns:
            Bytes from the start of the region.
        """
        return round_up(self.dispatch_send_bytes(), BUFFER_ALIGN)

    @always_inline
    def staged_from_recv(self, rank: Int) -> Int:
        """Locates a rank's own tokens, encoded, as seen from its recv buffer.

        Args:
            rank: The rank.

        Returns:
            Bytes from the start of its recv buffer to where
            `dispatch_staged_offset` counts from; negative with `expert_slots`.
        """
        if self.has_rank_slots():
            return self.token_offset(rank, 0)
        return self.dispatch_send_offset() - self.dispatch_recv_offset()

    @always_inline
    def dispatch_counts_offset(self) -> Int:
        """Locates the dispatch counts buffer.

        Returns:
            Bytes from the start of the region.
        """
        return self.dispatch_recv_offset() + round_up(
            self.dispatch_recv_bytes(), BUFFER_ALIGN
        )

    @always_inline
    def dispatch_counts_from_combine_counts(self) -> Int:
        """Locates the dispatch counts, as seen from those of combine.

        Returns:
            Bytes, negative; the same for any size of dispatch messages.
        """
        return self.dispatch_counts_offset() - self.combine_counts_offset()

    @always_inline
    def combine_recv_offset(self) -> Int:
        """Locates the combine recv buffer.

        Returns:
            Bytes from the start of the region.
        """
        return self.dispatch_counts_offset() + round_up(
            self.dispatch_counts_bytes(), BUFFER_ALIGN
        )

    @always_inline
    def combine_counts_offset(self) -> Int:
        """Locates the combine counts buffer.

        Returns:
            Bytes from the start of the region.
        """
        return self.combine_recv_offset() + round_up(
            self.combine_recv_bytes(), BUFFER_ALIGN
        )

    @always_inline
    def region_bytes(self) -> Int:
        """Counts the bytes of the whole region.

        Returns:
            Bytes.
        """
        return self.combine_counts_offset() + round_up(
            self.combine_counts_bytes(), BUFFER_ALIGN
        )
