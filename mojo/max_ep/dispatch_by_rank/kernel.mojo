# SPDX-License-Identifier: Apache-2.0
"""Dispatch by rank, for GPU ranks.

Each token goes once to each rank that has an expert of it; in an all-gather, to each
rank. An entry for each choice goes to every rank, or where choices are ranks that must
be found, to that rank and this one. Rows and tables are those of dispatch
by expert, bit for bit. How a token announces itself depends on how many its source
sends: docs/protocol.md.

Warps of a block (`roles.mojo`), 16 with 512 threads:

    0        NUMBERS_WARP    publishes how many tokens this rank sends; reads the peers'
    1 to 6   send tokens (three warps if tokens are many), then receive
    6        ELECTING_WARP   first counts the blocks that have begun
    7        DONE_WARP       first publishes what the launch before has read
    8 to 15  index warps     publish counts and entries; the last of them, the scanners,
                             add up the counts of all ranks

`run` does this, and in this order:

1. Wait for the end of the launch before. Only arguments are read until then.
2. Load the header, and whatever depends on arguments alone (`prefetch`), all at once:
   loads that wait for each other cost a memory latency each.
3. Copy ids to shared memory and count experts (`Choices.share`), while the header
   arrives. Find the ranks of a warp's first token.
4. Meet at the one barrier of the block (`Block.begin`). One warp decides for the block
   whether the launch may go on; a refused launch writes empty tables.
5. Advance the generations once all blocks of the grid have read the header. No block
   waits for that: the last one does it.
6. Publish that this rank has read what came before: peers wait for that before they
   write.
7. Index and send at the same time, in different warps. An index warp publishes counts
   before entries, because receivers need all counts before they place a row, and words
   behind tokens on the link arrive late. Senders need no index: an entry says later
   where a row goes.
8. Receive. Scanners turn the counts of all ranks into row positions, while the other
   warps wait for the numbers of tokens and load the first tokens. Each block computes
   all positions for itself, so blocks do not wait for each other. Then warps place rows
   as tokens arrive.
9. Publish at the end what was read, if ranks share the GPU: the next launch of this
   rank, which would publish it, may be queued behind those of others.

A wait gives up at the deadline of the launch and records whom it has waited for.
"""
from max.gpu import block_idx, grid_dim, thread_idx, warp_id, WARP_SIZE

from ..device.block import Block
from ..device.done_words import (
    advance_at_start,
    await_readers,
    end_wait,
    poll_done_words,
    publish_earlier_reads,
)
from ..device.kernel import Kernel
from ..device.shared import SharedBuffers
from ..device.start import header_word, mask_word
from ..device.warp import in_32_bits
from ..protocol.arguments import DispatchedRows, GivenTokens, n_choices_of
from ..protocol.call import Buffers
from ..protocol.failures import RECEIVE, SEND
from ..protocol.layout import Group
from ..protocol.token_format import TokenFormat
from ..work.overlap import await_launch_before
from .choices import Choices, N_SHARED_CHOICES
from .index_large import index_by_blocks
from .index_small import index_one_by_one, LaneIndex
from .publish import MetadataLane, publish_n_tokens
from .put_index import put_index
from .receive import TokenReceiver
from .roles import (
    DONE_WARP,
    ELECTING_WARP,
    N_CONTROL,
    N_INDEX_WARPS,
    n_send_warps,
    N_WARPS_MIN,
    NUMBERS_WARP,
)
from .row_offsets import SharedRowOffsets
from .send import TokenSender
from .token_counts import SharedTokenCounts
from .token_ranks import n_held


