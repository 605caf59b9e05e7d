# SPDX-License-Identifier: Apache-2.0
"""The index of dispatch for GPU ranks: entries and counts, written to every rank.

*Few choices* are in the shared memory of each block, and are indexed by lists.
Each expert's choices are a list, and so are the choices that have none. The
index warps of a block are cut into groups. A group takes a list, each warp of it
a *segment* of all choices: it finds those of the list, learns from the others
how many come before its own, and writes its entries. A list costs a walk over all
choices.

*Many choices* are indexed by blocks. Each block but the last has a run of them. It
counts, for each expert, all that come before the run, and writes the run's entries.
The last counts all choices, and tells the counts. A block costs a walk over the
choices before its own.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    WARP_SIZE,
    block_idx,
    grid_dim,
    named_barrier,
    syncwarp,
    thread_idx,
)
from std.bit import count_trailing_zeros, pop_count
from std.math import ceildiv
from std.memory import bitcast
from std.sys import inlined_assembly

from ..counters import EPLocalSyncCounters, NO_EXPERT
from ..expert_slots.device_steps import (
    SharedAddresses,
    SharedInts,
    bytes_at,
    shared_ints,
    shared_words,
)
from ..expert_slots.host_steps import flag_at
from ..failures import DROPPED, note_failure
from ..flags import (
    SharedWord,
    block_add,
    block_peek,
    block_publish,
    count_of,
    next_generation,
    publish_number,
    put_16,
)
from ..layout import MESSAGE_ALIGN, RegionLayout
from ..token_format import LaneBytes
from .device_steps import Launch, await_readers, divmod_32
from .dispatch_roles import (
    FOUND,
    GAVE_UP,
    N_INDEX_WARPS,
    SEND,
)
from .entries import (
    NO_ENTRY_EXPERT,
    NO_POSITION,
    entry_word,
    id_word,
    weight_word,
)

comptime N_SHARED_CHOICES = 1536
"""Choices up to which a block keeps ids and weights in its shared memory."""

comptime _FOUND_ROOM = 384
"""Choices of a segment at most."""

# Choices of a segment from which it is cut once more, and into how many at most;
# into the last only if there are fewer lists than blocks.
comptime _SEGMENT_CHOICES = 256
comptime _MANY_SEGMENTS_SHIFT = 2
comptime _MOST_SEGMENTS_SHIFT = 3

# Ids that a lane has under way: from shared memory, from global memory.
comptime _FEW_IDS = 4
comptime _MANY_IDS = 16

# Ids of a round that are compared before the next are loaded.
comptime _EARLIER_IDS = 16

# Barrier 0 is the whole block's.
comptime _INDEX_BARRIER = Int32(1)

# A word of `FOUND`: which turn of the warp it is of, and how many were found.
comptime _FOUND_BITS = 24
comptime _GAVE_UP = (1 << _FOUND_BITS) - 1


@fieldwise_init
struct Choices[n_ranks_all: Int = 0](TrivialRegisterPassable):
    """Ids and router weights of this rank's choices.

    Parameters:
        n_ranks_all: 0: they are the router's. More: of an all-gather, in which
            each token chooses so many ranks, all there are, with a weight of 1.
    """

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

    @staticmethod
    @always_inline
    def none() -> Self:
        """Makes those of a launch that does not read any.

        Returns:
            No choices.
        """
        # Addresses of nothing: a pointer must not be null.
        return Self(
            Pointer[Int32, ImmUntrackedOrigin](
                unsafe_from_address=MESSAGE_ALIGN
            ),
            Pointer[Float32, ImmUntrackedOrigin](
                unsafe_from_address=MESSAGE_ALIGN
            ),
            0,
            shared_ints[1](),
            shared_ints[1](),
        )

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
        return self.id_in_memory(choice)

    @always_inline
    def id_in_memory(self, choice: Int) -> Int32:
        """Reads an id from where it was given.

        Args:
            choice: The choice.

        Returns:
            The id.
        """
        comptime if Self.n_ranks_all > 0:
            return Int32(UInt32(choice) % UInt32(Self.n_ranks_all))
        return self.ids[unsafe_offset=choice]

    @always_inline
    def weight[layout: RegionLayout](self, choice: Int) -> Float32:
        """Reads a router weight.

        Parameters:
            layout: How the regions are cut.

        Args:
            choice: The choice.

        Returns:
            The weight; 0 if combine is not reduced.
        """
        comptime if not layout.is_reduced():
            return 0
        comptime if Self.n_ranks_all > 0:
            return 1
        if self.are_shared():
            return bitcast[DType.float32](
                self.shared_weights[unsafe_offset=choice]
            )
        return self.weights[unsafe_offset=choice]


@always_inline
def share_choices[
    num_threads: Int, layout: RegionLayout, n_ranks_all: Int
](
    topk_ids: Pointer[Int32, ImmUntrackedOrigin],
    router_weights: Pointer[Float32, ImmUntrackedOrigin],
    n_tokens: Int,
) -> Choices[n_ranks_all]:
    """Copies few choices to shared memory; a block barrier must follow.

    Parameters:
        num_threads: Threads of a block.
        layout: How the regions are cut.
        n_ranks_all: As in `Choices`.

    Args:
        topk_ids: `[n_tokens][top_k]`.
        router_weights: `[n_tokens][top_k]`; read if combine is reduced.
        n_tokens: Tokens to send.

    Returns:
        The choices.
    """
    comptime n_weights = N_SHARED_CHOICES if layout.is_reduced() else 1
    var choices = Choices[n_ranks_all](
        topk_ids,
        router_weights,
        n_tokens * layout.top_k,
        shared_ints[N_SHARED_CHOICES, MESSAGE_ALIGN](),
        shared_ints[n_weights](),
    )
    if choices.are_shared():
        for i in range(Int(thread_idx.x), choices.n_choices, num_threads):
            choices.shared_ids[unsafe_offset=i] = choices.id_in_memory(i)
            comptime if layout.is_reduced() and n_ranks_all == 0:
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
def tell_n_tokens[
    layout: RegionLayout
](
    n_tokens: Int,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters,
):
    """Tells every rank how many tokens this one sends, with one warp.

    Parameters:
        layout: How the regions are cut.

    Args:
        n_tokens: Tokens to send.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    # I3, for numbers of tokens.
    if not await_readers[layout, False](launch, counts, counters, SEND):
        return
    for rank in range(launch.lane, layout.n_ranks, WARP_SIZE):
        publish_number(
            flag_at(
                bytes_at(counts[unsafe_offset=rank]),
                layout.dispatch_n_tokens_offset(launch.my_rank),
            ),
            next_generation(launch.before.dispatch_sent),
            n_tokens,
        )


