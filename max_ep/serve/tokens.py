# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that refuse a request with a token that the model does not have, with
images, or with what the server's sampler was not made for.

MAX gathers its embedding, and where that fails the whole server ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from max.pipelines.context import SamplingParams, TextContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import TextTokenizer
from max.pipelines.lib.tokenizer import ReasoningTextTokenizer

from .requests import check_all_requests
from .source import config_of, ends_of_answers
from .stops import stop_all_answers


class _AllTokens:
    """Base class in front of one of a tokenizer of transformers: :func:`lengthen`."""

    _n_embeddings: int

    def __len__(self) -> int:
        return self._n_embeddings

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Servers pickle it; the class is made again."""
        _, _, *state = super().__reduce_ex__(protocol)
        return (_without_state, (type(self).__bases__[1],), *state)


@cache
def _with_all_tokens(kind: type) -> type:
    return type(kind.__name__, (_AllTokens, kind), {})


def _without_state(kind: type) -> Any:
    made = _with_all_tokens(kind)
    return made.__new__(made)


def lengthen(tokenizer: Any, n_embeddings: int) -> None:
    """Makes the length of a tokenizer of transformers that of the model's vocabulary,
    if it is shorter: MAX's sampler leaves out ids from the length on, which
    transformers does not."""
    if len(tokenizer) < n_embeddings:
        tokenizer._n_embeddings = n_embeddings
        tokenizer.__class__ = _with_all_tokens(type(tokenizer))


def leave_out_min_tokens(asked: SamplingParams, ends: set[int]) -> None:
    """Takes ``min_tokens`` out of a request that no token ends: it has no effect, and
    MAX's server ends with an error of its sampler's input."""
    if asked.ignore_eos or not (ends or asked.stop_token_ids):
        asked.min_new_tokens = 0


def leave_out_ends(asked: SamplingParams, n_embeddings: int) -> None:
    """Takes out of a request ends that the model lacks. No answer has them, and with
    min_tokens MAX would write into logits of other requests (docs/upstream.md)."""
    if asked.stop_token_ids:
        has = range(n_embeddings)
        asked.stop_token_ids = [end for end in asked.stop_token_ids if end in has]


def lift_top_k(asked: SamplingParams, n_embeddings: int) -> None:
    """Takes out of a request a ``top_k`` that leaves all tokens: MAX's sampler asks for
    memory for so many, and with 2**40 the whole server ends."""
    if asked.top_k >= n_embeddings > 1:
        asked.top_k = -1


def _reason(error: Exception) -> str:
    """Returns the first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Vocabulary:
    """Base class in front of a tokenizer of MAX."""

    def __init__(self, model_path: str, pipeline_config: Any, **more: Any) -> None:
        try:
            super().__init__(model_path, pipeline_config, **more)
        except ValueError as error:  # MAX's names no cause
            cause = " ".join(str(error.__cause__ or error).split())
            raise ValueError(
                f"{model_path}: its tokenizer cannot be loaded: {cause}"
            ) from error
        check_all_requests()
        stop_all_answers()
        self._n_embeddings = config_of(pipeline_config)["vocab_size"]
        sampling, model = pipeline_config.sampling, pipeline_config.model
        self._flags = {
            "enable_penalties": sampling.enable_penalties,
            "enable_min_tokens": sampling.enable_min_tokens,
            "enable_echo": model.enable_echo,
        }
        self._is_on_cpu = model.device_specs[0].device_type == "cpu"
        lengthen(self.delegate, self._n_embeddings)
        # MAX has ends of config.json, too, where transformers has none of them, and
        # none of its text_config.
        own = self.delegate.eos_token_id
        ends = ends_of_answers(pipeline_config) | (set() if own is None else {own})
        self._eos_token_ids = {end for end in ends if end < self._n_embeddings}

    def apply_chat_template(self, *args: Any, **more: Any) -> str:
        """Answers the request with status 400 if there is no template, or it raises."""
        try:
            return super().apply_chat_template(*args, **more)
        except Exception as error:  # a template is a program, of the client's, too
            raise InputError(
                f"the tokenizer makes no prompt of this chat: {_reason(error)}; "
                "correct it, start the server with --chat-template, or ask "
                "/v1/completions"
            ) from error

    async def encode(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> np.ndarray:
        """Returns token ids of a text, or those that were given."""
        try:
            ids = await super().encode(prompt, add_special_tokens)
        except InputError:
            raise
        except Exception as error:  # some have no token for what they do not know
            raise InputError(
                f"the tokenizer cannot encode {prompt!r:.60}: {_reason(error)}; give "
                "another text, or token ids"
            ) from error
        if add_special_tokens and not len(ids):
            raise InputError("the prompt has no token; it must have one or more")
        self._check(ids.tolist())
        return ids

    async def new_context(self, request: Any) -> TextContext:
        """Makes MAX's context of a request, whose chat another encoder may encode."""
        for kind in ("images", "videos"):
            if n := len(getattr(request, kind, None) or ()):
                raise InputError(
                    f"the request has {n} of {kind}, and text alone is served; leave "
                    "them out"
                )
        self._check_asked(request.sampling_params, request.echo)
        leave_out_ends(request.sampling_params, self._n_embeddings)
        lift_top_k(request.sampling_params, self._n_embeddings)
        leave_out_min_tokens(request.sampling_params, self.eos_token_ids)
        context = await super().new_context(request)
        self._check(context.tokens.prompt.tolist())
        return context

    def _check_asked(self, asked: SamplingParams, echoes: bool = False) -> None:
        """Refuses what MAX leaves out in silence, or with a line in its log, where it
        was started without a flag."""
        flags = (
            (asked.needs_penalties, "enable_penalties", "penalties"),
            (asked.min_new_tokens > 0, "enable_min_tokens", "min_tokens"),
            (echoes, "enable_echo", "echo"),
        )
        for is_asked, name, what in flags:
            if is_asked and not self._flags[name]:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(
                    f"the request has {what}, and the server was started without "
                    f"{flag}; leave it out, or start the server with {flag}"
                )

        if asked.min_p and self._is_on_cpu:
            raise InputError(
                f"the request has min_p={asked.min_p}, which MAX's sampler leaves out "
                "on the CPU; leave it out, or serve on GPUs"
            )

    def _check(self, ids: list[int]) -> None:
        """Answers the request with status 400 if the model lacks a token."""
        n = self._n_embeddings
        wrong = [token for token in ids if not 0 <= token < n]
        if wrong:
            raise InputError(
                f"the prompt has the token id {wrong[0]}; the model's vocab_size is "
                f"{n}, so ids must be in [0, {n})"
            )


WITHOUT_THOUGHTS = "Start the server with --reasoning-parser none"
"""What to do where a tokenizer lacks the tokens of thoughts."""


class VocabularyTokenizer(_Vocabulary, TextTokenizer):
    """MAX's, for a model of ``vocab_size`` tokens."""


class VocabularyReasoningTokenizer(_Vocabulary, ReasoningTextTokenizer):
    """MAX's for models with thoughts, of ``vocab_size`` tokens."""

    def __init__(self, model_path: str, pipeline_config: Any, **more: Any) -> None:
        self._thinks = pipeline_config.runtime.reasoning_parser is not None
        super().__init__(model_path, pipeline_config, **more)

    def _resolve_reasoning_delimiters(self, delegate: Any) -> None:
        """Finds the tokens of thoughts, unless the server was started without."""
        if not self._thinks:
            return
        try:
            super()._resolve_reasoning_delimiters(delegate)
        except ValueError as error:
            raise ValueError(f"{error} {WITHOUT_THOUGHTS}") from error
