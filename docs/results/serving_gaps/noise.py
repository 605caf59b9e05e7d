# SPDX-License-Identifier: Apache-2.0
"""Shows what noise explains of a model whose experts change with a rounding.

In the project's folder, on CPU::

    python -m graphs.serve.checkpoint MODEL --size deepseek --dtype bfloat16
    PYTHONPATH=.:tests python docs/results/serving_gaps/noise.py MODEL SERVED N

SERVED is what chooses the next tokens in N prompts of 100 random ones: ``bfloat16``,
transformers' model; a number, the float32 model with so much noise; ``wrong``: the
second best, where that is 0.3 behind, at each twelfth of such places. Those more than
0.15 behind are looked for in draws with noise, as ``tests/serving.py`` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import serving
import torch
from serving import Reference


def main() -> None:
    """Runs the command line."""
    model, served, n_prompts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    reference = Reference(model, in_bfloat16=True, counts_ties=served == "bfloat16")
    torch.manual_seed(8)
    n_ties, far, draws = 0, [], []
    for k in range(n_prompts):
        ids = torch.randint(3, 500, (1, 100))
        exact, *rounded = reference.logits(ids)
        best = exact.max(1).values
        if served == "wrong":
            chosen = exact.argsort(1)[:, -2]
        elif served == "bfloat16":
            chosen = rounded[0].argmax(1)
        else:
            noise = float(served)
            chosen = reference.logits_with_noise(ids, noise, 100_000 + k).argmax(1)
        gaps = best - exact.gather(1, chosen[:, None])[:, 0]
        n_ties += int((gaps > 0).sum())
        left = [int(i) for i in (gaps > 0.15).nonzero()[:, 0]]
        if served == "wrong":
            left = [int(i) for i in (gaps > 0.3).nonzero()[:, 0]][::12]
        far += [float(gaps[i]) for i in left]
        for seed, noise in enumerate(serving.NOISES if left else ()):
            noisy = reference.logits_with_noise(ids, noise, seed)
            for i in [i for i in left if noisy[i].max() - noisy[i, chosen[i]] <= 0.15]:
                draws.append(seed + 1)
                left.remove(i)
            if not left:
                break
    print(
        f"{served}: {100 * n_prompts} tokens, {n_ties} not the first choice, "
        f"{len(far)} looked for, by at most {max(far):.2f}; {len(draws)} found, in at "
        f"most {max(draws, default=0)} draws"
    )


if __name__ == "__main__":
    main()
