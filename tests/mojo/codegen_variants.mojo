# SPDX-License-Identifier: Apache-2.0
"""Compiles kernel variants that a launcher can pick, beside those that tests read.

Rank counts, SHMEM, formats and flags. Run by tests/same_code.py alone.
"""
from emitting import emit
from groups import combine_group, dispatch_group
from max_ep.combine_rows.phase import CombineRows
from max_ep.combine_sums.phase import CombineSums
from max_ep.device.phase import phase_kernel
from max_ep.dispatch_by_expert.phase import DispatchByExpert
from max_ep.dispatch_by_rank.phase import DispatchByRank
from max_ep.formats.blockwise_fp8 import BlockwiseFP8TokenFormat
from max_ep.formats.with_metadata import WithMetadataTokenFormat
from max_ep.layout import Addressing, Returns
from max_ep.token_format import BF16TokenFormat, Float32TokenFormat, TokenFormat

comptime HIDDEN = 7168
comptime TOP_K = 8
comptime N_EXPERTS = 256
comptime N_SMS = 132
comptime FEW, MANY = 128, 4096
comptime BF16 = BF16TokenFormat[HIDDEN, TOP_K]
comptime F32 = Float32TokenFormat[HIDDEN, TOP_K]
comptime FP8 = BlockwiseFP8TokenFormat[HIDDEN, TOP_K]
comptime SHORT = BF16TokenFormat[2048, TOP_K]


def by_rank[
    Format: TokenFormat,
    n_ranks: Int,
    max_tokens: Int,
    padded: Bool,
    shared: Bool,
    sums: Bool,
](name: String) raises:
    """Compiles all kernels by rank for one set of options."""
    comptime P = DispatchByRank[
        dispatch_group[
            Format,
            N_EXPERTS,
            n_ranks,
            max_tokens,
            Addressing.BY_RANK,
            Returns.SUMS if sums else Returns.ROWS,
            padded=padded,
            shared=shared,
        ](),
        Format,
        DType.bfloat16,
    ]
    emit[phase_kernel[P, True, False]]("dispatch_async." + name)
    emit[phase_kernel[P, False, True]]("dispatch_wait." + name)
    emit[phase_kernel[P, True, True]]("dispatch." + name)


def sums[
    n_ranks: Int,
    max_tokens: Int,
    partial: DType,
    shared: Bool,
    shares_gpu: Bool,
](name: String) raises:
    """Compiles all kernels that combine to sums."""
    comptime P = CombineSums[
        combine_group[
            partial,
            HIDDEN,
            TOP_K,
            N_EXPERTS,
            n_ranks,
            max_tokens,
            addressing=Addressing.BY_RANK,
            returns=Returns.SUMS,
            shared=shared,
            shares_gpu=shares_gpu,
        ](),
        DType.bfloat16,
        partial,
    ]
    emit[phase_kernel[P, True, False]]("combine_async." + name)
    emit[phase_kernel[P, False, True]]("combine_wait." + name)
    emit[phase_kernel[P, True, True]]("combine." + name)


def by_expert[
    Format: TokenFormat,
    n_ranks: Int,
    max_tokens: Int,
    shmem: Bool,
    padded: Bool,
    shared: Bool,
](name: String) raises:
    """Compiles all kernels by expert; with SHMEM two hosts share the ranks."""
    comptime n_gpus = n_ranks // 2 if shmem else n_ranks
    comptime Dispatch = DispatchByExpert[
        dispatch_group[
            Format,
            N_EXPERTS,
            n_ranks,
            max_tokens,
            Addressing.BY_EXPERT,
            padded=padded,
            shared=shared,
            n_ranks_per_node=n_gpus,
        ](),
        Format,
        DType.bfloat16,
    ]
    emit[phase_kernel[Dispatch, True, False], links=not shmem](
        "dispatch_async." + name
    )
    emit[phase_kernel[Dispatch, False, True], links=not shmem](
        "dispatch_wait." + name
    )
    emit[phase_kernel[Dispatch, True, True], links=not shmem](
        "dispatch." + name
    )
    comptime P = CombineRows[
        combine_group[
            DType.bfloat16,
            HIDDEN,
            TOP_K,
            N_EXPERTS,
            n_ranks,
            max_tokens,
            shared=shared,
            n_ranks_per_node=n_gpus,
        ](),
        DType.bfloat16,
    ]
    emit[phase_kernel[P, True, False], links=not shmem]("combine_async." + name)
    emit[phase_kernel[P, False, True], links=not shmem]("combine_wait." + name)
    emit[phase_kernel[P, True, True], links=not shmem]("combine." + name)


def all_gather[max_tokens: Int](name: String) raises:
    """Compiles the dispatch that gives every rank all tokens and choices."""
    comptime n_ranks = 4
    comptime Format = WithMetadataTokenFormat[
        DType.bfloat16, HIDDEN, n_ranks, TOP_K
    ]
    comptime P = DispatchByRank[
        dispatch_group[
            Format,
            n_ranks,
            n_ranks,
            max_tokens,
            Addressing.TO_ALL,
            Returns.SUMS,
        ](),
        Format,
        DType.bfloat16,
    ]
    emit[phase_kernel[P, True, True]]("all_gather." + name)


def main() raises:
    """Compiles what has no other program."""
    by_expert[BF16, 1, FEW, False, True, True]("expert_1_padded_shared")
    by_expert[FP8, 2, MANY, False, False, True]("expert_2_fp8_shared")
    by_expert[F32, 4, FEW, False, False, False]("expert_4_f32")
    by_expert[BF16, 4, FEW, True, False, True]("expert_4_shmem_shared")
    by_expert[FP8, 8, MANY, True, True, False]("expert_8_shmem_fp8_padded")
    by_rank[BF16, 1, MANY, False, False, False]("rank_1_rows")
    by_rank[BF16, 1, MANY, True, True, True]("rank_1_sums_padded_shared")
    by_rank[FP8, 2, MANY, False, True, True]("rank_2_sums_fp8_shared")
    by_rank[BF16, 2, MANY, True, False, False]("rank_2_rows_padded")
    by_rank[F32, 4, FEW, False, False, False]("rank_4_rows_f32")
    by_rank[SHORT, 4, FEW, True, True, True]("rank_4_sums_short_padded_shared")
    by_rank[FP8, 8, FEW, True, True, False]("rank_8_rows_fp8_padded_shared")
    sums[1, MANY, DType.bfloat16, True, True]("sums_1_shared_turns")
    sums[2, MANY, DType.bfloat16, False, False]("sums_2")
    sums[4, FEW, DType.float32, True, False]("sums_4_f32_shared")
    all_gather[FEW]("few")
    all_gather[MANY]("many")
