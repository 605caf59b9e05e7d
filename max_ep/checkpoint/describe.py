# SPDX-License-Identifier: Apache-2.0
"""What each architecture's checked ``config.json`` says of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder import (
    Attention,
    Decoder,
    LatentAttention,
    Moe,
    Names,
    Router,
    attention,
    decoder,
)
from .rope import Rope
from .rule import shown

Config = Mapping[str, Any]

_PLAIN = Names()


def _dense_of_qwen(config: Config) -> list[int]:
    """Returns the layers of a Qwen that have an MLP in place of experts."""
    step, named = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
    return [
        i for i in range(config["num_hidden_layers"]) if (i + 1) % step or i in named
    ]


def qwen3(config: Config, names: Names = _PLAIN) -> Decoder:
    bias = dict.fromkeys(("has_bias", "has_output_bias"), config["attention_bias"])
    return decoder(
        config,
        attention(config, norm="head", **bias),
        Moe(
            config["num_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            Router(renormalizes=config["norm_topk_prob"]),
        ),
        names,
        _dense_of_qwen(config),
    )


QWEN3_VL_NAMES = Names(model="model.language_model", fused=(False, True))


def qwen2(config: Config) -> Decoder:
    return decoder(
        config,
        attention(config, has_bias=config["qkv_bias"]),
        Moe(
            config["num_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            Router(renormalizes=config["norm_topk_prob"]),
            shared_dim=config["shared_expert_intermediate_size"],
            has_shared_gate=True,
        ),
        Names(shared="shared_expert"),
        _dense_of_qwen(config),
    )


_OF_MIXTRAL = dict(moe="block_sparse_moe", matrices=("w1", "w3", "w2"))


def mixtral(config: Config) -> Decoder:
    return decoder(
        config,
        attention(config),
        Moe(
            config["num_local_experts"],
            config["num_experts_per_tok"],
            config["intermediate_size"],
            Router(),
        ),
        Names(**_OF_MIXTRAL),
    )


def minimax(config: Config) -> Decoder:
    return decoder(
        config,
        attention(config, norm="all"),
        Moe(
            config["num_local_experts"],
            config["num_experts_per_tok"],
            config["intermediate_size"],
            Router("sigmoid"),
        ),
        Names(**_OF_MIXTRAL, correction="e_score_correction_bias"),
    )


def olmoe(config: Config) -> Decoder:
    bias = dict.fromkeys(("has_bias", "has_output_bias"), config["attention_bias"])
    return decoder(
        config,
        attention(config, norm="all", clip=config["clip_qkv"], **bias),
        Moe(
            config["num_experts"],
            config["num_experts_per_tok"],
            config["intermediate_size"],
            Router(renormalizes=config["norm_topk_prob"]),
        ),
    )


def _sigmoid_router(config: Config) -> Router:
    """Returns the router of DeepSeek-V3, which GLM-4 has, too."""
    return Router(
        "sigmoid",
        renormalizes=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
        n_groups=config["n_group"],
        n_chosen_groups=config["topk_group"],
    )


_DEEPSEEK_NAMES = Names(correction="gate.e_score_correction_bias")


def glm4(config: Config) -> Decoder:
    norm = "head" if config["use_qk_norm"] else None
    dim = config["moe_intermediate_size"]
    return decoder(
        config,
        attention(config, norm=norm, has_bias=config["attention_bias"]),
        Moe(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            dim,
            _sigmoid_router(config),
            shared_dim=dim * config["n_shared_experts"],
        ),
        _DEEPSEEK_NAMES,
        range(config["first_k_dense_replace"]),
    )


def deepseek(config: Config) -> Decoder:
    dim = config["moe_intermediate_size"]
    return decoder(
        config,
        LatentAttention(
            config["num_attention_heads"],
            config["q_lora_rank"],
            config["kv_lora_rank"],
            config["qk_nope_head_dim"],
            config["qk_rope_head_dim"],
            config["v_head_dim"],
            Rope.of(config),
        ),
        Moe(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            dim,
            _sigmoid_router(config),
            shared_dim=dim * config["n_shared_experts"],
            # Two or more are one wider expert, which MAX runs itself.
            dispatches_shared=config["n_shared_experts"] == 1,
        ),
        _DEEPSEEK_NAMES,
        range(config["first_k_dense_replace"]),
    )


def hyv3(config: Config) -> Decoder:
    dim = config["moe_intermediate_size"]
    return decoder(
        config,
        attention(config, norm="head"),
        Moe(
            config["num_experts"],
            config["num_experts_per_tok"],
            dim,
            Router("sigmoid", scale=config["router_scaling_factor"]),
            shared_dim=dim * config["num_shared_experts"],
        ),
        Names(
            router="router.gate",
            correction="expert_bias",
            shared="shared_mlp",
            in_transformers={
                "mlp.router.gate.weight": "mlp.gate.weight",
                "mlp.expert_bias": "mlp.e_score_correction_bias",
                "mlp.shared_mlp.": "mlp.shared_experts.",
            },
        ),
        _dense(config),
    )


def laguna(config: Config) -> Decoder:
    n_layers = config["num_hidden_layers"]
    types = config["layer_types"] or ["full_attention"] * n_layers
    of_types, ropes = config["rope_parameters"], {}
    if of_types is None:
        of_types = _LAGUNA_ROPE
    for kind in dict.fromkeys(types):
        found = of_types.get(kind) if isinstance(of_types, dict) else None
        if not isinstance(found, dict):
            raise ValueError(
                f"config.json: rope_parameters has {kind}={shown(found)}; it must be "
                "an object with rope_type and rope_theta, for each of layer_types"
            )
        # transformers reads none of these for them.
        names = "rope_theta", "partial_rotary_factor", "max_position_embeddings"
        outside = dict.fromkeys(names)
        ropes[kind] = Rope.of({**config, **outside, "rope_parameters": found})
    heads = config["num_attention_heads_per_layer"]
    heads = heads or [config["num_attention_heads"]] * n_layers
    return decoder(
        config,
        [
            attention(
                config,
                n_heads=n_heads,
                rope=ropes[kind],
                window=config["sliding_window"] if kind != "full_attention" else None,
                norm="head",
                has_gate=True,
            )
            for n_heads, kind in zip(heads, types)
        ],
        Moe(
            config["num_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            Router(
                "sigmoid",
                scale=config["moe_routed_scaling_factor"],
                softcap=config["moe_router_logit_softcapping"],
            ),
            shared_dim=config["shared_expert_intermediate_size"],
        ),
        Names(
            correction="experts.e_score_correction_bias",
            shared="shared_expert",
            in_transformers={
                "mlp.experts.e_score_correction_bias": (
                    "mlp.gate.e_score_correction_bias"
                ),
                "mlp.shared_expert.": "mlp.shared_experts.",
            },
        ),
        _dense(config),
    )


_LAGUNA_ROPE = {
    "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""That of transformers, where ``config.json`` has none."""


def _dense(config: Config) -> list[int]:
    """Returns the layers without experts; by default it is the first."""
    types = config["mlp_layer_types"]
    return [0] if types is None else [i for i, x in enumerate(types) if x == "dense"]


def gpt_oss(config: Config) -> Decoder:
    n_layers = config["num_hidden_layers"]
    alternating = ["sliding_attention", "full_attention"] * n_layers
    types = config["layer_types"] or alternating[:n_layers]
    bias = dict.fromkeys(("has_bias", "has_output_bias"), config["attention_bias"])
    rope = Rope.of(config)

    def of_layer(kind: str) -> Attention:
        window = config["sliding_window"] if kind != "full_attention" else None
        return attention(config, rope=rope, window=window, has_sinks=True, **bias)

    return decoder(
        config,
        [of_layer(kind) for kind in types],
        Moe(
            config["num_local_experts"],
            config["num_experts_per_tok"],
            config["intermediate_size"],
            Router(has_bias=True),
            is_clamped=True,
        ),
        Names(router="router", fused=(True,), is_interleaved=True, may_be_mxfp4=True),
    )
