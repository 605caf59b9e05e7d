# SPDX-License-Identifier: Apache-2.0
"""Deals independent work items of a CPU kernel over MAX's worker pool."""
from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level

comptime INLINE_BYTES = 128 * 1024
"""Work below this many bytes stays on the calling thread: copying it takes
about as long as waking the pool."""


@always_inline
def for_each_chunk[
    F: def(Int, Int) -> None
](n_items: Int, bytes_per_item: Int, work: F):
    """Calls `work(begin, end)` on ranges that cover `[0, n_items)`.

    Returns when all ranges are done, so what they wrote is visible to the
    calling thread.

    Parameters:
        F: Type of the work.

    Args:
        n_items: Items in all.
        bytes_per_item: Bytes that one item moves, to see whether it is worth
            the workers.
        work: Does a range; called from several threads.
    """
    if n_items <= 0:
        return
    var n_workers = parallelism_level(None)
    if n_workers == 1 or n_items * bytes_per_item <= INLINE_BYTES:
        work(0, n_items)
        return
    # More chunks than workers even out ranges of unequal cost.
    var n_chunks = min(n_items, 4 * n_workers)

    def run_chunk(chunk: Int) {imm}:
        work(chunk * n_items // n_chunks, (chunk + 1) * n_items // n_chunks)

    sync_parallelize(run_chunk, n_chunks)