@always_inline
def index_choices[
    n_experts: Int, layout: RegionLayout
](
    choices: Choices[...],
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    indexer: Int,
):
    """Writes this block's share of entries and counts, with one of the index warps.

    The position of a choice counts the earlier choices of the same expert.
    Receivers wait for the entries of choices without an expert, too.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        choices: Ids and weights.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        indexer: This warp among those that index.
    """
    # I3, for entries and counts.
    var can_write = await_readers[layout, False](launch, counts, counters, SEND)
    comptime are_many = layout.n_choices() > N_SHARED_CHOICES
    # Of either way: shared memory is scarce if there are thousands of experts.
    comptime n_found = N_INDEX_WARPS * _FOUND_ROOM
    var words = shared_words[
        max(n_found, n_experts + WARP_SIZE) if are_many else n_found
    ]()
    comptime if are_many:
        if not choices.are_shared():
            _index_by_blocks[n_experts, layout](
                choices,
                words,
                recv_bufs,
                counts,
                launch,
                counters,
                indexer,
                can_write,
            )
            return
    _index_by_lists[n_experts, layout](
        choices,
        words.unsafe_bitcast[Int32]().unsafe_offset(indexer * _FOUND_ROOM),
        recv_bufs,
        counts,
        launch,
        counters,
        indexer,
        can_write,
    )


# ------------------------------------------- of an all-gather: what tokens carry


