# SPDX-License-Identifier: Apache-2.0
"""Prints how long a replay takes by the host's clock, and by each GPU's.

At commit c464cb0, with ``timeline.patch`` applied, on a host with two GPUs, and graphs
that ``python -m bench.gpu_round_trip --compile-only --mef-dir DIR --ranks 2 --dtypes
bfloat16 --routings uniform --peers ours_reduced --forms fused --tokens 128`` made::

    python docs/results/where_time_goes/timeline.py DIR TOKENS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from max.driver import CPU

from bench import gpu_peers_max
from bench.gpu_shapes import Case, Config

TOP_K, N_EXPERTS, MAX_RANKS, MAX_TOKENS, N_LAYERS = 8, 256, 128, 128, 64
SLOTS = 32 + 2 * (N_EXPERTS + MAX_RANKS + 1) + 2 * MAX_TOKENS * TOP_K

# Of block 0's first warp, in a layer; eight words behind them are combine's.
ENTERED, AWAITED, IN_STEP, ENDED, COMBINE = 0, 1, 2, 3, 8


def main() -> None:
    """Runs the chain of the benchmark, and reads the words of both ranks."""
    config = Config("ours_reduced", 2, "h7168_e256_k8", "bfloat16", MAX_TOKENS)
    runner = gpu_peers_max.Runner(config, Path(sys.argv[1]) / config.name)
    model = runner._model("fused")
    for n_tokens in map(int, sys.argv[2:]):
        data = gpu_peers_max.make_data(
            Case(config, n_tokens, "uniform"), 0, exact_weights=True
        )
        inputs = runner._inputs("fused", data)
        model.execute(*inputs)
        runner._finish()
        model.capture(n_tokens, *inputs)
        replay = lambda: model.replay(n_tokens, *inputs)  # noqa: B023, E731
        runner._sample(replay, 20)
        first = len(inputs) - len(runner._comm.model_inputs())
        print(f"{n_tokens} tokens")
        for _ in range(60):
            (seconds,) = runner._sample(replay, 1)
            words = [x.to(CPU()).to_numpy()[SLOTS:] for x in inputs[first : first + 2]]
            print(shown(seconds, [w[: 16 * N_LAYERS].reshape(-1, 16) for w in words]))
    sys.stdout.flush()
    os._exit(0)


def shown(seconds: float, marks: list[np.ndarray]) -> str:
    """Returns a line: microseconds a layer, by the host and on each GPU."""
    cells = [f"host {seconds / N_LAYERS * 1e6:5.1f}"]
    for layers in marks:
        since = layers.astype(np.uint32) - layers[0, AWAITED].astype(np.uint32)
        us = since.astype(np.int32) / 1000
        us = us[np.argsort(us[:, AWAITED])]
        whole = us[-1, COMBINE + ENDED] - us[0, AWAITED]
        dispatch = np.median(us[:, ENDED] - us[:, AWAITED])
        combine = np.median(us[:, COMBINE + ENDED] - us[:, COMBINE + AWAITED])
        step = np.median(us[1:, AWAITED] - us[:-1, AWAITED])
        cells.append(
            f"whole {whole / N_LAYERS:5.1f} median {step:5.1f} "
            f"dispatch {dispatch:4.1f} combine {combine:4.1f}"
        )
    return " | ".join(cells)


if __name__ == "__main__":
    main()
