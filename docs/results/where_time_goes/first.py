# SPDX-License-Identifier: Apache-2.0
"""Prints when the warps of a launch came to what, as quantiles over all of them.

At commit aab39b8, with ``first.patch`` applied, at fca717b likewise (``git apply
-C2``), or at e77ddb8 with ``first_before.patch`` and this file beside it, on a host
with two GPUs, and graphs that ``python -m bench.gpu_round_trip --compile-only
--mef-dir DIR`` made of it::

    python docs/results/where_time_goes/first.py DIR FORM MAX_TOKENS TOKENS...

Microseconds since the first warp of the launch had waited for the kernel before it:
a block's clock, at 1980 MHz, set by the clock that all multiprocessors share. With
marks a layer takes some tenths of a microsecond longer. Of each rank's last four
generations the middle ones are shown.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import numpy as np
from max.driver import CPU

from bench import gpu_peers_max
from bench.gpu_shapes import Case, Config

GHZ = 1.98
PHASES = "dispatch dispatch_wait combine combine_wait".split()
SHAPE = (4, len(PHASES), 132, 16, 24)
"""Generation modulo 4, phase, block, warp, mark."""

_BEGIN = {0: "entered", 1: "awaited", 2: "header", 3: "in step"}
_DISPATCH = _BEGIN | {
    4: "readers known (senders, index warps)",
    5: "first word told, or numbers seen",
    6: "entries told, or tokens sent",
    7: "counts seen",
    8: "tables written",
    9: "rows counted",
    10: "numbers known",
    16: "part's turn",
    17: "part's entries seen",
    18: "part seen",
    19: "its rows known",
    20: "rows stored",
    15: "end",
}
_COMBINE = _BEGIN | {
    4: "reads told",
    5: "notes read (senders)",
    6: "rows added (senders)",
    8: "partial sum put",
    16: "sum's turn",
    17: "its notes read",
    18: "own rows added",
    19: "partial sums seen",
    20: "sum stored",
    15: "end",
}
MARKS = [_DISPATCH, _DISPATCH, _COMBINE, _COMBINE]


def main() -> None:
    """Runs the chain of the benchmark, and reads the marks of both ranks."""
    folder, form, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = Config("ours_reduced", 2, "h7168_e256_k8", "bfloat16", max_tokens)
    runner = gpu_peers_max.Runner(config, Path(folder) / config.name)
    model = runner._model(form)
    for n_tokens in map(int, sys.argv[4:]):
        case = Case(config, n_tokens, "uniform")
        runner.check(case, form, seed=1)
        data = gpu_peers_max.make_data(case, 0, exact_weights=True)
        inputs = runner._inputs(form, data)
        out = model.execute(*inputs)
        runner._finish()
        runner._check_chain(case, form, data, out)
        model.capture(n_tokens, *inputs)

        def eight() -> None:
            for _ in range(8):
                model.replay(n_tokens, *inputs)  # noqa: B023

        period = np.median(runner._sample(eight, 30)) / 8 / config.n_layers(form)
        print(f"== {form}, {n_tokens} tokens: {period * 1e6:.2f} us a layer")
        first = len(inputs) - len(runner._comm.model_inputs())
        for rank in range(2):
            words = inputs[first + rank].to(CPU()).to_numpy().reshape(-1)
            marks = words[-np.prod(SHAPE) :].reshape(SHAPE).astype(np.uint32)
            show(rank, marks.astype(np.int64))
    sys.stdout.flush()
    os._exit(0)


def show(rank: int, marks: np.ndarray) -> None:
    """Prints quantiles of what one rank's warps have noted."""
    block_offset = np.where(
        marks[..., 3] != 0, marks[..., 13] - marks[..., 12] / GHZ, 0
    )
    block_offset = np.median(block_offset, axis=3)[..., None, None]
    since_entry = marks - marks[..., :1]
    noted = (since_entry >= 0) & (since_entry < 400_000) & (marks != 0)
    times = np.where(noted, marks / GHZ + block_offset, np.nan) / 1000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Phases of the other form.
        begins = np.nanmin(times[..., 1].reshape(4, 4, -1), axis=2)
    order = sorted((begins[g, p], g, p) for g, p in np.argwhere(~np.isnan(begins)))
    for i in range(2, 2 + len({p for _, _, p in order})):
        begin, g, p = order[i]
        print(f"rank {rank}, {PHASES[p]}: warps | first, median, last")
        for mark, name in MARKS[p].items():
            at = times[g, p, ..., mark] - begin
            at = at[~np.isnan(at)]
            if len(at):
                numbers = " ".join(f"{x:6.2f}" for x in np.quantile(at, [0, 0.5, 1]))
                print(f"  {name:37} {len(at):5} | {numbers}")
        if i + 1 < len(order):
            after = order[i + 1][0] - begin
            print(f"  {'the next launch has waited':37}       | {after:6.2f}")


if __name__ == "__main__":
    main()
