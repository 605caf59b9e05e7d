# SPDX-License-Identifier: Apache-2.0
"""GPU time of the captured graphs that a server of ``bench.serving`` replays.

Part of the server: the benchmark's custom architectures call :func:`install`. While the
file that ``BENCH_GRAPH_TIMES`` names exists, a step replays its graph many times more,
back to back, and adds a line of JSON to it: milliseconds of a replay and, where torch
can trace GPUs, microseconds of each kernel. Otherwise a step costs a look at the clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "BENCH_GRAPH_TIMES"
"""Environment variable with the file."""

LOOK_EVERY_S = 0.5
_REPLAYS, _TRACED = 20, 5
_MOST_LINES = 3
"""Lines of one size while the file exists: each of these steps waits for replays."""


def install() -> None:
    """Lets MAX's replays of this process be timed, if the variable is set."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from max.pipelines.lib import graph_capture

    runner = graph_capture.ServeGraphCaptureRunner
    runner.replay = timing(runner.replay, Path(path), graph_capture)


def timing(replay: Any, path: Path, graph_capture: Any) -> Any:
    """Returns a method in place of ``ServeGraphCaptureRunner.replay``."""
    looked, n_lines = 0.0, dict[int, int]()

    def replay_and_time(self: Any, **given: Any) -> Any:
        nonlocal looked, n_lines
        outputs = replay(self, **given)
        now = time.monotonic()
        if not n_lines and now - looked < LOOK_EVERY_S:
            return outputs
        looked = now
        if not path.exists():
            n_lines = {}
            return outputs
        batch = given["batch_characteristics"]
        n_lines[batch.batch_size] = n_lines.get(batch.batch_size, 0) + 1
        if n_lines[batch.batch_size] <= _MOST_LINES:
            row = {"requests": batch.batch_size}
            row |= _time(self, self._records[batch], graph_capture)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return outputs

    return replay_and_time


def _time(runner: Any, key: Any, graph_capture: Any) -> dict[str, Any]:
    """Replays a graph again and again; returns times of one replay.

    It writes what it wrote before: the same tokens at the same places.
    """
    inputs = (*runner.graph_entries[key][0], *runner._signal_buffers)
    packed = graph_capture._pack_model_graph_key(key)
    devices = {b.device.id: b.device for b in inputs if not b.device.is_host}

    def replay(n: int) -> None:
        for device in devices.values():
            device.synchronize()
        for _ in range(n):
            runner._engine_model.replay(packed, *inputs)
        for device in devices.values():
            device.synchronize()

    replay(1)
    begin = time.perf_counter()
    replay(_REPLAYS)
    ms = 1e3 * (time.perf_counter() - begin) / _REPLAYS
    return {"ms": ms, "kernels": _kernels(lambda: replay(_TRACED))}


def _kernels(run: Callable[[], None]) -> dict[str, tuple[float, float]]:
    """Traces replays; returns launches and microseconds of each kernel in one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    cuda = torch.autograd.DeviceType.CUDA
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as p:
            run()
    except RuntimeError as error:  # no CUPTI
        print(f"kernels are not traced: {error}", flush=True)
        return {}
    found: dict[str, tuple[float, float]] = {}
    for event in p.profiler.kineto_results.events():
        if event.device_type() != cuda:
            continue
        n, us = found.get(event.name(), (0.0, 0.0))
        us += event.duration_ns() / 1e3 / _TRACED
        found[event.name()] = n + 1 / _TRACED, us
    return found
