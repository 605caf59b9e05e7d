# SPDX-License-Identifier: Apache-2.0
"""Texts of answers: where they end, in all interfaces.

They end before the first text that stops them. MAX looks for a short one only in the
last letters that it has, answers some requests with the stop or tokens behind it, and
streams the begin of one before it knows.

They have all that their tokens say, and nothing of the prompt. MAX holds back bytes
that are no whole letter yet, and at the end it drops them, with what the same tokens
say before. Behind a prompt that ends within a letter it says the prompt's end again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from max.pipelines.context import GenerationStatus
from max.serve.pipelines import llm
from max.serve.pipelines.llm import TokenGeneratorPipeline

from .replaced import ANSWERS, DETOKENIZER, home_of


def n_before_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the first of ``stops`` begins, or None."""
    begins = [begin for stop in stops if (begin := text.find(stop)) >= 0]
    return min(begins, default=None)


def n_held(text: str, stops: Sequence[str]) -> int:
    """Returns how many letters at the end may be the begin of one of ``stops``."""
    longest = min(len(text), max(map(len, stops)) - 1)
    ends = range(longest, 0, -1)
    return next((n for n in ends if any(s.startswith(text[-n:]) for s in stops)), 0)


async def stopped(
    chunks: AsyncGenerator[Any, None],
    stops: Sequence[str],
    cancel: Callable[[], Any],
) -> AsyncGenerator[Any, None]:
    """Yields the chunks of an answer, whose texts end before the first stop; there
    ``cancel`` ends the request."""
    held = ""
    async with aclosing(chunks):
        async for chunk in chunks:
            text = held + (chunk.decoded_tokens or "")
            n, is_done = n_before_stop(text, stops), chunk.status.is_done
            if n is not None:
                chunk, is_done = replace(chunk, status=_STOPPED), True
                cancel()
            elif is_done:
                n = len(text)
            else:
                n = len(text) - n_held(text, stops)
            held = text[n:]
            if chunk.decoded_tokens is not None or text[:n]:
                chunk = replace(chunk, decoded_tokens=text[:n])
            yield chunk
            if is_done:
                return


_STOPPED = GenerationStatus.END_OF_SEQUENCE

_NO_LETTER = "\ufffd"
"""What stands in a text for bytes that are no letter."""


def n_said(text: str, whole: str) -> int:
    """Returns how many letters of ``whole``, the text of an answer's tokens, are those
    of ``text``, which has none of its end. Behind a prompt it may begin with a space
    more; where they differ otherwise, it has all."""
    begins = (text, text.removeprefix(" "))
    return next((len(x) for x in begins if whole.startswith(x)), len(whole))


async def completed(
    chunks: AsyncGenerator[Any, None], decode: Callable[..., Awaitable[str]]
) -> AsyncGenerator[Any, None]:
    """Yields the chunks of an answer, the last with what MAX holds back. ``decode`` is
    that of the tokenizer."""
    text, tokens, has_thoughts = "", [], False
    async with aclosing(chunks):
        async for chunk in chunks:
            text += chunk.decoded_tokens or ""
            tokens += chunk.token_ids or []
            has_thoughts |= bool(chunk.reasoning_token_count)
            if chunk.status.is_done and tokens and not has_thoughts:
                whole = await decode(np.array(tokens), skip_special_tokens=True)
                rest = whole[n_said(text, whole) :]
                if rest.endswith(_NO_LETTER):
                    said = (chunk.decoded_tokens or "") + rest
                    chunk = replace(chunk, decoded_tokens=said)
            yield chunk


_A_LETTER = 4
"""Most tokens of a letter."""


def _new_detokenizer(tokenizer: Any, prompt: Any, **more: Any) -> Any:
    """Takes the place of MAX's function, which gives the prompt to what makes text of
    an answer's tokens; without it, if it ends within a letter."""
    end = tokenizer.delegate.decode([int(x) for x in prompt[-_A_LETTER:]])
    prompt = [] if end.endswith(_NO_LETTER) else prompt
    return _THEIR_DETOKENIZER(tokenizer, prompt, **more)


_THEIR_DETOKENIZER = llm.create_buffered_detokenizer


async def _next_token_chunk(self: Any, request: Any, **more: Any) -> Any:
    """Takes the place of MAX's method that answers all requests."""
    chunks = await _THEIRS(self, request, **more)
    chunks = completed(chunks, self.tokenizer.decode)
    stops = request.sampling_params.stop
    if not stops:
        return chunks

    cancel = partial(self.model_worker.cancel, request.request_id)
    return stopped(chunks, stops, cancel)


_THEIRS = TokenGeneratorPipeline.next_token_chunk


def stop_all_answers() -> None:
    """Puts this behind MAX's answers, in this process."""
    for place, ours in ((ANSWERS, _next_token_chunk), (DETOKENIZER, _new_detokenizer)):
        home, name = home_of(place)
        setattr(home, name, ours)
