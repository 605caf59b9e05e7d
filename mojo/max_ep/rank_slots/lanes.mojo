# SPDX-License-Identifier: Apache-2.0
"""What the lanes of a warp find out together, in one instruction each.

Intrinsics, since those are convergent: all lanes come to the same one.
"""
from std.sys import llvm_intrinsic


@always_inline
def sum_of_lanes(n: UInt32) -> UInt32:
    """Adds up the numbers of all lanes; all lanes call it."""
    return UInt32(
        llvm_intrinsic["llvm.nvvm.redux.sync.add", Int32](Int32(n), Int32(-1))
    )


@always_inline
def max_of_lanes(n: Int32) -> Int32:
    """Finds the largest number of all lanes; all lanes call it."""
    return llvm_intrinsic["llvm.nvvm.redux.sync.max", Int32](n, Int32(-1))


@always_inline
def any_of_lanes(bits: UInt32) -> UInt32:
    """Finds the bits that are set in any lane; all lanes call it."""
    return UInt32(
        llvm_intrinsic["llvm.nvvm.redux.sync.or", Int32](Int32(bits), Int32(-1))
    )


@always_inline
def lanes_like(n: Int32) -> UInt32:
    """Finds the lanes that have the same number; all lanes call it."""
    return UInt32(
        llvm_intrinsic["llvm.nvvm.match.any.sync.i32", Int32](Int32(-1), n)
    )
