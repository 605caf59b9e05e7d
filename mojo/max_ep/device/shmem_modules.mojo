# SPDX-License-Identifier: Apache-2.0
"""Registers kernels with SHMEM before they are launched.

NVSHMEM's device functions read a state in each CUDA module. Only the host thread that
has joined SHMEM for the device can initialize it. MAX runs ops on other threads, so an
op calls Python (`shmem.py`), which does it on the right thread. The callback is in a
table, whose address is in the environment:

    word 0   address of `int64 register(int64 device_id, uint64 CUmodule)`
    word 1   entries
    2, ...   per entry: device id, CUmodule
"""
from max.gpu.host import DeviceContext, DeviceFunction
from max.gpu.host._nvidia_cuda import CUDA_MODULE
from std.os import getenv
from ..protocol.kernel_argument import MutPointer

comptime TABLE_VARIABLE = "MAX_EP_SHMEM_MODULES"
"""Environment variable that holds the table's address in decimal."""

comptime _Register = def(Int64, UInt64) thin abi("C") -> Int64


def register_module(function: DeviceFunction, context: DeviceContext) raises:
    """Registers the module of a kernel, unless it is registered."""
    var address = getenv(TABLE_VARIABLE)
    if not address:
        raise Error(
            "max_ep: this graph reaches other hosts through SHMEM, but none is",
            " joined; call EPCommInitializer.ep_init first.",
        )
    var table = MutPointer[UInt64](unsafe_from_address=Int(address))
    var module = CUDA_MODULE(function)
    var handle = Pointer(to=module).unsafe_bitcast[UInt64]()[]
    var device_id = UInt64(Int(context.id()))
    for i in range(Int(table[unsafe_offset=1])):
        if (
            table[unsafe_offset=2 + 2 * i] == device_id
            and table[unsafe_offset=3 + 2 * i] == handle
        ):
            return
    var word = table[unsafe_offset=0]
    var status = Pointer(to=word).unsafe_bitcast[_Register]()[](
        Int64(context.id()), handle
    )
    if status != 0:
        raise Error(
            "max_ep: SHMEM does not take the kernels of GPU ",
            context.id(),
            " (status ",
            status,
            "); the process may have left the group.",
        )
