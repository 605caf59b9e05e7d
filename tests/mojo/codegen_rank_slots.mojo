# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels of `rank_slots`, which NVIDIA's alone have.

Takes a folder, and writes assembly to `sm_90a.<kernel>.<variant>.s` in it, and
what the assembler makes of it to `.cubin`. Prints what the assembly shows of the
sources' constants. Run by tests/test_codegen.py.
"""
from emitting import emit
from groups import (
    combine_group,
    dispatch_group,
    GATHER_REDUCED,
    NUM_THREADS,
    RANK_SLOTS,
    RANK_SLOTS_REDUCED,
)
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
from max_ep.dispatch_by_rank.phase import DispatchByRank
from max_ep.formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from max_ep.formats.plain import BF16TokenFormat
from max_ep.formats.with_metadata import WithMetadataTokenFormat
from max_ep.token_format import TokenFormat

# A large model on eight H200.
from max_ep.combine_sums.roles import (
    receive_schedule as combine_schedule,
)
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
    protocol: Int,
    max_tokens: Int,
    padded: Bool = False,
    shared: Bool = False,
    schedule: Bool = False,
    n_experts: Int = N_EXPERTS,
] = DispatchByRank[
    dispatch_group[
        Format,
        n_experts,
        N_RANKS,
        max_tokens,
        protocol,
        0,
        padded,
        shared,
        schedule,
    ](),
    Format,
    DType.bfloat16,
]

comptime dispatch_async[
    Format: TokenFormat,
    protocol: Int = RANK_SLOTS,
    max_tokens: Int = FEW_TOKENS,
    shared: Bool = False,
] = phase_kernel[
    by_rank[Format, protocol, max_tokens, shared=shared], True, False
]

comptime dispatch_wait[
    Format: TokenFormat,
    protocol: Int = RANK_SLOTS,
    max_tokens: Int = FEW_TOKENS,
    padded: Bool = False,
    shared: Bool = False,
    schedule: Bool = False,
] = phase_kernel[
    by_rank[Format, protocol, max_tokens, padded, shared, schedule], False, True
]

comptime dispatch[
    Format: TokenFormat,
    protocol: Int = RANK_SLOTS,
    max_tokens: Int = FEW_TOKENS,
    padded: Bool = False,
    shared: Bool = False,
    n_experts: Int = N_EXPERTS,
] = phase_kernel[
    by_rank[Format, protocol, max_tokens, padded, shared, n_experts=n_experts],
    True,
    True,
]

comptime CombineOf[
    partial_dtype: DType,
    max_tokens: Int,
    shared: Bool = False,
    schedule: Bool = False,
] = CombineSums[
    combine_group[
        DType.bfloat16,
        HIDDEN,
        TOP_K,
        N_EXPERTS,
        N_RANKS,
        max_tokens,
        N_RANKS,
        False,
        RANK_SLOTS_REDUCED,
        partial_dtype,
        0,
        shared,
        schedule,
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
    schedule: Bool = False,
] = phase_kernel[
    CombineOf[partial_dtype, max_tokens, shared, schedule], False, True
]

comptime combine[
    partial_dtype: DType, max_tokens: Int = FEW_TOKENS, shared: Bool = False
] = phase_kernel[CombineOf[partial_dtype, max_tokens, shared], True, True]


def main() raises:
    """Compiles what the test names."""
    comptime REDUCED = RANK_SLOTS_REDUCED
    emit[dispatch_async[BF16]]("dispatch_async.bf16")
    emit[dispatch_async[FP8, REDUCED]]("dispatch_async.fp8_reduced")
    emit[dispatch_async[BF16, REDUCED, MANY_TOKENS, shared=True]](
        "dispatch_async.bf16_reduced_shared_parts"
    )
    emit[dispatch_wait[BF16, padded=True, schedule=True]](
        "dispatch_wait.bf16_padded_turns"
    )
    emit[dispatch_wait[FP8, REDUCED]]("dispatch_wait.fp8_reduced")
    emit[
        dispatch_wait[FP8, max_tokens=MANY_TOKENS, shared=True, schedule=True]
    ]("dispatch_wait.fp8_shared_parts_turns")
    emit[dispatch[BF16]]("dispatch.bf16")
    emit[dispatch[FP8, REDUCED, padded=True]]("dispatch.fp8_reduced_padded")
    emit[dispatch[BF16, REDUCED, MANY_TOKENS]]("dispatch.bf16_reduced_parts")
    emit[dispatch[FP8, max_tokens=MANY_TOKENS, shared=True]](
        "dispatch.fp8_shared_parts"
    )
    emit[dispatch[CARRIED, GATHER_REDUCED, MANY_TOKENS, n_experts=N_RANKS]](
        "dispatch.bf16_reduced_carried_parts"
    )
    emit[dispatch[BF16, REDUCED, n_experts=2 * N_EXPERTS]](
        "dispatch.bf16_reduced_many"
    )
    emit[combine_async[DType.bfloat16]]("combine_async.bf16")
    emit[combine_async[DType.float32, MANY_TOKENS]]("combine_async.f32")
    emit[combine_wait[DType.bfloat16, shared=True]]("combine_wait.bf16_shared")
    emit[combine_wait[DType.float32, MANY_TOKENS, schedule=True]](
        "combine_wait.f32_turns"
    )
    emit[combine[DType.bfloat16]]("combine.bf16")
    emit[combine[DType.bfloat16, shared=True]]("combine.bf16_shared")
    emit[combine[DType.float32, MANY_TOKENS]]("combine.f32")
    print(NUM_THREADS)
    # Where generations are in the header, and those that all have read.
    print(_DISPATCH_SENT, _DISPATCH_RECEIVED, _DISPATCH_DRAINED)
    print(_COMBINE_SENT, _COMBINE_RECEIVED, _COMBINE_DRAINED)
    # What else the two halves of an exchange share there.
    print(_N_TOKENS, _N_TOKENS + 1, _COMBINE_OF, _BLOCKS_DONE, FAILURE_WORD)
