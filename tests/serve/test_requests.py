# SPDX-License-Identifier: Apache-2.0
"""Requests to a server: each field is read, changes nothing, or is refused by name."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from max.pipelines.context import GenerationStatus
from max.pipelines.context.exceptions import InputError
from max.pipelines.context.sampling_params import SamplingParams
from max.serve.pipelines.llm import TokenGeneratorOutput
from max.serve.router import openai_routes
from max.serve.schemas import openai as schemas
from max.serve.schemas.openai import (
    CreateChatCompletionRequest,
    CreateCompletionRequest,
)
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from max_ep.serve import requests, stops
from max_ep.serve.replaced import ANSWERS, DETOKENIZER, REQUESTS, home_of
from max_ep.serve.requests import (
    FREE,
    KINDS,
    LIMITS,
    READ,
    RULES,
    check_all_requests,
    check_request,
)
from max_ep.serve.stops import completed, stop_all_answers, stopped
from max_ep.serve.tokens import lift_top_k

CHAT = dict(messages=[{"role": "user", "content": "a"}])
TEXT = dict(prompt="a")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def asked(**fields: Any) -> Any:
    """Parses a request; it is a chat, unless it has a prompt."""
    if "prompt" in fields:
        return CreateCompletionRequest(model="m", **fields)
    return CreateChatCompletionRequest(model="m", **(CHAT | fields))


def test_each_field_of_a_request_is_on_the_list():
    """Fails if MAX, or OpenAI's package, adds a field: see whether MAX reads it."""
    lists = READ, FREE, {*RULES}
    known = {name for kind in KINDS for name in kind.model_fields}
    assert known == set().union(*lists)
    assert sum(map(len, lists)) == len(known)
    assert {*LIMITS} <= READ


def test_max_reads_what_the_list_says():
    """By the names in its source."""
    source = inspect.getsource(openai_routes) + inspect.getsource(schemas)
    read = {
        name
        for name in (*READ, *FREE, *RULES)
        if re.search(rf"request\.{name}\b", source)
    }
    of_chats = {"chat_template_kwargs", "reasoning", "reasoning_effort"}
    assert {name for name in of_chats if f"self.{name}" in source} == of_chats
    assert READ == read | of_chats


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(n=2), "has n=2, and served is None or 1; correct it, or leave it out"),
        (TEXT | dict(n=2), "has n=2"),
        (TEXT | dict(best_of=2), "has best_of=2"),
        (TEXT | dict(suffix="b"), "has suffix='b'"),
        (TEXT | dict(logit_bias={"5": -100}), "has logit_bias="),
        (dict(logit_bias={"5": -100}), "has logit_bias="),
        (dict(functions=[{"name": "f"}]), "has functions="),
        (dict(modalities=["text", "audio"]), "has modalities="),
        (dict(parallel_tool_calls=False), "has parallel_tool_calls=False"),
        (dict(verbosity="low"), "has verbosity='low'"),
        (dict(web_search_options={}), "has web_search_options="),
        # MAX answers with status 500, "Value error." or less than was asked for.
        (TEXT | dict(seed=2**64), "has seed=18446744073709551616"),
        (TEXT | dict(max_tokens=10**30), "has max_tokens=1000"),
        (TEXT | dict(max_tokens=-1), "has max_tokens=-1"),
        (TEXT | dict(max_tokens=0), "has max_tokens=0"),
        (dict(max_completion_tokens=-1), "has max_completion_tokens=-1"),
        (dict(min_tokens=2**64), "has min_tokens="),
        (
            dict(temperature=2.5),
            "has temperature=2.5, and served is a number from 0 to",
        ),
        (dict(thinking_temperature=-1.0), "has thinking_temperature=-1.0"),
        (dict(top_p=1.5), "has top_p=1.5"),
        (dict(min_p=-0.5), "has min_p=-0.5"),
        (dict(top_k=-2), "has top_k=-2"),
        (dict(repetition_penalty=0), "has repetition_penalty=0"),
        (dict(presence_penalty=3), "has presence_penalty=3"),
        (dict(frequency_penalty=-3), "has frequency_penalty=-3"),
        (dict(stop=""), "has stop='', .* none of them empty"),
        (TEXT | dict(stop=["b", ""]), "has stop="),
        (TEXT | dict(logprobs=0), "has logprobs=0, and served is 1 or more"),
        (dict(logprobs=True, top_logprobs=0), "has top_logprobs=0"),
        (dict(top_logprobs=3), "has top_logprobs without logprobs"),
        (dict(prompt=[]), r"has prompt=\[\]"),
        (dict(prompt=["a", "b"], stream=True), "stream=true and several prompts"),
        (dict(prompt=[[5], [6]], stream=True), "stream=true and several prompts"),
        (dict(tools=TOOLS, tool_choice="required"), "tool_choice='required', and no"),
        (
            dict(
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": "f"}},
            ),
            "tool_choice={.* no answer of this model can be forced",
        ),
    ],
)
def test_what_is_refused_by_name(fields, words):
    with pytest.raises(InputError, match=words) as raised:
        check_request(asked(**fields), calls_are_forced=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(n=1, logit_bias={}, user="u", store=False, metadata={"a": "b"}),
        dict(logprobs=True, top_logprobs=2, stop=["b"], temperature=0, top_k=0),
        dict(logprobs=False, tools=TOOLS, tool_choice="auto", seed=-1),
        dict(response_format={"type": "text"}, max_completion_tokens=1),
        TEXT | dict(best_of=1, suffix=None, logprobs=1, stop="b", seed=2**64 - 1),
        dict(prompt=["a", "b"]),
        dict(prompt=[5, 6], stream=True),
        dict(prompt=["a"], stream=True),
    ],
)
def test_what_is_served(fields):
    check_request(asked(**fields), calls_are_forced=False)


