# SPDX-License-Identifier: Apache-2.0
"""Finds the choices whose row was dropped by the rank that holds the expert
(`max_output_rows`, `Group.drops_rows`).

An owner keeps the first rows of a pair, so a count says which. With each combine it
publishes these counts to each source, where those of CPU ranks stand. A source knows
the positions of its choices from its own dispatch.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE
from std.bit import pop_count

from ..device.block import Block
from ..protocol.counters import expert_of_choice, position_of_choice
from ..protocol.flags import count_of, flag_at, generation_of, store_relaxed_sys
from ..protocol.layout import Group
from ..protocol.transport import put_flag


@always_inline
def _count_offset[group: Group](expert_id: Int) -> Int:
    """Locates a combine count from the counts of dispatch, which a block has."""
    return group.combine_count_offset(expert_id) - (
        group.dispatch_counts_from_combine_counts()
    )


@always_inline
def publish_kept_counts[group: Group](block: Block[group]):
    """Publishes to each source how many of its rows each expert has, with one warp that
    has awaited readers (I3)."""
    var my_rank = block.my_rank
    for pair in range(
        block.lane, group.n_experts_on(my_rank) * group.n_ranks, WARP_SIZE
    ):
        var local_expert, src_rank = divmod(pair, group.n_ranks)
        comptime if group.spans_hosts():
            if block.is_far(src_rank):
                var expert = group.expert_id(my_rank, local_expert)
                var flag = block.flag(my_rank, _count_offset[group](expert))
                var count = block.counters.pair_count(pair)
                put_flag(UInt64(Int(flag)), block.sending(), count, src_rank)
                continue
        store_relaxed_sys(
            block.flag(
                src_rank, _count_offset[group](group.expert_id(my_rank, local_expert))
            ),
            block.sending(),
            block.counters.pair_count(pair),
        )


@always_inline
def await_dropped[group: Group](choice: Int32, block: Block[group]) -> Bool:
    """Waits for the count of a choice's expert; returns whether it has no row there.

    If the count does not come, the row, which is awaited next, does not come either.
    """
    var expert = expert_of_choice(choice, group)
    var word = block.await_message(
        flag_at(block.my_counts(), _count_offset[group](expert)),
        expert // group.n_local_experts(),
        expert,
    )
    return generation_of(word) == block.receiving() and position_of_choice(
        choice, group
    ) >= count_of(word)


@always_inline
def record_rows_found[group: Group](token_idx: Int, has_row: Bool, block: Block[group]):
    """Records how many rows a token's result has; lane `k` knows of choice `k`."""
    var n_found = pop_count(warp.vote[DType.uint32](has_row))
    if block.lane == 0:
        block.counters.rows_found(token_idx)[] = Int32(n_found)
