# SPDX-License-Identifier: Apache-2.0
"""Serves a small random Qwen3-MoE with max_ep, and talks to it.

    python -m graphs.serve.run

Makes the checkpoint, starts ``max-ep serve`` on this machine's GPUs or on four ranks of
its CPU, waits until it is ready (the first time MAX compiles, for minutes), asks it a
question with the answer streamed, then several at once, and stops it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from max.driver import accelerator_count

from .checkpoint import make_checkpoint
from .server import Server

LIMITS = [
    *("--max-length", "256"),
    *("--max-batch-size", "16"),
    *("--max-batch-input-tokens", "256"),
]
"""Of requests and batches; a server with others compiles the model anew."""

_QUESTION = "What does an expert do with a token?"
_PROMPTS = ["A rank", "The router sends", "Each token has", "Dispatch and combine"]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=accelerator_count())
    parser.add_argument("--ranks", type=int, default=4, help="ranks, on CPU")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--log", type=Path, help="keep what the server prints here")
    args = parser.parse_args()
    where = f"{args.gpus} GPUs" if args.gpus else f"{args.ranks} ranks of the CPU"
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "model", args.log or Path(folder) / "server.log"
        begin = time.monotonic()
        if args.gpus:
            make_checkpoint(model, "small", "bfloat16")
        else:
            make_checkpoint(model, "tiny", "float32")
        print(f"checkpoint with random weights: {time.monotonic() - begin:.1f} s")
        flags = ["--gpus", str(args.gpus), "--ranks", str(args.ranks), *LIMITS]
        command = ("max-ep", "serve")
        with Server(model, flags, log, command=command) as server:
            print(" ".join([*command, *server.command[2:]]).replace(folder, "..."))
            ready_s = server.wait_until_ready(
                1200, lambda line: print(line, flush=True)
            )
            print(f"ready on {where} after {ready_s:.0f} s\n")
            print(f"> {_QUESTION}\n")
            for piece in server.chat(_QUESTION, args.max_new_tokens):
                print(piece, end="", flush=True)
            print("\n")
            with ThreadPoolExecutor(len(_PROMPTS)) as pool:
                tokens = [args.max_new_tokens] * len(_PROMPTS)
                answers = pool.map(server.complete, _PROMPTS, tokens)
                for prompt, answer in zip(_PROMPTS, answers):
                    print(f"> {prompt} ...{answer['text']!r}")
                    if not answer["text"]:
                        raise SystemExit("the server gave no answer")
        print("\nstopped")


if __name__ == "__main__":
    main()
