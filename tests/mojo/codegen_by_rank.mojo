# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels by rank, which NVIDIA's alone have; see `emitting.mojo`.

Run by tests/test_codegen.py.
"""
from emitting import emit_phase
from groups import (
    BF16,
    BY_RANK,
    combine_group,
    dispatch_group,
    FEW,
    FP8,
    HIDDEN,
    MANY,
    MXFP4_ROWS,
    MXFP8_ROWS,
    MXFP8_TILES,
    NVFP4_TILES,
    N_EXPERTS,
    N_RANKS,
    ROWS,
    SUMS,
    that_drops,
    that_masks,
    TOP_K,
)
from max_ep.combine_sums.kernel import CombineSums
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.formats.plain import WithMetadataTokenFormat
from max_ep.layout import Addressing
from max_ep.token_format import TokenFormat

comptime Dispatch[
    Format: TokenFormat,
    returns: Int = ROWS,
    max_tokens: Int = FEW,
    padded: Bool = False,
    shared: Bool = False,
    oversubscribed: Bool = False,
    n_experts: Int = N_EXPERTS,
    wide_ids: Bool = False,
] = DispatchByRank[
    dispatch_group[Format](
        BY_RANK,
        returns,
        max_tokens,
        n_experts=n_experts,
        is_padded=padded,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        wide_ids=wide_ids,
    ),
    Format,
    DType.bfloat16,
]

comptime WithMetadata = WithMetadataTokenFormat[DType.bfloat16, HIDDEN, N_RANKS, TOP_K]
comptime AllGather = DispatchByRank[
    dispatch_group[WithMetadata](
        Addressing.TO_ALL, SUMS, MANY, n_experts=N_RANKS, shares_gpu=False
    ),
    WithMetadata,
    DType.bfloat16,
]
"""Each rank is an expert."""

comptime Combine[
    partial_dtype: DType,
    max_tokens: Int = FEW,
    shared: Bool = False,
    oversubscribed: Bool = False,
    partial_block: Int = 0,
] = CombineSums[
    combine_group[partial_dtype](
        SUMS,
        max_tokens,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        partial_block=partial_block,
    ),
    DType.bfloat16,
    partial_dtype,
]


comptime MaskingDispatch = DispatchByRank[
    that_masks(dispatch_group[BF16](BY_RANK, SUMS, shares_gpu=False)),
    BF16,
    DType.bfloat16,
]
comptime MaskingCombine = CombineSums[
    that_masks(combine_group[DType.bfloat16](SUMS, shares_gpu=False)),
    DType.bfloat16,
    DType.bfloat16,
]
comptime DroppingDispatch = DispatchByRank[
    that_drops(dispatch_group[BF16](BY_RANK, ROWS, shares_gpu=False)),
    BF16,
    DType.bfloat16,
]
comptime DroppingCombine = CombineSums[
    that_drops(combine_group[DType.bfloat16](SUMS, shares_gpu=False)),
    DType.bfloat16,
    DType.bfloat16,
]


def main() raises:
    """Compiles what the test names."""
    emit_phase[Dispatch[BF16], "dispatch_async"]("bf16")
    emit_phase[Dispatch[BF16, wide_ids=True], "dispatch_async"]("bf16_wide")
    emit_phase[Dispatch[FP8, SUMS], "dispatch_async"]("fp8_sums")
    emit_phase[Dispatch[BF16, SUMS, MANY, shared=True], "dispatch_async"](
        "bf16_sums_shared_chunks"
    )
    emit_phase[Dispatch[BF16, padded=True, oversubscribed=True], "dispatch_wait"](
        "bf16_padded_oversubscribed"
    )
    emit_phase[Dispatch[FP8, SUMS], "dispatch_wait"]("fp8_sums")
    emit_phase[
        Dispatch[FP8, ROWS, MANY, shared=True, oversubscribed=True], "dispatch_wait"
    ]("fp8_shared_chunks_oversubscribed")
    emit_phase[Dispatch[BF16], "dispatch"]("bf16")
    emit_phase[Dispatch[FP8, SUMS, padded=True], "dispatch"]("fp8_sums_padded")
    emit_phase[Dispatch[BF16, SUMS, MANY], "dispatch"]("bf16_sums_chunks")
    emit_phase[Dispatch[FP8, ROWS, MANY, shared=True], "dispatch"]("fp8_shared_chunks")
    emit_phase[Dispatch[MXFP8_ROWS], "dispatch_async"]("mxfp8")
    emit_phase[Dispatch[MXFP8_ROWS], "dispatch_wait"]("mxfp8")
    emit_phase[Dispatch[MXFP8_TILES, ROWS, MANY], "dispatch"]("mxfp8_tiles_chunks")
    emit_phase[Dispatch[MXFP4_ROWS], "dispatch_async"]("mxfp4")
    emit_phase[Dispatch[NVFP4_TILES, ROWS, MANY], "dispatch"]("nvfp4_tiles_chunks")
    emit_phase[AllGather, "dispatch"]("bf16_sums_metadata_chunks")
    emit_phase[Dispatch[BF16, SUMS, n_experts=2 * N_EXPERTS], "dispatch"](
        "bf16_sums_many"
    )
    emit_phase[MaskingDispatch, "dispatch"]("bf16_sums_masks")
    emit_phase[MaskingCombine, "combine"]("bf16_masks")
    emit_phase[DroppingDispatch, "dispatch"]("bf16_drops")
    emit_phase[DroppingCombine, "combine"]("bf16_drops")
    emit_phase[Combine[DType.bfloat16], "combine_async"]("bf16")
    emit_phase[Combine[DType.float32, MANY], "combine_async"]("f32")
    emit_phase[Combine[DType.bfloat16, shared=True], "combine_wait"]("bf16_shared")
    emit_phase[Combine[DType.float32, MANY, oversubscribed=True], "combine_wait"](
        "f32_oversubscribed"
    )
    emit_phase[Combine[DType.bfloat16], "combine"]("bf16")
    emit_phase[Combine[DType.bfloat16, shared=True], "combine"]("bf16_shared")
    emit_phase[Combine[DType.float32, MANY], "combine"]("f32")
    emit_phase[Combine[DType.float8_e4m3fn, MANY, partial_block=128], "combine"]("fp8")
    emit_phase[Combine[DType.float8_e4m3fn, partial_block=32], "combine"]("mxfp8")
