# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings of a checkpoint, as transformers computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from ..plural import counted
from .rule import NEEDED, Rule, flag, free, named, number, only, optional, shown, whole

_DEFAULT_THETA = {
    "MiniMaxM2ForCausalLM": 5e6,
    "MixtralForCausalLM": 1e6,
    "GptOssForCausalLM": 150000.0,
    "HYV3ForCausalLM": 11158840.0,
    "LagunaForCausalLM": None,  # none
    "Qwen3VLMoeForConditionalGeneration": 500000.0,
}
"""In transformers, where it is not 1e4."""

_DEFAULT = {
    "GptOssForCausalLM": dict(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )
}
"""``rope_parameters`` of transformers, where ``config.json`` has none."""

_ANY_TYPE = {
    "rope_theta": Rule(
        lambda v: number().takes(v) and v > 1, "a number above 1", NEEDED
    )
}
_YARN = {
    "factor": number(),
    "original_max_position_embeddings": whole(),
    "attention_factor": optional(number()),
    "beta_fast": optional(number()),
    "beta_slow": optional(number()),
    "mscale": optional(number()),
    "mscale_all_dim": optional(number()),
    "truncate": flag(True),
}
_WHOLE_HEAD = {"partial_rotary_factor": only(1, default=None)}
PART_OF_HEAD = Rule(
    lambda v: type(v) in (int, float) and 0 < v <= 1,
    "a number above 0, at most 1",
)
_PART_OF_HEAD = {"partial_rotary_factor": PART_OF_HEAD}


def _all_kinds(more: dict[str, Rule]) -> dict[str, dict[str, Rule]]:
    """Returns the kinds of :meth:`Rope.inverse_frequencies`."""
    return {
        "default": more,
        "linear": {"factor": number(), **more},
        "llama3": {
            "factor": number(),
            "low_freq_factor": number(),
            "high_freq_factor": number(),
            "original_max_position_embeddings": whole(),
            **more,
        },
        "yarn": _YARN | more,
    }


_SERVED: dict[str, dict[str, dict[str, Rule]]] = {
    **dict.fromkeys(
        (
            "Qwen3MoeForCausalLM",
            "MixtralForCausalLM",
            "Qwen2MoeForCausalLM",
            "OlmoeForCausalLM",
            "GptOssForCausalLM",
            "HYV3ForCausalLM",
        ),
        _all_kinds(_WHOLE_HEAD),
    ),
    "Glm4MoeForCausalLM": _all_kinds(_PART_OF_HEAD),
    # transformers does not read it where each kind of layers has parameters.
    "LagunaForCausalLM": _all_kinds(_PART_OF_HEAD | {"truncate": only(True)}),
    "MiniMaxM2ForCausalLM": {"default": _PART_OF_HEAD},
    # Sections are for the positions of images; those of text are all the same.
    "Qwen3VLMoeForConditionalGeneration": {
        "default": {
            **_WHOLE_HEAD,
            "mrope_section": free(),
            "mrope_interleaved": free(),
        }
    },
    # MAX's; `mscale` and `mscale_all_dim` must be the same.
    "DeepseekV3ForCausalLM": {
        "yarn": {
            **_YARN,
            "attention_factor": only(None),
            "beta_fast": number(),
            "beta_slow": number(),
            "mscale": number(),
            "mscale_all_dim": number(),
            "truncate": only(True),
            **_WHOLE_HEAD,
        }
    },
}
"""For each architecture, types and their fields in ``rope_parameters``."""

_OUTSIDE = ("rope_theta", "partial_rotary_factor")
FIELDS = ("rope_parameters", "rope_scaling", *_OUTSIDE)
"""Fields of ``config.json`` that are read here; and ``rotary_dim`` of MiniMax-M2."""


@dataclass(frozen=True)
class Rope:
    """Frequencies of a model's rotary embeddings."""

    kind: str
    """``rope_type``."""
    dim: int
    """Elements of a head that are rotated."""
    parameters: Mapping[str, Any]
    """Checked, with defaults."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """Reads a checkpoint's ``config.json``, or what transformers makes of it; its
        sizes have been checked."""
        architecture = config["architectures"][0]
        field, found = _parameters(config, architecture)
        kind = found.pop("rope_type", found.pop("type", "default"))
        found.pop("type", None)
        types = _SERVED[architecture]
        if not isinstance(kind, str) or kind not in types:
            raise ValueError(
                f"config.json: {field} of type {shown(kind)} is not served with "
                f"{architecture}; served is {' or '.join(types)}"
            )
        factor, beside = (x.get("partial_rotary_factor") for x in (found, config))
        # transformers takes the second of them, and of the kind default the first.
        if kind != "default" and beside not in (None, factor):
            raise ValueError(
                f"config.json: {field} has partial_rotary_factor={shown(factor)}, and "
                f"beside it is {shown(beside)}; write the right one twice"
            )
        rules = _ANY_TYPE | types[kind]
        if "original_max_position_embeddings" in rules:
            original = config.get("max_position_embeddings")
            found.setdefault("original_max_position_embeddings", original)
        for name, value in found.items():
            rule = rules.get(name)
            if rule is None:
                raise ValueError(
                    f"config.json: {field} has {named(name)}={shown(value)}, which is "
                    f"not on max_ep's list for the type {kind}: {', '.join(rules)}"
                )
            if not rule.takes(value):
                raise ValueError(
                    f"config.json: {field} has {name}={shown(value)}; served with "
                    f"{architecture} is {rule.served}"
                )
        parameters = {name: rule.default for name, rule in rules.items()} | found
        for name, value in parameters.items():
            if value is NEEDED:
                raise ValueError(
                    f"config.json: {field} of type {kind} has no {name}; add "
                    f"{rules[name].served}"
                )
        dim = _rotated(config, architecture, parameters)
        if architecture == "DeepseekV3ForCausalLM":
            _check_deepseek(field, dim, parameters)
        return cls(kind, dim, parameters)

    def inverse_frequencies(self) -> tuple[np.ndarray, float]:
        """Returns them, float32 ``[dim / 2]``, and a factor of cosines and sines."""
        p = self.parameters
        steps = np.arange(0, self.dim, 2).astype(np.float32) / np.float32(self.dim)
        wide = np.float32(p["rope_theta"]) ** steps
        plain = np.float32(1) / wide
        if self.kind == "linear":
            return plain / np.float32(p["factor"]), 1.0
        if self.kind == "llama3":
            return _llama3(plain, p), 1.0
        if self.kind == "yarn":
            return _yarn(wide, self.dim, p), _yarn_attention_factor(p)
        return plain, 1.0


def _parameters(
    config: Mapping[str, Any], architecture: str
) -> tuple[str, dict[str, Any]]:
    """Returns the field that has them, and them: as transformers merges fields."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    for name in ("rope_parameters", field):
        if not isinstance(config.get(name), (dict, NoneType)):
            raise ValueError(
                f"config.json: {name}={shown(config[name])} must be an object with "
                "rope_type, or null"
            )
    given = config.get(field)
    found = dict(_DEFAULT.get(architecture, {}) if given is None else given)
    for name in _OUTSIDE:
        if config.get(name) is not None:
            found.setdefault(name, config[name])
    found.setdefault("rope_theta", _DEFAULT_THETA.get(architecture, 1e4))
    return field, found


