# SPDX-License-Identifier: Apache-2.0
"""``generation_config.json``: what MAX reads of it, what changes nothing, and what is
refused."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from max.pipelines.context.exceptions import InputError
from max.pipelines.context.sampling_params import (
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
)
from max.pipelines.lib.pipeline_variants.utils import StructuredOutputHelper
from max.pipelines.modeling.types import RequestID
from max.pipelines.modeling.types.pipeline_variants.text_generation import (
    TextGenerationRequest,
    TextGenerationRequestMessage,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from graphs.serve.checkpoint import make_checkpoint
from max_ep.checkpoint import GENERATION_FILE, check_generation
from max_ep.checkpoint.generation import _READ_BY_MAX, RULES
from max_ep.serve.tokens import (
    VocabularyTokenizer,
    leave_out_ends,
    leave_out_min_tokens,
    lengthen,
)
from tests.serve.serving import model_of

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
    (tmp_path / "config.json").write_text("{}")
    check_generation(tmp_path)  # there is no file
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
        ("cache_implementation", "quantized"),
        ("eos_token_id", "</s>"),
        # MAX answers each request with an error.
        ("temperature", 2.5),
        ("temperature", "0.6"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 20.0),
        ("repetition_penalty", 0),
        ("min_new_tokens", -1),
        ("max_new_tokens", True),
        ("do_sample", "no"),
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


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_beams", 4),
        ("suppress_tokens", [5]),
        ("repetition_penalty", 1.3),
        ("min_new_tokens", 9),
        ("do_sample", True),
        ("temperature", 0.5),
        ("top_k", 20),
        ("top_p", 0.9),
    ],
)
def test_fields_of_config_count_without_the_file(field, value, tmp_path):
    """In transformers, not in MAX. Older versions wrote defaults there."""
    path = tmp_path / "config.json"
    old = dict(do_sample=False, num_beams=1, temperature=1.0, top_k=50, top_p=1.0)
    old |= dict(min_length=0, max_new_tokens=9, typical_p=1.0, bad_words_ids=None)
    path.write_text(json.dumps(old))
    check_generation(tmp_path)
    for given in ({field: value}, {"text_config": {field: value}, field: None}):
        path.write_text(json.dumps(given))
        with pytest.raises(
            ValueError, match=f"config.json: {field}=.* there is no gen"
        ):
            check_generation(tmp_path)
        assert getattr(GenerationConfig.from_model_config(given), field) == value
        (tmp_path / GENERATION_FILE).write_text("{}")
        check_generation(tmp_path)
        (tmp_path / GENERATION_FILE).unlink()


@pytest.mark.parametrize("size", ["mixtral_tiny", "qwen3_vl_tiny"])
def test_answers_end_as_in_transformers(size, tmp_path):
    """Or at the tokenizer's end. Mixtral has one by default, and Qwen3-VL-MoE has them
    in `text_config`."""
    make_checkpoint(tmp_path, size)
    path, file = tmp_path / "config.json", tmp_path / GENERATION_FILE
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    of_tokenizer = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    repo = dict(repo_type="local", local_path=str(tmp_path), subfolder=None)
    for ends in ({}, {"eos_token_id": None}, {"eos_token_id": [5, 6, 10**6]}):
        text.pop("eos_token_id", None)
        text |= ends
        path.write_text(json.dumps(config))
        for fields in (None, {}, {"eos_token_id": 7}):
            file.unlink(missing_ok=True)
            if fields is not None:
                file.write_text(json.dumps(fields))
            theirs = model_of(tmp_path, torch.float32).generation_config.eos_token_id
            theirs = theirs if isinstance(theirs, list) else [theirs]
            model = SimpleNamespace(
                huggingface_model_repo=SimpleNamespace(**repo),
                huggingface_config=AutoConfig.from_pretrained(tmp_path),
                generation_config=GenerationConfig(**(fields or {})),
                enable_echo=False,
                device_specs=[SimpleNamespace(device_type="cpu")],
            )
            flags = dict(enable_penalties=False, enable_min_tokens=False)
            of_all = MagicMock(model=model, sampling=SimpleNamespace(**flags))
            of_all.tokenizer_impl = None
            tokenizer = VocabularyTokenizer(str(tmp_path), of_all)
            wanted = {*theirs, of_tokenizer} - {None, 10**6}  # the model lacks it
            assert tokenizer.eos_token_ids == wanted
            asked = TextGenerationRequest(
                request_id=RequestID("a"),
                model_name="a",
                prompt=[9, 8],
                sampling_params=SamplingParams(stop_token_ids=[3, 10**6]),
            )
            context = asyncio.run(tokenizer.new_context(asked))
            assert context.eos_tracker.eos_token_ids == wanted | {3}


def test_each_field_of_transformers_and_max_is_on_the_list():
    """Fails if a version adds a field: see what it does, and whether MAX reads it."""
    assert {*vars(GenerationConfig())} <= {*RULES}
    read = {*SamplingParamsGenerationConfigDefaults.__dataclass_fields__}
    assert read == {*_READ_BY_MAX, "eos_token_id"}


def test_penalties_wait_for_the_last_token(tmp_path, run_cli):
    """On GPUs; the server refuses it, too: `test_serve_plan.py`."""
    make_checkpoint(tmp_path)
    path = tmp_path / GENERATION_FILE
    fields = json.loads(path.read_text())

    def flags(penalty: float | None, *more: object) -> str:
        path.write_text(json.dumps(fields | {"repetition_penalty": penalty}))
        return run_cli("serve", tmp_path, "--dry-run", *more)

    on_gpu = "--gpus", 1
    assert "--device-graph-capture --disable-overlap" in flags(1.05, *on_gpu)
    assert "--disable-overlap" in flags(None, *on_gpu, "--enable-penalties")
    assert "--disable-overlap" not in flags(1.0, *on_gpu)
    assert "--disable-overlap" not in flags(1.05, "--gpus", 0)


def test_what_a_server_was_not_started_for_is_refused():
    """MAX leaves it out, and answers as if nobody had asked for it."""
    tokenizer = VocabularyTokenizer.__new__(VocabularyTokenizer)
    names = "penalties", "min_tokens", "echo"
    tokenizer._flags = dict.fromkeys((f"enable_{name}" for name in names), False)
    tokenizer._is_on_cpu = True
    plain, longer = SamplingParams(), SamplingParams(min_new_tokens=3)
    tokenizer._check_asked(plain)
    with pytest.raises(InputError, match="has min_tokens, .* --enable-min-tokens$"):
        tokenizer._check_asked(longer)
    with pytest.raises(InputError, match="has echo, .* --enable-echo$"):
        tokenizer._check_asked(plain, True)
    for asked in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        with pytest.raises(InputError, match="has penalties, .* leave it out"):
            tokenizer._check_asked(SamplingParams(**{asked: 0.5}))
    tokenizer._flags = dict.fromkeys(tokenizer._flags, True)
    tokenizer._check_asked(SamplingParams(presence_penalty=1.1, min_new_tokens=3), True)


def test_min_p_is_refused_on_the_cpu():
    """MAX's sampler leaves it out there: with 1.0 answers differed."""
    tokenizer = VocabularyTokenizer.__new__(VocabularyTokenizer)
    tokenizer._flags = dict.fromkeys(("enable_penalties", "enable_min_tokens"), True)
    tokenizer._flags["enable_echo"] = True
    for tokenizer._is_on_cpu in (False, True):
        tokenizer._check_asked(SamplingParams(min_p=0.0))
        if not tokenizer._is_on_cpu:
            tokenizer._check_asked(SamplingParams(min_p=0.5))
            continue
        with pytest.raises(InputError, match="has min_p=0.5, which MAX's .* on GPUs"):
            tokenizer._check_asked(SamplingParams(min_p=0.5))


