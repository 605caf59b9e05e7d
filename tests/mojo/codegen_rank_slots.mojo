# SPDX-License-Identifier: Apache-2.0
"""Compiles the phases by rank, which only NVIDIA GPUs have.

Takes a folder, and writes assembly to `sm_90a.<kernel>.<variant>.s` in it, and
what the assembler makes of it to `.cubin`. Prints what the assembly shows of the
sources' constants. Run by tests/test_codegen.py.
"""
from emitting import emit
from groups import combine_group, dispatch_group
from max_ep.combine_sums.phase import CombineSums
from max_ep.counters import (
    _BLOCKS_DONE,
    _COMBINE_DRAINED,
    _COMBINE_OF,
    _COMBINE_RECEIVED,
    _COMBINE_SENT,
    _DISPATCH_DRAINED,
    _DISPATCH_RECEIVED,
    _DISPATCH_SENT,
    _N_TOKENS,
    FAILURE_WORD,
)
from max_ep.device.phase import phase_kernel
from max_ep.device.schedule import InlineSplit, Schedule
from max_ep.dispatch_by_rank.phase import DispatchByRank
from max_ep.dispatch_by_rank.roles import N_INDEX_WARPS, N_WARPS_MIN
from max_ep.formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from max_ep.formats.plain import BF16TokenFormat
from max_ep.formats.with_metadata import WithMetadataTokenFormat
from max_ep.layout import Addressing, Group, N_CHUNKS, Returns
from max_ep.token_format import TokenFormat
from std.testing import assert_equal, assert_true

# A large model on eight H200.
from max_ep.combine_sums.roles import receive_schedule as combine_schedule
from max_ep.dispatch_by_rank.roles import (
    chunks_at_once_shift,
    n_send_warps,
    receive_schedule,
)

comptime HIDDEN = 7168
comptime TOP_K = 8
comptime N_EXPERTS = 256
comptime N_RANKS = 8

comptime FEW_TOKENS = 128
"""A rank sends so few that all are early."""

comptime MANY_TOKENS = 4096
"""A rank may send more than that, in parts that have flags."""

comptime BF16 = BF16TokenFormat[HIDDEN, TOP_K]
comptime FP8 = BlockwiseFP8TokenFormat[HIDDEN, TOP_K]
comptime CARRIED = WithMetadataTokenFormat[
    DType.bfloat16, HIDDEN, N_RANKS, TOP_K
]
"""Of an all-gather, in which each rank is an expert."""

comptime by_rank[
    Format: TokenFormat,
    returns: Returns,
    max_tokens: Int,
    padded: Bool = False,
    shared: Bool = False,
    shares_gpu: Bool = False,
    n_experts: Int = N_EXPERTS,
] = DispatchByRank[
    dispatch_group[
        Format,
        n_experts,
        N_RANKS,
        max_tokens,
        Addressing.TO_ALL if Format.router_top_k > 0 else Addressing.BY_RANK,
        returns,
        padded=padded,
        shared=shared,
        shares_gpu=shares_gpu,
    ](),
    Format,
    DType.bfloat16,
]

comptime dispatch_async[
    Format: TokenFormat,
    returns: Returns = Returns.ROWS,
    max_tokens: Int = FEW_TOKENS,
    shared: Bool = False,
] = phase_kernel[
    by_rank[Format, returns, max_tokens, shared=shared], True, False
]

comptime dispatch_wait[
    Format: TokenFormat,
    returns: Returns = Returns.ROWS,
    max_tokens: Int = FEW_TOKENS,
    padded: Bool = False,
    shared: Bool = False,
    shares_gpu: Bool = False,
] = phase_kernel[
    by_rank[Format, returns, max_tokens, padded, shared, shares_gpu],
    False,
    True,
]

comptime dispatch[
    Format: TokenFormat,
    returns: Returns = Returns.ROWS,
    max_tokens: Int = FEW_TOKENS,
    padded: Bool = False,
    shared: Bool = False,
    n_experts: Int = N_EXPERTS,
] = phase_kernel[
    by_rank[Format, returns, max_tokens, padded, shared, n_experts=n_experts],
    True,
    True,
]