def _rotated(
    config: Mapping[str, Any], architecture: str, parameters: dict[str, Any]
) -> int:
    """Returns the elements of a head that are rotated."""
    if architecture == "DeepseekV3ForCausalLM":
        head = config["qk_rope_head_dim"]
    else:
        head = config.get("head_dim")
        head = head or config["hidden_size"] // config["num_attention_heads"]
    factor, named = parameters["partial_rotary_factor"], config.get("rotary_dim")
    if named is not None and factor is None:
        if type(named) is not int or not 0 < named <= head:
            raise ValueError(
                f"config.json: rotary_dim={shown(named)} must be an integer in "
                f"[1, {head}], of head_dim {head}"
            )
        dim = named
    else:
        dim = int(head * (1 if factor is None else factor))
        if named not in (None, dim):
            raise ValueError(
                f"config.json: rotary_dim={shown(named)} does not fit to "
                f"partial_rotary_factor={factor} of head_dim {head}"
            )
    if dim < 2 or dim % 2:
        raise ValueError(
            f"config.json: {counted(dim, 'element')} of a head are rotated, of "
            f"head_dim {head}; it must be an even number"
        )
    return dim


def _check_deepseek(field: str, dim: int, parameters: dict[str, Any]) -> None:
    """Refuses what MAX computes in another way than transformers."""
    of = "with DeepseekV3ForCausalLM"
    one, other = parameters["mscale"], parameters["mscale_all_dim"]
    if one != other:
        raise ValueError(
            f"config.json: {field} has mscale={one} and mscale_all_dim={other}; served "
            f"{of} are equal ones"
        )
    theta = parameters["rope_theta"]
    if theta != int(theta):
        raise ValueError(f"config.json: rope_theta={theta} must be a whole number {of}")
    high = _turning(parameters["beta_slow"], dim, parameters)
    if math.ceil(high) != math.trunc(high) + 1:  # as MAX rounds up
        original = parameters["original_max_position_embeddings"]
        raise ValueError(
            f"config.json: {field} has beta_slow={parameters['beta_slow']} and "
            f"original_max_position_embeddings={original}; served {of} is a length "
            "above 2 * pi * beta_slow"
        )


def _llama3(plain: np.ndarray, p: Mapping[str, Any]) -> np.ndarray:
    """Divides low frequencies, and some of those between."""
    original, factor = p["original_max_position_embeddings"], p["factor"]
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    lengths = 2 * math.pi / plain
    with np.errstate(divide="ignore", invalid="ignore"):
        smooth = (original / lengths - low) / np.float32(high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    slow = np.where(lengths > original / low, plain / factor, plain)
    is_between = (lengths >= original / high) & (lengths <= original / low)
    return np.where(is_between, between, slow).astype(np.float32)


def _turning(n_rotations: float, dim: int, p: Mapping[str, Any]) -> float:
    """Returns the place among frequencies of one that turns so often in the original
    length."""
    turns = p["original_max_position_embeddings"] / (n_rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(p["rope_theta"]))


def _yarn(wide: np.ndarray, dim: int, p: Mapping[str, Any]) -> np.ndarray:
    """Divides low frequencies, and a part of those between."""
    fast, slow = p["beta_fast"] or 32, p["beta_slow"] or 1
    low, high = _turning(fast, dim, p), _turning(slow, dim, p)
    if p["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 * (low == high)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / np.float32(high - low)
    kept = 1 - ramp.clip(0, 1)
    one = np.float32(1)
    divided = one / (np.float32(p["factor"]) * wide)
    return (divided * (1 - kept) + one / wide * kept).astype(np.float32)


def _yarn_attention_factor(p: Mapping[str, Any]) -> float:
    factor = p["factor"]

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if p["attention_factor"] is not None:
        return p["attention_factor"]
    if p["mscale"] and p["mscale_all_dim"]:
        return scale(p["mscale"]) / scale(p["mscale_all_dim"])
    return scale(1)
