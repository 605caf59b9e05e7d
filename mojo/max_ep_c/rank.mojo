# SPDX-License-Identifier: Apache-2.0
"""What a process keeps of one region between the calls of the C ABI."""
from configuration import (
    COMBINE,
    COMBINE_DTYPE,
    DISPATCH,
    Format,
    HAS_SUMS,
    INPUT_DTYPE,
    N_RANKS,
    PARTIAL_DTYPE,
    REGION,
    TARGET,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max_ep.combine_rows.kernel import CombineRows
from max_ep.combine_sums.kernel import CombineSums
from max_ep.device.kernel import Kernel, kernel_entry, Queue
from max_ep.device.shmem_modules import register_module
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.launch.setup import SetUp, start_set_up
from max_ep.launch.watch import watch_kernel
from max_ep.protocol.call import Call, Form
from max_ep.protocol.counters import Counters
from max_ep.protocol.failures import Caller
from max_ep.protocol.kernel_argument import ImmPointer, MutPointer
from max_ep.protocol.layout import Group, MESSAGE_ALIGN
from max_ep.protocol.transport import PeerBuffers

comptime NEXT = " Call Buffer.reset() in every process, or restart the group."
comptime TORCH = Caller(
    topk_ids="topk_idx",
    n_experts="num_experts",
    timeout_s="Buffer's timeout_s",
    more_rows=(
        "pass a larger num_worst_tokens, or the same num_max_tokens_per_rank on all"
        " ranks; ids of a token must be distinct."
    ),
    next=NEXT,
    has_wide_ids=True,
)


def at[T: AnyType](address: Int) -> MutPointer[T]:
    """A pointer is never null."""
    return {unsafe_from_address = address if address != 0 else MESSAGE_ALIGN}


def imm_at[T: AnyType](address: Int) -> ImmPointer[T]:
    return {unsafe_from_address = Int(at[T](address))}


def _load_phase[P: Kernel](context: DeviceContext) raises:
    comptime for form in [Form.ASYNC, Form.WAIT, Form.FUSED]:
        comptime kernel = kernel_entry[P, form.sends, form.receives]
        var function = context.compile_function[kernel]()
        comptime if P.group.spans_hosts():
            register_module(function, context)


def _load_kernels(context: DeviceContext) raises:
    """The first launch of a kernel may be in a capture, which forbids to load it."""
    _load_phase[DispatchByRank[DISPATCH, Format, INPUT_DTYPE]](context)
    comptime if HAS_SUMS:
        _load_phase[CombineSums[COMBINE, COMBINE_DTYPE, PARTIAL_DTYPE]](context)
    else:
        _load_phase[CombineRows[COMBINE, COMBINE_DTYPE, True]](context)
    _ = context.compile_function[watch_kernel[DISPATCH, False]]()
    _ = context.compile_function[watch_kernel[COMBINE, True]]()


struct Rank(Movable):
    """What a process keeps of one region."""

    var context: DeviceContext
    var my_rank: Int
    var timeout_ms: Int
    var region: Int
    var counters: Counters[REGION]
    var addresses: Array[UInt64, 6 * N_RANKS]
    """`[dispatch, combine][send, recv, counts][rank]`."""
    var queue: Queue
    var queue_address: Int
    var n_sms: Int
    """Most multiprocessors that the next launches may use; 0: all."""
    var error: String

    def __init__(
        out self, device: Int, rank: Int, timeout_ms: Int, region: Int, words: Int
    ) raises:
        comptime if is_gpu[TARGET]():
            self.context = DeviceContext(device_id=device)
            _load_kernels(self.context)
        else:
            self.context = DeviceContext(api="cpu")
        self.my_rank = rank
        self.timeout_ms = timeout_ms
        self.region = region
        self.counters = {at[Int32](words)}
        self.addresses = Array[UInt64, 6 * N_RANKS](fill=0)
        self.queue = Queue(self.context)
        self.queue_address = -1
        self.n_sms = 0
        self.error = String()

    def failed(mut self, error: Error) -> Int32:
        self.error = String(error)
        return 1

    def queue_at(mut self, address: Int) raises -> Queue:
        """Finds a queue of the caller's; CPU ranks have none."""
        if address != self.queue_address:
            self.queue = Queue(self.context, address)
            self.queue_address = address
        self.queue.n_sms = self.n_sms
        return self.queue.copy()

    def clear(self) raises:
        """Puts the memory in the state before generation 1, and waits for that."""
        var words = self.counters.words
        var setup = SetUp(
            {unsafe_from_address = self.region},
            Int32(self.my_rank),
            Int32(self.timeout_ms),
            True,
            REGION.words(),
            -1,
            0,
            0,
        )
        start_set_up[TARGET](words, words, setup, self.context)
        comptime if is_gpu[TARGET]():
            self.context.synchronize()

    def buffers(self, i: Int) -> PeerBuffers:
        return {at[UInt64](Int(Pointer(to=self.addresses)) + 8 * N_RANKS * i)}

    def call[group: Group, direction: Int](self, op: StaticString) -> Call[group]:
        """Makes a call of an op; direction 0: dispatch, 1: combine."""
        return {
            op,
            {self.counters.words},
            self.buffers(3 * direction),
            self.buffers(3 * direction + 1),
            self.buffers(3 * direction + 2),
            TORCH,
        }
