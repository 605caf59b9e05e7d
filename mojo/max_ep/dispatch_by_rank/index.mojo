# SPDX-License-Identifier: Apache-2.0
"""The index of dispatch for GPU ranks: entries and counts, written to every rank.

*Few choices* are indexed one by one: a warp counts those before a choice that are
of the same expert, and writes its entry; or all of an expert, and tells its count.
Up to `N_LANE_CHOICES` of them the lanes of each index warp hold, and count before the
launch has read its header. More are in the shared memory of each block. It counts
those of its experts, four of these at most, while it brings the ids there, and tells
these counts first: behind tokens on the link they come late. An entry, or the count
of another expert, costs a walk over ids, 128 of them at a time.

*Many choices* are indexed by blocks. Each block but the last has a run of them. It
counts, for each expert, all that come before the run, and writes the run's entries.
The last counts all choices, and tells the counts. A block costs a walk over the
choices before its own.
"""
from max.gpu import (
    block_dim,
    block_idx,
    grid_dim,
    lane_id,
    named_barrier,
    thread_idx,
    WARP_SIZE,
)
from std.math import ceildiv
from std.memory import bitcast

from ..counters import NO_EXPERT
from ..device.block import Block
from ..device.shared import shared_ints, SharedInts
from ..device.warp import bytes_at, divmod_32, sum_of_lanes
from ..failures import DROPPED
from ..flags import (
    count_of,
    fetch_add_block,
    flag_at,
    load_acquire_block,
    next_generation,
    SharedWord,
    store_relaxed_sys,
    store_relaxed_sys_16,
    store_release_block,
)
from ..layout import Group, MESSAGE_ALIGN
from ..token_format import LaneBytes
from .entries import (
    entry_word,
    id_word,
    NO_ENTRY_EXPERT,
    NO_POSITION,
    weight_word,
)
from .roles import GAVE_UP, N_INDEX_WARPS, SEND

comptime N_LANE_CHOICES = 256
"""Choices up to which the lanes of a warp hold all ids."""

comptime N_LANE_IDS = N_LANE_CHOICES // WARP_SIZE
"""Ids of a lane then."""

comptime N_SHARED_CHOICES = 4096
"""Choices up to which a block keeps ids in its shared memory, if they are more."""

comptime _N_SHARED_WEIGHTS = 1024
"""Choices up to which it keeps their weights there, too."""

# Ids that a lane has under way: from shared memory, from global memory.
comptime _IDS_AT_ONCE = 4
comptime _MANY_IDS = 16

# Ids that a thread has under way to shared memory.
comptime _SHARED_AT_ONCE = 8

# Blocks of a grid that is thought to be the whole GPU; and experts of a block that it
# counts at once, at most: of more, if the grid is smaller, each is counted by itself.
comptime _FULL_GRID = 128
comptime _MOST_COUNTED = 4

# Ids of a round that are compared before the next are loaded.
comptime _EARLIER_IDS = 16

