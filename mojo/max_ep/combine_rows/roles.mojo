# SPDX-License-Identifier: Apache-2.0
"""Control words and roles of the warps of a block of `CombineRows`."""

comptime NEXT_ROW = 0
"""Control word: next row to send."""
comptime NEXT_CHUNK = 1
"""Control word: next chunk of a token to reduce."""
comptime N_CONTROL = 2


@always_inline
def n_send_warps(n_tokens: Int, n_warps: Int) -> Int:
    """Chooses how many warps of a block send while the others reduce."""
    return min(4 if n_tokens > 256 else 8, n_warps - 1)
