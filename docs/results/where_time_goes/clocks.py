# SPDX-License-Identifier: Apache-2.0
"""Prints when warps of some blocks came to what, and for how long they were at it.

At commit 517e073, with ``clocks.patch`` applied, on a host with two GPUs, and graphs
that ``python -m bench.gpu_round_trip --compile-only --mef-dir DIR`` made of it::

    python docs/results/where_time_goes/clocks.py DIR 2 MAX_TOKENS TOKENS...

Microseconds since the block's first warp began, at 1980 MHz; a column a warp. Rows
that begin with ``d_``, ``s_`` and ``r_`` are sums of times. What a warp did not come
by in this launch is of an earlier one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from max.driver import CPU

from bench import gpu_peers_max
from bench.gpu_shapes import Case, Config

TOP_K, N_EXPERTS, MAX_RANKS = 8, 256, 128
BLOCKS = (0, 1, 60, 131)
DISPATCH = """entry barrier readers_seen done counts numbers counted receive_begin
send_begin end d_entry d_flag d_row n_items d_store d_publish""".split()
COMBINE = """entry barrier sent_all - - - - - n_items end s_meta s_add s_put r_meta
r_add r_part""".split()


def main() -> None:
    """Runs the chain of the benchmark, and reads the words of rank 0."""
    folder, n_ranks, max_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = Config("ours_reduced", n_ranks, "h7168_e256_k8", "bfloat16", max_tokens)
    runner = gpu_peers_max.Runner(config, Path(folder) / config.name)
    model = runner._model("fused")
    for n_tokens in map(int, sys.argv[4:]):
        case = Case(config, n_tokens, "uniform")
        data = gpu_peers_max.make_data(case, 0, exact_weights=True)
        inputs = runner._inputs("fused", data)
        model.execute(*inputs)
        runner._finish()
        model.capture(n_tokens, *inputs)
        replay = lambda: model.replay(n_tokens, *inputs)  # noqa: B023, E731
        seconds = runner._sample(replay, 20)
        period = np.median(seconds) / config.n_layers("fused") * 1e6
        print(f"{n_tokens} tokens, {n_ranks} ranks: {period:.1f} us")
        counters = inputs[len(inputs) - len(runner._comm.model_inputs())]
        words = counters.to(CPU()).to_numpy()
        slots = 32 + 2 * (N_EXPERTS + MAX_RANKS + 1) + 2 * max_tokens * TOP_K
        show("dispatch", words[slots:], DISPATCH)
        show("combine", words[slots + 1024 :], COMBINE)
    sys.stdout.flush()
    os._exit(0)


def show(phase: str, words: np.ndarray, points: list[str]) -> None:
    """Prints what a phase noted: ``[blocks][points][warps]``."""
    for which, block in enumerate(BLOCKS):
        noted = words[256 * which : 256 * (which + 1)].reshape(16, 16)
        noted = noted.astype(np.uint32).astype(np.int64)
        print(phase, "block", block)
        for point, of_warps in zip(points, noted):
            if point.startswith("n_"):
                cells = [f"{x:6d}" for x in of_warps]
            else:
                since = 0 if point[1] == "_" else noted[0].min()
                cells = [
                    f"{(x - since) / 1980:6.1f}" if x and x >= since else "     -"
                    for x in of_warps
                ]
            if point != "-":
                print(f"  {point:12}", " ".join(cells))


if __name__ == "__main__":
    main()
