# SPDX-License-Identifier: Apache-2.0
"""Runs MoE layers on several GPUs: router, dispatch, experts, combine.

MAX passes the router's weights to combine, so one row returns for each expert of a
token. Where combine returns sums, dispatch takes them: one sum per rank returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.moe import MoE, MoEGate, forward_moe_sharded_layers
from max.pipelines.architectures.qwen3.layers.moe import Qwen3MoEGate

from .. import softmax_top_k
from ..graph.moe import through_experts
from .hopper import experts_anywhere


class PlacedMoE(MoE):
    """MAX's MoE layer, with a place for each replica if experts are balanced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        manager = kwargs.get("ep_batch_manager")
        if manager is not None and manager.config.eplb_enabled:
            kwargs["num_experts"] = manager.config.n_experts
            kwargs["num_logical_experts"] = manager.config.num_logical_experts
        super().__init__(*args, **kwargs)


def route(gate: MoEGate, x: TensorValue) -> tuple[TensorValue, TensorValue]:
    """Runs a router: Qwen3's in one op behind its product, others as MAX does.

    Returns ids and weights, ``[n_tokens, top_k]``. Qwen3's weights are float32, where
    MAX rounds them to the dtype of ``x``.
    """
    if type(gate) is not Qwen3MoEGate:
        return gate(x)
    return softmax_top_k(gate.gate_score(x), gate.num_experts_per_token)


def forward_layers(
    shards: Sequence[Any], xs: list[TensorValue], *eplb: Any
) -> list[TensorValue]:
    """Replaces MAX's ``forward_moe_sharded_layers``; the result on each device.

    Layers without experts are left to MAX. ``eplb`` is for its load balancing.
    """
    if getattr(shards[0], "_ep_batch_manager", None) is None:
        return forward_moe_sharded_layers(shards, xs, *eplb)
    manager = shards[0].ep_batch_manager
    ids, weights = zip(*(route(shard.gate, x) for shard, x in zip(shards, xs)))
    n_tokens = sum(ops.shape_to_tensor(x.shape)[0] for x in xs)
    n_rows = n_tokens * shards[0].num_experts_per_token // len(shards)
    about_n_rows = n_rows.cast(DType.uint32)

    def experts(rank: int, dispatched: tuple[TensorValue, ...]) -> TensorValue:
        return experts_anywhere(shards[rank], dispatched, xs[rank], about_n_rows)

    layer = getattr(shards[0], "layer_idx", None)
    layer = 0 if layer is None else layer
    results = through_experts(manager, xs, ids, weights, experts, layer)
    if shards[0].has_shared_experts and not manager.config.fused_shared_expert:
        shared = [shard.shared_experts(x) for shard, x in zip(shards, xs)]
        results = [result + more for result, more in zip(results, shared)]
    return [result.cast(x.dtype) for result, x in zip(results, xs)]
