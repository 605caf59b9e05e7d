# SPDX-License-Identifier: Apache-2.0
"""Which rows a rank keeps that do not all fit: `EPConfig.max_output_rows`.

A function of the counts of its pairs alone: the same on every run, and known before
any row is placed (docs/decisions/0028-a-cap-on-dispatched-rows.md).
"""


def keep_rows(mut counts: List[Int], n_rows_max: Int):
    """Reduces the counts of pairs to what is kept, `n_rows_max` in all if there are more.

    A pair keeps at most a level, the largest with which all fit. The rows that are left
    go to the first pairs that have more.
    """
    if _rows_below(counts, Int.MAX) <= n_rows_max:
        return
    var level = 0
    var too_high = n_rows_max + 1
    while too_high - level > 1:
        var middle = (level + too_high) // 2
        if _rows_below(counts, middle) <= n_rows_max:
            level = middle
        else:
            too_high = middle
    var n_left = n_rows_max - _rows_below(counts, level)
    for ref count in counts:
        if count > level:
            count = level + Int(n_left > 0)
            n_left -= 1


def _rows_below(counts: List[Int], level: Int) -> Int:
    """Counts the rows if a pair keeps at most a level."""
    var n = 0
    for count in counts:
        n += min(count, level)
    return n
