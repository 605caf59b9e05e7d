# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels by rank, which NVIDIA's alone have; see `emitting.mojo`.

Run by tests/codegen/test_codegen.py.
"""
from emitting import ALL_CASES, emit_phase
from groups import (
    AllGather,
    BF16,
    ByRank,
    FP8,
    MANY,
    N_EXPERTS,
    N_RANKS,
    Named,
    ROWS,
    SUMS,
    SumsBack,
)


def emit_slow() raises:
    """Compiles what only `make test-all` looks at."""
    emit_phase[ByRank[BF16], "dispatch_async"]("bf16")
    emit_phase[ByRank[FP8, SUMS], "dispatch_async"]("fp8_sums")
    emit_phase[ByRank[FP8, SUMS], "dispatch_wait"]("fp8_sums")
    emit_phase[ByRank[FP8, ROWS, MANY, shared=True], "dispatch"]("fp8_shared_chunks")
    emit_phase[ByRank[Named["mxfp8", "rows"]], "dispatch_async"]("mxfp8")
    emit_phase[ByRank[Named["mxfp8", "rows"]], "dispatch_wait"]("mxfp8")
    emit_phase[ByRank[Named["mxfp8", "tiles"], ROWS, MANY], "dispatch"](
        "mxfp8_tiles_chunks"
    )
    emit_phase[ByRank[Named["mxfp4", "rows"]], "dispatch_async"]("mxfp4")
    emit_phase[ByRank[BF16, SUMS, n_experts=2 * N_EXPERTS], "dispatch"](
        "bf16_sums_many"
    )
    emit_phase[SumsBack[DType.float32, MANY], "combine_async"]("f32")
    emit_phase[SumsBack[DType.bfloat16, shared=True], "combine"]("bf16_shared")
    emit_phase[SumsBack[DType.float32, MANY], "combine"]("f32")
    emit_phase[SumsBack[DType.float8_e4m3fn, block=32], "combine"]("mxfp8")


def main() raises:
    emit_phase[ByRank[BF16, wide_ids=True], "dispatch_async"]("bf16_wide")
    emit_phase[ByRank[BF16, SUMS, MANY, shared=True], "dispatch_async"](
        "bf16_sums_shared_chunks"
    )
    emit_phase[ByRank[BF16, padded=True, oversubscribed=True], "dispatch_wait"](
        "bf16_padded_oversubscribed"
    )
    emit_phase[
        ByRank[FP8, ROWS, MANY, shared=True, oversubscribed=True], "dispatch_wait"
    ]("fp8_shared_chunks_oversubscribed")
    emit_phase[ByRank[BF16], "dispatch"]("bf16")
    emit_phase[ByRank[FP8, SUMS, padded=True], "dispatch"]("fp8_sums_padded")
    emit_phase[ByRank[BF16, SUMS, MANY], "dispatch"]("bf16_sums_chunks")
    emit_phase[
        ByRank[Named["fp8_power_of_two", "packed"], padded=True], "dispatch_wait"
    ]("fp8_packed_padded")
    emit_phase[ByRank[Named["nvfp4", "tiles"], ROWS, MANY], "dispatch"](
        "nvfp4_tiles_chunks"
    )
    emit_phase[AllGather[N_RANKS, MANY], "dispatch"]("bf16_sums_metadata_chunks")
    emit_phase[ByRank[BF16, SUMS, masks=True], "dispatch"]("bf16_sums_masks")
    emit_phase[SumsBack[DType.bfloat16, masks=True], "combine"]("bf16_masks")
    emit_phase[ByRank[BF16, drops=True], "dispatch"]("bf16_drops")
    emit_phase[SumsBack[DType.bfloat16, drops=True], "combine"]("bf16_drops")
    emit_phase[SumsBack[DType.float32, MANY, oversubscribed=True], "combine_wait"](
        "f32_oversubscribed"
    )
    emit_phase[SumsBack[DType.bfloat16], "combine"]("bf16")
    emit_phase[SumsBack[DType.float8_e4m3fn, MANY, block=128], "combine"]("fp8")
    emit_phase[SumsBack[DType.bfloat16], "combine_async"]("bf16")
    emit_phase[SumsBack[DType.bfloat16, shared=True], "combine_wait"]("bf16_shared")
    comptime if ALL_CASES:
        emit_slow()