def test_calls_are_forced_where_there_is_a_grammar():
    check_request(asked(tools=TOOLS, tool_choice="required"), calls_are_forced=True)


def test_a_seed_of_zero_is_one():
    """MAX draws another each time."""
    for fields in (TEXT, CHAT):
        request = asked(**fields, seed=0)
        check_request(request, calls_are_forced=False)
        assert request.seed == 2**63 - 1
        check_request(request := asked(**fields), calls_are_forced=False)
        assert request.seed is None


def test_texts_of_completions_have_thoughts():
    """As transformers' answers. Failed: MAX's text of a MiniMax-M2 was empty."""
    for given, wanted in ({}, False), ({"reasoning_split": True}, True):
        check_request(request := asked(**TEXT, **given), calls_are_forced=False)
        assert request.reasoning_split is wanted
    check_request(chat := asked(), calls_are_forced=False)
    assert chat.reasoning_split


def test_a_server_checks_its_requests(monkeypatch):
    home, name = home_of(REQUESTS)
    monkeypatch.setattr(home, name, requests._THEIRS)  # another test made a tokenizer
    runtime = SimpleNamespace(allow_extra_request_fields=False)
    pipeline_config = SimpleNamespace(runtime=runtime)
    monkeypatch.setattr(home, "get_app_pipeline_config", lambda _: pipeline_config)
    monkeypatch.setattr(home, "get_tool_parser", lambda _: None)

    def parsed(**fields: Any) -> Any:
        async def body() -> bytes:
            return json.dumps(dict(model="m", **fields)).encode()

        request = SimpleNamespace(body=body, app=None)
        return asyncio.run(getattr(home, name)(request, "id", KINDS[0]))

    assert parsed(prompt="a", n=2).n == 2
    check_all_requests()
    assert parsed(prompt="a").prompt == "a"
    with pytest.raises(InputError, match="has n=2"):
        parsed(prompt="a", n=2)


PIECES = ["p", "se", "", "di", "di"]


@pytest.mark.parametrize(
    "stops, texts",
    [
        (["i"], ["p", "se", "", "d"]),  # failed: MAX has the stop and one token more
        (["didi"], ["p", "se", "", "", ""]),
        (["dix", "ed"], ["p", "s", "", ""]),
        (["dix", "zz"], ["p", "se", "", "", "didi"]),
        (["p"], [""]),
        (["sedx"], ["p", "", "", "sedi", "di"]),
        (["zz"], PIECES),
    ],
)
def test_answers_end_before_what_stops_them(stops, texts):
    """In whatever pieces they come; what may be the begin of a stop is held back."""
    is_closed, cancelled = [], []

    async def theirs() -> Any:
        try:
            for i, piece in enumerate(PIECES):
                is_last = i == len(PIECES) - 1
                status = GenerationStatus.MAXIMUM_LENGTH
                status = status if is_last else GenerationStatus.ACTIVE
                yield TokenGeneratorOutput(status, piece)
        finally:
            is_closed.append(True)

    def cancel() -> None:
        cancelled.append(True)

    async def collected() -> list[Any]:
        return [chunk async for chunk in stopped(theirs(), stops, cancel)]

    chunks = asyncio.run(collected())
    assert [chunk.decoded_tokens for chunk in chunks] == texts
    is_stopped = any(stop in "".join(PIECES) for stop in stops)
    wanted = "END_OF_SEQUENCE" if is_stopped else "MAXIMUM_LENGTH"
    assert chunks[-1].status.name == wanted
    assert is_closed == [True]
    assert cancelled == [True] * is_stopped


