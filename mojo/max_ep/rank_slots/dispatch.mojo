# SPDX-License-Identifier: Apache-2.0
"""Dispatch of `rank_slots` for GPU ranks.

Each token goes once to each rank that has an expert of it. An entry for each
choice goes to every rank, and tells by itself of which generation it is, as do
counts and numbers of tokens: none of them waits for another store. Rows and
tables are those of `expert_slots`, bit for bit.

How a token announces itself depends on how many its source sends:

* *early* (at most `MAX_EARLY_TOKENS`): every 16 bytes are their own flag. The
  receiver puts `EMPTY` back.
* more: each of `N_CHUNKS` parts has a flag, published after it.

Roles of a block's warps: the first `N_INDEX_WARPS` write entries and counts,
the next ones send, the last `N_COUNT_WARPS` read counts; each then takes part
in receiving.

After the sending half: every rank gets entries, counts and tokens. After the
receiving half: rows stand as those of `expert_slots`; sources hear of it from
the next launch (`publish_earlier_reads`) or, split, from the end of this one.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
    syncwarp,
    thread_idx,
)
from std.bit import count_trailing_zeros, pop_count
from std.math import ceildiv
from std.memory import bitcast
from std.utils import StaticTuple

from ..counters import EPLocalSyncCounters, NO_EXPERT, NO_ROW
from ..expert_slots.device_steps import (
    ACCESSES_IN_FLIGHT,
    SharedAddresses,
    SharedInts,
    any_lane,
    await_message,
    bytes_at,
    is_last_block,
    load16,
    share_addresses,
    shared_ints,
    shuffle_address,
    store16,
)
from ..expert_slots.dispatch import (
    FAILED_PAIRS,
    dispatch_layout_of,
    encode_steps,
    steps_in_flight,
    write_no_rows,
)
from ..expert_slots.host_steps import flag_at
from ..failures import (
    DROPPED,
    NO_COUNT,
    NO_MESSAGE,
    TOO_MANY_ROWS,
    note_failure,
)
from ..flags import (
    FlagPointer,
    SPINS_BETWEEN_LOOKS,
    SharedWord,
    block_add,
    block_arrive,
    block_peek,
    block_publish,
    count_of,
    flag_word,
    generation_of,
    next_generation,
    peek_16,
    peek_number,
    publish,
    publish_number,
    put_16,
)
from ..layout import (
    MESSAGE_ALIGN,
    N_CHUNKS,
    RegionLayout,
    n_experts_on_rank,
)
from ..row_tables import RowTables
from ..token_format import BytePointer, LaneBytes, TokenFormat
from .device_steps import (
    EMPTY,
    Launch,
    await_launch_before,
    await_readers,
    divmod_32,
    is_last_to_start,
    note_readers,
    publish_earlier_reads,
    publish_reads,
    start_launch,
    without_empty,
)
from .entries import (
    NO_ENTRY_EXPERT,
    NO_POSITION,
    entry_word,
    expert_of_entry,
    position_of_entry,
    weight_of_word,
    weight_word,
)

comptime _SEND = 0
comptime _RECEIVE = 1

comptime N_INDEX_WARPS = 2
"""Warps of a block that write entries."""

comptime N_COUNT_WARPS = 8
"""Warps of a block that read counts."""

comptime N_WARPS_MIN = N_INDEX_WARPS + 1 + N_COUNT_WARPS
"""Warps of a block at least: one sends."""

comptime N_SHARED_CHOICES = 1536
"""Choices up to which a block keeps ids and weights in its shared memory."""

# Words of a block's control: index warps that are done, whether numbers of
# tokens are there, count warps that have their sums and those that have their
# rows, whether a count is missing or the rows do not fit, next item to receive.
comptime _INDEXED = 0
comptime _TOKENS_READY = 1
comptime _SUMMED = 2
comptime _COUNTED = 3
comptime _FAILED = 4
comptime _NEXT_ITEM = 5
comptime _N_CONTROL = 6

# Warps that also count the blocks that have begun, and tell of earlier reads:
# if they send at all, they do not begin at once.
comptime _COUNTING_WARP = 6
comptime _TELLING_WARP = 7

# Ids that a lane has under way: from shared memory, from global memory.
comptime _FEW_IDS = 4
comptime _MANY_IDS = 16

comptime _COUNTS_IN_FLIGHT = 4


@always_inline
def n_early_parts(n_tokens: Int, n_steps: Int) -> Int:
    """Chooses into how many parts warps take an early token.

    Args:
        n_tokens: Tokens of a rank.
        n_steps: Steps of a token, of 16 bytes a lane each.

    Returns:
        In `[1, n_steps]`.
    """
    return min(14 if n_tokens <= 64 else 7, n_steps)


@always_inline
def n_send_warps(is_early: Bool, n_warps: Int) -> Int:
    """Chooses how many warps of a block send while the others receive.

    Args:
        is_early: Whether the data is its own flag.
        n_warps: Warps of a block.

    Returns:
        In `[1, n_warps - N_INDEX_WARPS - N_COUNT_WARPS]`.
    """
    return min(6 if is_early else 3, n_warps - N_INDEX_WARPS - N_COUNT_WARPS)


# ------------------------------------------------------------ the sending half


@fieldwise_init
struct Choices(TrivialRegisterPassable):
    """Ids and router weights of this rank's choices."""

    var ids: Pointer[Int32, ImmUntrackedOrigin]
    """`[n_choices]`."""
    var weights: Pointer[Float32, ImmUntrackedOrigin]
    """`[n_choices]`; read if combine is reduced."""
    var n_choices: Int
    """How many."""
    var shared_ids: SharedInts
    """`[N_SHARED_CHOICES]`: the ids, if they are no more than that."""
    var shared_weights: SharedInts
    """Likewise the weights' bits."""

    @always_inline
    def are_shared(self) -> Bool:
        """Tells whether they are in shared memory.

        Returns:
            Whether they are few enough.
        """
        return self.n_choices <= N_SHARED_CHOICES

    @always_inline
    def id(self, choice: Int) -> Int32:
        """Reads an id.

        Args:
            choice: The choice.

        Returns:
            The id.
        """
        if self.are_shared():
            return self.shared_ids[unsafe_offset=choice]
        return self.ids[unsafe_offset=choice]

    @always_inline
    def load_ids[
        n: Int, is_shared: Bool
    ](self, mut ids: Array[Int32, n], first: Int, lane: Int):
        """Reads ids with a warp, as many as a lane can have under way.

        Parameters:
            n: How many a lane reads.
            is_shared: What `are_shared` says.

        Args:
            ids: Result; what is behind the last choice stays.
            first: The first choice of the warp.
            lane: This lane.
        """
        comptime for i in range(n):
            var choice = first + i * WARP_SIZE + lane
            if choice < self.n_choices:
                comptime if is_shared:
                    ids[i] = self.shared_ids[unsafe_offset=choice]
                else:
                    ids[i] = self.ids[unsafe_offset=choice]

    @always_inline
    def weight(self, choice: Int) -> Float32:
        """Reads a router weight.

        Args:
            choice: The choice.

        Returns:
            The weight.
        """
        if self.are_shared():
            return bitcast[DType.float32](
                self.shared_weights[unsafe_offset=choice]
            )
        return self.weights[unsafe_offset=choice]


