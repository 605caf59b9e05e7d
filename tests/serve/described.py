# SPDX-License-Identifier: Apache-2.0
"""A decoder's logits as its description says, in torch: nothing is compiled.

Weights are those that a server reads, under the names of our decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from max.dtype import DType
from torch.nn.functional import silu, softplus

from max_ep.checkpoint import (
    Rope,
    check_config,
    check_tensors,
    config_in,
    described,
    read_tensors,
)
from max_ep.checkpoint.decoder import Attention, Decoder, Moe, Router
from max_ep.serve.weights import _Reader

QWEN3 = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=64,
    max_position_embeddings=128,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=16,
    num_experts_per_tok=4,
)


def qwen3(**changes: Any) -> Decoder:
    """Returns the description of a Qwen3-MoE."""
    return described(check_config(QWEN3 | changes))


class _Weights:
    """Weights below a name."""

    def __init__(self, all_weights: Mapping[str, torch.Tensor], name: str = "") -> None:
        self._all, self._name = all_weights, name

    def at(self, name: str) -> _Weights:
        return _Weights(self._all, f"{self._name}{name}.")

    def __call__(self, name: str) -> torch.Tensor:
        return self._all[self._name + name]

    def times(self, x: torch.Tensor, name: str, has_bias: bool = False) -> torch.Tensor:
        product = x @ self(f"{name}.weight").T
        return product + self(f"{name}.bias") if has_bias else product


class DescribedDecoder:
    """What a checkpoint's ``config.json`` and files say, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        config = check_config(config_in(folder))
        stored = check_tensors(config, read_tensors(folder))
        self.described: Decoder = described(config)
        read = _Reader(stored, self.described.fp8_block, DType.float32).weights(())
        weights = {
            stored[name].here: torch.from_dlpack(weight.data()).clone()
            for name, weight in read.items()
        }
        self._weights = _Weights(weights)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Returns them of each token, ``[n_tokens, vocab_size]``."""
        of, weights = self.described, self._weights
        x = weights("embed_tokens.weight")[torch.tensor(tokens)]
        for i, layer in enumerate(of.layers):
            here = weights.at(f"layers.{i}")
            normed = self._normed(x, here("input_layernorm.weight"))
            x = x + self._attended(normed, layer.attention, here.at("self_attn"))
            normed = self._normed(x, here("post_attention_layernorm.weight"))
            inner = here.at("mlp")
            if layer.moe is None:
                x = x + _mlp(normed, inner)
            else:
                x = x + _moe(normed, layer.moe, inner)
        x = self._normed(x, weights("norm.weight"))
        return weights.times(x, "embed_tokens" if of.is_tied else "lm_head")

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.described.rms_norm_eps) * weight

    def _attended(
        self, x: torch.Tensor, of: Attention, weights: _Weights
    ) -> torch.Tensor:
        parts = [weights.times(x, f"{n}_proj", of.has_bias) for n in "qkv"]
        norms = [weights(f"{n}_norm.weight") for n in "qk"] if of.norm else []
        if of.norm == "all":
            parts[:2] = map(self._normed, parts, norms)
        if of.clip is not None:
            parts = [part.clamp(-of.clip, of.clip) for part in parts]
        q, k, v = (part.reshape(len(x), -1, of.head_dim) for part in parts)
        if of.norm == "head":
            q, k = self._normed(q, norms[0]), self._normed(k, norms[1])
        q, k = _rotated(q, of.rope), _rotated(k, of.rope)
        k, v = (y.repeat_interleave(of.n_heads // of.n_kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * of.head_dim**-0.5
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        is_seen = (back >= 0) & (back < (of.window or len(x)))
        scores = scores.masked_fill(~is_seen, -math.inf)
        if of.has_sinks:
            sinks = weights("sinks")[:, None, None].expand(-1, len(x), 1)
            scores = torch.cat([scores, sinks], -1)
        shares = scores.softmax(-1)[..., : len(x)]
        heads = torch.einsum("hqk,khd->qhd", shares, v)
        if of.has_gate:
            heads = heads * softplus(weights.times(x, "g_proj"))[..., None]
        return weights.times(heads.flatten(1), "o_proj", of.has_output_bias)


def _rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    frequencies, factor = rope.inverse_frequencies()
    angles = torch.outer(torch.arange(len(x)).float(), torch.from_numpy(frequencies))
    cos, sin = (part[:, None] * factor for part in (angles.cos(), angles.sin()))
    a, b, rest = x.split([rope.dim // 2] * 2 + [x.shape[-1] - rope.dim], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _mlp(x: torch.Tensor, weights: _Weights) -> torch.Tensor:
    gate, up = (weights.times(x, f"{name}_proj") for name in ("gate", "up"))
    return weights.times(silu(gate) * up, "down_proj")


def _chosen(
    logits: torch.Tensor, of: Router, correction: torch.Tensor | float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and weights of each token's experts."""
    if of.softcap:
        logits = of.softcap * torch.tanh(logits / of.softcap)
    scores = logits.softmax(-1) if of.scores == "softmax" else logits.sigmoid()
    groups = (scores + correction).unflatten(1, (of.n_groups, -1))
    if of.n_groups > 1:
        totals = groups.topk(2, -1).values.sum(-1)
        left_out = totals.argsort(1, descending=True)[:, of.n_chosen_groups :]
        groups = groups.clone()
        groups[torch.arange(len(groups))[:, None], left_out] = -math.inf
    ids = groups.flatten(1).topk(top_k, -1).indices
    weights = scores.gather(1, ids)
    if of.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * of.scale


def _moe(x: torch.Tensor, of: Moe, weights: _Weights) -> torch.Tensor:
    gate = weights.at("gate")
    logits = gate.times(x, "gate_score", of.router.has_bias)
    correction = gate("e_score_correction_bias") if of.has_correction else 0.0
    ids, shares = _chosen(logits, of.router, correction, of.top_k)
    total = torch.zeros_like(x)
    for expert in range(of.n_experts):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        run = _clamped if of.is_clamped else _mlp
        own = weights.at(f"experts.{expert}")
        biases = (weights.at("experts"), expert) if of.is_clamped else ()
        rows = run(x[tokens], own, *biases) * shares[tokens, choices][:, None]
        total.index_add_(0, tokens, rows)
    if not of.shared_dim:
        return total
    shared = _mlp(x, weights.at("shared_experts"))
    if of.has_shared_gate:
        shared = shared * torch.sigmoid(x @ weights("shared_gate").T)
    return total + shared


def _clamped(
    x: torch.Tensor, weights: _Weights, biases: _Weights, expert: int
) -> torch.Tensor:
    """Runs an expert of gpt-oss, whose biases of gate and up alternate."""
    gate, up = (
        weights.times(x, f"{name}_proj") + biases("gate_up_proj_bias")[expert][i::2]
        for i, name in enumerate(("gate", "up"))
    )
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return weights.times(inner, "down_proj") + biases("down_proj_bias")[expert]
