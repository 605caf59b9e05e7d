# SPDX-License-Identifier: Apache-2.0
"""What a Mojo program sees of padded rows and of a fused shared expert.

Two ranks, one expert, so rank 1 holds none. Checks what a graph cannot show:
that rows after the counts stay as they were, and errors of calls that
`EPBatchManager` would not build.
Prints OK, or raises. Run by `checks.mojo`.
"""
from max.gpu.host import DeviceContext
from max_ep import (
    BlockwiseFP8TokenFormat,
    ep_combine_async_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_wait_kernel_api,
    Float32TokenFormat,
)
from max_ep.formats.plain import PlainRows
from max_ep.formats.scale_layouts import TransposedRows
from max_ep.layout import Addressing, combine_msg_bytes, Group
from max_ep.token_format import SharedRows, TokenFormat
from ranks import Matrix, Ranks, tensor, vector
from std.testing import assert_equal, assert_raises

comptime HIDDEN = 128
comptime MAX_TOKENS = 3
comptime N_RANKS = 2
comptime CAPACITY = N_RANKS * MAX_TOKENS
comptime MAX_ROWS = CAPACITY + MAX_TOKENS
"""With those of the shared expert."""
comptime F32 = DType.float32
comptime I32 = DType.int32
comptime FP8 = BlockwiseFP8TokenFormat[HIDDEN, 1]
comptime Shared = Float32TokenFormat[HIDDEN, 1]
comptime UNTOUCHED = 77


def group_of[
    Format: TokenFormat
](addressing: Addressing = Addressing.BY_EXPERT) -> Group:
    return Group(
        n_experts=1,
        n_ranks=N_RANKS,
        max_tokens_per_rank=MAX_TOKENS,
        top_k=1,
        dispatch_msg_bytes=Format.msg_bytes,
        combine_msg_bytes=combine_msg_bytes[F32](HIDDEN),
        addressing=addressing,
    )


def send[
    Format: TokenFormat, shared: Bool, addressing: Addressing
](ranks: Ranks, rank: Int, n: Int) raises:
    """Dispatches `n` tokens of ones to the expert."""
    ep_dispatch_async_kernel_api[
        Format,
        1,
        MAX_TOKENS,
        N_RANKS,
        1,
        "cpu",
        fused_shared_expert=shared,
        addressing=addressing,
    ](
        ranks.counters[rank],
        tensor[F32](n, HIDDEN, 1),
        tensor[I32](n, 1),
        ranks.ptrs[0],
        ranks.ptrs[1],
        ranks.ptrs[2],
        DeviceContext(api="cpu"),
    )


def check_padded_rows_behind_the_counts() raises:
    """Rank 0 sends 2 tokens, rank 1 sends 1: three rows of six."""
    var ranks = Ranks(group_of[FP8]())
    for rank in range(N_RANKS):
        send[FP8, False, Addressing.BY_EXPERT](ranks, rank, 2 - rank)
    for rank in range(N_RANKS):
        var tokens = tensor[DType.uint8](CAPACITY, HIDDEN, UNTOUCHED)
        var scales = tensor[F32](1, CAPACITY, UNTOUCHED)
        var recv_counts = vector[I32](1, UNTOUCHED)
        var recv_ranges = tensor[I32](N_RANKS, 2, UNTOUCHED)
        var src_info = tensor[I32](CAPACITY, 2, UNTOUCHED)
        ep_dispatch_wait_kernel_api[
            FP8, 1, MAX_TOKENS, N_RANKS, 1, "cpu", is_padded=True
        ](
            TransposedRows(tokens.ptr, scales.ptr.unsafe_bitcast[UInt8](), CAPACITY),
            recv_counts,
            recv_ranges,
            src_info,
            ranks.counters[rank],
            ranks.ptrs[1],
            ranks.ptrs[2],
            DeviceContext(api="cpu"),
        )
        # Rank 1 has a place for an expert, but none.
        var n = 3 if rank == 0 else 0
        assert_equal(Int(recv_counts.ptr[]), n)
        var ranges = [0, 2, 2, 1] if rank == 0 else [0, 0, 0, 0]
        for i in range(4):
            assert_equal(Int(recv_ranges.ptr[unsafe_offset=i]), ranges[i])
        for row in range(CAPACITY):
            for i in [row * HIDDEN, row * HIDDEN + HIDDEN - 1]:
                var byte = tokens.ptr[unsafe_offset=i]
                assert_equal(byte != UNTOUCHED, row < n)
            var scale = scales.ptr[unsafe_offset=row]
            assert_equal(scale != UNTOUCHED, row < n)
            for i in range(2 * row, 2 * row + 2):
                var word = src_info.ptr[unsafe_offset=i]
                assert_equal(word != UNTOUCHED, row < n)


