# SPDX-License-Identifier: Apache-2.0
"""How CPU kernels move bytes: shared by MAX's workers, streamed if large."""
from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level
from std.memory import unsafe_memcpy

from ..protocol.flags import drain_stores
from ..protocol.kernel_argument import MutPointer
from ..protocol.layout import MESSAGE_ALIGN

comptime INLINE_BYTES = 128 * 1024
"""Work below this many bytes stays on the calling thread: copying it takes
about as long as waking the pool."""

comptime STREAM_BYTES = 4 * 1024 * 1024
"""From this many bytes on, a launch writes past the caches: what it writes
would be evicted before it is read, and fetching each line only to overwrite
it costs a third of the traffic (docs/decisions/0006-cpu-ranks.md)."""


@always_inline
def should_stream(n_items: Int, bytes_per_item: Int) -> Bool:
    return n_items * bytes_per_item >= STREAM_BYTES


@always_inline
def copy_bytes(
    *, dest: MutPointer[UInt8], src: Pointer[UInt8, _], count: Int, is_streaming: Bool
):
    if not is_streaming:
        unsafe_memcpy(dest=dest, src=src, count=count)
        return
    for i in range(0, count, MESSAGE_ALIGN):
        dest.unsafe_store[alignment=MESSAGE_ALIGN, non_temporal=True](
            i, src.unsafe_load[width=MESSAGE_ALIGN](i)
        )


@always_inline
def for_each_chunk[
    F: def(Int, Int) -> None
](n_items: Int, bytes_per_item: Int, work: F):
    """Calls `work(begin, end)` on ranges that cover `[0, n_items)`.

    Returns when all ranges are done and their stores, streamed ones too, are
    visible to the calling thread: a flag that it publishes then covers them.
    """
    if n_items <= 0:
        return
    var n_workers = parallelism_level(None)
    if n_workers == 1 or n_items * bytes_per_item <= INLINE_BYTES:
        work(0, n_items)
        drain_stores()
        return
    # More chunks than workers even out ranges of unequal cost.
    var n_chunks = min(n_items, 4 * n_workers)

    def run_chunk(chunk: Int) {imm}:
        work(chunk * n_items // n_chunks, (chunk + 1) * n_items // n_chunks)
        drain_stores()

    sync_parallelize(run_chunk, n_chunks)
