# SPDX-License-Identifier: Apache-2.0
"""Puts a rank's region and counters in the state before generation 1."""
from layout import TileTensor
from max.gpu import block_dim, global_idx, grid_dim
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu as is_gpu_target
from std.sys import is_gpu

from .arguments import mut_
from .counters import local_sync_counters_words, masked_word, Word, word_after_init
from .device.warp import SENTINEL
from .flags import flag_at, flag_word, message_flag
from .kernel_argument import MutPointer
from .layout import Group, N_GROUP_WORDS
from .token_format import BytePointer

comptime N_SETUP_WORDS = 14
"""Int64 words of `setup`: region address, rank, time-out in ms, whether the
memory was used before (1) or is zero (0), then the seven fields of
`Group` in order; a peer that is readmitted (-1: none, this rank begins), and the
last generations of dispatch and of combine that the group has run."""


@always_inline
def _thread() -> Tuple[Int, Int]:
    """Returns which thread of how many this is that do something together."""
    comptime if is_gpu():
        return (Int(global_idx.x), Int(grid_dim.x * block_dim.x))
    return (0, 1)


@always_inline
def _fill(buffer: BytePointer, begin: Int, end: Int, value: UInt32):
    """Fills a part of a buffer with a word, on a GPU with the whole grid."""
    var words = buffer.unsafe_offset(begin).unsafe_bitcast[UInt32]()
    var first, n_threads = _thread()
    for i in range(first, (end - begin) // 4, n_threads):
        words[unsafe_offset=i] = value


@always_inline
def _clear_flags(messages: BytePointer, n: Int, msg_bytes: Int):
    """Clears the flags of messages, on a GPU with the whole grid."""
    var first, n_threads = _thread()
    for i in range(first, n, n_threads):
        message_flag(messages.unsafe_offset(i * msg_bytes), msg_bytes)[] = 0


def _set_done(
    region: BytePointer, group: Group, rank: Int, generations: Tuple[UInt32, UInt32]
):
    """Lets a region say that a rank has read everything of some generations."""
    var counts = region.unsafe_offset(group.dispatch_counts_offset())
    var done = flag_at(counts, group.dispatch_done_offset(rank))
    # Of GPU ranks it has both.
    done[] = flag_word(generations[0], Int(generations[1]))
    counts = region.unsafe_offset(group.combine_counts_offset())
    flag_at(counts, group.combine_done_offset(rank))[] = flag_word(generations[1], 0)


def _clear_places_of(region: BytePointer, group: Group, rank: Int):
    """Clears every flag that another rank wrote into a region."""
    var counts = region.unsafe_offset(group.dispatch_counts_offset())
    for local_expert in range(group.n_local_experts()):
        var pair = group.pair(local_expert, rank)
        flag_at(counts, group.dispatch_count_offset(pair))[] = 0
    if group.masks:
        flag_at(counts, group.heartbeat_offset(rank))[] = 0
    if group.is_by_rank():
        flag_at(counts, group.dispatch_n_tokens_offset(rank))[] = 0
        var recv = region.unsafe_offset(group.dispatch_recv_offset())
        _fill(recv, group.entry_offset(rank, 0), group.entry_offset(rank + 1, 0), 0)
        comptime if is_gpu():
            var begin = group.chunk_flag_offset(rank, 0, 0)
            _fill(recv, begin, group.chunk_flag_offset(rank + 1, 0, 0), 0)
            begin = group.inline_token_offset(rank, 0)
            _fill(recv, begin, group.inline_token_offset(rank + 1, 0), SENTINEL)
    counts = region.unsafe_offset(group.combine_counts_offset())
    for expert in range(group.n_experts_on(rank)):
        var expert_id = group.expert_id(rank, expert)
        flag_at(counts, group.combine_count_offset(expert_id))[] = 0
    var messages = region.unsafe_offset(group.combine_recv_offset())
    # Of rows only ranks that mask have places of their own.
    var first = 0
    var end = group.combine_recv_bytes()
    if group.has_sums:
        first = group.partial_offset(rank, 0)
        end = group.partial_offset(rank + 1, 0)
        comptime if is_gpu():
            _fill(messages, first, end, SENTINEL)
            return
    elif group.masks:
        first = group.combine_message_offset(0, 0, rank)
        end = group.combine_message_offset(0, 0, rank + 1)
    var msg_bytes = group.combine_msg_bytes
    _clear_flags(messages.unsafe_offset(first), (end - first) // msg_bytes, msg_bytes)


def _go_on(
    region: BytePointer,
    counters: MutPointer[Int32],
    group: Group,
    readmitted: Int,
    generations: Tuple[UInt32, UInt32],
):
    """Has a rank begin after some generations, once its region is cleared; or readmits
    another one, of which nothing stays."""
    if readmitted >= 0:
        counters[unsafe_offset=masked_word(group) + readmitted] = 0
        _clear_places_of(region, group, readmitted)
        _set_done(region, group, readmitted, generations)
        return
    for i in range(2):
        var dispatch, combine = generations[0], generations[1]
        counters[unsafe_offset=Word.DISPATCH_SENT + i] = Int32(dispatch)
        counters[unsafe_offset=Word.COMBINE_SENT + i] = Int32(combine)
    for peer in range(group.n_ranks):
        _set_done(region, group, peer, generations)


def clear_kernel(
    region: BytePointer,
    counters_0: MutPointer[Int32],
    counters_1: MutPointer[Int32],
    my_rank: Int32,
    timeout_ms: Int32,
    group_words: Array[Int32, N_GROUP_WORDS],
):
    """Clears every flag and word of a rank; nobody may use them meanwhile.

    MAX gives a rank two sets of counters. Launch: any grid, any block.
    """
    var group = Group.of(group_words)
    var first = Int(global_idx.x)
    var n_threads = Int(grid_dim.x * block_dim.x)
    for i in range(first, local_sync_counters_words(group), n_threads):
        var word = word_after_init(i, Int(my_rank), Int(timeout_ms), group)
        counters_0[unsafe_offset=i] = word
        counters_1[unsafe_offset=i] = word

    var counts = region.unsafe_offset(group.dispatch_counts_offset())
    _fill(counts, 0, group.dispatch_counts_bytes(), 0)
    counts = region.unsafe_offset(group.combine_counts_offset())
    _fill(counts, 0, group.combine_counts_bytes(), 0)

    var n_ranks = group.n_ranks
    var recv = region.unsafe_offset(group.dispatch_recv_offset())
    if group.is_by_rank():
        # An entry is of the generation that it says, however old it is.
        _fill(recv, 0, group.entry_offset(n_ranks, 0), 0)
        if group.sends_to_all():
            # Routing metadata says its generation, too.
            var end = group.token_offset(n_ranks, 0)
            _fill(recv, group.token_offset(0, 0), end, 0)
        var end = group.chunk_flag_offset(n_ranks, 0, 0)
        _fill(recv, group.chunk_flag_offset(0, 0, 0), end, 0)
        # Data that is its own flag: all of it says that it has not come.
        end = group.inline_token_offset(n_ranks, 0)
        _fill(recv, group.inline_token_offset(0, 0), end, SENTINEL)
    else:
        var msg_bytes = group.dispatch_msg_bytes
        # The send buffer is first.
        _clear_flags(region, group.max_tokens_per_rank, msg_bytes)
        _clear_flags(recv, group.dispatch_recv_bytes() // msg_bytes, msg_bytes)
    recv = region.unsafe_offset(group.combine_recv_offset())
    if group.has_sums:
        _fill(recv, 0, group.combine_recv_bytes(), SENTINEL)
    else:
        var msg_bytes = group.combine_msg_bytes
        _clear_flags(recv, group.combine_recv_bytes() // msg_bytes, msg_bytes)


def go_on_kernel(
    region: BytePointer,
    counters_0: MutPointer[Int32],
    counters_1: MutPointer[Int32],
    group_words: Array[Int32, N_GROUP_WORDS],
    readmitted: Int32,
    dispatched: UInt32,
    combined: UInt32,
):
    """Does `_go_on` with the whole grid. Launch: any grid, any block."""
    var group = Group.of(group_words)
    for counters in [counters_0, counters_1]:
        _go_on(region, counters, group, Int(readmitted), (dispatched, combined))


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

    No peer may know the region yet, or none may be in a launch. On GPUs this only
    starts the clearing. With a peer that is readmitted, clears only what that peer has
    written here, and the mask of it.
    """
    var words = setup.ptr
    if Int(setup.dim[0]()) != N_SETUP_WORDS:
        raise Error("max_ep: init: setup must hold ", N_SETUP_WORDS, " words.")
    var region = Int(words[unsafe_offset=0])
    var rank = Int(words[unsafe_offset=1])
    var timeout_ms = Int(words[unsafe_offset=2])
    var was_used = words[unsafe_offset=3] != 0
    var group_words = Array[Int32, N_GROUP_WORDS](fill=0)
    for i in range(N_GROUP_WORDS):
        group_words[i] = Int32(words[unsafe_offset=4 + i])
    var group = Group.of(group_words)
    var n_words = local_sync_counters_words(group)
    if Int(counters_0.dim[0]()) < n_words or Int(counters_1.dim[0]()) < n_words:
        raise Error("max_ep: init: atomic_counters need ", n_words, " words.")
    var readmitted = Int(words[unsafe_offset=11])
    var generations = (UInt32(words[unsafe_offset=12]), UInt32(words[unsafe_offset=13]))
    var bytes = BytePointer(unsafe_from_address=region)
    comptime if is_gpu_target[target]():
        if readmitted < 0:
            context.enqueue_function[clear_kernel](
                bytes,
                mut_(counters_0),
                mut_(counters_1),
                Int32(rank),
                Int32(timeout_ms),
                group_words,
                grid_dim=128,
                block_dim=256,
            )
        if readmitted >= 0 or generations[0] != 0:
            context.enqueue_function[go_on_kernel](
                bytes,
                mut_(counters_0),
                mut_(counters_1),
                group_words,
                Int32(readmitted),
                generations[0],
                generations[1],
                grid_dim=128,
                block_dim=256,
            )
    else:
        if readmitted < 0 and was_used:
            for peer in range(group.n_ranks):
                _clear_places_of(bytes, group, peer)
        for counters in [mut_(counters_0), mut_(counters_1)]:
            if readmitted < 0:
                for i in range(n_words):
                    var word = word_after_init(i, rank, timeout_ms, group)
                    counters[unsafe_offset=i] = word
            _go_on(bytes, counters, group, readmitted, generations)
    mut_(my_rank)[] = Int32(rank)
    var offsets = [
        0,
        group.dispatch_recv_offset(),
        group.dispatch_counts_offset(),
        group.combine_recv_offset(),
        group.combine_recv_offset(),
        group.combine_counts_offset(),
    ]
    for i in range(len(offsets)):
        mut_(device_ptrs)[unsafe_offset=i] = UInt64(region + offsets[i])
