# SPDX-License-Identifier: Apache-2.0
"""The launchers as a Mojo program calls them: two ranks in one process.

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
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.call import Call
from max_ep.formats.plain import PlainRows
from max_ep.protocol.layout import Group
from ranks import Ranks, tensor, vector
from std.testing import assert_equal, assert_raises, assert_true

comptime HIDDEN = 8
comptime TOP_K = 2
comptime N_EXPERTS = 3
comptime N_RANKS = 2
comptime MAX_TOKENS = 4
comptime MAX_ROWS = N_RANKS * MAX_TOKENS * TOP_K
comptime Format = Float32TokenFormat[HIDDEN, TOP_K]
comptime group = Group(
    n_experts=N_EXPERTS,
    n_ranks=N_RANKS,
    max_tokens_per_rank=MAX_TOKENS,
    top_k=TOP_K,
    dispatch_msg_bytes=Format.msg_bytes,
    combine_msg_bytes=Format.msg_bytes,
    addressing=Addressing.BY_EXPERT,
)
comptime F32 = DType.float32
comptime I32 = DType.int32


def main() raises:
    """Dispatches, scales by the expert, combines, compares."""
    var ctx = DeviceContext(api="cpu")
    var n_local = group.n_local_experts()
    var ranks = Ranks(group)
    ref counters = ranks.counters
    ref ptrs = ranks.ptrs
    var scales = vector[F32](N_EXPERTS)

    @__parameter
    def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
        return scales.ptr[unsafe_offset=expert_id].cast[dtype]()

    for expert_id in range(N_EXPERTS):
        scales.ptr[unsafe_offset=expert_id] = Float32(1 << expert_id)
    var tokens = [tensor[F32](3, HIDDEN), tensor[F32](2, HIDDEN)]
    var ids = [tensor[I32](3, TOP_K), tensor[I32](2, TOP_K)]
    var weights = [tensor[F32](3, TOP_K, 1), tensor[F32](2, TOP_K, 1)]
    for rank in range(N_RANKS):
        for t in range(3 - rank):
            for i in range(HIDDEN):
                tokens[rank].ptr[unsafe_offset=t * HIDDEN + i] = Float32(
                    100 * rank + 10 * t + i
                )
            for k in range(TOP_K):
                ids[rank].ptr[unsafe_offset=t * TOP_K + k] = Int32((t + k) % 3)
        ep_dispatch_async_kernel_api[
            Format, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "cpu", scale_of
        ](counters[rank], tokens[rank], ids[rank], ptrs[0], ptrs[1], ptrs[2], ctx)
    var rows = [tensor[F32](MAX_ROWS, HIDDEN), tensor[F32](MAX_ROWS, HIDDEN)]
    var src_info = [tensor[I32](MAX_ROWS, 2), tensor[I32](MAX_ROWS, 2)]
    for rank in range(N_RANKS):
        var row_offsets = vector[DType.uint32](n_local + 1)
        ep_dispatch_wait_kernel_api[Format, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "cpu"](
            PlainRows(rows[rank].ptr.unsafe_bitcast[UInt8]()),
            row_offsets,
            vector[I32](n_local),
            src_info[rank],
            counters[rank],
            ptrs[1],
            ptrs[2],
            ctx,
        )
        # Rank 0 holds experts 0 and 1, rank 1 expert 2: 7 and 3 rows of 10.
        assert_equal(Int(row_offsets.ptr[unsafe_offset=n_local]), 7 if rank == 0 else 3)
    for rank in range(N_RANKS):
        ep_combine_async_kernel_api[
            F32, HIDDEN, TOP_K, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "cpu"
        ](counters[rank], rows[rank], src_info[rank], ptrs[3], ptrs[4], ptrs[5], ctx)
    comptime combine_wait = ep_combine_wait_kernel_api[
        F32, HIDDEN, TOP_K, N_EXPERTS, MAX_TOKENS, N_RANKS, 1, "cpu"
    ]
    for rank in range(N_RANKS):
        var n_tokens = 3 - rank
        var result = tensor[F32](n_tokens, HIDDEN)
        combine_wait(result, counters[rank], weights[rank], ptrs[4], ptrs[5], ctx)
        for t in range(n_tokens):
            # Scale 2**e for expert e, summed over the token's two experts.
            var factor = Float32((1 << (t % 3)) + (1 << ((t + 1) % 3)))
            for i in range(t * HIDDEN, t * HIDDEN + HIDDEN):
                assert_equal(
                    result.ptr[unsafe_offset=i],
                    factor * tokens[rank].ptr[unsafe_offset=i],
                )

    # Launches on GPUs read all tables, also those of an op that only receives.
    var call = Call[group].of["cpu"]("a wait", counters[0], ptrs[1], ptrs[2])
    assert_true(Int(call.send_bufs.addresses) != 0)
    # One address that is not there is enough to refuse them all.
    ptrs[5].ptr[unsafe_offset=1] = 0
    var result = tensor[F32](3, HIDDEN)
    with assert_raises(contains="was freed"):
        combine_wait(result, counters[0], weights[0], ptrs[4], ptrs[5], ctx)
    _ = scales
    print("OK")
