# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own check of sums lets right ones pass and catches wrong ones."""

import numpy as np
import pytest

from bench import gpu_shapes
from bench.gpu_checks import CheckError, check_combine, from_bits
from max_ep import reference

SHAPE = gpu_shapes.Shape("small", 256, n_experts=16, top_k=4, model="none")
N_RANKS = 2
N_TOKENS = 64


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bfloat16", "fp8"])
def test_reduced_sums(is_fp8: bool) -> None:
    """Rank 0's sums: its own part in float32, the other's rounded to bfloat16."""
    ids = gpu_shapes.expert_ids(SHAPE, "uniform", N_RANKS, N_TOKENS)[0]
    weights = gpu_shapes.router_weights(SHAPE, N_RANKS, N_TOKENS)[0]
    bits = gpu_shapes.tokens(SHAPE, N_RANKS, N_TOKENS)[0]
    rank_of = ids // reference.n_local_experts(SHAPE.n_experts, N_RANKS)

    def expert(number: int, rows: np.ndarray) -> np.ndarray:
        if not is_fp8:
            return rows
        row = gpu_shapes.expert_row(SHAPE, number // (SHAPE.n_experts // N_RANKS))
        return np.broadcast_to(row, rows.shape).copy()

    def part(rank: int) -> np.ndarray:
        of_rank = np.where(rank_of == rank, ids, -1)
        x = reference.bfloat16_to_float32(bits)
        return reference.moe(x, of_rank, weights, expert)

    sent = reference.bfloat16_to_float32(reference.float32_to_bfloat16(part(1)))
    sums = from_bits(reference.float32_to_bfloat16(part(0) + sent))

    def check(values) -> None:
        check_combine(
            "here",
            SHAPE,
            values,
            bits,
            ids,
            weights,
            N_RANKS,
            is_fp8=is_fp8,
            exact=True,
            reduced_on=0,
        )

    check(sums)
    for wrong in (5, N_TOKENS - 1):
        bad = sums.clone()
        bad[wrong] = bad[wrong - 1]
        with pytest.raises(CheckError, match=r"here"):
            check(bad)
