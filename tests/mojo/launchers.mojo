# SPDX-License-Identifier: Apache-2.0
"""The launchers as a Mojo program calls them: two ranks in one process.

Prints OK, or raises. Run by tests/test_mojo.py.
"""
from layout import Coord, row_major, TileTensor
from max.gpu.host import DeviceContext
from max_ep import (
    ep_combine_async_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_wait_kernel_api,
    EPLocalSyncCounters,
    Float32TokenFormat,
)
from max_ep.formats.plain import PlainRows
from max_ep.layout import (
    Addressing,
    Group,
    message_bytes,
    plain_token_bytes,
    Returns,
)
from max_ep.setup import init, N_SETUP_WORDS
from std.memory.alloc import unsafe_alloc
from std.testing import assert_equal, assert_raises

comptime HIDDEN = 8
comptime TOP_K = 2
comptime N_EXPERTS = 3
comptime N_RANKS = 2
comptime MAX_TOKENS = 4
comptime MAX_ROWS = N_RANKS * MAX_TOKENS * TOP_K
comptime Format = Float32TokenFormat[HIDDEN, TOP_K]


def tensor[
    dtype: DType
](n: Int, m: Int = 0) -> TileTensor[
    dtype, type_of(row_major(Coord(Int64(0), Int64(0)))), MutUntrackedOrigin
]:
    var p = unsafe_alloc[Scalar[dtype]](max(1, n * max(m, 1)), alignment=64)
    for i in range(n * max(m, 1)):
        p[unsafe_offset=i] = 0
    return {p, row_major(Coord(Int64(n), Int64(m)))}


def vector[
    dtype: DType
](n: Int) -> TileTensor[
    dtype, type_of(row_major(Coord(Int64(0)))), MutUntrackedOrigin
]:
    var p = unsafe_alloc[Scalar[dtype]](n, alignment=64)
    for i in range(n):
        p[unsafe_offset=i] = 0
    return {p, row_major(Coord(Int64(n)))}


