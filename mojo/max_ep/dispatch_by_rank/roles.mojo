# SPDX-License-Identifier: Apache-2.0
"""Roles of the warps of a dispatch block, and the control words that they share.

The last `N_INDEX_WARPS` write entries and counts; the last `n_scanners` of these then
read the counts of all ranks. The warps between them and the first send; in async alone,
index warps send afterwards. All but the index warps receive, and they too where warps
take work from a counter.
"""
from ..device.schedule import Schedule
from ..protocol.layout import Group, N_CHUNKS

comptime N_INDEX_WARPS = 8
comptime N_WARPS_MIN = N_INDEX_WARPS + 2
"""Index warps, `NUMBERS_WARP`, and one that sends."""
comptime NUMBERS_WARP = 0
"""The warp that publishes how many tokens this rank sends, and reads peers' numbers."""
comptime FIRST_SENDER = 1

# Warps with another task first: if they send at all, they start sending later.
comptime ELECTING_WARP = 6
"""The warp that counts the blocks that have begun."""
comptime DONE_WARP = 7
"""The warp that publishes earlier reads, or polls done words."""
comptime TOKENS_READY = 0
"""Control word: 1 if the numbers of tokens are there, or `NO_NUMBERS`."""
comptime NO_NUMBERS = UInt32(2)
comptime SUMMED = 1
"""Control word: scanners, index warps that read counts, that have their sum."""
comptime SCANNED = 2
"""Control word: scanners that have the rows of their pairs."""
comptime FAILED = 3
"""Control word: whether a count is missing or the rows do not fit."""
comptime NEXT_RECEIVE = 4
"""Control word: next item to receive."""
comptime GAVE_UP = 5
"""Control word: 1 if an index warp may not write."""
comptime NEXT_SEND = 6
"""Control word: work that sending warps have taken after their first."""
comptime N_CONTROL = NEXT_SEND + 1
comptime INDEXED = N_CONTROL
"""Control word, only over several hosts: index warps that are done."""

comptime _TWO_AT_ONCE = 1024
"""Tokens up to which a warp sends two chunks at once where it could send four: fours
are too few to keep all warps busy to the end."""

comptime _SHORT_CHUNK = 4
"""Steps of a short chunk: four of them are sent at once for few tokens, too."""


@always_inline
def n_send_warps[group: Group, receives: Bool](is_inline: Bool, n_warps: Int) -> Int:
    comptime if receives:
        var most = n_warps - FIRST_SENDER - N_INDEX_WARPS
        return min(6 if is_inline else 3, most)
    var most = n_warps - FIRST_SENDER
    comptime if group.n_ranks == 2:
        # Each sends more at once (`chunks_at_once_shift`). The last of them, of 16
        # warps, is an index warp, which begins later.
        return most if is_inline else min(8, most)
    return most


@always_inline
def chunks_at_once_shift[
    group: Group, n_steps: Int
](n_tokens: Int, n_senders: Int) -> Int:
    """Chooses how many chunks of a token a warp sends before it publishes them.

    A publish waits until earlier stores have arrived. A few warps that send much between
    publishes keep the link as busy as many warps, and delay the block's other warps
    less: at most 16 chunks of a block are in flight. With more than two ranks a chunk
    goes to several of them, which is enough.
    """
    comptime n_chunks = min(N_CHUNKS, n_steps)
    comptime are_short = n_steps <= _SHORT_CHUNK * n_chunks
    comptime if group.n_ranks > 2:
        return 0
    comptime if n_chunks % 4 == 0:
        if n_senders <= 4 and (are_short or n_tokens > _TWO_AT_ONCE):
            return 2
    comptime if n_chunks % 2 == 0:
        if n_senders <= 8:
            return 1
    return 0


@always_inline
def token_receive_schedule(warp_idx: Int, n_warps: Int) -> Schedule:
    """Schedules the receiving warps: those with another task first come last.

    Index warps have no round: some of them scan.
    """
    return Schedule.of_receivers(warp_idx, n_warps - N_INDEX_WARPS, ELECTING_WARP)
