# SPDX-License-Identifier: Apache-2.0
"""Plain dispatch and combine over ``torch.distributed``, as test programs of DeepEP
compare with. All ranks call them; the group is the default one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .envs import get_global_seed


def _exchange(parts: list[torch.Tensor], n_received: list[int]) -> torch.Tensor:
    """Sends a part to each rank; returns what came, in the order of ranks."""
    sent = torch.cat(parts)
    received = sent.new_empty((sum(n_received), *sent.shape[1:]))
    sizes = n_received, [len(part) for part in parts]
    pair = received, sent
    if sent.element_size() == 1:  # not every backend sends float8
        pair = received.view(torch.uint8), sent.view(torch.uint8)
    dist.all_to_all_single(*pair, *sizes)
    return received


def dispatch(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sends each token to each rank with an expert of it.

    Returns:
        Rows, or the pair, by source rank and token; their expert ids, local or -1;
        their weights; of each row, rank times ``num_max_tokens_per_rank`` plus token,
        int32; rows from each rank, int32.
    """
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    n_local = num_experts // n_ranks
    of_rank = torch.where(topk_idx < 0, -1, topk_idx // n_local)
    tokens = [(of_rank == r).any(1).nonzero().flatten() for r in range(n_ranks)]
    n_sent = torch.tensor([len(t) for t in tokens], dtype=torch.int32, device="cpu")
    n_all: list[Any] = [None] * n_ranks
    dist.all_gather_object(n_all, n_sent.tolist())
    n_received = [n[rank] for n in n_all]
    first = rank * num_max_tokens_per_rank

    def moved(t: torch.Tensor) -> torch.Tensor:
        return _exchange([t[some].contiguous() for some in tokens], n_received)

    rows: Any = tuple(map(moved, x)) if isinstance(x, tuple) else moved(x)
    ids = moved(topk_idx) - rank * n_local
    ids = torch.where((ids >= 0) & (ids < n_local), ids, -1)
    places = torch.arange(len(topk_idx), dtype=torch.int32, device=topk_idx.device)
    counts = torch.tensor(n_received, dtype=torch.int32, device="cpu")
    return rows, ids, moved(topk_weights), moved(first + places), counts


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
) -> torch.Tensor:
    """Returns bfloat16 ``[n, num_topk, hidden]``, which depend on the number of a token
    alone: what its experts give, wherever they are."""
    device = src_token_global_idx.device
    n = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    seeds = src_token_global_idx.long()[:, None] * num_topk
    seeds = seeds + torch.arange(num_topk, device=device)
    phases = ((seeds * 131071 % n).float() + 1) / n
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    shift = math.sin(float(get_global_seed()))
    return torch.sin(phases[:, :, None] * columns + shift).bfloat16()


def ordered_accumulate(
    data: torch.Tensor, initial_value: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds up ``[n, k, hidden]`` along ``k``, one after the other in float32."""
    if initial_value is None:
        initial_value = data.new_zeros(data[:, 0].shape, dtype=torch.float32)
    total = initial_value.float()
    for k in range(data.shape[1]):
        total = total + data[:, k].float()
    return total.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """Adds up what experts give, ``[n_tokens, top_k, hidden]``, after the biases.

    ``reduce_in_local``: those of a rank first, rounded; ``reduce_in_scaleup``: then
    those of ranks without a network between them. Sums take the place of a token's last
    choice there, and are added in the order of places.
    """
    n_local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    for wanted, size in (
        (reduce_in_local, n_local),
        (reduce_in_scaleup, n_local * num_scaleup_ranks),
    ):
        if wanted:
            y = _summed(y, topk_idx // size)
    biases = bias if isinstance(bias, tuple) else (bias,)
    given = [one.float() for one in biases if one is not None]
    return ordered_accumulate(y, sum(given) if given else None)


def _summed(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Puts the rounded sum of each group of choices where its last one is."""
    sums = torch.zeros_like(y)
    for k in range(y.shape[1]):
        is_same = group == group[:, k : k + 1]
        is_last = ~is_same[:, k + 1 :].any(1)
        mine = torch.where(is_same[:, :, None], y, 0)
        sums[:, k] = torch.where(is_last[:, None], ordered_accumulate(mine), 0)
    return sums
