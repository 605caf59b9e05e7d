# SPDX-License-Identifier: Apache-2.0
"""Combine of rows, for GPU ranks.

Every row of another rank's token returns to the place of its choice, `[token][k]`, on
its source rank. The flag in its source info announces it there. The source knows from
its own dispatch which choices come back, and where the rows of its own experts are. It
waits for the former. It reads the latter in place, or in its own recv buffer if the
caller may overwrite them. docs/formats.md has the order of additions.

After the send phase: every row is on its way to its source. After the receive
phase: the result is complete, and every owner knows that its rows have been read. A
launch that fails writes NaN where it has no result.
"""
from max.gpu import barrier, block_idx, grid_dim, thread_idx, WARP_SIZE

from ..device.block import Block
from ..device.done_words import publish_done
from ..device.kernel import Kernel
from ..device.no_result import fill_with_nan
from ..device.shared import own_of
from ..device.start import (
    await_launch_before,
    elect_last_block,
    load_and_check_header,
    mask_word,
)
from ..device.warp import in_32_bits
from ..protocol.arguments import Buffers, CombinedTokens, GivenRows
from ..protocol.counters import Word
from ..protocol.failures import Failure, RECEIVE, SEND
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer
from .reduce import reduce_tokens
from .send import N_CONTROL, send_rows


@fieldwise_init
struct CombineRows[group_: Group, dtype: DType, keeps_rows: Bool = False](Kernel):
    """Sends expert rows back, and adds up those of each token.

    Launch: any grid whose blocks are all resident; fused, of at least two warps.
    `keeps_rows`: whether the rows may change behind a launch that only sends. It then
    sends own tokens', too.
    """

    comptime group = Self.group_

    var given: GivenRows
    """Rows in the order of the last dispatch, aligned to 16 bytes."""
    var combined: CombinedTokens[Self.dtype]
    var buffers: Buffers[Self.group]
    var put_bufs: Array[BytePointer, Self.group.n_mapped]
    """Put buffers of this node's ranks; used if it sends with SHMEM."""

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        comptime group = Self.group
        comptime if group.is_by_rank():
            await_launch_before()
        var mask = mask_word(self.buffers.counters)
        if not load_and_check_header(self.buffers.counters, SEND if sends else RECEIVE):
            comptime if receives:
                fill_with_nan[group](self.combined)
            return
        var block = Block[group].set_up[N_CONTROL](self.buffers, mask)
        comptime if sends:
            if block.before.generation[Word.DISPATCH_RECEIVED]() == 0:
                block.refuse_and_break(Failure.NOTHING_DISPATCHED, SEND)
                comptime if receives:
                    fill_with_nan[group](self.combined)
                return
        comptime sends_own = Self.keeps_rows and sends != receives
        comptime if sends and (group.n_ranks > 1 or sends_own):
            var n_senders = group.num_threads // WARP_SIZE
            comptime if receives:
                # The others reduce.
                var most = 4 if in_32_bits(self.combined.n_tokens) > 256 else 8
                n_senders = min(most, n_senders - 1)
            send_rows[Self.dtype, sends_own](
                self.given, n_senders, own_of(self.put_bufs, block.my_rank), block
            )
        else:
            barrier()
        comptime if receives:
            reduce_tokens[Self.dtype, sends_own](
                self.combined, self.given.rows, block.answered[sends](), block
            )
        if not elect_last_block(block.counters):
            return
        if block.lane == 0:
            block.advance[sends, receives]()
        comptime if receives:
            publish_done(
                group.combine_done_offset(block.my_rank), block.receiving(), block
            )
        # AFTER: what is sent of this generation is on its way. What is received is
        # complete, and every owner may overwrite its rows here.
