# SPDX-License-Identifier: Apache-2.0
"""Compares a served model with Hugging Face transformers, token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graphs.serve.server import Server

# Of the bfloat16 model in transformers, tokens are up to 0.128 worse, in logits, than
# the float32 model's first choice (H200); what was served wrongly once, 0.09 to 0.8,
# and always the first token.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}

# Of that one transformers' tokens are up to 0.74 worse (docs/results/serving_gaps.md);
# what was served wrongly, 2.4 to 4.9 in first tokens.
TOLERANCE_OF_SIZE = {"deepseek": 0.8}

_WORDS = (
    "a rank sends each token once to the experts that its router has chosen".split()
)


@dataclass
class Tally:
    """What a :class:`Reference` has seen."""

    n_tokens: int = 0
    """Tokens compared."""
    n_ties: int = 0
    """Tokens that are not the reference's first choice, but as good."""
    worst_gap: float = 0.0
    """Most that the reference likes its first choice better, in logits."""
    worst_first_gap: float = 0.0
    """The same, of the tokens that follow a prompt."""
    n_ties_bfloat16: int = 0
    """Of transformers in bfloat16 after the same tokens, on GPUs: as ``n_ties``."""
    worst_gap_bfloat16: float = 0.0
    """Likewise, as ``worst_gap``."""
    worst_logprob: float = 0.0
    """Largest difference of log-probabilities."""


def prompts(n: int, seed: int = 0) -> list[str]:
    """Makes prompts of one to forty words."""
    random.seed(seed)
    return [" ".join(random.choices(_WORDS, k=random.randint(1, 40))) for _ in range(n)]


def _of_each(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Picks the value of a token at each position."""
    return values.gather(1, tokens[:, None])[:, 0]


class Reference:
    """The float32 model of a checkpoint in transformers, given what was served."""

    def __init__(self, model: Path, in_bfloat16: bool) -> None:
        """Loads the model, on a GPU where there is one and it has room.

        Args:
            model: The checkpoint.
            in_bfloat16: Whether to count the ties of transformers in bfloat16, too.
        """
        self._device = "cpu"
        if torch.cuda.is_available():
            # Of two bytes a weight; four, and two again, and room to work.
            n_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            n_needed = (3 if in_bfloat16 else 2) * n_bytes + 2 * 2**30
            if torch.cuda.mem_get_info()[0] > n_needed:
                self._device = "cuda"
        self.tokenizer = AutoTokenizer.from_pretrained(model)

        def load(dtype: torch.dtype) -> torch.nn.Module:
            made = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            return made.to(self._device).eval()

        self._model = load(torch.float32)
        self._in_bfloat16 = load(torch.bfloat16) if in_bfloat16 else None
        self.tally = Tally()

    def check(
        self,
        asked: list[int],
        served: list[int],
        tolerance: float,
        logprobs: list[float] | None = None,
    ) -> None:
        """Compares an answer, token by token.

        The model is given what was served, so that a tie does not end the comparison.

        Args:
            asked: Token ids of the prompt.
            served: Token ids of the answer.
            tolerance: Most that a served token's logit may be below the best one, and
                its log-probability off.
            logprobs: Log-probabilities that the server told, of each served token.
        """
        tally = self.tally
        with torch.no_grad():
            ids = torch.tensor([asked + served[:-1]], device=self._device)
            logits = self._model(ids).logits[0, len(asked) - 1 :].double().cpu()
        best = logits.max(1).values
        gaps = best - _of_each(logits, torch.tensor(served))
        tally.n_tokens += len(served)
        tally.n_ties += int((gaps > 0).sum())
        tally.worst_gap = max(tally.worst_gap, float(gaps.max()))
        tally.worst_first_gap = max(tally.worst_first_gap, float(gaps[0]))
        if self._in_bfloat16 is not None:
            with torch.no_grad():
                rounded = self._in_bfloat16(ids).logits[0, len(asked) - 1 :].argmax(1)
            theirs = best - _of_each(logits, rounded.cpu())
            tally.n_ties_bfloat16 += int((theirs > 0).sum())
            worst = max(tally.worst_gap_bfloat16, float(theirs.max()))
            tally.worst_gap_bfloat16 = worst
        assert gaps.max() <= tolerance, (asked, served, gaps)
        if logprobs is not None:
            mine = _of_each(logits.log_softmax(1), torch.tensor(served))
            off = (mine - torch.tensor(logprobs)).abs()
            tally.worst_logprob = max(tally.worst_logprob, float(off.max()))
            assert off.max() <= tolerance, (asked, served, off)


def check_greedy(
    server: Server,
    reference: Reference,
    n_prompts: int,
    n_tokens: int,
    tolerance: float,
    with_logprobs: bool,
) -> None:
    """Checks greedy completions against the float32 model of the same weights.

    Args:
        server: Serves the model.
        reference: Of its checkpoint; its tally has what was seen.
        n_prompts: Prompts.
        n_tokens: Tokens to be generated for each.
        tolerance: As :meth:`Reference.check` has it.
        with_logprobs: Whether the server can tell log-probabilities, which MAX's
            cannot on GPUs.
    """
    for prompt in prompts(n_prompts):
        asked = reference.tokenizer(prompt).input_ids
        more = {"logprobs": 1} if with_logprobs else {}
        answer = server.complete(asked, n_tokens, return_token_ids=True, **more)
        served = answer["token_ids"]
        assert len(served) == n_tokens, answer
        told = answer["logprobs"]["token_logprobs"] if with_logprobs else None
        reference.check(asked, served, tolerance, told)
