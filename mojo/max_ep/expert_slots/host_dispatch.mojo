# SPDX-License-Identifier: Apache-2.0
"""Dispatch of `expert_slots` for CPU ranks.

Slots are in token order, so a result never depends on timing. After
`dispatch_async`: every peer has, in the slots of its pairs with this rank,
this generation's messages, and a count that announces them. After
`dispatch_wait`: this rank's rows stand by local expert, source rank, token,
choice, and every source knows that its messages have been read.
"""
from ..counters import EPLocalSyncCounters
from ..flags import (
    Deadline,
    Waiter,
    await_generation,
    count_of,
    next_generation,
    publish,
)
from ..cpu_copy import copy_bytes, for_each_chunk, should_stream
from ..layout import RegionLayout, n_experts_on_rank
from ..row_tables import RowTables
from ..token_format import BytePointer, TokenFormat
from ..transport import PeerBuffers
from .host_steps import (
    RowCursor,
    await_readers,
    flag_at,
    hash_src_info,
    message_flag,
    write_source_info,
)

comptime NO_SLOT = Int32(-1)
"""Slot of a choice that is not sent."""


struct SendPlan[n_experts: Int, top_k: Int](Movable):
    """Which slot each choice takes, and what could not be sent.

    Parameters:
        n_experts: Experts of the group.
        top_k: Experts of a token.
    """

    var slots: List[Int32]
    """Slot of each choice in its pair, `[n_tokens * top_k]`, or `NO_SLOT`."""
    var counts: List[Int]
    """Messages for each expert, `[n_experts]`."""
    var n_dropped: Int
    """Choices whose id is outside `[-1, n_experts)` or whose pair is full."""
    var first_dropped: Int
    """The first of them, as a choice; `-1` if there is none."""

    def __init__(
        out self,
        topk_ids: Pointer[Int32, ImmUntrackedOrigin],
        n_tokens: Int,
        capacity: Int,
    ):
        """Walks the choices in order and gives each the next slot of its pair.
        """
        self.slots = List[Int32](length=n_tokens * Self.top_k, fill=NO_SLOT)
        self.counts = List[Int](length=Self.n_experts, fill=0)
        self.n_dropped = 0
        self.first_dropped = -1
        for choice in range(n_tokens * Self.top_k):
            var expert_id = Int(topk_ids[unsafe_offset=choice])
            if expert_id == -1:
                continue
            if (
                expert_id < 0
                or expert_id >= Self.n_experts
                or self.counts[expert_id] == capacity
            ):
                if self.n_dropped == 0:
                    self.first_dropped = choice
                self.n_dropped += 1
                continue
            self.slots[choice] = Int32(self.counts[expert_id])
            self.counts[expert_id] += 1


