# SPDX-License-Identifier: Apache-2.0
"""Control words of a block of `DispatchByExpert`, and the roles of its warps: the first
finds slots, the next ones send, the last reads counts. Those that begin or end the launch
for other ranks are among the senders, and do that before they send.
"""
comptime N_WARPS_MIN = 3
# Counted from the end.
comptime PUBLISHING_WARP = 3
"""The warp that publishes earlier reads."""
comptime ELECTING_WARP = 2
"""The warp that counts the blocks that have begun."""
comptime POLLING_WARP = 2
"""The warp that polls done words, once it has sent."""
comptime INDEXED = 0
"""Control word: items of the block whose slots are found."""
comptime PAIRS_READY = 1
"""Control word: whether the counts of all pairs have come."""
comptime NEXT_ITEM = 2
"""Control word: the next message to receive."""
comptime N_CONTROL = 3
