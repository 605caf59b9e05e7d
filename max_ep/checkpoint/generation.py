# SPDX-License-Identifier: Apache-2.0
"""Fields of ``generation_config.json`` that change what transformers generates.

MAX reads those of :data:`_READ_BY_MAX`. Others are served with values that change
nothing; names that are not here are read by nobody. Where there is no such file,
transformers takes them from ``config.json``, and MAX from nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .common import IDS
from .fields import config_in, json_in
from .rule import Rule, free, number, only, optional, shown, whole, within

GENERATION_FILE = "generation_config.json"


_READ_BY_MAX: dict[str, Rule] = {
    "do_sample": optional(only(True, False)),
    "max_new_tokens": optional(whole()),
    "min_new_tokens": optional(whole(least=0)),
    "repetition_penalty": optional(number()),
    "temperature": optional(within(0, 2)),
    "top_k": optional(whole(least=-1)),
    "top_p": optional(within(0, 1)),
}
"""With what MAX's sampler takes; it answers all requests with an error otherwise."""

_FREE = (
    "_commit_hash _from_model_config assistant_confidence_threshold "
    "assistant_early_exit assistant_lookbehind bos_token_id cache_config "
    "compile_config continuous_batching_config "
    "decoder_start_token_id disable_compile early_stopping is_assistant length_penalty "
    "low_memory max_length max_matching_ngram_size max_time num_assistant_tokens "
    "num_assistant_tokens_schedule num_return_sequences output_attentions "
    "output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size "
    "prompt_lookup_num_tokens remove_invalid_values renormalize_logits "
    "return_dict_in_generate target_lookbehind transformers_version use_cache"
).split()
"""What changes no answer to a request, which says how long it may be."""

RULES: dict[str, Rule] = {
    **_READ_BY_MAX,
    **{name: free() for name in _FREE},
    "eos_token_id": IDS,
    **dict.fromkeys(("bad_words_ids", "stop_strings"), only(None, [])),
    **dict.fromkeys(("begin_suppress_tokens", "suppress_tokens"), only(None, [])),
    "cache_implementation": Rule(
        lambda v: v != "quantized", 'any but "quantized", which rounds keys and values'
    ),
    **dict.fromkeys(("constraints", "dola_layers", "force_words_ids"), only(None)),
    "diversity_penalty": only(None, 0),
    "encoder_no_repeat_ngram_size": only(None, 0),
    "encoder_repetition_penalty": only(None, 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), only(None, 0)),
    "exponential_decay_length_penalty": only(None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), only(None)),
    "guidance_scale": only(None, 1),
    "min_length": only(None, 0),
    "min_p": only(None, 0),
    "no_repeat_ngram_size": only(None, 0),
    **dict.fromkeys(("num_beam_groups", "num_beams"), only(None, 1)),
    "penalty_alpha": only(None, 0),
    "sequence_bias": only(None, {}),
    "token_healing": only(None, False),
    **dict.fromkeys(("top_h", "watermarking_config"), only(None)),
    "typical_p": only(None, 1),
}
"""By name, for all fields of transformers."""


_IN_CONFIG: dict[str, Rule] = {
    **RULES,
    "do_sample": only(None, False),
    "min_new_tokens": only(None, 0),
    "max_new_tokens": free(),
    "repetition_penalty": only(None, 1),
    "temperature": only(None, 1),
    "top_k": only(None, 50),
    "top_p": only(None, 1),
}
"""The same of ``config.json``, where MAX reads nothing: values of transformers."""


def check_generation(folder: Path) -> dict[str, Any]:
    """Returns the fields by which transformers generates: those of
    ``generation_config.json`` in a model's folder, or else of ``config.json``.

    Raises:
        ValueError: Transformers would answer otherwise by them than MAX.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return _generation_in_config(folder)
    fields = json_in(path)
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no names; remove it, or download it again")
    for name, value in fields.items():
        rule = RULES.get(name)
        if rule is not None and not rule.takes(value):
            raise ValueError(
                f"{GENERATION_FILE}: {name}={shown(value)} is not served; served is "
                f"{rule.served}; remove the field, and let requests say what they can"
            )
    return fields


def _generation_in_config(folder: Path) -> dict[str, Any]:
    """Returns fields of ``config.json``; as in transformers those of the text model
    count where the same is not beside it."""
    config = config_in(folder)
    config = config if isinstance(config, dict) else {}
    text = config.get("text_config")
    fields = {}
    for place in (text if isinstance(text, dict) else {}, config):
        given = {name: place[name] for name in _IN_CONFIG if name in place}
        fields |= {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        rule = _IN_CONFIG[name]
        if not rule.takes(value):
            raise ValueError(
                f"config.json: {name}={shown(value)} is not served where there is no "
                f"{GENERATION_FILE}; served is {rule.served}; remove the field, or say "
                "it there"
            )
    return fields


def ends_of(generation: Mapping[str, Any]) -> set[int]:
    """Returns the tokens that end an answer of transformers."""
    ends = generation.get("eos_token_id")
    if isinstance(ends, list):
        return {*ends}
    return set() if ends is None else {ends}


def has_penalties(generation: Mapping[str, Any]) -> bool:
    """Returns whether answers depend on how often a token came before."""
    return generation.get("repetition_penalty") not in (None, 1)