@fieldwise_init
struct DispatchByRank[group_: Group, Format: TokenFormat, input_type: DType](Kernel):
    """Sends each token to its ranks; makes rows, sorted by expert, of those that come.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """

    var given: GivenTokens[Self.input_type]
    """What is sent, at most `max_tokens_per_rank`, rows aligned to 16 bytes."""
    var dispatched: DispatchedRows[Self.group_, Self.Format]
    var buffers: Buffers[Self.group_]

    comptime group = Self.group_
    comptime n_warps = Self.group_.num_threads // WARP_SIZE

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        comptime assert Self.n_warps >= N_WARPS_MIN, "a role has no warp"
        # With both halves in one launch, this rank reads its own tokens where they are
        # given.
        comptime reads_in_place = (
            sends and receives and Self.Format.is_identity[Self.input_type]()
        )
        var n_tokens = in_32_bits(self.given.n_tokens)
        var choices = Choices[Self.group](
            self.given.topk_ids, self.given.router_weights, n_tokens
        )
        var sender = TokenSender[
            Self.group, Self.Format, Self.input_type, reads_in_place
        ](
            self.given.tokens,
            choices,
            n_tokens,
            n_send_warps[Self.group, receives](
                n_tokens <= Self.group.n_inline_tokens(), Self.n_warps
            ),
        )
        var lane_index = LaneIndex[Self.group](choices)
        var metadata = MetadataLane[Self.group, max(1, Self.Format.router_top_k)](
            choices
        )
        # Over a link it goes with the token.
        comptime publishes_metadata = (
            Self.Format.router_top_k > 0 and not Self.group.is_linked()
        )
        await_launch_before()
        var word = header_word(self.buffers.counters)
        var mask = mask_word(self.buffers.counters)
        comptime if sends:
            # What depends on the arguments alone, if tokens are few.
            sender.prefetch()
            var indexer = Int(warp_id()) - (Self.n_warps - N_INDEX_WARPS)
            if indexer >= 0 and choices.are_in_lanes():
                lane_index.prefetch(indexer)
            comptime if publishes_metadata:
                if indexer >= 0:
                    metadata.prefetch(indexer)
        var buffers = SharedBuffers.of(self.buffers, word)
        comptime if sends:
            choices.share()
            sender.find_targets(word)
        comptime n_control = N_CONTROL + Int(Self.group.is_linked())
        var block = Block[Self.group].begin[n_control](
            word, mask, self.buffers.counters, buffers, SEND if sends else RECEIVE
        )
        if not block.can_go:
            comptime if receives:
                if block_idx.x == 0:
                    var me = Int(thread_idx.x)
                    comptime n_threads = Self.group.num_threads
                    self.dispatched.tables.write_no_rows(me, n_threads)
                    Self.Format.end_metadata(
                        self.dispatched.rows,
                        0,
                        self.dispatched.n_rows_max,
                        me,
                        n_threads,
                    )
            return
        var indexer = block.warp_idx - (Self.n_warps - N_INDEX_WARPS)
        advance_at_start[sends, receives](ELECTING_WARP, n_tokens, block)
        comptime if sends:
            publish_earlier_reads(DONE_WARP, block)
            if indexer >= 0:
                self._index(choices, lane_index, block, indexer)
                comptime if publishes_metadata:
                    metadata.send(block, indexer)
                comptime if Self.group.is_given():
                    self._keep_ids(block, indexer)
            if block.warp_idx != NUMBERS_WARP:
                sender.send(block)
            elif block_idx.x == 0:
                publish_n_tokens(n_tokens, block)
            # AFTER: this generation's entries, counts and tokens are on their way.
        comptime if receives:
            poll_done_words[sends](DONE_WARP, block)
            var n_own = n_tokens if sends else block.before.n_tokens(block.receiving())
            self._receive[reads_in_place](block, indexer, n_own)
            end_wait[sends](block)
            # AFTER: rows are complete; every source may overwrite its tokens here,
            # once that is published, by this launch or the next of this rank.

    @always_inline
    def _index(
        self,
        choices: Choices[Self.group],
        mut lane_index: LaneIndex[Self.group],
        block: Block[Self.group],
        indexer: Int,
    ):
        """Publishes some of this block's entries and counts, with an index warp."""
        # I3, for entries and counts.
        var can_write = await_readers(block)
        if choices.are_in_lanes():
            if can_write:
                lane_index.publish(block)
        elif choices.are_shared():
            if can_write:
                index_one_by_one(choices, block, indexer)
        else:
            comptime most = n_held[Self.group](Self.group.max_tokens_per_rank)
            comptime if most > N_SHARED_CHOICES:
                index_by_blocks(choices, block, indexer, can_write)
        comptime if Self.group.is_linked():
            if can_write:
                var is_by_blocks = not (choices.are_in_lanes() or choices.are_shared())
                put_index(in_32_bits(self.given.n_tokens), is_by_blocks, block)

    @always_inline
    def _keep_ids(self, block: Block[Self.group], indexer: Int):
        self.given.keep_ids(
            self.given.n_tokens * n_choices_of[Self.Format](),
            (Int(block_idx.x) + indexer * Int(grid_dim.x)) * WARP_SIZE + block.lane,
            N_INDEX_WARPS * Int(grid_dim.x) * WARP_SIZE,
        )

    @always_inline
    def _receive[
        reads_in_place: Bool
    ](self, block: Block[Self.group], indexer: Int, n_own: Int):
        """Makes rows, with each warp; `n_own`: tokens that this rank sent."""
        var shared = SharedRowOffsets[Self.group](block, self.dispatched.tables)
        var token_counts = SharedTokenCounts[Self.group](block)
        if indexer >= 0:
            shared.lay_out_rows(
                n_own if Self.group.fused_shared_expert else 0,
                self.dispatched.n_rows_max,
                indexer,
            )
        elif block.warp_idx == NUMBERS_WARP:
            var are_there = token_counts.share()
            comptime if Self.Format.router_top_k > 0:
                var n_rows = 0
                comptime if not Self.group.sends_to_all():
                    if shared.await_pair_rows():
                        n_rows = shared.rows_before(Self.group.n_pairs())
                else:
                    # Each rank gets every token.
                    for src_rank in range(Self.group.n_ranks if are_there else 0):
                        n_rows += token_counts.n_tokens(src_rank)
                Self.Format.end_metadata(
                    self.dispatched.rows,
                    n_rows,
                    self.dispatched.n_rows_max,
                    Int(block_idx.x) * WARP_SIZE + block.lane,
                    Int(grid_dim.x) * WARP_SIZE,
                )
        if not token_counts.await_all():
            return
        var receiver = TokenReceiver[Self.group, Self.Format, reads_in_place](
            self.dispatched,
            UInt64(Int(self.given.tokens)),
            block.recv_buf(),
            shared,
            token_counts,
            block,
        )
        # A put may bring a token in pieces of 8 bytes.
        comptime n_inline = 0 if Self.group.is_linked() else Self.group.n_inline_tokens()
        if token_counts.most_tokens() <= n_inline:
            receiver.receive[are_all_inline=True]()
            return
        comptime if Self.group.max_tokens_per_rank > n_inline:
            receiver.receive[are_all_inline=False]()
