# SPDX-License-Identifier: Apache-2.0
"""Fields of ``config.json``, a closed list for each architecture.

A field that changes results is served with the values that its rule takes. A field
whose rule is :func:`free` does not change results. What is not on the list is refused:
nobody has compared what it does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..limits import MAX_TOP_K
from ..moe_shape import SUPPORTED
from . import rope
from .rule import (
    NEEDED,
    Rule,
    each,
    flag,
    free,
    is_whole,
    named,
    needed,
    only,
    optional,
    real,
    shown,
    whole,
)

_MOST_LAYERS = 1024
_MOST_EXPERTS = 1 << 18
"""Most layers, and experts of all of them: far above any model, and so few that each
tensor can be looked for by name."""

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")

_IDS = Rule(
    lambda v: (
        v is None
        or is_whole(v, 0)
        or (isinstance(v, list) and all(is_whole(x, 0) for x in v))
    ),
    "an id, a list of ids or null",
)

_LABELS = Rule(
    lambda v: isinstance(v, dict) and all(key.isdigit() for key in v),
    "an object with numbers as names",
)

GENERATION = (
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff "
    "eta_cutoff exponential_decay_length_penalty forced_bos_token_id "
    "forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams "
    "num_return_sequences output_scores remove_invalid_values repetition_penalty "
    "return_dict_in_generate suppress_tokens target_lookbehind temperature top_k "
    "top_p typical_p"
).split()
"""Fields of ``generation_config.json``; transformers drops them from ``config.json``,
and MAX does not read them there."""

_FREE = (
    "_attn_implementation _commit_hash _experts_implementation _name_or_path "
    "attention_dropout attn_implementation auto_map chunk_size_feed_forward "
    "decoder_start_token_id experts_implementation finetuning_task id2label "
    "initializer_range label2id max_new_tokens max_window_layers min_new_tokens "
    "model_name name_or_path num_labels output_attentions output_hidden_states "
    "output_router_logits prefix pretraining_tp problem_type return_dict "
    "router_aux_loss_coef task_specific_params tf_legacy_loss tokenizer_class "
    "torchscript transformers.js_config transformers_version unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache"
).split()
"""What does not change results: of training, of files, of other programs."""

_COMMON: dict[str, Rule] = {
    **{name: free() for name in (*GENERATION, *_FREE, *rope.FIELDS)},
    "dtype": optional(only(*_DTYPES)),
    "torch_dtype": optional(only(*_DTYPES)),
    "attention_dropout": free(0.0, float, int),
    "chunk_size_feed_forward": free(0, int),
    "id2label": optional(_LABELS),
    "initializer_range": free(0.02, float),
    "label2id": optional(free(None, dict)),
    "num_labels": whole(2, least=0, most=1000),
    "output_hidden_states": optional(flag(False))._replace(default=False),
    "problem_type": only(None),
    "return_dict": optional(flag(True))._replace(default=True),
    "transformers_version": optional(free(None, str)),
    "use_cache": flag(True),
    "architectures": needed(free()),
    "bos_token_id": optional(whole(None, least=0)),
    "eos_token_id": _IDS,
    "pad_token_id": optional(whole(None, least=0)),
    "sep_token_id": optional(whole(None, least=0)),
    "hidden_act": only("silu"),
    "hidden_size": whole(),
    "intermediate_size": whole(),
    "is_decoder": flag(False),
    "is_encoder_decoder": only(False),
    "add_cross_attention": only(False),
    "tie_encoder_decoder": only(False),
    "cross_attention_hidden_size": only(None),
    "max_position_embeddings": whole(),
    "num_attention_heads": whole(),
    "num_experts_per_tok": whole(),
    "num_hidden_layers": whole(most=_MOST_LAYERS),
    "num_key_value_heads": whole(),
    "pruned_heads": only({}, None),
    "quantization_config": free(),
    "rms_norm_eps": real(1e-6),
    "tie_word_embeddings": flag(False),
    "vocab_size": whole(),
}

_ALL_FULL = each(only("full_attention"), default=None)

FIELDS: dict[str, dict[str, Rule]] = {
    "Qwen3MoeForCausalLM": {
        **_COMMON,
        "model_type": only("qwen3_moe"),
        "attention_bias": only(False),
        "decoder_sparse_step": whole(1),
        "head_dim": optional(whole()),
        "layer_types": optional(_ALL_FULL),
        "mlp_only_layers": optional(each(whole(least=0))),
        "moe_intermediate_size": whole(),
        "norm_topk_prob": flag(False),
        "num_experts": whole(),
        "num_local_experts": free(),  # must be num_experts
        "output_router_logits": flag(False),
        "qkv_bias": only(False),
        "router_aux_loss_coef": free(0.001, float),
        "shared_expert_intermediate_size": only(0, None),
        "sliding_window": optional(whole(4096, least=0))._replace(
            default=4096
        ),  # has no effect without use_sliding_window
        "use_qk_norm": only(True),
        "use_sliding_window": only(False),
    },
    "MiniMaxM2ForCausalLM": {
        **_COMMON,
        "model_type": only("minimax_m2"),
        "attention_bias": only(False),
        "attn_type_list": optional(each(only(1))),
        "head_dim": whole(128),
        "bos_token_id": optional(whole(None, least=0))._replace(default=200034),
        "eos_token_id": _IDS._replace(default=200020),
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
        "output_router_logits": flag(False),
        "qk_norm_type": only("per_layer"),
        "rotary_dim": free(),  # see rope.py
        "router_aux_loss_coef": free(0.001, float),
        "router_jitter_noise": free(0.0, float),  # of training
        "scoring_func": only("sigmoid"),
        "shared_intermediate_size": only(0),
        "shared_moe_mode": free(),  # of a shared expert
        "sliding_window": only(None, 0),
        "use_mtp": free(),
        "use_qk_norm": only(True),
        "use_routing_bias": only(True),
    },
    "DeepseekV3ForCausalLM": {
        **_COMMON,
        "model_type": only("deepseek_v3"),
        "attention_bias": only(False),
        "aux_loss_alpha": free(),
        "bos_token_id": optional(whole(None, least=0))._replace(default=0),
        "eos_token_id": _IDS._replace(default=1),
        "ep_size": free(),
        "first_k_dense_replace": whole(3, least=0),
        "head_dim": free(),  # must be qk_rope_head_dim
        "kv_lora_rank": whole(512),
        "moe_intermediate_size": whole(),
        "moe_layer_freq": only(1),
        "n_group": whole(8),
        "n_routed_experts": whole(),
        "n_shared_experts": whole(1),
        "norm_topk_prob": only(True),
        "num_local_experts": free(),  # must be n_routed_experts
        "num_nextn_predict_layers": whole(0, least=0),  # whose layers are skipped
        "pretraining_tp": free(1, int),
        "q_lora_rank": whole(1536),
        "qk_head_dim": free(),  # must be the sum of both
        "qk_nope_head_dim": whole(128),
        "qk_rope_head_dim": whole(64),
        "rope_interleave": only(True),
        "routed_scaling_factor": real(2.5),
        "scoring_func": only("sigmoid"),
        "seq_aux": free(),
        "tie_word_embeddings": only(False),
        "topk_group": whole(4),
        "topk_method": only("noaux_tc"),
        "v_head_dim": whole(128),
    },
}
"""For each architecture its fields, and which values are served."""

QUANTIZATION: dict[str, Rule] = {
    "quant_method": needed(only("fp8")),
    "weight_block_size": needed(
        Rule(
            lambda v: (
                isinstance(v, list) and len(v) == 2 and all(is_whole(x) for x in v)
            ),
            "a list of two integers from 1 on",
        )
    ),
    "activation_scheme": only("dynamic"),
    "fmt": only("e4m3", "float8_e4m3fn", None),
    "scale_fmt": only(None, "float", "float32", "ue8m0"),
    "dequantize": free(),
    "ignored_layers": free(),  # a matrix is in FP8 if it has scales
    "modules_to_not_convert": free(),
}
"""The same for ``quantization_config``."""

_EXPERTS = {
    "Qwen3MoeForCausalLM": "num_experts",
    "MiniMaxM2ForCausalLM": "num_local_experts",
    "DeepseekV3ForCausalLM": "n_routed_experts",
}
_ALIASES = ("num_experts", "num_local_experts")
"""Names that transformers has for the field of :data:`_EXPERTS`."""


def config_in(folder: Path) -> Any:
    """Reads ``config.json`` of a model's folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; name a model's folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def check_config(config: Any) -> dict[str, Any]:
    """Returns a ``config.json`` with transformers' values of fields that it lacks.

    Raises:
        ValueError: A model would not be served as transformers runs it; it names the
            field.
    """
    if not isinstance(config, dict):
        raise ValueError("config.json is not one of a model: it holds no names")
    architecture = _architecture(config)
    experts = _EXPERTS[architecture]
    for alias in _ALIASES:
        if config.get(alias) is not None and config.get(experts) is None:
            config = config | {experts: config[alias]}
    _check_rules(config, FIELDS[architecture], architecture)
    for alias in _ALIASES:
        if config.get(alias) not in (None, config[experts]):
            _refuse(f"{alias}={shown(config[alias])}", f"{experts}={config[experts]}")
    quantization = config.get("quantization_config")
    if quantization is not None:
        _check_quantization(quantization, architecture)
    full = {name: rule.default for name, rule in FIELDS[architecture].items()} | config
    _check_sizes(full, full[experts], architecture)
    rope.Rope.of(full)
    return full


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or ["no architecture"]
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"config.json: architectures={shown(names)} must be a list with the name "
            f"of a class, such as {next(iter(SUPPORTED))}"
        )
    if names[0] not in SUPPORTED:
        raise ValueError(
            f"config.json: architectures: {shown(names[0])} is not supported; there "
            f"are {', '.join(SUPPORTED)}"
        )
    return names[0]


