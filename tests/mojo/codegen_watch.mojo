# SPDX-License-Identifier: Apache-2.0
"""Compiles what watches, for a GPU that need not be there.

Run by tests/test_stats.py.
"""
from emitting import emit
from max_ep.combine_rows.phase import combine_group_of
from max_ep.layout import EXPERT_SLOTS, RANK_SLOTS_REDUCED
from max_ep.watch import watch_kernel


def show[protocol: Int, is_combine: Bool](name: StaticString) raises:
    comptime group = combine_group_of[
        DType.bfloat16, 7168, 8, 256, 4, 128, protocol
    ]()
    emit[watch_kernel[256, 256, group, 4, is_combine]](name)


def main() raises:
    """Runs the command line."""
    show[EXPERT_SLOTS, False]("dispatch")
    show[EXPERT_SLOTS, True]("combine")
    show[RANK_SLOTS_REDUCED, True]("combine_reduced")
