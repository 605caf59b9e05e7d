# SPDX-License-Identifier: Apache-2.0
"""Combine of CPU ranks, of rows and of sums; docs/formats.md has the order of additions.

Rows: every row returns to the place of its choice, `[token][k]`, on its source rank.
Sums: each owner (a rank that holds experts of the token) sends one sum of its rows.
`dispatch_wait` has recorded the rows and weights. Choices without a row (id `-1`) are
skipped. Rows of the shared expert, and a rank's own sum, are not sent.

After `combine_async`: all rows or sums have reached their sources, and counts
announce them. After `combine_wait`: the result is complete, and every owner may
overwrite what it sent.
"""
from std.sys import size_of

from ..formats.quantized_sums import QuantizedSums
from ..protocol.arguments import CombinedTokens, GivenRows
from ..protocol.counters import Word
from ..protocol.entries import value_word
from ..protocol.failures import Failure
from ..protocol.flags import (
    count_of,
    flag_at,
    flag_word,
    generation_of,
    message_flag,
    next_generation,
    publish,
    store_relaxed_sys,
)
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import ENTRY_BYTES, Group, MESSAGE_ALIGN
from ..protocol.token_format import BytePointer, LocalRows
from ..protocol.transport import combine_put_offset
from ..work.cpu_copy import copy_bytes, for_each_chunk, should_stream
from .plan import hash_src_info, n_rows_of_pairs, RowCursor
from .rank import CpuRank
from .relay import add_for_hosts
from .terms import columns_at_once, columns_of, own_terms, row_at, Terms


def cpu_combine_async[
    group: Group, //, dtype: DType, partial_dtype: DType
](given: GivenRows, combined: CombinedTokens[dtype], rank: CpuRank[group]) raises:
    _check_rows(given.rows.n_rows, given.src_info, rank)
    rank.await_peers()
    comptime if group.late_weights:
        _check_n_tokens(combined.n_tokens, Word.DISPATCH_RECEIVED, rank)
        _publish_weights(combined.router_weights, combined.n_tokens, rank)
        rank.await_peers(what_is_sent=True)
        _store_own_sums(given.rows, combined, rank)
    comptime if group.has_sums:
        _send_sums[dtype, partial_dtype](given.rows, combined, rank)
        comptime if group.relays:
            add_for_hosts[dtype, partial_dtype](given.rows, combined, rank)
    else:
        _send_rows[dtype](given.rows, given.src_info, rank)
    comptime if group.spans_hosts():
        _put_staged(rank)
    # I2: counts after rows; zeros too, every source waits for every expert.
    for local_expert in range(rank.n_experts()):
        var offset = group.combine_count_offset(rank.expert_id(local_expert))
        for src_rank in range(group.n_ranks):
            var count = rank.counters.pair_count(group.pair(local_expert, src_rank))
            rank.publish(src_rank, offset, count)
    rank.counters.set_generation(Word.COMBINE_SENT, rank.generation)
    rank.counters.set_generation(
        Word.COMBINE_OF, rank.counters.generation(Word.DISPATCH_RECEIVED)
    )
    # AFTER: this generation's rows or sums are with their sources.


def _publish_weights[
    group: Group, //
](weights: ImmPointer[Float32], n_tokens: Int, rank: CpuRank[group]) raises:
    """Publishes the weights of all choices to every rank, and 0 for those of tokens that
    there are not: each word is awaited. To other hosts all go in one put."""
    for choice in range(group.n_choices()):
        var weight: Float32 = 0
        if choice < group.choice(n_tokens, 0):
            weight = weights[unsafe_offset=choice]
        var offset = group.late_weight_offset(rank.my_rank, choice)
        for dst_rank in range(group.n_ranks):
            if rank.is_far(dst_rank):
                continue
            # I1: only this rank writes the weights of its choices.
            store_relaxed_sys(
                flag_at(rank.recv_bufs[dst_rank], offset),
                rank.generation,
                count_of(value_word(rank.generation, weight)),
            )
    comptime if group.is_linked():
        var own = rank.recv_buf().unsafe_offset(
            group.late_weight_offset(rank.my_rank, 0)
        )
        for dst_rank in range(group.n_ranks):
            if rank.is_far(dst_rank):
                rank.put(dst_rank, own, own, group.n_choices() * ENTRY_BYTES)


