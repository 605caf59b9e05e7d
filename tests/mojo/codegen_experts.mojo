# SPDX-License-Identifier: Apache-2.0
"""Prints the assembly of the grouped matmul for a GPU that need not be there.

Then what it takes at a time, as `n` and `k`. Run by tests/test_experts.py.
"""
from max.gpu.host import get_gpu_target
from max_ep_experts.gpu_matmul import COLUMNS, K_STEP, grouped_matmul_kernel
from std.compile import compile_info


def main() raises:
    """Runs the command line."""
    print(
        compile_info[
            grouped_matmul_kernel,
            emission_kind="asm",
            target=get_gpu_target["sm_90a"](),
        ]().asm
    )
    print("takes", COLUMNS, K_STEP)