@always_inline
def send_carried[
    layout: RegionLayout, n_carried: Int
](
    choices: Choices[...],
    n_tokens: Int,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters,
    indexer: Int,
):
    """Sends the router's choices to every rank, with one of the index warps.

    Parameters:
        layout: How the regions are cut.
        n_carried: The router's choices of a token.

    Args:
        choices: Where the router's ids and probabilities were given.
        n_tokens: Tokens to send.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        indexer: This warp among those that index.
    """
    # I3, for carried choices.
    if not await_readers[layout, False](launch, counts, counters, SEND):
        return
    var generation = next_generation(launch.before.dispatch_sent)
    for place in range(
        (Int(block_idx.x) + indexer * Int(grid_dim.x)) * WARP_SIZE
        + launch.lane,
        n_tokens * n_carried,
        N_INDEX_WARPS * Int(grid_dim.x) * WARP_SIZE,
    ):
        var token_idx, k = divmod_32(place, n_carried)
        var words = bitcast[DType.uint32, 4](
            SIMD[DType.uint64, 2](
                id_word(generation, choices.ids[unsafe_offset=place]),
                weight_word(generation, choices.weights[unsafe_offset=place]),
            )
        )
        var offset = UInt64(
            layout.carried_choice_offset(
                launch.my_rank, token_idx, k, n_carried
            )
        )
        for i in range(layout.n_ranks):
            # Not all sources begin with the same rank.
            var rank = launch.my_rank + 1 + i
            rank -= layout.n_ranks if rank >= layout.n_ranks else 0
            # I1: only this rank writes what its tokens carry.
            put_16(bytes_at(recv_bufs[unsafe_offset=rank] + offset), words)


# ----------------------------------------------------- many choices: by blocks


@always_inline
def _index_by_blocks[
    n_experts: Int, layout: RegionLayout
](
    choices: Choices[...],
    n_before: SharedWord,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    indexer: Int,
    can_write: Bool,
):
    """Writes the entries of a block's choices, or, the last block, all counts.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        choices: Ids and weights.
        n_before: Room for what `_count_id` counts.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        indexer: This warp among those that index.
        can_write: Whether receivers are ready; this warp's.
    """
    comptime n_threads = N_INDEX_WARPS * WARP_SIZE
    # Room for few choices, and these are many.
    comptime assert N_SHARED_CHOICES >= n_threads, "a round fits"
    var experts = choices.shared_ids
    var me = indexer * WARP_SIZE + launch.lane
    for expert in range(me, n_experts, n_threads):
        n_before[unsafe_offset=expert] = 0
    if not can_write and launch.lane == 0:
        block_publish(launch.control.unsafe_offset(GAVE_UP), 1)
    index_barrier()
    if block_peek(launch.control.unsafe_offset(GAVE_UP)) != 0:
        return
    var generation = next_generation(launch.before.dispatch_sent)
    var n_choices = choices.n_choices
    # The last block has no choices, unless it is the only one.
    var is_last = block_idx.x == grid_dim.x - 1
    var length = ceildiv(n_choices, max(Int(grid_dim.x) - 1, 1))
    var begin = min(Int(block_idx.x) * length, n_choices)
    var end = min(begin + length, n_choices)
    # On its way while the earlier ones are counted.
    var id, weight = _read_choice[layout](choices, begin + me, end)
    if begin < end or is_last:
        for first in range(me, begin, n_threads * _MANY_IDS):
            var ids = Array[Int32, _MANY_IDS](fill=NO_EXPERT)
            comptime for i in range(_MANY_IDS):
                if first + i * n_threads < begin:
                    ids[i] = choices.id_in_memory(first + i * n_threads)
            comptime for i in range(_MANY_IDS):
                _count_id[n_experts](n_before, ids[i], launch.lane)
    for first in range(begin, end, n_threads):
        var choice = first + me
        var is_expert = id >= 0 and id < Int32(n_experts)
        experts[unsafe_offset=me] = id if is_expert else NO_EXPERT
        index_barrier()
        if choice < end:
            var position: Int32 = 0
            if is_expert:
                position = Int32(n_before[unsafe_offset=Int(id)])
            # Those of this round before it.
            for i in range(0, (indexer + 1) * WARP_SIZE, _EARLIER_IDS):
                comptime for j in range(0, _EARLIER_IDS, 4):
                    var earlier = experts.unsafe_load[
                        width=4, alignment=MESSAGE_ALIGN
                    ](i + j)
                    comptime for k in range(4):
                        if earlier[k] == id and i + j + k < me:
                            position += 1
            _enter_choice[n_experts, layout](
                choice,
                id,
                weight,
                Int(position),
                generation,
                recv_bufs,
                launch,
                counters,
            )
        index_barrier()
        _count_id[n_experts](n_before, id, launch.lane)
        id, weight = _read_choice[layout](choices, choice + n_threads, end)
    if is_last:
        index_barrier()
        for expert in range(me, n_experts, n_threads):
            _tell_count[layout](
                expert,
                Int(n_before[unsafe_offset=expert]),
                generation,
                counts,
                launch,
            )


