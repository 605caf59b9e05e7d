# SPDX-License-Identifier: Apache-2.0
"""Compiles what watches, for a GPU that need not be there.

Run by tests/test_stats.py.
"""
from emitting import emit
from groups import combine_group
from max_ep.layout import Addressing, Returns
from max_ep.watch import watch_kernel


def show[
    addressing: Addressing, returns: Returns, is_combine: Bool
](name: StaticString) raises:
    """Compiles the kernel for one direction."""
    comptime group = combine_group[
        DType.bfloat16,
        7168,
        8,
        256,
        4,
        128,
        addressing=addressing,
        returns=returns,
    ]()
    emit[watch_kernel[group, is_combine]](name)


def main() raises:
    """Compiles all of them."""
    show[Addressing.BY_EXPERT, Returns.ROWS, False]("dispatch")
    show[Addressing.BY_EXPERT, Returns.ROWS, True]("combine")
    show[Addressing.BY_RANK, Returns.SUMS, True]("combine_reduced")