# Barrier 0 is the whole block's.
comptime _INDEX_BARRIER = Int32(1)


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
    """The ids, if `are_shared`."""
    var shared_weights: SharedInts
    """The weights' bits, if they are at most `_N_SHARED_WEIGHTS`, too."""
    var counted: SharedInts
    """`[_n_counted][WARP_SIZE]`: of some experts of this block, how many ids each of
    its warps has shared."""

    @staticmethod
    @always_inline
    def of[
        group: Group
    ](
        topk_ids: Pointer[Int32, ImmUntrackedOrigin],
        router_weights: Pointer[Float32, ImmUntrackedOrigin],
        n_tokens: Int,
    ) -> Self:
        """Makes those of a launch, of which none is shared yet."""
        comptime n_weights = min(_N_SHARED_WEIGHTS, group.n_choices())
        return Self(
            topk_ids,
            router_weights,
            n_tokens * group.top_k,
            shared_ints[_n_shared_ids[group](), MESSAGE_ALIGN](),
            shared_ints[n_weights if group.has_sums() else 1](),
            shared_ints[max(_n_counted[group]() * WARP_SIZE, 1)](),
        )

    @always_inline
    def are_in_lanes(self) -> Bool:
        """Tells whether the lanes of each index warp hold all ids."""
        return self.n_choices <= N_LANE_CHOICES

    @always_inline
    def are_shared(self) -> Bool:
        """Tells whether the ids are in shared memory."""
        return not self.are_in_lanes() and self.n_choices <= N_SHARED_CHOICES

    @always_inline
    def id(self, choice: Int) -> Int32:
        """Reads an id."""
        if self.are_shared():
            return self.shared_ids[unsafe_offset=choice]
        return self.id_in_memory(choice)

    @always_inline
    def id_in_memory(self, choice: Int) -> Int32:
        """Reads an id from where it was given."""
        comptime if Self.n_ranks_all > 0:
            return Int32(UInt32(choice) % UInt32(Self.n_ranks_all))
        return self.ids[unsafe_offset=choice]

    @always_inline
    def id_of_lane[group: Group](self, token_idx: Int, lane: Int) -> Int32:
        """Reads the id of a lane's choice of a token."""
        comptime if group.sends_to_all():
            return NO_EXPERT
        if lane >= group.top_k:
            return NO_EXPERT
        return self.id(group.choice(token_idx, lane))

    @always_inline
    def counted_of_block(self, round: Int, lane: Int) -> Int:
        """Adds up what the warps have counted, with one warp."""
        var n: Int32 = 0
        if lane < Int(block_dim.x) // WARP_SIZE:
            n = self.counted[unsafe_offset=round * WARP_SIZE + lane]
        return Int(sum_of_lanes(UInt32(n)))

    @always_inline
    def weight[group: Group](self, choice: Int) -> Float32:
        """Reads a router weight."""
        comptime if group.has_sums() and Self.n_ranks_all == 0:
            if self.are_shared() and self.n_choices <= _N_SHARED_WEIGHTS:
                return bitcast[DType.float32](
                    self.shared_weights[unsafe_offset=choice]
                )
        return self.weight_in_memory[group](choice)

    @always_inline
    def weight_in_memory[group: Group](self, choice: Int) -> Float32:
        """Reads a router weight from where it was given."""
        comptime if not group.has_sums():
            return 0
        comptime if Self.n_ranks_all > 0:
            return 1
        return self.weights[unsafe_offset=choice]


@always_inline
def _n_shared_ids[group: Group]() -> Int:
    """Says how much room ids need in shared memory."""
    comptime n_choices = group.n_choices()
    comptime if n_choices <= N_SHARED_CHOICES:
        return n_choices
    return max(
        N_SHARED_CHOICES, (N_INDEX_WARPS + 1) * WARP_SIZE + group.n_experts
    )


@always_inline
def _n_counted[group: Group]() -> Int:
    """Says how many experts of its own a block counts while it shares the ids.
    """
    if group.n_choices() <= N_LANE_CHOICES:
        return 0
    return min(ceildiv(group.n_experts, _FULL_GRID), _MOST_COUNTED)


@always_inline
def share_choices[
    n_ranks_all: Int, //, num_threads: Int, group: Group
](choices: Choices[n_ranks_all]):
    """Copies few choices to shared memory; a block barrier must follow.

    On the way the block counts those of its own experts.
    """
    if not choices.are_shared():
        return
    var me = Int(thread_idx.x)
    var last = choices.n_choices - 1
    comptime n_at_once = min(
        _SHARED_AT_ONCE, ceildiv(group.n_choices(), num_threads)
    )
    comptime n_weights = min(n_at_once, ceildiv(_N_SHARED_WEIGHTS, num_threads))
    comptime has_weights = group.has_sums() and n_ranks_all == 0
    var n_of_expert = Array[UInt32, _n_counted[group]()](fill=0)
    for first in range(me, choices.n_choices, n_at_once * num_threads):
        # All of them on their way at once; behind the last there is nothing to read.
        var ids = Array[Int32, n_at_once](fill=0)
        var weights = Array[Float32, n_weights](fill=0)
        comptime for i in range(n_at_once):
            ids[i] = choices.id_in_memory(min(first + i * num_threads, last))
        comptime if has_weights:
            if last < _N_SHARED_WEIGHTS:
                comptime for i in range(n_weights):
                    weights[i] = choices.weights[
                        unsafe_offset=min(first + i * num_threads, last)
                    ]
        comptime for i in range(n_at_once):
            var choice = first + i * num_threads
            if choice <= last:
                choices.shared_ids[unsafe_offset=choice] = ids[i]
                _count_own(n_of_expert, ids[i])
        comptime if has_weights:
            if last < _N_SHARED_WEIGHTS:
                comptime for i in range(n_weights):
                    var choice = first + i * num_threads
                    if choice <= last:
                        choices.shared_weights[unsafe_offset=choice] = bitcast[
                            DType.int32
                        ](weights[i])
    comptime for i in range(_n_counted[group]()):
        var n = sum_of_lanes(n_of_expert[i])
        if lane_id() == 0:
            choices.counted[
                unsafe_offset=i * WARP_SIZE + me // WARP_SIZE
            ] = Int32(n)


