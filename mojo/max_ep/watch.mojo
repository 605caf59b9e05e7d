# SPDX-License-Identifier: Apache-2.0
"""How long a rank waits for each peer: an op of its own, and its launcher.

One file for CPU and GPU ranks, because nothing else uses any of it. The op runs between the async and the wait of a direction, looks at words that the
wait will look at, and writes nothing but times. So dispatch and combine are
compiled alike with and without it, and cost nothing where nobody asks. What is
looked at of a peer:

    dispatch        the count of each pair of it
    combine on CPU  the count of each of its experts
    combine on GPU  the flag of each row that it sends back; reduced: the first
                    16 bytes of each of its partial sums

The time of a peer runs from the begin of the watch until the last of these was
there, and is `NEVER` if time was up first, or if the counters do not allow a
launch. The wait that follows has its own time, and says who is missing.
"""
from layout import TileTensor
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from std.sys import size_of
from std.time import global_perf_counter_ns, perf_counter_ns, sleep

from .combine_rows.phase import combine_group_of
from .counters import (
    BROKEN_WORD,
    EPLocalSyncCounters,
    N_HEADER_WORDS,
    NO_EXPERT,
    wanted_word,
)
from .device.shared import own_of, shared_words
from .device.warp import bytes_at, SENTINEL
from .flags import (
    Deadline,
    DeviceDeadline,
    flag_at,
    generation_of,
    load_acquire_sys,
    load_relaxed_sys_16,
    message_flag,
    next_generation,
    POLLS_BEFORE_SLEEP,
    POLLS_PER_CLOCK_READ,
    SLEEP_SECONDS,
)
from .launch_checks import (
    check_config,
    check_size,
    counters_of,
    mut_,
    p2p_buffers,
    peer_buffers,
)
from .layout import Group, MESSAGE_ALIGN, n_experts_on_rank
from .token_format import BytePointer

comptime NEVER = Int64(-1)
"""Time of a peer that did not come."""

comptime _NUM_THREADS = 256


@always_inline
def _awaited_generation[
    is_combine: Bool
](counters: EPLocalSyncCounters) -> UInt32:
    comptime if is_combine:
        return next_generation(counters.combine_received())
    else:
        return next_generation(counters.dispatch_received())


@always_inline
def _n_counts[
    group: Group, is_combine: Bool
](my_rank: Int, peer_rank: Int) -> Int:
    """Says how many counts a peer publishes."""
    var owner = peer_rank if is_combine else my_rank
    return n_experts_on_rank(group.n_experts, group.n_ranks, owner)


@always_inline
def _count_offset[
    group: Group, is_combine: Bool
](peer_rank: Int, i: Int) -> Int:
    """Locates one of them in this rank's counts buffer."""
    comptime if is_combine:
        return group.combine_count_offset(
            peer_rank * group.n_local_experts() + i
        )
    else:
        return group.dispatch_count_offset(group.pair(i, peer_rank))


# ------------------------------------------------------------------ CPU ranks


def watch_cpu[
    n_experts: Int, group: Group, is_combine: Bool
](
    waits_ns: Pointer[Int64, MutUntrackedOrigin],
    my_counts: BytePointer,
    counters: EPLocalSyncCounters[n_experts],
):
    """Looks until every peer's counts are there, or time is up."""
    comptime n_ranks = group.n_ranks
    var my_rank = counters.my_rank()
    var generation = _awaited_generation[is_combine](counters)
    var deadline = Deadline.after(counters.timeout_ms())
    # Of each peer: the first count that was not there yet.
    var first = Array[Int, n_ranks](fill=0)
    var n_missing = n_ranks
    for peer_rank in range(n_ranks):
        waits_ns[unsafe_offset=peer_rank] = NEVER
    var prefetched_vectors = 0
    while True:
        for peer_rank in range(n_ranks):
            if waits_ns[unsafe_offset=peer_rank] != NEVER:
                continue
            var n = _n_counts[group, is_combine](my_rank, peer_rank)
            while first[peer_rank] < n:
                var offset = _count_offset[group, is_combine](
                    peer_rank, first[peer_rank]
                )
                var word = load_acquire_sys(flag_at(my_counts, offset))
                if generation_of(word) != generation:
                    break
                first[peer_rank] += 1
            if first[peer_rank] == n:
                var now = Int(perf_counter_ns())
                waits_ns[unsafe_offset=peer_rank] = Int64(
                    now - deadline.start_ns
                )
                n_missing -= 1
        if n_missing == 0:
            return
        prefetched_vectors += 1
        if (
            prefetched_vectors * n_ranks < POLLS_BEFORE_SLEEP
            and deadline.timeout_ms > 0
        ):
            continue
        if deadline.has_passed():
            return
        sleep(SLEEP_SECONDS)


# ------------------------------------------------------------------ GPU ranks


@always_inline
def _is_there[
    group: Group, is_combine: Bool
](
    item: Int,
    peer_rank: Int,
    my_rank: Int,
    recv_buf: BytePointer,
    my_counts: BytePointer,
    choices: Pointer[Int32, MutUntrackedOrigin],
    generation: UInt32,
) -> Bool:
    """Tells whether one of the things to be watched has come, or never will."""
    comptime n_local_experts = group.n_local_experts()
    comptime if not is_combine:
        var offset = _count_offset[group, False](peer_rank, item)
        return (
            generation_of(load_acquire_sys(flag_at(my_counts, offset)))
            == generation
        )
    elif not group.has_sums():
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
        return (
            load_relaxed_sys_16(recv_buf.unsafe_offset(offset))[3] != SENTINEL
        )


