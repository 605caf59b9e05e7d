# SPDX-License-Identifier: Apache-2.0
"""The architectures that are served, one entry each.

An entry has the fields of ``config.json`` beyond those that all models have, and makes
of them the description of a decoder. docs/serving.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from . import describe
from .common import COMMON, IDS, MXFP4, QUANTIZATION
from .decoder import Decoder, LatentAttention
from .rope import PART_OF_HEAD
from .rule import (
    Rule,
    each,
    flag,
    free,
    is_whole,
    needed,
    only,
    optional,
    real,
    whole,
)

Config = Mapping[str, Any]

PLACES = ("the CPU", "one GPU", "several GPUs")


class Architecture(NamedTuple):
    """One class of transformers."""

    places: tuple[str, ...]
    """Where it is served: the table of docs/serving.md."""
    experts: str
    """The field with the number of experts."""
    decoder: Callable[[Config], Decoder]
    """Makes the description of a checked ``config.json``."""
    own_fields: dict[str, Rule]
    outer_fields: dict[str, Rule] | None = None
    """Fields beside ``text_config``, if the fields above are in it."""
    quantization: dict[str, Rule] = QUANTIZATION
    """Fields of ``quantization_config``."""
    compared: tuple[str, ...] = ()
    """Where its answers were compared with those of transformers."""
    parser: str | None = None
    """MAX's name for the format of thoughts in answers, and of calls of tools; None:
    answers are plain text."""

    @property
    def fields(self) -> dict[str, Rule]:
        """Returns the rules of all fields."""
        return COMMON | self.own_fields


_ALL_FULL = each(only("full_attention"), default=None)
_LAYER_TYPES = each(only("full_attention", "sliding_attention"), default=None)
_MLP_TYPES = each(only("dense", "sparse"), default=None)

_FLOAT32 = ("enable_attention_fp32_softmax", "enable_lm_head_fp32")
_RMS_1E5 = real(1e-5)
_TRAINING = {
    "output_router_logits": flag(False),
    "router_aux_loss_coef": free(0.001, float),
}


def _id(default: int) -> Rule:
    return optional(whole(None, least=0))._replace(default=default)


def _window(*default: int) -> Rule:
    """Takes what MAX's attention takes, which on the CPU masks 16 tokens at once."""
    return whole(*default, least=16)


_RANK = Rule(
    lambda v: is_whole(v) and v % 8 == 0,
    "a multiple of 8: MAX's matmul compiles for no other",
    1536,
)

