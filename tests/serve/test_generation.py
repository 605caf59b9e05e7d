# SPDX-License-Identifier: Apache-2.0
"""``generation_config.json``: what MAX reads of it, what changes nothing, and what is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from max.pipelines.context.sampling_params import SamplingParamsGenerationConfigDefaults
from transformers import GenerationConfig

from graphs.serve.checkpoint import make_checkpoint
from max_ep.checkpoint import GENERATION_FILE, check_generation
from max_ep.checkpoint.generation import _READ_BY_MAX, RULES

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": dict(
        bos_token_id=151643,
        do_sample=True,
        eos_token_id=[151645, 151643],
        pad_token_id=151643,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        transformers_version="4.51.0",
    ),
    "Qwen1.5-MoE-A2.7B-Chat": dict(
        chat_format="chatml", max_new_tokens=2048, repetition_penalty=1.05
    ),
    "as transformers saves defaults": dict(
        _from_model_config=True,
        **dict.fromkeys(("forced_eos_token_id", "sequence_bias", "stop_strings")),
        num_beams=1,
        min_length=0,
        no_repeat_ngram_size=0,
        typical_p=1.0,
        guidance_scale=1.0,
        max_length=20,
    ),
}


def check(folder: Path, text: str) -> None:
    (folder / GENERATION_FILE).write_text(text)
    check_generation(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_served(name, tmp_path):
    check_generation(tmp_path)  # there is none
    check(tmp_path, json.dumps(PUBLISHED[name]))


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_beams", 4),
        ("no_repeat_ngram_size", 3),
        ("suppress_tokens", [5]),
        ("begin_suppress_tokens", [5, 7]),
        ("bad_words_ids", [[3]]),
        ("forced_bos_token_id", 7),
        ("forced_eos_token_id", [2]),
        ("min_length", 9),
        ("exponential_decay_length_penalty", [3, 1.5]),
        ("sequence_bias", [[[5], 2.0]]),
        ("guidance_scale", 1.5),
        ("encoder_repetition_penalty", 1.1),
        ("stop_strings", ["end"]),
        ("min_p", 0.05),
        ("typical_p", 0.9),
        ("penalty_alpha", 0.6),
        ("eos_token_id", "</s>"),
    ],
)
def test_what_is_refused_by_name(field, value, tmp_path):
    """Transformers would answer otherwise, and MAX does not read it."""
    with pytest.raises(ValueError, match=f"{field}=.* is not served; served is") as e:
        check(tmp_path, json.dumps(PUBLISHED["Qwen3-30B-A3B"] | {field: value}))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_that_cannot_be_read(text, tmp_path):
    """MAX goes on without it, and so without its end of a sequence."""
    with pytest.raises(ValueError, match=rf"{GENERATION_FILE} (is not JSON|holds no)"):
        check(tmp_path, text)


def test_each_field_of_transformers_and_max_is_on_the_list():
    """Fails if a version adds a field: see what it does, and whether MAX reads it."""
    assert {*vars(GenerationConfig())} <= {*RULES}
    read = {*SamplingParamsGenerationConfigDefaults.__dataclass_fields__}
    assert read == {*_READ_BY_MAX, "eos_token_id"}


def test_the_command_refuses_it(tmp_path, run_cli):
    make_checkpoint(tmp_path)
    path = tmp_path / GENERATION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 2}))
    said = run_cli("serve", tmp_path, "--gpus", 0, "--dry-run", status=1)
    assert "generation_config.json: num_beams=2 is not served" in said
