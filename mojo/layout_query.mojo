# SPDX-License-Identifier: Apache-2.0
"""Answers Python's questions about sizes: `layout.py` runs this program.

Arguments: bits of a dispatched element, elements that share a scale (0: there are
no scales), bytes of a scale, bytes of a combine element, hidden_size, n_experts,
n_ranks, max_tokens_per_rank, top_k, addressing (by_expert, by_rank, to_all), returns
(rows, sums), router_top_k, on_timeout (raise, mask), bytes of a token's own scale,
elements that share a scale in a partial sum (0: there are no scales).
Prints a line `name value` for each size, in bytes unless the name says otherwise. A
`_word` is the first of its kind in the counters; an `_offset` is in the region.
"""
from max_ep.counters import (
    choices_word,
    local_sync_counters_words,
    masked_word,
    N_FAILURE_WORDS,
    Word,
)
from max_ep.layout import (
    Addressing,
    combine_msg_bytes_of,
    Group,
    message_bytes,
    plain_token_bytes,
    scaled_token_bytes,
)
from max_ep.setup import N_SETUP_WORDS
from std.sys import argv


def main() raises:
    """Prints the sizes."""
    var args = argv()
    var value_bits = Int(args[1])
    var scale_block = Int(args[2])
    var hidden_size = Int(args[5])
    var token_bytes = plain_token_bytes(hidden_size, value_bits // 8)
    if scale_block:
        token_bytes = scaled_token_bytes(
            hidden_size, value_bits, scale_block, Int(args[3])
        )
        token_bytes += Int(args[14])
    var addressing = Addressing.BY_EXPERT
    if args[10] == "by_rank":
        addressing = Addressing.BY_RANK
    elif args[10] == "to_all":
        addressing = Addressing.TO_ALL
    var group = Group(
        n_experts=Int(args[6]),
        n_ranks=Int(args[7]),
        max_tokens_per_rank=Int(args[8]),
        top_k=Int(args[9]),
        dispatch_msg_bytes=message_bytes(token_bytes, Int(args[12])),
        combine_msg_bytes=combine_msg_bytes_of(
            hidden_size, Int(args[4]), Int(args[15])
        ),
        addressing=addressing,
        has_sums=args[11] == "sums",
        masks=args[13] == "mask",
    )
    # int32 words of the counters.
    print("counters_words", local_sync_counters_words(group))
    # The mask of n_ranks, if on_timeout is "mask".
    print("masked_word", masked_word(group))
    print("failure_word", Word.FAILURE)
    print("n_failure_words", N_FAILURE_WORDS)
    # The four generations.
    print("generations_word", Word.DISPATCH_SENT)
    # What a CPU rank does; two words on: since when.
    print("launch_word", Word.LAUNCH)
    print("n_tokens_word", Word.N_TOKENS)
    print("combine_of_word", Word.COMBINE_OF)
    print("choices_word", choices_word(group.n_experts))
    # int64 words that max_ep.init takes.
    print("setup_words", N_SETUP_WORDS)
    # As `Group.protocol` numbers it.
    print("protocol", group.protocol())
    print("n_local_experts", group.n_local_experts())
    print("dispatch_msg_bytes", group.dispatch_msg_bytes)
    print("combine_msg_bytes", group.combine_msg_bytes)
    print("dispatch_send_bytes", group.dispatch_send_bytes())
    print("dispatch_recv_bytes", group.dispatch_recv_bytes())
    print("dispatch_counts_bytes", group.dispatch_counts_bytes())
    print("combine_recv_bytes", group.combine_recv_bytes())
    print("combine_counts_bytes", group.combine_counts_bytes())
    print("dispatch_counts_offset", group.dispatch_counts_offset())
    print(
        "heartbeats_offset", group.dispatch_counts_offset() + group.heartbeat_offset(0)
    )
    print("combine_recv_offset", group.combine_recv_offset())
    print("combine_counts_offset", group.combine_counts_offset())
    print("region_bytes", group.region_bytes())
    # Behind the region, where SHMEM is used; those of dispatch are the first.
    print("dispatch_put_bytes", group.combine_put_from_region_end())
    print("put_bytes", group.put_bytes())
