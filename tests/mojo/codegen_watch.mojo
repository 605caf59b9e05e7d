# SPDX-License-Identifier: Apache-2.0
"""Compiles what watches, for a GPU that need not be there.

Run by tests/test_stats.py.
"""
from emitting import emit
from groups import combine_group, EXPERT_SLOTS, RANK_SLOTS_REDUCED
from max_ep.watch import watch_kernel


def show[protocol: Int, is_combine: Bool](name: StaticString) raises:
    """Compiles the kernel for one direction."""
    comptime group = combine_group[
        DType.bfloat16,
        7168,
        8,
        256,
        4,
        128,
        4,
        False,
        protocol,
        DType.bfloat16,
        0,
    ]()
    emit[watch_kernel[group, is_combine]](name)


def main() raises:
    """Compiles all of them."""
    show[EXPERT_SLOTS, False]("dispatch")
    show[EXPERT_SLOTS, True]("combine")
    show[RANK_SLOTS_REDUCED, True]("combine_reduced")