def _check_rules(fields: dict[str, Any], rules: dict[str, Rule], of: str) -> None:
    """Refuses values that no rule takes, names without a rule, and what is missing."""
    for name, value in fields.items():
        if name not in rules:
            raise ValueError(
                f"config.json: {named(name)}={shown(value)} is not on max_ep's list "
                f"for {of}, so it may change results; remove the field if it does not, "
                "or serve the model without max_ep"
            )
        rule = rules[name]
        if not rule.takes(value) and not (value is None and rule.default is None):
            raise ValueError(
                f"config.json: {name}={shown(value)} is not served with {of}; served "
                f"is {rule.served}"
            )
    for name, rule in rules.items():
        if rule.default is NEEDED and fields.get(name) is None:
            raise ValueError(
                f"config.json of {of} is not complete: it has no {name}; add "
                f"{rule.served}"
            )


def _check_quantization(quantization: Any, architecture: str) -> None:
    if not isinstance(quantization, dict) or not quantization:
        raise ValueError(
            f"config.json: quantization_config={shown(quantization)} must be an object "
            "with quant_method and weight_block_size, or be left out"
        )
    if not quantization.get("weight_block_size"):
        method = quantization.get("quant_method", "quantized")
        raise ValueError(
            f"config.json: quantization_config: {architecture} in {shown(method)} "
            "without weight_block_size is not supported; take a checkpoint in "
            "bfloat16 or blockwise FP8"
        )
    of = f"{architecture}'s quantization_config"
    _check_rules(quantization, QUANTIZATION, of)


