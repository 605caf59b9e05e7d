# SPDX-License-Identifier: Apache-2.0
"""Measures how long a rank waits for each peer: an op, and its launch.

The op runs between the async and the wait of a direction. It polls words that the
wait will poll, and writes only times. So dispatch and combine are the same code with
and without it. It polls for each peer:

    dispatch        the count of each pair of it
    combine on CPU  the count of each of its experts
    combine on GPU  the flag of each row that it sends back; with sums the
                    first 16 bytes of each of its partial sums

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
from ..protocol.arguments import Buffers, Call
from ..protocol.counters import Counters, N_HEADER_WORDS, NO_EXPERT, wanted_word, Word
from ..protocol.flags import (
    Deadline,
    flag_at,
    generation_of,
    load_acquire_sys,
    load_relaxed_sys_16,
    message_flag,
    next_generation,
    now_ns,
    POLLS_BEFORE_SLEEP,
    POLLS_PER_CLOCK_READ,
    SLEEP_SECONDS,
)
from ..protocol.kernel_argument import MutPointer
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, SENTINEL

comptime NEVER = Int64(-1)

comptime WATCH_THREADS = 256


@always_inline
def _awaited_generation[is_combine: Bool](counters: Counters[...]) -> UInt32:
    comptime word = Word.COMBINE_RECEIVED if is_combine else Word.DISPATCH_RECEIVED
    return next_generation(counters.generation(word))


@always_inline
def _is_there[
    group: Group, is_combine: Bool
](my_counts: BytePointer, peer_rank: Int, i: Int, generation: UInt32) -> Bool:
    """Returns whether the `i`-th of them has come."""
    var offset = group.dispatch_count_offset(group.pair(i, peer_rank))
    comptime if is_combine:
        offset = group.combine_count_offset(group.expert_id(peer_rank, i))
    return generation_of(load_acquire_sys(flag_at(my_counts, offset))) == generation


def watch_cpu[
    group: Group, is_combine: Bool
](waits_ns: MutPointer[Int64], my_counts: BytePointer, counters: Counters[group]):
    """Polls until every peer's counts are there, or time is up."""
    comptime n_ranks = group.n_ranks
    var my_rank = counters.my_rank()
    var generation = _awaited_generation[is_combine](counters)
    var start_ns = now_ns()
    var deadline = Deadline.after(counters.timeout_ms())
    # For each peer, the first count that was not there yet.
    var first = Array[Int, n_ranks](fill=0)
    var n_missing = n_ranks
    for peer_rank in range(n_ranks):
        waits_ns[unsafe_offset=peer_rank] = NEVER
    var n_polls = 0
    while True:
        for peer_rank in range(n_ranks):
            if waits_ns[unsafe_offset=peer_rank] != NEVER:
                continue
            var n = group.n_experts_on(peer_rank if is_combine else my_rank)
            while first[peer_rank] < n and _is_there[group, is_combine](
                my_counts, peer_rank, first[peer_rank], generation
            ):
                first[peer_rank] += 1
            if first[peer_rank] == n:
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
    var n_items = 0
    if has_expired[unsafe_offset=0] == 0:
        comptime if not is_combine:
            n_items = group.n_experts_on(my_rank)
        elif group.has_sums:
            n_items = Int(counters.n_tokens_of(dispatched)[])
        else:
            n_items = Int(counters.n_tokens_of(dispatched)[]) * group.top_k
    var generation = _awaited_generation[is_combine](counters)
    comptime n_local_experts = group.n_local_experts()

    # Whether an item has arrived, or never will.
    @always_inline
    @__parameter
    def is_there(item: Int) -> Bool:
        comptime if not is_combine:
            return _is_there[group, False](my_counts, peer_rank, item, generation)
        elif not group.has_sums:
            # Negative if there is no row, and if it is on this rank.
            var expert = choices[unsafe_offset=item]
            if expert < 0 or Int(expert) // n_local_experts != peer_rank:
                return True
            var row = recv_buf.unsafe_offset(group.combine_message_offset(0, item))
            var flag = message_flag(row, group.combine_msg_bytes)
            return generation_of(load_acquire_sys(flag)) == generation
        else:
            # A rank does not send to itself.
            var is_sent = False
            for k in range(group.top_k):
                var expert = choices[unsafe_offset=group.choice(item, k)]
                if expert != NO_EXPERT:
                    is_sent |= Int(expert) // n_local_experts == peer_rank
            if not is_sent or peer_rank == my_rank:
                return True
            var offset = group.partial_offset(peer_rank, item)
            return load_relaxed_sys_16(recv_buf.unsafe_offset(offset))[3] != SENTINEL

    for item in range(Int(thread_idx.x), n_items, WATCH_THREADS):
        var n_polls = 0
        while not is_there(item):
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