def _check_rows[
    group: Group, //
](n_rows_max: Int, src_info: ImmPointer[Int32], rank: CpuRank[group]) raises:
    """Checks, before anything is sent, that `src_info` is the last dispatch's."""
    var counters = rank.counters
    if counters.generation(Word.DISPATCH_RECEIVED) == 0:
        raise rank.refusal(Failure.NOTHING_DISPATCHED)
    var end = counters.pair_row(group.n_pairs())
    if end > n_rows_max:
        raise rank.refusal(Failure.TOO_MANY_ROWS, 0, end, n_rows_max)
    var digest = hash_src_info(src_info, counters)
    var at = RowCursor()
    for i in range(n_rows_of_pairs(counters)):
        at.advance(i, counters)
        var token_idx = Int(src_info[unsafe_offset=2 * at.row])
        var k = Int(src_info[unsafe_offset=2 * at.row + 1])
        if (
            digest != counters.at(Word.SRC_INFO_HASH)[]
            or not 0 <= token_idx < group.max_tokens_per_rank
            or not 0 <= k < group.top_k
        ):
            raise rank.refusal(Failure.BAD_SOURCE, at.row, token_idx, k)


def _send_rows[
    group: Group, //, dtype: DType
](expert_rows: LocalRows, src_info: ImmPointer[Int32], rank: CpuRank[group]):
    comptime msg_bytes = group.combine_msg_bytes
    var n_rows = n_rows_of_pairs(rank.counters)
    var is_streaming = should_stream(n_rows, msg_bytes)

    def send_rows(begin: Int, end: Int) {imm}:
        var at = RowCursor()
        for i in range(begin, end):
            at.advance(i, rank.counters)
            var token_idx = Int(src_info[unsafe_offset=2 * at.row])
            var k = Int(src_info[unsafe_offset=2 * at.row + 1])
            # I4: a choice has one expert, so one writer.
            var src_rank = at.pair % group.n_ranks
            if rank.is_masked(src_rank):
                continue
            var offset = group.combine_message_offset(token_idx, k, rank.my_rank)
            var message = _place_of(src_rank, offset, group.choice(token_idx, k), rank)
            copy_bytes(
                dest=message,
                src=row_at[group, dtype](expert_rows, at.row),
                count=group.hidden_size * size_of[Scalar[dtype]](),
                is_streaming=is_streaming,
            )
            message_flag(message, msg_bytes)[] = flag_word(
                rank.generation, group.choice(token_idx, k)
            )

    for_each_chunk(n_rows, msg_bytes, send_rows)


def _send_sums[
    group: Group, //, dtype: DType, partial_dtype: DType
](expert_rows: LocalRows, combined: CombinedTokens[dtype], rank: CpuRank[group]):
    """Sends one sum for each token of a peer that has rows here."""
    comptime msg_bytes = group.combine_msg_bytes
    var n_tokens_of = rank.counters.received_tokens()
    var n_tokens = 0
    for source in range(group.n_ranks):
        n_tokens += Int(n_tokens_of[unsafe_offset=source])
    comptime width = columns_at_once[group.hidden_size]
    comptime is_quantized = group.partial_block > 0
    comptime sum_dtype = DType.float32 if is_quantized else partial_dtype
    # A flag orders no streaming store.
    comptime can_stream = not (is_quantized or group.relays)
    var is_streaming = can_stream and should_stream(n_tokens, msg_bytes)

    def send_sums(begin: Int, end: Int) {imm}:
        var before_quantized = List[Float32](
            length=group.hidden_size if is_quantized else 0, fill=0
        )
        var source = 0
        var first = 0
        for i in range(begin, end):
            while first + Int(n_tokens_of[unsafe_offset=source]) <= i:
                first += Int(n_tokens_of[unsafe_offset=source])
                source += 1
            var terms = own_terms[dtype](
                expert_rows, combined.router_weights, source, i - first, rank
            )
            # Source 0 is this rank: it sends itself nothing.
            if source == 0 or terms.n == 0:
                continue
            # I4: only this rank writes the sums of its number.
            var src_rank = group.rank_of_relative(rank.my_rank, source)
            if rank.is_masked(src_rank) or rank.relays_for(src_rank):
                continue
            var offset = group.partial_offset(rank.my_rank, i - first)
            var message = _place_of(src_rank, offset, i - first, rank)
            var sums = message.unsafe_bitcast[Scalar[sum_dtype]]()
            comptime if is_quantized:
                sums = type_of(sums)(
                    unsafe_from_address=Int(before_quantized.unsafe_ptr())
                )

            for column in range(0, group.hidden_size, width):
                var sum = terms.add_to[width](0, column).cast[sum_dtype]()
                if is_streaming:
                    sums.unsafe_store[alignment=MESSAGE_ALIGN, non_temporal=True](
                        column, sum
                    )
                else:
                    sums.unsafe_store(column, sum)
            comptime if is_quantized:
                QuantizedSums[group.partial_block, group.hidden_size].encode(
                    message, before_quantized
                )
            var flag = message_flag(message, msg_bytes)
            comptime if group.relays:
                # Another rank of this host may await it.
                publish(flag, rank.generation, terms.n)
            else:
                flag[] = flag_word(rank.generation, terms.n)

    for_each_chunk(n_tokens, 2 * msg_bytes, send_sums)


