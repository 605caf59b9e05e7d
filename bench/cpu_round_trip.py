# SPDX-License-Identifier: Apache-2.0
"""Round trip on CPU beside memcpy: ``python -m bench.cpu_round_trip``.

All ranks in one process: dispatch, then combine of the dispatched rows (for FP8 of
other rows of the combine dtype), through a MAX graph. The roof is ``memcpy`` (NumPy,
one thread, and all cores) of the bytes that must move: each row once to its expert
and once back. Results are compared before and after timing.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from max.driver import CPU
from max.engine import InferenceSession
from max.graph import Module

from max_ep import extension_path
from max_ep.bench import runs
from max_ep.bench.cases import SHAPES, Case, Config, row_bytes
from max_ep.bench.peer_ep import Peer

WARM_UPS, SAMPLES = 5, 40
SHAPE = "h2048_e64_k8"
PROTOCOLS = {"by_expert": "by_expert", "by_rank": "rows"}
"""Columns of the table, and their peers."""


SIZES = {"decode": 8, "prefill": 512}
"""Tokens of a rank."""


def bytes_to_move(n_choices: int, wire: str) -> int:
    """Returns the token bytes on the wire: a row for each choice, both ways."""
    return n_choices * sum(row_bytes(SHAPES[SHAPE], w) for w in (wire, "bfloat16"))


def memcpy(n_bytes: int, n_threads: int) -> Callable[[], None]:
    """Returns a function that copies ``n_bytes``, split over threads."""
    source, target = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
    ends = [n_bytes * i // n_threads for i in range(n_threads + 1)]

    def copy_chunk(begin: int, end: int) -> None:
        np.copyto(target[begin:end], source[begin:end])

    def copy() -> None:
        chunks = zip(ends[1:], ends[2:])
        threads = [threading.Thread(target=copy_chunk, args=chunk) for chunk in chunks]
        for thread in threads:
            thread.start()
        copy_chunk(*ends[:2])
        for thread in threads:
            thread.join()

    return copy


def sample(functions: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Times functions in turn, so that a busy moment meets all of them; in ms."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(-WARM_UPS, SAMPLES):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if i >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def measure(
    session: InferenceSession, size: str, wire: str, n_cores: int, n_ranks: int = 4
) -> dict:
    """Measures one row of the table."""
    module, cases, n_tokens = Module(), {}, SIZES[size]
    for name, peer in PROTOCOLS.items():
        config = Config(peer, n_ranks, SHAPE, wire, n_tokens, "cpu", 1)
        cases[name] = Case(config, "split", n_tokens, "uniform")
    peers = {name: Peer(case.config) for name, case in cases.items()}
    for peer in peers.values():
        peer.graph("split", is_check=False, module=module)
    models = session.load_all(module, custom_extensions=[extension_path()])
    n_bytes = bytes_to_move(n_ranks * n_tokens * SHAPES[SHAPE].top_k, wire)
    functions = dict(memcpy_1=memcpy(n_bytes, 1), memcpy_all=memcpy(n_bytes, n_cores))
    checks = {}
    try:
        for (name, peer), model in zip(peers.items(), models.values()):
            peer.join(session)
            inputs, checks[name] = peer.start(cases[name])
            functions[name] = functools.partial(model.execute, *inputs)
            checks[name](functions[name]())
        times = sample(functions)
        for name, check in checks.items():
            check(functions[name]())
    finally:
        for peer in peers.values():
            peer.close()
    row = {"shape": size, "tokens": n_tokens, "wire": wire}
    row["mb"] = n_bytes / 1e6
    for name, values in times.items():
        row[f"{name}_ms"] = round(statistics.median(values), 5)
        row[f"{name}_p95_ms"] = round(float(np.percentile(values, 95)), 5)
    return row


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return (names or [platform.machine()])[0]


def main() -> None:
    """Prints the rows, and saves them if asked."""
    from .report import cpu_table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="a file for `bench.report --add`")
    options = parser.parse_args()
    n_cores = len(os.sched_getaffinity(0))
    cpu = f"{n_cores} cores of {_cpu_model()}"
    run = runs.about("python -m bench.cpu_round_trip", cpu=cpu, samples=SAMPLES)
    commit = runs.commit()
    print(f"{commit}, {cpu}: compiling and checking, half a minute a row at first")
    session = InferenceSession(devices=[CPU()])
    rows = []
    for size in SIZES:
        for wire in ("bfloat16", "fp8"):
            rows.append(measure(session, size, wire, n_cores))
            last = {**rows[-1], "run": commit}
            print("\n".join(cpu_table([last])[2 * (len(rows) > 1) : -1]), flush=True)
    if options.out:
        runs.save(options.out, "cpu", commit, run, rows)


if __name__ == "__main__":
    main()
