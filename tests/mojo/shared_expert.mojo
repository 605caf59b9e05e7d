# SPDX-License-Identifier: Apache-2.0
"""What a Mojo program sees of a fused shared expert.

Two ranks, one expert, so rank 1 holds none. Checks what a graph cannot show: errors of
calls that `EPBatchManager` would not build.
Prints OK, or raises. Run by `checks.mojo`.
"""
from max.gpu.host import DeviceContext
from max_ep import (
    ep_combine_async_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_wait_kernel_api,
    Float32TokenFormat,
)
from max_ep.formats.plain import PlainRows
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.layout import Group
from max_ep.protocol.message_sizes import combine_msg_bytes
from max_ep.protocol.token_format import LocalRows
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
comptime Shared = Float32TokenFormat[HIDDEN, 1]
comptime UNTOUCHED = 77


def group_of(addressing: Addressing) -> Group:
    return Group(
        n_experts=1,
        n_ranks=N_RANKS,
        max_tokens_per_rank=MAX_TOKENS,
        top_k=1,
        dispatch_msg_bytes=Shared.msg_bytes,
        combine_msg_bytes=combine_msg_bytes[F32](HIDDEN),
        addressing=addressing,
    )


def send[addressing: Addressing](ranks: Ranks, rank: Int, n: Int) raises:
    """Dispatches `n` tokens of ones to the expert."""
    ep_dispatch_async_kernel_api[
        Shared,
        1,
        MAX_TOKENS,
        N_RANKS,
        1,
        "cpu",
        fused_shared_expert=True,
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
    comptime dispatch = send[addressing]
    comptime wait = receive[addressing]
    var ranks = Ranks(group_of(addressing))
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
            LocalRows(one_row, 1),
        )


def main() raises:
    """Runs all."""
    check_shared_expert[Addressing.BY_EXPERT]()
    check_shared_expert[Addressing.BY_RANK]()
    print("OK")
