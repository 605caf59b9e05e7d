# SPDX-License-Identifier: Apache-2.0
"""Puts a GPU rank's region and counters in the state before generation 1."""
from max.gpu import block_dim, global_idx, grid_dim
from max.gpu.host import DeviceContext

from .counters import EPLocalSyncCounters, local_sync_counters_words
from .device.warp import SENTINEL
from .flags import flag_at, message_flag
from .layout import FLAG_BYTES, Group
from .token_format import BytePointer


@always_inline
def _fill(bytes: BytePointer, n_bytes: Int, value: UInt32):
    """Fills a part of a region with a word, with the whole grid."""
    var words = bytes.unsafe_bitcast[UInt32]()
    for i in range(
        Int(global_idx.x), n_bytes // 4, Int(grid_dim.x * block_dim.x)
    ):
        words[unsafe_offset=i] = value


def clear_kernel(
    region: BytePointer,
    counters_group_0: Pointer[Int32, MutUntrackedOrigin],
    counters_group_1: Pointer[Int32, MutUntrackedOrigin],
    my_rank: Int32,
    timeout_ms: Int32,
    n_experts: Int32,
    n_ranks: Int32,
    max_tokens_per_rank: Int32,
    top_k: Int32,
    dispatch_msg_bytes: Int32,
    combine_msg_bytes: Int32,
    protocol: Int32,
):
    """Clears every flag and word of a rank; nobody may use them meanwhile.

    Launch: any grid, any block.

    Args:
        region: The rank's region.
        counters_group_0: Local words, `[total_size()]`.
        counters_group_1: Local words of MAX's second group.
        my_rank: The rank.
        timeout_ms: How long a launch may wait.
        n_experts: As in `Group`, as the rest.
        n_ranks: Likewise.
        max_tokens_per_rank: Likewise.
        top_k: Likewise.
        dispatch_msg_bytes: Likewise.
        combine_msg_bytes: Likewise.
        protocol: Likewise.
    """
    var group = Group.of(
        Int(n_experts),
        Int(n_ranks),
        Int(max_tokens_per_rank),
        Int(top_k),
        Int(dispatch_msg_bytes),
        Int(combine_msg_bytes),
        Int(protocol),
    )
    var first = Int(global_idx.x)
    var n_threads = Int(grid_dim.x * block_dim.x)
    var n_words = local_sync_counters_words(group)
    # The view's parameter only fixes its size.
    var counters = EPLocalSyncCounters[0](counters_group_0)
    for i in range(first, n_words, n_threads):
        var word = counters.word_after_reset(
            i, Int(my_rank), Int(timeout_ms), group
        )
        counters_group_0[unsafe_offset=i] = word
        counters_group_1[unsafe_offset=i] = word

    var counts = region.unsafe_offset(group.dispatch_counts_offset())
    for i in range(
        first, group.dispatch_counts_bytes() // FLAG_BYTES, n_threads
    ):
        flag_at(counts, i * FLAG_BYTES)[] = 0
    counts = region.unsafe_offset(group.combine_counts_offset())
    for i in range(
        first, group.combine_counts_bytes() // FLAG_BYTES, n_threads
    ):
        flag_at(counts, i * FLAG_BYTES)[] = 0

    var recv = region.unsafe_offset(group.dispatch_recv_offset())
    if group.is_by_rank():
        # An entry is of the generation that it says, however old it is.
        _fill(recv, group.entry_offset(group.n_ranks, 0), 0)
        if group.sends_to_all():
            # Likewise a choice that a token carries.
            var tokens = group.token_offset(0, 0)
            _fill(
                recv.unsafe_offset(tokens),
                group.token_offset(group.n_ranks, 0) - tokens,
                0,
            )
        var flags = recv.unsafe_offset(group.chunk_flag_offset(0, 0, 0))
        _fill(
            flags,
            group.chunk_flag_offset(group.n_ranks, 0, 0)
            - group.chunk_flag_offset(0, 0, 0),
            0,
        )
        # Data that is its own flag: all of it says that it has not come.
        var early = group.inline_token_offset(0, 0)
        _fill(
            recv.unsafe_offset(early),
            group.inline_token_offset(group.n_ranks, 0) - early,
            SENTINEL,
        )
    else:
        var messages = region.unsafe_offset(group.dispatch_send_offset())
        for i in range(first, group.max_tokens_per_rank, n_threads):
            var message = messages.unsafe_offset(
                group.dispatch_staged_offset(i)
            )
            message_flag(message, group.dispatch_msg_bytes)[] = 0
        var n_messages = group.dispatch_recv_bytes() // group.dispatch_msg_bytes
        for i in range(first, n_messages, n_threads):
            var message = recv.unsafe_offset(i * group.dispatch_msg_bytes)
            message_flag(message, group.dispatch_msg_bytes)[] = 0
    recv = region.unsafe_offset(group.combine_recv_offset())
    if group.has_sums():
        _fill(recv, group.combine_recv_bytes(), SENTINEL)
    else:
        for i in range(first, group.n_choices(), n_threads):
            var message = recv.unsafe_offset(i * group.combine_msg_bytes)
            message_flag(message, group.combine_msg_bytes)[] = 0


def clear_gpu(
    region: Int,
    counters_group_0: Pointer[Int32, MutUntrackedOrigin],
    counters_group_1: Pointer[Int32, MutUntrackedOrigin],
    my_rank: Int,
    timeout_ms: Int,
    group: Group,
    context: DeviceContext,
) raises:
    """Starts `clear_kernel`."""
    context.enqueue_function[clear_kernel](
        BytePointer(unsafe_from_address=region),
        counters_group_0,
        counters_group_1,
        Int32(my_rank),
        Int32(timeout_ms),
        Int32(group.n_experts),
        Int32(group.n_ranks),
        Int32(group.max_tokens_per_rank),
        Int32(group.top_k),
        Int32(group.dispatch_msg_bytes),
        Int32(group.combine_msg_bytes),
        Int32(group.protocol()),
        grid_dim=128,
        block_dim=256,
    )