@always_inline
def _count_id[n_experts: Int](n_of: SharedWord, id: Int32, lane: Int):
    """Counts a choice, with one lane of many at once.

    Parameters:
        n_experts: Experts of the group.

    Args:
        n_of: `[n_experts + WARP_SIZE]`: choices of each expert; behind them, words
            that nobody reads.
        id: The choice's expert, or what else the router gave.
        lane: This lane.
    """
    var is_expert = id >= 0 and id < Int32(n_experts)
    # Not a constant 1: the assembler would take that for an increment of few
    # different words, at which the multiprocessor is slow if they are many.
    _ = block_add(
        n_of.unsafe_offset(Int(id) if is_expert else n_experts + lane),
        UInt32(1) if is_expert else UInt32(0),
    )


@always_inline
def index_barrier():
    """Waits for all index warps of the block; each sees what they wrote."""
    named_barrier[Int32(N_INDEX_WARPS * WARP_SIZE)](_INDEX_BARRIER)


@always_inline
def _tell_count[
    layout: RegionLayout
](
    expert: Int,
    n_listed: Int,
    generation: UInt32,
    counts: SharedAddresses,
    launch: Launch,
):
    """Tells an expert's rank how many choices it gets, with one lane.

    Parameters:
        layout: How the regions are cut.

    Args:
        expert: Global expert id.
        n_listed: Choices of it.
        generation: The generation that is sent.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
    """
    var dst_rank, local_expert = divmod_32(expert, layout.n_local_experts())
    publish_number(
        flag_at(
            bytes_at(counts[unsafe_offset=dst_rank]),
            layout.dispatch_count_offset(
                layout.pair(local_expert, launch.my_rank)
            ),
        ),
        generation,
        min(n_listed, layout.max_tokens_per_rank),
    )


# ------------------------------------------------------- few choices: by lists


