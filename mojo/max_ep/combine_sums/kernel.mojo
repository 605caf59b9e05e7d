# SPDX-License-Identifier: Apache-2.0
"""Combine of partial sums, for GPU ranks that dispatch addresses by rank.

The rank of the experts adds its rows of a token, and sends one partial sum to the
token's rank, which adds at most `n_ranks` of them; docs/formats.md has the order of
additions. Weights and rows of a token are those that dispatch has recorded. Every 16
bytes of a partial sum are their own flag; the reader puts `SENTINEL` back.

After the send phase: every partial sum is on its way. After the receive phase: the
result is complete. The next launch of this rank publishes that the partial sums were
read (`publish_earlier_reads`). A launch that only receives publishes it at its own end
if ranks may share a GPU. A launch that fails writes NaN where it has no result.

If weights are given to combine, not to dispatch (`weights.mojo`), each warp first
publishes some to their owners. A launch that only sends then puts its own sums into the
result, because its caller may change the rows before the one that receives.
"""
from max.gpu import block_idx, grid_dim, lane_id, warp_id, WARP_SIZE

from ..device.block import Block
from ..device.done_words import (
    advance_at_start,
    end_wait,
    poll_done_words,
    publish_earlier_reads,
)
from ..device.kernel import Kernel
from ..device.no_result import fill_with_nan
from ..device.schedule import Schedule
from ..device.shared import SharedBuffers
from ..device.start import header_word, mask_word
from ..device.warp import in_32_bits
from ..protocol.arguments import CombinedTokens
from ..protocol.call import Buffers
from ..protocol.counters import Word
from ..protocol.failures import Failure, RECEIVE, SEND
from ..protocol.layout import Group
from ..protocol.token_format import LocalRows
from ..work.overlap import await_launch_before
from .add_for_hosts import add_for_hosts
from .partials import FEW_TOKENS, LaneSlice, SendSplit, SOME_TOKENS, SumSplit
from .receive import SumReceiver
from .roles import (
    ELECTING_WARP,
    N_CONTROL,
    N_SPLIT_ROUNDS,
    N_WARPS_MIN,
    POLLING_WARP,
    PUBLISHING_WARP,
    sum_receive_schedule,
    TokenRecord,
)
from .send import n_sources, send_partials, sum_to_send
from .weights import WeightSender


