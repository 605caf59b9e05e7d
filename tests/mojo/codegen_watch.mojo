# SPDX-License-Identifier: Apache-2.0
"""Compiles what watches, for a GPU that need not be there.

Run by tests/test_stats.py.
"""
from emitting import emit
from groups import ANY, combine_group, SUMS
from max_ep.layout import Group
from max_ep.watch import watch_kernel


def group_of(returns: Int) -> Group:
    return combine_group[DType.bfloat16](returns, n_ranks=4)


def main() raises:
    """Compiles the kernel for each direction."""
    emit[watch_kernel[group_of(ANY), False]]("dispatch")
    emit[watch_kernel[group_of(ANY), True]]("combine")
    emit[watch_kernel[group_of(SUMS), True]]("combine_sums")