_QWEN3_FIELDS = {
    "attention_bias": only(False),
    "decoder_sparse_step": whole(1),
    "head_dim": optional(whole()),
    "mlp_only_layers": optional(each(whole(least=0))),
    "moe_intermediate_size": whole(),
    "num_experts": whole(),
    "num_local_experts": free(),  # must be num_experts
}

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3MoeForCausalLM": Architecture(
        PLACES,
        "num_experts",
        describe.qwen3,
        {
            **_QWEN3_FIELDS,
            **_TRAINING,
            "model_type": needed(only("qwen3_moe")),
            "layer_types": optional(_ALL_FULL),
            "norm_topk_prob": flag(False),
            "qkv_bias": only(False),
            "shared_expert_intermediate_size": only(0, None),
            "sliding_window": optional(whole(4096, least=0))._replace(
                default=4096
            ),  # has no effect without use_sliding_window
            "use_qk_norm": only(True),
            "use_sliding_window": only(False),
        },
        compared=PLACES,
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        PLACES,
        "num_local_experts",
        describe.minimax,
        {
            **_TRAINING,
            "model_type": needed(only("minimax_m2")),
            "attention_bias": only(False),
            "attn_type_list": optional(each(only(1))),
            "head_dim": whole(128),
            "bos_token_id": _id(200034),
            "eos_token_id": IDS._replace(default=200020),
            "layer_types": optional(_ALL_FULL),
            "layernorm_full_attention_beta": only(1),
            "layernorm_linear_attention_beta": only(1),
            "layernorm_mlp_beta": only(1),
            "mlp_intermediate_size": free(),  # of layers that the model does not have
            "mtp_transformer_layers": free(),
            "norm_topk_prob": only(True),
            "num_experts": free(),  # must be num_local_experts
            "num_local_experts": whole(),
            "num_mtp_modules": free(),
            "qk_norm_type": only("per_layer"),
            "rotary_dim": free(),  # see rope.py
            "router_jitter_noise": free(0.0, float),  # of training
            "scoring_func": only("sigmoid"),
            "shared_intermediate_size": only(0),
            "shared_moe_mode": free(),  # of a shared expert
            "sliding_window": only(None, 0),
            "use_mtp": free(),
            "use_qk_norm": only(True),
            "use_routing_bias": only(True),
        },
        compared=PLACES[:2],
        parser="minimax_m2",
    ),
    "DeepseekV3ForCausalLM": Architecture(
        PLACES[1:],
        "n_routed_experts",
        describe.deepseek,
        {
            "model_type": needed(only("deepseek_v3", "kimi_k2")),
            "attention_bias": only(False),
            "aux_loss_alpha": free(),
            "bos_token_id": _id(0),
            "eos_token_id": IDS._replace(default=1),
            "ep_size": free(),
            "first_k_dense_replace": whole(3, least=0),
            "head_dim": free(),  # must be qk_rope_head_dim
            "kv_lora_rank": only(512),
            "moe_intermediate_size": whole(),
            "moe_layer_freq": only(1),
            "n_group": whole(8),
            "n_routed_experts": whole(),
            "n_shared_experts": whole(1),
            "norm_topk_prob": only(True),
            "num_local_experts": free(),  # must be n_routed_experts
            "num_nextn_predict_layers": whole(0, least=0),  # whose layers are skipped
            "pretraining_tp": free(1, int),
            "q_lora_rank": _RANK,
            "qk_head_dim": free(),  # must be the sum of both
            "qk_nope_head_dim": only(128),
            "qk_rope_head_dim": only(64),
            "rope_interleave": only(True),
            "routed_scaling_factor": real(2.5),
            "scoring_func": only("sigmoid"),
            "seq_aux": free(),
            "tie_word_embeddings": only(False),
            "topk_group": whole(4),
            "topk_method": only("noaux_tc"),
            "v_head_dim": only(128),
        },
    ),
    "MixtralForCausalLM": Architecture(
        PLACES,
        "num_local_experts",
        describe.mixtral,
        {
            **_TRAINING,
            "model_type": needed(only("mixtral")),
            "bos_token_id": _id(1),
            "eos_token_id": IDS._replace(default=2),
            "head_dim": optional(whole()),
            "num_experts": free(),  # must be num_local_experts
            "num_local_experts": whole(),
            "rms_norm_eps": _RMS_1E5,
            "router_jitter_noise": free(0.0, float),  # of training
            "sliding_window": only(None),
        },
        compared=PLACES,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        PLACES,
        "num_experts",
        describe.qwen2,
        {
            **_TRAINING,
            "model_type": needed(only("qwen2_moe")),
            "decoder_sparse_step": whole(1),
            "layer_types": optional(_ALL_FULL),
            "max_window_layers": free(28, int),  # only with use_sliding_window
            "mlp_only_layers": optional(each(whole(least=0))),
            "moe_intermediate_size": whole(),
            "norm_topk_prob": flag(False),
            "num_experts": whole(),
            "num_local_experts": only(None),  # transformers does not read it
            "qkv_bias": flag(True),
            "shared_expert_intermediate_size": whole(5632),
            "sliding_window": optional(whole(4096, least=0))._replace(
                default=4096
            ),  # has no effect without use_sliding_window
            "use_sliding_window": only(False),
        },
        compared=PLACES[:1],
    ),
    "OlmoeForCausalLM": Architecture(
        PLACES,
        "num_experts",
        describe.olmoe,
        {
            "model_type": needed(only("olmoe")),
            "attention_bias": flag(False),
            "clip_qkv": real(None),
            "eos_token_id": IDS._replace(default=50279),
            "norm_topk_prob": flag(False),
            "num_experts": whole(),
            "num_local_experts": free(),  # must be num_experts
            "output_router_logits": flag(False),
            "pad_token_id": _id(1),
            "rms_norm_eps": _RMS_1E5,
            "router_aux_loss_coef": free(0.01, float),
        },
        compared=PLACES[:1],
    ),
    "Glm4MoeForCausalLM": Architecture(
        PLACES,
        "n_routed_experts",
        describe.glm4,
        {
            "model_type": needed(only("glm4_moe")),
            "attention_bias": flag(False),
            "first_k_dense_replace": whole(1, least=0),
            "head_dim": optional(whole()),
            "moe_intermediate_size": whole(),
            "n_group": whole(1),
            "n_routed_experts": whole(),
            "n_shared_experts": whole(1),
            "norm_topk_prob": flag(True),
            "num_local_experts": free(),  # must be n_routed_experts
            "num_nextn_predict_layers": whole(0, least=0),  # whose layers are skipped
            # In transformers null is 1.
            "partial_rotary_factor": PART_OF_HEAD._replace(default=0.5),
            "rms_norm_eps": _RMS_1E5,
            "routed_scaling_factor": real(1.0),
            "topk_group": whole(1),
            "use_qk_norm": flag(False),
        },
        compared=PLACES[:1],
    ),
    "GptOssForCausalLM": Architecture(
        PLACES[1:],  # of windows on the CPU MAX's compiler takes too much memory
        "num_local_experts",
        describe.gpt_oss,
        {
            "model_type": needed(only("gpt_oss")),
            "attention_bias": flag(True),
            "experts_per_token": free(),  # must be num_experts_per_tok
            "head_dim": whole(64),
            "initial_context_length": free(),
            "layer_types": optional(_LAYER_TYPES),
            "num_experts": free(),  # must be num_local_experts
            "num_local_experts": whole(),
            "output_router_logits": flag(False),
            "rms_norm_eps": _RMS_1E5,
            "router_aux_loss_coef": free(0.001, float),
            "sliding_window": _window(128),
            "swiglu_limit": only(7.0),
        },
        quantization=MXFP4,
    ),
    "HYV3ForCausalLM": Architecture(
        PLACES,
        "num_experts",
        describe.hyv3,
        {
            "model_type": needed(only("hy_v3")),
            "attention_bias": only(False),
            "attention_dropout": free(0.0, float),
            **dict.fromkeys(_FLOAT32, free()),  # as far as results are rounded
            "enable_moe_fp32_combine": flag(True),  # the same
            "eod_token_id": free(),  # ends documents in training
            "expert_hidden_dim": free(),  # must be moe_intermediate_size
            "first_k_dense_replace": free(),  # must be what mlp_layer_types says
            "head_dim": whole(128),
            "initializer_range": free(0.006, float),
            "mlp_bias": only(False),
            "mlp_layer_types": optional(_MLP_TYPES),
            "moe_intermediate_size": whole(),
            "moe_router_enable_expert_bias": only(True),
            "moe_router_use_sigmoid": only(True),
            "num_experts": whole(),
            "num_local_experts": free(),  # must be num_experts
            "num_nextn_predict_layers": whole(0, least=0),  # whose layers are skipped
            "num_shared_experts": whole(1),
            "output_router_logits": flag(False),
            "qk_norm": only(True),
            "rms_norm_eps": _RMS_1E5,
            "route_norm": only(True),
            "router_scaling_factor": real(2.826),
            "use_grouped_mm": free(),
        },
        compared=PLACES[:2],
    ),
    "LagunaForCausalLM": Architecture(
        PLACES[1:],  # of windows on the CPU MAX's compiler takes too much memory
        "num_experts",
        describe.laguna,
        {
            **_TRAINING,
            "model_type": needed(only("laguna")),
            "attention_bias": only(False),
            "decoder_sparse_step": only(1),
            "gating": only(True, "per-head"),
            "gating_types": optional(each(only("per_head"))),
            "head_dim": whole(128),
            "layer_types": optional(_LAYER_TYPES),
            "mlp_layer_types": optional(_MLP_TYPES),
            # Must be what mlp_layer_types says.
            "mlp_only_layers": optional(each(whole(least=0))),
            "moe_apply_router_weight_on_input": only(False),
            "moe_intermediate_size": whole(),
            "moe_routed_scaling_factor": real(1.0),
            "moe_router_logit_softcapping": Rule(
                lambda v: type(v) is float and 0 <= v < float("inf"),
                "a number from 0 on with a decimal point",
                0.0,
            ),
            "moe_router_use_sigmoid": only(True),
            "norm_topk_prob": only(True),
            "num_attention_heads_per_layer": optional(each(whole())),
            "partial_rotary_factor": only(None),  # may replace those of kinds
            "qkv_bias": only(False),
            "rope_scaling": only(None),
            "num_experts": whole(),
            "num_local_experts": only(None),  # transformers does not read it
            "shared_expert_intermediate_size": whole(512),
            "sliding_window": _window(512),
            "swa_attention_sink_enabled": only(False),
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        PLACES,
        "num_experts",
        partial(describe.qwen3, names=describe.QWEN3_VL_NAMES),
        {
            **_QWEN3_FIELDS,
            "model_type": only("qwen3_vl_moe_text"),
            "attention_bias": flag(False),
            "norm_topk_prob": only(True),
            "router_aux_loss_coef": free(0.001, float),
            "sliding_window": only(None),
            "tie_word_embeddings": free(True, bool),  # that beside text_config counts
        },
        outer_fields={
            "model_type": needed(only("qwen3_vl_moe")),
            "image_token_id": free(151655, int),
            "text_config": free(),
            "tie_word_embeddings": flag(False),
            "video_token_id": free(151656, int),
            "vision_config": free(),  # text alone is served
            "vision_end_token_id": free(151653, int),
            "vision_start_token_id": free(151652, int),
        },
        compared=PLACES[:1],
    ),
}
"""By the name in ``architectures`` of ``config.json``."""


