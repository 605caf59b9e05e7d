# SPDX-License-Identifier: Apache-2.0
"""Dispatch by expert, for GPU ranks: the portable one, of AMD and SHMEM too.

The same messages in the same slots, and the same rows, as `cpu/dispatch.mojo`
makes; other flags announce them. The count of a pair is published as soon as it is
known; each message then announces itself by the flag in its source info, so
receiving goes on while the wire is busy.

Roles of a block's warps: the first finds the slots of the choices (`send.mojo`), the
next ones send, the last reads the counts (`receive.mojo`); each then takes part in
receiving.

After the send phase: every peer has this generation's counts, and gets its messages.
After the receive phase: this rank's rows stand by local expert, source rank, token,
choice, and every source knows that they have been read.
"""
from max.gpu import barrier, block_idx, grid_dim, thread_idx, WARP_SIZE
from std.builtin.device_passable import DeviceTypeEncoder

from ..counters import EPLocalSyncCounters
from ..device.block import Block, can_start, is_last_block, rank_of
from ..device.phase import InputScales, Phase
from ..device.shared import own_of
from ..failures import NOT_SENT, record_failure
from ..flags import FlagPointer, next_generation
from ..layout import Group
from ..row_tables import RowTables
from ..token_format import BytePointer, TokenFormat
from .receive import RECEIVE, Receiver
from .send import N_CONTROL, SEND, Sender, SendSchedule


@fieldwise_init
struct DispatchByExpert[
    group_: Group,
    Format: TokenFormat,
    input_type: DType,
](Phase):
    """Sends a message for each choice, and sorts those that come into rows by expert.

    Launch: any grid; `group.num_threads` of three warps or more. All buffers must be
    mapped and peer-writable until every receiver has returned.

    Parameters:
        group_: Sizes of the group.
        Format: Wire format of a token.
        input_type: Element type of the tokens.
    """

    comptime group = Self.group_
    """Sizes of the group."""
    comptime overlaps_previous = False
    """Its launch waits for the kernel before it."""
    comptime device_type: AnyType = Self
    """A kernel gets this as it is."""

    var tokens: Pointer[Scalar[Self.input_type], ImmUntrackedOrigin]
    """`[n_tokens][hidden_size]`, aligned to 16 bytes; used if it sends."""
    var topk_ids: Pointer[Int32, ImmUntrackedOrigin]
    """`[n_tokens][top_k]`, in `[-1, n_experts)`; -1: no expert. Used if it sends."""
    var n_tokens: Int32
    """Tokens to send."""
    var rows: Self.Format.Rows
    """The output tensors of rows; used if it receives, as the next three are."""
    var n_rows_max: Int32
    """Rows that they hold."""
    var tables: RowTables[Self.group]
    """The output tensors that say which row is whose."""
    var src_info: Pointer[Int32, MutUntrackedOrigin]
    """`[n_rows_max][2]`: token on its source rank, k; of the shared expert, -1."""
    var put_bufs: Array[BytePointer, Self.group.n_ranks_per_node]
    """The node's put buffers; used if it sends with SHMEM."""
    var recv_bufs: Array[BytePointer, Self.group.n_ranks_per_node]
    """The node's recv buffers. The send buffers are found from them."""
    var counts: Array[FlagPointer, Self.group.n_ranks_per_node]
    """The node's counts buffers."""
    var counters: EPLocalSyncCounters[Self.group.n_experts]
    """This rank's words."""
    var my_rank: Int32
    """This rank; -1: as the counters say."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments."""
        return "DispatchByExpert"

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        """Does this block's part, see `Phase`."""
        self.run_scaled[None, sends, receives]()

    @always_inline
    def run_scaled[
        input_scales: InputScales, sends: Bool, receives: Bool
    ](self):
        """Does this block's part with input scales, see `Phase`."""
        comptime group = Self.group
        comptime has_shared = group.fused_shared_expert
        comptime n_warps = group.num_threads // WARP_SIZE
        var counters = self.counters
        if not can_start[group](counters, SEND if sends else RECEIVE):
            comptime if receives:
                self._deliver_nothing()
            return
        comptime if has_shared and not sends:
            if not self._has_sent():
                self._deliver_nothing()
                return
        var block = Block[group].set_up[N_CONTROL](
            counters, self.my_rank, self.recv_bufs, self.counts
        )
        var n_tokens = Int(self.n_tokens)
        var sent = next_generation(block.before.dispatch_sent)
        var received = next_generation(block.before.dispatch_received)
        comptime if sends:
            var n_senders = n_warps - 1
            comptime if receives:
                n_senders = n_send_warps(n_tokens, n_warps)
            Sender[group, Self.Format, Self.input_type, input_scales](
                block,
                self.tokens,
                self.topk_ids,
                n_tokens,
                own_of(self.put_bufs, block.my_rank),
                sent,
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
                    n_shared = counters.n_tokens(received)
            var receiver = Receiver[group, Self.Format](
                block,
                self.rows,
                Int(self.n_rows_max),
                self.tables,
                self.src_info,
                received,
                n_shared,
            )
            comptime if has_shared and not sends:
                receiver.place_own_tokens()
            receiver.run()
            comptime if has_shared and sends:
                # Whatever this block's warps have staged is there after this.
                barrier()
                receiver.place_own_tokens()
        if not is_last_block(counters):
            return
        comptime if sends:
            if block.lane == 0:
                counters.set_n_tokens(sent, n_tokens)
                counters.set_dispatch_sent(sent)
            # AFTER: this generation's counts are with their receivers, and its
            # messages are on their way.
        comptime if receives:
            if block.lane == 0:
                counters.set_dispatch_received(received)
            block.publish_done(
                group.dispatch_done_offset(block.my_rank), received
            )
            # AFTER: rows are complete; every source may overwrite its slots here.

    @always_inline
    def _has_sent(self) -> Bool:
        """Returns whether this rank's own tokens are staged for the shared expert.
        """
        var counters = self.counters
        var received = next_generation(counters.dispatch_received())
        if counters.dispatch_sent() == received:
            return True
        record_failure(
            counters.failure(),
            NOT_SENT,
            RECEIVE,
            rank_of(counters, self.my_rank),
            -1,
            received,
            0,
        )
        counters.set_broken()
        return False

    @always_inline
    def _deliver_nothing(self):
        """Leaves outputs without rows, after a failure of this rank."""
        if block_idx.x == 0:
            self.tables.write_no_rows(Int(thread_idx.x), Self.group.num_threads)


@always_inline
def n_send_warps(n_tokens: Int, n_warps: Int) -> Int:
    """Chooses how many warps of a block send while the others receive.

    Stores to peers queue up in a multiprocessor and delay all its other traffic, so
    few warps send when there is much to send (docs/performance.md).
    """
    return min(3 if n_tokens > 256 else 6, n_warps - 2)