@fieldwise_init
struct CombineSums[group_: Group, dtype: DType, partial_dtype: DType](Kernel):
    """Sends a partial sum of each token to its rank, and adds up those that come.

    Launch: any grid whose blocks are all resident; `group.num_threads` of at least
    `N_WARPS_MIN` warps.
    """

    comptime group = Self.group_

    var rows: LocalRows
    """Expert rows in the order of the last dispatch, aligned to 16 bytes."""
    var combined: CombinedTokens[Self.dtype]
    var buffers: Buffers[Self.group]

    @always_inline
    def run[sends: Bool, receives: Bool](self):
        comptime group = Self.group
        comptime n_warps = group.num_threads // WARP_SIZE
        comptime assert n_warps >= N_WARPS_MIN, "a role has no warp"
        comptime phase = SEND if sends else RECEIVE
        # Expert rows of PyTorch may change between the phases.
        comptime keeps_own = group.late_weights and sends != receives
        var counters = self.buffers.counters
        var n_senders = 0
        comptime if sends and n_sources[group, keeps_own]() > 0:
            n_senders = n_warps
            comptime if receives:
                # The others begin to add up tokens.
                var n = in_32_bits(self.combined.n_tokens)
                var are_some = FEW_TOKENS < n and n <= SOME_TOKENS
                comptime if group.is_linked():
                    are_some = n <= SOME_TOKENS  # parts of a few sums
                n_senders = min(16 if are_some else 8, n_warps)
        # Chosen before the previous launch has ended, and before the peers' numbers of
        # tokens are known: if these are not few, what is loaded below is not used.
        var source, token_idx = _first_token[
            group, LaneSlice[group, Self.dtype, Self.partial_dtype].n_steps, keeps_own
        ](n_senders)
        await_launch_before()
        var word = header_word(counters)
        var mask = mask_word(counters)
        # How many rows dispatch has delivered: this load does not depend on the header,
        # so both are in flight together.
        var n_rows = counters.pair_row(group.n_pairs())
        var prefetched = TokenRecord.of(counters, source, token_idx, Int(lane_id()))
        comptime sends_weights = sends and group.late_weights and group.n_ranks > 1
        var weight_sender = WeightSender[group](
            counters, self.combined.router_weights, in_32_bits(self.combined.n_tokens)
        )
        comptime if sends_weights:
            weight_sender.load()
        var buffers = SharedBuffers.of(self.buffers, word)
        comptime n_control = N_CONTROL + N_SPLIT_ROUNDS * Int(group.is_linked())
        var block = Block[group].begin[n_control](word, mask, counters, buffers, phase)
        var is_refused = not block.can_go
        comptime if sends:
            is_refused = is_refused or block.refuses_to_combine()
        comptime if receives:
            is_refused = is_refused or self._refuse_too_few_rows(n_rows, phase, block)
        if is_refused:
            comptime if receives:
                fill_with_nan[group](self.combined)
            return
        advance_at_start[sends, receives](n_warps - ELECTING_WARP, 0, block)
        comptime if sends:
            publish_earlier_reads(n_warps - PUBLISHING_WARP, block)
            comptime if not receives:
                if self._refuse_too_few_rows(n_rows, phase, block):
                    return
            var most = block.before.number[Word.MOST_RECEIVED]()
            var can_send = True
            comptime if sends_weights:
                can_send = weight_sender.send(block)
            if block.warp_idx < n_senders and can_send:
                comptime for are_few in [True, False]:
                    if (most <= FEW_TOKENS) == are_few:
                        send_partials[Self.partial_dtype, are_few, keeps_own](
                            self.rows.rows, self.combined, n_senders, prefetched, block
                        )
                comptime if group.relays:
                    add_for_hosts[Self.dtype, Self.partial_dtype](
                        self.rows.rows, n_senders, block
                    )
            # AFTER: this generation's partial sums are on their way.
        comptime if receives:
            poll_done_words[sends](n_warps - POLLING_WARP, block)
            var n_tokens = in_32_bits(self.combined.n_tokens)
            var receiver = SumReceiver[
                group, Self.dtype, Self.partial_dtype, keeps_own
            ](
                block,
                self.rows.rows,
                self.combined,
                n_tokens,
                _refuse_other_dispatch(n_tokens, block.answered[sends](), block),
                prefetched,
                block.warp_idx >= n_senders,
            )
            comptime for are_few in [True, False]:
                if (n_tokens <= FEW_TOKENS) == are_few:
                    receiver.add_tokens[are_few]()
            end_wait[sends](block)
            # AFTER: the result is complete; every owner may send again, once that
            # is published: here, or by the next launch of this rank.

    @always_inline
    def _refuse_too_few_rows(
        self, n_rows: Int, phase: Int, block: Block[Self.group]
    ) -> Bool:
        """Refuses rows that are fewer than dispatch delivered."""
        if n_rows <= self.rows.n_rows:
            return False
        block.refuse(Failure.TOO_MANY_ROWS, phase, 0, n_rows, self.rows.n_rows)
        return True


@always_inline
def _refuse_other_dispatch(
    n_tokens: Int, dispatch_generation: UInt32, block: Block[...]
) -> Bool:
    """Refuses a result that cannot be the dispatch's; returns whether it has."""
    var n_sent = block.before.n_tokens(dispatch_generation)
    if n_sent != n_tokens:
        block.refuse(Failure.BAD_N_TOKENS, RECEIVE, -1, n_tokens, n_sent)
        return True
    # Where the own rows are, and their weights, is known of the last dispatch.
    var last = block.before.generation[Word.DISPATCH_RECEIVED]()
    if last != dispatch_generation:
        block.refuse(
            Failure.OTHER_ROWS, RECEIVE, -1, Int(dispatch_generation), Int(last)
        )
        return True
    if block.is_overtaken(dispatch_generation):
        block.refuse(Failure.OVERTAKEN, RECEIVE)
        return True
    return False


@always_inline
def _first_token[
    group: Group, n_steps: Int, keeps_own: Bool
](n_senders: Int) -> Tuple[Int, Int]:
    """Finds source and token of a warp's first sum to send, or else to add up."""
    var split = SumSplit[n_steps, True](True)
    var warp_idx = Int(warp_id())
    if warp_idx < n_senders:
        var sent = SendSplit[group, n_steps, True](True)
        comptime if group.is_linked():
            var round = sent.chunk(warp_idx).whole
            var number = round * Int(grid_dim.x) + Int(block_idx.x)
            return sum_to_send[group, keeps_own](number)
        var number = Int(block_idx.x) + warp_idx * Int(grid_dim.x)
        return sum_to_send[group, keeps_own](sent.chunk(number).whole)
    var round = sum_receive_schedule(warp_idx, group.num_threads // WARP_SIZE).first
    var item = Schedule.item(round, Int(block_idx.x), Int(grid_dim.x))
    return (0, split.chunk(item).whole)
