# SPDX-License-Identifier: Apache-2.0
"""Publishes entries, counts, numbers of tokens and routing metadata.

Each word holds its generation, so they need no order between their stores.
"""
from max.gpu import block_idx, grid_dim, WARP_SIZE
from std.memory import bitcast

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.warp import bytes_at, divmod_32
from ..protocol.arguments import load_router_id
from ..protocol.counters import NO_EXPERT, sent_choice
from ..protocol.entries import entry_word, NO_ENTRY_EXPERT, NO_POSITION, value_word
from ..protocol.failures import Failure, SEND
from ..protocol.flags import count_of, flag_at, store_relaxed_sys, store_relaxed_sys_16
from ..protocol.layout import Group
from ..protocol.token_format import LaneBytes
from .choices import Choice, Choices
from .roles import N_INDEX_WARPS


@always_inline
def two_words(first: UInt64, second: UInt64) -> LaneBytes:
    return bitcast[DType.uint32, 4](SIMD[DType.uint64, 2](first, second))


@always_inline
def publish_n_tokens[group: Group](n_tokens: Int, block: Block[group]):
    """Publishes to every rank how many tokens this one sends, with one warp."""
    # I3, for numbers of tokens.
    if not await_readers(block):
        return
    for rank in range(block.lane, group.n_ranks, WARP_SIZE):
        store_relaxed_sys(
            block.flag(rank, group.dispatch_n_tokens_offset(block.my_rank)),
            block.sending(),
            n_tokens,
        )


@always_inline
def publish_count[group: Group](expert: Int, n_choices: Int, block: Block[group]):
    """Publishes to an expert's rank how many choices it gets, with one lane."""
    var dst_rank, local_expert = divmod_32(expert, group.n_local_experts())
    var pair = group.pair(local_expert, block.my_rank)
    store_relaxed_sys(
        block.flag(dst_rank, group.dispatch_count_offset(pair)),
        block.sending(),
        min(n_choices, group.max_tokens_per_rank),
    )


@always_inline
def publish_entry[
    group: Group
](
    number: Int,
    choice: Choice,
    position: Int,
    block: Block[group],
    lane: Int,
    n_lanes: Int,
):
    """Publishes a choice's entry to every rank, even if the choice has no expert.
    `n_lanes` lanes share the ranks."""
    var generation = block.sending()
    var is_expert = choice.is_expert[group]()
    var has_place = is_expert and position < group.max_tokens_per_rank
    # A choice that gets a row on this rank is recorded by who makes the row.
    var owner_rank = Int(choice.id) // group.n_local_experts()
    var is_recorded = group.has_sums or not has_place or owner_rank != block.my_rank
    if lane == 0 and is_recorded:
        block.counters.choices(generation)[unsafe_offset=number] = sent_choice(
            choice.id, position, group
        ) if has_place else NO_EXPERT
    # The token of a choice without a place is sent like any other, so its entry
    # names the expert.
    var word = entry_word(
        generation,
        Int(choice.id) if is_expert else NO_ENTRY_EXPERT,
        position if has_place else NO_POSITION,
    )
    var offset = UInt64(group.entry_offset(block.my_rank, number))
    for i in range(lane, group.n_ranks, n_lanes):
        # Not all sources begin with the same rank.
        var rank = group.rank_of_relative(block.my_rank, 1 + i)
        var to = bytes_at(block.recv_bufs[unsafe_offset=rank] + offset)
        # I1: only this rank writes entries of its choices.
        comptime if group.has_sums:
            store_relaxed_sys_16(
                to, two_words(word, value_word(generation, choice.weight))
            )
        else:
            store_relaxed_sys(flag_at(to, 0), generation, count_of(word))
    if not has_place:
        if choice.id != NO_EXPERT and lane == 0:
            block.refuse(
                Failure.DROPPED,
                SEND,
                Int(choice.id),
                number // group.top_k,
                number % group.top_k,
            )


@always_inline
def send_metadata[
    group: Group, //, router_top_k: Int
](choices: Choices[group], n_tokens: Int, block: Block[group], indexer: Int):
    """Sends routing metadata to every rank, with one of the index warps."""
    # I3, for routing metadata.
    if not await_readers(block):
        return
    var generation = block.sending()
    for place in range(
        (Int(block_idx.x) + indexer * Int(grid_dim.x)) * WARP_SIZE + block.lane,
        n_tokens * router_top_k,
        N_INDEX_WARPS * Int(grid_dim.x) * WARP_SIZE,
    ):
        var token_idx, k = divmod_32(place, router_top_k)
        var words = two_words(
            value_word(generation, load_router_id[group](choices.ids, place)),
            value_word(generation, choices.weights[unsafe_offset=place]),
        )
        var offset = UInt64(
            group.metadata_offset(block.my_rank, token_idx, k, router_top_k)
        )
        for i in range(group.n_ranks):
            var rank = group.rank_of_relative(block.my_rank, 1 + i)
            # I1: only this rank writes the metadata of its tokens.
            store_relaxed_sys_16(
                bytes_at(block.recv_bufs[unsafe_offset=rank] + offset), words
            )