def _store_own_sums[
    group: Group, //, dtype: DType
](expert_rows: LocalRows, combined: CombinedTokens[dtype], rank: CpuRank[group]):
    """Puts this rank's sums into the result, until others are added: its rows may change
    before that."""
    comptime width = columns_at_once[group.hidden_size]

    def store_sums(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var terms = own_terms[dtype](
                expert_rows, combined.router_weights, 0, token_idx, rank
            )
            for column in range(0, group.hidden_size, width):
                combined.tokens.unsafe_store(
                    token_idx * group.hidden_size + column,
                    terms.add_to[width](0, column).cast[dtype](),
                )

    for_each_chunk(combined.n_tokens, group.combine_msg_bytes, store_sums)


def _place_of[
    group: Group, //
](src_rank: Int, offset: Int, i: Int, rank: CpuRank[group]) -> BytePointer:
    """Locates where a row or a sum is written: at the source, or if that is far, where
    the `i`-th of its rows or sums is staged."""
    comptime if group.relays:
        if rank.is_far(src_rank):
            var through = rank.relay_to(src_rank, rank.my_rank)
            return rank.recv_bufs[through].unsafe_offset(
                group.gathered_partial_offset(
                    src_rank, rank.my_rank, i, rank.ranks_per_host()
                )
            )
    elif group.spans_hosts():
        if rank.is_far(src_rank):
            return _staged(src_rank, rank).unsafe_offset(i * group.combine_msg_bytes)
    return rank.recv_bufs[src_rank].unsafe_offset(offset)


def _staged[group: Group, //](src_rank: Int, rank: CpuRank[group]) -> BytePointer:
    """Locates the first of the rows or sums that wait to be put to a source."""
    comptime if group.has_sums:
        return rank.recv_buf().unsafe_offset(group.staged_partial_offset(src_rank, 0))
    elif group.is_linked():
        return rank.recv_buf().unsafe_offset(group.staged_row_offset(src_rank, 0, 0))
    else:
        return rank.put_buf().unsafe_offset(combine_put_offset(group, src_rank, 0))


def _put_staged[group: Group, //](rank: CpuRank[group]) raises:
    """Puts what is staged of this generation to the sources on other hosts: rows or sums
    that stand together at once."""
    comptime msg_bytes = group.combine_msg_bytes
    comptime n_places = group.max_tokens_per_rank * (
        1 if group.has_sums else group.top_k
    )
    var own = rank.recv_buf()
    for src_rank in range(group.n_ranks):
        if not rank.is_far(src_rank):
            continue
        comptime if group.relays:
            if not rank.relays_for(src_rank):
                continue
        # I4: the sums of a rank have one writer, and the row of a choice has.
        var to = group.combine_message_offset(0, 0, rank.my_rank)
        comptime if group.has_sums:
            to = group.partial_offset(rank.my_rank, 0)
        var staged = _staged(src_rank, rank)
        var first = 0
        for i in range(n_places + 1):
            var message = staged.unsafe_offset(i * msg_bytes)
            if (
                i < n_places
                and generation_of(message_flag(message, msg_bytes)[]) == rank.generation
            ):
                continue
            rank.put(
                src_rank,
                own.unsafe_offset(to + first * msg_bytes),
                staged.unsafe_offset(first * msg_bytes),
                (i - first) * msg_bytes,
            )
            first = i + 1
    rank.fence()


def cpu_combine_wait[
    dtype: DType, group: Group, //, partial_dtype: DType
](combined: CombinedTokens[dtype], expert_rows: LocalRows, rank: CpuRank[group]) raises:
    var n_tokens = combined.n_tokens
    comptime width = columns_at_once[group.hidden_size]
    comptime has_sums = group.has_sums
    comptime sent_dtype = partial_dtype if has_sums else dtype
    comptime n_places = group.n_ranks if has_sums else group.top_k
    # If ranks mask, each owner has a place for the row of a choice.
    comptime n_owners = group.n_ranks if group.masks and not has_sums else 1
    comptime bytes_per_token = min(group.top_k, n_places) * group.combine_msg_bytes
    _check_answered(n_tokens, expert_rows.n_rows, rank)
    var n_rows = _await_rows(rank)
    # AFTER: everything of this generation is visible here and to the workers.

    def reduce_tokens(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var own = Terms[dtype, group.top_k]()
            comptime if has_sums:
                own = own_terms[dtype](
                    expert_rows, combined.router_weights, 0, token_idx, rank
                )
            var received = Terms[sent_dtype, n_places]()
            var n_found = own.n
            for place in range(n_places * n_owners):
                var i, owner = divmod(place, n_owners)
                var offset = group.combine_message_offset(token_idx, i, owner)
                comptime if has_sums:
                    owner = i
                    offset = group.partial_offset(owner, token_idx)
                if rank.is_masked(owner):
                    continue
                var message = rank.recv_buf().unsafe_offset(offset)
                var flag = message_flag(message, group.combine_msg_bytes)[]
                # I8: what an older generation left is skipped.
                if generation_of(flag) != rank.generation:
                    continue
                comptime if has_sums:
                    received.append(message, 1)
                    n_found += count_of(flag)
                else:
                    var choice = group.choice(token_idx, i)
                    received.append(
                        message, combined.router_weights[unsafe_offset=choice]
                    )
                    n_found += 1
            rank.counters.rows_found(token_idx)[] = Int32(n_found)

            for column in range(0, group.hidden_size, width):
                var acc = SIMD[DType.float32, width](0)
                comptime if group.late_weights:
                    # The rows may have changed.
                    acc = combined.tokens.unsafe_load[width=width](
                        token_idx * group.hidden_size + column
                    ).cast[DType.float32]()
                else:
                    acc = own.add_to[width](0, column)
                    comptime if group.is_given():  # as sums of other ranks are
                        acc = acc.cast[partial_dtype]().cast[DType.float32]()
                comptime if group.partial_block > 0:
                    comptime Sums = QuantizedSums[
                        group.partial_block, group.hidden_size
                    ]
                    for i in range(received.n):
                        var row = BytePointer(unsafe_from_address=received.rows[i])
                        acc = Sums.add(acc, row, column)
                else:
                    acc = received.add_to[width](acc, column)
                comptime if group.fused_shared_expert:
                    var shared = row_at[group, dtype](expert_rows, token_idx)
                    acc = acc.cast[dtype]().cast[DType.float32]()
                    acc += columns_of[dtype, width](shared, column)
                comptime if group.is_given():
                    for i in range(combined.n_biases):
                        acc += (
                            combined.bias(i)
                            .unsafe_load[width=width](
                                token_idx * group.hidden_size + column
                            )
                            .cast[DType.float32]()
                        )
                combined.tokens.unsafe_store(
                    token_idx * group.hidden_size + column, acc.cast[dtype]()
                )

    for_each_chunk(n_tokens, bytes_per_token, reduce_tokens)
    var n_found = 0
    for token_idx in range(n_tokens):
        n_found += Int(rank.counters.rows_found(token_idx)[])
    if n_found != n_rows:
        raise rank.error(
            String(
                t"its tokens have {n_rows} rows, but the messages that came are of"
                t" {n_found}; something else has written to its memory."
            )
        )
    rank.counters.set_generation(Word.COMBINE_RECEIVED, rank.generation)
    rank.publish_done(group.combine_done_offset(0))
    # AFTER: the result is complete; every owner may overwrite what it sent.


def _await_rows[group: Group, //](rank: CpuRank[group]) raises -> Int:
    """Waits for every expert's count; returns how many rows they announce."""
    rank.await_peers()
    var n_rows = 0
    for expert_id in range(group.n_experts):
        var owner_rank = expert_id // group.n_local_experts()
        n_rows += rank.count_from(owner_rank, group.combine_count_offset(expert_id))
    return n_rows


def _check_answered[
    group: Group, //
](n_tokens: Int, n_rows: Int, rank: CpuRank[group]) raises:
    """Raises unless tokens and unsent rows are those that `combine_async` answered."""
    _check_n_tokens(n_tokens, Word.COMBINE_OF, rank)
    var answered = rank.counters.generation(Word.COMBINE_OF)
    comptime if group.has_sums:
        var last = rank.counters.generation(Word.DISPATCH_RECEIVED)
        if answered != last:
            raise rank.refusal(Failure.OTHER_ROWS, -1, Int(answered), Int(last))
        var end = rank.counters.pair_row(group.n_pairs())
        if n_rows < end:
            raise rank.refusal(Failure.TOO_MANY_ROWS, 0, end, n_rows)


def _check_n_tokens[
    group: Group, //
](n_tokens: Int, dispatched: Int, rank: CpuRank[group]) raises:
    """Raises unless as many tokens were sent by the dispatch whose generation the word
    `dispatched` holds."""
    var answered = rank.counters.generation(dispatched)
    var n_sent = Int(rank.counters.n_tokens_of(answered)[])
    # The second dispatch after it overwrites that number.
    var sent = rank.counters.generation(Word.DISPATCH_SENT)
    var is_kept = sent == answered or sent == next_generation(answered)
    if is_kept and n_tokens != n_sent:
        raise rank.refusal(Failure.BAD_N_TOKENS, -1, n_tokens, n_sent)