@always_inline
def _index_by_lists[
    n_experts: Int, layout: RegionLayout
](
    choices: Choices[...],
    found: SharedInts,
    recv_bufs: SharedAddresses,
    counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    indexer: Int,
    can_write: Bool,
):
    """Writes entries and counts of some lists.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        choices: Ids and weights, in shared memory.
        found: Room for what this warp finds, `_FOUND_ROOM`.
        recv_bufs: All ranks' recv buffers.
        counts: All ranks' counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        indexer: This warp among those that index.
        can_write: Whether receivers are ready; this warp's.
    """
    var lane = launch.lane
    var generation = next_generation(launch.before.dispatch_sent)
    var n_blocks = Int(grid_dim.x)
    var n_lists = n_experts + 1
    var shift = _segments_shift(choices.n_choices, n_lists <= n_blocks)
    var n_segments = 1 << shift
    var segment = indexer & (n_segments - 1)
    # A warp's choices stand together: whole rounds of its lanes.
    var length = (
        (choices.n_choices + (WARP_SIZE << shift) - 1)
        // (WARP_SIZE << shift)
        * WARP_SIZE
    )
    var begin = segment * length
    var end = min(begin + length, choices.n_choices)
    var turn = 0
    for list in range(
        Int(block_idx.x) + (indexer >> shift) * n_blocks,
        n_lists,
        (N_INDEX_WARPS >> shift) * n_blocks,
    ):
        var n_found = 0
        if can_write:
            n_found = _find_choices(
                choices, found, list, n_experts, begin, end, lane
            )
        var n_before = 0
        var n_listed = n_found
        if n_segments > 1:
            # Also if it gives up: the others of the group wait without end.
            n_before, n_listed = _agree_on_found(
                launch.control.unsafe_offset(FOUND),
                n_found if can_write else _GAVE_UP,
                indexer - segment,
                n_segments,
                segment,
                turn,
                lane,
            )
            turn += 1
        if not can_write or n_listed >= _GAVE_UP:
            return
        if lane == 0 and segment == 0 and list < n_experts:
            _tell_count[layout](list, n_listed, generation, counts, launch)
        for at in range(lane, n_found, WARP_SIZE):
            var choice = Int(found[unsafe_offset=at])
            _enter_choice[n_experts, layout](
                choice,
                choices.id(choice),
                choices.weight[layout](choice),
                n_before + at,
                generation,
                recv_bufs,
                launch,
                counters,
            )
        # All lanes have read what was found.
        syncwarp()


@always_inline
def _segments_shift(n_choices: Int, are_lists_few: Bool) -> Int:
    """Chooses into how many segments the choices are cut.

    Args:
        n_choices: Choices of this rank, at most `N_SHARED_CHOICES`.
        are_lists_few: Whether a block has one list at most.

    Returns:
        The logarithm of the number, to base 2.
    """
    comptime assert N_INDEX_WARPS == 1 << _MOST_SEGMENTS_SHIFT, "groups fit"
    comptime assert (
        N_SHARED_CHOICES >> _MANY_SEGMENTS_SHIFT <= _FOUND_ROOM
    ), "a segment is found at once"
    var most = _MOST_SEGMENTS_SHIFT if are_lists_few else _MANY_SEGMENTS_SHIFT
    var shift = 0
    while shift < most and n_choices > _SEGMENT_CHOICES << shift:
        shift += 1
    return shift


@always_inline
def _or_of_lanes(bits: UInt32) -> UInt32:
    """Takes the bits that any lane has; all lanes call it.

    Args:
        bits: Those of this lane.

    Returns:
        Those of all lanes.
    """
    return inlined_assembly[
        "redux.sync.or.b32 $0, $1, 0xffffffff;", UInt32, constraints="=r,r"
    ](bits)


@always_inline
def _find_choices(
    choices: Choices[...],
    found: SharedInts,
    list: Int,
    n_experts: Int,
    begin: Int,
    end: Int,
    lane: Int,
) -> Int:
    """Finds the choices of a list in a segment, with one warp.

    Args:
        choices: Ids and weights, in shared memory.
        found: Result: they, in their order; at most `_FOUND_ROOM`.
        list: An expert, or `n_experts` for choices that have none.
        n_experts: Experts of the group.
        begin: First choice of the segment.
        end: Behind the last.
        lane: This lane.

    Returns:
        How many there are; the same in all lanes.
    """
    var below = (UInt32(1) << UInt32(lane)) - 1
    var n_found = 0
    for first in range(begin, end, WARP_SIZE * _FEW_IDS):
        var ids = Array[Int32, _FEW_IDS](fill=NO_EXPERT)
        comptime for i in range(_FEW_IDS):
            var choice = first + i * WARP_SIZE + lane
            if choice < end:
                ids[i] = choices.shared_ids[unsafe_offset=choice]
        # Bit `i`: choice `i` of this lane is one of the list.
        var listed: UInt32 = 0
        comptime for i in range(_FEW_IDS):
            var is_expert = ids[i] >= 0 and ids[i] < Int32(n_experts)
            var is_listed = (
                ids[i] == Int32(list) if list < n_experts else not is_expert
            )
            if is_listed and first + i * WARP_SIZE + lane < end:
                listed |= UInt32(1) << UInt32(i)
        # Most choices are of other lists.
        var rest = _or_of_lanes(listed)
        while rest != 0:
            var i = count_trailing_zeros(rest)
            rest &= rest - 1
            var is_listed = (listed >> i) & 1 != 0
            var votes = warp.vote[DType.uint32](is_listed)
            var place = n_found + Int(pop_count(votes & below))
            if is_listed:
                found[unsafe_offset=place] = Int32(
                    first + Int(i) * WARP_SIZE + lane
                )
            n_found += Int(pop_count(votes))
    # A lane enters what others have found.
    syncwarp()
    return n_found