def watch_kernel[
    num_threads: Int,
    n_experts: Int,
    group: Group,
    p2p_world_size: Int,
    is_combine: Bool,
](
    waits_ns: Pointer[Int64, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, p2p_world_size],
    recv_count_ptrs: Array[BytePointer, p2p_world_size],
    counters: EPLocalSyncCounters[n_experts],
):
    """Watches one peer with each block.

    Launch: `grid_dim = n_ranks`, `block_dim = num_threads`.

    Parameters:
        num_threads: Threads of a block.
        n_experts: Experts of the group.
        group: Offsets of the buffers.
        p2p_world_size: Ranks of this host.
        is_combine: Which direction.

    Args:
        waits_ns: Result: nanoseconds of each peer, `[n_ranks]`.
        recv_buf_ptrs: Recv buffers of that direction, of this host's ranks.
        recv_count_ptrs: Counts buffers, likewise.
        counters: This rank's local words.
    """
    var start_ns = global_perf_counter_ns()
    var is_in_vain = shared_words[1]()
    var peer_rank = Int(block_idx.x)
    var my_rank = counters.my_rank()
    var deadline = DeviceDeadline.after(counters.timeout_ms())
    var recv_buf = bytes_at(own_of(recv_buf_ptrs, my_rank))
    var my_counts = bytes_at(own_of(recv_count_ptrs, my_rank))
    if thread_idx.x == 0:
        is_in_vain[unsafe_offset=0] = 0
    barrier()
    # What the async op has refused, it has noted; nothing is looked at then.
    var word = Int(thread_idx.x)
    if word < N_HEADER_WORDS:
        var found = counters.words[unsafe_offset=word]
        var is_broken = word == BROKEN_WORD and found != 0
        if is_broken or found != wanted_word(word, found, group):
            is_in_vain[unsafe_offset=0] = 1
    barrier()
    var dispatched = counters.combine_of()
    var choices = counters.choices(dispatched, group)
    var n_items = 0
    if is_in_vain[unsafe_offset=0] == 0:
        comptime if not is_combine:
            n_items = _n_counts[group, False](my_rank, peer_rank)
        elif group.has_sums():
            n_items = counters.n_tokens(dispatched)
        else:
            n_items = counters.n_tokens(dispatched) * group.top_k
    var generation = _awaited_generation[is_combine](counters)
    for item in range(Int(thread_idx.x), n_items, num_threads):
        var prefetched_vectors = 0
        while not _is_there[group, is_combine](
            item, peer_rank, my_rank, recv_buf, my_counts, choices, generation
        ):
            prefetched_vectors += 1
            if (
                prefetched_vectors % POLLS_PER_CLOCK_READ == 0
                and deadline.has_passed()
            ):
                is_in_vain[unsafe_offset=0] = 1
                break
    barrier()
    if thread_idx.x == 0:
        var elapsed = Int64(global_perf_counter_ns() - start_ns)
        waits_ns[unsafe_offset=peer_rank] = (
            elapsed if is_in_vain[unsafe_offset=0] == 0 else NEVER
        )


# ------------------------------------------------------------------- launcher


def ep_watch_kernel_api[
    combine_dtype: DType,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    max_token_per_rank: Int,
    n_gpus_per_node: Int,
    n_nodes: Int,
    target: StaticString,
    protocol: Int,
    partial_dtype: DType,
    is_combine: Bool,
](
    waits_ns: TileTensor[DType.int64, ...],
    atomic_counters: TileTensor[DType.int32, ...],
    recv_ptrs: TileTensor[DType.uint64, ...],
    recv_count_ptrs: TileTensor[DType.uint64, ...],
    context: DeviceContext,
) raises:
    """Measures how long a rank waits for each peer."""
    comptime n_ranks = n_gpus_per_node * n_nodes
    comptime n_mapped = n_gpus_per_node if is_gpu[target]() else n_ranks
    check_config[
        n_experts,
        n_ranks,
        hidden_size,
        MESSAGE_ALIGN // size_of[Scalar[combine_dtype]](),
        top_k,
        target,
    ]()
    comptime op = "watch"
    comptime group = combine_group_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_token_per_rank,
        protocol,
        partial_dtype,
    ]()
    var counters = counters_of[n_experts, target](op, atomic_counters, group)
    check_size(op, "waits_ns", Int(waits_ns.dim[0]()), n_ranks)
    var recv_bufs = peer_buffers[n_ranks, n_mapped](op, "recv_ptrs", recv_ptrs)
    var counts = peer_buffers[n_ranks, n_mapped](
        op, "recv_count_ptrs", recv_count_ptrs
    )
    comptime if is_gpu[target]():
        comptime kernel = watch_kernel[
            _NUM_THREADS, n_experts, group, n_gpus_per_node, is_combine
        ]
        var function = context.compile_function[kernel]()
        context.enqueue_function(
            function,
            mut_(waits_ns),
            p2p_buffers[UInt8, n_gpus_per_node](recv_bufs),
            p2p_buffers[UInt8, n_gpus_per_node](counts),
            counters,
            grid_dim=n_ranks,
            block_dim=_NUM_THREADS,
        )
    else:
        watch_cpu[n_experts, group, is_combine](
            mut_(waits_ns), counts[counters.my_rank()], counters
        )