def main() raises:
    """Dispatches, adds the expert's number, combines, compares."""
    var ctx = DeviceContext(api="cpu")
    var msg_bytes = message_bytes(plain_token_bytes(HIDDEN, 4))
    assert_equal(msg_bytes, Format.msg_bytes)
    comptime group = Group(
        n_experts=N_EXPERTS,
        n_ranks=N_RANKS,
        max_tokens_per_rank=MAX_TOKENS,
        top_k=TOP_K,
        dispatch_msg_bytes=Format.msg_bytes,
        combine_msg_bytes=Format.msg_bytes,
        addressing=Addressing.BY_EXPERT,
        returns=Returns.ROWS,
    )
    var n_local = group.n_local_experts()
    comptime n_words = EPLocalSyncCounters[N_EXPERTS].total_size(group)
    # [send, recv, counts] of dispatch, then of combine; one address a rank.
    var ptrs = [
        vector[DType.uint64](N_RANKS),
        vector[DType.uint64](N_RANKS),
        vector[DType.uint64](N_RANKS),
        vector[DType.uint64](N_RANKS),
        vector[DType.uint64](N_RANKS),
        vector[DType.uint64](N_RANKS),
    ]
    var counters = [vector[DType.int32](n_words), vector[DType.int32](n_words)]
    for rank in range(N_RANKS):
        var region = vector[DType.uint8](group.region_bytes())
        var setup = vector[DType.int64](N_SETUP_WORDS)
        var words = [
            Int(region.ptr),
            rank,
            0,
            0,
            N_EXPERTS,
            N_RANKS,
            MAX_TOKENS,
            TOP_K,
            msg_bytes,
            msg_bytes,
            group.protocol(),
        ]
        for i in range(N_SETUP_WORDS):
            setup.ptr[unsafe_offset=i] = Int64(words[i])
        var device_ptrs = vector[DType.uint64](6)
        var my_rank = vector[DType.int32](1)
        init["cpu"](
            device_ptrs,
            my_rank,
            counters[rank],
            vector[DType.int32](n_words),
            setup,
            ctx,
        )
        assert_equal(Int(my_rank.ptr[]), rank)
        for i in range(6):
            ptrs[i].ptr[unsafe_offset=rank] = device_ptrs.ptr[unsafe_offset=i]

    var tokens = [
        tensor[DType.float32](3, HIDDEN),
        tensor[DType.float32](2, HIDDEN),
    ]
    var ids = [tensor[DType.int32](3, TOP_K), tensor[DType.int32](2, TOP_K)]
    var weights = [
        tensor[DType.float32](3, TOP_K),
        tensor[DType.float32](2, TOP_K),
    ]
    var scales = vector[DType.float32](N_EXPERTS)

    @__parameter
    def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
        return scales.ptr[unsafe_offset=expert_id].cast[dtype]()

    for expert_id in range(N_EXPERTS):
        scales.ptr[unsafe_offset=expert_id] = Float32(1 << expert_id)
    for rank in range(N_RANKS):
        for t in range(3 - rank):
            for i in range(HIDDEN):
                tokens[rank].ptr[unsafe_offset=t * HIDDEN + i] = Float32(
                    100 * rank + 10 * t + i
                )
            for k in range(TOP_K):
                ids[rank].ptr[unsafe_offset=t * TOP_K + k] = Int32((t + k) % 3)
                weights[rank].ptr[unsafe_offset=t * TOP_K + k] = 1
        ep_dispatch_async_kernel_api[
            Format, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "cpu", scale_of
        ](
            counters[rank],
            tokens[rank],
            ids[rank],
            ptrs[0],
            ptrs[1],
            ptrs[2],
            ctx,
        )
    var rows = [
        tensor[DType.float32](MAX_ROWS, HIDDEN),
        tensor[DType.float32](MAX_ROWS, HIDDEN),
    ]
    var src_info = [
        tensor[DType.int32](MAX_ROWS, 2),
        tensor[DType.int32](MAX_ROWS, 2),
    ]
    for rank in range(N_RANKS):
        var row_offsets = vector[DType.uint32](n_local + 1)
        ep_dispatch_wait_kernel_api[
            Format, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "cpu"
        ](
            PlainRows(rows[rank].ptr.unsafe_bitcast[UInt8]()),
            row_offsets,
            vector[DType.int32](n_local),
            src_info[rank],
            counters[rank],
            ptrs[1],
            ptrs[2],
            ctx,
        )
        # Rank 0 holds experts 0 and 1, rank 1 expert 2: 7 and 3 rows of 10.
        assert_equal(
            Int(row_offsets.ptr[unsafe_offset=n_local]), 7 if rank == 0 else 3
        )
    for rank in range(N_RANKS):
        ep_combine_async_kernel_api[
            DType.float32,
            HIDDEN,
            TOP_K,
            N_EXPERTS,
            MAX_TOKENS,
            N_RANKS,
            1,
            "cpu",
        ](
            counters[rank],
            rows[rank],
            src_info[rank],
            ptrs[3],
            ptrs[4],
            ptrs[5],
            ctx,
        )
    for rank in range(N_RANKS):
        var n_tokens = 3 - rank
        var result = tensor[DType.float32](n_tokens, HIDDEN)
        ep_combine_wait_kernel_api[
            DType.float32,
            HIDDEN,
            TOP_K,
            N_EXPERTS,
            MAX_TOKENS,
            N_RANKS,
            1,
            "cpu",
        ](result, counters[rank], weights[rank], ptrs[4], ptrs[5], ctx)
        for t in range(n_tokens):
            # Scale 2**e for expert e, summed over the token's two experts.
            var factor = Float32((1 << (t % 3)) + (1 << ((t + 1) % 3)))
            for i in range(HIDDEN):
                assert_equal(
                    result.ptr[unsafe_offset=t * HIDDEN + i],
                    factor * tokens[rank].ptr[unsafe_offset=t * HIDDEN + i],
                )

    # One address that is not there is enough to refuse them all.
    ptrs[5].ptr[unsafe_offset=1] = 0
    var result = tensor[DType.float32](3, HIDDEN)
    with assert_raises(contains="was freed"):
        ep_combine_wait_kernel_api[
            DType.float32,
            HIDDEN,
            TOP_K,
            N_EXPERTS,
            MAX_TOKENS,
            N_RANKS,
            1,
            "cpu",
        ](result, counters[0], weights[0], ptrs[4], ptrs[5], ctx)
    _ = scales
    print("OK")
