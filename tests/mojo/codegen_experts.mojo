# SPDX-License-Identifier: Apache-2.0
"""Prints the assembly of the experts' matmuls for a GPU that need not be there.

Then what they take at a time, as `n` and `k`, and whole tiles of MAX's. Run by
tests/test_experts.py.
"""
from max.gpu.host import get_gpu_target
from max_ep_gpu_experts.grouped_matmul import grouped_matmul_kernel
from max_ep_gpu_experts.linear import FEW_ROWS, linear_kernel
from max_ep_gpu_experts.tile import COLUMNS, K_STEP
from std.compile import compile_info


def main() raises:
    """Runs the command line."""
    comptime target = get_gpu_target["sm_90a"]()
    print("kernel grouped_matmul")
    print(
        compile_info[
            grouped_matmul_kernel, emission_kind="asm", target=target
        ]().asm
    )
    print("kernel linear")
    print(compile_info[linear_kernel, emission_kind="asm", target=target]().asm)
    print("takes", COLUMNS, K_STEP, FEW_ROWS)
