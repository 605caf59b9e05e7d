# SPDX-License-Identifier: Apache-2.0
"""How experts are chosen by scores: by sigmoids, from groups, with a bias."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.kernels import moe_router_group_limited

from ..checkpoint.decoder import Router

_LANES, _MOST_EXPERTS = 32, 1024
"""Threads of a warp, and of a block, in MAX's kernels."""


def chosen_by(
    of: Router, scores: TensorValue, bias: TensorValue | None, top_k: int
) -> tuple[TensorValue, TensorValue]:
    """Returns ids, int32, and weights of experts, ``[n_tokens, top_k]``. ``bias`` is
    added to the scores by which they are chosen, but not to the weights."""
    biased = scores if bias is None else scores + bias
    if of.n_groups > 1:
        biased = _of_chosen_groups(of, biased)
    _, ids = ops.top_k(biased, k=top_k, axis=-1)
    weights = ops.gather_nd(scores, ops.unsqueeze(ids, -1), batch_dims=1)
    if of.renormalizes:
        weights = weights / (ops.sum(weights, axis=-1) + 1e-20)
    if of.scale != 1:
        weights = weights * of.scale
    return ids.cast(DType.int32), weights


def _of_chosen_groups(of: Router, scores: TensorValue) -> TensorValue:
    """Leaves the scores of groups with the best two experts, others are -inf."""
    n_tokens, n_experts = scores.shape
    groups = scores.reshape([n_tokens, of.n_groups, int(n_experts) // of.n_groups])
    best, _ = ops.top_k(groups, k=2, axis=-1)
    totals = ops.squeeze(ops.sum(best, axis=-1), -1)
    _, chosen = ops.top_k(totals, k=of.n_chosen_groups, axis=-1)
    each = ops.range(
        0, of.n_groups, out_dim=of.n_groups, dtype=DType.int32, device=scores.device
    )
    is_it = ops.equal(ops.unsqueeze(chosen.cast(DType.int32), -1), each)
    n_times = ops.sum(is_it.cast(DType.int32), axis=1).reshape(
        [n_tokens, of.n_groups, 1]
    )
    lowest = ops.constant(float("-inf"), scores.dtype, scores.device)
    left = ops.where(n_times > 0, groups, lowest)
    return left.reshape(scores.shape)


def kernel_takes(n_experts: int, top_k: int, n_groups: int, n_chosen: int) -> bool:
    """Returns whether MAX's kernel chooses right. It has a thread for each expert, and
    a warp sorts those of a group, and then those that are left. Of other sizes it does
    not compile, or reads entries that nobody wrote (docs/upstream.md)."""
    if n_experts % _LANES or n_experts > _MOST_EXPERTS or not _is_power_of_2(top_k):
        return False
    if n_groups == 1:
        of_warps = n_experts // _LANES * top_k
        n_left = -(-of_warps // _LANES) * top_k
        return of_warps <= _LANES or (of_warps % _LANES == 0 and n_left <= _LANES)
    of_group, n_kept = n_experts // n_groups, n_chosen * top_k
    return (
        all(map(_is_power_of_2, (n_groups, of_group, n_kept)))
        and max(2 * n_groups, n_kept) <= _LANES
        and 2 * n_groups <= n_kept
        and top_k <= of_group <= _LANES
    )


def _is_power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


def router_anywhere(
    expert_scores: TensorValue,
    expert_bias: TensorValue,
    n_routed_experts: int,
    n_experts_per_tok: int,
    n_groups: int,
    topk_group: int,
    norm_weights: bool,
    routed_scaling_factor: float,
) -> tuple[TensorValue, TensorValue]:
    """Replaces ``moe_router_group_limited``: several ops, where its kernel is wrong."""
    sizes = n_routed_experts, n_experts_per_tok, n_groups, topk_group
    if kernel_takes(*sizes):
        more = norm_weights, routed_scaling_factor
        return moe_router_group_limited(expert_scores, expert_bias, *sizes, *more)
    of = Router("sigmoid", norm_weights, routed_scaling_factor, 0.0, *sizes[2:])
    return chosen_by(of, expert_scores, expert_bias, n_experts_per_tok)
