# SPDX-License-Identifier: Apache-2.0
"""Measures how long a rank waits for each peer: an op, and its launch.

The op runs between the async and the wait of a direction. It polls words that the
wait will poll, and writes only times. So dispatch and combine are the same code with
and without it. It polls what the wait awaits of each peer (`word_list.mojo`), but for
what other words announce: counts; of combine on GPUs the flag of each row that the peer
sends back, or the first 16 bytes of each of its partial sums.

The time of a peer runs from the start of the watch until the last of these has
arrived. It is `NEVER` after a time-out, or if the counters do not allow a launch. The
wait that follows has its own deadline, and names the missing rank.
"""
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host.info import is_gpu
from std.time import sleep

from ..device.kernel import Queue
from ..device.shared import own_of, shared
from ..device.warp import bytes_at
from ..protocol.call import Buffers, Call
from ..protocol.counters import Counters, N_HEADER_WORDS, NO_EXPERT, wanted_word, Word
from ..protocol.flags import (
    Deadline,
    flag_at,
    generation_of,
    load_acquire_sys,
    load_relaxed_sys_16,
    next_generation,
    now_ns,
    POLLS_BEFORE_SLEEP,
    POLLS_PER_CLOCK_READ,
    SLEEP_SECONDS,
)
from ..protocol.kernel_argument import MutPointer
from ..protocol.layout import Group
from ..protocol.peer_words import COMBINE_WAIT, DISPATCH_WAIT, Holds, PeerWords, Which
from ..protocol.token_format import BytePointer, SENTINEL
from ..protocol.word_list import N_KINDS, peer_words

comptime NEVER = Int64(-1)

comptime WATCH_THREADS = 256


@always_inline
def _awaited_generation[is_combine: Bool](counters: Counters[...]) -> UInt32:
    comptime word = Word.COMBINE_RECEIVED if is_combine else Word.DISPATCH_RECEIVED
    return next_generation(counters.generation(word))


def _is_watched(words: PeerWords, is_combine: Bool) -> Bool:
    var phase = COMBINE_WAIT if is_combine else DISPATCH_WAIT
    return words.phase == phase and words.which != Which.SOME


def _have_come[
    group: Group, is_combine: Bool
](my_counts: BytePointer, my_rank: Int, peer: Int, generation: UInt32) -> Bool:
    """Returns whether all words of a peer are there; on CPU they are among counts."""
    comptime for kind in range(N_KINDS):
        comptime words = peer_words[kind](group, on_gpu=False)
        if _is_watched(words, is_combine):
            for i in range(group.n_words_of(words, my_rank, peer)):
                var flag = flag_at(my_counts, words.place(peer, i))
                if generation_of(load_acquire_sys(flag)) != generation:
                    return False
    return True


def watch_cpu[
    group: Group, is_combine: Bool
](waits_ns: MutPointer[Int64], my_counts: BytePointer, counters: Counters[group]):
    """Polls until every peer's counts are there, or time is up."""
    comptime n_ranks = group.n_ranks
    var my_rank = counters.my_rank()
    var generation = _awaited_generation[is_combine](counters)
    var start_ns = now_ns()
    var deadline = Deadline.after(counters.timeout_ms())
    var n_missing = n_ranks
    for peer_rank in range(n_ranks):
        waits_ns[unsafe_offset=peer_rank] = NEVER
    var n_polls = 0
    while True:
        for peer_rank in range(n_ranks):
            if waits_ns[unsafe_offset=peer_rank] == NEVER and _have_come[
                group, is_combine
            ](my_counts, my_rank, peer_rank, generation):
                waits_ns[unsafe_offset=peer_rank] = Int64(now_ns() - start_ns)
                n_missing -= 1
        if n_missing == 0:
            return
        n_polls += 1
        if n_polls * n_ranks < POLLS_BEFORE_SLEEP and counters.timeout_ms() > 0:
            continue
        if deadline.has_passed():
            return
        sleep(SLEEP_SECONDS)


