# SPDX-License-Identifier: Apache-2.0
"""Compiles kernel variants that a launcher can pick, beside those that tests read.

Rank counts, SHMEM, formats and flags. Run by tests/same_code.py alone.
"""
from emitting import emit_combine, emit_dispatch, emit_phase
from groups import (
    ANY,
    BF16,
    BY_EXPERT,
    BY_RANK,
    combine_group,
    dispatch_group,
    F32,
    FEW,
    FP8,
    HIDDEN,
    MANY,
    on_hosts,
    ROWS,
    SUMS,
    that_masks,
    TOP_K,
)
from max_ep.combine_rows.kernel import CombineRows
from max_ep.combine_sums.kernel import CombineSums
from max_ep.dispatch_by_expert.kernel import DispatchByExpert
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.formats.plain import BF16TokenFormat, WithMetadataTokenFormat
from max_ep.layout import Addressing
from max_ep.token_format import TokenFormat

comptime SHORT = BF16TokenFormat[2048, TOP_K]


def by_rank[
    Format: TokenFormat,
    returns: Int,
    n_ranks: Int,
    max_tokens: Int,
    padded: Bool = False,
    shared: Bool = False,
](name: String) raises:
    """Compiles all kernels by rank for one set of options, rows' way back too."""
    comptime group = dispatch_group[Format](
        BY_RANK,
        returns,
        max_tokens,
        n_ranks=n_ranks,
        is_padded=padded,
        fused_shared_expert=shared,
    )
    emit_dispatch[DispatchByRank[group, Format, DType.bfloat16]](name)
    comptime if returns == ROWS:
        comptime back = combine_group[DType.bfloat16](
            ROWS, max_tokens, n_ranks=n_ranks, fused_shared_expert=shared
        )
        emit_combine[CombineRows[back, DType.bfloat16]](name)


def sums[
    n_ranks: Int,
    max_tokens: Int,
    partial: DType = DType.bfloat16,
    shared: Bool = False,
    oversubscribed: Bool = False,
    block: Int = 0,
](name: String) raises:
    """Compiles all kernels that combine to sums."""
    comptime group = combine_group[partial](
        SUMS,
        max_tokens,
        n_ranks=n_ranks,
        fused_shared_expert=shared,
        shares_gpu=oversubscribed,
        partial_block=block,
    )
    emit_combine[CombineSums[group, DType.bfloat16, partial]](name)


def by_expert[
    Format: TokenFormat,
    n_ranks: Int,
    max_tokens: Int,
    padded: Bool = False,
    shared: Bool = False,
    n_hosts: Int = 1,
](name: String) raises:
    """Compiles all kernels by expert."""
    comptime there = on_hosts(
        n_hosts,
        dispatch_group[Format](
            BY_EXPERT,
            ROWS,
            max_tokens,
            n_ranks=n_ranks,
            is_padded=padded,
            fused_shared_expert=shared,
        ),
    )
    emit_dispatch[DispatchByExpert[there, Format, DType.bfloat16]](name)
    comptime back = on_hosts(
        n_hosts,
        combine_group[DType.bfloat16](
            ANY, max_tokens, n_ranks=n_ranks, fused_shared_expert=shared
        ),
    )
    emit_combine[CombineRows[back, DType.bfloat16]](name)


def all_gather[max_tokens: Int](name: String) raises:
    """Compiles the dispatch that gives every rank all tokens and choices."""
    comptime Format = WithMetadataTokenFormat[DType.bfloat16, HIDDEN, 4, TOP_K]
    comptime group = dispatch_group[Format](
        Addressing.TO_ALL, SUMS, max_tokens, n_ranks=4, n_experts=4
    )
    comptime P = DispatchByRank[group, Format, DType.bfloat16]
    emit_phase[P, "all_gather"](name)


def from_torch() raises:
    """Compiles what only `max_ep_c` has: int64 ids, rows that may change."""
    comptime group = dispatch_group[BF16](BY_RANK, is_padded=True, wide_ids=True)
    emit_dispatch[DispatchByRank[group, BF16, DType.bfloat16]]("torch")
    comptime back = combine_group[DType.bfloat16](ROWS)
    emit_combine[CombineRows[back, DType.bfloat16, True]]("torch")


def masking() raises:
    """Compiles what ranks run that mask a peer that is late."""
    comptime sums = that_masks(dispatch_group[BF16](BY_RANK, SUMS))
    emit_dispatch[DispatchByRank[sums, BF16, DType.bfloat16]]("masks_sums")
    comptime rows = that_masks(dispatch_group[FP8](BY_RANK, ROWS, MANY))
    emit_dispatch[DispatchByRank[rows, FP8, DType.bfloat16]]("masks_rows")
    comptime sums_back = that_masks(combine_group[DType.bfloat16](SUMS))
    emit_combine[CombineSums[sums_back, DType.bfloat16, DType.bfloat16]]("masks")
    comptime rows_back = that_masks(combine_group[DType.bfloat16](ROWS, MANY))
    emit_combine[CombineRows[rows_back, DType.bfloat16]]("masks")
    emit_phase[CombineRows[rows_back, DType.bfloat16, True], "combine_wait"](
        "masks_keeps"
    )


def main() raises:
    """Compiles what has no other program."""
    by_expert[BF16, 1, FEW, padded=True, shared=True]("expert_1_padded_shared")
    by_expert[FP8, 2, MANY, shared=True]("expert_2_fp8_shared")
    by_expert[F32, 4, FEW]("expert_4_f32")
    by_expert[BF16, 4, FEW, shared=True, n_hosts=2]("expert_4_shmem_shared")
    by_expert[FP8, 8, MANY, padded=True, n_hosts=2]("expert_8_shmem_fp8_padded")
    by_rank[BF16, ROWS, 1, MANY]("rank_1_rows")
    by_rank[BF16, SUMS, 1, MANY, True, True]("rank_1_sums_padded_shared")
    by_rank[FP8, SUMS, 2, MANY, shared=True]("rank_2_sums_fp8_shared")
    by_rank[BF16, ROWS, 2, MANY, padded=True]("rank_2_rows_padded")
    by_rank[F32, ROWS, 4, FEW]("rank_4_rows_f32")
    by_rank[SHORT, SUMS, 4, FEW, True, True]("rank_4_sums_short_padded_shared")
    by_rank[FP8, ROWS, 8, FEW, True, True]("rank_8_rows_fp8_padded_shared")
    sums[1, MANY, shared=True, oversubscribed=True]("sums_1_shared_oversubscribed")
    sums[2, MANY]("sums_2")
    sums[4, FEW, DType.float32, shared=True]("sums_4_f32_shared")
    sums[2, MANY, DType.float8_e4m3fn, block=128]("sums_2_fp8")
    sums[4, FEW, DType.float8_e4m3fn, shared=True, block=32]("sums_4_mxfp8_shared")
    all_gather[FEW]("few")
    all_gather[MANY]("many")
    from_torch()
    masking()