@always_inline
def _agree_on_found(
    words: SharedWord,
    n_found: Int,
    first_indexer: Int,
    n_segments: Int,
    segment: Int,
    turn: Int,
    lane: Int,
) -> Tuple[Int, Int]:
    """Learns how many choices all warps of a group have found, with one of them.

    A warp is at most one turn ahead of the others of its group, since each waits
    for all. So a word of every other turn is read before it is written again.

    Args:
        words: `[2][N_INDEX_WARPS]`, zeros before the first turn.
        n_found: What this warp has found, or `_GAVE_UP`.
        first_indexer: The first warp of the group.
        n_segments: Warps of the group.
        segment: This warp of them.
        turn: Lists that the group has had before.
        lane: This lane.

    Returns:
        Choices of the list in segments before this one, and in all; at least
        `_GAVE_UP` in all if a warp has given up.
    """
    var mine = words.unsafe_offset((turn & 1) * N_INDEX_WARPS + first_indexer)
    # Differs from the turn that the word is of before.
    var tag = UInt32((turn >> 1) & 0x7F) + 1
    if lane == 0:
        block_publish(
            mine.unsafe_offset(segment),
            (tag << _FOUND_BITS) | UInt32(n_found),
        )
    var n_before = 0
    var n_listed = 0
    for i in range(n_segments):
        var word = block_peek(mine.unsafe_offset(i))
        while word >> _FOUND_BITS != tag:
            word = block_peek(mine.unsafe_offset(i))
        var n = Int(word & UInt32(_GAVE_UP))
        n_listed += n
        if i < segment:
            n_before += n
    return (n_before, n_listed)


@always_inline
def _read_choice[
    layout: RegionLayout
](choices: Choices[...], choice: Int, end: Int) -> Tuple[Int32, Float32]:
    """Reads a choice from global memory.

    Parameters:
        layout: How the regions are cut.

    Args:
        choices: Ids and weights.
        choice: Which.
        end: Behind the last that there is.

    Returns:
        Its id and weight; no expert behind the last.
    """
    if choice >= end:
        return (NO_EXPERT, Float32(0))
    return (choices.id_in_memory(choice), choices.weight[layout](choice))


@always_inline
def _enter_choice[
    n_experts: Int, layout: RegionLayout
](
    choice: Int,
    id: Int32,
    weight: Float32,
    position: Int,
    generation: UInt32,
    recv_bufs: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Writes the entry of a choice, with one lane.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        choice: Which.
        id: Its expert, or what else the router gave.
        weight: Its router weight; read if combine is reduced.
        position: Earlier choices of this expert.
        generation: The generation that is sent.
        recv_bufs: All ranks' recv buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    comptime top_k = layout.top_k
    var is_expert = id >= 0 and id < Int32(n_experts)
    var has_place = is_expert and position < layout.max_tokens_per_rank
    var sent = counters.choices(generation, layout.n_choices())
    sent[unsafe_offset=choice] = id if has_place else NO_EXPERT
    _write_entry[layout](
        recv_bufs,
        launch.my_rank,
        choice,
        generation,
        # The token of a choice without a place is sent like any other, so its
        # entry names the expert.
        Int(id) if is_expert else NO_ENTRY_EXPERT,
        position if has_place else NO_POSITION,
        weight,
    )
    if not has_place:
        if id != NO_EXPERT:
            note_failure(
                counters.failure(),
                DROPPED,
                SEND,
                launch.my_rank,
                Int(id),
                generation,
                0,
                choice // top_k,
                choice % top_k,
            )
