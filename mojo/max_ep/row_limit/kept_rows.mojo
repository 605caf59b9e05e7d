# SPDX-License-Identifier: Apache-2.0
"""Which rows a rank keeps that do not all fit: `EPConfig.max_output_rows`.

A function of the counts of its pairs alone: the same on every run, and known before
any row is placed (docs/decisions/0028-a-cap-on-dispatched-rows.md). A pair keeps at
most a level, the largest with which all fit. The rows that are left go to the first
pairs that have more.
"""


@always_inline
def largest_level[F: def(Int) -> Int](n_rows_max: Int, rows_below: F) -> Int:
    """Finds the level of pairs that do not all fit; `rows_below` counts its rows."""
    var level = 0
    var too_high = n_rows_max + 1
    while too_high - level > 1:
        var middle = (level + too_high) // 2
        if rows_below(middle) <= n_rows_max:
            level = middle
        else:
            too_high = middle
    return level


def keep_rows(mut counts: List[Int], n_rows_max: Int):
    """Reduces the counts of pairs to what is kept, at most `n_rows_max` in all."""

    def rows_below(level: Int) {imm counts} -> Int:
        var n = 0
        for count in counts:
            n += min(count, level)
        return n

    if rows_below(Int.MAX) <= n_rows_max:
        return
    var level = largest_level(n_rows_max, rows_below)
    var n_left = n_rows_max - rows_below(level)
    for ref count in counts:
        if count > level:
            count = level + Int(n_left > 0)
            n_left -= 1
