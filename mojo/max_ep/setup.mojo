# SPDX-License-Identifier: Apache-2.0
"""Puts a rank's region and counters in the state before generation 1."""
from layout import TileTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.memory import unsafe_memset_zero

from .arguments import mut_
from .counters import EPLocalSyncCounters, local_sync_counters_words
from .cpu.rank import write_source_info
from .gpu_setup import clear_gpu
from .layout import Group
from .token_format import BytePointer

comptime N_SETUP_WORDS = 11
"""Int64 words of `setup`: region address, rank, time-out in ms, whether the
memory was used before (1) or is zero (0), then the seven fields of
`Group` in order."""


def _clear_combine_generations(region: Int, group: Group):
    """Makes old combine messages differ from those of the first generations."""
    var recv = BytePointer(
        unsafe_from_address=region + group.combine_recv_offset()
    )
    # Rows or partial sums: messages, one after another.
    var msg_bytes = group.combine_msg_bytes
    for i in range(group.combine_recv_bytes() // msg_bytes):
        write_source_info(recv.unsafe_offset(i * msg_bytes), msg_bytes, i, 0)


def _clear_cpu(region: Int, group: Group, was_used: Bool):
    """Clears the flags of a region in host memory."""
    unsafe_memset_zero(
        BytePointer(
            unsafe_from_address=region + group.dispatch_counts_offset()
        ),
        group.dispatch_counts_bytes(),
    )
    unsafe_memset_zero(
        BytePointer(unsafe_from_address=region + group.combine_counts_offset()),
        group.combine_counts_bytes(),
    )
    if was_used:
        _clear_combine_generations(region, group)
        if group.is_by_rank():
            # An entry is of the generation that it says, however old it is.
            unsafe_memset_zero(
                BytePointer(
                    unsafe_from_address=region + group.dispatch_recv_offset()
                ),
                group.entry_offset(group.n_ranks, 0),
            )


def init[
    target: StaticString
](
    device_ptrs: TileTensor[DType.uint64, ...],
    my_rank: TileTensor[DType.int32, ...],
    counters_group_0: TileTensor[DType.int32, ...],
    counters_group_1: TileTensor[DType.int32, ...],
    setup: TileTensor[DType.int64, ...],
    context: DeviceContext,
) raises:
    """Clears flags and counters and says where the buffers stand.

    No peer may know the region yet, or none may be in a launch. On GPU the
    clearing is only started.
    """
    var words = setup.ptr
    if Int(setup.dim[0]()) != N_SETUP_WORDS:
        raise Error("max_ep: init: setup must hold ", N_SETUP_WORDS, " words.")
    var region = Int(words[unsafe_offset=0])
    var rank = Int(words[unsafe_offset=1])
    var timeout_ms = Int(words[unsafe_offset=2])
    var was_used = words[unsafe_offset=3] != 0
    var group = Group.of(
        Int(words[unsafe_offset=4]),
        Int(words[unsafe_offset=5]),
        Int(words[unsafe_offset=6]),
        Int(words[unsafe_offset=7]),
        Int(words[unsafe_offset=8]),
        Int(words[unsafe_offset=9]),
        Int(words[unsafe_offset=10]),
    )
    var n_words = local_sync_counters_words(group)
    if (
        Int(counters_group_0.dim[0]()) < n_words
        or Int(counters_group_1.dim[0]()) < n_words
    ):
        raise Error("max_ep: init: atomic_counters need ", n_words, " words.")
    comptime if is_gpu[target]():
        clear_gpu(
            region,
            mut_(counters_group_0),
            mut_(counters_group_1),
            rank,
            timeout_ms,
            group,
            context,
        )
    else:
        for counters in [mut_(counters_group_0), mut_(counters_group_1)]:
            # The view's parameter only fixes its size, which is checked above.
            EPLocalSyncCounters[0](counters).reset(
                rank, timeout_ms, n_words, group
            )
        _clear_cpu(region, group, was_used)
    Pointer[Int32, MutUntrackedOrigin](
        unsafe_from_address=Int(my_rank.ptr)
    )[] = Int32(rank)
    var offsets = [
        group.dispatch_send_offset(),
        group.dispatch_recv_offset(),
        group.dispatch_counts_offset(),
        group.combine_recv_offset(),
        group.combine_recv_offset(),
        group.combine_counts_offset(),
    ]
    var ptrs = Pointer[UInt64, MutUntrackedOrigin](
        unsafe_from_address=Int(device_ptrs.ptr)
    )
    for i in range(len(offsets)):
        ptrs[unsafe_offset=i] = UInt64(region + offsets[i])
