# SPDX-License-Identifier: Apache-2.0
"""Serves a small random Qwen3-MoE with max_ep, and talks to it.

    python -m graphs.serve.run

Makes the checkpoint, starts ``max-ep serve`` on this machine's GPUs or on four ranks of
its CPU, waits until it is ready (the first time MAX compiles, for minutes), asks it a
question with the answer streamed, then several at once, and stops it.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from max.driver import accelerator_count

from max_ep.plural import counted

from .checkpoint import make_checkpoint
from .server import Server

LIMITS = [
    *("--max-length", "256"),
    *("--max-batch-size", "16"),
    *("--max-batch-input-tokens", "256"),
]
"""Limits of requests and batches; with others the model is compiled anew."""

_QUESTION = "What does an expert do with a token?"
_N_TOKENS = 16
_PROMPTS = ["A rank", "The router sends", "Each token has", "Dispatch and combine"]


def main() -> None:
    n_gpus = accelerator_count()
    where = counted(n_gpus, "GPU") if n_gpus else "four ranks of the CPU"
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "model", Path(folder) / "server.log"
        begin = time.monotonic()
        made = ("small", "bfloat16") if n_gpus else ("tiny", "float32")
        make_checkpoint(model, *made)
        print(f"checkpoint with random weights: {time.monotonic() - begin:.1f} s")
        flags = ["--gpus", str(n_gpus), "--ranks", "4", *LIMITS]
        command = ("max-ep", "serve")
        with Server(model, flags, log, command=command) as server:
            print(" ".join([*command, *server.command[2:]]).replace(folder, "..."))
            ready_s = server.wait_until_ready(
                1200, lambda line: print(line, flush=True)
            )
            print(f"ready on {where} after {ready_s:.0f} s\n")
            print(f"> {_QUESTION}\n")
            for piece in server.chat(_QUESTION, _N_TOKENS):
                print(piece, end="", flush=True)
            print("\n")
            with ThreadPoolExecutor(len(_PROMPTS)) as pool:
                tokens = [_N_TOKENS] * len(_PROMPTS)
                answers = pool.map(server.complete, _PROMPTS, tokens)
                for prompt, answer in zip(_PROMPTS, answers):
                    print(f"> {prompt} ...{answer['text']!r}")
                    if not answer["text"]:
                        raise SystemExit("the server gave no answer")
        print("\nstopped")


if __name__ == "__main__":
    main()
