# SPDX-License-Identifier: Apache-2.0
"""Says how far a served model's greedy tokens are from the float32 reference's.

    python -m bench.serving_gaps --gpus 1 --model FOLDER

For prompts of 1 to 129 random tokens: how much better, in logits, the reference likes
its own first choice than each of the six tokens that were served (``served``), and than
the choice of the same model in bfloat16 in transformers (``bfloat16``). Zero where they
agree. A gap of ``served`` that ``bfloat16`` has not is not a matter of rounding.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from graphs.serve.run import device_flags
from graphs.serve.server import Server

_LENGTHS = [1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 31, 32, 33, 40, 48]
_LENGTHS += [63, 64, 65, 80, 100, 127, 128, 129]
_N_TOKENS = 6


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--architectures", default="max_ep.serve", help="'' for MAX's own"
    )
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="last: for max serve"
    )
    args = parser.parse_args()
    flags = ["--max-length", "256", "--max-batch-size", "16", *args.flags]
    flags += ["--max-batch-input-tokens", "256", *device_flags(args.gpus, 1)]
    if args.architectures:
        flags += ["--custom-architectures", args.architectures]
    if args.gpus:  # the references need room
        flags += ["--device-memory-utilization", "0.3"]
    device = "cuda" if args.gpus else "cpu"
    reference, rounded = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    random.seed(5)
    log = Path(tempfile.mkdtemp()) / "server.log"
    with Server(args.model, flags, log) as server:
        server.wait_until_ready(1200, print)
        for length in _LENGTHS:
            prompt = [random.randint(3, 500) for _ in range(length)]
            answer = server.complete(prompt, _N_TOKENS, return_token_ids=True)
            served = answer["token_ids"]
            ids = torch.tensor([prompt + served[:-1]], device=device)
            with torch.no_grad():
                logits = reference(ids).logits[0, length - 1 :]
                theirs = rounded(ids).logits[0, length - 1 :].argmax(1)
            best = logits.max(1).values
            for name, chosen in (
                ("served", torch.tensor(served, device=device)),
                ("bfloat16", theirs),
            ):
                gaps = best - logits.gather(1, chosen[:, None])[:, 0]
                print(f"{length:4} {name:8}", [round(float(g), 3) for g in gaps])


if __name__ == "__main__":
    main()
