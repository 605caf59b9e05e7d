# SPDX-License-Identifier: Apache-2.0
"""The list of the words that peers write into a region (docs/adding_a_word.md)."""
from .layout import ENTRY_BYTES, Group, MESSAGE_ALIGN, N_CHUNKS, SOURCE_INFO_BYTES
from .peer_words import (
    Buf,
    COMBINE_ASYNC,
    COMBINE_WAIT,
    DISPATCH_ASYNC,
    DISPATCH_WAIT,
    FLAG_BYTES,
    Holds,
    Limit,
    PeerWords,
    Which,
)

comptime N_KINDS = 16
"""Kinds of words that peers write into a region."""


@always_inline
def peer_words[kind: Int](group: Group, on_gpu: Bool) -> PeerWords:
    """Describes one kind of the words by which peers tell a rank what has come, and
    what they have read."""
    comptime counts, recv = Buf.DISPATCH_COUNTS, Buf.DISPATCH_RECV
    comptime back_counts, back_recv = Buf.COMBINE_COUNTS, Buf.COMBINE_RECV
    var n_local, most = group.n_local_experts(), group.max_tokens_per_rank
    var msg_bytes, back_bytes = group.dispatch_msg_bytes, group.combine_msg_bytes
    var is_by_rank, has_sums = group.is_by_rank(), group.has_sums
    var words = PeerWords(on_gpu)
    comptime if kind == 0:
        words.add("done word of dispatch", counts, group.dispatch_done_offset(0))
        words.await_in(DISPATCH_ASYNC)
        if not on_gpu:  # which sends nothing to ranks without experts
            words.limit = Limit.EXPERTS_OF_PEER
    elif kind == 1:
        words.add("count", counts, 0)
        words.each(n_local, group.dispatch_count_offset(group.pair(1, 0)))
        if group.is_linked():
            words.peer_stride = group.linked_count_offset(group.pair(0, 1))
            words.spacing = group.linked_count_offset(group.pair(1, 0))
        words.limit = Limit.EXPERTS_OF_READER
        words.await_in(DISPATCH_WAIT)
    elif kind == 2:
        if is_by_rank:
            words.add("number of tokens", counts, group.dispatch_n_tokens_offset(0))
            words.await_on_gpu(DISPATCH_WAIT, Which.EACH)
    elif kind == 3:
        if is_by_rank:
            var n_bytes = group.entry_offset(1, 0)
            words.add("entry", recv, 0, n_bytes)
            words.each(n_bytes // ENTRY_BYTES, ENTRY_BYTES)
            words.await_on_gpu(DISPATCH_WAIT, Which.SOME)
    elif kind == 4:
        if on_gpu and group.chooses_ranks():
            # In front of the source info; how many, only the token format knows.
            var n_bytes = most * msg_bytes
            words.add("routing metadata", recv, group.token_offset(0, 0), n_bytes)
            words.each(n_bytes // ENTRY_BYTES, ENTRY_BYTES)
            words.await_in(DISPATCH_WAIT, Which.SOME)
    elif kind == 5:
        if on_gpu and is_by_rank and not group.is_linked():
            var n_bytes = group.n_inline_tokens() * msg_bytes
            words.add("inline token", recv, group.inline_token_offset(0, 0), n_bytes)
            words.each(n_bytes // MESSAGE_ALIGN, MESSAGE_ALIGN)
            words.holds = Holds.DATA
            words.await_in(DISPATCH_WAIT, Which.SOME)
    elif kind == 6:
        var are_chunks = most > group.n_inline_tokens() or group.is_linked()
        if on_gpu and is_by_rank and are_chunks:
            var n = most * N_CHUNKS
            words.add("chunk", recv, group.chunk_flag_offset(0, 0, 0), n * FLAG_BYTES)
            words.each(n, FLAG_BYTES)
            words.await_in(DISPATCH_WAIT, Which.SOME)
    elif kind == 7:
        if not on_gpu and group.relays:  # a rank of its host relays it
            var at = group.token_offset(0, 1) - SOURCE_INFO_BYTES
            words.add("relayed token", recv, at, most * msg_bytes)
            words.each(most, msg_bytes)
        if on_gpu and not is_by_rank:
            var n_bytes = most * msg_bytes
            words.add("message", recv, msg_bytes - SOURCE_INFO_BYTES, n_bytes)
            words.each(most, msg_bytes)
            words.repeat(n_local, group.n_ranks * n_bytes)
            words.await_in(DISPATCH_WAIT, Which.SOME)
    elif kind == 8:
        if on_gpu:  # the lower half of those of dispatch
            words.add("done word of combine", counts, group.dispatch_done_offset(0))
            words.holds = Holds.LOWER_GENERATION
        else:
            var begin = group.combine_done_offset(0)
            words.add("done word of combine", back_counts, begin)
        words.await_in(COMBINE_ASYNC)
        if not on_gpu:  # which sends nothing if it has no experts: nobody waits
            words.limit = Limit.EXPERTS_OF_READER
    elif kind == 9:
        words.add("combine count", back_counts, 0, n_local * FLAG_BYTES)
        words.each(n_local, FLAG_BYTES)
        words.limit = Limit.EXPERTS_OF_PEER
        if not on_gpu:
            words.await_in(COMBINE_WAIT)
        elif group.drops_rows:
            words.await_in(COMBINE_WAIT, Which.SOME)
    elif kind == 10:
        if not has_sums:  # only if ranks mask, each owner has places of its own
            var flag = back_bytes - SOURCE_INFO_BYTES
            words.add("row", back_recv, flag, group.combine_message_offset(0, 0, 1))
            words.each(group.n_choices(), back_bytes)
            if not on_gpu and group.is_linked():  # and those that are staged
                words.repeat(2, group.staged_row_offset(0, 0, 0))
            words.await_on_gpu(COMBINE_WAIT, Which.CHOICES)
    elif kind == 11:
        if has_sums:
            var first = 0 if on_gpu else back_bytes - SOURCE_INFO_BYTES
            var spacing = MESSAGE_ALIGN if on_gpu else back_bytes
            var n_bytes = group.partial_offset(1, 0)
            words.add("partial sum", back_recv, first, n_bytes)
            words.each(n_bytes // max(spacing, 1), spacing)
            if not on_gpu and group.is_linked():  # and those that are staged
                words.repeat(2, group.staged_partial_offset(0, 0))
            if on_gpu and group.is_linked():  # its flag is a word of another kind
                words.each((back_bytes - SOURCE_INFO_BYTES) // spacing, spacing)
                words.repeat(most, back_bytes)
            words.await_on_gpu(COMBINE_WAIT, Which.TOKENS)
            if on_gpu:
                words.holds = Holds.DATA
    elif kind == 12:
        if group.late_weights:
            var n, at = group.n_choices(), group.late_weight_offset(0, 0)
            words.add("router weight", back_recv, at, n * ENTRY_BYTES)
            words.each(n, ENTRY_BYTES)
            words.await_sent(COMBINE_ASYNC, Which.SOME if on_gpu else Which.EACH)
    elif kind == 13:
        if has_sums and on_gpu and group.is_linked():
            var flag, n_bytes = back_bytes - SOURCE_INFO_BYTES, group.partial_offset(
                1, 0
            )
            words.add("flag of a partial sum", back_recv, flag, n_bytes)
            words.each(most, back_bytes)
            words.await_in(COMBINE_WAIT, Which.TOKENS)
    elif kind == 14:
        if has_sums and on_gpu and group.relays:
            # Each place is listed by the rank of another host that has the sender's place.
            var at = group.staged_partial_offset(0, 0)
            words.add("partial sum of this host", back_recv, at, most * back_bytes)
            words.each((back_bytes - SOURCE_INFO_BYTES) // MESSAGE_ALIGN, MESSAGE_ALIGN)
            words.repeat(most, back_bytes)
            words.holds = Holds.DATA
            words.await_sent(COMBINE_ASYNC, Which.SOME)
    else:
        comptime assert kind == N_KINDS - 1
        if group.masks:
            words.add("heartbeat", counts, group.heartbeat_offset(0))
    return words
