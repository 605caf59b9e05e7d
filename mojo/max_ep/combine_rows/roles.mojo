# SPDX-License-Identifier: Apache-2.0
"""Control words of a block of `CombineRows`."""

comptime NEXT_ROW = 0
"""Control word: next row to send."""
comptime NEXT_CHUNK = 1
"""Control word: next chunk of a token to reduce."""
comptime N_CONTROL = 2
