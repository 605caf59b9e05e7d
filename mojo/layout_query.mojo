# SPDX-License-Identifier: Apache-2.0
"""Answers Python's questions about sizes: `layout.py` runs this program.

Arguments: format (bfloat16, float32, blockwise_fp8), bytes of a combine
element, hidden_size, n_experts, n_ranks, max_tokens_per_rank, top_k, addressing
(by_expert, by_rank, to_all), returns (rows, sums), router_top_k. Prints a line `name value` for each size.
"""
from max_ep.counters import (
    FAILURE_WORD,
    local_sync_counters_words,
    N_FAILURE_WORDS,
)
from max_ep.formats.blockwise_fp8 import FP8_BLOCK
from max_ep.layout import (
    Addressing,
    blockwise_fp8_token_bytes,
    Group,
    message_bytes,
    plain_token_bytes,
    Returns,
)
from max_ep.setup import N_SETUP_WORDS
from std.sys import argv


def _token_bytes(format: String, hidden_size: Int) raises -> Int:
    if format == "bfloat16":
        return plain_token_bytes(hidden_size, 2)
    if format == "float32":
        return plain_token_bytes(hidden_size, 4)
    if format == "blockwise_fp8":
        return blockwise_fp8_token_bytes(hidden_size, FP8_BLOCK)
    raise Error("unknown format ", format)


def main() raises:
    """Prints the sizes."""
    var args = argv()
    var hidden_size = Int(args[3])
    var n_experts = Int(args[4])
    var addressing = Addressing.BY_EXPERT
    if args[8] == "by_rank":
        addressing = Addressing.BY_RANK
    elif args[8] == "to_all":
        addressing = Addressing.TO_ALL
    var group = Group(
        n_experts=n_experts,
        n_ranks=Int(args[5]),
        max_tokens_per_rank=Int(args[6]),
        top_k=Int(args[7]),
        dispatch_msg_bytes=message_bytes(
            _token_bytes(String(args[1]), hidden_size), Int(args[10])
        ),
        combine_msg_bytes=message_bytes(
            plain_token_bytes(hidden_size, Int(args[2]))
        ),
        addressing=addressing,
        returns=Returns.SUMS if args[9] == "sums" else Returns.ROWS,
    )
    print(
        "counters_words",
        local_sync_counters_words(group),
    )
    print("failure_word", FAILURE_WORD)
    print("n_failure_words", N_FAILURE_WORDS)
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
    print("region_bytes", group.region_bytes())
    print("dispatch_put_bytes", group.combine_put_from_region_end())
    print("put_bytes", group.put_bytes())