def _check_sizes(config: dict[str, Any], n_experts: int, architecture: str) -> None:
    """Refuses sizes that do not fit to each other."""
    top_k, heads = config["num_experts_per_tok"], config["num_attention_heads"]
    kv_heads, n_layers = config["num_key_value_heads"], config["num_hidden_layers"]
    name = _EXPERTS[architecture]
    if top_k > min(n_experts, MAX_TOP_K):
        most = f"{name}={n_experts}, and at most {MAX_TOP_K}"
        _refuse(f"num_experts_per_tok={top_k}", most)
    if n_layers * n_experts > _MOST_EXPERTS:
        most = f"num_hidden_layers={n_layers}: together at most {_MOST_EXPERTS} experts"
        _refuse(f"{name}={n_experts}", most)
    if heads % kv_heads:
        divisor = f"num_attention_heads={heads}, which it does not divide"
        _refuse(f"num_key_value_heads={kv_heads}", divisor)
    of_layers = config.get("layer_types")
    if of_layers is not None and len(of_layers) != n_layers:
        what = f"layer_types has {len(of_layers)} elements, which"
        _refuse(what, f"num_hidden_layers={n_layers}")
    for layer in config.get("mlp_only_layers") or ():
        if layer >= n_layers:
            _refuse(f"mlp_only_layers has {layer}", f"num_hidden_layers={n_layers}")
    if config.get("decoder_sparse_step", 1) > n_layers:
        step = config["decoder_sparse_step"]
        _refuse(f"decoder_sparse_step={step}", f"num_hidden_layers={n_layers}")
    if "head_dim" in config and not config["head_dim"]:
        if config["hidden_size"] % heads and architecture != "DeepseekV3ForCausalLM":
            hidden = f"hidden_size={config['hidden_size']}; add head_dim"
            _refuse(f"num_attention_heads={heads}", hidden)
    if architecture == "DeepseekV3ForCausalLM":
        _check_deepseek(config, n_experts, top_k)


def _check_deepseek(config: dict[str, Any], n_experts: int, top_k: int) -> None:
    nope, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    same = {
        "head_dim": ("qk_rope_head_dim", rotated),
        "qk_head_dim": ("qk_nope_head_dim + qk_rope_head_dim", nope + rotated),
        "num_key_value_heads": ("num_attention_heads", config["num_attention_heads"]),
    }
    for name, (other, wanted) in same.items():
        if config.get(name) not in (None, wanted):
            _refuse(f"{name}={shown(config[name])}", f"{other}={wanted}")
    n_groups, chosen = config["n_group"], config["topk_group"]
    if n_experts % n_groups:
        _refuse(f"n_group={n_groups}", f"n_routed_experts={n_experts}")
    if chosen > n_groups:
        _refuse(f"topk_group={chosen}", f"n_group={n_groups}")
    if top_k > chosen * n_experts // n_groups:
        of_groups = f"topk_group={chosen} of n_group={n_groups} groups"
        _refuse(f"num_experts_per_tok={top_k}", f"{of_groups} of {n_experts} experts")
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        n_layers = f"num_hidden_layers={config['num_hidden_layers']}"
        _refuse(f"first_k_dense_replace={config['first_k_dense_replace']}", n_layers)


def _refuse(what: str, other: str) -> None:
    raise ValueError(f"config.json: {what} does not fit to {other}")
