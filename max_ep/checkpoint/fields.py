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
from ..plural import counted
from .architectures import ARCHITECTURES, described
from .common import COMMON, MOST_EXPERTS
from .rule import NEEDED, Rule, free, named, only, shown

_ALIASES = ("num_experts", "num_local_experts")
"""Names that transformers has for the field with the number of experts."""

_TIED = "tie_word_embeddings"
"""Beside ``text_config`` it counts, in it not."""

_OF_LAYERS = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer")
"""Fields with an element for each layer."""


def config_in(folder: Path) -> Any:
    """Reads ``config.json`` of a model's folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; name a model's folder")
    return json_in(path)


def json_in(path: Path) -> Any:
    """Reads a file of a model's folder."""
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
    entry = ARCHITECTURES[architecture]
    config, experts = _text_config(config, architecture), entry.experts
    for alias in _ALIASES:
        if config.get(alias) is not None and config.get(experts) is None:
            config = config | {experts: config[alias]}
    _check_rules(config, entry.fields, architecture)
    for alias in _ALIASES:
        if config.get(alias) not in (None, config[experts]):
            _refuse(f"{alias}={shown(config[alias])}", f"{experts}={config[experts]}")
    quantization = config.get("quantization_config")
    if quantization is not None:
        _check_quantization(quantization, architecture)
    full = {name: rule.default for name, rule in entry.fields.items()} | config
    _check_sizes(full, full[experts], architecture)
    model = described(full)  # refuses rotary embeddings
    _check_same(full, model.dense_layers)
    if len(model.dense_layers) == len(model.layers):
        _refuse("no layer with experts", f"{experts}={full[experts]}")
    return full


