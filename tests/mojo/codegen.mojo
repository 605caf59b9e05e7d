# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels by expert, for NVIDIA and AMD; see `emitting.mojo`.

Run by tests/codegen/test_codegen.py.
"""
from emitting import ALL_CASES, emit, emit_amd, emit_phase
from groups import BF16, ByExpert, FP8, Named, RowsBack
from max_ep.device.kernel import Kernel
from max_ep.protocol.arguments import InputScales
from max_ep.protocol.layout import MAX_TOP_K
from max_ep.launch.setup import set_up_kernel


@__parameter
def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
    return Scalar[dtype](expert_id)


def emit_both[
    P: Kernel, kernel: StaticString, scales: InputScales = None
](variant: String) raises:
    emit_phase[P, kernel, scales, for_amd=True](variant)


def emit_slow() raises:
    """Compiles what only `make test-all` looks at."""
    emit_both[ByExpert[BF16, shared=True], "dispatch_async"]("bf16_shared")
    emit_both[ByExpert[FP8], "dispatch_async"]("fp8")
    emit_both[ByExpert[Named["mxfp8", "rows"]], "dispatch_async"]("mxfp8")
    emit_both[ByExpert[Named["mxfp8", "tiles"]], "dispatch_wait"]("mxfp8_tiles")
    emit_both[ByExpert[Named["nvfp4", "rows"]], "dispatch_async"]("nvfp4")
    emit_both[ByExpert[Named["nvfp4", "tiles"]], "dispatch_wait"]("nvfp4_tiles")
    emit_both[ByExpert[BF16, shared=True], "dispatch_wait"]("bf16_shared")
    emit_both[ByExpert[FP8, padded=True], "dispatch_wait"]("fp8_padded")
    emit_both[ByExpert[BF16, shared=True], "dispatch"]("bf16_shared")
    emit_both[RowsBack[DType.float32], "combine_wait"]("f32")
    emit_both[RowsBack[shared=True], "combine"]("bf16_shared")
    emit_both[RowsBack[top_k=MAX_TOP_K], "combine"]("bf16_many")


def main() raises:
    emit_both[ByExpert[BF16], "dispatch_async"]("bf16")
    emit_both[ByExpert[FP8], "dispatch_async", InputScales(scale_of)]("fp8_scaled")
    emit_both[ByExpert[BF16], "dispatch_wait"]("bf16")
    emit_both[ByExpert[BF16, padded=True, oversubscribed=True], "dispatch_wait"](
        "bf16_padded_oversubscribed"
    )
    emit_both[ByExpert[FP8], "dispatch_wait"]("fp8")
    emit_both[ByExpert[BF16], "dispatch"]("bf16")
    emit_both[ByExpert[FP8, padded=True], "dispatch"]("fp8_padded")
    emit_both[RowsBack[], "combine_async"]("bf16")
    emit_both[RowsBack[], "combine_wait"]("bf16")
    emit_both[RowsBack[shared=True, oversubscribed=True], "combine_wait"](
        "bf16_shared_oversubscribed"
    )
    emit_both[RowsBack[], "combine"]("bf16")
    emit_phase[RowsBack[by_rank=True], "combine"]("bf16_back")
    emit_phase[RowsBack[by_rank=True, keeps_rows=True], "combine_async"]("bf16_keeps")
    emit_phase[RowsBack[by_rank=True, keeps_rows=True], "combine_wait"]("bf16_keeps")
    emit[set_up_kernel]("set_up.any")
    emit_amd[set_up_kernel]("set_up.any")
    comptime if ALL_CASES:
        emit_slow()
