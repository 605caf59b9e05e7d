# SPDX-License-Identifier: Apache-2.0
"""Reduced combine of `rank_slots` for CPU ranks.

The rank that holds some of a token's experts adds their rows and sends one
partial sum; the source adds those of all ranks:

    owner    acc = 0; for k: acc = fma(weight[k], row[k], acc)      in float32
             partial = acc, rounded once to the partial dtype
    source   acc = its own partial, not rounded, for it is not sent
             for each other owner, in order of rank: acc = acc + partial
             result = acc, rounded to the combine dtype
             result = result + shared[token], likewise   with a fused shared expert

`k` counts the choices with a row on that rank. Rows and weights are found by
what `dispatch_wait` has noted in the counters. After `combine_async`: every
partial is with its source. After `combine_wait`: the result is there, and every
owner knows that its partials have been read.
"""
from std.math import fma

from ..counters import EPLocalSyncCounters, NO_ROW, source_rank
from ..expert_slots.host_combine import (
    await_rows,
    finish_combine,
    publish_rows,
    start_combine,
)
from ..expert_slots.host_steps import message_flag, write_source_info
from ..flags import count_of, generation_of
from ..cpu_copy import for_each_chunk, should_stream
from ..layout import MESSAGE_ALIGN, RegionLayout
from ..token_format import BytePointer, SharedRows
from ..transport import PeerBuffers

comptime _WIDTH = 32
"""Columns that are added at once."""


struct _RowsOfToken[layout: RegionLayout](Movable):
    """The rows that a token has on this rank, in the order of its choices.

    Parameters:
        layout: Offsets of the buffers.
    """

    var rows: Array[Int, Self.layout.top_k]
    """The rows, `[n_rows]`."""
    var weights: Array[Float32, Self.layout.top_k]
    """Their router weights, `[n_rows]`."""
    var n_rows: Int
    """How many there are."""

    @always_inline
    def __init__(
        out self,
        counters: EPLocalSyncCounters,
        source: Int,
        token_idx: Int,
    ):
        """Looks them up among those of the last `dispatch_wait`."""
        self.rows = Array[Int, Self.layout.top_k](fill=0)
        self.weights = Array[Float32, Self.layout.top_k](fill=0)
        self.n_rows = 0
        var n_tokens = counters.received_tokens(Self.layout)
        if token_idx >= Int(n_tokens[unsafe_offset=source]):
            return
        var rows = counters.received_rows(Self.layout, source)
        var weights = counters.received_weights(Self.layout, source)
        for k in range(Self.layout.top_k):
            var choice = Self.layout.choice(token_idx, k)
            var row = rows[unsafe_offset=choice]
            if row != NO_ROW:
                self.rows[self.n_rows] = Int(row)
                self.weights[self.n_rows] = weights[unsafe_offset=choice]
                self.n_rows += 1

    @always_inline
    def weighted_sum[
        combine_dtype: DType, //, hidden_size: Int, width: Int
    ](
        self,
        expert_rows: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
        column: Int,
    ) -> SIMD[DType.float32, width]:
        """Adds some columns of the weighted rows."""
        var acc = SIMD[DType.float32, width](0)
        for i in range(self.n_rows):
            var row = expert_rows.unsafe_offset(self.rows[i] * hidden_size)
            acc = fma(
                SIMD[DType.float32, width](self.weights[i]),
                row.unsafe_load[width=width](column).cast[DType.float32](),
                acc,
            )
        return acc