def described(config: Config) -> Decoder:
    """Returns what a checked ``config.json`` says; there is no other source of a
    model's sizes."""
    return ARCHITECTURES[config["architectures"][0]].decoder(config)


def check_place(architecture: str, n_gpus: int) -> None:
    """Refuses an architecture that is not served on so many GPUs; 0: the CPU."""
    place, places = _place(n_gpus), ARCHITECTURES[architecture].places
    if place not in places:
        raise ValueError(
            f"{architecture} is not served on {place}, but on {' and '.join(places)}; "
            "`max serve` without max_ep may serve it there"
        )


BIASES = "biases of experts have no replicas"


def why_not_balanced(config: Config, n_ranks: int) -> str:
    """Returns why experts of a checked ``config.json`` cannot move while they are
    served, or ""."""
    architecture, model = config["architectures"][0], described(config)
    if n_ranks == 1:
        return "one rank has all experts, so nothing is to be balanced"
    if isinstance(model.layers[0].attention, LatentAttention):
        return f"MAX's own model serves {architecture}, and its experts cannot move"
    return BIASES if model.moe.is_clamped else ""


def what_was_not_compared(architecture: str, n_gpus: int) -> str:
    """Returns a sentence for users, or "" if answers were compared there."""
    if _place(n_gpus) in ARCHITECTURES[architecture].compared:
        return ""
    return (
        f"answers of {architecture} on {_place(n_gpus)} were not compared with those "
        "of transformers yet"
    )


def what_transformers_ignores(config: Config) -> str:
    """Returns a sentence for users if transformers 5.12 reads a checked ``config.json``
    in another way than the authors of the checkpoint, or ""."""
    size = config.get("rotary_dim")
    if size is None or size == config["head_dim"]:
        return ""
    if described(config).layers[0].attention.rope.parameters["partial_rotary_factor"]:
        return ""
    return (
        f"rotary_dim={size} counts, as in the authors' code; transformers 5.12 ignores "
        "it, and rotates whole heads"
    )


def _place(n_gpus: int) -> str:
    return PLACES[min(n_gpus, 2)]
