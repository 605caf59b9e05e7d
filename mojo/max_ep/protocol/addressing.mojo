# SPDX-License-Identifier: Apache-2.0
"""How dispatch addresses a token: the first axis of a protocol."""


@fieldwise_init
struct Addressing(Equatable, TrivialRegisterPassable):
    """How dispatch addresses a token."""

    var value: Int
    """Its part of `Group.protocol`; 1 is added for sums, which need by rank."""

    comptime BY_EXPERT = Self(1)
    """A message for each choice, in a slot of its expert."""
    comptime BY_RANK = Self(2)
    """A message for each rank that has an expert of the token, and entries."""
    comptime TO_ALL = Self(4)
    """A message for each rank of the group, and entries: an all-gather."""
    comptime TO_RANKS = Self(6)
    """As by rank, where each rank is an expert: a token chooses the ranks that have
    experts which the router chose, and takes its routing metadata along."""
