# SPDX-License-Identifier: Apache-2.0
"""Serves DeepSeek-V3 on two GPUs, and compares it as tests/test_serve.py does, quicker.

In the project's folder, with graphs that ``max warm-cache --target cuda:sm_90a
--export-mefs COMPILED`` made with the same flags::

    python -m graphs.serve.checkpoint MODEL --size deepseek --dtype bfloat16
    PYTHONPATH=.:tests python docs/results/serving_gaps/deepseek.py MODEL COMPILED
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from serving import Reference, prompts

from graphs.serve.run import LIMITS, device_flags
from graphs.serve.server import CUSTOM_ARCHITECTURES, POOL_VARIABLE, Server

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 48, 64, 100, 127, 128, 129]
AT_ONCE_S = 15


def gaps(reference: Reference, prompt: list[int], served: list[int]) -> list[list]:
    """Returns how far behind float32's choices those served are, and bfloat16's."""
    both = reference.logits(torch.tensor([prompt + served[:-1]]))
    logits, rounded = (value[len(prompt) - 1 :] for value in both)
    best = logits.max(1).values
    return [
        [round(float(x), 3) for x in best - logits.gather(1, chosen[:, None])[:, 0]]
        for chosen in (torch.tensor(served), rounded.argmax(1))
    ]


def main() -> None:
    """Runs the server and prints what it is asked."""
    model, compiled = Path(sys.argv[1]), sys.argv[2]
    flags = [*LIMITS, *device_flags(2, 1), *CUSTOM_ARCHITECTURES]
    flags += ["--device-memory-utilization", "0.2", "--precompiled-mefs", compiled]
    log = Path(tempfile.mkdtemp()) / "server.log"
    with Server(model, flags, log, {POOL_VARIABLE: "30"}) as server:
        reference = Reference(model, in_bfloat16=True)
        server.wait_until_ready(600, print)

        def ask(prompt: list[int], n: int) -> list[int]:
            return server.complete(prompt, n, return_token_ids=True)["token_ids"]

        random.seed(5)
        for length in LENGTHS:
            prompt = [random.randint(3, 500) for _ in range(length)]
            served, rounded = gaps(reference, prompt, ask(prompt, 6))
            print(f"{length:4} gap {served} hf16 {rounded}")
        for text in prompts(20):
            asked = reference.tokenizer(text).input_ids
            reference.check(asked, ask(asked, 32), 10.0)
        print(reference.tally)

        texts = prompts(64, seed=1)
        asked = [reference.tokenizer(text).input_ids for text in texts]
        random.seed(2)
        n_tokens = [random.randint(1, 24) for _ in asked]
        alone = [ask(p, n) for p, n in zip(asked, n_tokens)]
        stop = threading.Event()

        def leave_midway() -> None:
            while not stop.is_set():
                answer = server.chat(random.choice(texts), 100)
                for _, _piece in zip(range(3), answer):
                    pass
                answer.close()

        rounds = []
        with ThreadPoolExecutor(72) as pool:
            leavers = [pool.submit(leave_midway) for _ in range(8)]
            begin = time.monotonic()
            while time.monotonic() - begin < AT_ONCE_S:
                rounds.append(list(pool.map(ask, asked, n_tokens)))
            stop.set()
            for leaver in leavers:
                leaver.result()
        answers = [(a, one) for answered in rounds for a, one in zip(answered, alone)]
        n_same = sum(answer == one for answer, one in answers)
        print(
            f"{len(rounds)} rounds of 64, {n_same} of {len(answers)} answers as alone"
        )


if __name__ == "__main__":
    main()
