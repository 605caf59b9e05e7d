# SPDX-License-Identifier: Apache-2.0
"""Reduced combine of `rank_slots` for GPU ranks.

The rank of the experts adds its rows of a token, and sends one partial sum to
the token's rank, which adds at most `n_ranks` of them:

    partial = 0; for k with an expert here: partial = fma(weight[k], row[k],
        partial)                                              in float32
    sent: partial, rounded once to the partial dtype
    result = own partial, not rounded; then + those of the other ranks, in
        ascending order; rounded to the combine dtype; with a fused shared
        expert then + shared[token], and rounded again

Weights and rows of a token are those that dispatch has noted. Every 16 bytes of
a partial sum are their own flag; the reader puts `SENTINEL` back.

Rows are added by `partial_sums.mojo`; sums are sent by `combine_send.mojo` and
received by `combine_receive.mojo`; what a launch refuses is in `combine_checks.mojo`.

After the sending half: every partial sum is on its way. After the receiving
half: the result is there; owners hear from the next launch
(`publish_earlier_reads`), or, split, from the end of this one, that their
partial sums were read. A launch that fails fills what it cannot compute with
NaN.
"""
from max.gpu import (
    block_idx,
    grid_dim,
    lane_id,
    MAX_THREADS_PER_BLOCK_METADATA,
    warp_id,
    WARP_SIZE,
)
from std.utils import StaticTuple

from ..combine_rows.phase import combine_group_of, fill_with_nan
from ..counters import EPLocalSyncCounters
from ..device.block import (
    await_launch_before,
    Block,
    header_word,
    is_last_block,
)
from ..device.schedule import Schedule
from ..device.shared import share_addresses
from ..flags import FlagPointer, next_generation
from ..layout import Group
from ..token_format import BytePointer, SharedRows
from .checks import (
    has_too_few_rows,
    is_bad_answer,
    is_nothing_dispatched,
    rows_delivered,
)
from .receive import add_tokens
from .roles import N_CONTROL, N_WARPS_MIN, RECEIVE, receive_schedule, SEND
from .saved_routes import SavedRoutes
from .send import send_partials, sum_to_send
from .sums import are_few_tokens, FEW_TOKENS, PartialFormat, SumSplit

# ------------------------------------------------------------ the sending half


@always_inline
def _send[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    group: Group,
](
    expert_rows: BytePointer,
    block: Block[group],
    n_senders: Int,
    prefetched: SavedRoutes,
):
    """Has a warp of a block take its part in the sending half."""
    if block.warp_idx >= n_senders:
        return
    var most = block.before.most_received
    comptime for are_few in [True, False]:
        if are_few_tokens(most) == are_few:
            send_partials[
                combine_dtype,
                partial_dtype,
                hidden_size,
                group,
                are_few,
            ](
                expert_rows,
                most,
                prefetched,
                block,
                block.warp_idx,
                n_senders,
            )


# ---------------------------------------------------------- the receiving half


@always_inline
def _receive[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    group: Group,
    fused_shared_expert: Bool,
](
    output_tokens: BytePointer,
    n_tokens: Int,
    expert_rows: BytePointer,
    dispatch_generation: UInt32,
    block: Block[group],
    n_warps: Int,
    prefetched: SavedRoutes,
    is_prefetched: Bool,
):
    """Has a warp of a block take its part in the receiving half."""
    var is_bad = is_bad_answer(n_tokens, dispatch_generation, block)
    comptime for are_few in [True, False]:
        if are_few_tokens(n_tokens) == are_few:
            add_tokens[
                combine_dtype,
                partial_dtype,
                hidden_size,
                group,
                fused_shared_expert,
                are_few,
            ](
                output_tokens,
                n_tokens,
                expert_rows,
                is_bad,
                receive_schedule(block.warp_idx, n_warps),
                prefetched,
                is_prefetched,
                block,
            )


# ------------------------------------------------------------------ the kernels


@always_inline
def n_send_warps[n_ranks: Int](n_tokens: Int, n_warps: Int) -> Int:
    """Chooses how many warps of a block send before they add up tokens."""
    comptime if n_ranks == 1:
        return 0
    return min(16 if FEW_TOKENS < n_tokens and n_tokens <= 256 else 8, n_warps)


