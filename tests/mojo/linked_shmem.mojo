# SPDX-License-Identifier: Apache-2.0
"""Links kernels of several hosts with NVSHMEM's device functions, and assembles them.

Run by tests/gpu/test_shmem.py with `--bitcode-libs`. Prints the bytes of machine code.
"""
from groups import BF16, ByExpert, ByRank, RowsBack, SUMS, SumsBack
from max.gpu.host import get_gpu_target
from max_ep.device.kernel import Kernel, kernel_entry
from std.compile import compile_info


def link[P: Kernel]() raises:
    comptime entry = kernel_entry[P, True, True]
    comptime target = get_gpu_target["sm_90a"]()
    print(
        compile_info[entry, emission_kind="object", target=target]().asm.byte_length()
    )


def main() raises:
    link[ByExpert[BF16, n_hosts=2]]()
    link[RowsBack[n_hosts=2]]()
    link[ByRank[BF16, SUMS, n_hosts=2]]()
    link[SumsBack[DType.bfloat16, n_hosts=2]]()
    link[RowsBack[by_rank=True, n_hosts=2]]()