def test_a_server_stops_its_answers(monkeypatch):
    places = {ANSWERS: stops._THEIRS, DETOKENIZER: stops._THEIR_DETOKENIZER}
    for place, theirs in places.items():
        monkeypatch.setattr(*home_of(place), theirs)  # put back at the end
    stop_all_answers()
    home, name = home_of(ANSWERS)
    assert all(getattr(*home_of(x)) is not theirs for x, theirs in places.items())
    chunk = TokenGeneratorOutput(GenerationStatus.ACTIVE, "psedidi")

    async def theirs(*_: Any, **more: Any) -> Any:
        async def one() -> Any:
            yield chunk

        assert more == {"parse_reasoning": False}
        return one()

    monkeypatch.setattr("max_ep.serve.stops._THEIRS", theirs)
    cancelled: list[str] = []
    worker = SimpleNamespace(cancel=cancelled.append)

    async def text_of(stop: list[str] | None) -> Any:
        request = SimpleNamespace(
            sampling_params=SamplingParams(stop=stop), request_id="id"
        )
        pipeline = SimpleNamespace(model_worker=worker, tokenizer=MagicMock())
        chunks = await getattr(home, name)(pipeline, request, parse_reasoning=False)
        return [chunk.decoded_tokens async for chunk in chunks]

    assert asyncio.run(text_of(None)) == ["psedidi"] and not cancelled
    assert asyncio.run(text_of(["di"])) == ["pse"] and cancelled == ["id"]


@pytest.fixture(scope="module")
def of_bytes() -> Any:
    """A tokenizer whose tokens are single bytes, and some of two."""
    tokens = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokens["ab"] = len(tokens)
    made = Tokenizer(BPE(tokens, [("a", "b")]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("prompt", ["a", "a123", "a12", "a2"])
@pytest.mark.parametrize("answer", ["ab", "123 ab 123", "b12", "21ab33", "1", "3ab3ab"])
def test_texts_of_answers_are_those_of_their_tokens(answer, prompt, size, of_bytes):
    """Also where they, or the prompt, end within a letter, whose bytes are 123. MAX
    left out the end, and said words of the prompt again. Where there are thoughts,
    nobody knows which tokens are not theirs."""
    letter = of_bytes.encode("\N{SNOWMAN}")
    assert len(letter) == 3

    def ids_of(text: str) -> list[int]:
        ids = []
        for part in re.findall(r"\d|\D+", text):
            is_byte = part.isdigit()
            ids += [letter[int(part) - 1]] if is_byte else of_bytes.encode(part)
        return ids

    asked, ids = np.array(ids_of(prompt)), ids_of(answer)

    async def theirs(thinks: bool) -> Any:
        tokenizer = SimpleNamespace(delegate=of_bytes)
        text = stops._new_detokenizer(tokenizer, asked, skip_special_tokens=True)
        for begin in range(0, len(ids), size):
            new, is_last = ids[begin : begin + size], begin + size >= len(ids)
            yield TokenGeneratorOutput(
                GenerationStatus["MAXIMUM_LENGTH" if is_last else "ACTIVE"],
                await text.decode(new),
                token_ids=new,
                reasoning_token_count=int(thinks),
            )

    async def decode(tokens: Any, **more: Any) -> str:
        return of_bytes.decode(tokens.tolist(), **more)

    async def text_of(thinks: bool) -> str:
        chunks = completed(theirs(thinks), decode)
        return "".join([chunk.decoded_tokens async for chunk in chunks])

    wanted = of_bytes.decode(ids)
    assert asyncio.run(text_of(thinks=False)) == wanted
    assert wanted.startswith(asyncio.run(text_of(thinks=True)))


@pytest.mark.parametrize("top_k, left", [(2**40, -1), (512, -1), (511, 511), (1, 1)])
def test_more_than_all_tokens_are_all(top_k, left):
    """MAX's server ended: it asked for memory for so many."""
    params = SamplingParams(top_k=top_k)
    lift_top_k(params, 512)
    assert params.top_k == left
