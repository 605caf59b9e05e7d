# SPDX-License-Identifier: Apache-2.0
"""Ops for tests only: `max_ep_tests.delay` holds a GPU's stream up."""
import extensibility
from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.time import global_perf_counter_ns


def delay_kernel(nanoseconds: Pointer[Int32, MutUntrackedOrigin]):
    """Spins for as long as a word in device memory says.

    Launch: one thread.

    Args:
        nanoseconds: How long; the word is changed between runs.
    """
    var start = global_perf_counter_ns()
    var n = UInt64(Int(nanoseconds[]))
    while global_perf_counter_ns() - start < n:
        pass


@extensibility.register("max_ep_tests.delay")
struct Delay:
    """Holds the stream up."""

    @staticmethod
    def execute[
        target: StaticString, which: Int
    ](
        delays: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        order: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op."""
        comptime if is_gpu[target]():
            ctx.enqueue_function[delay_kernel](
                Pointer[Int32, MutUntrackedOrigin](
                    unsafe_from_address=Int(delays.unsafe_ptr()) + 4 * which
                ),
                grid_dim=1,
                block_dim=1,
            )
