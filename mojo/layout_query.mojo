# SPDX-License-Identifier: Apache-2.0
"""Answers Python's questions about sizes: `extension.py` runs this program.

Arguments: what `op_config.mojo` reads of a group, and `value_bits`, `scale_block`,
`scale_bytes` and `row_scale_bytes` of a dispatched token, as in `formats.py`;
`combine_bytes` of a combine element. Prints what `sizes_of` returns.
"""
from max_ep.launch.op_config import group_of, number_in
from max_ep.launch.sizes import sizes_of
from max_ep.protocol.message_sizes import (
    combine_msg_bytes_of,
    message_bytes,
    plain_token_bytes,
    scaled_token_bytes,
)
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
    print(sizes_of(group))
