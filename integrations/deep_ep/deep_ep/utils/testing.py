# SPDX-License-Identifier: Apache-2.0
"""Times, as test programs of DeepEP take them; without a GPU by the clock.

Kernels here have other names than those that these programs ask for. So a call counts
as a whole, and each name gets the time of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Returns the average, shortest and longest time of a call, in seconds."""
    times = []
    for _ in range(num_warmups):
        fn()
    for _ in range(num_tests):
        if flush_l2 and torch.cuda.is_available():
            torch.empty(1 << 26, dtype=torch.int32, device="cuda").zero_()
        _wait()
        start = time.perf_counter()
        fn()
        _wait()
        times.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    num_kernels_per_period: int = 1,
    flush_l2: bool = True,
    **of_profiler: Any,
) -> Any:
    """Returns the time of a call for each name; a list of them for each, if a kernel is
    launched several times. What is for the profiler is ignored."""
    average, *_ = bench(fn, 1, num_tests, flush_l2=flush_l2)
    n = num_kernels_per_period
    of_name: Any = [average] * n if n > 1 else average
    return of_name if isinstance(kernel_names, str) else [of_name for _ in kernel_names]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
