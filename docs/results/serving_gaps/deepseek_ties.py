# SPDX-License-Identifier: Apache-2.0
"""Serves DeepSeek-V3 on two GPUs, and looks for its ties, as tests/test_serve.py does.

In the project's folder, with graphs that ``max warm-cache --target cuda:sm_90a
--export-mefs COMPILED`` made with the same flags (and ``MAX_EP_PROTOCOL``, if it is
set)::

    python -m graphs.serve.checkpoint MODEL --size deepseek --dtype bfloat16
    PYTHONPATH=.:tests python docs/results/serving_gaps/deepseek_ties.py MODEL COMPILED
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from serving import NOISES, Reference, ask_greedily

from graphs.serve.run import LIMITS, device_flags
from graphs.serve.server import CUSTOM_ARCHITECTURES, POOL_VARIABLE, Server

N_PROMPTS, N_TOKENS = 60, 32
DRAWS_S = 50


def summary(gaps: torch.Tensor) -> str:
    """Says how many tokens are behind the first choice, and how far."""
    return (
        f"{len(gaps)} tokens, {int((gaps > 0).sum())} not the first choice, "
        f"{int((gaps > 0.15).sum())} over 0.15, {int((gaps > 0.3).sum())} over 0.3, "
        f"by at most {float(gaps.max()):.3f}"
    )


def main() -> None:
    """Runs the server, asks it, and compares."""
    model, compiled = Path(sys.argv[1]), sys.argv[2]
    flags = [*LIMITS, *device_flags(2, 0), *CUSTOM_ARCHITECTURES]
    flags += ["--device-memory-utilization", "0.2", "--precompiled-mefs", compiled]
    log = Path(tempfile.mkdtemp()) / "server.log"
    with Server(model, flags, log, {POOL_VARIABLE: "20"}) as server:
        server.wait_until_ready(600, print)
        answers = ask_greedily(server, model, N_PROMPTS, N_TOKENS)
    reference = Reference(model, in_bfloat16=True)
    all_gaps: dict[str, list] = {"served": [], "bfloat16": [], "first tokens": []}
    n_far, n_drawn, fewest = 0, 0, len(NOISES)
    begin = time.monotonic()
    for asked, served, _ in answers:
        ids = torch.tensor([asked + served[:-1]])
        exact, rounded = (v[len(asked) - 1 :] for v in reference.logits(ids))
        best = exact.max(1).values
        gaps = best - exact.gather(1, torch.tensor(served)[:, None])[:, 0]
        theirs = best - exact.gather(1, rounded.argmax(1)[:, None])[:, 0]
        all_gaps["served"].append(gaps)
        all_gaps["bfloat16"].append(theirs)
        all_gaps["first tokens"].append(gaps[:1])
        most = torch.full_like(gaps, 0.15)
        most[0] = 0.06
        far = [int(i) for i in (gaps > most).nonzero()[:, 0]]
        n_far += len(far)
        if not far or time.monotonic() - begin > DRAWS_S:
            continue
        n_drawn += len(far)
        found = dict.fromkeys(far, 0)
        for seed, noise in enumerate(NOISES):
            noisy = reference.logits_with_noise(ids, noise, seed)[len(asked) - 1 :]
            for i in far:
                found[i] += bool(noisy[i].max() - noisy[i, served[i]] <= most[i])
        fewest = min(fewest, *found.values())
    for name, gaps in all_gaps.items():
        print(name, summary(torch.cat(gaps)))
    print(
        f"{n_drawn} of {n_far} far ones looked for: each in {fewest} or more of "
        f"{len(NOISES)} draws"
    )


if __name__ == "__main__":
    main()
