# SPDX-License-Identifier: Apache-2.0
"""A routed MoE layer: router, dispatch, SwiGLU experts, combine.

Each step is one call, to be copied and changed. ``graphs/moe_layer.py`` is a
whole program around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from max.graph import TensorValue

from .experts import grouped_swiglu, linear
from .manager import EPBatchManager
from .routing import softmax_top_k


@dataclass
class ExpertWeights:
    """Weights of the experts that one rank holds."""

    gate_up: TensorValue
    """``[n_local_experts, 2 * moe_dim, hidden_size]``: gate, then up."""
    down: TensorValue
    """``[n_local_experts, hidden_size, moe_dim]``."""


def route(
    x: TensorValue, router: TensorValue, top_k: int
) -> tuple[TensorValue, TensorValue]:
    """Chooses each token's experts: top-k of a softmax, weights summing to 1.

    Args:
        x: ``[n_tokens, hidden_size]`` float32.
        router: ``[n_experts, hidden_size]`` float32.
        top_k: Experts of a token.

    Returns:
        ``topk_ids`` ``[n_tokens, top_k]`` int32 and ``topk_weights``, likewise,
        float32.
    """
    return softmax_top_k(linear(x, router), top_k)


def moe_layer(
    manager: EPBatchManager,
    x: Sequence[TensorValue],
    router: TensorValue,
    experts: Sequence[ExpertWeights],
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Runs the layer on all ranks of this process.

    Args:
        manager: Holds the group's buffers.
        x: Tokens of each rank, ``[n_tokens, hidden_size]`` float32.
        router: ``[n_experts, hidden_size]`` float32.
        experts: Weights of each rank's experts.

    Returns:
        The results of each rank, ``[n_tokens, hidden_size]``, and its
        ``topk_ids``.
    """
    config = manager.config
    ranks = list(range(config.n_gpus_per_node))
    routed = [route(tokens, router, config.top_k) for tokens in x]
    ids = [topk_ids for topk_ids, _ in routed]
    weights = [topk_weights for _, topk_weights in routed]
    # Whoever adds up the rows needs the weights: reduced, their experts' ranks.
    sent, added = (weights, None) if config.is_reduced else (None, weights)
    dispatched = manager.ep_dispatch_all(x, ids, ranks, router_weights=sent)
    outputs = [
        grouped_swiglu(rows, own.gate_up, own.down, row_offsets, expert_ids)
        for (rows, row_offsets, expert_ids, _), own in zip(dispatched, experts)
    ]
    return manager.ep_combine_all(outputs, added, ranks), ids
