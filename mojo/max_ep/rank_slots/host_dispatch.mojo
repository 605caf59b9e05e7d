# SPDX-License-Identifier: Apache-2.0
"""Dispatch of `rank_slots` for CPU ranks.

A token is encoded once, into this rank's own recv buffer, and copied from there
once to each rank that has an expert of it; its place is its own number, so no
slot is allocated. An entry for each choice says for which expert it is, and
which of the rows from this source it becomes. `gather` differs in that a token is
copied to every rank that has experts at all, so that nobody need know which:
`send_tokens` may do so before the router has decided.

After `dispatch_async`: every peer has this generation's tokens and entries, and
counts that announce them. After `dispatch_wait`: the rows stand as those of
`expert_slots`, bit for bit, and every source knows that its tokens have been
read. Combine is that of `expert_slots`, or, if it is reduced, that of
`host_combine.mojo`: then a choice's router weight travels beside its entry, and
`dispatch_wait` notes weights and rows for it.
"""
from ..counters import EPLocalSyncCounters, NO_ROW, source_from
from ..expert_slots.host_dispatch import (
    NO_SLOT,
    SendPlan,
    finish_receiving,
    lay_out_rows,
    place_own_tokens,
    raise_if_dropped,
)
from ..expert_slots.host_steps import await_readers, flag_at
from ..flags import (
    Deadline,
    Waiter,
    count_of,
    generation_of,
    next_generation,
    peek,
    publish,
)
from ..cpu_copy import copy_bytes, for_each_chunk, should_stream
from ..layout import ENTRY_BYTES, RegionLayout, n_experts_on_rank
from ..row_tables import RowTables
from ..token_format import BytePointer, TokenFormat
from ..transport import PeerBuffers
from .entries import (
    entry_word,
    expert_of_entry,
    id_of_word,
    id_word,
    position_of_entry,
    weight_of_word,
    weight_word,
)


def _await_places[
    n_experts: Int, n_ranks: Int, //, op: StaticString, layout: RegionLayout
](
    recv_counts: PeerBuffers[n_ranks], counters: EPLocalSyncCounters[n_experts]
) raises:
    """Waits until the places of this rank's tokens may be written again."""
    var my_rank = counters.my_rank()
    await_readers[n_experts, n_ranks](
        recv_counts[my_rank],
        layout.dispatch_done_offset(0),
        counters.dispatch_sent(),
        True,
        Deadline.after(counters.timeout_ms()),
        Waiter(op, my_rank, 0, "word that it has read", -1),
    )
    # A rank without experts is not among those readers, but its own tokens
    # stand where its dispatch_wait may still read them.
    if counters.dispatch_received() != counters.dispatch_sent():
        raise Error(
            "max_ep: ",
            op,
            " on rank ",
            my_rank,
            " again, before its dispatch_wait, which still has to read its own",
            (
                " tokens. Wait on every rank before sending again; after a run"
                " that"
            ),
            " raised, call EPCommInitializer.reset() (or restart the group).",
        )


