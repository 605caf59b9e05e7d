# SPDX-License-Identifier: Apache-2.0
"""Combine of `expert_slots` for CPU ranks.

Every row goes back to the place of its choice, `[token][k]`, on its source
rank; the source adds the rows of a token in choice order:

    acc = 0; for k: acc = fma(weight[k], row[k], acc)       in float32
    result = acc, rounded to the combine dtype
    result = result + shared[token], likewise    with a fused shared expert

A choice without a row (id `-1`) is skipped. Rows of the shared expert are not
sent. After `combine_async`: every row
is with its source. After `combine_wait`: the result is there, and every owner
knows that its rows have been read.
"""
from std.math import fma
from std.sys import size_of

from ..counters import EPLocalSyncCounters
from ..flags import (
    Deadline,
    Waiter,
    await_generation,
    generation_of,
    next_generation,
    publish,
)
from ..cpu_copy import copy_bytes, for_each_chunk, should_stream
from ..layout import (
    RegionLayout,
    n_experts_on_rank,
    plain_token_bytes,
)
from ..token_format import BytePointer, SharedRows
from ..transport import PeerBuffers
from .host_steps import (
    RowCursor,
    await_readers,
    flag_at,
    hash_src_info,
    message_flag,
    n_rows_of_pairs,
    write_source_info,
)


