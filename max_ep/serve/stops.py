# SPDX-License-Identifier: Apache-2.0
"""Answers end before the first text that stops them, in all interfaces.

MAX looks for a short one only in the last letters that it has, answers some requests
with the stop or tokens behind it, and streams the begin of one before it knows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from max.pipelines.context import GenerationStatus
from max.serve.pipelines.llm import TokenGeneratorPipeline

from .replaced import ANSWERS, home_of


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
) -> AsyncIterator[Any]:
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


async def _next_token_chunk(self: Any, request: Any, **more: Any) -> Any:
    """Takes the place of MAX's method that answers all requests."""
    chunks = await _THEIRS(self, request, **more)
    stops = request.sampling_params.stop
    if not stops:
        return chunks

    cancel = partial(self.model_worker.cancel, request.request_id)
    return stopped(chunks, stops, cancel)


_THEIRS = TokenGeneratorPipeline.next_token_chunk


def stop_all_answers() -> None:
    """Puts this behind MAX's answers, in this process."""
    home, name = home_of(ANSWERS)
    setattr(home, name, _next_token_chunk)
