# SPDX-License-Identifier: Apache-2.0
"""What a request to the server may ask, by a closed list of OpenAI's fields.

MAX takes all of them, leaves out in silence those that it does not read, and ends with
some values of others. Here each field of a request is read by MAX, or changes no
answer, or has a rule; a request that asks for more is answered with status 400.
"""

from __future__ import annotations

from typing import Any

from max.pipelines.context.exceptions import InputError
from max.serve.router import openai_routes
from max.serve.schemas.openai import (
    CreateChatCompletionRequest,
    CreateCompletionRequest,
)

from ..checkpoint.rule import Rule, number, only, optional, shown, whole, within
from .replaced import REQUESTS, home_of

KINDS = CreateCompletionRequest, CreateChatCompletionRequest

READ = frozenset(
    "cache_salt chat_template_kwargs dkv_cache_hint echo frequency_penalty ignore_eos "
    "logprobs max_completion_tokens max_tokens messages min_p min_tokens model "
    "presence_penalty prompt prompt_tokens reasoning reasoning_effort "
    "reasoning_split repetition_penalty response_format return_token_ids seed stop "
    "stop_token_ids stream stream_options target_endpoint temperature "
    "thinking_temperature tool_choice tools top_k top_logprobs top_p".split()
)
"""Fields that MAX reads."""

FREE = frozenset(
    "metadata prediction prompt_cache_key prompt_cache_options prompt_cache_retention "
    "safety_identifier service_tier store user".split()
)
"""Fields that change no answer: of accounts, of caches, and what only makes it fast."""

RULES: dict[str, Rule] = {
    "audio": only(None),
    "best_of": only(None, 1),
    "function_call": only(None, "none"),
    "functions": only(None, []),
    "logit_bias": only(None, {}),
    "modalities": only(None, ["text"]),
    "moderation": only(None),
    "n": only(None, 1),
    "parallel_tool_calls": only(None, True),
    "suffix": only(None, ""),
    "verbosity": only(None, "medium"),
    "web_search_options": only(None),
}
"""Fields that MAX does not read, with the values that ask for nothing."""

_LIMIT = optional(whole())
_PENALTY = optional(within(-2, 2))
_TEMPERATURE = optional(within(0, 2))
_STOP = Rule(
    lambda v: v is None or all([v] if isinstance(v, str) else v),
    "a text, or a list of texts, none of them empty",
)

LIMITS: dict[str, Rule] = {
    "frequency_penalty": _PENALTY,
    "logprobs": Rule(lambda v: v is False or v != 0, "1 or more"),
    "max_completion_tokens": _LIMIT,
    "max_tokens": _LIMIT,  # with 0 MAX answers with one
    "min_p": optional(within(0, 1)),
    "min_tokens": optional(whole(least=0)),
    "presence_penalty": _PENALTY,
    "prompt": Rule(lambda v: v != [], "one prompt or more"),
    "repetition_penalty": optional(number()),
    "seed": optional(whole(least=-(2**63), most=2**64 - 1)),
    "stop": _STOP,
    "temperature": _TEMPERATURE,
    "thinking_temperature": _TEMPERATURE,
    "top_k": optional(whole(least=-1)),
    "top_logprobs": optional(whole()),
    "top_p": optional(within(0, 1)),
}
"""Values that MAX takes of fields that it reads. It answers others with an error that
does not name them, or with status 500; or leaves them out."""

_OF_ZERO = 2**63 - 1
"""The seed in place of 0, which MAX takes for none."""


def check_request(asked: Any, calls_are_forced: bool) -> None:
    """Refuses a parsed request for what is not served, and gives MAX what it reads
    otherwise. ``calls_are_forced`` says whether answers can be made calls of tools.

    Raises:
        InputError: MAX answers with status 400, and this sentence.
    """
    for name, rule in (RULES | LIMITS).items():
        value = getattr(asked, name, None)
        if not rule.takes(value):
            raise InputError(
                f"the request has {name}={shown(value)}, and served is {rule.served}; "
                "correct it, or leave it out"
            )
    is_chat = isinstance(asked, CreateChatCompletionRequest)
    if is_chat and asked.top_logprobs is not None and not asked.logprobs:
        raise InputError("the request has top_logprobs without logprobs; say both")
    choice = asked.tool_choice if is_chat else None
    if choice not in (None, "auto", "none") and not calls_are_forced:
        raise InputError(
            f"the request has tool_choice={shown(choice)}, and no answer of this model "
            'can be forced to call a tool; served is "auto" or "none"'
        )
    if not is_chat and asked.stream and _n_prompts(asked.prompt) > 1:
        raise InputError(
            "the request has stream=true and several prompts; ask for each by itself"
        )
    if asked.seed == 0:
        asked.seed = _OF_ZERO
    if not is_chat and "reasoning_split" not in asked.model_fields_set:
        asked.reasoning_split = False  # MAX would leave thoughts out of the text


def _n_prompts(prompt: Any) -> int:
    is_one = isinstance(prompt, str) or all(isinstance(x, int) for x in prompt)
    return 1 if is_one else len(prompt)


async def _parse_and_check(request: Any, request_id: str, kind: Any) -> Any:
    """Takes the place of MAX's parser of requests."""
    asked = await _THEIRS(request, request_id, kind)
    if kind in KINDS:
        parser = openai_routes.get_tool_parser(request.app)
        check_request(asked, hasattr(parser, "generate_tool_call_grammar"))
    return asked


_THEIRS = openai_routes._parse_openai_request_body


def check_all_requests() -> None:
    """Puts the checks behind MAX's parser, in this process."""
    home, name = home_of(REQUESTS)
    setattr(home, name, _parse_and_check)
