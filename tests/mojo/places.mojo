# SPDX-License-Identifier: Apache-2.0
"""The places in a region, one after another as in the picture of `layout.mojo`.

Each begins where the one before it ends, or a buffer or array begins anew on
`BUFFER_ALIGN`. So none overlap, all stand in their buffers, and sizes are right.
Prints OK, or raises. Run by `checks.mojo`.
"""
from max_ep import (
    BF16TokenFormat,
    BlockwiseFP8TokenFormat,
    Float32TokenFormat,
    PlainTokenFormat,
    TokenFormat,
)
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.layout import (
    BUFFER_ALIGN,
    Group,
    METADATA_BYTES,
    N_CHUNKS,
    SOURCE_INFO_BYTES,
)
from max_ep.protocol.message_sizes import (
    message_bytes,
    plain_token_bytes,
    scaled_token_bytes,
)
from max_ep.protocol.peer_words import Buf, FLAG_BYTES
from max_ep.protocol.transport import (
    dispatch_put_offset,
    combine_put_offset,
    combine_put_from_region_end,
    put_bytes,
)
from max_ep.protocol.word_list import N_KINDS, peer_words
from std.testing import assert_equal


struct Cursor(Copyable):
    """Where the next place must begin."""

    var at: Int

    def __init__(out self):
        self.at = 0

    def take(mut self, begin: Int, n_bytes: Int) raises:
        assert_equal(begin, self.at)
        self.at += n_bytes

    def align(mut self):
        self.at = -(-self.at // BUFFER_ALIGN) * BUFFER_ALIGN

    def buffer(mut self, begin: Int, end: Int) raises:
        """Ends a buffer of this size, and begins the next one."""
        assert_equal(begin + end, self.at)
        self.align()


def check_recv_by_rank(group: Group, mut c: Cursor) raises:
    """Entries, tokens, inline-flag tokens and flags of chunks."""
    var recv = group.dispatch_recv_offset()
    var msg, n = group.dispatch_msg_bytes, group.max_tokens_per_rank
    for src in range(group.n_ranks):
        for t in range(n):
            for k in range(group.top_k):
                var entry = group.entry_offset(src, group.choice(t, k))
                c.take(recv + entry, 16 if group.has_sums else 8)
    c.align()
    for src in range(group.n_ranks):
        assert_equal(group.staged_from_recv(src, 0), c.at - recv)
        for t in range(n):
            c.take(recv + group.token_offset(src, t), msg)
            for k in range(group.top_k):
                # In front of the source info; the first choice is first.
                var n_bytes = (group.top_k - k) * METADATA_BYTES
                assert_equal(
                    recv + group.metadata_offset(src, t, k, group.top_k),
                    c.at - SOURCE_INFO_BYTES - n_bytes,
                )
    c.align()
    assert_equal(group.n_inline_tokens(), min(n, 256))
    for src in range(group.n_ranks):
        for t in range(group.n_inline_tokens()):
            c.take(recv + group.inline_token_offset(src, t), msg)
    c.align()
    for src in range(group.n_ranks):
        for t in range(n):
            for chunk in range(N_CHUNKS):
                var flag = group.chunk_flag_offset(src, t, chunk)
                c.take(recv + flag, FLAG_BYTES)


def check_counts(group: Group, buffer: Int, n_bytes: Int) raises:
    """A buffer of counts has each word that the list has there, and no other."""
    var n_there = List[Int](length=n_bytes // FLAG_BYTES, fill=0)
    comptime for kind in range(N_KINDS):
        var words = peer_words[kind](group, on_gpu=False)
        if words.buffer == buffer and words.name != "":
            for peer in range(group.n_ranks):
                var n = words.n
                if words.name == "combine count":
                    n = group.n_words_of(words, 0, peer)
                for i in range(n):
                    n_there[words.place(peer, i) // FLAG_BYTES] += 1
    if buffer == Buf.DISPATCH_COUNTS and group.is_linked():
        # Counts for one rank stand together, there and where they are staged.
        for expert_id in range(group.n_pairs()):
            n_there[group.staged_count_offset(expert_id) // FLAG_BYTES] += 1
        var second = group.linked_count_offset(group.pair(1, 0))
        assert_equal(second, group.linked_count_offset(0) + FLAG_BYTES)
    for n in n_there:
        assert_equal(n, 1)
    assert_equal(group.buffer_offset(buffer) % BUFFER_ALIGN, 0)


def check(group: Group) raises:
    var c = Cursor()
    var n_local = group.n_local_experts()
    var n_held = 0
    for rank in range(group.n_ranks):
        n_held += group.n_experts_on(rank)
    assert_equal(n_held, group.n_experts)
    var recv = group.dispatch_recv_offset()
    if group.is_by_rank():
        c.buffer(0, group.dispatch_send_bytes())
        check_recv_by_rank(group, c)
    else:
        for t in range(group.max_tokens_per_rank):
            c.take(recv + group.staged_from_recv(0, t), group.dispatch_msg_bytes)
        c.buffer(0, group.dispatch_send_bytes())
        for expert in range(n_local):
            for src in range(group.n_ranks):
                for slot in range(group.max_tokens_per_rank):
                    var message = group.dispatch_message_offset(
                        group.pair(expert, src), slot
                    )
                    c.take(recv + message, group.dispatch_msg_bytes)
    c.buffer(recv, group.dispatch_recv_bytes())

    var counts = group.dispatch_counts_offset()
    check_counts(group, Buf.DISPATCH_COUNTS, group.dispatch_counts_bytes())
    c.at += group.dispatch_counts_bytes()
    c.buffer(counts, group.dispatch_counts_bytes())

    recv = group.combine_recv_offset()
    if group.has_sums:
        for owner in range(group.n_ranks):
            for t in range(group.max_tokens_per_rank):
                var partial = group.partial_offset(owner, t)
                c.take(recv + partial, group.combine_msg_bytes)
        for src in range(group.n_ranks if group.is_linked() else 0):
            for t in range(group.max_tokens_per_rank):
                var staged = group.staged_partial_offset(src, t)
                c.take(recv + staged, group.combine_msg_bytes)
        for src in range(group.n_ranks if group.late_weights else 0):
            for choice in range(group.n_choices()):
                c.take(recv + group.late_weight_offset(src, choice), FLAG_BYTES)
    else:
        for owner in range(group.n_ranks if group.masks else 1):
            for t in range(group.max_tokens_per_rank):
                for k in range(group.top_k):
                    var row = group.combine_message_offset(t, k, owner)
                    c.take(recv + row, group.combine_msg_bytes)
        for src in range(group.n_ranks if group.is_linked() else 0):
            for t in range(group.max_tokens_per_rank):
                for k in range(group.top_k):
                    var staged = group.staged_row_offset(src, t, k)
                    c.take(recv + staged, group.combine_msg_bytes)
    c.buffer(recv, group.combine_recv_bytes())
    counts = group.combine_counts_offset()
    assert_equal(
        counts + group.dispatch_counts_from_combine_counts(),
        group.dispatch_counts_offset(),
    )
    check_counts(group, Buf.COMBINE_COUNTS, group.combine_counts_bytes())
    c.at += group.combine_counts_bytes()
    c.buffer(counts, group.combine_counts_bytes())

    # Put buffers follow the region, but for ranks that stage in it.
    var end = group.region_bytes()
    if group.is_by_rank():
        assert_equal(put_bytes(group), 0)
        return
    for choice in range(group.n_choices()):
        var message = dispatch_put_offset(group, choice)
        c.take(end + message, group.dispatch_msg_bytes)
    c.align()
    var put = end + combine_put_from_region_end(group)
    for src in range(group.n_ranks):
        for choice in range(group.n_choices()):
            var message = combine_put_offset(group, src, choice)
            c.take(put + message, group.combine_msg_bytes)
    c.align()
    assert_equal(end + put_bytes(group), c.at)


def check_format[Format: TokenFormat](token_bytes: Int, n_more: Int = 0) raises:
    """Its sizes are those that `layout_query.mojo` computes."""
    assert_equal(Format.token_bytes, token_bytes)
    assert_equal(Format.msg_bytes, message_bytes(token_bytes, n_more))


def main() raises:
    for n_experts in [1, 5, 64]:
        for n_ranks in [1, 2, 3, 8]:
            for max_tokens in [1, 7, 300]:
                for axes in [
                    (Addressing.BY_EXPERT, False),
                    (Addressing.BY_RANK, False),
                    (Addressing.BY_RANK, True),
                    (Addressing.TO_ALL, True),
                ]:
                    # Ranks that mask, or get their weights late.
                    for masks, late in [(False, False), (True, False), (False, True)]:
                        if late and not axes[1]:
                            continue
                        var is_linked = axes[0] == Addressing.BY_RANK
                        var group = Group(
                            n_experts=n_experts,
                            n_ranks=n_ranks,
                            max_tokens_per_rank=max_tokens,
                            top_k=3,
                            dispatch_msg_bytes=176,
                            combine_msg_bytes=96,
                            addressing=axes[0],
                            has_sums=axes[1],
                            masks=masks,
                            late_weights=late,
                        )
                        check(group)
                        assert_equal(
                            Group.of(group.words()).region_bytes(), group.region_bytes()
                        )
                        if n_ranks > 1 and is_linked:
                            group.n_mapped = n_ranks - 1
                            check(group)
                            var same = Group.of(group.words())
                            assert_equal(same.region_bytes(), group.region_bytes())
    check_format[PlainTokenFormat[DType.bfloat16, 8, 3]](16)
    check_format[BF16TokenFormat[80, 3]](plain_token_bytes(80, 2))
    check_format[Float32TokenFormat[4, 1]](16)
    check_format[PlainTokenFormat[DType.float32, 36, 2]](144)
    check_format[BlockwiseFP8TokenFormat[128, 1]](128 + 16)
    check_format[BlockwiseFP8TokenFormat[640, 32, True]](
        scaled_token_bytes(640, 8, 128, 4)
    )
    check_format[PlainTokenFormat[DType.bfloat16, 80, 3, 5]](160, 5)
    check_format[PlainTokenFormat[DType.float32, 4, 32, 40]](16, 40)
    print("OK")
