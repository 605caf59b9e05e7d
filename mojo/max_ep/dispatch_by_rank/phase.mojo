# SPDX-License-Identifier: Apache-2.0
"""Dispatch by rank, for GPU ranks.

Each token goes once to each rank that has an expert of it; in an all-gather, to each
rank. An entry for each choice goes to every rank. Entries, counts and numbers of
tokens say which generation they are of: none of them waits for another store. Rows
and tables are those of dispatch by expert, bit for bit.

How a token announces itself depends on how many its source sends:

* *inline* (at most `MAX_INLINE_TOKENS`): every 16 bytes are their own flag. The
  receiver puts `SENTINEL` back.
* more: each of `N_CHUNKS` chunks has a flag, published after it.

`roles.mojo` says which warp does what. Index warps publish entries and counts
(`index_small.mojo`, `index_large.mojo`, `publish.mojo`), then read counts
(`counts.mojo`). The others send tokens (`send.mojo`) and receive them
(`receive.mojo`).

After the send phase every rank gets entries, counts and tokens. After the receive
phase rows stand as those of dispatch by expert. The next launch publishes that they
have been read (`publish_earlier_reads`), or this one at its end if ranks share a GPU.
"""
from max.gpu import block_idx, grid_dim, thread_idx, warp_id, WARP_SIZE
from std.builtin.device_passable import DeviceTypeEncoder

from ..counters import EPLocalSyncCounters
from ..device.block import (
    await_launch_before,
    Block,
    header_word,
    is_last_block,
)
from ..device.phase import Phase
from ..device.shared import share_addresses
from ..device.warp import bytes_at
from ..flags import FlagPointer, next_generation
from ..layout import Group
from ..row_tables import RowTables
from ..token_format import BytePointer, TokenFormat
from .choices import Choices, N_SHARED_CHOICES
from .counts import SharedCounts
from .index_large import index_by_blocks
from .index_small import index_one_by_one, LaneIndex
from .publish import publish_n_tokens, send_metadata
from .receive import Receiver
from .roles import (
    COUNTING_WARP,
    DONE_WARP,
    N_CONTROL,
    N_INDEX_WARPS,
    n_send_warps,
    N_WARPS_MIN,
    NUMBERS_WARP,
    RECEIVE,
    SEND,
)
from .send import TokenSender


