# SPDX-License-Identifier: Apache-2.0
"""When a launch may start: launches overlap by programmatic dependent launch, where there
is that."""
from std.sys import inlined_assembly
from std.sys.info import _is_sm_9x_or_newer


@always_inline
def await_launch_before():
    """Waits until the previous kernel has ended, and lets the next one begin.

    On NVIDIA GPUs since Hopper, the blocks of a kernel may begin before the previous
    kernel has ended, so nothing may be read before this call. Elsewhere it does nothing.
    """
    comptime if _is_sm_9x_or_newer():
        # The next kernel may begin once a thread of each block has come here.
        inlined_assembly[
            "griddepcontrol.launch_dependents;",
            NoneType,
            constraints="~{memory}",
            has_side_effect=True,
        ]()
        inlined_assembly[
            "griddepcontrol.wait;",
            NoneType,
            constraints="~{memory}",
            has_side_effect=True,
        ]()
