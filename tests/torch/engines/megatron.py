# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's and NeMo Automodel's flex dispatchers, forward and backward."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.torch.engines import CAP, E, K, close, experts, given_to, plain_layer

H = 256


_CONFIG = dict(
    moe_flex_dispatcher_backend="deepep",
    moe_router_topk=K,
    num_moe_experts=E,
    moe_router_dtype="fp32",
)
"""What both read of a model's configuration."""


def _dense(ids: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any]:
    """Routing as Megatron's router gives it: `[n_tokens, E]` each."""
    routing = ids.new_zeros((len(ids), E), dtype=torch.bool)
    probs = weights.new_zeros((len(ids), E)).scatter(1, ids, weights)
    return routing.scatter(1, ids, True), probs


def _check(
    rank: int, n_ranks: int, seeds: tuple[int, ...], dispatchers: list[Any], step: Any
) -> None:
    """Runs a layer a seed, then all backward passes, the last layer's first."""
    n_local, layers = E // n_ranks, []
    for i, seed in enumerate(seeds):
        # The first rank has no tokens in the last layer.
        n = CAP - 3 * rank if rank or i < len(seeds) - 1 else 0
        x, ids, weights = given_to(rank, seed, n, H)
        x.requires_grad_()
        weights.requires_grad_()

        def of_experts(rows: torch.Tensor, counts: Any, probs: Any) -> torch.Tensor:
            made = experts(rows, counts.tolist(), rank * n_local)
            return (made.float() * probs.unsqueeze(1)).to(rows.dtype)

        y = step(dispatchers[i], x, *_dense(ids, weights), of_experts)
        close(y.detach(), plain_layer(x, ids, weights).detach())
        layers.append((x, ids, weights, y))
    for x, ids, weights, y in reversed(layers):
        y.float().sum().backward()
        got = x.grad.clone(), weights.grad.clone()
        x.grad = weights.grad = None
        plain_layer(x, ids, weights).sum().backward()
        close(got[0], x.grad)
        torch.testing.assert_close(got[1], weights.grad, rtol=0.05, atol=2.0)


def megatron(rank: int, n_ranks: int) -> None:
    transformer = "megatron.core.transformer"
    module = importlib.import_module(f"{transformer}.moe.token_dispatcher")
    config_of = importlib.import_module(f"{transformer}.transformer_config")
    model = dict(
        num_layers=1, hidden_size=H, num_attention_heads=1, add_bias_linear=False
    )
    model |= dict(moe_token_dispatcher_type="flex", params_dtype=torch.bfloat16)
    config = config_of.TransformerConfig(**model, **_CONFIG, bf16=True)
    n_local = E // n_ranks
    mine = list(range(rank * n_local, (rank + 1) * n_local))
    alone = [dist.new_group([r]) for r in range(n_ranks)][rank]
    world = dist.group.WORLD
    groups = SimpleNamespace(ep=world, expt_tp=alone, tp_ep=world)
    dispatchers = [
        module.MoEFlexTokenDispatcher(n_local, mine, config, groups) for _ in range(2)
    ]

    def step(dispatcher: Any, x: Any, routing: Any, probs: Any, made: Any) -> Any:
        x, probs = dispatcher.dispatch_preprocess(x, routing, probs)
        rows, probs = dispatcher.token_dispatch(x, probs)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        rows = dispatcher.combine_preprocess(made(rows, counts, probs))
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows))

    _check(rank, n_ranks, (1, 2), dispatchers, step)


def nemo(rank: int, n_ranks: int) -> None:
    name = "nemo_automodel.components.moe.megatron.token_dispatcher"
    module = importlib.import_module(name)
    n_local = E // n_ranks
    mine = list(range(rank * n_local, (rank + 1) * n_local))
    config = module.TokenDispatcherConfig(**_CONFIG)
    dispatchers = [
        module.MoEFlexTokenDispatcher(n_local, mine, config, dist.group.WORLD)
        for _ in range(2)
    ]

    def step(dispatcher: Any, x: Any, routing: Any, probs: Any, made: Any) -> Any:
        given = dispatcher.token_permutation(x, len(x), probs)
        return dispatcher.token_unpermutation(made(*given))

    _check(rank, n_ranks, (3, 4), dispatchers, step)
