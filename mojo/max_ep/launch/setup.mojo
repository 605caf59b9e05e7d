# SPDX-License-Identifier: Apache-2.0
"""Puts a rank's region and counters in the state before its next generation."""
from layout import TileTensor
from max.gpu import block_dim, global_idx, grid_dim
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu as is_gpu_target
from std.sys import is_gpu

from ..protocol.arguments import mut_
from ..protocol.counters import (
    local_sync_counters_words,
    masked_word,
    wanted_word,
    Word,
)
from ..protocol.flags import flag_at, flag_word, message_flag
from ..protocol.kernel_argument import KernelArgument, MutPointer
from ..protocol.layout import Group, N_GROUP_WORDS
from ..protocol.token_format import BytePointer, SENTINEL

comptime N_SETUP_WORDS = 14
"""Int64 words of `setup`: region address, rank, time-out in ms, whether the
memory was used before (1) or is zero (0), then the seven fields of
`Group` in order; a peer that is readmitted (-1: none, this rank begins), and the
last generations of dispatch and of combine that the group has run."""


@fieldwise_init
struct SetUp(Copyable, KernelArgument):
    """What `setup` says, as a kernel takes it."""

    var region: BytePointer
    var my_rank: Int32
    var timeout_ms: Int32
    var was_used: Bool
    var group_words: Array[Int32, N_GROUP_WORDS]
    var readmitted: Int32
    var dispatched: UInt32
    var combined: UInt32


def _thread() -> Tuple[Int, Int]:
    comptime if is_gpu():
        return (Int(global_idx.x), Int(grid_dim.x * block_dim.x))
    return (0, 1)