@pytest.mark.parametrize(
    "asked, ends, left",
    [
        (dict(), {2}, 3),
        (dict(stop_token_ids=[7]), set(), 3),
        (dict(), set(), 0),
        (dict(ignore_eos=True), {2}, 0),
    ],
)
def test_min_tokens_without_an_end_do_not_end_the_server(asked, ends, left):
    """MAX's mask of no token has another shape than its sampler takes."""
    params = SamplingParams(min_new_tokens=3, **asked)
    leave_out_min_tokens(params, ends)
    assert params.min_new_tokens == left


def test_ends_that_the_model_lacks_are_left_out():
    """MAX's mask of min_tokens would lower logits of other requests."""
    params = SamplingParams(stop_token_ids=[-1, 0, 511, 512, 10**6])
    leave_out_ends(params, 512)
    assert params.stop_token_ids == [0, 511]
    leave_out_ends(plain := SamplingParams(), 512)
    assert plain.stop_token_ids is None


def test_a_chat_without_a_template_is_refused_in_words(tmp_path):
    """MAX answers "Value error."."""
    make_checkpoint(tmp_path)
    tokenizer = VocabularyTokenizer.__new__(VocabularyTokenizer)
    tokenizer.delegate = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer._custom_template_provided = False
    chat = [TextGenerationRequestMessage(role="user", content="hi")]
    assert "hi<|im_end|>" in tokenizer.apply_chat_template(chat, None)
    said = "no prompt of this chat: .*; correct it, start .* --chat-template"
    raising = "{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}"
    for template in (None, *raising):
        tokenizer.delegate.chat_template = template
        with pytest.raises(InputError, match=said):
            tokenizer.apply_chat_template(chat, None)
    with pytest.raises(InputError, match="multiple values for .*'tokenize'; correct"):
        tokenizer.apply_chat_template(chat, None, tokenize=True)


