# SPDX-License-Identifier: Apache-2.0
"""Puts a rank's region and counters in the state before its next generation."""
from layout import TileTensor
from max.gpu import block_dim, global_idx, grid_dim
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu as is_gpu_target
from std.sys import is_gpu

from ..protocol.call import mut_
from ..protocol.counters import (
    local_sync_counters_words,
    masked_word,
    wanted_word,
    Word,
)
from ..protocol.flags import flag_at, flag_word
from ..protocol.kernel_argument import ImmPointer, KernelArgument, MutPointer
from ..protocol.layout import Group, MESSAGE_ALIGN, N_GROUP_WORDS
from ..protocol.peer_words import Buf, Holds, N_BUFFERS, PeerWords
from ..protocol.token_format import BytePointer, SENTINEL
from ..protocol.word_list import N_KINDS, peer_words

comptime SETUP_WORDS: Array[StaticString, 14] = [
    "region",
    "rank",
    "timeout_ms",
    "was_used",
    "n_experts",
    "n_ranks",
    "max_tokens_per_rank",
    "top_k",
    "dispatch_msg_bytes",
    "combine_msg_bytes",
    "protocol",
    "readmitted",
    "dispatched",
    "combined",
]
"""The Int64 words of `setup`, by name; Python asks for this list. They are the region's
address, whether its memory was used before (1) or is zero (0), the words of `Group` in
its order; a peer that is readmitted (-1: none, this rank begins), and the last
generations of dispatch and of combine that the group has run."""
comptime N_SETUP_WORDS = len(SETUP_WORDS)


@fieldwise_init
struct SetUp(Copyable, KernelArgument):
    """What `setup` says, as a kernel takes it."""

    var region: BytePointer
    """Symmetric memory of this rank, `Group.region_bytes` of it."""
    var my_rank: Int32
    var timeout_ms: Int32
    var was_used: Bool
    var group_words: Array[Int32, N_GROUP_WORDS]
    """The words of `Group`, in its order."""
    var readmitted: Int32
    var dispatched: UInt32
    var combined: UInt32


def _thread() -> Tuple[Int, Int]:
    comptime if is_gpu():
        return (Int(global_idx.x), Int(grid_dim.x * block_dim.x))
    return (0, 1)


def _clear_words(
    buffer: BytePointer, words: PeerWords, n: Int, rank: Int, value: UInt64
):
    """Sets the words that a rank wrote into a buffer, with all threads."""
    var first, n_threads = _thread()
    for run in range(words.n_runs):
        for i in range(first, n, n_threads):
            var at = buffer.unsafe_offset(words.place(rank, i, run))
            if words.holds == Holds.DATA:
                # It is its own flag: all of it says that it has not come.
                comptime for j in range(MESSAGE_ALIGN // 4):
                    at.unsafe_bitcast[UInt32]()[unsafe_offset=j] = SENTINEL
            else:
                flag_at(at, 0)[] = value


def _clear_places_of(group: Group, rank: Int, setup: SetUp):
    """Clears all that a rank wrote into the region, and lets it say that the rank has
    read everything of some generations."""
    comptime for kind in range(N_KINDS):
        var words = peer_words[kind](group, on_gpu=is_gpu())
        var value: UInt64 = 0
        if words.is_done_word():
            value = flag_word(setup.combined, 0)
            if words.buffer == Buf.DISPATCH_COUNTS:
                # On GPUs one word holds both generations.
                value = flag_word(setup.dispatched, Int(setup.combined))
        var buffer = setup.region.unsafe_offset(group.buffer_offset(words.buffer))
        var n = group.n_words_of(words, Int(setup.my_rank), rank)
        _clear_words(buffer, words, n, rank, value)


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
            # Memory that is zero says so already.
            if is_gpu() or setup.was_used or readmitted >= 0:
                _clear_places_of(group, rank, setup)


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


def place_in_setup(name: StaticString) raises -> Int:
    """Finds a word of `setup` by its name."""
    var names = materialize[SETUP_WORDS]()
    for i in range(N_SETUP_WORDS):
        if names[i] == name:
            return i
    raise Error("max_ep: setup has no word ", name)


@fieldwise_init
struct _Given(TrivialRegisterPassable):
    """The words of `setup`, by name."""

    var words: ImmPointer[Int64]

    def __getitem__(self, name: StaticString) raises -> Int:
        return Int(self.words[unsafe_offset=place_in_setup(name)])

    def of_group(self) raises -> Array[Int32, N_GROUP_WORDS]:
        var words = Array[Int32, N_GROUP_WORDS](fill=0)
        var first = place_in_setup("n_experts")
        for i in range(N_GROUP_WORDS):
            words[i] = Int32(self.words[unsafe_offset=first + i])
        return words^


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
    var given = _Given({unsafe_from_address = Int(setup.ptr)})
    var group = Group.of(given.of_group())
    var n_words = local_sync_counters_words(group)
    if Int(counters_0.dim[0]()) < n_words or Int(counters_1.dim[0]()) < n_words:
        raise Error("max_ep: init: atomic_counters need ", n_words, " words.")
    var region = given["region"]
    var asked = SetUp(
        {unsafe_from_address = region},
        Int32(given["rank"]),
        Int32(given["timeout_ms"]),
        given["was_used"] != 0,
        given.of_group(),
        Int32(given["readmitted"]),
        UInt32(given["dispatched"]),
        UInt32(given["combined"]),
    )
    start_set_up[target](mut_(counters_0), mut_(counters_1), asked, context)
    mut_(my_rank)[] = asked.my_rank
    for i in range(N_BUFFERS):
        mut_(device_ptrs)[unsafe_offset=i] = UInt64(region + group.buffer_offset(i))
