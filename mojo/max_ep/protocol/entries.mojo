# SPDX-License-Identifier: Apache-2.0
"""Entries: a word for each (token, choice) with its destination.

    63         32 31       16 15         0
    | generation | expert id | position |

It has the form of a flag (`flags.mojo`): one access reads or writes it whole, and it
holds its generation. Expert and position have `ENTRY_FIELD_BITS` each; `EPConfig`
refuses sizes that do not fit. If combine sends sums, a second word follows:

    63         32 31                  0
    | generation | router weight      |

If weights come late, at combine, such a word of their own brings them. In an
all-gather, the routing metadata of a choice is two such words: expert id, which may be
any 32 bits, and probability.
"""
from std.memory import bitcast

from .flags import count_of, flag_word

comptime ENTRY_FIELD_BITS = 16
"""Bits of an expert id and of a position."""


@always_inline
def entry_word(generation: UInt32, expert_id: Int, position: Int) -> UInt64:
    return flag_word(generation, (expert_id << ENTRY_FIELD_BITS) | position)


@always_inline
def expert_of_entry(entry: UInt64) -> Int:
    return count_of(entry) >> ENTRY_FIELD_BITS


@always_inline
def position_of_entry(entry: UInt64) -> Int:
    return count_of(entry) & ((1 << ENTRY_FIELD_BITS) - 1)


comptime NO_ENTRY_EXPERT = (1 << ENTRY_FIELD_BITS) - 1
"""Expert of an entry that GPU ranks send for a choice without one."""
comptime NO_POSITION = (1 << ENTRY_FIELD_BITS) - 1
"""Position of a choice that is dropped, since its expert has no place left."""


@always_inline
def value_word[dtype: DType, //](generation: UInt32, value: Scalar[dtype]) -> UInt64:
    """Makes the word of a router weight, or in an all-gather of an expert id."""
    return flag_word(generation, Int(bitcast[DType.uint32](value)))


@always_inline
def value_of_word[dtype: DType](word: UInt64) -> Scalar[dtype]:
    return bitcast[dtype](UInt32(word & 0xFFFF_FFFF))
