# SPDX-License-Identifier: Apache-2.0
"""Parses an op's parameter `group` into its `Group` and token format, at compile time.

It is a string such as "n_experts=256 n_ranks=8 by_rank sums". `max_ep/graph/ops.py`
writes it.
"""
from max.gpu.host.info import is_gpu

from .formats.table import FormatOf
from .layout import Addressing, combine_msg_bytes, Group
from .token_format import TokenFormat


def has_word(words: StaticString, word: StaticString) -> Bool:
    return String(" ", word, " ") in String(" ", words, " ")


def number_in(words: StaticString, name: StaticString) -> Int:
    """Reads the number after `name=` in a space-separated list; -1 if it is missing."""
    var all = String(" ", words, " ")
    var begin = all.find(String(" ", name, "="))
    if begin < 0:
        return -1
    var bytes = all.as_bytes()
    var n = 0
    for i in range(begin + name.byte_length() + 2, len(bytes)):
        if bytes[i] == UInt8(ord(" ")):
            break
        n = n * 10 + Int(bytes[i]) - ord("0")
    return n


def group_of(
    words: StaticString,
    on_gpu: Bool,
    dispatch_msg_bytes: Int = 0,
    combine_msg_bytes: Int = 0,
) -> Group:
    """Reads the group out of an op's parameter `group`."""
    var n_ranks = number_in(words, "n_ranks")
    var per_node = number_in(words, "n_ranks_per_node")
    return Group(
        n_experts=number_in(words, "n_experts"),
        n_ranks=n_ranks,
        max_tokens_per_rank=number_in(words, "max_tokens_per_rank"),
        top_k=number_in(words, "top_k"),
        hidden_size=number_in(words, "hidden_size"),
        dispatch_msg_bytes=dispatch_msg_bytes,
        combine_msg_bytes=combine_msg_bytes,
        addressing=Addressing.TO_ALL if has_word(words, "to_all") else (
            Addressing.BY_RANK if has_word(words, "by_rank") else Addressing.BY_EXPERT
        ),
        has_sums=has_word(words, "sums"),
        is_padded=has_word(words, "padded"),
        fused_shared_expert=has_word(words, "fused_shared_expert"),
        shares_gpu=has_word(words, "shares_gpu"),
        n_ranks_per_node=per_node,
        use_shmem=on_gpu and per_node < n_ranks,
        n_sms=number_in(words, "n_sms"),
        masks=has_word(words, "masks"),
        drops_rows=has_word(words, "drops_rows"),
        partial_block=max(number_in(words, "partial_block"), 0),
    )


comptime FormatOfOp[format: StaticString, group: StaticString] = FormatOf[
    format,
    number_in(group, "hidden_size"),
    number_in(group, "top_k"),
    number_in(group, "router_top_k"),
    "tiles" if has_word(group, "scales_in_tiles") else (
        "rows" if has_word(group, "scales_in_rows") else (
            "packed" if has_word(group, "scales_packed") else "transposed"
        )
    ),
]

comptime DispatchGroup[
    target: StaticString, Format: TokenFormat, words: StaticString
] = group_of(words, is_gpu[target](), dispatch_msg_bytes=Format.msg_bytes)

comptime CombineGroup[
    target: StaticString, dtype: DType, partial_dtype: DType, words: StaticString
] = group_of(
    words,
    is_gpu[target](),
    combine_msg_bytes=combine_msg_bytes[
        partial_dtype if has_word(words, "sums") else dtype
    ](number_in(words, "hidden_size"), max(number_in(words, "partial_block"), 0)),
)
