# SPDX-License-Identifier: Apache-2.0
"""Parses an op's parameter `config`, such as "n_experts=256 n_ranks=8 by_rank sums", into
its `Group` and token format. `max_ep/graph/ops.py` writes it; `layout_query.mojo` asks in
the same words.
"""
from std.sys import size_of

from ..formats.table import FormatOf, NumbersOf
from ..protocol.addressing import Addressing
from ..protocol.layout import Group
from ..protocol.message_sizes import combine_msg_bytes


def has_word(config: StringSlice, word: StaticString) -> Bool:
    return String(" ", word, " ") in String(" ", config, " ")


def number_in(config: StringSlice, name: StaticString) -> Int:
    """Reads the number after `name=` in a space-separated list; 0 if it is missing."""
    var all = String(" ", config, " ")
    var begin = all.find(String(" ", name, "="))
    if begin < 0:
        return 0
    var bytes = all.as_bytes()
    var n = 0
    for i in range(begin + name.byte_length() + 2, len(bytes)):
        if bytes[i] == UInt8(ord(" ")):
            break
        n = n * 10 + Int(bytes[i]) - ord("0")
    return n


def group_of(
    config: StringSlice, dispatch_msg_bytes: Int = 0, combine_msg_bytes: Int = 0
) -> Group:
    return Group(
        n_experts=number_in(config, "n_experts"),
        n_ranks=number_in(config, "n_ranks"),
        max_tokens_per_rank=number_in(config, "max_tokens_per_rank"),
        top_k=number_in(config, "top_k"),
        hidden_size=number_in(config, "hidden_size"),
        dispatch_msg_bytes=dispatch_msg_bytes,
        combine_msg_bytes=combine_msg_bytes,
        addressing=Addressing.TO_ALL if has_word(config, "to_all") else (
            Addressing.BY_RANK if has_word(config, "by_rank") else Addressing.BY_EXPERT
        ),
        has_sums=has_word(config, "sums"),
        is_padded=has_word(config, "padded"),
        fused_shared_expert=has_word(config, "fused_shared_expert"),
        shares_gpu=has_word(config, "shares_gpu"),
        n_mapped=number_in(config, "n_mapped"),
        n_sms=number_in(config, "n_sms"),
        masks=has_word(config, "masks"),
        drops_rows=has_word(config, "drops_rows"),
        partial_block=number_in(config, "partial_block"),
        relays=has_word(config, "hierarchical"),
    )


def _scales_in(config: StringSlice) -> StaticString:
    if has_word(config, "scales_in_tiles"):
        return "tiles"
    if has_word(config, "scales_in_rows"):
        return "rows"
    return "packed" if has_word(config, "scales_packed") else "transposed"


comptime FormatOfOp[format: StaticString, config: StaticString] = FormatOf[
    format,
    number_in(config, "hidden_size"),
    number_in(config, "top_k"),
    number_in(config, "router_top_k"),
    _scales_in(config),
]


def check_entry[format: StaticString, config: StaticString]():
    """Refuses a format that its entry in `max_ep/formats.py` describes otherwise."""
    comptime block = number_in(config, "scale_block")
    comptime if block == 0:
        comptime assert FormatOfOp[format, config].scale_vectors == 0, String(
            t"max_ep: format {format} has scales; max_ep/formats.py has no scale_block"
        )
    else:
        comptime Numbers = NumbersOf[format]
        comptime bits = number_in(config, "value_bits")
        comptime n_bytes = number_in(config, "scale_bytes")
        comptime own_bytes = size_of[Scalar[Numbers.scale_type]]()
        comptime assert (
            block == Numbers.block
            and bits == Numbers.value_bits
            and n_bytes == own_bytes
        ), String(
            t"max_ep: in max_ep/formats.py format {format} has blocks of {block},"
            t" values of {bits} bits, scales of {n_bytes} bytes; in Mojo"
            t" {Numbers.block}, {Numbers.value_bits}, {own_bytes}"
        )


comptime CombineGroup[
    dtype: DType, partial_dtype: DType, config: StaticString
] = group_of(
    config,
    combine_msg_bytes=combine_msg_bytes[
        partial_dtype if has_word(config, "sums") else dtype
    ](number_in(config, "hidden_size"), number_in(config, "partial_block")),
)
