# SPDX-License-Identifier: Apache-2.0
"""Compiles kernel variants that a launcher can pick, beside those that tests read.

Rank counts, SHMEM, formats and flags. Run by tests/codegen/same_code.py alone.
"""
from emitting import emit_combine, emit_dispatch, emit_phase
from groups import (
    AllGather,
    BF16,
    ByExpert,
    ByRank,
    F32,
    FEW,
    FP8,
    HIDDEN,
    MANY,
    ROWS,
    RowsBack,
    SUMS,
    SumsBack,
    TOP_K,
)
from max_ep.combine_sums.kernel import CombineSums
from max_ep.dispatch_by_rank.kernel import DispatchByRank
from max_ep.formats.given import GivenTokenFormat
from max_ep.formats.plain import BF16TokenFormat
from max_ep.protocol.addressing import Addressing
from max_ep.protocol.layout import Group
from max_ep.protocol.message_sizes import combine_msg_bytes
from max_ep.protocol.token_format import TokenFormat

comptime SHORT = BF16TokenFormat[2048, TOP_K]
comptime B16 = DType.bfloat16


def by_expert[
    Format: TokenFormat,
    n_ranks: Int,
    max_tokens: Int,
    padded: Bool = False,
    shared: Bool = False,
    n_hosts: Int = 1,
](name: String) raises:
    emit_dispatch[ByExpert[Format, max_tokens, padded, shared, n_ranks, n_hosts]](name)
    comptime back = RowsBack[
        B16, False, max_tokens, shared, n_ranks=n_ranks, n_hosts=n_hosts
    ]
    emit_combine[back](name)


def by_rank[
    Format: TokenFormat,
    returns: Int,
    n_ranks: Int,
    max_tokens: Int,
    padded: Bool = False,
    shared: Bool = False,
](name: String) raises:
    """Compiles all kernels by rank for one set of options, rows' way back too."""
    comptime there = ByRank[
        Format, returns, max_tokens, padded, shared, True, n_ranks=n_ranks
    ]
    emit_dispatch[there](name)
    comptime if returns == ROWS:
        emit_combine[RowsBack[B16, True, max_tokens, shared, n_ranks=n_ranks]](name)


comptime PLAIN_FORMAT = GivenTokenFormat[2 * HIDDEN, 0, 4, TOP_K, 64]
comptime PLAIN = Group(
    n_experts=4,
    n_ranks=4,
    max_tokens_per_rank=MANY,
    top_k=4,
    hidden_size=PLAIN_FORMAT.hidden_size,
    dispatch_msg_bytes=PLAIN_FORMAT.msg_bytes,
    addressing=Addressing.TO_RANKS,
    has_sums=True,
    wide_ids=True,
    router_top_k=TOP_K,
    router_experts=256,
    row_alignment=1,
)
"""Plain rows of PyTorch, whose ranks kernels find."""
comptime LATE = Group(
    n_experts=256,
    n_ranks=4,
    max_tokens_per_rank=FEW,
    top_k=TOP_K,
    hidden_size=HIDDEN,
    combine_msg_bytes=combine_msg_bytes[B16](HIDDEN),
    addressing=Addressing.BY_RANK,
    has_sums=True,
    is_padded=True,
    shares_gpu=False,
    late_weights=True,
)
"""Low-latency calls of PyTorch, with sums."""


def main() raises:
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
    emit_combine[SumsBack[B16, MANY, True, True, n_ranks=1]](
        "sums_1_shared_oversubscribed"
    )
    emit_combine[SumsBack[B16, MANY, n_ranks=2]]("sums_2")
    emit_combine[SumsBack[DType.float32, shared=True, n_ranks=4]]("sums_4_f32_shared")
    comptime F8 = DType.float8_e4m3fn
    emit_combine[SumsBack[F8, MANY, block=128, n_ranks=2]]("sums_2_fp8")
    emit_combine[SumsBack[F8, shared=True, block=32, n_ranks=4]]("sums_4_mxfp8_shared")
    emit_phase[AllGather[4, FEW, True], "all_gather"]("few")
    emit_phase[AllGather[4, MANY, True], "all_gather"]("many")
    # What only `max_ep_c` has: int64 ids, rows that may change.
    comptime torch = ByRank[BF16, padded=True, oversubscribed=True, wide_ids=True]
    emit_dispatch[torch]("torch")
    emit_combine[RowsBack[by_rank=True, keeps_rows=True]]("torch")
    emit_phase[DispatchByRank[PLAIN, PLAIN_FORMAT, DType.uint8], "dispatch"]("plain")
    emit_combine[CombineSums[LATE, B16, B16]]("late")
    # What ranks run that mask a peer that is late.
    emit_dispatch[ByRank[BF16, SUMS, oversubscribed=True, masks=True]]("masks_sums")
    comptime rows = ByRank[FP8, ROWS, MANY, oversubscribed=True, masks=True]
    emit_dispatch[rows]("masks_rows")
    emit_combine[SumsBack[B16, oversubscribed=True, masks=True]]("masks")
    emit_combine[RowsBack[B16, True, MANY, masks=True]]("masks")
    emit_phase[RowsBack[B16, True, MANY, keeps_rows=True, masks=True], "combine_wait"](
        "masks_keeps"
    )
