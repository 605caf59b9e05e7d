# SPDX-License-Identifier: Apache-2.0
"""Dispatch of CPU ranks, by expert and by rank.

By expert: a token is encoded into the send buffer and copied to one slot for each
of its choices. With input scales, which may differ from expert to expert, it is
encoded for each choice.

By rank: a token is encoded into this rank's own recv buffer and copied once to
each rank that has an expert of it. The token's index is its place. An entry for
each choice holds its expert and its position there. If combine returns sums, the
router weight follows the entry, and `dispatch_wait` records weights and rows for
combine. Where a token chooses ranks (in an all-gather every rank), it carries routing
metadata.

To ranks of other hosts all is put, from where it is staged: messages one by one, tokens
and entries together.

After `dispatch_async`: every peer has this generation's tokens, and counts that
announce them. After `dispatch_wait`: the rows are in the order of `plan.mojo`, the
same bits in both protocols, and every source may overwrite its tokens.
"""
from ..protocol.arguments import (
    DispatchedRows,
    GivenTokens,
    InputScales,
    n_choices_of,
    place_all_scales,
)
from ..protocol.counters import NO_ROW, row_elsewhere, Word
from ..protocol.entries import (
    entry_word,
    expert_of_entry,
    position_of_entry,
    value_of_word,
    value_word,
)
from ..protocol.flags import count_of, flag_at, flag_word, generation_of, message_flag
from ..protocol.layout import count_offset, Group
from ..protocol.peer_words import FLAG_BYTES
from ..protocol.router_ids import load_router_id
from ..protocol.token_format import BytePointer, TokenFormat
from ..protocol.transport import dispatch_put_offset
from ..work.cpu_copy import copy_bytes, for_each_chunk, should_stream
from .plan import hash_src_info, lay_out_rows, RowCursor, SendPlan
from .rank import CpuRank
from .relay import await_relayed, owner_of, relay_tokens


