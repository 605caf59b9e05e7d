# SPDX-License-Identifier: Apache-2.0
"""KernelArgument, a struct that is passed to a kernel bit for bit, and its pointers."""
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.memory import unsafe_stack_allocation
from std.sys import size_of

comptime MutPointer[T: AnyType] = Pointer[T, MutUntrackedOrigin]
"""C's `T*`: who makes one keeps what it points to alive."""
comptime ImmPointer[T: AnyType] = Pointer[T, ImmUntrackedOrigin]
"""C's `const T*`."""


trait KernelArgument(DevicePassable):
    """A struct whose bytes on the host are those on the device."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type in MAX's errors about kernel arguments."""
        return "max_ep.KernelArgument"


@always_inline
def unused[T: TrivialRegisterPassable]() -> T:
    """Makes what a launch does not touch, pointers too: all its bytes are 0."""
    var field = unsafe_stack_allocation[1, T]()
    for i in range(size_of[T]()):
        field.unsafe_bitcast[UInt8]()[unsafe_offset=i] = 0
    return field[]
