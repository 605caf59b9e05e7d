# SPDX-License-Identifier: Apache-2.0
"""Combine of rows, for GPU ranks.

Every row of another rank's token goes back to the place of its choice,
`[token][k]`, on its source rank, and announces itself there by the flag in its
source info. The source knows from its own dispatch which choices come back, and
where the rows of its own experts are. It waits for the former, reads the latter
where they are (or, if those may change, in its own recv buffer), and adds the rows
of a token as `cpu/combine.mojo` does:

    acc = 0; for k: acc = fma(weight[k], row[k], acc)       in float32
    result = acc, rounded to the combine dtype
    result = result + shared[token], likewise    with a fused shared expert

After the send phase: every row is on its way to its source. After the receive
phase: the result is there, and every owner knows that its rows have been read. A
launch that fails fills what it cannot compute with NaN.
"""
from max.gpu import barrier, block_idx, grid_dim, thread_idx, WARP_SIZE
from std.builtin.device_passable import DeviceTypeEncoder
from std.utils.numerics import nan

from ..counters import EPLocalSyncCounters
from ..device.block import (
    await_launch_before,
    Block,
    can_start,
    is_last_block,
)
from ..device.phase import Phase
from ..device.shared import own_of
from ..failures import NOTHING_DISPATCHED
from ..flags import FlagPointer, next_generation
from ..layout import Group
from ..token_format import BytePointer, SharedRows
from .reduce import reduce_tokens
from .roles import N_CONTROL, n_send_warps, RECEIVE, SEND
from .send import send_rows, SharedPairs


@fieldwise_init
struct CombineRows[group_: Group, dtype: DType, keeps_rows: Bool = False](
    Phase
):
    """Sends expert rows back, and adds up those of each token.

    Launch: any grid; fused, `group.num_threads` at least two warps.

    Parameters:
        group_: Sizes of the group.
        dtype: Element type of rows and results.
        keeps_rows: Whether `expert_rows` may change once the send phase has ended, if
            that is a launch of its own. Rows of own tokens are then sent, too.
    """

    comptime group = Self.group_
    """Sizes of the group."""
    comptime overlaps_previous = Self.group_.is_by_rank()
    """By rank it runs on GPUs that have such launches; by expert it is portable."""
    comptime device_type: AnyType = Self
    """A kernel gets this as it is."""

    var expert_rows: BytePointer
    """`[n_rows][hidden_size]`, in the order of the last dispatch, aligned to 16
    bytes. The receive phase reads those of a fused shared expert, and those that
    this rank's experts made of its own tokens."""
    var n_rows: Int32
    """Rows of `expert_rows` and `src_info`."""
    var src_info: Pointer[Int32, ImmUntrackedOrigin]
    """`[n_rows][2]` from that dispatch; used if it sends."""
    var output_tokens: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]
    """`[n_tokens][hidden_size]`; used if it receives, as what follows."""
    var router_weights: Pointer[Float32, ImmUntrackedOrigin]
    """`[n_tokens][top_k]`."""
    var n_tokens: Int32
    """Tokens that this rank dispatched."""
    var put_bufs: Array[BytePointer, Self.group.n_ranks_per_node]
    """Put buffers of this node's ranks; used if it sends with SHMEM."""
    var recv_bufs: Array[BytePointer, Self.group.n_ranks_per_node]
    """Combine recv buffers of this node's ranks."""
    var counts: Array[FlagPointer, Self.group.n_ranks_per_node]
    """Combine counts buffers of this node's ranks."""
    var counters: EPLocalSyncCounters[Self.group.n_experts]
    """This rank's words."""
    var my_rank: Int32
    """This rank, in `[0, n_ranks)`; -1: as the counters say."""

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in error messages about kernel arguments."""
        return "CombineRows"

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        """Does this block's part, see `Phase`."""
        comptime group = Self.group
        comptime if Self.overlaps_previous:
            await_launch_before()
        if not can_start[group](self.counters, SEND if sends else RECEIVE):
            self._refuse[receives]()
            return
        var block = Block[group].set_up[N_CONTROL](
            self.counters, self.my_rank, self.recv_bufs, self.counts
        )
        comptime if sends:
            if block.before.dispatch_received == 0:
                block.fail(
                    NOTHING_DISPATCHED,
                    SEND,
                    block.my_rank,
                    -1,
                    next_generation(block.before.combine_sent),
                    0,
                )
                self._refuse[receives]()
                self.counters.set_broken()
                return
        comptime sends_own = Self.keeps_rows and sends != receives
        comptime if sends and (group.n_ranks > 1 or sends_own):
            var n_senders = group.num_threads // WARP_SIZE
            comptime if receives:
                n_senders = n_send_warps(Int(self.n_tokens), n_senders)
            var pairs = SharedPairs[group].copied_from(self.counters)
            if block.warp_idx < n_senders:
                send_rows[Self.dtype, sends_own](
                    self.expert_rows,
                    Int(self.n_rows),
                    self.src_info,
                    pairs,
                    own_of(self.put_bufs, block.my_rank),
                    block,
                )
        else:
            barrier()
        comptime if receives:
            var dispatch_generation = block.before.combine_of
            comptime if sends:
                dispatch_generation = block.before.dispatch_received
            reduce_tokens[Self.dtype, sends_own](
                BytePointer(unsafe_from_address=Int(self.output_tokens)),
                Int(self.n_tokens),
                self.router_weights,
                SharedRows(self.expert_rows, Int(self.n_rows)),
                dispatch_generation,
                block,
            )
        _finish[sends, receives](block)

    @always_inline
    def _refuse[receives: Bool](self):
        """Gives a result where none is computed."""
        comptime if receives:
            fill_with_nan[Self.group.num_threads](
                self.output_tokens,
                Int(self.n_tokens) * Self.group.hidden_size,
            )


@always_inline
def fill_with_nan[
    combine_dtype: DType, //, num_threads: Int
](result: Pointer[Scalar[combine_dtype], MutUntrackedOrigin], n_elements: Int):
    """Fills a result that is not computed, with all blocks."""
    var value = nan[DType.float32]().cast[combine_dtype]()
    for i in range(
        Int(block_idx.x) * num_threads + Int(thread_idx.x),
        n_elements,
        Int(grid_dim.x) * num_threads,
    ):
        result[unsafe_offset=i] = value


@always_inline
def _finish[group: Group, //, sends: Bool, receives: Bool](block: Block[group]):
    """Ends a launch: its last block moves the generation and publishes it."""
    if not is_last_block(block.counters):
        return
    comptime if sends:
        if block.lane == 0:
            block.counters.set_combine_sent(
                next_generation(block.before.combine_sent)
            )
            block.counters.set_combine_of(block.before.dispatch_received)
        # AFTER: this generation's rows are on their way to their sources.
    comptime if receives:
        var received = next_generation(block.before.combine_received)
        if block.lane == 0:
            block.counters.set_combine_received(received)
        block.publish_done(group.combine_done_offset(block.my_rank), received)
        # AFTER: the result is complete; every owner may overwrite its rows
        # here.
