# SPDX-License-Identifier: Apache-2.0
"""GPU kernels with an error in each, for `tests/gpu/sanitize.sh control` to find.

    mojo run planted.mojo overrun | unset | race | divergence

A checker that does not find its own cannot vouch for ours.
"""
from max.gpu import barrier, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.memory import unsafe_stack_allocation
from std.sys import argv

comptime N_THREADS = 64


def overrun_kernel(out_words: Pointer[Int32, MutUntrackedOrigin]):
    """Writes `[1, N_THREADS + 1)` of a buffer of `N_THREADS` words."""
    out_words[unsafe_offset=Int(thread_idx.x) + 1] = Int32(1)


def unset_kernel(out_words: Pointer[Int32, MutUntrackedOrigin]):
    """Adds to words that nobody wrote."""
    out_words[unsafe_offset=Int(thread_idx.x)] += Int32(1)


def race_kernel(out_words: Pointer[Int32, MutUntrackedOrigin]):
    """Reads a neighbour's word in shared memory without a barrier."""
    var words = unsafe_stack_allocation[
        N_THREADS, Int32, address_space=AddressSpace.SHARED
    ]()
    var i = Int(thread_idx.x)
    words[unsafe_offset=i] = Int32(i)
    out_words[unsafe_offset=i] = words[unsafe_offset=N_THREADS - 1 - i]


def divergence_kernel(out_words: Pointer[Int32, MutUntrackedOrigin]):
    """Lets half of the threads of each warp wait at a barrier."""
    var i = Int(thread_idx.x)
    if i % 2 == 0:
        barrier()
    out_words[unsafe_offset=i] = Int32(i)


def main() raises:
    var which = String(argv()[1])
    var ctx = DeviceContext()
    var out_words = ctx.enqueue_create_buffer[DType.int32](N_THREADS)
    if which == "overrun":
        ctx.enqueue_function[overrun_kernel](out_words, grid_dim=1, block_dim=N_THREADS)
    elif which == "unset":
        ctx.enqueue_function[unset_kernel](out_words, grid_dim=1, block_dim=N_THREADS)
    elif which == "race":
        ctx.enqueue_function[race_kernel](out_words, grid_dim=1, block_dim=N_THREADS)
    elif which == "divergence":
        ctx.enqueue_function[divergence_kernel](
            out_words, grid_dim=1, block_dim=N_THREADS
        )
    else:
        raise Error("unknown error: ", which)
    ctx.synchronize()
    _ = out_words^
    print("ran", which)