@always_inline
def _count_own[n: Int, //](mut n_of_expert: Array[UInt32, n], id: Int32):
    """Counts an id, if it is one of this block's experts."""
    comptime for i in range(n):
        if id == Int32(Int(block_idx.x) + i * Int(grid_dim.x)):
            n_of_expert[i] += 1


@always_inline
def _write_entry[
    group: Group
](
    block: Block[group],
    choice: Int,
    generation: UInt32,
    expert_id: Int,
    position: Int,
    weight: Float32,
    lane: Int,
    n_lanes: Int,
):
    """Writes the entry of a choice to every rank, with one lane of some."""
    var word = entry_word(generation, expert_id, position)
    var offset = UInt64(group.entry_offset(block.my_rank, choice))
    var bytes = LaneBytes(0)
    comptime if group.has_sums():
        bytes = bitcast[DType.uint32, 4](
            SIMD[DType.uint64, 2](word, weight_word(generation, weight))
        )
    for i in range(lane, group.n_ranks, n_lanes):
        # Not all sources begin with the same rank.
        var rank = block.my_rank + 1 + i
        rank -= group.n_ranks if rank >= group.n_ranks else 0
        var to = bytes_at(block.recv_bufs[unsafe_offset=rank] + offset)
        # I1: only this rank writes entries of its choices.
        comptime if group.has_sums():
            store_relaxed_sys_16(to, bytes)
        else:
            store_relaxed_sys(flag_at(to, 0), generation, count_of(word))


@always_inline
def publish_n_tokens[
    group: Group
](n_tokens: Int, block: Block[group],):
    """Tells every rank how many tokens this one sends, with one warp."""
    # I3, for numbers of tokens.
    if not block.await_readers[is_combine=False](SEND):
        return
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        store_relaxed_sys(
            flag_at(
                bytes_at(block.counts[unsafe_offset=rank]),
                group.dispatch_n_tokens_offset(block.my_rank),
            ),
            next_generation(block.before.dispatch_sent),
            n_tokens,
        )


@always_inline
def index_choices[
    group: Group
](
    choices: Choices[...],
    block: Block[group],
    indexer: Int,
    lane_ids: LaneIds,
    first_item: Item,
):
    """Writes this block's share of entries and  with one of the index warps.

    The position of a choice counts the earlier choices of the same expert.
    Receivers wait for the entries of choices without an expert, too.
    """
    # I3, for entries and block.counts.
    var can_write = block.await_readers[is_combine=False](SEND)
    if choices.are_in_lanes():
        if can_write:
            _index_lanes[group](
                choices,
                block,
                lane_ids,
                first_item,
            )
        return
    comptime if group.n_choices() > N_SHARED_CHOICES:
        if not choices.are_shared():
            _index_by_blocks[group](
                choices,
                block,
                indexer,
                can_write,
            )
            return
    if can_write:
        _index_one_by_one[group](choices, block, indexer)


# ------------------------------------------- of an all-gather: what tokens carry


@always_inline
def send_metadata[
    group: Group, router_top_k: Int
](choices: Choices[...], n_tokens: Int, block: Block[group], indexer: Int,):
    """Sends the router's choices to every rank, with one of the index warps."""
    # I3, for carried choices.
    if not block.await_readers[is_combine=False](SEND):
        return
    var generation = next_generation(block.before.dispatch_sent)
    for place in range(
        (Int(block_idx.x) + indexer * Int(grid_dim.x)) * WARP_SIZE + block.lane,
        n_tokens * router_top_k,
        N_INDEX_WARPS * Int(grid_dim.x) * WARP_SIZE,
    ):
        var token_idx, k = divmod_32(place, router_top_k)
        var words = bitcast[DType.uint32, 4](
            SIMD[DType.uint64, 2](
                id_word(generation, choices.ids[unsafe_offset=place]),
                weight_word(generation, choices.weights[unsafe_offset=place]),
            )
        )
        var offset = UInt64(
            group.metadata_offset(block.my_rank, token_idx, k, router_top_k)
        )
        for i in range(group.n_ranks):
            # Not all sources begin with the same rank.
            var rank = block.my_rank + 1 + i
            rank -= group.n_ranks if rank >= group.n_ranks else 0
            # I1: only this rank writes what its tokens carry.
            store_relaxed_sys_16(
                bytes_at(block.recv_bufs[unsafe_offset=rank] + offset), words
            )


# ----------------------------------------------------- many choices: by blocks


@always_inline
def _index_by_blocks[
    group: Group
](choices: Choices[...], block: Block[group], indexer: Int, can_write: Bool,):
    """Writes the entries of a block's choices, or, the last block, all block.counts.
    """
    comptime n_threads = N_INDEX_WARPS * WARP_SIZE
    # In the room for few choices, since these are many.
    comptime assert (
        _n_shared_ids[group]() >= n_threads + group.n_experts + WARP_SIZE
    ), "a round and the counts fit"
    var experts = choices.shared_ids
    var n_before = experts.unsafe_bitcast[UInt32]().unsafe_offset(n_threads)
    var me = indexer * WARP_SIZE + block.lane
    for expert in range(me, group.n_experts, n_threads):
        n_before[unsafe_offset=expert] = 0
    if not can_write and block.lane == 0:
        store_release_block(block.control.unsafe_offset(GAVE_UP), 1)
    index_barrier()
    if load_acquire_block(block.control.unsafe_offset(GAVE_UP)) != 0:
        return
    var generation = next_generation(block.before.dispatch_sent)
    var n_choices = choices.n_choices
    # The last block has no choices, unless it is the only one.
    var is_last = block_idx.x == grid_dim.x - 1
    var length = ceildiv(n_choices, max(Int(grid_dim.x) - 1, 1))
    var begin = min(Int(block_idx.x) * length, n_choices)
    var end = min(begin + length, n_choices)
    # On its way while the earlier ones are counted.
    var id, weight = _read_choice[group](choices, begin + me, end)
    if begin < end or is_last:
        for first in range(me, begin, n_threads * _MANY_IDS):
            var ids = Array[Int32, _MANY_IDS](fill=NO_EXPERT)
            comptime for i in range(_MANY_IDS):
                if first + i * n_threads < begin:
                    ids[i] = choices.id_in_memory(first + i * n_threads)
            comptime for i in range(_MANY_IDS):
                _count_id[group.n_experts](n_before, ids[i], block.lane)
    for first in range(begin, end, n_threads):
        var choice = first + me
        var is_expert = id >= 0 and id < Int32(group.n_experts)
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
            _enter_choice[group](
                choice,
                id,
                weight,
                Int(position),
                generation,
                block,
                0,
                1,
            )
        index_barrier()
        _count_id[group.n_experts](n_before, id, block.lane)
        id, weight = _read_choice[group](choices, choice + n_threads, end)
    if is_last:
        index_barrier()
        for expert in range(me, group.n_experts, n_threads):
            _publish_count[group](
                expert,
                Int(n_before[unsafe_offset=expert]),
                generation,
                block,
            )


@always_inline
def _count_id[n_experts: Int](n_of: SharedWord, id: Int32, lane: Int):
    """Counts a choice, with one lane of many at once."""
    var is_expert = id >= 0 and id < Int32(n_experts)
    # Not a constant 1: the assembler would take that for an increment of few
    # different words, at which the multiprocessor is slow if they are many.
    _ = fetch_add_block(
        n_of.unsafe_offset(Int(id) if is_expert else n_experts + lane),
        UInt32(1) if is_expert else UInt32(0),
    )


@always_inline
def index_barrier():
    """Waits for all index warps of the block; each sees what they wrote."""
    named_barrier[Int32(N_INDEX_WARPS * WARP_SIZE)](_INDEX_BARRIER)


@always_inline
def _publish_count[
    group: Group
](expert: Int, n_listed: Int, generation: UInt32, block: Block[group],):
    """Tells an expert's rank how many choices it gets, with one lane."""
    var dst_rank, local_expert = divmod_32(expert, group.n_local_experts())
    store_relaxed_sys(
        flag_at(
            bytes_at(block.counts[unsafe_offset=dst_rank]),
            group.dispatch_count_offset(
                group.pair(local_expert, block.my_rank)
            ),
        ),
        generation,
        min(n_listed, group.max_tokens_per_rank),
    )


# ------------------------------------------- fewest choices: in the lanes of a warp


comptime LaneIds = Array[Int32, N_LANE_IDS]
"""Of lane `l`: ids of the choices `l`, `WARP_SIZE + l`, and so on."""


@always_inline
def load_ids(mut ids: LaneIds, choices: Choices[...]):
    """Begins to load all ids to the lanes of a warp."""
    comptime for i in range(N_LANE_IDS):
        var choice = i * WARP_SIZE + Int(lane_id())
        if choice < choices.n_choices:
            ids[i] = choices.id_in_memory(choice)


@fieldwise_init
struct Item(TrivialRegisterPassable):
    """What a warp writes at once: an expert's count, or a choice's entry."""

    var number: Int
    """Experts come first: a receiver needs all counts before it places a row."""
    var id: Int32
    """The expert, or what the router gave for the choice."""
    var weight: Float32
    """The choice's router weight."""
    var n_equal: Int
    """Choices of the expert, or those of them before the choice."""

    @staticmethod
    @always_inline
    def none() -> Self:
        """Makes an item that is not written."""
        return Self(Int.MAX, NO_EXPERT, 0, 0)

    @staticmethod
    @always_inline
    def of[
        group: Group
    ](ids: LaneIds, choices: Choices[...], number: Int) -> Self:
        """Counts, with one warp."""
        var choice = number - group.n_experts
        var id = Int32(number)
        var weight: Float32 = 0
        var end = choices.n_choices
        if choice >= 0:
            end = min(end, choice)
            if choice < choices.n_choices:
                id = choices.id_in_memory(choice)
                weight = choices.weight_in_memory[group](choice)
        var n_equal: UInt32 = 0
        comptime for i in range(N_LANE_IDS):
            if i * WARP_SIZE + Int(lane_id()) < end and ids[i] == id:
                n_equal += 1
        return Self(number, id, weight, Int(sum_of_lanes(n_equal)))


@always_inline
def _index_lanes[
    group: Group
](
    choices: Choices[...],
    block: Block[group],
    lane_ids: LaneIds,
    first_item: Item,
):
    """Writes some counts and entries, of ids that the lanes of the warp hold.
    """
    var item = first_item
    while item.number < group.n_experts + choices.n_choices:
        _publish_item[group](item, block)
        item = Item.of[group](
            lane_ids, choices, item.number + N_INDEX_WARPS * Int(grid_dim.x)
        )


@always_inline
def _publish_item[
    group: Group
](item: Item, block: Block[group],):
    """Writes a count or an entry, with one warp."""
    var generation = next_generation(block.before.dispatch_sent)
    var choice = item.number - group.n_experts
    if choice >= 0:
        _enter_choice[group](
            choice,
            item.id,
            item.weight,
            item.n_equal,
            generation,
            block,
            block.lane,
            WARP_SIZE,
        )
    elif block.lane == 0:
        _publish_count[group](item.number, item.n_equal, generation, block)


# ------------------------------------------------- few choices: one by one


@always_inline
def _index_one_by_one[
    group: Group
](choices: Choices[...], block: Block[group], indexer: Int,):
    """Writes some counts and entries. What is not counted yet, a warp block.counts.
    """
    var lane = block.lane
    # Counts first: a receiver needs all of them before it places a row.
    comptime n_counted = _n_counted[group]()
    comptime assert n_counted <= N_INDEX_WARPS, "a counted expert has no warp"
    comptime for round in range(n_counted):
        var expert = Int(block_idx.x) + round * Int(grid_dim.x)
        if indexer == N_INDEX_WARPS - 1 - round and expert < group.n_experts:
            var n = choices.counted_of_block(round, lane)
            if lane == 0:
                _publish_count[group](
                    expert,
                    n,
                    next_generation(block.before.dispatch_sent),
                    block,
                )
    for item in range(
        min(n_counted * Int(grid_dim.x), group.n_experts)
        + Int(block_idx.x)
        + indexer * Int(grid_dim.x),
        group.n_experts + choices.n_choices,
        N_INDEX_WARPS * Int(grid_dim.x),
    ):
        var choice = item - group.n_experts
        var id = Int32(item)
        var end = choices.n_choices
        var weight: Float32 = 0
        if choice >= 0:
            id = choices.shared_ids[unsafe_offset=choice]
            weight = choices.weight[group](choice)
            end = choice
        var n_equal = _count_equal(choices.shared_ids, id, end, lane)
        _publish_item[group](Item(item, id, weight, n_equal), block)


@always_inline
def _count_equal(ids: SharedInts, id: Int32, end: Int, lane: Int) -> Int:
    """Counts the ids that are equal to one, with one warp."""
    var n_equal: UInt32 = 0
    var whole = end // _IDS_AT_ONCE * _IDS_AT_ONCE
    for first in range(lane * _IDS_AT_ONCE, whole, WARP_SIZE * _IDS_AT_ONCE):
        var some = ids.unsafe_load[width=_IDS_AT_ONCE, alignment=MESSAGE_ALIGN](
            first
        )
        comptime for i in range(_IDS_AT_ONCE):
            if some[i] == id:
                n_equal += 1
    # Fewer than a vector has.
    if whole + lane < end and ids[unsafe_offset=whole + lane] == id:
        n_equal += 1
    return Int(sum_of_lanes(n_equal))


# ------------------------------------------------------------------- an entry


@always_inline
def _read_choice[
    group: Group
](choices: Choices[...], choice: Int, end: Int) -> Tuple[Int32, Float32]:
    """Reads a choice from global memory."""
    if choice >= end:
        return (NO_EXPERT, Float32(0))
    return (
        choices.id_in_memory(choice),
        choices.weight_in_memory[group](choice),
    )


@always_inline
def _enter_choice[
    group: Group
](
    choice: Int,
    id: Int32,
    weight: Float32,
    position: Int,
    generation: UInt32,
    block: Block[group],
    lane: Int,
    n_lanes: Int,
):
    """Writes the entry of a choice, with one lane of some."""
    comptime top_k = group.top_k
    var is_expert = id >= 0 and id < Int32(group.n_experts)
    var has_place = is_expert and position < group.max_tokens_per_rank
    if lane == 0:
        var sent = block.counters.choices(generation, group)
        sent[unsafe_offset=choice] = id if has_place else NO_EXPERT
    _write_entry[group](
        block,
        choice,
        generation,
        # The token of a choice without a place is sent like any other, so its
        # entry names the expert.
        Int(id) if is_expert else NO_ENTRY_EXPERT,
        position if has_place else NO_POSITION,
        weight,
        lane,
        n_lanes,
    )
    if not has_place:
        if id != NO_EXPERT and lane == 0:
            block.fail(
                DROPPED,
                SEND,
                block.my_rank,
                Int(id),
                generation,
                0,
                choice // top_k,
                choice % top_k,
            )