def test_a_text_without_tokens_is_refused_in_words():
    """MAX answers with status 500."""
    words = Tokenizer(WordLevel({"a": 0}))
    tokenizer = VocabularyTokenizer.__new__(VocabularyTokenizer)
    tokenizer.delegate = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.max_length, tokenizer._n_embeddings = 8, 4
    assert asyncio.run(tokenizer.encode("a")).tolist() == [0]
    with pytest.raises(InputError, match=r"cannot encode 'b': .*\[UNK\].*; give"):
        asyncio.run(tokenizer.encode("b"))
    with pytest.raises(InputError, match="has the token id 4; the model's vocab_size"):
        asyncio.run(tokenizer.encode([4]))


def test_tokens_that_the_tokenizer_lacks_are_generated(tmp_path):
    """As in transformers. MAX's sampler has as many as the tokenizer says, in each of
    its processes; fails if it says how many it has."""
    make_checkpoint(tmp_path)
    plain, made = (AutoTokenizer.from_pretrained(tmp_path) for _ in range(2))
    n = len(plain)
    lengthen(made, n + 7)
    for delegate in (made, pickle.loads(pickle.dumps(made))):
        tokenizer = SimpleNamespace(delegate=delegate, eos_token_ids={2})
        sampled = StructuredOutputHelper.from_tokenizer(tokenizer, False).vocab_size
        assert sampled == n + 7
        assert delegate("a rank").input_ids == plain("a rank").input_ids
        assert delegate.decode([99, n, n + 6]) == plain.decode([99])
    lengthen(plain, n - 5)
    assert len(plain) == n


def test_the_command_refuses_it(tmp_path, run_cli):
    make_checkpoint(tmp_path)
    path = tmp_path / GENERATION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 2}))
    said = run_cli("serve", tmp_path, "--gpus", 0, "--dry-run", status=1)
    assert "generation_config.json: num_beams=2 is not served" in said
