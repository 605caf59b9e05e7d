# SPDX-License-Identifier: Apache-2.0
"""Combine of rows, for GPU ranks.

Every row of another rank's token returns to the place of its choice, `[token][k]`, on
its source rank. The flag in its source info announces it there. The source knows from
its own dispatch which choices come back, and where the rows of its own experts are. It
waits for the former. It reads the latter in place, or in its own recv buffer if the
caller may overwrite them. docs/formats.md has the order of additions.

After the send phase: every row is on its way to its source. After the receive
phase: the result is complete. The next launch of this rank publishes that the rows were
read (`done_words.mojo`). A launch that fails writes NaN where it has no result.
"""
from max.gpu import WARP_SIZE

from ..device.block import Block
from ..device.done_words import (
    advance_at_start,
    end_wait,
    poll_done_words,
    publish_earlier_reads,
)
from ..device.kernel import Kernel
from ..device.no_result import fill_with_nan
from ..device.shared import own_of, SharedBuffers
from ..device.start import header_word, mask_word
from ..device.warp import in_32_bits
from ..protocol.arguments import CombinedTokens, GivenRows
from ..protocol.call import Buffers
from ..protocol.failures import RECEIVE, SEND
from ..protocol.kernel_argument import unused
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer
from ..work.overlap import await_launch_before
from .reduce import reduce_tokens
from .roles import ELECTING_WARP, N_CONTROL, N_WARPS_MIN, POLLING_WARP, PUBLISHING_WARP
from .send import send_rows, SharedPairs


@fieldwise_init
struct CombineRows[group_: Group, dtype: DType, keeps_rows: Bool = False](Kernel):
    """Sends expert rows back, and adds up those of each token.

    Launch: any grid whose blocks are all resident; `group.num_threads` of at least
    `N_WARPS_MIN` warps.
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
        comptime n_warps = group.num_threads // WARP_SIZE
        comptime assert n_warps >= N_WARPS_MIN, "a role has no warp"
        comptime sends_own = Self.keeps_rows and sends != receives
        comptime sends_rows = sends and (group.n_ranks > 1 or sends_own)
        var counters = self.buffers.counters
        await_launch_before()
        var word = header_word(counters)
        var mask = mask_word(counters)
        var pairs = unused[SharedPairs]()
        comptime if sends_rows:
            # These loads do not depend on the header: all are in flight together.
            pairs = SharedPairs.of(counters)
        var block = Block[group].begin[N_CONTROL](
            word,
            mask,
            counters,
            SharedBuffers.of(self.buffers, word),
            SEND if sends else RECEIVE,
        )
        var is_refused = not block.can_go
        comptime if sends:
            is_refused = is_refused or block.refuses_to_combine()
        if is_refused:
            comptime if receives:
                fill_with_nan[group](self.combined)
            return
        advance_at_start[sends, receives](n_warps - ELECTING_WARP, 0, block)
        comptime if sends:
            publish_earlier_reads(n_warps - PUBLISHING_WARP, block)
        comptime if sends_rows:
            var n_senders = n_warps
            comptime if receives:
                # The others reduce.
                var most = 4 if in_32_bits(self.combined.n_tokens) > 256 else 8
                n_senders = min(most, n_warps - 1)
            if block.warp_idx < n_senders:
                send_rows[Self.dtype, sends_own](
                    self.given, pairs, own_of(self.put_bufs, block.my_rank), block
                )
            # AFTER: this generation's rows are on their way.
        comptime if receives:
            poll_done_words[sends](n_warps - POLLING_WARP, block)
            reduce_tokens[Self.dtype, sends_own](
                self.combined, self.given.rows, block.answered[sends](), block
            )
            end_wait[sends](block)
            # AFTER: the result is complete; every owner may send again, once that
            # is published: here, or by the next launch of this rank.
