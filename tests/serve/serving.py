# SPDX-License-Identifier: Apache-2.0
"""Compares a served model with Hugging Face transformers, token by token."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from graphs.serve.checkpoint import DEEPSEEK_SIZES, SIZES
from graphs.serve.server import Server
from max_ep.balance import Placement, plan

# Tokens of the bfloat16 model in transformers are up to 0.128 worse, in logits, than
# the float32 model's first choice (H200), the first of 4000 answers up to 0.115; what
# was served wrongly once, 0.09 to 0.8, and always the first token. So a first token has
# less tolerance, unless it is as likely in the bfloat16 model.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}
_FIRST_TOLERANCE = 0.06

NOISES = (2.0**-8,) * 16 + (2.0**-7,) * 16
"""For a rounding that decides between experts, so that logits differ by far more: of
draws in which the float32 model may choose a token that is less likely
(docs/performance-notes.md). One and two times what rounding to bfloat16 does."""
_DRAWS = 16
"""With each noise at once: in all more than a prompt has answers under load, for what
one of 100 answers has, few draws may not."""

READY_S = 900

_WORDS = (
    "a rank sends each token once to the experts that its router has chosen".split()
)


@dataclass
class Tally:
    """What a :class:`Reference` has seen."""

    n_tokens: int = 0  # Tokens compared
    n_ties: int = 0  # Tokens that are not the reference's first choice, but as good
    worst_gap: float = 0.0
    """Most that the reference likes its first choice better, in logits."""
    n_ties_bfloat16: int | None = None
    """``n_ties`` of transformers in bfloat16 after the same tokens, if counted."""
    n_by_noise: int = 0
    """The part of ``n_ties`` that is beyond the tolerance, but not with some noise."""


def placement_of(size: str, n_ranks: int) -> Placement:
    """Gives the busy experts of a model replicas, a quarter more."""
    n_layers, top_k = 2, 8
    if size in DEEPSEEK_SIZES:
        sizes = DEEPSEEK_SIZES[size]
        n, n_layers = sizes["n_routed_experts"], sizes["num_hidden_layers"] - 1
    else:
        n, top_k = (SIZES[size][f"num_experts{x}"] for x in ("", "_per_tok"))
    counts = np.outer(1 + np.arange(n_layers), 1000 / np.arange(1, n + 1))
    return plan(counts, n_ranks, n // 4, top_k=top_k)


def prompts(n: int, seed: int = 0) -> list[str]:
    """Makes prompts of one to forty words."""
    random.seed(seed)
    return [" ".join(random.choices(_WORDS, k=random.randint(1, 40))) for _ in range(n)]


def _of_each(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Picks the value of a token at each position."""
    return values.gather(1, tokens[:, None])[:, 0]


def widened(model: Path) -> dict[str, torch.Tensor]:
    """Reads a checkpoint in blockwise FP8, matrices times their scales; in float32."""
    stored = load_file(model / "model.safetensors")
    weights = {}
    for name, weight in stored.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is not None:
            each = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            n, k = weight.shape
            weight = weight.float() * each[:n, :k]
        if not name.endswith("_scale_inv"):
            weights[name] = weight.float()
    return weights


