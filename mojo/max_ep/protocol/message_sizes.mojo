# SPDX-License-Identifier: Apache-2.0
"""Sizes of messages: the bytes of an encoded token, and of what goes with it."""
from std.sys import size_of

from .layout import MESSAGE_ALIGN, METADATA_BYTES, round_up, SOURCE_INFO_BYTES


def plain_token_bytes(hidden_size: Int, element_bytes: Int) -> Int:
    """Counts the bytes of a token that is sent as it is."""
    return round_up(hidden_size * element_bytes, MESSAGE_ALIGN)


def scaled_token_bytes(
    hidden_size: Int, value_bits: Int, block: Int, scale_bytes: Int
) -> Int:
    """Counts the bytes of values, and of a scale for each block."""
    return round_up(hidden_size * value_bits // 8, MESSAGE_ALIGN) + round_up(
        hidden_size // block * scale_bytes, MESSAGE_ALIGN
    )


def message_bytes(token_bytes: Int, router_top_k: Int = 0) -> Int:
    """Counts the bytes of a message: token, routing metadata, source info."""
    return token_bytes + router_top_k * METADATA_BYTES + SOURCE_INFO_BYTES


def combine_msg_bytes[dtype: DType](hidden_size: Int, partial_block: Int = 0) -> Int:
    return combine_msg_bytes_of(hidden_size, size_of[Scalar[dtype]](), partial_block)


def combine_msg_bytes_of(
    hidden_size: Int, element_bytes: Int, partial_block: Int = 0
) -> Int:
    """Counts the bytes of a combine message, with a scale for each block if there are
    blocks: float32 for 128 elements, or float8_e8m0fnu for 32."""
    if partial_block == 0:
        return message_bytes(plain_token_bytes(hidden_size, element_bytes))
    return message_bytes(
        scaled_token_bytes(
            hidden_size, 8 * element_bytes, partial_block, partial_block // 32
        )
    )