def receive[
    addressing: Addressing
](ranks: Ranks, rank: Int, src_info: Matrix[I32]) raises:
    var rows = tensor[F32](MAX_ROWS, HIDDEN).ptr.unsafe_bitcast[UInt8]()
    ep_dispatch_wait_kernel_api[
        Shared,
        1,
        MAX_TOKENS,
        N_RANKS,
        1,
        "cpu",
        fused_shared_expert=True,
        addressing=addressing,
    ](
        PlainRows(rows),
        vector[DType.uint32](3),
        vector[I32](2),
        src_info,
        ranks.counters[rank],
        ranks.ptrs[1],
        ranks.ptrs[2],
        DeviceContext(api="cpu"),
    )


def send_back[
    addressing: Addressing
](ranks: Ranks, rank: Int, src_info: Matrix[I32]) raises:
    ep_combine_async_kernel_api[
        F32, HIDDEN, 1, 1, MAX_TOKENS, N_RANKS, 1, "cpu", addressing=addressing
    ](
        ranks.counters[rank],
        tensor[F32](MAX_ROWS, HIDDEN),
        src_info,
        ranks.ptrs[3],
        ranks.ptrs[4],
        ranks.ptrs[5],
        DeviceContext(api="cpu"),
    )


def check_shared_expert[addressing: Addressing]() raises:
    """The rank without experts still has to read its own tokens.

    They stand in its send buffer, or by rank in its recv buffer.
    """
    comptime dispatch = send[Shared, True, addressing]
    comptime wait = receive[addressing]
    var ranks = Ranks(group_of[Shared](addressing))
    var src_info = [
        tensor[I32](MAX_ROWS, 2, UNTOUCHED),
        tensor[I32](MAX_ROWS, 2, UNTOUCHED),
    ]
    # No rows are sent back, and none awaited: the sum would be zeros.
    with assert_raises(contains="nothing was dispatched to this rank"):
        send_back[addressing](ranks, 0, src_info[0])
    # Rank 1 waits for nobody's rows, but for its own tokens.
    with assert_raises(contains="before its dispatch_async"):
        wait(ranks, 1, src_info[1])

    dispatch(ranks, 0, 1)
    dispatch(ranks, 1, 2)
    wait(ranks, 1, src_info[1])
    # Its own wait is done, but rank 0 has not read.
    with assert_raises(contains="done word"):
        dispatch(ranks, 1, 2)
    wait(ranks, 0, src_info[0])
    for i in range(5):
        var word = Int(src_info[1].ptr[unsafe_offset=i])
        assert_equal(word, [0, -1, 1, -1, UNTOUCHED][i])

    # Rank 1 may not send twice either: rank 0 has read, and only its own wait is
    # missing.
    dispatch(ranks, 1, 2)
    dispatch(ranks, 0, 1)
    wait(ranks, 0, src_info[0])
    with assert_raises(contains="before its dispatch_wait"):
        dispatch(ranks, 1, 2)
    wait(ranks, 1, src_info[1])

    # Two tokens, but one row: what follows it is not read.
    for rank in range(N_RANKS):
        send_back[addressing](ranks, rank, src_info[rank])
    var one_row = tensor[F32](1, HIDDEN).ptr.unsafe_bitcast[UInt8]()
    with assert_raises(contains="2 tokens, but input_tokens holds 1 rows"):
        ep_combine_wait_kernel_api[
            F32,
            HIDDEN,
            1,
            1,
            MAX_TOKENS,
            N_RANKS,
            1,
            "cpu",
            fused_shared_expert=True,
            addressing=addressing,
        ](
            tensor[F32](2, HIDDEN),
            ranks.counters[1],
            tensor[F32](2, 1),
            ranks.ptrs[4],
            ranks.ptrs[5],
            DeviceContext(api="cpu"),
            SharedRows(one_row, 1),
        )


def main() raises:
    """Runs all."""
    check_padded_rows_behind_the_counts()
    check_shared_expert[Addressing.BY_EXPERT]()
    check_shared_expert[Addressing.BY_RANK]()
    print("OK")