def combine_async_host[
    combine_dtype: DType,
    partial_dtype: DType,
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
    """Sends one partial sum for each token of a peer that has rows here."""
    comptime msg_bytes = layout.combine_msg_bytes
    var my_rank = counters.my_rank()
    var generation = start_combine[n_experts, n_ranks, layout](
        n_rows_max, src_info, recv_counts, counters
    )
    counters.set_combine_of(counters.dispatch_received())

    var n_tokens_of = counters.received_tokens(layout)
    var n_tokens = 0
    for source in range(n_ranks):
        n_tokens += Int(n_tokens_of[unsafe_offset=source])
    var is_streaming = should_stream(n_tokens, msg_bytes)

    def send_partials(begin: Int, end: Int) {imm}:
        var source = 0
        var first = 0
        for i in range(begin, end):
            while first + Int(n_tokens_of[unsafe_offset=source]) <= i:
                first += Int(n_tokens_of[unsafe_offset=source])
                source += 1
            var src_rank = source_rank(my_rank, source, n_ranks)
            if src_rank == my_rank:
                continue
            var token_idx = i - first
            var mine = _RowsOfToken[layout](counters, source, token_idx)
            if mine.n_rows == 0:
                continue
            # I4: only this rank writes the partials of its number.
            var message = recv_bufs[src_rank].unsafe_offset(
                layout.partial_offset(my_rank, token_idx)
            )
            var partial = message.unsafe_bitcast[Scalar[partial_dtype]]()
            comptime whole = hidden_size // _WIDTH * _WIDTH
            for column in range(0, whole, _WIDTH):
                var acc = mine.weighted_sum[hidden_size, _WIDTH](
                    input_tokens, column
                ).cast[partial_dtype]()
                if is_streaming:
                    partial.unsafe_store[
                        alignment=MESSAGE_ALIGN, non_temporal=True
                    ](column, acc)
                else:
                    partial.unsafe_store(column, acc)
            for column in range(whole, hidden_size):
                partial.unsafe_store(
                    column,
                    mine.weighted_sum[hidden_size, 1](
                        input_tokens, column
                    ).cast[partial_dtype](),
                )
            write_source_info(message, msg_bytes, mine.n_rows, generation)

    for_each_chunk(n_tokens, 2 * msg_bytes, send_partials)

    publish_rows[n_experts, n_ranks, layout](generation, recv_counts, counters)
    # AFTER: this generation's partials and counts are with their sources.


def combine_wait_host[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    n_ranks: Int,
    layout: RegionLayout,
    fused_shared_expert: Bool = False,
](
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    n_tokens: Int,
    expert_rows: SharedRows,
    recv_buf: BytePointer,
    recv_counts: PeerBuffers[n_ranks],
    counters: EPLocalSyncCounters[n_experts],
) raises:
    """Waits for all partial sums and adds those of each token."""
    var my_rank = counters.my_rank()
    _check_unsent_rows[n_experts, layout](
        n_tokens, expert_rows.n_rows, counters
    )
    var arrived = await_rows[n_experts, n_ranks, layout](recv_counts, counters)
    var generation = arrived.generation
    # AFTER: every partial of this generation is visible here and to the workers.

    var rows = Pointer[Scalar[combine_dtype], ImmUntrackedOrigin](
        unsafe_from_address=Int(expert_rows.rows)
    )
    # Rows that are in the sum of each token: added up below.
    var found = List[Int32](length=n_tokens, fill=0)
    var n_found_of = found.unsafe_ptr()

    def reduce_tokens(begin: Int, end: Int) {imm}:
        for token_idx in range(begin, end):
            var own = _RowsOfToken[layout](counters, 0, token_idx)
            var n_found = own.n_rows
            var owners = Array[Int, n_ranks](fill=0)
            var n_owners = 0
            for owner_rank in range(n_ranks):
                var flag = message_flag(
                    recv_buf.unsafe_offset(
                        layout.partial_offset(owner_rank, token_idx)
                    ),
                    layout.combine_msg_bytes,
                )[]
                # I8: what an older generation left is skipped.
                if generation_of(flag) == generation:
                    owners[n_owners] = owner_rank
                    n_owners += 1
                    n_found += count_of(flag)
            n_found_of[unsafe_offset=token_idx] = Int32(n_found)

            @always_inline
            def reduce_columns[width: Int](column: Int) {imm}:
                var acc = own.weighted_sum[hidden_size, width](rows, column)
                for i in range(n_owners):
                    acc += (
                        recv_buf.unsafe_offset(
                            layout.partial_offset(owners[i], token_idx)
                        )
                        .unsafe_bitcast[Scalar[partial_dtype]]()
                        .unsafe_load[width=width](column)
                        .cast[DType.float32]()
                    )
                comptime if fused_shared_expert:
                    acc = acc.cast[combine_dtype]().cast[DType.float32]()
                    acc += rows.unsafe_load[width=width](
                        token_idx * hidden_size + column
                    ).cast[DType.float32]()
                output_tokens.unsafe_store(
                    token_idx * hidden_size + column, acc.cast[combine_dtype]()
                )

            comptime whole = hidden_size // _WIDTH * _WIDTH
            for column in range(0, whole, _WIDTH):
                reduce_columns[_WIDTH](column)
            for column in range(whole, hidden_size):
                reduce_columns[1](column)

    for_each_chunk(
        n_tokens,
        min(layout.top_k, n_ranks) * layout.combine_msg_bytes,
        reduce_tokens,
    )
    var n_found = 0
    for n in found:
        n_found += Int(n)
    if n_found != arrived.n_rows:
        raise Error(
            "max_ep: combine_wait on rank ",
            my_rank,
            ": its tokens have ",
            arrived.n_rows,
            " rows, but those that came are sums of ",
            n_found,
            "; something else has written to its memory. Call",
            " EPCommInitializer.reset() (or restart the group).",
        )
    finish_combine[n_experts, n_ranks, layout](
        generation, recv_counts, counters
    )
    # AFTER: the result is complete; every owner may overwrite its partials here.


def _check_unsent_rows[
    n_experts: Int, layout: RegionLayout
](n_tokens: Int, n_rows: Int, counters: EPLocalSyncCounters[n_experts]) raises:
    """Raises unless tokens and rows are those that `combine_async` answered."""
    comptime n_pairs = layout.pair(layout.n_local_experts(), 0)
    var my_rank = counters.my_rank()
    var answered = counters.combine_of()
    if answered != counters.dispatch_received():
        raise Error(
            "max_ep: combine_wait on rank ",
            my_rank,
            ": combine_async answered dispatch ",
            answered,
            ", the last dispatch_wait was of ",
            counters.dispatch_received(),
            ". Reduced combine finds the rows of its own tokens by the last",
            " dispatch_wait: call combine_async, then combine_wait, before the",
            " next one.",
        )
    if n_tokens != counters.n_tokens(answered):
        raise Error(
            "max_ep: combine_wait on rank ",
            my_rank,
            ": the result has ",
            n_tokens,
            " tokens, and ",
            counters.n_tokens(answered),
            (
                " were dispatched; pass their number as num_tokens, then call"
                " EPCommInitializer.reset()."
            ),
        )
    if n_rows < counters.pair_row(n_pairs):
        raise Error(
            "max_ep: combine_wait on rank ",
            my_rank,
            ": the rows of the last dispatch_wait end at ",
            counters.pair_row(n_pairs),
            ", input_tokens holds ",
            n_rows,
            "; pass the expert rows that combine_async took.",
        )