def write_widened(model: Path, folder: Path) -> Path:
    """Writes a checkpoint in blockwise FP8 as one that is not; returns ``folder``."""
    shutil.copytree(model, folder)
    save_file(widened(model), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MORE_TOKEN = "<more>"
"""A token of the tokenizer that the embedding has no row for."""


def store_uncommonly(model: Path, folder: Path) -> Path:
    """Stores a checkpoint again, as few do; returns ``folder``.

    The experts of a layer are one tensor, head_dim is left to be computed, and one file
    has a copy of what another one has by the index. A file beside them, which the index
    does not name, has other values. The tokenizer has a token that the model lacks.
    """
    saved = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    saved.save_pretrained(folder, save_original_format=False, max_shard_size="300KB")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([MORE_TOKEN])
    tokenizer.save_pretrained(folder)
    first, *_, last = sorted(folder.glob("*.safetensors"))
    of_first = load_file(first)
    save_file(load_file(last) | of_first, last, {"format": "pt"})
    stale = {name: -weight for name, weight in of_first.items()}
    save_file(stale, folder / "old.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def model_of(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Loads a checkpoint in transformers, with images or without."""
    with_images = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=dtype)
    if getattr(model.config, "moe_intermediate_size", 0) % 8:
        # torch's grouped product wants rows of 16 bytes.
        model.set_experts_implementation("eager")
    return model


class Reference:
    """The float32 model of a checkpoint in transformers, given what was served."""

    def __init__(
        self,
        model: Path,
        in_bfloat16: bool,
        counts_ties: bool = True,
        noises: Sequence[float] = (),
    ) -> None:
        """Loads the model, on a GPU where there is one and it has room."""
        self.folder = model
        n_models = 1 + (in_bfloat16 and counts_ties)
        self._device = "cpu"
        if torch.cuda.is_available():
            # Files have two bytes a weight; the models take four and two, and room.
            n_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            n_needed = (1 + n_models) * n_bytes + 2 * 2**30
            if torch.cuda.mem_get_info()[0] > n_needed:
                self._device = "cuda"
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        # As stored, so that half the bytes come to the GPU; floats are exact then.
        stored = torch.bfloat16 if in_bfloat16 else torch.float32
        self._models = [
            model_of(model, dtype=stored).to(self._device).eval()
            for _ in range(n_models)
        ]
        self._models[0].float()
        self._noises = noises
        self.tally = Tally()

    def logits(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Runs the float32 model, and the one in bfloat16 if there is one."""
        with torch.no_grad():
            all_logits = [model(ids.to(self._device)).logits for model in self._models]
        return [logits[0].double().cpu() for logits in all_logits]

    def check(
        self,
        asked: list[int],
        served: list[int],
        tolerance: float,
        logprobs: list[float] | None = None,
    ) -> None:
        """Compares an answer, token by token. The model is given what was served, so
        that a tie does not end the comparison."""
        tally = self.tally
        ids = torch.tensor([asked + served[:-1]])
        logits, *rounded = (value[len(asked) - 1 :] for value in self.logits(ids))
        best = logits.max(1).values
        gaps = best - _of_each(logits, torch.tensor(served))
        tally.n_tokens += len(served)
        tally.n_ties += int((gaps > 0).sum())
        tally.worst_gap = max(tally.worst_gap, float(gaps.max()))
        most = torch.full_like(gaps, tolerance)
        firsts = [other[0].max() - other[0, served[0]] for other in rounded]
        if not firsts or max(firsts) > _FIRST_TOLERANCE:
            most[0] = min(tolerance, _FIRST_TOLERANCE)
        far = [int(i) for i in (gaps > most).nonzero()[:, 0]]
        for other in rounded:
            theirs = best - _of_each(logits, other.argmax(1))
            tally.n_ties_bfloat16 = tally.n_ties_bfloat16 or 0
            tally.n_ties_bfloat16 += int((theirs > 0).sum())
        tally.n_by_noise += len(far)
        for seed, noise in enumerate(self._noises if far else ()):
            noisy = self.logits_with_noise(ids, noise, seed)[:, len(asked) - 1 :]
            best = noisy.max(2).values
            least = (best - noisy[:, range(len(served)), served]).min(0).values
            far = [i for i in far if least[i] > most[i]]
            if not far:
                break
        assert not far, (asked, served, gaps, far)
        if logprobs is not None:
            mine = _of_each(logits.log_softmax(1), torch.tensor(served))
            off = (mine - torch.tensor(logprobs)).abs()
            assert off.max() <= tolerance, (asked, served, off)

    def logits_with_noise(
        self, ids: torch.Tensor, noise: float, seed: int
    ) -> torch.Tensor:
        """Runs the float32 model, whose modules all return something a little off, with
        several draws of that."""
        draw = torch.Generator(self._device).manual_seed(seed)

        def disturb(_module: object, _inputs: object, result: object) -> object:
            value, *more = result if isinstance(result, tuple) else (result,)
            if torch.is_tensor(value) and value.is_floating_point():
                off = torch.rand(value.shape, generator=draw, device=value.device)
                value = value * (1 + noise * (2 * off - 1))
            return (value, *more) if isinstance(result, tuple) else value

        hooks = [
            module.register_forward_hook(disturb)
            for name, module in self._models[0].model.named_modules()
            if name and not name.endswith("rotary_emb")
        ]
        try:
            with torch.no_grad():
                noisy = self._models[0](ids.to(self._device).expand(_DRAWS, -1))
            return noisy.logits.double().cpu()
        finally:
            for hook in hooks:
                hook.remove()


class Answer(NamedTuple):
    """What a server said to a prompt, greedily."""

    asked: list[int]  # Token ids of the prompt
    served: list[int]  # Token ids of the answer
    logprobs: list[float] | None
    """Log-probabilities of ``served``, if they were asked for."""


def ask_greedily(
    server: Server,
    model: Path,
    n_prompts: int,
    n_tokens: int,
    with_logprobs: bool = False,
) -> list[Answer]:
    """Asks for greedy completions."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    more = {"logprobs": 1} if with_logprobs else {}
    answers = []
    for prompt in prompts(n_prompts):
        asked = tokenizer(prompt).input_ids
        answer = server.complete(asked, n_tokens, return_token_ids=True, **more)
        assert len(answer["token_ids"]) == n_tokens, answer
        logprobs = answer["logprobs"]["token_logprobs"] if with_logprobs else None
        answers.append(Answer(asked, answer["token_ids"], logprobs))
    return answers


def wrong_answers(answers: dict[str, list[Answer]], model: Path) -> list[str]:
    """Compares bfloat16 servers' answers with transformers; prints a tally of each."""
    reference = Reference(model, in_bfloat16=True, counts_ties=False)
    wrong = []
    for name, of_server in answers.items():
        reference.tally = Tally()
        try:
            for asked, served, _ in of_server:
                reference.check(asked, served, TOLERANCES["bfloat16"])
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        print(f"{name}: {reference.tally}", flush=True)
    return wrong