def _fill(buffer: BytePointer, begin: Int, end: Int, value: UInt32):
    """Fills a part of a buffer with a word, on a GPU with the whole grid."""
    var words = buffer.unsafe_offset(begin).unsafe_bitcast[UInt32]()
    var first, n_threads = _thread()
    for i in range(first, (end - begin) // 4, n_threads):
        words[unsafe_offset=i] = value


def _clear_flags(messages: BytePointer, n: Int, msg_bytes: Int):
    var first, n_threads = _thread()
    for i in range(first, n, n_threads):
        message_flag(messages.unsafe_offset(i * msg_bytes), msg_bytes)[] = 0


def _clear_places_of(region: BytePointer, group: Group, rank: Int):
    """Clears every flag that a rank wrote into a region, with all threads."""
    var first, n_threads = _thread()
    var counts = region.unsafe_offset(group.dispatch_counts_offset())
    for local_expert in range(first, group.n_local_experts(), n_threads):
        var pair = group.pair(local_expert, rank)
        flag_at(counts, group.dispatch_count_offset(pair))[] = 0
    if group.masks:
        flag_at(counts, group.heartbeat_offset(rank))[] = 0
    var recv = region.unsafe_offset(group.dispatch_recv_offset())
    if group.is_by_rank():
        flag_at(counts, group.dispatch_n_tokens_offset(rank))[] = 0
        # Clear entries: an old one would count for the new generation with the same
        # number.
        _fill(recv, group.entry_offset(rank, 0), group.entry_offset(rank + 1, 0), 0)
        comptime if is_gpu():
            var begin = group.chunk_flag_offset(rank, 0, 0)
            _fill(recv, begin, group.chunk_flag_offset(rank + 1, 0, 0), 0)
            # Data that is its own flag: all of it says that it has not come.
            begin = group.inline_token_offset(rank, 0)
            _fill(recv, begin, group.inline_token_offset(rank + 1, 0), SENTINEL)
            if group.sends_to_all():
                # Routing metadata says its generation, too.
                begin = group.token_offset(rank, 0)
                _fill(recv, begin, group.token_offset(rank + 1, 0), 0)
    elif is_gpu():
        for local_expert in range(group.n_local_experts()):
            var pair = group.pair(local_expert, rank)
            var messages = recv.unsafe_offset(group.dispatch_message_offset(pair, 0))
            _clear_flags(messages, group.max_tokens_per_rank, group.dispatch_msg_bytes)
    counts = region.unsafe_offset(group.combine_counts_offset())
    for expert in range(first, group.n_experts_on(rank), n_threads):
        var expert_id = group.expert_id(rank, expert)
        flag_at(counts, group.combine_count_offset(expert_id))[] = 0
    recv = region.unsafe_offset(group.combine_recv_offset())
    # Only with masking does each owner write rows to a place of its own.
    var begin = 0
    var end = group.combine_recv_bytes()
    if group.has_sums:
        begin = group.partial_offset(rank, 0)
        end = group.partial_offset(rank + 1, 0)
        comptime if is_gpu():
            _fill(recv, begin, end, SENTINEL)
            return
    elif group.masks:
        begin = group.combine_message_offset(0, 0, rank)
        end = group.combine_message_offset(0, 0, rank + 1)
    var msg_bytes = group.combine_msg_bytes
    _clear_flags(recv.unsafe_offset(begin), (end - begin) // msg_bytes, msg_bytes)


def _set_done(
    region: BytePointer, group: Group, rank: Int, dispatched: UInt32, combined: UInt32
):
    """Lets a region say that a rank has read everything of some generations."""
    var counts = region.unsafe_offset(group.dispatch_counts_offset())
    # On GPUs one word holds both generations.
    flag_at(counts, group.dispatch_done_offset(rank))[] = flag_word(
        dispatched, Int(combined)
    )
    counts = region.unsafe_offset(group.combine_counts_offset())
    flag_at(counts, group.combine_done_offset(rank))[] = flag_word(combined, 0)


def _first_word(i: Int, setup: SetUp, group: Group) -> Int32:
    if i == Word.MY_RANK:
        return setup.my_rank
    if i == Word.TIMEOUT_MS:
        return setup.timeout_ms
    if i == Word.DISPATCH_SENT or i == Word.DISPATCH_RECEIVED:
        return Int32(setup.dispatched)
    if i == Word.COMBINE_SENT or i == Word.COMBINE_RECEIVED:
        return Int32(setup.combined)
    return wanted_word(i, 0, group)


def set_up_kernel(
    counters_0: MutPointer[Int32], counters_1: MutPointer[Int32], setup: SetUp
):
    """Has a rank begin, or readmits another one, of which nothing stays.

    MAX gives a rank two sets of counters. Nobody may use them or the region meanwhile.
    Launch: any grid, any block; a CPU rank calls it.
    """
    var group = Group.of(setup.group_words)
    var readmitted = Int(setup.readmitted)
    if readmitted >= 0:
        counters_0[unsafe_offset=masked_word(group) + readmitted] = 0
        counters_1[unsafe_offset=masked_word(group) + readmitted] = 0
    else:
        var first, n_threads = _thread()
        for i in range(first, local_sync_counters_words(group), n_threads):
            counters_0[unsafe_offset=i] = _first_word(i, setup, group)
            counters_1[unsafe_offset=i] = _first_word(i, setup, group)
    for rank in range(group.n_ranks):
        if readmitted < 0 or rank == readmitted:
            if is_gpu() or setup.was_used or readmitted >= 0:
                _clear_places_of(setup.region, group, rank)
            _set_done(setup.region, group, rank, setup.dispatched, setup.combined)


def start_set_up[
    target: StaticString
](
    counters_0: MutPointer[Int32],
    counters_1: MutPointer[Int32],
    setup: SetUp,
    context: DeviceContext,
) raises:
    """Runs `set_up_kernel`; on a GPU this only starts it."""
    comptime if is_gpu_target[target]():
        context.enqueue_function[set_up_kernel](
            counters_0, counters_1, setup, grid_dim=128, block_dim=256
        )
    else:
        set_up_kernel(counters_0, counters_1, setup)


def buffer_offsets(group: Group) -> Array[Int, 6]:
    """Lists where buffers begin: `[dispatch, combine][send, recv, counts]`."""
    return [
        0,
        group.dispatch_recv_offset(),
        group.dispatch_counts_offset(),
        group.combine_recv_offset(),
        group.combine_recv_offset(),
        group.combine_counts_offset(),
    ]


def init[
    target: StaticString
](
    device_ptrs: TileTensor[DType.uint64, ...],
    my_rank: TileTensor[DType.int32, ...],
    counters_0: TileTensor[DType.int32, ...],
    counters_1: TileTensor[DType.int32, ...],
    setup: TileTensor[DType.int64, ...],
    context: DeviceContext,
) raises:
    """Clears flags and counters, and returns the addresses of the buffers.

    No peer may know the region yet, or none may be in a launch. With a peer that is
    readmitted, clears only what that peer has written here, and the mask of it.
    """
    if Int(setup.dim[0]()) != N_SETUP_WORDS:
        raise Error("max_ep: init: setup must hold ", N_SETUP_WORDS, " words.")
    var words = setup.ptr
    var group_words = Array[Int32, N_GROUP_WORDS](fill=0)
    for i in range(N_GROUP_WORDS):
        group_words[i] = Int32(words[unsafe_offset=4 + i])
    var group = Group.of(group_words)
    var n_words = local_sync_counters_words(group)
    if Int(counters_0.dim[0]()) < n_words or Int(counters_1.dim[0]()) < n_words:
        raise Error("max_ep: init: atomic_counters need ", n_words, " words.")
    var region = Int(words[unsafe_offset=0])
    var asked = SetUp(
        {unsafe_from_address = region},
        Int32(words[unsafe_offset=1]),
        Int32(words[unsafe_offset=2]),
        words[unsafe_offset=3] != 0,
        group_words^,
        Int32(words[unsafe_offset=11]),
        UInt32(words[unsafe_offset=12]),
        UInt32(words[unsafe_offset=13]),
    )
    start_set_up[target](mut_(counters_0), mut_(counters_1), asked, context)
    mut_(my_rank)[] = asked.my_rank
    var offsets = buffer_offsets(group)
    for i in range(len(offsets)):
        mut_(device_ptrs)[unsafe_offset=i] = UInt64(region + offsets[i])
