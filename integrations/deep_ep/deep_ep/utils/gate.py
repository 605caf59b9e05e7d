# SPDX-License-Identifier: Apache-2.0
"""Scores of a router, as test programs of DeepEP draw them."""

from __future__ import annotations

import torch


def get_unbalanced_scores(
    num_tokens: int,
    num_experts: int,
    num_ranks: int,
    num_topk: int,
    ratio: float,
    precise: bool = False,
) -> torch.Tensor:
    """Returns float32 ``[num_tokens, num_experts]``; rank 0 gets about ``ratio`` times
    as many tokens as the average of the others. ``precise`` changes nothing."""
    n_local = num_experts // num_ranks
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = num_tokens, num_experts
    drawn = torch.rand(shape, dtype=torch.float32, device=device)
    if ratio == 1:
        return drawn
    low, high = 1.0, 100.0
    for _ in range(20):
        middle = (low + high) / 2
        ranks = _scaled(drawn, n_local, middle).topk(num_topk).indices // n_local
        goes = drawn.new_zeros((num_tokens, num_ranks)).scatter_(1, ranks, 1).sum(0)
        if goes[0] > goes[1:].mean() * ratio:
            high = middle
        else:
            low = middle
    return _scaled(drawn, n_local, low)


def _scaled(drawn: torch.Tensor, n_local: int, factor: float) -> torch.Tensor:
    """Raises the scores of rank 0's experts."""
    scores = drawn.clone()
    scores[:, :n_local] *= factor
    return scores
