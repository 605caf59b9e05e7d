# SPDX-License-Identifier: Apache-2.0
"""Compiles the router's kernel, for NVIDIA and AMD. Run by tests/experts/test_router.py."""
from emitting import emit, emit_amd
from max_ep.work.for_each import work_kernel
from max_ep.router.routing import ChooseExperts, ToReplicas


def main() raises:
    emit[work_kernel[ChooseExperts[DType.bfloat16, 128, 8, True, False]]]("bf16_128_8")
    emit[work_kernel[ChooseExperts[DType.float32, 128, 8, False, False]]]("f32_128_8")
    emit[work_kernel[ChooseExperts[DType.float32, 1024, 32, True, False]]](
        "f32_1024_32"
    )
    emit[work_kernel[ChooseExperts[DType.float32, 128, 8, True, True]]](
        "balanced_f32_128_8"
    )
    emit[work_kernel[ToReplicas]]("balance_ids")
    emit_amd[work_kernel[ChooseExperts[DType.bfloat16, 128, 8, True, False]]](
        "bf16_128_8"
    )
