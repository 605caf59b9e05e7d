# SPDX-License-Identifier: Apache-2.0
"""Times what runs on some streams of this process, by CUDA events on each.

A host that is slower than its GPUs must not be what is timed. So before a sample each
stream gets a kernel that only waits, until all of the sample has been enqueued; after
it comes one replay that is not timed, in which the GPUs meet.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

_HERTZ = 2e9
"""No GPU counts its cycles faster."""
_LONGEST_HOLD_S = 0.05


class Clock:
    """Events at the begin and the end of a sample, on each stream."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._events = [
            [torch.cuda.Event(enable_timing=True) for _ in streams] for _ in range(2)
        ]

    def hold(self, seconds: float) -> None:
        """Keeps the streams waiting at least so long."""
        for stream in self._streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(min(seconds, _LONGEST_HOLD_S) * _HERTZ))

    def begin(self) -> None:
        self._mark(0)

    def end(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        for event, stream in zip(self._events[which], self._streams):
            event.record(stream)

    def seconds(self) -> list[float]:
        """Waits for the end; returns the time of each stream."""
        for event in self._events[1]:
            event.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(*self._events)]


def back_to_back(
    clock: Clock,
    replay: Callable[[], object],
    n_replays: int,
    n_samples: int,
    meet: Callable[[], object],
) -> np.ndarray:
    """Times ``n_replays`` without a pause: seconds ``[n_samples, n_streams]``.

    ``meet`` is called before each sample, and returns when no GPU of the group works.
    """
    hold = 0.0

    def sample() -> list[float]:
        nonlocal hold
        meet()
        clock.hold(hold)
        enqueued = time.perf_counter()
        replay()
        clock.begin()
        for _ in range(n_replays):
            replay()
        clock.end()
        hold = max(hold, 1.5 * (time.perf_counter() - enqueued))
        return clock.seconds()

    return _samples(sample, n_samples)


def from_idle(
    clock: Clock,
    replay: Callable[[], object],
    n_samples: int,
    meet: Callable[[], object],
) -> np.ndarray:
    """Times a replay that idle GPUs begin with: seconds ``[n_samples, n_streams]``."""

    def sample() -> list[float]:
        meet()
        clock.begin()
        replay()
        clock.end()
        return clock.seconds()

    return _samples(sample, n_samples)


def _samples(sample: Callable[[], list[float]], n_samples: int) -> np.ndarray:
    """Takes samples after some that warm up."""
    gc.collect()
    gc.disable()
    try:
        return np.array([sample() for _ in range(n_samples + 5)][5:])
    finally:
        gc.enable()


def summary(
    seconds: np.ndarray | Sequence[float], per: int, name: str = ""
) -> dict[str, float]:
    """Returns median and p95 in microseconds of ``seconds / per``: ``us`` and ``p95``,
    or of another ``name`` (``idle_us``)."""
    us = np.array(seconds) / per * 1e6
    found = {f"{name}us": np.median(us), f"{name}p95": np.percentile(us, 95)}
    return {key: round(float(value), 5) for key, value in found.items()}
