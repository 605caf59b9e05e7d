# SPDX-License-Identifier: Apache-2.0
"""Prints the assembly of what watches, for a GPU that need not be there.

Each kernel behind a line `== NAME`. Run by tests/test_stats.py.
"""
from max.gpu.host import get_gpu_target
from max_ep.expert_slots.combine import combine_layout_of
from max_ep.layout import EXPERT_SLOTS, RANK_SLOTS_REDUCED
from max_ep.watch import watch_kernel
from std.compile import compile_info


def show[protocol: Int, is_combine: Bool](name: StaticString) raises:
    """Prints one kernel.

    Parameters:
        protocol: The wire protocol.
        is_combine: Which direction.

    Args:
        name: What it is called here.
    """
    comptime layout = combine_layout_of[
        DType.bfloat16, 7168, 8, 256, 4, 128, protocol
    ]()
    print("==", name)
    print(
        compile_info[
            watch_kernel[256, 256, layout, 4, is_combine],
            emission_kind="asm",
            target=get_gpu_target["sm_90a"](),
        ]().asm
    )


def main() raises:
    """Runs the command line."""
    show[EXPERT_SLOTS, False]("dispatch")
    show[EXPERT_SLOTS, True]("combine")
    show[RANK_SLOTS_REDUCED, True]("combine_reduced")
