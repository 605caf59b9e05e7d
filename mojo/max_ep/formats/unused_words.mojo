# SPDX-License-Identifier: Apache-2.0
"""Words that no token of a block-scaled format has, found when it is compiled.

Inline bytes are sent with the bits flipped between such a word and `SENTINEL`, so that
none look as if they had not arrived (docs/decisions/0026-what-no-token-has.md). A word
is unused if `known_values` or `known_scales` replaces it.
"""
from ..protocol.token_format import SENTINEL
from .block_numbers import BlockNumbers

comptime _Known = def(UInt32) thin -> UInt32


def _largest_unused[n_bits: Int, known: _Known]() -> UInt32:
    """Repeats the largest number of some bits that makes an unused word; 0: none."""
    comptime n = UInt32((1 << n_bits) - 1)
    for i in range(n):
        var word = SENTINEL // n * (n - i)
        if known(word) != word:
            return word
    return 0


def unused_values[Numbers: BlockNumbers]() -> UInt32:
    """Finds a word that is not four bytes of values."""
    comptime word = _largest_unused[Numbers.value_bits, Numbers.known_values]()
    comptime assert (
        word != 0
    ), "max_ep: known_values must replace a byte, or half a byte"
    return word


def unused_scales[Numbers: BlockNumbers]() -> UInt32:
    """Finds a word that is not four bytes of scales."""
    comptime word = _largest_unused[8, Numbers.known_scales]()
    comptime assert word != 0, "max_ep: known_scales must replace some byte"
    return word


def _unused_by_both[Numbers: BlockNumbers]() -> UInt32:
    comptime values = unused_values[Numbers]()
    comptime scales = unused_scales[Numbers]()
    for word in [
        values,
        scales,
        values & 0xFFFF_FF00 | scales & 0xFF,
        scales & 0xFFFF_FF00 | values & 0xFF,
    ]:
        if Numbers.known_values(word) != word and Numbers.known_scales(word) != word:
            return word
    return 0


def unused_bytes[Numbers: BlockNumbers]() -> UInt32:
    """Finds a word that is neither four bytes of values nor of scales."""
    comptime word = _unused_by_both[Numbers]()
    comptime assert (
        word != 0
    ), "max_ep: known_values and known_scales must replace one word alike"
    return word
