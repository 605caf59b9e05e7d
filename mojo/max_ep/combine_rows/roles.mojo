# SPDX-License-Identifier: Apache-2.0
"""Control words of a block of `CombineRows`, and the roles of its warps: the first ones
send, all reduce, and the last three have a task of their own first.
"""
comptime N_WARPS_MIN = 3
# Counted from the end.
comptime PUBLISHING_WARP = 3
"""The warp that publishes earlier reads."""
comptime ELECTING_WARP = 2
"""The warp that counts the blocks that have begun."""
comptime POLLING_WARP = 1
"""The warp that polls done words."""
comptime NEXT_ROW = 0
"""Control word: next row to send, or next part of one."""
comptime NEXT_CHUNK = 1
"""Control word: next chunk of a token to reduce."""
comptime SENT_PARTS = 2
"""First control word of those that count the parts of a row that are sent."""
comptime N_SPLIT_ROUNDS = 4
"""Rows of a block that are split into parts at most."""
comptime N_CONTROL = SENT_PARTS + N_SPLIT_ROUNDS