def send_tokens_host[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    layout: RegionLayout,
    input_type: DType,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    n_tokens: Int,
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Sends tokens before the router has decided, with `gather`.

    Nothing is announced: `dispatch_async_host` does, with `tokens_are_sent`.
    """
    comptime assert (
        layout.sends_to_all()
    ), "which ranks get a token is not known"
    var my_rank = counters.my_rank()
    _await_places["send_tokens", layout](recv_counts, counters)
    var is_streaming = should_stream(
        n_tokens, n_ranks * token_fmt_type.msg_bytes
    )

    def send(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            _gather_token[token_fmt_type, n_experts, layout](
                input_tokens, token_idx, my_rank, recv_bufs, is_streaming
            )

    for_each_chunk(n_tokens, n_ranks * token_fmt_type.msg_bytes, send)
    counters.set_tokens_sent(n_tokens)
    # AFTER: the tokens are with their receivers, who do not know it yet.


def _gather_token[
    input_type: DType,
    n_ranks: Int,
    //,
    token_fmt_type: TokenFormat,
    n_experts: Int,
    layout: RegionLayout,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    token_idx: Int,
    my_rank: Int,
    recv_bufs: PeerBuffers[n_ranks],
    is_streaming: Bool,
):
    """Encodes a token, and copies it to every rank that has experts."""
    # I1: only this rank writes the tokens of its number.
    var offset = layout.token_offset(my_rank, token_idx)
    var staged = recv_bufs[my_rank].unsafe_offset(offset)
    token_fmt_type.encode[input_type, False](
        staged,
        input_tokens.unsafe_offset(token_idx * token_fmt_type.hidden_size),
        1,
    )
    for i in range(1, n_ranks):
        var dst_rank = (my_rank + i) % n_ranks
        if n_experts_on_rank(n_experts, n_ranks, dst_rank) > 0:
            copy_bytes(
                dest=recv_bufs[dst_rank].unsafe_offset(offset),
                src=staged,
                count=token_fmt_type.token_bytes,
                is_streaming=is_streaming,
            )


def dispatch_async_host[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    layout: RegionLayout,
    input_type: DType,
    fused_shared_expert: Bool = False,
    tokens_are_sent: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_tokens: Int,
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Sends each token to its ranks, and publishes the counts of their experts.
    """
    comptime top_k = token_fmt_type.top_k
    comptime hidden_size = token_fmt_type.hidden_size
    comptime msg_bytes = token_fmt_type.msg_bytes
    comptime n_local_experts = layout.n_local_experts()
    comptime n_copies = n_ranks if layout.sends_to_all() else min(
        top_k, n_ranks
    )

    var my_rank = counters.my_rank()
    var generation = next_generation(counters.dispatch_sent())
    _await_places["dispatch_async", layout](recv_counts, counters)
    comptime if layout.sends_to_all():
        var n_sent = counters.tokens_sent()
        comptime if tokens_are_sent:
            if n_sent != n_tokens:
                raise Error(
                    "max_ep: dispatch_async on rank ",
                    my_rank,
                    " of ",
                    n_tokens,
                    " tokens that have been sent: send_tokens has sent ",
                    "none" if n_sent < 0 else String(n_sent),
                    (
                        " since the last dispatch. Send these first, and call"
                        " EPCommInitializer.reset()."
                    ),
                )
        else:
            if n_sent >= 0:
                raise Error(
                    "max_ep: dispatch_async on rank ",
                    my_rank,
                    (
                        " of tokens that it sends itself, but send_tokens has"
                        " sent "
                    ),
                    n_sent,
                    (
                        " before. Dispatch those, with tokens_are_sent, and"
                        " call EPCommInitializer.reset()."
                    ),
                )
    counters.set_n_tokens(generation, n_tokens)
    comptime if layout.sends_to_all():
        counters.set_tokens_sent(-1)

    # Of an all-gather each token chooses all ranks: the router's choices do not
    # say where it goes, and travel with it.
    comptime n_carried = token_fmt_type.n_carried
    var everybody = List[Int32]()
    var ids = topk_ids
    comptime if n_carried > 0:
        for _ in range(n_tokens):
            for rank in range(n_ranks):
                everybody.append(Int32(rank))
        ids = Pointer[Int32, ImmUntrackedOrigin](
            unsafe_from_address=Int(everybody.unsafe_ptr())
        )
    var plan = SendPlan[n_experts, top_k](ids, n_tokens, max_tokens_per_rank)
    var positions = plan.slots.unsafe_ptr()
    var is_streaming = should_stream(n_tokens, n_copies * msg_bytes)

    def send_tokens(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            # I1: only this rank writes the tokens and entries of its number.
            var staged = recv_bufs[my_rank].unsafe_offset(
                layout.token_offset(my_rank, token_idx)
            )
            comptime if layout.sends_to_all():
                comptime if not tokens_are_sent:
                    _gather_token[token_fmt_type, n_experts, layout](
                        input_tokens,
                        token_idx,
                        my_rank,
                        recv_bufs,
                        is_streaming,
                    )
            else:
                token_fmt_type.encode[input_type, False](
                    staged,
                    input_tokens.unsafe_offset(token_idx * hidden_size),
                    1,
                )
            for k in range(top_k):
                var choice = token_idx * top_k + k
                var position = positions[unsafe_offset=choice]
                if position == NO_SLOT:
                    continue
                var expert_id = Int(ids[unsafe_offset=choice])
                var dst_rank = expert_id // n_local_experts
                var recv_buf = recv_bufs[dst_rank]
                var entry = layout.entry_offset(my_rank, choice)
                flag_at(recv_buf, entry)[] = entry_word(
                    generation, expert_id, Int(position)
                )
                comptime if layout.is_reduced():
                    var weight: Float32 = 1
                    comptime if n_carried == 0:
                        weight = router_weights[unsafe_offset=choice]
                    flag_at(recv_buf, entry + ENTRY_BYTES)[] = weight_word(
                        generation, weight
                    )
                comptime if n_carried > 0:
                    _send_carried[n_carried, layout](
                        topk_ids,
                        router_weights,
                        token_idx,
                        my_rank,
                        generation,
                        recv_buf,
                    )
                comptime if not layout.sends_to_all():
                    var is_first = True
                    for earlier in range(token_idx * top_k, choice):
                        if (
                            positions[unsafe_offset=earlier] != NO_SLOT
                            and Int(ids[unsafe_offset=earlier])
                            // n_local_experts
                            == dst_rank
                        ):
                            is_first = False
                    if is_first and dst_rank != my_rank:
                        copy_bytes(
                            dest=recv_buf.unsafe_offset(
                                layout.token_offset(my_rank, token_idx)
                            ),
                            src=staged,
                            count=token_fmt_type.token_bytes,
                            is_streaming=is_streaming,
                        )

    for_each_chunk(n_tokens, n_copies * msg_bytes, send_tokens)

    # I2: numbers and counts are published after all tokens and entries. A rank
    # without tokens publishes zeros: its peers wait for every pair.
    for dst_rank in range(n_ranks):
        publish(
            flag_at(
                recv_counts[dst_rank], layout.dispatch_n_tokens_offset(my_rank)
            ),
            generation,
            n_tokens,
        )
    for expert_id in range(n_experts):
        var dst_rank, local_expert = divmod(expert_id, n_local_experts)
        publish(
            flag_at(
                recv_counts[dst_rank],
                layout.dispatch_count_offset(
                    layout.pair(local_expert, my_rank)
                ),
            ),
            generation,
            plan.counts[expert_id],
        )
    counters.set_dispatch_sent(generation)
    # AFTER: this generation's tokens, entries and counts are with their
    # receivers.

    raise_if_dropped(plan, ids, n_tokens, counters)
    _ = plan^
    _ = everybody^


@always_inline
def _send_carried[
    n_carried: Int, layout: RegionLayout
](
    expert_ids: Pointer[Int32, ImmUntrackedOrigin],
    probs: Pointer[Float32, ImmUntrackedOrigin],
    token_idx: Int,
    my_rank: Int,
    generation: UInt32,
    recv_buf: BytePointer,
):
    """Writes the choices that a token carries to a rank; counts announce them.
    """
    for k in range(n_carried):
        # I1: only this rank writes what its tokens carry.
        var offset = layout.carried_choice_offset(
            my_rank, token_idx, k, n_carried
        )
        var place = token_idx * n_carried + k
        flag_at(recv_buf, offset)[] = id_word(
            generation, expert_ids[unsafe_offset=place]
        )
        flag_at(recv_buf, offset + ENTRY_BYTES)[] = weight_word(
            generation, probs[unsafe_offset=place]
        )


def dispatch_wait_host[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    layout: RegionLayout,
    is_padded: Bool,
    fused_shared_expert: Bool,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int,
    tables: RowTables[layout, is_padded, fused_shared_expert],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf: BytePointer,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Waits for all tokens and copies each to the rows of its choices."""
    comptime top_k = token_fmt_type.top_k
    comptime n_local_experts = layout.n_local_experts()
    var my_rank = counters.my_rank()
    var my_counts = recv_counts[my_rank]
    var arrived = lay_out_rows[
        n_experts, n_ranks, layout, is_padded, fused_shared_expert
    ](tables, n_rows_max, recv_counts, counters)
    # AFTER: every token and entry of this generation is visible to this thread
    # and to the workers it starts; `pair_row` tells where each pair's rows go,
    # with the shared expert's, if any, before the first.

    var is_streaming = should_stream(arrived.n_rows, token_fmt_type.msg_bytes)
    var first_expert = my_rank * n_local_experts
    var generation = arrived.generation

    # A count that came says that this number came before it. A rank without
    # experts has awaited none, and has no rows.
    var n_tokens_of = List[Int](length=n_ranks, fill=0)
    if n_experts_on_rank(n_experts, n_ranks, my_rank) > 0:
        for src_rank in range(n_ranks):
            n_tokens_of[src_rank] = count_of(
                peek(
                    flag_at(
                        my_counts, layout.dispatch_n_tokens_offset(src_rank)
                    )
                )
            )
    var n_tokens = n_tokens_of.unsafe_ptr()
    comptime if layout.is_reduced():
        var received = counters.received_tokens(layout)
        for src_rank in range(n_ranks):
            received[
                unsafe_offset=source_from(my_rank, src_rank, n_ranks)
            ] = Int32(n_tokens_of[src_rank])

    def decode_tokens(begin: Int, end: Int) {imm}:
        for i in range(begin, end):
            var src_rank, token_idx = divmod(i, max_tokens_per_rank)
            if token_idx >= n_tokens[unsafe_offset=src_rank]:
                continue
            var source = source_from(my_rank, src_rank, n_ranks)
            var token = recv_buf.unsafe_offset(
                layout.token_offset(src_rank, token_idx)
            )
            for k in range(top_k):
                var choice = layout.choice(token_idx, k)
                var offset = layout.entry_offset(src_rank, choice)
                var entry = flag_at(recv_buf, offset)[]
                # An entry of an older generation is of a choice that has no
                # expert here this time.
                if generation_of(entry) != generation:
                    comptime if layout.is_reduced():
                        counters.received_rows(layout, source)[
                            unsafe_offset=choice
                        ] = NO_ROW
                    continue
                var pair = layout.pair(
                    expert_of_entry(entry) - first_expert, src_rank
                )
                var row = counters.pair_row(pair) + position_of_entry(entry)
                token_fmt_type.decode(token, rows, row, is_streaming)
                src_info[unsafe_offset=2 * row] = Int32(token_idx)
                src_info[unsafe_offset=2 * row + 1] = Int32(k)
                comptime n_carried = token_fmt_type.n_carried
                for j in range(n_carried):
                    var carried = layout.carried_choice_offset(
                        src_rank, token_idx, j, n_carried
                    )
                    token_fmt_type.place_choice(
                        rows,
                        row,
                        j,
                        id_of_word(flag_at(recv_buf, carried)[]),
                        weight_of_word(
                            flag_at(recv_buf, carried + ENTRY_BYTES)[]
                        ),
                    )
                comptime if layout.is_reduced():
                    counters.received_rows(layout, source)[
                        unsafe_offset=choice
                    ] = Int32(row)
                    counters.received_weights(layout, source)[
                        unsafe_offset=choice
                    ] = weight_of_word(
                        flag_at(recv_buf, offset + ENTRY_BYTES)[]
                    )

    if n_experts_on_rank(n_experts, n_ranks, my_rank) > 0:
        for_each_chunk(
            n_ranks * max_tokens_per_rank,
            token_fmt_type.msg_bytes,
            decode_tokens,
        )
    _ = n_tokens_of^
    token_fmt_type.end_choices(rows, arrived.n_rows, n_rows_max, 0, 1)

    comptime if fused_shared_expert:
        place_own_tokens[token_fmt_type, layout](
            rows,
            arrived.n_shared,
            src_info,
            recv_buf.unsafe_offset(layout.staged_from_recv(my_rank)),
            is_streaming,
        )
    finish_receiving[n_experts, n_ranks, layout](
        generation, src_info, recv_counts, counters
    )
    # AFTER: rows are complete, and every source may overwrite its tokens here.