def cpu_dispatch_async[
    input_type: DType,
    group: Group,
    //,
    token_fmt_type: TokenFormat,
    input_scales: InputScales = None,
](given: GivenTokens[input_type], rank: CpuRank[group]) raises:
    comptime is_by_rank = group.is_by_rank()
    comptime n_copies = min(group.top_k, group.n_ranks if is_by_rank else group.top_k)
    comptime bytes_per_token = n_copies * token_fmt_type.msg_bytes
    var n_tokens = given.n_tokens
    rank.await_peers()
    rank.counters.n_tokens_of(rank.generation)[] = Int32(n_tokens)
    comptime if group.is_given():
        given.keep_ids(n_tokens * n_choices_of[token_fmt_type](), 0, 1)

    var plan = SendPlan[group](given.topk_ids, n_tokens)
    var is_streaming = should_stream(n_tokens, bytes_per_token)

    def send_some(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var token = given.tokens.unsafe_offset(
                token_idx * token_fmt_type.hidden_size
            )
            var staged = rank.staged_token(token_idx)
            comptime if not input_scales:
                token_fmt_type.encode[input_type, False](staged, token, 1)
            for k in range(group.top_k):
                var choice = group.choice(token_idx, k)
                var dst_rank = plan.rank_of(choice)
                if dst_rank < 0 or rank.is_masked(dst_rank):
                    continue
                # I1: only this rank writes the slots of pair (_, my_rank), and
                # the tokens of its number.
                var place: BytePointer
                comptime if is_by_rank:
                    _write_entry[token_fmt_type](given, plan, choice, rank)
                    if rank.near(dst_rank) == rank.my_rank or not plan.is_first_to_rank(
                        token_idx, k
                    ):
                        continue
                    var offset = group.token_offset(rank.my_rank, token_idx)
                    place = rank.recv_bufs[dst_rank].unsafe_offset(offset)
                else:
                    var offset = _message_offset(plan, choice, rank)
                    place = rank.recv_bufs[dst_rank].unsafe_offset(offset)
                    if rank.is_far(dst_rank):
                        place = _staged_message(choice, rank)
                comptime if input_scales:
                    comptime scale_of = input_scales.value()
                    token_fmt_type.encode[input_type, True](
                        place, token, scale_of[DType.float32](plan.expert_of(choice))
                    )
                else:
                    copy_bytes(
                        dest=place,
                        src=staged,
                        count=token_fmt_type.token_bytes,
                        is_streaming=is_streaming,
                    )
                comptime if not is_by_rank:
                    # A count announces it.
                    message_flag(place, token_fmt_type.msg_bytes)[] = flag_word(
                        rank.generation, choice
                    )

    for_each_chunk(n_tokens, bytes_per_token, send_some)
    comptime if group.is_linked():
        _put_tokens(plan, n_tokens, rank)
    elif group.spans_hosts():
        _put_messages(plan, n_tokens, rank)
    _publish_counts(plan, n_tokens, rank)
    # AFTER: this generation's tokens and counts are with their receivers.
    plan.raise_if_dropped(rank)
    _ = plan^


@always_inline
def _write_entry[
    input_type: DType, group: Group, //, token_fmt_type: TokenFormat
](
    given: GivenTokens[input_type],
    plan: SendPlan[group],
    choice: Int,
    rank: CpuRank[group],
):
    """Writes the entry of a choice, and its routing metadata."""
    comptime router_top_k = token_fmt_type.router_top_k
    var recv_buf = rank.recv_bufs[rank.near(plan.rank_of(choice))]
    # I1: only this rank writes the entries of its number.
    var entry = flag_at(recv_buf, group.entry_offset(rank.my_rank, choice))
    entry[] = entry_word(
        rank.generation, plan.expert_of(choice), Int(plan.positions[choice])
    )
    comptime if group.has_sums:
        var weight: Float32 = 1
        comptime if router_top_k == 0 and not group.late_weights:
            weight = given.router_weights[unsafe_offset=choice]
        entry[unsafe_offset=1] = value_word(rank.generation, weight)
    var token_idx = choice // group.top_k
    for j in range(router_top_k):
        var metadata = flag_at(
            recv_buf, group.metadata_offset(rank.my_rank, token_idx, j, router_top_k)
        )
        var i = token_idx * router_top_k + j
        metadata[] = value_word(
            rank.generation, load_router_id[group](given.topk_ids, i)
        )
        metadata[unsafe_offset=1] = value_word(
            rank.generation, given.router_weights[unsafe_offset=i]
        )


def _message_offset[
    group: Group, //
](plan: SendPlan[group], choice: Int, rank: CpuRank[group]) -> Int:
    var local_expert = plan.expert_of(choice) % group.n_local_experts()
    return group.dispatch_message_offset(
        group.pair(local_expert, rank.my_rank), Int(plan.positions[choice])
    )


def _staged_message[group: Group, //](choice: Int, rank: CpuRank[group]) -> BytePointer:
    return rank.put_buf().unsafe_offset(dispatch_put_offset(group, choice))


def _put_messages[
    group: Group, //
](plan: SendPlan[group], n_tokens: Int, rank: CpuRank[group]) raises:
    for choice in range(group.choice(n_tokens, 0)):
        var dst_rank = plan.rank_of(choice)
        if dst_rank >= 0 and rank.is_far(dst_rank):
            var offset = _message_offset(plan, choice, rank)
            rank.put(
                dst_rank,
                rank.recv_buf().unsafe_offset(offset),
                _staged_message(choice, rank),
                group.dispatch_msg_bytes,
            )


def _put_tokens[
    group: Group, //
](plan: SendPlan[group], n_tokens: Int, rank: CpuRank[group]) raises:
    """Puts entries and tokens to ranks of other hosts, from the places of this rank's own:
    all entries at once, and tokens that stand together. If ranks relay, one of each host
    gets all its tokens."""
    var own = rank.recv_buf()
    var per_host = rank.ranks_per_host()
    for dst_rank in range(group.n_ranks):
        if not rank.is_far(dst_rank) or group.n_experts_on(dst_rank) == 0:
            continue
        # I1: only this rank writes entries and tokens of its number.
        var entries = own.unsafe_offset(group.entry_offset(rank.my_rank, 0))
        var n_bytes = group.entry_offset(0, group.choice(n_tokens, 0))
        rank.put(dst_rank, entries, entries, n_bytes)
        comptime if group.relays:
            if rank.relay_to(rank.my_rank, dst_rank) != dst_rank:
                continue
        var first = 0
        for token_idx in range(n_tokens + 1):
            if token_idx < n_tokens:
                var is_put: Bool
                comptime if group.relays:
                    is_put = plan.goes_to_host(token_idx, dst_rank, per_host)
                else:
                    is_put = plan.goes_to(token_idx, dst_rank)
                if is_put:
                    continue
            var tokens = own.unsafe_offset(group.token_offset(rank.my_rank, first))
            n_bytes = (token_idx - first) * group.dispatch_msg_bytes
            rank.put(dst_rank, tokens, tokens, n_bytes)
            first = token_idx + 1


def _publish_counts[
    group: Group, //
](plan: SendPlan[group], n_tokens: Int, rank: CpuRank[group]) raises:
    # I2: numbers and counts are published after all they announce. A rank
    # without tokens publishes zeros: its peers wait for every pair.
    comptime if group.is_by_rank():
        var offset = group.dispatch_n_tokens_offset(rank.my_rank)
        for dst_rank in range(group.n_ranks):
            rank.publish(dst_rank, offset, n_tokens)
    rank.fence()
    for expert_id in range(group.n_experts):
        var dst_rank, local_expert = divmod(expert_id, group.n_local_experts())
        var offset = count_offset[group](group.pair(local_expert, rank.my_rank))
        comptime if group.is_linked():
            if rank.is_far(dst_rank):
                rank.my_flag(group.staged_count_offset(expert_id))[] = flag_word(
                    rank.generation, plan.counts[expert_id]
                )
                continue
        rank.publish(dst_rank, offset, plan.counts[expert_id])
    comptime if group.is_linked():
        var counts = rank.recv_counts[rank.my_rank]
        for dst_rank in range(group.n_ranks):
            if rank.is_far(dst_rank):
                var to = count_offset[group](group.pair(0, rank.my_rank))
                var staged = group.staged_count_offset(group.expert_id(dst_rank, 0))
                rank.put(
                    dst_rank,
                    counts.unsafe_offset(to),
                    counts.unsafe_offset(staged),
                    group.n_experts_on(dst_rank) * FLAG_BYTES,
                )
    rank.counters.set_generation(Word.DISPATCH_SENT, rank.generation)


@fieldwise_init
struct _Outputs[group: Group, Format: TokenFormat](TrivialRegisterPassable):
    var dispatched: DispatchedRows[Self.group, Self.Format]
    var is_streaming: Bool

    @always_inline
    def of_pair(self, pair: Int, rank: CpuRank[Self.group]) -> Self:
        var outputs = self
        var expert = pair // Self.group.n_ranks
        var first_row = rank.counters.pair_row(Self.group.pair(expert, 0))
        outputs.dispatched.rows = self.dispatched.rows.of_expert(expert, first_row)
        return outputs

    @always_inline
    def place(self, message: BytePointer, row: Int, token_idx: Int, k: Int):
        comptime row_bytes = Self.Format.row_bytes
        var rows = self.dispatched.rows
        copy_bytes(
            dest=rows.values().unsafe_offset(row * row_bytes),
            src=message,
            count=row_bytes,
            is_streaming=self.is_streaming,
        )
        place_all_scales[Self.Format](message, rows, row, 0, 1)
        self.dispatched.set_source(row, token_idx, k)


def cpu_dispatch_wait[
    group: Group, Format: TokenFormat, //
](given: DispatchedRows[group, Format], rank: CpuRank[group]) raises:
    """Waits for all tokens and puts each into the rows of its choices."""
    comptime msg_bytes = Format.msg_bytes
    var n_rows_max = given.n_rows_max
    var n_shared, n_rows = lay_out_rows(given.tables, n_rows_max, rank)
    # AFTER: every token of this generation is visible to this thread and to
    # the workers it starts; `pair_row` says where each pair's rows go, with
    # the shared expert's, if any, before the first.
    var outputs = _Outputs(given, should_stream(n_rows, msg_bytes))
    comptime if group.relays:
        relay_tokens(rank)
        await_relayed(rank)
    comptime if group.is_by_rank():
        _place_tokens(outputs, rank)
    else:
        _place_messages(outputs, n_rows - n_shared, rank)
    Format.end_metadata(given.rows, n_rows, n_rows_max, 0, 1)

    def place_own_tokens(begin: Int, end: Int) {imm}:
        for i in range(begin, end):
            outputs.place(rank.staged_token(i), i, i, -1)

    for_each_chunk(n_shared, msg_bytes, place_own_tokens)
    rank.counters.set_generation(Word.DISPATCH_RECEIVED, rank.generation)
    rank.counters.at(Word.SRC_INFO_HASH)[] = hash_src_info(
        given.src_info, rank.counters
    )
    rank.publish_done(group.dispatch_done_offset(0))
    # AFTER: rows are complete, and every source may overwrite its tokens here.


def _place_messages[
    token_fmt_type: TokenFormat, group: Group, //
](outputs: _Outputs[group, token_fmt_type], n_rows: Int, rank: CpuRank[group]):
    def decode_rows(begin: Int, end: Int) {imm}:
        var at = RowCursor()
        for i in range(begin, end):
            at.advance(i, rank.counters)
            var message = rank.recv_buf().unsafe_offset(
                group.dispatch_message_offset(at.pair, at.slot)
            )
            var flag = message_flag(message, token_fmt_type.msg_bytes)[]
            var token_idx, k = divmod(count_of(flag), group.top_k)
            outputs.of_pair(at.pair, rank).place(message, at.row, token_idx, k)

    for_each_chunk(n_rows, token_fmt_type.msg_bytes, decode_rows)


def _place_tokens[
    token_fmt_type: TokenFormat, group: Group, //
](outputs: _Outputs[group, token_fmt_type], rank: CpuRank[group]):
    """Puts each token into the rows that its entries name."""
    # A count that came says that this number came before it. A rank without
    # experts has awaited none, and has no rows.
    var n_tokens_of = List[Int](length=group.n_ranks, fill=0)
    if rank.n_experts() > 0:
        for src_rank in range(group.n_ranks):
            var offset = group.dispatch_n_tokens_offset(src_rank)
            n_tokens_of[src_rank] = rank.count_from(src_rank, offset)
    comptime if group.has_sums:
        for src_rank in range(group.n_ranks):
            var source = group.relative_rank(rank.my_rank, src_rank)
            rank.counters.received_tokens()[unsafe_offset=source] = Int32(
                n_tokens_of[src_rank]
            )

    def decode_tokens(begin: Int, end: Int) {imm}:
        for i in range(begin, end):
            var src_rank, token_idx = divmod(i, group.max_tokens_per_rank)
            if token_idx < n_tokens_of[src_rank]:
                for k in range(group.top_k):
                    _place_choice(outputs, src_rank, token_idx, k, rank)

    if rank.n_experts() > 0:
        for_each_chunk(group.expert_capacity(), token_fmt_type.msg_bytes, decode_tokens)


@always_inline
def _place_choice[
    token_fmt_type: TokenFormat, group: Group, //
](
    outputs: _Outputs[group, token_fmt_type],
    src_rank: Int,
    token_idx: Int,
    k: Int,
    rank: CpuRank[group],
):
    """Puts a token into the row of one of its choices, if that is here."""
    comptime router_top_k = token_fmt_type.router_top_k
    var recv_buf = rank.recv_buf()
    var choice = group.choice(token_idx, k)
    var entry = flag_at(recv_buf, group.entry_offset(src_rank, choice))
    # An older entry is of a choice that has no expert here this time.
    var is_here = generation_of(entry[]) == rank.generation
    comptime if group.is_linked():
        # What is staged for others, or was put together with what is for this rank.
        is_here = is_here and (
            expert_of_entry(entry[]) // group.n_local_experts() == rank.my_rank
        )
    var row = Int(NO_ROW)
    var pair = 0
    if is_here:
        var local_expert = expert_of_entry(entry[]) - rank.expert_id(0)
        pair = group.pair(local_expert, src_rank)
        comptime if group.drops_rows:
            is_here = position_of_entry(entry[]) < rank.counters.pair_count(pair)
    if is_here:
        row = rank.counters.pair_row(pair) + position_of_entry(entry[])
    comptime if group.relays:
        var owner = owner_of(src_rank, token_idx, k, rank)
        if rank.relays_for(src_rank) and owner >= 0 and rank.is_mate(owner):
            row = Int(row_elsewhere(owner))  # combine adds that rank's sum
    comptime if group.has_sums:
        var source = group.relative_rank(rank.my_rank, src_rank)
        rank.counters.received_rows(source)[unsafe_offset=choice] = Int32(row)
        if is_here:
            var weight = value_of_word[DType.float32](entry[unsafe_offset=1])
            rank.counters.received_weights(source)[unsafe_offset=choice] = weight
            token_fmt_type.place_weight(outputs.dispatched.rows, row, weight)
    if not is_here:
        return
    var token = recv_buf.unsafe_offset(group.token_offset(src_rank, token_idx))
    outputs.of_pair(pair, rank).place(token, row, token_idx, k)
    for j in range(router_top_k):
        var metadata = flag_at(
            recv_buf, group.metadata_offset(src_rank, token_idx, j, router_top_k)
        )
        token_fmt_type.place_metadata(
            outputs.dispatched.rows,
            row,
            j,
            value_of_word[DType.int32](metadata[]),
            value_of_word[DType.float32](metadata[unsafe_offset=1]),
        )