@always_inline
def _share_choices[
    num_threads: Int, layout: RegionLayout
](
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int,
) -> Choices:
    """Copies few choices to shared memory; a block barrier must follow.

    Parameters:
        num_threads: Threads of a block.
        layout: How the regions are cut.

    Args:
        topk_ids: `[n_tokens][top_k]`.
        router_weights: `[n_tokens][top_k]`; read if combine is reduced.
        n_tokens: Tokens to send.

    Returns:
        The choices.
    """
    comptime n_weights = N_SHARED_CHOICES if layout.is_reduced() else 1
    var choices = Choices(
        topk_ids,
        router_weights,
        n_tokens * layout.top_k,
        shared_ints[N_SHARED_CHOICES](),
        shared_ints[n_weights](),
    )
    if choices.are_shared():
        for i in range(Int(thread_idx.x), choices.n_choices, num_threads):
            choices.shared_ids[unsafe_offset=i] = topk_ids[unsafe_offset=i]
            comptime if layout.is_reduced():
                choices.shared_weights[unsafe_offset=i] = bitcast[DType.int32](
                    router_weights[unsafe_offset=i]
                )
    return choices


@always_inline
def _write_entry[
    layout: RegionLayout
](
    recv_bufs: SharedAddresses,
    my_rank: Int,
    choice: Int,
    generation: UInt32,
    expert_id: Int,
    position: Int,
    weight: Float32,
):
    """Writes the entry of a choice to every rank, with one lane.

    Parameters:
        layout: How the regions are cut.

    Args:
        recv_bufs: All ranks' recv buffers.
        my_rank: This rank.
        choice: The choice.
        generation: The generation that is sent.
        expert_id: Its expert, or `NO_ENTRY_EXPERT`.
        position: Which of the choices of this expert.
        weight: Its router weight; read if combine is reduced.
    """
    var word = entry_word(generation, expert_id, position)
    var offset = UInt64(layout.entry_offset(my_rank, choice))
    var bytes = LaneBytes(0)
    comptime if layout.is_reduced():
        bytes = bitcast[DType.uint32, 4](
            SIMD[DType.uint64, 2](word, weight_word(generation, weight))
        )
    for i in range(layout.n_ranks):
        # Not all sources begin with the same rank.
        var rank = my_rank + 1 + i
        rank -= layout.n_ranks if rank >= layout.n_ranks else 0
        var to = bytes_at(recv_bufs[unsafe_offset=rank] + offset)
        # I1: only this rank writes entries of its choices.
        comptime if layout.is_reduced():
            put_16(to, bytes)
        else:
            publish_number(flag_at(to, 0), generation, count_of(word))


