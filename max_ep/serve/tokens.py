# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that refuse a request with a token that the model does not have, or with
images.

MAX gathers its embedding, and where that fails the whole server ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from max.pipelines.context import TextContext
from max.pipelines.context.exceptions import InputError
from max.pipelines.lib import TextTokenizer
from max.pipelines.lib.tokenizer import ReasoningTextTokenizer

from .source import config_of


class _Vocabulary:
    """Base class in front of a tokenizer of MAX."""

    def __init__(self, model_path: str, pipeline_config: Any, **more: Any) -> None:
        super().__init__(model_path, pipeline_config, **more)
        self._n_embeddings = config_of(pipeline_config)["vocab_size"]

    async def encode(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> np.ndarray:
        """Returns token ids of a text, or those that were given."""
        ids = await super().encode(prompt, add_special_tokens)
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
        context = await super().new_context(request)
        self._check(context.tokens.prompt.tolist())
        return context

    def _check(self, ids: list[int]) -> None:
        """Answers the request with status 400 if the model lacks a token."""
        n = self._n_embeddings
        wrong = [token for token in ids if not 0 <= token < n]
        if wrong:
            raise InputError(
                f"the prompt has the token id {wrong[0]}; the model's vocab_size is "
                f"{n}, so ids must be in [0, {n})"
            )


class VocabularyTokenizer(_Vocabulary, TextTokenizer):
    """MAX's, for a model of ``vocab_size`` tokens."""


class VocabularyReasoningTokenizer(_Vocabulary, ReasoningTextTokenizer):
    """MAX's for models with thoughts, of ``vocab_size`` tokens."""