comptime CombineOf[
    partial_dtype: DType,
    max_tokens: Int,
    shared: Bool = False,
    shares_gpu: Bool = False,
] = CombineSums[
    combine_group[
        partial_dtype,
        HIDDEN,
        TOP_K,
        N_EXPERTS,
        N_RANKS,
        max_tokens,
        addressing=Addressing.BY_RANK,
        returns=Returns.SUMS,
        shared=shared,
        shares_gpu=shares_gpu,
    ](),
    DType.bfloat16,
    partial_dtype,
]

comptime combine_async[
    partial_dtype: DType, max_tokens: Int = FEW_TOKENS
] = phase_kernel[CombineOf[partial_dtype, max_tokens], True, False]

comptime combine_wait[
    partial_dtype: DType,
    max_tokens: Int = FEW_TOKENS,
    shared: Bool = False,
    shares_gpu: Bool = False,
] = phase_kernel[
    CombineOf[partial_dtype, max_tokens, shared, shares_gpu], False, True
]

comptime combine[
    partial_dtype: DType, max_tokens: Int = FEW_TOKENS, shared: Bool = False
] = phase_kernel[CombineOf[partial_dtype, max_tokens, shared], True, True]


def check_parts_at_once() raises:
    """Those that are sent at once are whole units, also of a token of 3 parts.
    """
    comptime group = Group(
        n_experts=2, n_ranks=2, max_tokens_per_rank=1, top_k=1
    )
    comptime for n_steps in [1, 2, 3, N_CHUNKS, 28]:
        comptime n_chunks = min(N_CHUNKS, n_steps)
        for n_senders in range(1, 512 // 32 + 1):
            for n_tokens in [257, MANY_TOKENS]:
                var shift = chunks_at_once_shift[group, n_steps](
                    n_tokens, n_senders
                )
                assert_equal(n_chunks >> shift << shift, n_chunks)


def check_turns() raises:
    """Each of few items is one warp's, and index warps have none; so in combine, where
    each warp goes round.
    """
    for n_warps in [N_WARPS_MIN, 512 // 32]:
        for n_blocks in [1, 7, 132]:
            var n_received = List[Int](
                length=(n_warps - N_INDEX_WARPS) * n_blocks, fill=0
            )
            var n_added = List[Int](length=3 * n_warps * n_blocks, fill=0)
            for warp in range(n_warps):
                var received = receive_schedule(warp, n_warps)
                assert_equal(received.n_scheduled(n_blocks), len(n_received))
                var added = combine_schedule(warp, n_warps)
                for block in range(n_blocks):
                    var item = Schedule.item(received.first, block, n_blocks)
                    if warp < n_warps - N_INDEX_WARPS:
                        n_received[item] += 1
                    else:
                        assert_true(item >= len(n_received))
                    for i in range(3):
                        var round = added.first + i * added.stride
                        n_added[Schedule.item(round, block, n_blocks)] += 1
            for n in n_received:
                assert_equal(n, 1)
            for n in n_added:
                assert_equal(n, 1)


def check_cut[n_steps: Int]() raises:
    """The parts of a token are all of its steps, in order."""
    for are_more in [True, False]:
        var cut = InlineSplit[n_steps](are_more)
        var step = 0
        for number in range(5 * cut.n_chunks()):
            var chunk = cut.chunk(number)
            assert_equal(chunk.whole * n_steps + chunk.begin, step)
            assert_true(chunk.begin < chunk.end)
            assert_true(chunk.end - chunk.begin <= cut.most_steps)
            assert_equal(chunk.whole * cut.n_chunks() + chunk.part, number)
            step += chunk.end - chunk.begin
        assert_equal(step, 5 * n_steps)


def check_what_was_measured() raises:
    """How much is sent at once, as it was fastest on two H200s."""
    comptime two = Group(n_experts=2, n_ranks=2, max_tokens_per_rank=1, top_k=1)
    comptime four = Group(
        n_experts=4, n_ranks=4, max_tokens_per_rank=1, top_k=1
    )
    comptime assert two.n_ranks == 2 and four.n_ranks == 4
    # Hidden 7168 in bfloat16, and in FP8.
    comptime LONG, SHORT = 28, 14
    assert_equal(chunks_at_once_shift[two, LONG](1024, 3), 1)
    assert_equal(chunks_at_once_shift[two, LONG](1025, 3), 2)
    assert_equal(chunks_at_once_shift[two, SHORT](1024, 3), 2)
    assert_equal(chunks_at_once_shift[two, LONG](4096, 8), 1)
    assert_equal(chunks_at_once_shift[two, LONG](4096, 16), 0)
    assert_equal(chunks_at_once_shift[four, LONG](4096, 3), 0)
    assert_equal(n_send_warps[two, False](False, 16), 8)
    assert_equal(n_send_warps[two, False](True, 16), 15)
    assert_equal(n_send_warps[four, False](False, 16), 15)


def main() raises:
    """Compiles what the test names."""
    comptime REDUCED = Returns.SUMS
    emit[dispatch_async[BF16]]("dispatch_async.bf16")
    emit[dispatch_async[FP8, REDUCED]]("dispatch_async.fp8_reduced")
    emit[dispatch_async[BF16, REDUCED, MANY_TOKENS, shared=True]](
        "dispatch_async.bf16_reduced_shared_parts"
    )
    emit[dispatch_wait[BF16, padded=True, shares_gpu=True]](
        "dispatch_wait.bf16_padded_turns"
    )
    emit[dispatch_wait[FP8, REDUCED]]("dispatch_wait.fp8_reduced")
    emit[
        dispatch_wait[FP8, max_tokens=MANY_TOKENS, shared=True, shares_gpu=True]
    ]("dispatch_wait.fp8_shared_parts_turns")
    emit[dispatch[BF16]]("dispatch.bf16")
    emit[dispatch[FP8, REDUCED, padded=True]]("dispatch.fp8_reduced_padded")
    emit[dispatch[BF16, REDUCED, MANY_TOKENS]]("dispatch.bf16_reduced_parts")
    emit[dispatch[FP8, max_tokens=MANY_TOKENS, shared=True]](
        "dispatch.fp8_shared_parts"
    )
    emit[dispatch[CARRIED, Returns.SUMS, MANY_TOKENS, n_experts=N_RANKS]](
        "dispatch.bf16_reduced_carried_parts"
    )
    emit[dispatch[BF16, REDUCED, n_experts=2 * N_EXPERTS]](
        "dispatch.bf16_reduced_many"
    )
    emit[combine_async[DType.bfloat16]]("combine_async.bf16")
    emit[combine_async[DType.float32, MANY_TOKENS]]("combine_async.f32")
    emit[combine_wait[DType.bfloat16, shared=True]]("combine_wait.bf16_shared")
    emit[combine_wait[DType.float32, MANY_TOKENS, shares_gpu=True]](
        "combine_wait.f32_turns"
    )
    emit[combine[DType.bfloat16]]("combine.bf16")
    emit[combine[DType.bfloat16, shared=True]]("combine.bf16_shared")
    emit[combine[DType.float32, MANY_TOKENS]]("combine.f32")
    print(512)
    # Where generations are in the header, and those that all have read.
    print(_DISPATCH_SENT, _DISPATCH_RECEIVED, _DISPATCH_DRAINED)
    print(_COMBINE_SENT, _COMBINE_RECEIVED, _COMBINE_DRAINED)
    # What else the two halves of an exchange share there.
    print(_N_TOKENS, _N_TOKENS + 1, _COMBINE_OF, _BLOCKS_DONE, FAILURE_WORD)
    check_parts_at_once()
    check_turns()
    check_cut[28]()
    check_cut[15]()
    check_cut[5]()
    check_what_was_measured()
