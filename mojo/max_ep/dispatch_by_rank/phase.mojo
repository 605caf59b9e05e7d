# SPDX-License-Identifier: Apache-2.0
"""Dispatch of `rank_slots` for GPU ranks.

Each token goes once to each rank that has an expert of it; in an all-gather, to each
that has experts at all. An entry for each choice goes to every rank, and tells by itself of which generation it is, as do
counts and numbers of tokens: none of them waits for another store. Rows and
tables are those of `expert_slots`, bit for bit.

How a token announces itself depends on how many its source sends:

* *early* (at most `MAX_INLINE_TOKENS`): every 16 bytes are their own flag. The
  receiver puts `SENTINEL` back.
* more: each of `N_CHUNKS` parts has a flag, published after it.

Who does what in a block is in `dispatch_roles.mojo`; entries and counts are
written by `index.mojo` and read by `row_counts.mojo`; tokens are sent by
`dispatch_send.mojo` and received by `dispatch_receive.mojo`.

After the sending half: every rank gets entries, counts and tokens. After the
receiving half: rows stand as those of `expert_slots`; sources hear of it from
the next launch (`publish_earlier_reads`), or from the end of this one if ranks
share a GPU.
"""
from max.gpu import (
    block_idx,
    grid_dim,
    MAX_THREADS_PER_BLOCK_METADATA,
    syncwarp,
    thread_idx,
    warp_id,
    WARP_SIZE,
)
from std.utils import StaticTuple

from ..counters import EPLocalSyncCounters, NO_EXPERT
from ..device.block import (
    await_launch_before,
    Block,
    header_word,
    is_last_block,
)
from ..device.shared import share_addresses, shared_ints
from ..dispatch_by_expert.phase import dispatch_group_of
from ..flags import (
    FlagPointer,
    load_acquire_block,
    next_generation,
    store_release_block,
)
from ..layout import Group, MESSAGE_ALIGN
from ..row_tables import RowTables
from ..token_format import BytePointer, TokenFormat
from .counts import lay_out_rows, n_pair_rows, read_numbers
from .index import (
    Choices,
    index_choices,
    Item,
    LaneIds,
    load_ids,
    publish_n_tokens,
    send_metadata,
    share_choices,
)
from .receive import receive_tokens
from .roles import (
    COUNTING_WARP,
    DONE_WARP,
    FIRST_SENDER,
    n_async_send_warps,
    N_CONTROL,
    N_INDEX_WARPS,
    n_send_warps,
    N_WARPS_MIN,
    NO_NUMBERS,
    NUMBERS_WARP,
    RECEIVE,
    SEND,
    TOKENS_READY,
)
from .send import FirstChunk, InlineElements, Receivers, send_by_number

# ------------------------------------------------------------ the sending half


@fieldwise_init
struct _Prefetched(TrivialRegisterPassable):
    """What a warp has begun with before the launch has read its header."""

    var part: FirstChunk
    """A sender's first part."""
    var id: Int32
    """From `FirstChunk.load`."""
    var item: Item
    """The first item of an index warp, if lanes hold the ids."""


@always_inline
def _prefetch[
    input_type: DType,
    group: Group,
    token_fmt_type: TokenFormat,
    n_warps: Int,
](
    mut elements: InlineElements[input_type, token_fmt_type],
    mut lane_ids: LaneIds,
    part: FirstChunk,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
) -> _Prefetched:
    """Begins with what depends on the arguments alone, if tokens are few."""
    var id = part.load[group, token_fmt_type](elements, tokens, choices)
    var item = Item.none()
    var indexer = Int(warp_id()) - (n_warps - N_INDEX_WARPS)
    if indexer >= 0 and choices.are_in_lanes():
        load_ids(lane_ids, choices)
        item = Item.of[group](
            lane_ids,
            choices,
            Int(block_idx.x) + indexer * Int(grid_dim.x),
        )
    return _Prefetched(part, id, item)


