# SPDX-License-Identifier: Apache-2.0
"""How a rank adds the partial sums of its host for ranks of other hosts, and sends one.

Each rank of a host adds for the ranks that have its place on other hosts (0037). A warp
does so only after it has sent all other partial sums: others wait for these, so no warp
may wait before.
"""
from max.gpu import block_idx, grid_dim, WARP_SIZE

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.warp import any_lane, any_of_lanes, has_bit
from ..protocol.counters import rank_elsewhere, Word
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, LaneBytes, SENTINEL
from .partials import LaneSlice, n_rows_at_once
from .roles import TokenRecord
from .send import put_partial
from .weights import LaneWeight


@always_inline
def add_for_hosts[
    group: Group, //, dtype: DType, partial_dtype: DType
](expert_rows: BytePointer, n_senders: Int, block: Block[group]):
    """Adds this rank's rows of a token, then the partial sums of the others in order of
    rank; puts the sum."""
    comptime n = group.n_mapped
    comptime n_others = group.n_ranks // n - 1
    var n_all = block.before.number[Word.MOST_RECEIVED]() * n_others
    var is_waiting = True
    for number in range(
        Int(block_idx.x) + block.warp_idx * Int(grid_dim.x),
        n_all,
        n_senders * Int(grid_dim.x),
    ):
        var token_idx, other = divmod(number, n_others)
        # Hosts begin with the next one.
        var src_rank = (block.my_rank + (1 + other) * n) % group.n_ranks
        var source = group.relative_rank(block.my_rank, src_rank)
        var saved = TokenRecord.of(block.counters, source, token_idx, block.lane)
        if token_idx >= Int(saved.n_tokens):
            continue
        var mate = rank_elsewhere(saved.row)
        if not any_lane(saved.row >= 0 or mate >= 0):
            continue
        if is_waiting:
            # I3, for partial sums, and for what is staged.
            if not await_readers(block):
                return
            is_waiting = False
        if not _add_and_put[dtype, partial_dtype](
            expert_rows, src_rank, token_idx, saved, mate, block
        ):
            return


@always_inline
def _add_and_put[
    group: Group, //, dtype: DType, partial_dtype: DType
](
    expert_rows: BytePointer,
    src_rank: Int,
    token_idx: Int,
    saved: TokenRecord,
    mate: Int,
    block: Block[group],
) -> Bool:
    """Returns whether all partial sums have come."""
    comptime Slice = LaneSlice[group, dtype, partial_dtype]
    comptime n = group.n_mapped
    var recv_buf = block.recv_buf()
    var first_of_host = block.my_rank - block.my_rank % n
    var mates = any_of_lanes(
        UInt32(1) << UInt32(mate - first_of_host) if mate >= 0 else 0
    )
    var staged = recv_buf.unsafe_offset(
        group.staged_partial_offset(src_rank, token_idx)
    )
    var weight = LaneWeight[group].of_source(
        saved.weight, block, src_rank, group.choice(token_idx, block.lane)
    )
    for step in range(Slice.n_steps):
        var slice = Slice(step * WARP_SIZE + block.lane)
        var sum = Slice.Sum(0)
        slice.add_rows[n_rows_at_once[are_few=False]()](
            sum, expert_rows, saved.row, weight
        )
        comptime if group.late_weights:
            if any_lane(weight.is_late):
                return False
        for place in range(n):
            if not has_bit(mates, place):
                continue
            var rank = first_of_host + place
            var partial_sum = recv_buf.unsafe_offset(
                group.gathered_partial_offset(src_rank, rank, token_idx, n)
            )
            var loaded = Array[LaneBytes, Slice.n_partial_vectors](
                fill=LaneBytes(SENTINEL)
            )
            slice.load_partial[0](loaded, partial_sum)
            var came = slice.add_partial[0](sum, loaded, partial_sum, rank, block)
            if any_lane(not came):
                return False
        slice.send(staged, sum)
    put_partial(
        staged, UInt64(group.partial_offset(block.my_rank, token_idx)), src_rank, block
    )
    return True
