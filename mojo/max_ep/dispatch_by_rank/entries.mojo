# SPDX-License-Identifier: Apache-2.0
"""Entries: a word for each (token, choice) with its destination.

    63         32 31       16 15         0
    | generation | expert id | position |

It has the form of a flag (`flags.mojo`): one access reads or writes it whole, and it
holds its generation. Expert and position have `ENTRY_FIELD_BITS` each; `EPConfig`
refuses sizes that do not fit. If combine sends sums, a second word follows:

    63         32 31                  0
    | generation | router weight      |

In an all-gather, the routing metadata of a choice is two such words: expert id, which
may be any 32 bits, and probability.
"""
from std.memory import bitcast

from ..flags import count_of, flag_word

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
def weight_word(generation: UInt32, weight: Float32) -> UInt64:
    return flag_word(generation, Int(bitcast[DType.uint32](weight)))


@always_inline
def weight_of_word(word: UInt64) -> Float32:
    return bitcast[DType.float32](UInt32(word & 0xFFFF_FFFF))


@always_inline
def id_word(generation: UInt32, expert_id: Int32) -> UInt64:
    return flag_word(generation, Int(bitcast[DType.uint32](expert_id)))


@always_inline
def id_of_word(word: UInt64) -> Int32:
    return bitcast[DType.int32](UInt32(word & 0xFFFF_FFFF))
