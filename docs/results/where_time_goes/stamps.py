# SPDX-License-Identifier: Apache-2.0
"""Prints when the warps of some blocks of the last launches came to what.

At commit 667b97d, with ``stamps.patch`` applied, on a host with two GPUs::

    python docs/results/where_time_goes/stamps.py 2 ours_reduced 1 128 512

Microseconds since the block's first warp began, at 1980 MHz; a column a warp.
Stamps of warps that did not come by in this launch are of an earlier one.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from max.driver import CPU

from bench import gpu_peers_max
from bench.gpu_shapes import Case, Config

MAX_TOKENS, TOP_K, N_EXPERTS, MAX_RANKS = 512, 8, 256, 128
BLOCKS = (0, 1, 60, 131)
DISPATCH = """entry barrier readers_seen indexed counts numbers ready entry_seen payload end
arrived published hold_end send_begin""".split()
COMBINE = "entry barrier sent_all sums added_own added - - - end".split()


def main() -> None:
    """Runs the chain of the benchmark, and reads the words of rank 0."""
    n_ranks, peer = int(sys.argv[1]), sys.argv[2]
    config = Config(peer, n_ranks, "h7168_e256_k8", "bfloat16", MAX_TOKENS)
    runner = gpu_peers_max.Runner(config, None)
    model = runner._model("fused")
    for n_tokens in map(int, sys.argv[3:]):
        case = Case(config, n_tokens, "uniform")
        data = gpu_peers_max.make_data(case, 0, exact_weights=True)
        inputs = runner._inputs("fused", data)
        model.execute(*inputs)
        runner._finish()
        model.capture(n_tokens, *inputs)
        replay = lambda: model.replay(n_tokens, *inputs)  # noqa: B023, E731
        seconds = runner._sample(replay, 20)
        print("T", n_tokens, "us", np.median(seconds) / config.n_layers("fused") * 1e6)
        words = inputs[-6 - 2 * n_ranks].to(CPU()).to_numpy()
        slots = 32 + 2 * (N_EXPERTS + MAX_RANKS + 1) + 2 * MAX_TOKENS * TOP_K
        show("dispatch", words[slots:], DISPATCH)
        show("combine", words[slots + 1024 :], COMBINE)
    sys.stdout.flush()
    os._exit(0)


def show(phase: str, words: np.ndarray, points: list[str]) -> None:
    """Prints the stamps of a phase: ``[blocks][points][warps]``."""
    for which, block in enumerate(BLOCKS):
        stamps = words[256 * which : 256 * (which + 1)].reshape(16, 16)
        stamps = stamps.astype(np.uint32)
        since = (stamps - stamps[0].min()).astype(np.int64)
        since[(stamps == 0) | (since > 2**31)] = -1
        print(phase, "block", block)
        for point, of_warps in zip(points, since):
            if (of_warps >= 0).any():
                cells = (f"{x / 1980:5.2f}" if x >= 0 else "    -" for x in of_warps)
                print(f"  {point:12}", " ".join(cells))


if __name__ == "__main__":
    main()