@fieldwise_init
struct _First(TrivialRegisterPassable):
    """Whose notes a warp needs first, if tokens are few.

    It is found before the launch before has ended, and before it is known how many
    tokens peers have: if they are not few, it is of no use.
    """

    var source: Int
    """The source, from `relative_rank`."""
    var token_idx: Int
    """The token there."""

    @staticmethod
    @always_inline
    def of[group: Group, n_steps: Int](n_senders: Int, n_warps: Int) -> Self:
        """Finds it: of a warp that sends its first unit, else its first turn.
        """
        var cut = SumSplit[n_steps, True](True)
        var warp_idx = Int(warp_id())
        var item = Schedule.item(
            receive_schedule(warp_idx, n_warps).first,
            n_blocks=Int(grid_dim.x),
            block=Int(block_idx.x),
        )
        var first = Self(0, cut.chunk(item).whole)
        if warp_idx < n_senders:
            var unit = Int(block_idx.x) + warp_idx * Int(grid_dim.x)
            first.source, first.token_idx = sum_to_send[group](
                cut.chunk(unit).whole
            )
        return first

    @always_inline
    def saved_routes[
        group: Group
    ](self, counters: EPLocalSyncCounters) -> SavedRoutes:
        """Begins to read them."""
        return SavedRoutes.of[group](
            counters, self.source, self.token_idx, Int(lane_id())
        )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def combine_async_kernel[
    combine_dtype: DType,
    partial_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
](
    expert_rows: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends a partial sum of each token to its rank.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of the rows.
        partial_dtype: Element type of partial sums.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        protocol: A reduced one.

    Args:
        expert_rows: `[n_rows_max][hidden_size]`, in the order of the last
            dispatch, aligned to 16 bytes.
        n_rows_max: How many.
        recv_buf_ptrs: All ranks' combine recv buffers.
        recv_count_ptrs: All ranks' combine counts buffers.
        ep_counters: This rank's local words.
    """
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        protocol,
        partial_dtype,
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime n_steps = PartialFormat[
        combine_dtype, partial_dtype, hidden_size
    ].n_steps
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    comptime n_senders = n_warps if n_ranks > 1 else 0
    var first = _First.of[group, n_steps](n_senders, n_warps)
    await_launch_before()
    var word = header_word(ep_counters)
    var n_rows = rows_delivered[group](ep_counters)
    var prefetched = first.saved_routes[group](ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var dispatch_counts = share_addresses[n_ranks, False](
        recv_count_ptrs, 0, group.dispatch_counts_from_combine_counts()
    )
    var block = Block[group].begin[N_CONTROL](
        word, {ep_counters.words}, recv_bufs, dispatch_counts, SEND
    )
    if not block.can_go or is_nothing_dispatched(block):
        return
    if block.is_last_to_start(n_warps - 2):
        ep_counters.set_combine_of(block.before.dispatch_received)
        var generation = next_generation(block.before.combine_sent)
        ep_counters.set_combine_sent(generation)
    block.publish_earlier_reads(n_warps - 3)
    if has_too_few_rows(n_rows, n_rows_max, SEND, block):
        return
    _send[combine_dtype, partial_dtype, hidden_size, group](
        BytePointer(unsafe_from_address=Int(expert_rows)),
        block,
        n_senders,
        prefetched,
    )
    # AFTER: this generation's partial sums are on their way.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def combine_wait_kernel[
    combine_dtype: DType,
    partial_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
](
    expert_rows: SharedRows,
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Adds the partial sums of each token, as they arrive.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        protocol: A reduced one.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.
        shares_gpu: As in `dispatch_wait_kernel`, whose reason holds here.

    Args:
        expert_rows: Those of `combine_async_kernel`: this rank's own partial
            sums are made here.
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens that this rank dispatched.
        recv_buf_ptrs: All ranks' combine recv buffers.
        recv_count_ptrs: All ranks' combine counts buffers.
        ep_counters: This rank's local words.
    """
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        protocol,
        partial_dtype,
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime n_steps = PartialFormat[
        combine_dtype, partial_dtype, hidden_size
    ].n_steps
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    var first = _First.of[group, n_steps](0, n_warps)
    await_launch_before()
    var word = header_word(ep_counters)
    var n_rows = rows_delivered[group](ep_counters)
    var prefetched = first.saved_routes[group](ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var dispatch_counts = share_addresses[n_ranks, False](
        recv_count_ptrs, 0, group.dispatch_counts_from_combine_counts()
    )
    var block = Block[group].begin[N_CONTROL](
        word, {ep_counters.words}, recv_bufs, dispatch_counts, RECEIVE
    )
    if not block.can_go or has_too_few_rows(
        n_rows, Int32(expert_rows.n_rows), RECEIVE, block
    ):
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        return
    var generation = next_generation(block.before.combine_received)
    comptime if not shares_gpu:
        if block.is_last_to_start(n_warps - 2):
            ep_counters.set_combine_received(generation)
        if block_idx.x == 0 and block.warp_idx == n_warps - 1:
            block.prefetch_done_words[is_combine=False]()
    _receive[
        combine_dtype,
        partial_dtype,
        hidden_size,
        group,
        fused_shared_expert,
    ](
        BytePointer(unsafe_from_address=Int(output_tokens)),
        Int(n_tokens),
        expert_rows.rows,
        block.before.combine_of,
        block,
        n_warps,
        prefetched,
        True,
    )
    comptime if shares_gpu:
        if not is_last_block(ep_counters):
            return
        if block.lane == 0:
            ep_counters.set_combine_received(generation)
        block.publish_reads(block.before.dispatch_received, generation)
    # AFTER: the result is complete; every owner may send again, once it is told.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def combine_kernel[
    combine_dtype: DType,
    partial_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    fused_shared_expert: Bool = False,
](
    expert_rows: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int32,
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends and adds up in one launch; all ranks must run at the same time.

    Launch: a grid whose blocks are all resident at once,
    `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        protocol: A reduced one.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.

    Args:
        expert_rows: As in `combine_async_kernel`.
        n_rows_max: How many.
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens that this rank dispatched.
        recv_buf_ptrs: All ranks' combine recv buffers.
        recv_count_ptrs: All ranks' combine counts buffers.
        ep_counters: This rank's local words.
    """
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        protocol,
        partial_dtype,
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime n_steps = PartialFormat[
        combine_dtype, partial_dtype, hidden_size
    ].n_steps
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    var n_senders = n_send_warps[n_ranks](Int(n_tokens), n_warps)
    var first = _First.of[group, n_steps](n_senders, n_warps)
    await_launch_before()
    var word = header_word(ep_counters)
    var n_rows = rows_delivered[group](ep_counters)
    var prefetched = first.saved_routes[group](ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var dispatch_counts = share_addresses[n_ranks, False](
        recv_count_ptrs, 0, group.dispatch_counts_from_combine_counts()
    )
    var block = Block[group].begin[N_CONTROL](
        word, {ep_counters.words}, recv_bufs, dispatch_counts, SEND
    )
    if (
        not block.can_go
        or is_nothing_dispatched(block)
        or has_too_few_rows(n_rows, n_rows_max, SEND, block)
    ):
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        return
    if block.is_last_to_start(n_warps - 2):
        ep_counters.set_combine_sent(next_generation(block.before.combine_sent))
        ep_counters.set_combine_received(
            next_generation(block.before.combine_received)
        )
        ep_counters.set_combine_of(block.before.dispatch_received)
    block.publish_earlier_reads(n_warps - 3)
    var rows = BytePointer(unsafe_from_address=Int(expert_rows))
    _send[combine_dtype, partial_dtype, hidden_size, group](
        rows,
        block,
        n_senders,
        prefetched,
    )
    if block_idx.x == 0 and block.warp_idx == n_warps - 1:
        block.prefetch_done_words[is_combine=False]()
    _receive[
        combine_dtype,
        partial_dtype,
        hidden_size,
        group,
        fused_shared_expert,
    ](
        BytePointer(unsafe_from_address=Int(output_tokens)),
        Int(n_tokens),
        rows,
        block.before.dispatch_received,
        block,
        n_warps,
        prefetched,
        block.warp_idx >= n_senders,
    )
    # AFTER: the result is complete; the next launch of this rank says so.