@always_inline
def _index_choices[
    n_experts: Int, layout: RegionLayout
](
    choices: Choices,
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Writes entries and counts of some experts, with one of the index warps.

    Each expert is one warp's, which walks all choices: its position counts the
    earlier choices of the same expert. One more list holds the choices that
    have no expert; receivers wait for their entries too.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        choices: Ids and weights.
        n_tokens: Tokens to send.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    var lane = launch.lane
    var my_rank = launch.my_rank
    var generation = next_generation(launch.before.dispatch_sent)
    var n_blocks = Int(grid_dim.x)
    # I3, for entries and counts.
    if not await_readers[layout, False](launch, counts, counters, _SEND):
        return
    if block_idx.x == 0 and launch.warp_idx == 0:
        for rank in range(lane, layout.n_ranks, WARP_SIZE):
            publish_number(
                flag_at(
                    bytes_at(counts[unsafe_offset=rank]),
                    layout.dispatch_n_tokens_offset(my_rank),
                ),
                generation,
                n_tokens,
            )
    # Choices that are found wait here for their entries, which a lane each
    # writes: those of a list are far apart.
    comptime n_waiting = WARP_SIZE * (1 + _MANY_IDS)
    var found = shared_ints[N_INDEX_WARPS * n_waiting]().unsafe_offset(
        launch.warp_idx * n_waiting
    )
    for list in range(
        Int(block_idx.x) + launch.warp_idx * n_blocks,
        n_experts + 1,
        N_INDEX_WARPS * n_blocks,
    ):
        # Few choices are walked by little code: a launch reads its code, too.
        var n_listed: Int
        if choices.are_shared():
            n_listed = _walk_choices[n_experts, layout, _FEW_IDS, True](
                choices, found, list, generation, recv_bufs, launch, counters
            )
        else:
            n_listed = _walk_choices[n_experts, layout, _MANY_IDS, False](
                choices, found, list, generation, recv_bufs, launch, counters
            )
        if lane == 0 and list < n_experts:
            var dst_rank, local_expert = divmod(list, layout.n_local_experts())
            publish_number(
                flag_at(
                    bytes_at(counts[unsafe_offset=dst_rank]),
                    layout.dispatch_count_offset(
                        layout.pair(local_expert, my_rank)
                    ),
                ),
                generation,
                min(n_listed, layout.max_tokens_per_rank),
            )
        syncwarp()


@always_inline
def _walk_choices[
    n_experts: Int, layout: RegionLayout, in_flight: Int, is_shared: Bool
](
    choices: Choices,
    found: SharedInts,
    list: Int,
    generation: UInt32,
    recv_bufs: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Int:
    """Finds the choices of a list and writes their entries, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.
        in_flight: Ids that a lane has under way.
        is_shared: Whether they are in shared memory.

    Args:
        choices: Ids and weights.
        found: Room for `WARP_SIZE * (1 + in_flight)` choices.
        list: An expert, or `n_experts` for choices that have none.
        generation: The generation that is sent.
        recv_bufs: All ranks' recv buffers.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Choices of the list; the same in all lanes.
    """
    var lane = launch.lane
    var below = (UInt32(1) << UInt32(lane)) - 1
    var n_listed = 0
    var n_found = 0
    for first in range(0, choices.n_choices, WARP_SIZE * in_flight):
        var ids = Array[Int32, in_flight](fill=NO_EXPERT)
        choices.load_ids[is_shared=is_shared](ids, first, lane)
        var is_listed = Array[Bool, in_flight](fill=False)
        var is_any = False
        comptime for i in range(in_flight):
            var choice = first + i * WARP_SIZE + lane
            var is_expert = ids[i] >= 0 and ids[i] < Int32(n_experts)
            is_listed[i] = (
                ids[i] == Int32(list) if list < n_experts else not is_expert
            ) and choice < choices.n_choices
            is_any = is_any or is_listed[i]
        # Most choices are of other lists.
        if any_lane(is_any):
            comptime for i in range(in_flight):
                var listed = warp.vote[DType.uint32](is_listed[i])
                if is_listed[i]:
                    found[
                        unsafe_offset=n_found + Int(pop_count(listed & below))
                    ] = Int32(first + i * WARP_SIZE + lane)
                n_found += Int(pop_count(listed))
            syncwarp()
        var is_last = first + WARP_SIZE * in_flight >= choices.n_choices
        var n_entered = 0
        while n_found - n_entered >= WARP_SIZE or (
            is_last and n_found > n_entered
        ):
            var n = min(n_found - n_entered, WARP_SIZE)
            _enter_choices[n_experts, layout](
                choices,
                found.unsafe_offset(n_entered),
                n,
                n_listed,
                list,
                generation,
                recv_bufs,
                launch,
                counters,
            )
            n_entered += n
            n_listed += n
        if n_entered > 0:
            # What is left moves to the front.
            n_found -= n_entered
            var moved: Int32 = 0
            if lane < n_found:
                moved = found[unsafe_offset=n_entered + lane]
            syncwarp()
            if lane < n_found:
                found[unsafe_offset=lane] = moved
            syncwarp()
    return n_listed


@always_inline
def _enter_choices[
    n_experts: Int, layout: RegionLayout
](
    choices: Choices,
    found: SharedInts,
    n_found: Int,
    n_before: Int,
    list: Int,
    generation: UInt32,
    recv_bufs: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Writes the entries of some choices of a list, a lane each.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        choices: Ids and weights.
        found: The choices, in their order.
        n_found: How many, at most as many as lanes.
        n_before: Choices of the list before them.
        list: Their expert, or `n_experts` if they have none.
        generation: The generation that is sent.
        recv_bufs: All ranks' recv buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    comptime top_k = layout.top_k
    if launch.lane >= n_found:
        return
    var choice = Int(found[unsafe_offset=launch.lane])
    var position = n_before + launch.lane
    var is_expert = list < n_experts
    var has_place = is_expert and position < layout.max_tokens_per_rank
    var sent = counters.choices(generation, layout.n_choices())
    sent[unsafe_offset=choice] = Int32(list) if has_place else NO_EXPERT
    var weight: Float32 = 0
    comptime if layout.is_reduced():
        weight = choices.weight(choice)
    _write_entry[layout](
        recv_bufs,
        launch.my_rank,
        choice,
        generation,
        # The token of a choice without a place is sent like any other, so its
        # entry names the expert.
        list if is_expert else NO_ENTRY_EXPERT,
        position if has_place else NO_POSITION,
        weight,
    )
    if not has_place:
        var id = choices.id(choice)
        if id != NO_EXPERT:
            note_failure(
                counters.failure(),
                DROPPED,
                _SEND,
                launch.my_rank,
                Int(id),
                generation,
                0,
                choice // top_k,
                choice % top_k,
            )


@always_inline
def _store_steps[
    token_fmt_type: TokenFormat, is_early: Bool
](
    to: UInt64,
    first: Int,
    end: Int,
    values: Array[LaneBytes, steps_in_flight[token_fmt_type]()],
    scales: Array[LaneBytes, steps_in_flight[token_fmt_type]()],
    lane: Int,
):
    """Writes some steps of an encoded token, with one warp.

    Parameters:
        token_fmt_type: Wire format of a token.
        is_early: Whether the data is its own flag.

    Args:
        to: Address of the token.
        first: First step.
        end: Behind the last.
        values: From `encode_steps`.
        scales: From `encode_steps`.
        lane: This lane.
    """
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime for i in range(steps_in_flight[token_fmt_type]()):
        var step = first + i
        var vector = step * WARP_SIZE + lane
        if step < end and vector < n_vectors:
            var p = bytes_at(to).unsafe_offset(vector * MESSAGE_ALIGN)
            comptime if is_early:
                put_16(p, without_empty(values[i]))
            else:
                store16(p, values[i])
            comptime if token_fmt_type.has_scales:
                if lane == 0:
                    p = bytes_at(to).unsafe_offset(
                        token_fmt_type.value_bytes + step * MESSAGE_ALIGN
                    )
                    comptime if is_early:
                        put_16(p, without_empty(scales[i]))
                    else:
                        store16(p, scales[i])


@always_inline
def _send_tokens[
    input_type: DType,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
    is_early: Bool,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices,
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    sender: Int,
    n_senders: Int,
):
    """Sends this block's share of the tokens with one of its sending warps.

    Parameters:
        input_type: Element type of the tokens.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: Whether this rank receives all of its tokens.
        has_input: Whether this rank reads its own tokens from `tokens`, so that
            none is sent to it.
        is_early: Whether the data is its own flag.

    Args:
        tokens: `[n_tokens][hidden_size]`.
        choices: Ids and weights.
        n_tokens: Tokens to send.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        sender: This warp among those that send.
        n_senders: How many do.
    """
    comptime top_k = layout.top_k
    comptime n_elements = token_fmt_type.lane_elements
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime n_steps = ceildiv(n_vectors, WARP_SIZE)
    comptime in_flight = steps_in_flight[token_fmt_type]()
    comptime Elements = SIMD[input_type, n_elements]
    var lane = launch.lane
    var my_rank = launch.my_rank
    var generation = next_generation(launch.before.dispatch_sent)
    var n_blocks = Int(grid_dim.x)
    var n_parts = min(N_CHUNKS, n_steps)
    comptime if is_early:
        n_parts = n_early_parts(n_tokens, n_steps)
    var is_waiting = True
    for unit in range(
        Int(block_idx.x) + sender * n_blocks,
        n_tokens * n_parts,
        n_senders * n_blocks,
    ):
        var token_idx, part = divmod_32(unit, n_parts)
        var dst_rank = -1
        if lane < top_k:
            var id = choices.id(token_idx * top_k + lane)
            if id >= 0 and id < Int32(n_experts):
                dst_rank = Int(id) // layout.n_local_experts()
        var is_target = dst_rank >= 0 and dst_rank != my_rank
        comptime for k in range(top_k):
            var earlier = warp.shuffle_idx(Int32(dst_rank), UInt32(k))
            if k < lane and Int(earlier) == dst_rank:
                is_target = False
        var targets = warp.vote[DType.uint32](is_target)
        var is_own = False
        comptime if not has_input:
            is_own = fused_shared_expert or any_lane(dst_rank == my_rank)
        if targets == 0 and not is_own:
            continue
        # I1: only this rank writes the tokens of its number.
        var offset = UInt64(layout.token_offset(my_rank, token_idx))
        comptime if is_early:
            offset = UInt64(layout.early_token_offset(my_rank, token_idx))
        var address: UInt64 = 0
        if is_target:
            address = recv_bufs[unsafe_offset=dst_rank] + offset
        var begin = part * n_steps // n_parts
        var end = (part + 1) * n_steps // n_parts
        for first in range(begin, end, in_flight):
            var elements = Array[Elements, in_flight](fill=0)
            comptime for i in range(in_flight):
                var vector = (first + i) * WARP_SIZE + lane
                if first + i < end and vector < n_vectors:
                    # Not as constants: when this block began, the kernel that
                    # wrote the tokens may not have ended (PDL).
                    elements[i] = tokens.unsafe_load[
                        width=n_elements,
                        alignment=MESSAGE_ALIGN,
                        invariant=False,
                    ](
                        token_idx * token_fmt_type.hidden_size
                        + vector * n_elements
                    )
            if is_waiting:
                # I3, for tokens.
                if not await_readers[layout, False](
                    launch, counts, counters, _SEND
                ):
                    return
                comptime if is_early:
                    # Entries first: they are few, and receivers need them all.
                    while (
                        block_peek(launch.control.unsafe_offset(_INDEXED))
                        < N_INDEX_WARPS
                    ):
                        pass
                is_waiting = False
            var values = Array[LaneBytes, in_flight](fill=0)
            var scales = Array[LaneBytes, in_flight](fill=0)
            encode_steps[input_type, token_fmt_type, False](
                elements, values, scales, 1, lane
            )
            var rest = targets
            while rest != 0:
                var k = Int(count_trailing_zeros(rest))
                rest &= rest - 1
                _store_steps[token_fmt_type, is_early](
                    shuffle_address(address, k),
                    first,
                    end,
                    values,
                    scales,
                    lane,
                )
            if is_own:
                _store_steps[token_fmt_type, is_early](
                    recv_bufs[unsafe_offset=my_rank] + offset,
                    first,
                    end,
                    values,
                    scales,
                    lane,
                )
        comptime if not is_early:
            syncwarp()
            # I2: a part's flag is published after all of the part.
            var flag = layout.chunk_flag_offset(my_rank, token_idx, part)
            if is_target:
                publish(
                    flag_at(bytes_at(recv_bufs[unsafe_offset=dst_rank]), flag),
                    generation,
                    0,
                )
            if is_own and lane == 0:
                publish(
                    flag_at(bytes_at(recv_bufs[unsafe_offset=my_rank]), flag),
                    generation,
                    0,
                )


@always_inline
def _send[
    input_type: DType,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
](
    tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    choices: Choices,
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    n_senders: Int,
):
    """Deals the sending half to the warps of a block.

    Parameters:
        input_type: Element type of the tokens.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: Whether this rank receives all of its tokens.
        has_input: Whether this rank reads its own tokens from `tokens`.

    Args:
        tokens: `[n_tokens][hidden_size]`.
        choices: Ids and weights.
        n_tokens: Tokens to send.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        n_senders: Warps that send.
    """
    if launch.warp_idx < N_INDEX_WARPS:
        _index_choices[n_experts, layout](
            choices,
            n_tokens,
            recv_bufs,
            counts,
            launch,
            counters,
        )
        # Also if it has failed: senders of the block wait for it without end.
        syncwarp()
        if launch.lane == 0:
            _ = block_add(launch.control.unsafe_offset(_INDEXED), 1)
        return
    var sender = launch.warp_idx - N_INDEX_WARPS
    if sender >= n_senders:
        return
    if n_tokens <= layout.n_early_tokens():
        _send_tokens[
            input_type,
            n_experts,
            layout,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            True,
        ](
            tokens,
            choices,
            n_tokens,
            recv_bufs,
            counts,
            launch,
            counters,
            sender,
            n_senders,
        )
        return
    comptime if layout.max_tokens_per_rank > layout.n_early_tokens():
        _send_tokens[
            input_type,
            n_experts,
            layout,
            token_fmt_type,
            fused_shared_expert,
            has_input,
            False,
        ](
            tokens,
            choices,
            n_tokens,
            recv_bufs,
            counts,
            launch,
            counters,
            sender,
            n_senders,
        )


# ---------------------------------------------------------- the receiving half


@always_inline
def _read_numbers[
    n_experts: Int, layout: RegionLayout
](
    n_tokens_of: SharedInts,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
) -> Bool:
    """Waits for the numbers of tokens of all sources, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        n_tokens_of: Result: tokens of each source, and behind them the most.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        generation: The generation to wait for.

    Returns:
        Whether all came; the same in all lanes.
    """
    var my_counts = bytes_at(counts[unsafe_offset=launch.my_rank])
    var is_late = False
    var most: Int32 = 0
    for src_rank in range(launch.lane, layout.n_ranks, WARP_SIZE):
        var flag = flag_at(my_counts, layout.dispatch_n_tokens_offset(src_rank))
        var word = peek_number(flag)
        var spins = 0
        while generation_of(word) != generation:
            spins += 1
            if (
                spins % SPINS_BETWEEN_LOOKS == 0
                and launch.deadline.has_passed()
            ):
                note_failure(
                    counters.failure(),
                    NO_COUNT,
                    _RECEIVE,
                    src_rank,
                    -1,
                    generation,
                    word,
                )
                is_late = True
                break
            word = peek_number(flag)
        var n = 0 if is_late else count_of(word)
        n_tokens_of[unsafe_offset=src_rank] = Int32(n)
        most = max(most, Int32(n))
        comptime if layout.is_reduced():
            if block_idx.x == 0:
                counters.received_tokens(layout)[
                    unsafe_offset=src_rank
                ] = Int32(n)
    most = warp.max(most)
    if launch.lane == 0:
        n_tokens_of[unsafe_offset=layout.n_ranks] = most
        if block_idx.x == 0:
            counters.set_most_received(Int(most))
    return not any_lane(is_late)


@always_inline
def _read_counts[
    n_experts: Int, layout: RegionLayout
](
    before: SharedInts,
    sums: SharedInts,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
    counter: Int,
) -> Bool:
    """Waits for the counts of some pairs and adds them up, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        before: Result: rows of the pairs before each one, of those that this
            warp counts.
        sums: Result: rows of all of them, in the word of this warp.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        generation: The generation to wait for.
        counter: This warp among those that count.

    Returns:
        Whether all came; the same in all lanes.
    """
    comptime n_ranks = layout.n_ranks
    comptime n_local_experts = layout.n_local_experts()
    comptime in_flight = min(
        _COUNTS_IN_FLIGHT, ceildiv(pairs_of_warp[layout](), WARP_SIZE)
    )
    var my_counts = bytes_at(counts[unsafe_offset=launch.my_rank])
    var n_held = n_experts_on_rank(n_experts, n_ranks, launch.my_rank)
    var begin = counter * pairs_of_warp[layout]()
    var end = min(begin + pairs_of_warp[layout](), n_local_experts * n_ranks)
    var n_before: Int32 = 0
    for first in range(begin, end, WARP_SIZE * in_flight):
        var words = Array[UInt64, in_flight](fill=0)
        var is_missing = Array[Bool, in_flight](fill=False)
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + launch.lane
            is_missing[i] = pair < min(end, n_held * n_ranks)
        var spins = 0
        while True:
            comptime for i in range(in_flight):
                if is_missing[i]:
                    var pair = first + i * WARP_SIZE + launch.lane
                    words[i] = peek_number(
                        flag_at(my_counts, layout.dispatch_count_offset(pair))
                    )
            var missing = -1
            comptime for i in range(in_flight):
                is_missing[i] = (
                    is_missing[i] and generation_of(words[i]) != generation
                )
                if is_missing[i]:
                    missing = i
            if missing < 0:
                break
            spins += 1
            if (
                spins % SPINS_BETWEEN_LOOKS == 0
                and launch.deadline.has_passed()
            ):
                var pair = first + missing * WARP_SIZE + launch.lane
                note_failure(
                    counters.failure(),
                    NO_COUNT,
                    _RECEIVE,
                    pair % n_ranks,
                    launch.my_rank * n_local_experts + pair // n_ranks,
                    generation,
                    peek_number(
                        flag_at(my_counts, layout.dispatch_count_offset(pair))
                    ),
                )
                break
        var is_late = False
        comptime for i in range(in_flight):
            is_late = is_late or is_missing[i]
        if any_lane(is_late):
            return False
        var below = Array[Int32, in_flight](fill=0)
        comptime for i in range(in_flight):
            below[i] = warp.prefix_sum[exclusive=True](
                Int32(count_of(words[i]))
            )
        comptime for i in range(in_flight):
            var pair = first + i * WARP_SIZE + launch.lane
            if pair < end:
                before[unsafe_offset=pair] = n_before + below[i]
            n_before += warp.shuffle_idx(
                below[i] + Int32(count_of(words[i])), UInt32(WARP_SIZE - 1)
            )
    if launch.lane == 0:
        sums[unsafe_offset=counter] = n_before
    return True


@always_inline
def pairs_of_warp[layout: RegionLayout]() -> Int:
    """Says how many pairs each count warp counts.

    Parameters:
        layout: How the regions are cut.

    Returns:
        A multiple of the warp's size; the last warps may have fewer, or none.
    """
    comptime n_pairs = layout.n_local_experts() * layout.n_ranks
    return ceildiv(n_pairs, N_COUNT_WARPS * WARP_SIZE) * WARP_SIZE


@always_inline
def _lay_out_rows[
    n_experts: Int, layout: RegionLayout
](
    pair_rows: SharedInts,
    sums: SharedInts,
    tables: RowTables[layout, ...],
    n_shared: Int,
    n_rows_max: Int,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
    counter: Int,
):
    """Waits for the counts and lays out the rows, with one of the count warps.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        pair_rows: Result: rows before each pair, were they packed.
        sums: Room for a number of each count warp.
        tables: Result of block 0: which row is whose.
        n_shared: Rows of the shared expert, which come first.
        n_rows_max: Rows the outputs hold.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words; block 0 notes the pairs there.
        generation: The generation to wait for.
        counter: This warp among those that count.
    """
    comptime n_ranks = layout.n_ranks
    comptime n_pairs = layout.n_local_experts() * n_ranks
    var control = launch.control
    var is_there = _read_counts[n_experts, layout](
        pair_rows, sums, counts, launch, counters, generation, counter
    )
    if not is_there:
        counters.set_broken()
        if launch.lane == 0:
            block_publish(control.unsafe_offset(_FAILED), 1)
    # Also if it has failed: the block waits for all count warps without end.
    syncwarp()
    if launch.lane == 0:
        block_arrive(control.unsafe_offset(_SUMMED))
    while block_peek(control.unsafe_offset(_SUMMED)) < N_COUNT_WARPS:
        pass
    var sum: Int32 = 0
    if launch.lane < N_COUNT_WARPS:
        sum = sums[unsafe_offset=launch.lane]
    var sums_before = warp.prefix_sum[exclusive=True](sum) + Int32(n_shared)
    var n_rows = Int(warp.shuffle_idx(sums_before, UInt32(N_COUNT_WARPS)))
    var rows_before = warp.shuffle_idx(sums_before, UInt32(counter))
    var begin = counter * pairs_of_warp[layout]()
    var end = min(begin + pairs_of_warp[layout](), n_pairs)
    for pair in range(begin + launch.lane, end, WARP_SIZE):
        pair_rows[unsafe_offset=pair] += rows_before
    var n_rows_needed = tables.n_rows_needed(n_rows)
    if n_rows_needed > n_rows_max:
        counters.set_broken()
        if launch.lane == 0:
            note_failure(
                counters.failure(),
                TOO_MANY_ROWS,
                _RECEIVE,
                launch.my_rank,
                0,
                generation,
                0,
                n_rows_needed,
                n_rows_max,
            )
            block_publish(control.unsafe_offset(_FAILED), 1)
    syncwarp()
    if launch.lane == 0:
        block_arrive(control.unsafe_offset(_COUNTED))
    # AFTER: `pair_rows` holds the rows before each pair, once all have arrived.

    if block_idx.x != 0:
        return
    while block_peek(control.unsafe_offset(_COUNTED)) < N_COUNT_WARPS:
        pass
    if block_peek(control.unsafe_offset(_FAILED)) != 0:
        if counter == 0:
            write_no_rows(tables, launch.lane, WARP_SIZE)
        return
    # The first block tells of the rows: in the outputs, and for combine.
    comptime n_local_experts = layout.n_local_experts()
    for pair in range(begin + launch.lane, end, WARP_SIZE):
        var row = Int(pair_rows[unsafe_offset=pair])
        var count = (
            Int(pair_rows[unsafe_offset=pair + 1]) if pair + 1
            < n_pairs else n_rows
        ) - row
        var local_expert, src_rank = divmod(pair, n_ranks)
        var first_pair = layout.pair(local_expert, 0)
        counters.set_pair_rows(
            pair, Int(row_of_pair(tables, pair_rows, pair)), count
        )
        tables.write_pair(
            pair, row - Int(pair_rows[unsafe_offset=first_pair]), count
        )
        if src_rank == 0:
            var next_row = n_rows
            if local_expert + 1 < n_local_experts:
                next_row = Int(pair_rows[unsafe_offset=pair + n_ranks])
            tables.write_expert(
                local_expert,
                Int(row_of_pair(tables, pair_rows, pair)),
                next_row - row,
            )
    if counter != 0:
        return
    var largest: Int32 = 0
    for pair in range(launch.lane, n_pairs, WARP_SIZE):
        var next_row = Int32(n_rows)
        if pair + 1 < n_pairs:
            next_row = pair_rows[unsafe_offset=pair + 1]
        largest = max(largest, next_row - pair_rows[unsafe_offset=pair])
    largest = warp.max(largest)
    if launch.lane == 0:
        tables.write_ends(n_rows)
        counters.set_pair_rows(n_pairs, n_rows_needed, Int(largest))


@always_inline
def row_of_pair(tables: RowTables, pair_rows: SharedInts, pair: Int) -> Int32:
    """Finds the first row of a pair.

    Args:
        tables: How rows stand.
        pair_rows: Rows before each pair.
        pair: From `RegionLayout.pair`.

    Returns:
        The row.
    """
    comptime layout = tables.layout
    var row = pair_rows[unsafe_offset=pair]
    comptime if tables.is_padded:
        var local_expert = pair // layout.n_ranks
        row += (
            Int32(tables.first_row(local_expert, 0))
            - pair_rows[unsafe_offset=layout.pair(local_expert, 0)]
        )
    return row


@always_inline
def _await_entry[
    n_experts: Int, layout: RegionLayout
](
    recv_buf: BytePointer,
    src_rank: Int,
    choice: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> LaneBytes:
    """Waits for an entry, with one lane.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        recv_buf: This rank's recv buffer.
        src_rank: Rank of the token.
        choice: The choice on that rank.
        generation: The generation to wait for.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Its words; of another generation if it did not come.
    """
    var p = recv_buf.unsafe_offset(layout.entry_offset(src_rank, choice))
    var spins = 0
    while True:
        var bytes: LaneBytes
        comptime if layout.is_reduced():
            bytes = peek_16(p)
        else:
            var word = peek_number(flag_at(p, 0))
            bytes = bitcast[DType.uint32, 4](SIMD[DType.uint64, 2](word, 0))
        if bytes[1] == generation:
            return bytes
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                _RECEIVE,
                src_rank,
                -1,
                generation,
                flag_word(bytes[1], 0),
            )
            return bytes


@always_inline
def _load_steps[
    n_experts: Int, layout: RegionLayout, in_flight: Int, n_vectors: Int
](
    mut parts: Array[LaneBytes, in_flight],
    from_: BytePointer,
    is_early: Bool,
    first: Int,
    end: Int,
    stride: Int,
    src_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Loads some 16 bytes of a token a lane; early ones as they come.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.
        in_flight: Loads of a lane.
        n_vectors: 16 bytes that there are.

    Args:
        parts: Result.
        from_: Where from.
        is_early: Whether the data is its own flag, to be put back.
        first: First 16 bytes of this lane.
        end: Behind the last of the part.
        stride: 16 bytes from one load of a lane to its next.
        src_rank: Whose token it is.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether all came; this lane's.
    """
    if not is_early:
        comptime for i in range(in_flight):
            var vector = first + i * stride
            if vector < end and vector < n_vectors:
                parts[i] = load16(from_.unsafe_offset(vector * MESSAGE_ALIGN))
        return True
    comptime for i in range(in_flight):
        var vector = first + i * stride
        if vector < end and vector < n_vectors:
            parts[i] = peek_16(from_.unsafe_offset(vector * MESSAGE_ALIGN))
    # All that are missing are looked at again at once.
    var spins = 0
    while True:
        var is_missing = False
        comptime for i in range(in_flight):
            var vector = first + i * stride
            if vector < end and vector < n_vectors and parts[i][3] == EMPTY:
                is_missing = True
        if not is_missing:
            break
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                _RECEIVE,
                src_rank,
                -1,
                generation,
                0,
            )
            return False
        comptime for i in range(in_flight):
            var vector = first + i * stride
            if vector < end and vector < n_vectors and parts[i][3] == EMPTY:
                parts[i] = peek_16(from_.unsafe_offset(vector * MESSAGE_ALIGN))
    comptime for i in range(in_flight):
        var vector = first + i * stride
        if vector < end and vector < n_vectors:
            # I3: whoever writes here next has seen a later done word.
            store16(
                from_.unsafe_offset(vector * MESSAGE_ALIGN), LaneBytes(EMPTY)
            )
    return True


@always_inline
def _are_counted(control: SharedWord) -> Bool:
    """Waits for the rows of all pairs.

    Args:
        control: The block's control words.

    Returns:
        Whether there are rows to fill.
    """
    while block_peek(control.unsafe_offset(_COUNTED)) < N_COUNT_WARPS:
        pass
    return block_peek(control.unsafe_offset(_FAILED)) == 0


@always_inline
def _receive_tokens[
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    fused_shared_expert: Bool,
    has_input: Bool,
](
    rows: token_fmt_type.Rows,
    tables: RowTables[layout, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    own_tokens: UInt64,
    pair_rows: SharedInts,
    n_tokens_of: SharedInts,
    recv_bufs: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    generation: UInt32,
):
    """Turns tokens into rows as they arrive, with one warp.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        fused_shared_expert: Whether this rank's tokens come first.
        has_input: Whether its tokens are read from `own_tokens`.

    Args:
        rows: The output tensors.
        tables: Which row is whose.
        src_info: `[n_rows_max][2]`.
        own_tokens: Address of this rank's tokens; read if `has_input`.
        pair_rows: Rows before each pair.
        n_tokens_of: Tokens of each source, and the most.
        recv_bufs: All ranks' recv buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        generation: The generation to receive.
    """
    comptime n_ranks = layout.n_ranks
    comptime top_k = layout.top_k
    comptime n_vectors = token_fmt_type.value_bytes // MESSAGE_ALIGN
    comptime n_steps = ceildiv(n_vectors, WARP_SIZE)
    comptime in_flight = ACCESSES_IN_FLIGHT
    var lane = launch.lane
    var my_rank = launch.my_rank
    var first_expert = my_rank * layout.n_local_experts()
    var recv_buf = bytes_at(recv_bufs[unsafe_offset=my_rank])
    var most = Int(n_tokens_of[unsafe_offset=n_ranks])
    var n_parts = min(N_CHUNKS, n_steps)
    if most <= layout.n_early_tokens():
        n_parts = n_early_parts(most, n_steps)
    var n_items = most * n_ranks * n_parts
    var is_waiting = True
    while True:
        var turn: UInt32 = 0
        if lane == 0:
            turn = block_add(launch.control.unsafe_offset(_NEXT_ITEM), 1)
        turn = warp.shuffle_idx(turn, UInt32(0))
        var item = Int(turn) * Int(grid_dim.x) + Int(block_idx.x)
        if item >= n_items:
            return
        var place, part = divmod_32(item, n_parts)
        var token_idx, src_rank = divmod(place, n_ranks)
        var n_tokens = Int(n_tokens_of[unsafe_offset=src_rank])
        if token_idx >= n_tokens:
            continue
        var row = NO_ROW
        var has_row = False
        var pair = 0
        var place_in_pair: Int32 = 0
        var weight: Float32 = 0
        var is_sent_here = False
        var is_late = False
        if lane < top_k:
            var choice = layout.choice(token_idx, lane)
            var entry = _await_entry[n_experts, layout](
                recv_buf, src_rank, choice, generation, launch, counters
            )
            is_late = entry[1] != generation
            var words = bitcast[DType.uint64, 2](entry)
            var local_expert = expert_of_entry(words[0]) - first_expert
            var position = position_of_entry(words[0])
            is_sent_here = (
                0 <= local_expert
                and local_expert < layout.n_local_experts()
                and not is_late
            )
            has_row = is_sent_here and position != NO_POSITION
            place_in_pair = Int32(position)
            pair = layout.pair(local_expert, src_rank)
            weight = weight_of_word(words[1])
        if any_lane(is_late):
            counters.set_broken()
            return
        var wanted = warp.vote[DType.uint32](has_row)
        var is_shared = fused_shared_expert and src_rank == my_rank
        if not is_shared and not any_lane(is_sent_here):
            comptime if layout.is_reduced():
                if part == 0 and lane < top_k:
                    counters.received_rows(layout, src_rank)[
                        unsafe_offset=layout.choice(token_idx, lane)
                    ] = NO_ROW
            continue
        var is_early = n_tokens <= layout.n_early_tokens()
        var token = recv_buf.unsafe_offset(
            layout.early_token_offset(
                src_rank, token_idx
            ) if is_early else layout.token_offset(src_rank, token_idx)
        )
        var is_input = False
        comptime if has_input:
            if src_rank == my_rank:
                is_input = True
                is_early = False
                token = bytes_at(
                    own_tokens
                    + UInt64(token_idx) * UInt64(token_fmt_type.value_bytes)
                )
        if not is_early and not is_input:
            var word = await_message[n_experts](
                flag_at(
                    recv_buf,
                    layout.chunk_flag_offset(src_rank, token_idx, part),
                ),
                generation,
                _RECEIVE,
                src_rank,
                -1,
                launch.deadline,
                counters,
            )
            if any_lane(generation_of(word) != generation):
                counters.set_broken()
                return

        var begin = part * n_steps // n_parts
        var end = (part + 1) * n_steps // n_parts
        for first in range(begin, end, in_flight):
            var parts = Array[LaneBytes, in_flight](fill=0)
            var is_there = _load_steps[n_experts, layout, in_flight, n_vectors](
                parts,
                token,
                is_early,
                first * WARP_SIZE + lane,
                end * WARP_SIZE,
                WARP_SIZE,
                src_rank,
                generation,
                launch,
                counters,
            )
            # Lane `i` has the scales of step `i`.
            var scales = Array[LaneBytes, 1](fill=0)
            comptime if token_fmt_type.has_scales:
                var end_here = min(end, first + in_flight)
                is_there = (
                    _load_steps[n_experts, layout, 1, n_steps](
                        scales,
                        token.unsafe_offset(token_fmt_type.value_bytes),
                        is_early,
                        first + lane,
                        end_here,
                        1,
                        src_rank,
                        generation,
                        launch,
                        counters,
                    )
                    and is_there
                )
            if any_lane(not is_there):
                counters.set_broken()
                return
            # Only now: what has come by then does not wait for the counts.
            if is_waiting:
                if not _are_counted(launch.control):
                    return
                is_waiting = False
            if first == begin:
                if has_row:
                    row = row_of_pair(tables, pair_rows, pair) + place_in_pair
                if part == 0:
                    if has_row:
                        src_info[unsafe_offset=2 * Int(row)] = Int32(token_idx)
                        src_info[unsafe_offset=2 * Int(row) + 1] = Int32(lane)
                    comptime if layout.is_reduced():
                        if lane < top_k:
                            var choice = layout.choice(token_idx, lane)
                            counters.received_rows(layout, src_rank)[
                                unsafe_offset=choice
                            ] = row
                            counters.received_weights(layout, src_rank)[
                                unsafe_offset=choice
                            ] = weight
                    comptime if fused_shared_expert:
                        if is_shared and lane == 0:
                            src_info[unsafe_offset=2 * token_idx] = Int32(
                                token_idx
                            )
                            src_info[unsafe_offset=2 * token_idx + 1] = -1
            var rest = wanted
            var is_shared_left = is_shared
            while rest != 0 or is_shared_left:
                var to_row = token_idx
                if rest != 0:
                    var k = count_trailing_zeros(rest)
                    rest &= rest - 1
                    to_row = Int(warp.shuffle_idx(row, k))
                else:
                    is_shared_left = False
                var to = token_fmt_type.row_values(rows, to_row)
                comptime for i in range(in_flight):
                    var vector = (first + i) * WARP_SIZE + lane
                    if first + i < end and vector < n_vectors:
                        store16(
                            to.unsafe_offset(vector * MESSAGE_ALIGN), parts[i]
                        )
                comptime if token_fmt_type.has_scales:
                    if lane < in_flight and first + lane < end:
                        token_fmt_type.place_scales(
                            rows, to_row, first + lane, scales[0]
                        )


@always_inline
def _receive[
    num_threads: Int,
    n_experts: Int,
    layout: RegionLayout,
    token_fmt_type: TokenFormat,
    has_input: Bool,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int,
    tables: RowTables[layout, ...],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    own_tokens: UInt64,
    n_own_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Has a warp of a block take its part in the receiving half.

    Parameters:
        num_threads: Threads of a block.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        token_fmt_type: Wire format of a token.
        has_input: Whether own tokens are read from `own_tokens`.

    Args:
        rows: The output tensors.
        n_rows_max: Rows they hold.
        tables: Which row is whose.
        src_info: `[n_rows_max][2]`.
        own_tokens: Address of this rank's tokens; read if `has_input`.
        n_own_tokens: How many they are; read with a fused shared expert.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    comptime n_warps = num_threads // WARP_SIZE
    comptime n_pairs = layout.n_local_experts() * layout.n_ranks
    comptime fused_shared_expert = tables.fused_shared_expert
    var pair_rows = shared_ints[n_pairs]()
    var sums = shared_ints[N_COUNT_WARPS]()
    var n_tokens_of = shared_ints[layout.n_ranks + 1]()
    var control = launch.control
    var generation = next_generation(launch.before.dispatch_received)
    var counter = launch.warp_idx - (n_warps - N_COUNT_WARPS)
    if counter >= 0:
        _lay_out_rows[n_experts, layout](
            pair_rows,
            sums,
            tables,
            n_own_tokens if fused_shared_expert else 0,
            n_rows_max,
            counts,
            launch,
            counters,
            generation,
            counter,
        )
    elif launch.warp_idx == 1:
        # It has written its entries by now.
        var are_there = _read_numbers[n_experts, layout](
            n_tokens_of, counts, launch, counters, generation
        )
        if not are_there:
            counters.set_broken()
        syncwarp()
        if launch.lane == 0:
            block_publish(
                control.unsafe_offset(_TOKENS_READY),
                1 if are_there else FAILED_PAIRS,
            )
    while block_peek(control.unsafe_offset(_TOKENS_READY)) == 0:
        pass
    if block_peek(control.unsafe_offset(_TOKENS_READY)) == FAILED_PAIRS:
        return
    _receive_tokens[
        n_experts, layout, token_fmt_type, fused_shared_expert, has_input
    ](
        rows,
        tables,
        src_info,
        own_tokens,
        pair_rows,
        n_tokens_of,
        recv_bufs,
        launch,
        counters,
        generation,
    )


# ------------------------------------------------------------------ the kernels


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_async_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    fused_shared_expert: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends each token to its ranks; returns without waiting for receivers.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: `RANK_SLOTS` or `RANK_SLOTS_REDUCED`.
        fused_shared_expert: Whether this rank receives all of its tokens.

    Args:
        input_tokens: `[n_tokens][hidden_size]`, rows aligned to 16 bytes.
        topk_ids: `[n_tokens][top_k]`, in `[-1, n_experts)`; `-1`: no expert.
        router_weights: `[n_tokens][top_k]`; read by `RANK_SLOTS_REDUCED`.
        n_tokens: In `[0, max_tokens_per_rank]`.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.

    Safety:
        All buffers must be mapped and peer-writable until every receiver has
        returned from its wait.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var choices = _share_choices[num_threads, layout](
        topk_ids, router_weights, Int(n_tokens)
    )
    var launch = start_launch[layout, _N_CONTROL](ep_counters, _SEND)
    if not launch.can_go:
        return
    if is_last_to_start(launch, ep_counters, _COUNTING_WARP):
        var generation = next_generation(launch.before.dispatch_sent)
        ep_counters.set_n_tokens(generation, Int(n_tokens))
        ep_counters.set_dispatch_sent(generation)
    publish_earlier_reads[layout](launch, counts, _TELLING_WARP)
    _send[
        input_type,
        n_experts,
        layout,
        token_fmt_type,
        fused_shared_expert,
        False,
    ](
        input_tokens,
        choices,
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
        n_warps - N_INDEX_WARPS,
    )
    # AFTER: this generation's entries, counts and tokens are on their way.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_wait_kernel[
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
](
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_layout_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Turns the tokens into rows sorted by expert, as they arrive.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: `RANK_SLOTS` or `RANK_SLOTS_REDUCED`.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.

    Args:
        rows: The output tensors, `n_rows_max` rows.
        n_rows_max: Rows there is room for.
        tables: The output tensors that say which row is whose.
        src_info: `[n_rows_max][2]`: token on its source rank, k; for the shared
            expert token, -1.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var launch = start_launch[layout, _N_CONTROL](ep_counters, _RECEIVE)
    if not launch.can_go:
        if block_idx.x == 0:
            write_no_rows(tables, Int(thread_idx.x), num_threads)
        return
    var generation = next_generation(launch.before.dispatch_received)
    _receive[num_threads, n_experts, layout, token_fmt_type, False](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        0,
        launch.before.n_tokens(generation),
        recv_bufs,
        counts,
        launch,
        ep_counters,
    )
    if not is_last_block(ep_counters):
        return
    if launch.lane == 0:
        ep_counters.set_dispatch_received(generation)
    # Ranks that run one after another may send again before the next launch of
    # this one.
    publish_reads[layout](
        launch, counts, generation, launch.before.combine_received
    )
    # AFTER: rows are complete; every source may overwrite its tokens here.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def dispatch_kernel[
    input_type: DType,
    num_threads: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    token_fmt_type: TokenFormat,
    protocol: Int,
    is_padded: Bool = False,
    fused_shared_expert: Bool = False,
](
    input_tokens: Pointer[Scalar[input_type], ImmUntrackedOrigin],
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int32,
    rows: token_fmt_type.Rows,
    n_rows_max: Int32,
    tables: RowTables[
        dispatch_layout_of[
            token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
        ](),
        is_padded,
        fused_shared_expert,
    ],
    src_info: Pointer[Int32, MutUntrackedOrigin],
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends and receives in one launch; all ranks must run at the same time.

    Launch: a grid whose blocks are all resident at once,
    `block_dim = num_threads`.

    Parameters:
        input_type: Element type of the tokens.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        token_fmt_type: Wire format of a token.
        protocol: `RANK_SLOTS` or `RANK_SLOTS_REDUCED`.
        is_padded: Whether each expert's rows stand by themselves.
        fused_shared_expert: Whether this rank's tokens come first.

    Args:
        input_tokens: As in `dispatch_async_kernel`.
        topk_ids: Likewise.
        router_weights: Likewise.
        n_tokens: Likewise.
        rows: As in `dispatch_wait_kernel`.
        n_rows_max: Likewise.
        tables: Likewise.
        src_info: Likewise.
        recv_buf_ptrs: All ranks' recv buffers.
        recv_count_ptrs: All ranks' counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = dispatch_layout_of[
        token_fmt_type, n_experts, n_ranks, max_tokens_per_rank, protocol
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime has_input = token_fmt_type.is_identity[input_type]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var counts = share_addresses[n_ranks, False](recv_count_ptrs, 0)
    var choices = _share_choices[num_threads, layout](
        topk_ids, router_weights, Int(n_tokens)
    )
    var launch = start_launch[layout, _N_CONTROL](ep_counters, _SEND)
    if not launch.can_go:
        if block_idx.x == 0:
            write_no_rows(tables, Int(thread_idx.x), num_threads)
        return
    if is_last_to_start(launch, ep_counters, _COUNTING_WARP):
        var generation = next_generation(launch.before.dispatch_sent)
        ep_counters.set_n_tokens(generation, Int(n_tokens))
        ep_counters.set_dispatch_sent(generation)
        ep_counters.set_dispatch_received(
            next_generation(launch.before.dispatch_received)
        )
    publish_earlier_reads[layout](launch, counts, _TELLING_WARP)
    _send[
        input_type,
        n_experts,
        layout,
        token_fmt_type,
        fused_shared_expert,
        has_input,
    ](
        input_tokens,
        choices,
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
        n_send_warps(Int(n_tokens) <= layout.n_early_tokens(), n_warps),
    )
    comptime if layout.is_reduced():
        if block_idx.x == 0 and launch.warp_idx == 0:
            note_readers[layout, True](launch, counts, ep_counters)
    _receive[num_threads, n_experts, layout, token_fmt_type, has_input](
        rows,
        Int(n_rows_max),
        tables,
        src_info,
        UInt64(Int(input_tokens)),
        Int(n_tokens),
        recv_bufs,
        counts,
        launch,
        ep_counters,
    )
    # AFTER: rows are complete; the next launch of this rank says so.
