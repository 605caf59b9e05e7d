# SPDX-License-Identifier: Apache-2.0
"""Dispatch by expert, for GPU ranks: the portable dispatch, also for AMD and SHMEM.

Messages, slots and rows are those of `cpu/dispatch.mojo`. The count of a pair is
published as soon as it is known. Each message then announces itself by the flag in its
source info, so receiving overlaps with the transfer.

Roles of a block's warps: the first finds the slots of the choices (`send.mojo`), the
next ones send, the last reads the counts (`receive.mojo`); each then receives.

After the send phase: every peer has this generation's counts, and messages are on
their way. After the receive phase: this rank's rows are sorted by local expert, source
rank, token, choice, and every source knows that they have been read.
"""
from max.gpu import barrier, block_idx, grid_dim, thread_idx, WARP_SIZE

from ..device.block import Block
from ..device.done_words import publish_done
from ..device.kernel import Kernel
from ..device.shared import own_of
from ..device.start import elect_last_block, load_and_check_header
from ..device.warp import in_32_bits
from ..protocol.arguments import Buffers, DispatchedRows, GivenTokens, InputScales
from ..protocol.counters import Word
from ..protocol.failures import Failure, RECEIVE, record_failure, SEND
from ..protocol.flags import next_generation
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, TokenFormat
from .receive import SlotReceiver
from .send import N_CONTROL, Sender, SendSchedule


@fieldwise_init
struct DispatchByExpert[group_: Group, Format: TokenFormat, input_type: DType](Kernel):
    """Sends a message for each choice, and sorts those that come into rows by expert.

    Launch: any grid whose blocks are all resident, of three warps or more. All buffers
    must be mapped and peer-writable until every receiver has returned.
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
        var counters = self.buffers.counters
        if not load_and_check_header(counters, SEND if sends else RECEIVE):
            comptime if receives:
                self._deliver_nothing()
            return
        comptime if has_shared and not sends:
            # The shared expert gets this rank's tokens, which it has staged.
            var received = next_generation(counters.generation(Word.DISPATCH_RECEIVED))
            if counters.generation(Word.DISPATCH_SENT) != received:
                var rank = counters.my_rank()
                record_failure(
                    counters, Failure.NOT_SENT, RECEIVE, rank, -1, received, 0
                )
                counters.set_broken()
                self._deliver_nothing()
                return
        var block = Block[group].set_up[N_CONTROL](self.buffers)
        var n_tokens = in_32_bits(self.given.n_tokens)
        comptime if sends:
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
            ).run(n_senders)
        else:
            barrier()
        comptime if receives:
            var n_shared = 0
            comptime if has_shared:
                comptime if sends:
                    n_shared = n_tokens
                else:
                    n_shared = Int(counters.n_tokens_of(block.receiving())[])
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
        if not elect_last_block(counters):
            return
        comptime if sends:
            if block.lane == 0:
                counters.n_tokens_of(block.sending())[] = Int32(n_tokens)
                block.advance[True, False]()
            # AFTER: this generation's counts are with their receivers, and its
            # messages are on their way.
        comptime if receives:
            if block.lane == 0:
                block.advance[False, True]()
            publish_done(
                group.dispatch_done_offset(block.my_rank), block.receiving(), block
            )
            # AFTER: rows are complete; every source may overwrite its slots here.

    @always_inline
    def _deliver_nothing(self):
        """Leaves outputs without rows, after a failure of this rank."""
        if block_idx.x == 0:
            self.dispatched.tables.write_no_rows(
                Int(thread_idx.x), Self.group.num_threads
            )
