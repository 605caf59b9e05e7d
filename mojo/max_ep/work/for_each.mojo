# SPDX-License-Identifier: Apache-2.0
"""The same small work for each of many items, on GPU or CPU."""
from max.gpu import block_idx, thread_idx, WARP_SIZE
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu as is_gpu_target
from max.gpu.primitives.grid_controls import pdl_launch_attributes, PDLLevel
from std.math import ceildiv

from ..protocol.kernel_argument import KernelArgument
from .cpu_copy import for_each_chunk, INLINE_BYTES
from .overlap import await_launch_before

comptime _NUM_THREADS = 128


trait Work(KernelArgument, TrivialRegisterPassable):
    """What is done with an item; its fields are the arguments."""

    comptime by_warp: Bool = False
    """Whether a GPU does an item with a warp, not with a thread."""
    comptime overlaps: Bool = False
    """Whether a GPU begins before the previous kernel has ended. Then what that may have
    written is read with plain loads (`invariant=False`)."""

    def do(self, i: Int):
        ...


def work_kernel[W: Work](work: W, n_items: Int32):
    var i = Int(block_idx.x) * _NUM_THREADS + Int(thread_idx.x)
    comptime if W.by_warp:
        i //= WARP_SIZE
    comptime if W.overlaps:
        await_launch_before()
    if i < Int(n_items):
        work.do(i)


def for_each[
    W: Work, //, target: StaticString
](n_items: Int, work: W, context: DeviceContext) raises:
    if n_items == 0:
        return
    comptime if is_gpu_target[target]():
        var n_threads = n_items
        comptime if W.by_warp:
            n_threads *= context.default_device_info.warp_size
        context.enqueue_function(
            context.compile_function[work_kernel[W]](),
            work,
            Int32(n_items),
            grid_dim=ceildiv(n_threads, _NUM_THREADS),
            block_dim=_NUM_THREADS,
            attributes=pdl_launch_attributes(
                PDLLevel.ON if W.overlaps else PDLLevel.OFF
            ),
        )
    else:

        def do_some(begin: Int, end: Int) {imm}:
            for i in range(begin, end):
                work.do(i)

        # An item alone stays on this thread; two are shared.
        for_each_chunk(n_items, INLINE_BYTES, do_some)