@fieldwise_init
struct DispatchByRank[group_: Group, Format: TokenFormat, input_type: DType](
    Phase
):
    """Sends each token to its ranks; makes rows, sorted by expert, of those that come.

    A launch that only sends does not touch the outputs, one that only receives not
    the inputs. `group.fused_shared_expert`: this rank receives all of its tokens, as
    the first rows. `group.shares_gpu`: a launch that only receives publishes at its
    end what it has read, since the next launch of this rank may be queued behind
    those of others.

    Parameters:
        group_: Sizes of the group.
        Format: Wire format of a token.
        input_type: Element type of the tokens.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """

    var input_tokens: Pointer[Scalar[Self.input_type], ImmUntrackedOrigin]
    """`[n_tokens][hidden_size]`, rows aligned to 16 bytes."""
    var topk_ids: Pointer[Int32, ImmUntrackedOrigin]
    """`[n_tokens][top_k]`, in `[-1, n_experts)`; `-1`: no expert. In an all-gather
    `[n_tokens][router_top_k]`, anything."""
    var router_weights: Pointer[Float32, ImmUntrackedOrigin]
    """As `topk_ids`; read if combine returns sums."""
    var n_tokens: Int32
    """In `[0, max_tokens_per_rank]`."""
    var rows: Self.Format.Rows
    """The output tensors, `n_rows_max` rows."""
    var n_rows_max: Int32
    """Rows that the output tensors hold."""
    var tables: RowTables[Self.group_]
    """The output tensors that say which row is whose."""
    var src_info: Pointer[Int32, MutUntrackedOrigin]
    """`[n_rows_max][2]`: token on its source rank, k; for the shared expert token,
    -1."""
    var recv_bufs: Array[BytePointer, Self.group_.n_ranks]
    """All ranks' recv buffers."""
    var counts: Array[FlagPointer, Self.group_.n_ranks]
    """All ranks' counts buffers."""
    var counters: EPLocalSyncCounters[Self.group_.n_experts]
    """This rank's local words."""

    comptime group = Self.group_
    """Sizes of the group."""
    comptime overlaps_previous = True
    """Its blocks begin before the kernel before has ended."""
    comptime n_warps = Self.group_.num_threads // WARP_SIZE
    """Warps of a block."""
    comptime device_type: AnyType = Self
    """A kernel gets this as it is."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments."""
        return "DispatchByRank"

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        """Does this block's part; all threads of the grid call it."""
        comptime assert Self.n_warps >= N_WARPS_MIN, "a role has no warp"
        comptime has_metadata = Self.Format.router_top_k > 0
        comptime assert (
            has_metadata == Self.group.sends_to_all()
        ), "an all-gather takes routing metadata along"
        comptime assert (
            not has_metadata or Self.group.n_experts == Self.group.n_ranks
        ), "each rank of an all-gather is an expert"
        # Then this rank reads its own tokens where they are given.
        comptime has_input = (
            sends and receives and Self.Format.is_identity[Self.input_type]()
        )
        # Un-reduced, the next launch is a combine that publishes nothing.
        comptime publishes_at_end = not sends and (
            Self.group.shares_gpu or not Self.group.has_sums()
        )
        var n_tokens = Int(self.n_tokens)
        var choices = Choices[Self.group](
            self.topk_ids, self.router_weights, n_tokens
        )
        var sender = TokenSender[
            Self.group, Self.Format, Self.input_type, has_input
        ](
            self.input_tokens,
            choices,
            n_tokens,
            n_send_warps[Self.group, receives](
                n_tokens <= Self.group.n_inline_tokens(), Self.n_warps
            ),
        )
        var lane_index = LaneIndex[Self.group](choices)
        await_launch_before()
        var word = header_word(self.counters)
        comptime if sends:
            # What depends on the arguments alone, if tokens are few.
            sender.prefetch()
            var indexer = Int(warp_id()) - (Self.n_warps - N_INDEX_WARPS)
            if indexer >= 0 and choices.are_in_lanes():
                lane_index.prefetch(indexer)
        var recv_bufs = share_addresses[Self.group.n_ranks, False](
            self.recv_bufs, 0
        )
        var counts = share_addresses[Self.group.n_ranks, False](self.counts, 0)
        comptime if sends:
            choices.share()
            sender.find_receivers(word)
        var block = Block[Self.group].begin[N_CONTROL](
            word,
            {self.counters.words},
            recv_bufs,
            counts,
            SEND if sends else RECEIVE,
        )
        if not block.can_go:
            comptime if receives:
                self._write_nothing()
            return
        var indexer = block.warp_idx - (Self.n_warps - N_INDEX_WARPS)
        var received = next_generation(block.before.dispatch_received)
        comptime if not publishes_at_end:
            if block.is_last_to_start(COUNTING_WARP):
                comptime if sends:
                    var sent = next_generation(block.before.dispatch_sent)
                    block.counters.set_n_tokens(sent, n_tokens)
                    block.counters.set_dispatch_sent(sent)
                comptime if receives:
                    block.counters.set_dispatch_received(received)
        comptime if sends:
            block.publish_earlier_reads(DONE_WARP)
            if indexer >= 0:
                self._index(choices, lane_index, block, indexer)
            if block.warp_idx != NUMBERS_WARP:
                sender.send(block)
            elif block_idx.x == 0:
                publish_n_tokens(n_tokens, block)
            # AFTER: this generation's entries, counts and tokens are on their way.
        comptime if receives:
            comptime if Self.group.has_sums() and not publishes_at_end:
                if block_idx.x == 0 and block.warp_idx == DONE_WARP:
                    block.prefetch_done_words[is_combine=True]()
            var n_own = n_tokens if sends else block.before.n_tokens(received)
            self._receive[has_input](block, indexer, n_own)
            comptime if publishes_at_end:
                if not is_last_block(block.counters):
                    return
                if block.lane == 0:
                    block.counters.set_dispatch_received(received)
                block.publish_reads(received, block.before.combine_received)
            # AFTER: rows are complete; every source may overwrite its tokens here,
            # once that is published, by this launch or the next of this rank.

    @always_inline
    def _write_nothing(self):
        """Says in the outputs of a launch that may not run that there are no rows.
        """
        comptime num_threads = Self.group.num_threads
        if block_idx.x == 0:
            self.tables.write_no_rows(Int(thread_idx.x), num_threads)
            Self.Format.end_metadata(
                self.rows,
                0,
                Int(self.n_rows_max),
                Int(thread_idx.x),
                num_threads,
            )

    @always_inline
    def _index(
        self,
        choices: Choices[Self.group],
        mut lane_index: LaneIndex[Self.group],
        block: Block[Self.group],
        indexer: Int,
    ):
        """Publishes some of this block's entries and counts, with an index warp.

        The position of a choice counts the earlier choices of the same expert.
        Receivers wait for the entries of choices without an expert, too.
        """
        # I3, for entries and counts.
        var can_write = block.await_readers[is_combine=False](SEND)
        if choices.are_in_lanes():
            if can_write:
                lane_index.publish(block)
        elif choices.are_shared():
            if can_write:
                index_one_by_one(choices, block, indexer)
        else:
            comptime if Self.group.n_choices() > N_SHARED_CHOICES:
                index_by_blocks(choices, block, indexer, can_write)
        comptime if Self.Format.router_top_k > 0:
            send_metadata[Self.Format.router_top_k](
                choices, Int(self.n_tokens), block, indexer
            )

    @always_inline
    def _receive[
        has_input: Bool
    ](self, block: Block[Self.group], indexer: Int, n_own: Int):
        """Reads numbers and counts and makes rows, with one warp; `n_own`: how many
        tokens this rank has sent.
        """
        var shared = SharedCounts[Self.group](block, self.tables)
        if indexer >= 0:
            shared.lay_out_rows(
                n_own if Self.group.fused_shared_expert else 0,
                Int(self.n_rows_max),
                indexer,
            )
        elif block.warp_idx == NUMBERS_WARP:
            var are_there = shared.share_numbers()
            comptime if Self.Format.router_top_k > 0:
                # Each rank gets every token.
                var n_rows = 0
                if are_there:
                    for src_rank in range(Self.group.n_ranks):
                        n_rows += shared.n_tokens(src_rank)
                Self.Format.end_metadata(
                    self.rows,
                    n_rows,
                    Int(self.n_rows_max),
                    Int(block_idx.x) * WARP_SIZE + block.lane,
                    Int(grid_dim.x) * WARP_SIZE,
                )
        if not shared.await_numbers():
            return
        var receiver = Receiver[Self.group, Self.Format, has_input](
            self.rows,
            self.src_info,
            UInt64(Int(self.input_tokens)),
            bytes_at(block.recv_bufs[unsafe_offset=block.my_rank]),
            shared,
            block,
        )
        comptime n_inline = Self.group.n_inline_tokens()
        if shared.most_tokens() <= n_inline:
            receiver.receive[are_all_inline=True]()
            return
        comptime if Self.group.max_tokens_per_rank > n_inline:
            receiver.receive[are_all_inline=False]()