def _text_config(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the fields of the text model, where those of others stand beside it."""
    outer = ARCHITECTURES[architecture].outer_fields
    if outer is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(
            f"config.json: text_config={shown(text)} must be an object with the "
            f"fields of the text model of {architecture}"
        )
    # transformers parses them here, too, though they do not count.
    objects = dict.fromkeys(("rope_parameters", "rope_scaling"), only(None, {}))
    optional_ones = {
        name: rule._replace(default=None) if rule.default is NEEDED else rule
        for name, rule in (COMMON | objects).items()
    }
    _check_rules(config, optional_ones | outer, architecture)
    # What transformers parses, though it does not count.
    kinds = {"architectures": free(None, list), "quantization_config": free(None, dict)}
    own = ARCHITECTURES[architecture].own_fields[_TIED]
    parsed = {name: text[name] for name in (*kinds, _TIED) if name in text}
    _check_rules(parsed, {**kinds, _TIED: own}, f"text_config of {architecture}")
    counting = ("architectures", "quantization_config")
    is_tied = config.get("tie_word_embeddings", False)
    return text | {name: config.get(name) for name in counting} | {_TIED: is_tied}


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or ["no architecture"]
    if not isinstance(names, list) or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"config.json: architectures={shown(names)} must be a list with the name "
            f"of a class, such as {next(iter(ARCHITECTURES))}"
        )
    if names[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json: architectures: {shown(names[0])} is not supported; there "
            f"are {', '.join(ARCHITECTURES)}"
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
    rules = ARCHITECTURES[architecture].quantization
    if "weight_block_size" in rules and not quantization.get("weight_block_size"):
        method = quantization.get("quant_method", "quantized")
        raise ValueError(
            f"config.json: quantization_config: {architecture} in {shown(method)} "
            "without weight_block_size is not supported; take a checkpoint in "
            "bfloat16 or blockwise FP8"
        )
    _check_rules(quantization, rules, f"{architecture}'s quantization_config")


def _check_sizes(config: dict[str, Any], n_experts: int, architecture: str) -> None:
    """Refuses sizes that do not fit to each other."""
    top_k, heads = config["num_experts_per_tok"], config["num_attention_heads"]
    kv_heads, n_layers = config["num_key_value_heads"], config["num_hidden_layers"]
    name = ARCHITECTURES[architecture].experts
    if top_k > min(n_experts, MAX_TOP_K):
        most = f"{name}={n_experts}, and at most {MAX_TOP_K}"
        _refuse(f"num_experts_per_tok={top_k}", most)
    if n_layers * n_experts > MOST_EXPERTS:
        most = f"num_hidden_layers={n_layers}: together at most {MOST_EXPERTS} experts"
        _refuse(f"{name}={n_experts}", most)
    if heads % kv_heads:
        divisor = f"num_attention_heads={heads}, which it does not divide"
        _refuse(f"num_key_value_heads={kv_heads}", divisor)
    for of_layers in _OF_LAYERS:
        values = config.get(of_layers)
        if values is not None and len(values) != n_layers:
            what = f"{of_layers} has {counted(len(values), 'element')}, which"
            _refuse(what, f"num_hidden_layers={n_layers}")
    for of_layer in config.get("num_attention_heads_per_layer") or ():
        if of_layer % kv_heads:
            what = f"num_attention_heads_per_layer has {of_layer}, which"
            _refuse(what, f"num_key_value_heads={kv_heads}")
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
    if config.get("experts_per_token") not in (None, top_k):
        given = shown(config["experts_per_token"])
        _refuse(f"experts_per_token={given}", f"num_experts_per_tok={top_k}")
    if "n_group" in config:
        _check_groups(config, n_experts, top_k)


def _check_same(config: dict[str, Any], dense: list[int]) -> None:
    """Refuses other values than those that other fields say; ``dense`` are the layers
    without experts."""
    for name, (other, wanted) in _said_twice(config, dense).items():
        if config.get(name) not in (None, wanted):
            _refuse(f"{name}={shown(config[name])}", f"{other}={wanted}")


def _said_twice(config: dict[str, Any], dense: list[int]) -> dict[str, Any]:
    """Returns fields that other fields decide, those and their values."""
    architecture = config["architectures"][0]
    if architecture == "DeepseekV3ForCausalLM":
        nope, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        return {
            "head_dim": ("qk_rope_head_dim", rotated),
            "qk_head_dim": ("qk_nope_head_dim + qk_rope_head_dim", nope + rotated),
            "num_key_value_heads": (
                "num_attention_heads",
                config["num_attention_heads"],
            ),
        }
    without = "layers without experts by mlp_layer_types"
    if architecture == "HYV3ForCausalLM":
        is_prefix = dense == [*range(len(dense))]
        return {
            "expert_hidden_dim": (
                "moe_intermediate_size",
                config["moe_intermediate_size"],
            ),
            "first_k_dense_replace": (without, len(dense) if is_prefix else dense),
        }
    if architecture == "LagunaForCausalLM":
        return {"mlp_only_layers": (without, dense)}
    return {}


def _check_groups(config: dict[str, Any], n_experts: int, top_k: int) -> None:
    """Refuses groups of experts, and more dense layers than there are layers."""
    n_groups, chosen = config["n_group"], config["topk_group"]
    if n_experts % n_groups:
        _refuse(f"n_group={n_groups}", f"n_routed_experts={n_experts}")
    if n_groups > 1 and n_experts // n_groups < 2:
        two = f"n_routed_experts={n_experts}: groups have two experts or more"
        _refuse(f"n_group={n_groups}", two)
    if chosen > n_groups:
        _refuse(f"topk_group={chosen}", f"n_group={n_groups}")
    if top_k > chosen * n_experts // n_groups:
        of_groups = f"topk_group={chosen} of n_group={counted(n_groups, 'group')}"
        _refuse(
            f"num_experts_per_tok={top_k}",
            f"{of_groups} of {counted(n_experts, 'expert')}",
        )
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        n_layers = f"num_hidden_layers={config['num_hidden_layers']}"
        _refuse(f"first_k_dense_replace={config['first_k_dense_replace']}", n_layers)


def _refuse(what: str, other: str) -> None:
    raise ValueError(f"config.json: {what} does not fit to {other}")
