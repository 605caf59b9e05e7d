# SPDX-License-Identifier: Apache-2.0
"""Compiles what watches, for a GPU that need not be there.

Run by tests/cli/test_stats.py.
"""
from emitting import ALL_CASES, emit
from groups import RowsBack, SumsBack
from max_ep.launch.watch import watch_kernel


def main() raises:
    comptime rows = RowsBack[n_ranks=4].group
    comptime sums = SumsBack[DType.bfloat16, oversubscribed=True, n_ranks=4].group
    emit[watch_kernel[rows, False], links=ALL_CASES]("dispatch")
    emit[watch_kernel[rows, True], links=ALL_CASES]("combine")
    emit[watch_kernel[sums, True], links=ALL_CASES]("combine_sums")
