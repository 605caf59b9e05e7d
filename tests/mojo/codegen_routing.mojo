# SPDX-License-Identifier: Apache-2.0
"""Prints the assembly of the router's kernel, for NVIDIA and AMD.

Run by tests/test_router.py.
"""
from max.gpu.host import get_gpu_target
from max_ep.routing import softmax_top_k_kernel
from std.compile import compile_info


def emit[
    arch: StaticString,
    dtype: DType,
    n_experts: Int,
    top_k: Int,
    renormalize: Bool,
]() raises:
    """Prints a kernel's name and its assembly.

    Parameters:
        arch: The GPU.
        dtype: Of logits.
        n_experts: As in the kernel.
        top_k: As there.
        renormalize: As there.
    """
    print("kernel", arch, dtype, renormalize)
    print(
        compile_info[
            softmax_top_k_kernel[dtype, n_experts, top_k, renormalize],
            emission_kind="asm",
            target=get_gpu_target[arch](),
        ]().asm
    )


def main() raises:
    """Runs the command line."""
    emit["sm_90a", DType.bfloat16, 128, 8, True]()
    emit["sm_90a", DType.float32, 128, 8, False]()
    emit["sm_90a", DType.float32, 1024, 32, True]()
    emit["gfx942", DType.bfloat16, 128, 8, True]()
