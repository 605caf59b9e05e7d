# SPDX-License-Identifier: Apache-2.0
"""Kernels that begin before the previous kernel has ended, by programmatic dependent
launch, where there is that."""
from max.gpu.host import LaunchAttribute
from max.gpu.primitives.grid_controls import pdl_launch_attributes, PDLLevel
from std.sys import inlined_assembly
from std.sys.info import _is_sm_9x_or_newer

from .product import Bf16In


@always_inline
def await_kernel_before():
    """Waits until the previous kernel has ended, and lets the next one begin.

    Only weights, and what kernels before the previous one have written, may be read
    before this call. What is read behind it is read with plain loads (`invariant=False`):
    the cache of constants may have what was there before.
    """
    comptime if _is_sm_9x_or_newer():
        # ORDER: what the previous kernel has written is visible behind this wait.
        inlined_assembly[
            "griddepcontrol.wait;",
            NoneType,
            constraints="~{memory}",
            has_side_effect=True,
        ]()
        # The next kernel begins when all blocks have come here: when those before are done.
        inlined_assembly[
            "griddepcontrol.launch_dependents;",
            NoneType,
            constraints="~{memory}",
            has_side_effect=True,
        ]()


def overlapping(overlaps: Bool = True) -> List[LaunchAttribute]:
    """Returns the attributes of a launch that may begin early."""
    return pdl_launch_attributes(PDLLevel.ON if overlaps else PDLLevel.OFF)


@always_inline
def prefetch(at: Bf16In, n_bytes: Int):
    """Gets memory into L2; `n_bytes` a multiple of 16. The previous kernel may write it.
    """
    # ORDER: none, and none is needed: L2 is where all accesses meet.
    inlined_assembly[
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        NoneType,
        constraints="l,r",
        has_side_effect=True,
    ](at, UInt32(n_bytes))
