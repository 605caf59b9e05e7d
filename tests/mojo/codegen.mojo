# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels by expert, for NVIDIA and AMD; see `emitting.mojo`.

Run by tests/test_codegen.py.
"""
from emitting import emit, emit_amd, emit_phase
from groups import (
    BF16,
    BY_EXPERT,
    combine_group,
    dispatch_group,
    FP8,
    MXFP8_ROWS,
    MXFP8_TILES,
    NVFP4_ROWS,
    NVFP4_TILES,
    ROWS,
    TOP_K,
)
from max_ep.combine_rows.kernel import CombineRows
from max_ep.device.kernel import InputScales, Kernel
from max_ep.dispatch_by_expert.kernel import DispatchByExpert
from max_ep.layout import MAX_TOP_K
from max_ep.setup import clear_kernel
from max_ep.token_format import TokenFormat


@__parameter
def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
    return Scalar[dtype](expert_id)


comptime Dispatch[
    Format: TokenFormat, padded: Bool = False, shared: Bool = False
] = DispatchByExpert[
    dispatch_group[Format](BY_EXPERT, is_padded=padded, fused_shared_expert=shared),
    Format,
    DType.bfloat16,
]

comptime Combine[
    dtype: DType = DType.bfloat16, shared: Bool = False, top_k: Int = TOP_K
] = CombineRows[combine_group[dtype](top_k=top_k, fused_shared_expert=shared), dtype]

comptime Overlapped[keeps_rows: Bool = False] = CombineRows[
    combine_group[DType.bfloat16](ROWS), DType.bfloat16, keeps_rows
]
"""By rank it overlaps the launch before it."""


def emit_both[
    P: Kernel, kernel: StaticString, scales: InputScales = None
](variant: String) raises:
    emit_phase[P, kernel, scales, for_amd=True](variant)


def main() raises:
    """Compiles what the test names."""
    emit_both[Dispatch[BF16], "dispatch_async"]("bf16")
    emit_both[Dispatch[BF16, shared=True], "dispatch_async"]("bf16_shared")
    emit_both[Dispatch[FP8], "dispatch_async"]("fp8")
    emit_both[Dispatch[FP8], "dispatch_async", InputScales(scale_of)]("fp8_scaled")
    emit_both[Dispatch[MXFP8_ROWS], "dispatch_async"]("mxfp8")
    emit_both[Dispatch[MXFP8_TILES], "dispatch_wait"]("mxfp8_tiles")
    emit_both[Dispatch[NVFP4_ROWS], "dispatch_async"]("nvfp4")
    emit_both[Dispatch[NVFP4_TILES], "dispatch_wait"]("nvfp4_tiles")
    emit_both[Dispatch[BF16], "dispatch_wait"]("bf16")
    emit_both[Dispatch[BF16, padded=True], "dispatch_wait"]("bf16_padded")
    emit_both[Dispatch[BF16, shared=True], "dispatch_wait"]("bf16_shared")
    emit_both[Dispatch[FP8], "dispatch_wait"]("fp8")
    emit_both[Dispatch[FP8, padded=True], "dispatch_wait"]("fp8_padded")
    emit_both[Dispatch[BF16], "dispatch"]("bf16")
    emit_both[Dispatch[BF16, shared=True], "dispatch"]("bf16_shared")
    emit_both[Dispatch[FP8, padded=True], "dispatch"]("fp8_padded")
    emit_both[Combine[], "combine_async"]("bf16")
    emit_both[Combine[], "combine_wait"]("bf16")
    emit_both[Combine[shared=True], "combine_wait"]("bf16_shared")
    emit_both[Combine[DType.float32], "combine_wait"]("f32")
    emit_both[Combine[], "combine"]("bf16")
    emit_both[Combine[shared=True], "combine"]("bf16_shared")
    emit_both[Combine[top_k=MAX_TOP_K], "combine"]("bf16_many")
    emit_phase[Overlapped[], "combine"]("bf16_overlapped")
    emit_phase[Overlapped[True], "combine_async"]("bf16_overlapped_keeps")
    emit_phase[Overlapped[True], "combine_wait"]("bf16_overlapped_keeps")
    emit[clear_kernel]("clear.any")
    emit_amd[clear_kernel]("clear.any")
