# SPDX-License-Identifier: Apache-2.0
"""Dispatch by expert, for GPU ranks: the portable dispatch, also for AMD and SHMEM.

Messages, slots and rows are those of `cpu/dispatch.mojo`. The count of a pair is
published as soon as it is known. Each message then announces itself by the flag in its
source info, so receiving overlaps with the transfer.

Roles of a block's warps (`roles.mojo`): the first finds the slots of the choices
(`send.mojo`), the next ones send, the last reads the counts (`receive.mojo`); each then
receives.

After the send phase: every peer has this generation's counts, and messages are on
their way. After the receive phase: this rank's rows are sorted by local expert, source
rank, token, choice. The next launch of this rank publishes that they were read
(`done_words.mojo`).
"""
from max.gpu import barrier, block_idx, grid_dim, thread_idx, WARP_SIZE

from ..device.block import Block
from ..device.done_words import (
    advance_at_start,
    end_wait,
    poll_done_words,
    publish_earlier_reads,
)
from ..device.kernel import Kernel
from ..device.shared import own_of, SharedBuffers
from ..device.start import header_word
from ..device.warp import in_32_bits
from ..protocol.arguments import DispatchedRows, GivenTokens, InputScales
from ..protocol.call import Buffers
from ..protocol.counters import Word
from ..protocol.failures import Failure, RECEIVE, SEND
from ..protocol.flags import SharedWord
from ..protocol.kernel_argument import unused
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, TokenFormat
from ..work.overlap import await_launch_before
from .receive import SlotReceiver
from .roles import ELECTING_WARP, N_CONTROL, N_WARPS_MIN, POLLING_WARP, PUBLISHING_WARP
from .send import empty_histogram, Sender, SendSchedule


@fieldwise_init
struct DispatchByExpert[group_: Group, Format: TokenFormat, input_type: DType](Kernel):
    """Sends a message for each choice, and sorts those that come into rows by expert.

    Launch: any grid whose blocks are all resident; `group.num_threads` of at least
    `N_WARPS_MIN` warps. All buffers must be mapped and peer-writable until every receiver
    has returned.
    """

    comptime group = Self.group_

    var given: GivenTokens[Self.input_type]
    """What is sent, aligned to 16 bytes."""
    var dispatched: DispatchedRows[Self.group, Self.Format]
    var buffers: Buffers[Self.group]
    """Buffers of dispatch. The send buffers are found from the recv buffers."""
    var put_bufs: Array[BytePointer, Self.group.n_mapped]
    """Put buffers of this node's ranks; used if it sends with SHMEM."""

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        self.run_scaled[None, sends, receives]()

    @always_inline
    def run_scaled[input_scales: InputScales, sends: Bool, receives: Bool](self):
        comptime group = Self.group
        comptime has_shared = group.fused_shared_expert
        comptime n_warps = group.num_threads // WARP_SIZE
        comptime assert n_warps >= N_WARPS_MIN, "a role has no warp"
        var counters = self.buffers.counters
        var n_tokens = in_32_bits(self.given.n_tokens)
        await_launch_before()
        var word = header_word(counters)
        var histogram = unused[SharedWord]()
        comptime if sends:
            histogram = empty_histogram[group]()
        var block = Block[group].begin[N_CONTROL](
            word,
            0,
            counters,
            SharedBuffers.of(self.buffers, word),
            SEND if sends else RECEIVE,
        )
        var is_refused = not block.can_go
        comptime if has_shared and not sends:
            is_refused = is_refused or self._refuse_unsent(block)
        if is_refused:
            comptime if receives:
                self._deliver_nothing()
            return
        advance_at_start[sends, receives](n_warps - ELECTING_WARP, n_tokens, block)
        comptime if sends:
            publish_earlier_reads(n_warps - PUBLISHING_WARP, block)
            var n_senders = n_warps - 1
            comptime if receives:
                # Stores to peers queue up in a multiprocessor and delay all its other
                # traffic: few warps send much.
                n_senders = min(3 if n_tokens > 256 else 6, n_warps - 2)
            Sender[group, Self.Format, Self.input_type, input_scales](
                block,
                self.given,
                own_of(self.put_bufs, block.my_rank),
                SendSchedule.of(n_tokens, group.top_k, Int(grid_dim.x)),
            ).run(histogram, n_senders)
            # AFTER: this generation's counts are with their receivers, and its
            # messages are on their way.
        comptime if receives:
            poll_done_words[sends](n_warps - POLLING_WARP, block)
            var n_shared = 0
            comptime if has_shared:
                n_shared = n_tokens if sends else block.before.n_tokens(
                    block.receiving()
                )
            var receiver = SlotReceiver[group, Self.Format](
                block, self.dispatched, n_shared
            )
            comptime if has_shared and not sends:
                receiver.place_own_tokens()
            receiver.run()
            comptime if has_shared and sends:
                # Whatever this block's warps have staged is there after this.
                barrier()
                receiver.place_own_tokens()
            end_wait[sends](block)
            # AFTER: rows are complete; every source may overwrite its slots here,
            # once that is published, by this launch or the next of this rank.

    @always_inline
    def _refuse_unsent(self, block: Block[Self.group]) -> Bool:
        """Refuses a wait before its send: the shared expert gets this rank's tokens,
        which it has staged. Returns whether it has."""
        if block.before.generation[Word.DISPATCH_SENT]() == block.receiving():
            return False
        block.refuse(Failure.NOT_SENT, RECEIVE)
        return True

    @always_inline
    def _deliver_nothing(self):
        """Leaves outputs without rows, after a failure of this rank."""
        if block_idx.x == 0:
            self.dispatched.tables.write_no_rows(
                Int(thread_idx.x), Self.group.num_threads
            )
