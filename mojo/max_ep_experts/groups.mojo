# SPDX-License-Identifier: Apache-2.0
"""How a kernel finds the work of a group that only the device knows: each block counts
the work before each group, and finds by bisection whose work an item is.
"""
from max.gpu import WARP_SIZE, block_dim, thread_idx
from max.gpu.primitives import warp
from std.memory import unsafe_stack_allocation
from std.sys import align_of

from .product import GroupedProduct

comptime Smem[T: AnyType] = Pointer[
    T, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]


@always_inline
def shared[T: AnyType, n: Int, alignment: Int = align_of[T]()]() -> Smem[T]:
    """Allocates shared memory; it is not initialized."""
    return unsafe_stack_allocation[
        n, T, alignment=alignment, address_space=AddressSpace.SHARED
    ]()


@always_inline
def count[
    Work: def(UInt32) -> UInt32
](product: GroupedProduct[_], counts: Smem[UInt32], work_of: Work):
    """Writes how much work each group's rows are, with all threads of the block."""
    for group in range(Int(thread_idx.x), product.n_groups, Int(block_dim.x)):
        counts[unsafe_offset=group] = work_of(product.size(group))


@always_inline
def add_up(counts: Smem[UInt32], n: Int):
    """Replaces `n` counts by the sums before them, and that of all, with one warp."""
    var lane = Int(thread_idx.x) % WARP_SIZE
    var before = UInt32(0)
    for first in range(0, n, WARP_SIZE):
        var at = first + lane
        var own = counts[unsafe_offset=at] if at < n else 0
        var below = warp.prefix_sum[exclusive=True](own)
        if at < n:
            counts[unsafe_offset=at] = before + below
        before += warp.shuffle_idx(below + own, UInt32(WARP_SIZE - 1))
    if lane == 0:
        counts[unsafe_offset=n] = before


@always_inline
def group_of[
    Before: def(Int) -> UInt32
](item: UInt32, n_groups: Int, before: Before) -> Int:
    """Returns the last group with at most `item` before it; it has the item."""
    var group, above = 0, n_groups
    while group + 1 < above:
        var middle = (group + above) // 2
        if before(middle) <= item:
            group = middle
        else:
            above = middle
    return group
