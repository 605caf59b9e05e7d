# SPDX-License-Identifier: Apache-2.0
"""Kernels of dispatch and combine, and how they are launched.

A kernel is a struct: `DispatchByRank`, `DispatchByExpert`, `CombineRows`, `CombineSums`.
Its fields are its arguments. It serves three launches: one that only sends (async), one
that only receives (wait), and one that does both (fused).
"""
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu.host import DeviceAttribute, DeviceContext, DeviceStream
from max.gpu.primitives.grid_controls import pdl_launch_attributes, PDLLevel
from std.utils import StaticTuple

from ..protocol.arguments import InputScales
from ..protocol.kernel_argument import KernelArgument, MutPointer
from ..protocol.layout import Group
from .shmem_modules import register_module


trait Kernel(Copyable, KernelArgument):
    """A kernel's arguments, and what it does with them."""

    comptime group: Group

    def run[sends: Bool, receives: Bool](self):
        """Does this block's part; all threads of the grid call it."""
        ...

    def run_scaled[input_scales: InputScales, sends: Bool, receives: Bool](self):
        """As `run`, with input scales: only dispatch by expert takes them.

        A separate method, because a struct with a closure as a parameter cannot be a
        `Kernel`: all its methods would be `capturing`.
        """
        comptime assert False, "this phase takes no input scales"


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(P.group.num_threads)),
    # A multiprocessor has one block: all registers may be used.
    `nvvm.minctasm`=SIMDLength(1),
)
def kernel_entry[
    P: Kernel, sends: Bool, receives: Bool, input_scales: InputScales = None
](phase: P):
    """The kernel of every phase.

    Launch: `block_dim = P.group.num_threads`. If it sends and receives, all blocks
    of the grid must be resident at once, and all ranks must run at the same time.
    """
    comptime if input_scales:
        phase.run_scaled[input_scales, sends, receives]()
    else:
        phase.run[sends, receives]()


def n_blocks[group: Group](queue: Queue) raises -> Int:
    """Decides the grid: a block for each multiprocessor, at most `n_sms` of the group and
    of the queue, so that all are resident at once. The device may have fewer than the one
    compiled for."""
    var n = min(
        materialize[DeviceContext.default_device_info.sm_count](),
        queue.context.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
    )
    comptime if group.n_sms > 0:
        n = min(n, group.n_sms)
    return min(n, queue.n_sms) if queue.n_sms > 0 else n


struct Queue(Copyable):
    """Where launches go: a device, and one of its queues (CUDA: streams)."""

    var context: DeviceContext
    var external: Optional[DeviceStream]
    """A caller's queue; None: the context's own."""
    var n_sms: Int
    """Most multiprocessors that a launch may use; 0: all."""

    @implicit
    def __init__(out self, context: DeviceContext):
        self.context = context
        self.external = None
        self.n_sms = 0

    def __init__(out self, context: DeviceContext, address: Int) raises:
        """Takes a caller's queue; address 0 is CUDA's default stream."""
        self.context = context
        self.external = context.create_external_stream(
            Optional(MutPointer[NoneType](unsafe_from_address=address))
        )
        self.n_sms = 0

    def stream(self) raises -> DeviceStream:
        if self.external:
            return self.external.value()
        return self.context.stream()


def enqueue[
    P: Kernel, //, sends: Bool, receives: Bool, input_scales: InputScales = None
](phase: P, queue: Queue) raises:
    comptime kernel = kernel_entry[P, sends, receives, input_scales]
    var function = queue.context.compile_function[kernel]()
    comptime if P.group.spans_hosts():
        register_module(function, queue.context)
    var attributes = pdl_launch_attributes(PDLLevel.ON)
    var grid = n_blocks[P.group](queue)
    comptime if input_scales:
        if queue.external:
            raise Error("max_ep: input scales go to the context's own queue only")
        # Only the context hands a closure's values to a kernel.
        queue.context.enqueue_function(
            function,
            phase,
            grid_dim=grid,
            block_dim=P.group.num_threads,
            attributes=attributes^,
        )
    else:
        queue.stream().enqueue_function(
            function,
            phase,
            grid_dim=grid,
            block_dim=P.group.num_threads,
            attributes=attributes^,
        )