@always_inline
def _send[
    input_type: DType,
    group: Group,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
    n_warps: Int,
](
    mut elements: InlineElements[input_type, token_fmt_type],
    prefetched: _Prefetched,
    receivers: Receivers,
    lane_ids: LaneIds,
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices[...],
    n_tokens: Int,
    block: Block[group],
    n_senders: Int,
):
    """Deals the sending half to the warps of a block."""
    var indexer = block.warp_idx - (n_warps - N_INDEX_WARPS)
    if indexer >= 0:
        index_choices[group](
            choices,
            block,
            indexer,
            lane_ids,
            prefetched.item,
        )
        comptime if token_fmt_type.router_top_k > 0:
            send_metadata[group, token_fmt_type.router_top_k](
                choices, n_tokens, block, indexer
            )
    elif block.warp_idx == NUMBERS_WARP:
        if block_idx.x == 0:
            publish_n_tokens[group](n_tokens, block)
        return
    var sender = block.warp_idx - FIRST_SENDER
    if sender >= n_senders:
        return
    send_by_number[
        group,
        token_fmt_type,
        fused_shared_expert,
        has_input,
    ](
        elements,
        prefetched.part,
        receivers,
        tokens,
        choices,
        n_tokens,
        block,
        sender,
        n_senders,
    )


# ---------------------------------------------------------- the receiving half


