# SPDX-License-Identifier: Apache-2.0
"""What the router's ids say: the expert of a choice, or the rank where ranks are chosen.

A negative id is no expert. One that is too wide for an Int32 is out of range.
"""
from .counters import NO_EXPERT
from .kernel_argument import ImmPointer
from .layout import Group


@always_inline
def load_id[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int32:
    """Loads the expert of a choice; where ranks are experts, the rank."""
    comptime if group.sends_to_all():
        return Int32(UInt32(choice) % UInt32(group.n_ranks))
    comptime if group.router_top_k > 0:
        return _load_rank[group](ids, choice)
    return load_router_id[group](ids, choice)


@always_inline
def load_router_id[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int32:
    """Loads what the router chose."""
    comptime if group.wide_ids:
        var wide = ids.unsafe_bitcast[Int64]()[unsafe_offset=choice]
        # What does not fit is out of range in any case.
        return Int32(max(min(wide, Int64(Int32.MAX)), -2))
    return ids[unsafe_offset=choice]


@always_inline
def _load_rank[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int32:
    """Returns the rank of a choice, or `NO_EXPERT` if no expert of the token is there.
    """
    var token_idx = UInt32(choice) // UInt32(group.n_ranks)
    var rank = Int32(UInt32(choice) % UInt32(group.n_ranks))
    comptime for k in range(group.router_top_k):
        var id = load_router_id[group](ids, Int(token_idx) * group.router_top_k + k)
        if rank_of_id[group](id) == rank:
            return rank
    return NO_EXPERT


@always_inline
def rank_of_id[group: Group](id: Int32) -> Int32:
    """Returns the rank of an expert that the router chose, or `NO_EXPERT`."""
    comptime n_local = group.router_experts // group.n_ranks
    if id < 0 or id >= Int32(n_local * group.n_ranks):
        return NO_EXPERT
    return Int32(UInt32(id) // UInt32(n_local))


def given_id[group: Group](ids: ImmPointer[Int32], choice: Int) -> Int:
    """Returns the expert of a choice as it was given, in 64 bits if it has them."""
    comptime if group.wide_ids:
        return Int(ids.unsafe_bitcast[Int64]()[unsafe_offset=choice])
    return Int(load_id[group](ids, choice))
