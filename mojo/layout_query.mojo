# SPDX-License-Identifier: Apache-2.0
"""Answers Python's questions about sizes: `extension.py` runs this program.

Arguments: what `op_config.mojo` reads of a group, and `value_bits`, `scale_block`,
`scale_bytes` and `row_scale_bytes` of a dispatched token, as in `formats.py`;
`combine_bytes` of a combine element. Prints a line `name value` for each size, in bytes
unless the name says otherwise. A `_word` is the first of its kind in the counters; an
`_offset` is in the region.
"""
from max_ep.protocol.counters import (
    choices_word,
    local_sync_counters_words,
    masked_word,
    N_FAILURE_WORDS,
    Word,
)
from max_ep.protocol.layout import (
    combine_msg_bytes_of,
    message_bytes,
    plain_token_bytes,
    scaled_token_bytes,
)
from max_ep.launch.op_config import group_of, number_in
from max_ep.launch.setup import N_SETUP_WORDS
from std.sys import argv


def main() raises:
    """Prints the sizes."""
    var asked = String()
    for word in argv():
        asked += String(word, " ")
    var hidden_size = number_in(asked, "hidden_size")
    var value_bits = number_in(asked, "value_bits")
    var scale_block = number_in(asked, "scale_block")
    var token_bytes = plain_token_bytes(hidden_size, value_bits // 8)
    if scale_block:
        token_bytes = number_in(asked, "row_scale_bytes") + scaled_token_bytes(
            hidden_size, value_bits, scale_block, number_in(asked, "scale_bytes")
        )
    var group = group_of(
        asked,
        dispatch_msg_bytes=message_bytes(token_bytes, number_in(asked, "router_top_k")),
        combine_msg_bytes=combine_msg_bytes_of(
            hidden_size,
            number_in(asked, "combine_bytes"),
            number_in(asked, "partial_block"),
        ),
    )
    print("counters_words", local_sync_counters_words(group))
    print("masked_word", masked_word(group))
    print("failure_word", Word.FAILURE)
    print("n_failure_words", N_FAILURE_WORDS)
    print("generations_word", Word.DISPATCH_SENT)
    print("launch_word", Word.LAUNCH)
    print("n_tokens_word", Word.N_TOKENS)
    print("combine_of_word", Word.COMBINE_OF)
    print("choices_word", choices_word(group.n_experts))
    print("setup_words", N_SETUP_WORDS)
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
    print("dispatch_put_bytes", group.combine_put_from_region_end())
    print("put_bytes", group.put_bytes())