@always_inline
def _receive[
    num_threads: Int,
    group: Group,
    token_fmt_type: TokenFormat,
    has_input: Bool,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int,
    tables: RowTables[group, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    own_tokens: UInt64,
    n_own_tokens: Int,
    block: Block[group],
):
    """Has a warp of a block take its part in the receiving half."""
    comptime n_warps = num_threads // WARP_SIZE
    comptime fused_shared_expert = tables.fused_shared_expert
    var pair_rows = shared_ints[n_pair_rows[group](), MESSAGE_ALIGN]()
    var sums = shared_ints[N_INDEX_WARPS]()
    var largest_of = shared_ints[N_INDEX_WARPS]()
    var n_tokens_of = shared_ints[group.n_ranks + 1]()
    var control = block.control
    var generation = next_generation(block.before.dispatch_received)
    var indexer = block.warp_idx - (n_warps - N_INDEX_WARPS)
    if indexer >= 0:
        var n_shared = n_own_tokens if fused_shared_expert else 0
        lay_out_rows[group](
            pair_rows,
            sums,
            largest_of,
            tables,
            n_shared,
            n_rows_max,
            block,
            generation,
            indexer,
        )
    elif block.warp_idx == NUMBERS_WARP:
        var are_there = read_numbers[group](n_tokens_of, block, generation)
        if not are_there:
            block.counters.set_broken()
        syncwarp()
        if block.lane == 0:
            store_release_block(
                control.unsafe_offset(TOKENS_READY),
                1 if are_there else NO_NUMBERS,
            )
        comptime if token_fmt_type.router_top_k > 0:
            # Each rank gets every token.
            var n_rows = 0
            if are_there:
                for src_rank in range(group.n_ranks):
                    n_rows += Int(n_tokens_of[unsafe_offset=src_rank])
            token_fmt_type.end_metadata(
                rows,
                n_rows,
                n_rows_max,
                Int(block_idx.x) * WARP_SIZE + block.lane,
                Int(grid_dim.x) * WARP_SIZE,
            )
    while load_acquire_block(control.unsafe_offset(TOKENS_READY)) == 0:
        pass
    syncwarp()
    if load_acquire_block(control.unsafe_offset(TOKENS_READY)) == NO_NUMBERS:
        return
    comptime n_inline = group.n_inline_tokens()
    var are_all_inline = (
        Int(n_tokens_of[unsafe_offset=group.n_ranks]) <= n_inline
    )
    if are_all_inline:
        receive_tokens[
            n_warps,
            group,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            True,
        ](
            rows,
            tables,
            src_info,
            own_tokens,
            pair_rows,
            n_tokens_of,
            block,
            generation,
        )
        return
    comptime if group.max_tokens_per_rank > n_inline:
        receive_tokens[
            n_warps,
            group,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            False,
        ](
            rows,
            tables,
            src_info,
            own_tokens,
            pair_rows,
            n_tokens_of,
            block,
            generation,
        )


# ------------------------------------------------------------------ the kernels


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def dispatch_async_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    fused_shared_expert: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends each token to its ranks; returns without waiting for receivers.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: Any but `EXPERT_SLOTS`.
        fused_shared_expert: Whether this rank receives all of its tokens.

    Args:
        input_tokens: `[n_tokens][hidden_size]`, rows aligned to 16 bytes.
        topk_ids: `[n_tokens][top_k]`, in `[-1, n_experts)`; `-1`: no expert.
        router_weights: `[n_tokens][top_k]`; read by a reduced protocol.
        n_tokens: In `[0, max_tokens_per_rank]`.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """
    comptime group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    var n_senders = n_async_send_warps[group](
        Int(n_tokens) <= group.n_inline_tokens(), n_warps
    )
    var first_chunk = FirstChunk.of[group, token_fmt_type](
        Int(n_tokens), Int(warp_id()) - FIRST_SENDER, n_senders
    )
    await_launch_before()
    var word = header_word(ep_counters)
    var choices = Choices[n_ranks if token_fmt_type.router_top_k > 0 else 0].of[
        group
    ](topk_ids, router_weights, Int(n_tokens))
    var elements = InlineElements[input_type, token_fmt_type](fill=0)
    var lane_ids = LaneIds(fill=NO_EXPERT)
    var prefetched = _prefetch[input_type, group, token_fmt_type, n_warps](
        elements, lane_ids, first_chunk, input_tokens, choices
    )
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    share_choices[num_threads, group](choices)
    var receivers = first_chunk.receivers[group, fused_shared_expert, False](
        prefetched.id, word
    )
    var block = Block[group].begin[N_CONTROL](
        word, {ep_counters.words}, recv_bufs, counts, SEND
    )
    if not block.can_go:
        return
    if block.is_last_to_start(COUNTING_WARP):
        var generation = next_generation(block.before.dispatch_sent)
        ep_counters.set_n_tokens(generation, Int(n_tokens))
        ep_counters.set_dispatch_sent(generation)
    block.publish_earlier_reads(DONE_WARP)
    _send[
        input_type,
        group,
        token_fmt_type,
        fused_shared_expert,
        False,
        n_warps,
    ](
        elements,
        prefetched,
        receivers,
        lane_ids,
        input_tokens,
        choices,
        Int(n_tokens),
        block,
        n_senders,
    )
    # AFTER: this generation's entries, counts and tokens are on their way.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def dispatch_wait_kernel[
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Schedule the tokens into rows sorted by expert, as they arrive.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: Any but `EXPERT_SLOTS`.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.
        shares_gpu: Whether other ranks may run on this rank's GPU. If so, this
            launch tells at its end what it has read: the next launch of this
            rank, which would tell otherwise, may be queued behind theirs.

    Args:
        rows: The output tensors, `n_rows_max` rows.
        n_rows_max: Rows there is room for.
        tables: The output tensors that say which row is whose.
        src_info: `[n_rows_max][2]`: token on its source rank, k; for the shared
            expert token, -1.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.
    """
    comptime group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var block = Block[group].begin[N_CONTROL](
        word, {ep_counters.words}, recv_bufs, counts, RECEIVE
    )
    if not block.can_go:
        if block_idx.x == 0:
            tables.write_no_rows(Int(thread_idx.x), num_threads)
            token_fmt_type.end_metadata(
                rows, 0, Int(n_rows_max), Int(thread_idx.x), num_threads
            )
        return
    # Un-reduced, the next launch is a combine that tells nobody.
    comptime publishes_at_end = shares_gpu or not group.has_sums()
    var generation = next_generation(block.before.dispatch_received)
    comptime if not publishes_at_end:
        if block.is_last_to_start(COUNTING_WARP):
            ep_counters.set_dispatch_received(generation)
        if block_idx.x == 0 and block.warp_idx == DONE_WARP:
            block.prefetch_done_words[is_combine=True]()
    _receive[
        num_threads,
        group,
        token_fmt_type,
        False,
    ](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        0,
        block.before.n_tokens(generation),
        block,
    )
    comptime if publishes_at_end:
        if not is_last_block(ep_counters):
            return
        if block.lane == 0:
            ep_counters.set_dispatch_received(generation)
        block.publish_reads(generation, block.before.combine_received)
    # AFTER: rows are complete; every source may overwrite its tokens here, once
    # it is told.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def dispatch_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_group_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends and receives in one launch; all ranks must run at the same time.

    Launch: a grid whose blocks are all resident at once,
    `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: Any but `EXPERT_SLOTS`.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.

    Args:
        input_tokens: As in `dispatch_async_kernel`.
        topk_ids: Likewise.
        router_weights: Likewise.
        n_tokens: Likewise.
        rows: As in `dispatch_wait_kernel`.
        n_rows_max: Likewise.
        tables: Likewise.
        src_info: Likewise.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.
    """
    comptime group = dispatch_group_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime has_input = token_fmt_type.is_identity[input_type]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    var n_senders = n_send_warps(
        Int(n_tokens) <= group.n_inline_tokens(), n_warps
    )
    var first_chunk = FirstChunk.of[group, token_fmt_type](
        Int(n_tokens), Int(warp_id()) - FIRST_SENDER, n_senders
    )
    await_launch_before()
    var word = header_word(ep_counters)
    var choices = Choices[n_ranks if token_fmt_type.router_top_k > 0 else 0].of[
        group
    ](topk_ids, router_weights, Int(n_tokens))
    var elements = InlineElements[input_type, token_fmt_type](fill=0)
    var lane_ids = LaneIds(fill=NO_EXPERT)
    var prefetched = _prefetch[input_type, group, token_fmt_type, n_warps](
        elements, lane_ids, first_chunk, input_tokens, choices
    )
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    share_choices[num_threads, group](choices)
    var receivers = first_chunk.receivers[
        group, fused_shared_expert, has_input
    ](prefetched.id, word)
    var block = Block[group].begin[N_CONTROL](
        word, {ep_counters.words}, recv_bufs, counts, SEND
    )
    if not block.can_go:
        if block_idx.x == 0:
            tables.write_no_rows(Int(thread_idx.x), num_threads)
            token_fmt_type.end_metadata(
                rows, 0, Int(n_rows_max), Int(thread_idx.x), num_threads
            )
        return
    if block.is_last_to_start(COUNTING_WARP):
        var generation = next_generation(block.before.dispatch_sent)
        ep_counters.set_n_tokens(generation, Int(n_tokens))
        ep_counters.set_dispatch_sent(generation)
        ep_counters.set_dispatch_received(
            next_generation(block.before.dispatch_received)
        )
    block.publish_earlier_reads(DONE_WARP)
    _send[
        input_type,
        group,
        token_fmt_type,
        fused_shared_expert,
        has_input,
        n_warps,
    ](
        elements,
        prefetched,
        receivers,
        lane_ids,
        input_tokens,
        choices,
        Int(n_tokens),
        block,
        n_senders,
    )
    comptime if group.has_sums():
        if block_idx.x == 0 and block.warp_idx == DONE_WARP:
            block.prefetch_done_words[is_combine=True]()
    _receive[num_threads, group, token_fmt_type, has_input](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        UInt64(Int(input_tokens)),
        Int(n_tokens),
        block,
    )
    # AFTER: rows are complete; the next launch of this rank says so.