def dispatch_async_host[
    token_fmt_type: TokenFormat,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    layout: RegionLayout,
    input_type: DType,
    input_scales_wrapper: Optional[
        def[dtype: DType](Int) capturing -> Scalar[dtype]
    ] = None,
    fused_shared_expert: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_tokens: Int,
    send_buf: BytePointer,
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Sends each token to its experts and publishes the message counts.

    Each token is encoded once, into its place of the send buffer, and copied
    from there to one slot for each of its choices. With input scales, which
    may differ from expert to expert, it is encoded for each choice.
    """
    comptime top_k = token_fmt_type.top_k
    comptime hidden_size = token_fmt_type.hidden_size
    comptime msg_bytes = token_fmt_type.msg_bytes
    comptime n_local_experts = layout.n_local_experts()
    comptime is_scaled = Bool(input_scales_wrapper)

    var my_rank = counters.my_rank()
    var generation = next_generation(counters.dispatch_sent())
    await_readers[n_experts, n_ranks](
        recv_counts[my_rank],
        layout.dispatch_done_offset(0),
        counters.dispatch_sent(),
        True,
        Deadline.after(counters.timeout_ms()),
        Waiter("dispatch_async", my_rank, 0, "word that it has read", -1),
    )
    comptime if fused_shared_expert:
        # A rank without experts is not among those readers, but reads its own
        # send buffer.
        if counters.dispatch_received() != counters.dispatch_sent():
            raise Error(
                "max_ep: dispatch_async on rank ",
                my_rank,
                " again, before its dispatch_wait: that still has to read the",
                " shared expert's tokens. Wait on every rank before sending",
                " again; after a run that raised, call",
                " EPCommInitializer.reset() (or restart the group).",
            )
    counters.set_n_tokens(generation, n_tokens)

    var plan = SendPlan[n_experts, top_k](
        topk_ids, n_tokens, max_tokens_per_rank
    )
    var slots = plan.slots.unsafe_ptr()
    var is_streaming = should_stream(n_tokens, top_k * msg_bytes)

    def send_tokens(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var token = input_tokens.unsafe_offset(token_idx * hidden_size)
            var staged = send_buf.unsafe_offset(
                layout.dispatch_staged_offset(token_idx)
            )
            comptime if not is_scaled:
                token_fmt_type.encode[input_type, False](staged, token, 1)
            for k in range(top_k):
                var choice = token_idx * top_k + k
                var slot = Int(slots[unsafe_offset=choice])
                if slot < 0:
                    continue
                var expert_id = Int(topk_ids[unsafe_offset=choice])
                var dst_rank, local_expert = divmod(expert_id, n_local_experts)
                # I1: only this rank writes the slots of pair (_, my_rank).
                var message = recv_bufs[dst_rank].unsafe_offset(
                    layout.dispatch_message_offset(
                        layout.pair(local_expert, my_rank), slot
                    )
                )
                comptime if is_scaled:
                    comptime scale_of = input_scales_wrapper.value()
                    token_fmt_type.encode[input_type, True](
                        message, token, scale_of[DType.float32](expert_id)
                    )
                else:
                    copy_bytes(
                        dest=message,
                        src=staged,
                        count=token_fmt_type.token_bytes,
                        is_streaming=is_streaming,
                    )
                write_source_info(message, msg_bytes, choice, generation)

    for_each_chunk(n_tokens, top_k * msg_bytes, send_tokens)

    # I2: a count is published after all messages of its pair. A rank without
    # tokens publishes zeros: its peers wait for every pair.
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
    # AFTER: this generation's messages and counts are with their receivers.

    raise_if_dropped(plan, topk_ids, n_tokens, counters)
    _ = plan^


@fieldwise_init
struct Arrived(TrivialRegisterPassable):
    """What has arrived in a generation."""

    var generation: UInt32
    """The generation."""
    var n_shared: Int
    """Rows of the shared expert."""
    var n_rows: Int
    """Rows of all."""

    @always_inline
    def n_routed(self) -> Int:
        """Counts the rows of the routed experts."""
        return self.n_rows - self.n_shared


def lay_out_rows[
    n_experts: Int,
    n_ranks: Int,
    layout: RegionLayout,
    is_padded: Bool,
    fused_shared_expert: Bool,
](
    tables: RowTables[layout, is_padded, fused_shared_expert],
    n_rows_max: Int,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises -> Arrived:
    """Waits for the counts of all pairs, and says where their rows go."""
    comptime n_local_experts = layout.n_local_experts()
    comptime n_pairs = n_local_experts * n_ranks

    var my_rank = counters.my_rank()
    var n_held = n_experts_on_rank(n_experts, n_ranks, my_rank)
    var generation = next_generation(counters.dispatch_received())
    var deadline = Deadline.after(counters.timeout_ms())
    var my_counts = recv_counts[my_rank]

    var n_shared = 0
    comptime if fused_shared_expert:
        if counters.dispatch_sent() != generation:
            raise Error(
                "max_ep: dispatch_wait on rank ",
                my_rank,
                " before its dispatch_async: the shared expert's tokens are",
                " not there. Send first.",
            )
        n_shared = counters.n_tokens(generation)

    var n_rows = n_shared
    var largest_pair = 0
    for local_expert in range(n_local_experts):
        var first_row = tables.first_row(local_expert, n_rows)
        var n_expert_rows = 0
        for src_rank in range(n_ranks):
            var pair = layout.pair(local_expert, src_rank)
            var count = 0
            if local_expert < n_held:
                count = await_generation(
                    flag_at(my_counts, layout.dispatch_count_offset(pair)),
                    generation,
                    deadline,
                    Waiter(
                        "dispatch_wait",
                        my_rank,
                        src_rank,
                        "count",
                        my_rank * n_local_experts + local_expert,
                    ),
                )
            counters.set_pair_rows(pair, first_row + n_expert_rows, count)
            tables.write_pair(pair, n_expert_rows, count)
            largest_pair = max(largest_pair, count)
            n_expert_rows += count
        tables.write_expert(local_expert, first_row, n_expert_rows)
        n_rows += n_expert_rows
    tables.write_ends(n_rows)
    var n_rows_needed = tables.n_rows_needed(n_rows)
    counters.set_pair_rows(n_pairs, n_rows_needed, largest_pair)
    if n_rows_needed > n_rows_max:
        raise Error(
            "max_ep: dispatch_wait on rank ",
            my_rank,
            ": ",
            n_rows_needed,
            " rows are needed and the outputs hold ",
            n_rows_max,
            "; declare them with EPConfig.n_output_rows rows.",
        )
    return Arrived(generation, n_shared, n_rows)


def place_own_tokens[
    token_fmt_type: TokenFormat, layout: RegionLayout
](
    rows: token_fmt_type.Rows,
    n_tokens: Int,
    src_info: Pointer[Int32, MutUntrackedOrigin],
    staged_tokens: BytePointer,
    is_streaming: Bool,
):
    """Puts this rank's own tokens into the rows of the shared expert."""

    def decode_own_tokens(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var staged = staged_tokens.unsafe_offset(
                layout.dispatch_staged_offset(token_idx)
            )
            token_fmt_type.decode(staged, rows, token_idx, is_streaming)
            src_info[unsafe_offset=2 * token_idx] = Int32(token_idx)
            src_info[unsafe_offset=2 * token_idx + 1] = -1

    for_each_chunk(n_tokens, token_fmt_type.msg_bytes, decode_own_tokens)


def finish_receiving[
    n_experts: Int, n_ranks: Int, layout: RegionLayout
](
    generation: UInt32,
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
):
    """Notes that a generation has been received, and tells every source."""
    comptime n_pairs = layout.pair(layout.n_local_experts(), 0)
    var my_rank = counters.my_rank()
    counters.set_dispatch_received(generation)
    counters.set_src_info_hash(hash_src_info(src_info, n_pairs, counters))
    for src_rank in range(n_ranks):
        publish(
            flag_at(
                recv_counts[src_rank], layout.dispatch_done_offset(my_rank)
            ),
            generation,
            0,
        )


def raise_if_dropped[
    n_experts: Int, top_k: Int
](
    plan: SendPlan[n_experts, top_k],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    n_tokens: Int,
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Raises if ids were dropped, after everything else was sent."""
    if plan.n_dropped > 0:
        counters.add_dropped(plan.n_dropped)
        var token_idx, k = divmod(plan.first_dropped, top_k)
        raise Error(
            "max_ep: dispatch_async on rank ",
            counters.my_rank(),
            ": ",
            plan.n_dropped,
            " of ",
            n_tokens * top_k,
            " topk_ids were dropped; the first is token ",
            token_idx,
            ", k ",
            k,
            ": expert ",
            topk_ids[unsafe_offset=plan.first_dropped],
            ". Ids must be in [-1, ",
            n_experts,
            ") and those of one token distinct. Mend the router's output, then",
            " call EPCommInitializer.reset() (or restart the group, where each",
            " rank is a process of its own).",
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
    send_buf: BytePointer,
    recv_buf: BytePointer,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Waits for all messages and turns them into rows sorted by expert."""
    var arrived = lay_out_rows[
        n_experts, n_ranks, layout, is_padded, fused_shared_expert
    ](tables, n_rows_max, recv_counts, counters)
    # AFTER: every message of this generation is visible to this thread and to
    # the workers it starts; `pair_row` tells where each pair's rows go, with
    # the shared expert's, if any, before the first.

    var is_streaming = should_stream(arrived.n_rows, token_fmt_type.msg_bytes)

    def decode_rows(begin: Int, end: Int) {imm}:
        var cursor = RowCursor.start()
        for i in range(begin, end):
            var slot = cursor.advance(i, counters)
            var row = counters.pair_row(cursor.pair) + slot
            var message = recv_buf.unsafe_offset(
                layout.dispatch_message_offset(cursor.pair, slot)
            )
            token_fmt_type.decode(message, rows, row, is_streaming)
            var token_idx, k = divmod(
                count_of(message_flag(message, token_fmt_type.msg_bytes)[]),
                token_fmt_type.top_k,
            )
            src_info[unsafe_offset=2 * row] = Int32(token_idx)
            src_info[unsafe_offset=2 * row + 1] = Int32(k)

    for_each_chunk(arrived.n_routed(), token_fmt_type.msg_bytes, decode_rows)

    comptime if fused_shared_expert:
        place_own_tokens[token_fmt_type, layout](
            rows, arrived.n_shared, src_info, send_buf, is_streaming
        )
    finish_receiving[n_experts, n_ranks, layout](
        arrived.generation, src_info, recv_counts, counters
    )
    # AFTER: rows are complete, and every source may overwrite its slots here.