def check_src_info[
    n_experts: Int, layout: RegionLayout
](
    src_info: Pointer[Int32, ImmUntrackedOrigin],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Makes sure that `src_info` is the one of the last `dispatch_wait`.

    Its digest must be the one noted there, and what becomes part of a remote
    address is bounds-checked, before anything is sent.
    """
    comptime n_pairs = layout.pair(layout.n_local_experts(), 0)
    var digest = hash_src_info(src_info, n_pairs, counters)
    var is_known = digest == counters.src_info_hash()
    var cursor = RowCursor.start()
    for i in range(n_rows_of_pairs(n_pairs, counters)):
        var slot = cursor.advance(i, counters)
        var row = counters.pair_row(cursor.pair) + slot
        var token_idx = Int(src_info[unsafe_offset=2 * row])
        var k = Int(src_info[unsafe_offset=2 * row + 1])
        if (
            is_known
            and 0 <= token_idx
            and token_idx < layout.max_tokens_per_rank
            and 0 <= k
            and k < layout.top_k
        ):
            continue
        raise Error(
            "max_ep: combine_async on rank ",
            counters.my_rank(),
            ": src_info (row ",
            row,
            ": token ",
            token_idx,
            ", k ",
            k,
            ") is not that of this rank's last dispatch_wait. Pass the",
            " src_info of that dispatch, and combine before the next dispatch",
            " of the same buffers.",
        )


def start_combine[
    n_experts: Int, n_ranks: Int, layout: RegionLayout
](
    n_rows_max: Int,
    src_info: Pointer[Int32, ImmUntrackedOrigin],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises -> UInt32:
    """Checks what is to be sent back, and waits until there is room for it."""
    comptime n_pairs = layout.pair(layout.n_local_experts(), 0)
    var my_rank = counters.my_rank()
    if counters.dispatch_received() == 0:
        raise Error(
            "max_ep: combine_async on rank ",
            my_rank,
            ": nothing was dispatched to this rank yet; combine sends back",
            " the rows of the last dispatch_wait.",
        )
    if counters.pair_row(n_pairs) > n_rows_max:
        raise Error(
            "max_ep: combine_async on rank ",
            my_rank,
            ": the rows of the last dispatch_wait end at ",
            counters.pair_row(n_pairs),
            ", input_tokens and src_info hold ",
            n_rows_max,
            ".",
        )
    check_src_info[n_experts, layout](src_info, counters)
    if n_experts_on_rank(n_experts, n_ranks, my_rank) > 0:
        # Nobody waits for a rank without experts, so their done words run
        # ahead of it; it writes nothing.
        await_readers[n_experts, n_ranks](
            recv_counts[my_rank],
            layout.combine_done_offset(0),
            counters.combine_sent(),
            False,
            Deadline.after(counters.timeout_ms()),
            Waiter("combine_async", my_rank, 0, "word that it has read", -1),
        )
    return next_generation(counters.combine_sent())


def publish_rows[
    n_experts: Int, n_ranks: Int, layout: RegionLayout
](
    generation: UInt32,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
):
    """Tells every source how many of its rows each expert here had."""
    # I2: counts after rows; zeros too, every source waits for every expert.
    var my_rank = counters.my_rank()
    for local_expert in range(n_experts_on_rank(n_experts, n_ranks, my_rank)):
        var expert_id = my_rank * layout.n_local_experts() + local_expert
        for src_rank in range(n_ranks):
            var pair = layout.pair(local_expert, src_rank)
            publish(
                flag_at(
                    recv_counts[src_rank],
                    layout.combine_count_offset(expert_id),
                ),
                generation,
                counters.pair_count(pair),
            )
    counters.set_combine_sent(generation)


def combine_async_host[
    combine_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    n_ranks: Int,
    layout: RegionLayout,
](
    input_tokens: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int,
    src_info: Pointer[Int32, ImmUntrackedOrigin],
    recv_bufs: PeerBuffers[n_ranks],
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Sends each expert row back to the rank its token came from."""
    comptime msg_bytes = layout.combine_msg_bytes
    comptime token_bytes = plain_token_bytes(
        hidden_size, size_of[Scalar[combine_dtype]]()
    )
    comptime n_pairs = layout.pair(layout.n_local_experts(), 0)

    var generation = start_combine[n_experts, n_ranks, layout](
        n_rows_max, src_info, recv_counts, counters
    )
    var n_rows = n_rows_of_pairs(n_pairs, counters)
    var is_streaming = should_stream(n_rows, msg_bytes)

    def send_rows(begin: Int, end: Int) {imm}:
        var cursor = RowCursor.start()
        for i in range(begin, end):
            var slot = cursor.advance(i, counters)
            var row = counters.pair_row(cursor.pair) + slot
            var src_rank = cursor.pair % n_ranks
            var token_idx = Int(src_info[unsafe_offset=2 * row])
            var k = Int(src_info[unsafe_offset=2 * row + 1])
            # I4: a choice has one expert, so one writer.
            var message = recv_bufs[src_rank].unsafe_offset(
                layout.combine_message_offset(token_idx, k)
            )
            copy_bytes(
                dest=message,
                src=input_tokens.unsafe_offset(
                    row * hidden_size
                ).unsafe_bitcast[UInt8](),
                count=token_bytes,
                is_streaming=is_streaming,
            )
            write_source_info(
                message, msg_bytes, layout.choice(token_idx, k), generation
            )

    for_each_chunk(n_rows, msg_bytes, send_rows)
    publish_rows[n_experts, n_ranks, layout](generation, recv_counts, counters)
    # AFTER: this generation's rows and counts are with their sources.


@always_inline
def _reduce_token[
    combine_dtype: DType,
    hidden_size: Int,
    layout: RegionLayout,
    fused_shared_expert: Bool,
](
    result: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    rows: BytePointer,
    shared: BytePointer,
    weights: Pointer[Float32, ImmUntrackedOrigin],
    generation: UInt32,
) -> Int:
    """Adds the weighted rows of one token, in choice order."""
    comptime top_k = layout.top_k
    comptime msg_bytes = layout.combine_msg_bytes
    var choices = Array[Int, top_k](fill=0)
    var n_found = 0
    for k in range(top_k):
        var flag = message_flag(
            rows.unsafe_offset(layout.combine_message_offset(0, k)), msg_bytes
        )
        if generation_of(flag[]) == generation:
            choices[n_found] = k
            n_found += 1

    @always_inline
    def reduce_columns[width: Int](column: Int) {imm}:
        var acc = SIMD[DType.float32, width](0)
        for i in range(n_found):
            var k = choices[i]
            var row = rows.unsafe_offset(
                layout.combine_message_offset(0, k)
            ).unsafe_bitcast[Scalar[combine_dtype]]()
            acc = fma(
                SIMD[DType.float32, width](weights[unsafe_offset=k]),
                row.unsafe_load[width=width](column).cast[DType.float32](),
                acc,
            )
        comptime if fused_shared_expert:
            acc = acc.cast[combine_dtype]().cast[DType.float32]()
            acc += (
                shared.unsafe_bitcast[Scalar[combine_dtype]]()
                .unsafe_load[width=width](column)
                .cast[DType.float32]()
            )
        result.unsafe_store(column, acc.cast[combine_dtype]())

    comptime width = 32
    comptime whole = hidden_size // width * width
    for column in range(0, whole, width):
        reduce_columns[width](column)
    for column in range(whole, hidden_size):
        reduce_columns[1](column)
    return n_found


@fieldwise_init
struct ArrivedRows(TrivialRegisterPassable):
    """What has come back in a generation."""

    var generation: UInt32
    """The generation."""
    var n_rows: Int
    """Rows of this rank's tokens, on all ranks."""


def await_rows[
    n_experts: Int, n_ranks: Int, layout: RegionLayout
](
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises -> ArrivedRows:
    """Waits until every expert has sent what it made of this rank's tokens."""
    var my_rank = counters.my_rank()
    var generation = next_generation(counters.combine_received())
    var deadline = Deadline.after(counters.timeout_ms())
    var n_rows = 0
    for expert_id in range(n_experts):
        n_rows += await_generation(
            flag_at(
                recv_counts[my_rank], layout.combine_count_offset(expert_id)
            ),
            generation,
            deadline,
            Waiter(
                "combine_wait",
                my_rank,
                expert_id // layout.n_local_experts(),
                "rows",
                expert_id,
            ),
        )
    return ArrivedRows(generation, n_rows)


def finish_combine[
    n_experts: Int, n_ranks: Int, layout: RegionLayout
](
    generation: UInt32,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
):
    """Notes that a generation has come back, and tells every owner."""
    var my_rank = counters.my_rank()
    counters.set_combine_received(generation)
    for owner_rank in range(n_ranks):
        publish(
            flag_at(
                recv_counts[owner_rank], layout.combine_done_offset(my_rank)
            ),
            generation,
            0,
        )


def combine_wait_host[
    combine_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    n_ranks: Int,
    layout: RegionLayout,
    fused_shared_expert: Bool = False,
](
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int,
    shared_rows: SharedRows,
    recv_buf: BytePointer,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Waits for all rows and adds the weighted rows of each token."""
    comptime top_k = layout.top_k
    var my_rank = counters.my_rank()
    var arrived = await_rows[n_experts, n_ranks, layout](recv_counts, counters)
    var generation = arrived.generation
    # AFTER: every row of this generation is visible here and to the workers.

    # Rows found of each token: summed below, when the workers are done.
    var found = List[Int32](length=n_tokens, fill=0)
    var n_found_of = found.unsafe_ptr()

    def reduce_tokens(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var rows = recv_buf.unsafe_offset(
                layout.combine_message_offset(token_idx, 0)
            )
            n_found_of[unsafe_offset=token_idx] = Int32(
                _reduce_token[
                    combine_dtype, hidden_size, layout, fused_shared_expert
                ](
                    output_tokens.unsafe_offset(token_idx * hidden_size),
                    rows,
                    shared_rows.rows.unsafe_offset(
                        token_idx
                        * hidden_size
                        * size_of[Scalar[combine_dtype]]()
                    ),
                    router_weights.unsafe_offset(token_idx * top_k),
                    generation,
                )
            )

    for_each_chunk(n_tokens, top_k * layout.combine_msg_bytes, reduce_tokens)
    var n_found = 0
    for n in found:
        n_found += Int(n)
    if n_found != arrived.n_rows:
        raise Error(
            "max_ep: combine_wait on rank ",
            my_rank,
            ": ",
            arrived.n_rows,
            " rows came back but only ",
            n_found,
            " belong to the ",
            n_tokens,
            " tokens of router_weights; pass the weights of all tokens that",
            " were dispatched, then call EPCommInitializer.reset().",
        )

    finish_combine[n_experts, n_ranks, layout](
        generation, recv_counts, counters
    )
    # AFTER: the result is complete; every owner may overwrite its rows here.
