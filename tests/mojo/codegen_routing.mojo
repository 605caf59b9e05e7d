# SPDX-License-Identifier: Apache-2.0
"""Compiles the router's kernel, for NVIDIA and AMD. Run by tests/experts/test_router.py."""
from emitting import ALL_CASES, emit, emit_amd
from max_ep.work.for_each import work_kernel
from max_ep.router.routing import ChooseExperts, ToReplicas


def main() raises:
    emit[
        work_kernel[ChooseExperts[DType.bfloat16, 128, 8, True, False]], links=ALL_CASES
    ]("bf16_128_8")
    emit[
        work_kernel[ChooseExperts[DType.float32, 128, 8, False, False]], links=ALL_CASES
    ]("f32_128_8")
    emit[
        work_kernel[ChooseExperts[DType.float32, 1024, 32, True, False]],
        links=ALL_CASES,
    ]("f32_1024_32")
    emit[
        work_kernel[ChooseExperts[DType.float32, 128, 8, True, True]], links=ALL_CASES
    ]("balanced_f32_128_8")
    emit[work_kernel[ToReplicas], links=ALL_CASES]("balance_ids")
    emit_amd[work_kernel[ChooseExperts[DType.bfloat16, 128, 8, True, False]]](
        "bf16_128_8"
    )
