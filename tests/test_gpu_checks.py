# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own checks let right rows and sums pass, and catch wrong ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench import cases
from bench.checks import (
    CheckError,
    Delivered,
    Sent,
    check_combine,
    check_dispatch,
    check_permutation,
    from_bits,
    stack_tokens,
)
from max_ep import reference

SHAPE = cases.Shape("small", 256, n_experts=16, top_k=4, model="none")
N_RANKS = 2
N_TOKENS = 64


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bfloat16", "fp8"])
def test_sums(is_fp8):
    """Rank 0's sums: its own part in float32, the other's rounded to bfloat16."""
    ids = cases.expert_ids(SHAPE, "uniform", N_RANKS, N_TOKENS)[0]
    weights = cases.router_weights(SHAPE, N_RANKS, N_TOKENS)[0]
    bits = cases.tokens(SHAPE, N_RANKS, N_TOKENS)[0]
    rank_of = ids // reference.n_local_experts(SHAPE.n_experts, N_RANKS)

    def expert(number: int, rows: np.ndarray) -> np.ndarray:
        if not is_fp8:
            return rows
        row = cases.expert_row(SHAPE, number // (SHAPE.n_experts // N_RANKS))
        return np.broadcast_to(row, rows.shape).copy()

    def part(rank: int) -> np.ndarray:
        of_rank = np.where(rank_of == rank, ids, -1)
        x = reference.bfloat16_to_float32(bits)
        return reference.moe(x, of_rank, weights, expert)

    sent = reference.bfloat16_to_float32(reference.float32_to_bfloat16(part(1)))
    sums = from_bits(reference.float32_to_bfloat16(part(0) + sent))

    sent_by_0 = Sent(SHAPE, N_RANKS, bits, ids, weights, is_fp8)

    def check(values) -> None:
        check_combine("here", values, sent_by_0, exact=True, sums_on_rank=0)

    check(sums)
    for wrong in (5, N_TOKENS - 1):
        bad = sums.clone()
        bad[wrong] = bad[wrong - 1]
        with pytest.raises(CheckError, match=r"here"):
            check(bad)


@pytest.mark.parametrize("filled_to", [1, 4])
def test_dispatched_rows(filled_to):
    """Experts in any order, their rows with gaps after them or without."""
    bits = cases.tokens(SHAPE, N_RANKS, N_TOKENS)
    ids = cases.expert_ids(SHAPE, "uniform", N_RANKS, N_TOKENS)
    routes = cases.routes(SHAPE, ids)
    x_all = stack_tokens(bits, "cpu")
    numbers, offsets = routes.token_numbers[0], routes.row_offsets[0].astype(int)
    order = np.random.default_rng(0).permutation(len(offsets) - 1)
    parts = [numbers[offsets[e] : offsets[e + 1]] for e in order]
    sizes = [-(-len(part) // filled_to) * filled_to for part in parts]
    begins = np.cumsum([0, *sizes])
    rows = torch.full((begins[-1] + 3, SHAPE.hidden_size), 7, dtype=torch.bfloat16)
    for begin, part in zip(begins, parts):
        rows[begin : begin + len(part)] = x_all[torch.from_numpy(part)]
    tables = torch.from_numpy(begins), torch.from_numpy(order)
    good = Delivered("bfloat16", rows, None, *tables)

    def check(got: Delivered, filled_to: int = filled_to) -> None:
        expected = numbers, routes.row_offsets[0], x_all
        check_dispatch("here", got, *expected, exact=False, filled_to=filled_to)

    check(good)
    assert any(size % 4 for size in map(len, parts))
    with pytest.raises(CheckError, match="not as many"):
        check(good, filled_to=5 - filled_to)
    with pytest.raises(CheckError, match="not as many"):
        check(replace(good, row_offsets=good.row_offsets + 1))
    with pytest.raises(CheckError, match="wrong tokens"):
        check(replace(good, rows=rows.roll(1, dims=0)))
    damaged = rows.clone()
    damaged[begins[3], SHAPE.hidden_size - 1] += 1
    with pytest.raises(CheckError, match="payload differs"):
        check(replace(good, rows=damaged))


def test_rows_of_one_rank_in_any_order_of_experts():
    ids = cases.expert_ids(SHAPE, "zipf", 1, N_TOKENS)[0]
    x = stack_tokens(cases.tokens(SHAPE, 1, N_TOKENS), "cpu")
    rank_of_expert = np.random.default_rng(0).permutation(SHAPE.n_experts)
    choices = np.argsort(rank_of_expert[ids.reshape(-1)], kind="stable")
    rows = x[torch.from_numpy(choices // SHAPE.top_k)]
    check_permutation("here", rows, choices, ids, x)
    with pytest.raises(CheckError, match="here: a row differs"):
        check_permutation("here", rows.roll(1, dims=0), choices, ids, x)
    with pytest.raises(CheckError, match="not together"):
        check_permutation("here", rows.roll(3, dims=0), np.roll(choices, 3), ids, x)
    twice = choices.copy()
    twice[0] = twice[1]
    with pytest.raises(CheckError, match="choices differ"):
        check_permutation("here", rows, twice, ids, x)