@always_inline
def _is_expected[
    group: Group, words: PeerWords
](item: Int, peer_rank: Int, my_rank: Int, choices: MutPointer[Int32]) -> Bool:
    """Returns whether a peer sends the words of an item: a choice, or a token."""
    comptime n_local_experts = group.n_local_experts()
    comptime if words.which == Which.CHOICES:
        # Negative if there is no row, and if it is on this rank.
        var expert = choices[unsafe_offset=item]
        return expert >= 0 and Int(expert) // n_local_experts == peer_rank
    elif words.which == Which.TOKENS:
        var is_sent = False
        for k in range(group.top_k):
            var expert = choices[unsafe_offset=group.choice(item, k)]
            if expert != NO_EXPERT:
                is_sent |= Int(expert) // n_local_experts == peer_rank
        # A rank does not send to itself.
        return is_sent and peer_rank != my_rank
    return True


@always_inline
def _is_there[
    words: PeerWords
](buffer: BytePointer, peer_rank: Int, i: Int, generation: UInt32) -> Bool:
    var at = buffer.unsafe_offset(words.place(peer_rank, i))
    comptime if words.holds == Holds.DATA:
        return load_relaxed_sys_16(at)[3] != SENTINEL
    return generation_of(load_acquire_sys(flag_at(at, 0))) == generation


def watch_kernel[
    group: Group, is_combine: Bool
](waits_ns: MutPointer[Int64], buffers: Buffers[group]):
    """Watches one peer with each block.

    Launch: `grid_dim = n_ranks`, `block_dim = WATCH_THREADS`. The buffers are those
    of the direction.
    """
    var start_ns = now_ns()
    var counters = buffers.counters
    var has_expired = shared[UInt32, 1]()
    var peer_rank = Int(block_idx.x)
    var my_rank = counters.my_rank()
    var deadline = Deadline.after(counters.timeout_ms())
    var recv_buf = bytes_at(own_of(buffers.recv_bufs, my_rank))
    var my_counts = bytes_at(own_of(buffers.counts, my_rank))
    if thread_idx.x == 0:
        has_expired[unsafe_offset=0] = 0
    barrier()
    # What the async op has refused, it has recorded; nothing is polled then.
    var word = Int(thread_idx.x)
    if word < N_HEADER_WORDS:
        var found = counters.words[unsafe_offset=word]
        var is_broken = word == Word.BROKEN and found != 0
        if is_broken or found != wanted_word(word, found, group):
            has_expired[unsafe_offset=0] = 1
    barrier()
    var dispatched = counters.generation(Word.COMBINE_OF)
    var choices = counters.choices(dispatched)
    var n_tokens = Int(counters.n_tokens_of(dispatched)[])
    var generation = _awaited_generation[is_combine](counters)
    var can_poll = has_expired[unsafe_offset=0] == 0
    comptime for kind in range(N_KINDS):
        comptime words = peer_words[kind](group, on_gpu=True)
        comptime if _is_watched(words, is_combine):
            var buffer = recv_buf if words.is_in_recv() else my_counts
            var n_items = group.n_words_of(words, my_rank, peer_rank)
            # The first word of each token.
            comptime words_of_item = (
                words.n // group.max_tokens_per_rank
            ) if words.which == Which.TOKENS else 1
            comptime if words.which == Which.CHOICES:
                n_items = n_tokens * group.top_k
            elif words.which == Which.TOKENS:
                n_items = n_tokens
            for item in range(
                Int(thread_idx.x), n_items if can_poll else 0, WATCH_THREADS
            ):
                if not _is_expected[group, words](item, peer_rank, my_rank, choices):
                    continue
                var n_polls = 0
                while not _is_there[words](
                    buffer, peer_rank, item * words_of_item, generation
                ):
                    n_polls += 1
                    if n_polls % POLLS_PER_CLOCK_READ == 0 and deadline.has_passed():
                        has_expired[unsafe_offset=0] = 1
                        break
    barrier()
    if thread_idx.x == 0:
        var elapsed = Int64(now_ns() - start_ns)
        waits_ns[unsafe_offset=peer_rank] = (
            elapsed if has_expired[unsafe_offset=0] == 0 else NEVER
        )


def launch_watch[
    group: Group, //, target: StaticString, is_combine: Bool
](call: Call[group], waits_ns: MutPointer[Int64], queue: Queue) raises:
    comptime if is_gpu[target]():
        comptime kernel = watch_kernel[group, is_combine]
        var function = queue.context.compile_function[kernel]()
        queue.stream().enqueue_function(
            function,
            waits_ns,
            call.buffers(),
            grid_dim=group.n_ranks,
            block_dim=WATCH_THREADS,
        )
    else:
        watch_cpu[group, is_combine](
            waits_ns, call.counts[call.counters.my_rank()], call.counters
        )
