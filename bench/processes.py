# SPDX-License-Identifier: Apache-2.0
"""Compiles or measures configurations, each in a process of its own.

The process is killed after ``--limit-s``: a hang costs the rest of its rows only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from . import runs
from .cases import Case, Config

FROM_TORCH = ("nccl", "buffer")
"""Peers of ``bench.peer_torch``."""
WITHOUT_GRAPHS = (*FROM_TORCH, "grouped_mm")
"""Peers that have no graphs to compile."""


def write(results: Path, case: Case, result: dict) -> None:
    """Adds a row to a file, so that it is there however the process ends."""
    with results.open("a") as file:
        file.write(json.dumps(case.row() | result) + "\n")
    shown = f"{result['us']:.2f} us" if "us" in result else result["error"]
    print(f"{case.name}: {shown}", flush=True)


def parse(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> argparse.Namespace:
    """Adds the options of how to run, and reads all."""
    out = "gpu_round_trip.json"
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--replays", type=int, default=8, help="in a sample")
    parser.add_argument("--compile-for", metavar="ARCH", help="sm_90a, for instance")
    parser.add_argument(
        "--from", dest="mefs", type=Path, metavar="DIR", help="compiled graphs"
    )
    parser.add_argument("--limit-s", type=float, default=600, help="a configuration")
    parser.add_argument("--commit", help="default: asked of git")
    parser.add_argument(
        "--out", type=Path, help=f"rows, or compiled graphs; default {out}"
    )
    options = parser.parse_args(arguments)
    if options.compile_for and options.out is None:
        parser.error("--compile-for needs --out DIR")
    options.out = options.out or Path(out)
    return options


def run(kind: str, cases: list[Case], options: argparse.Namespace) -> None:
    """Measures, or compiles. Rows are of a ``kind`` of ``bench.runs``."""
    groups: dict[Config, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.config, []).append(case)
    if options.compile_for:
        _compile_all(groups, options)
    else:
        _measure_all(kind, groups, options)


# ------------------------------------------------------------------------ children


def in_child(function: Callable, arguments: tuple, limit_s: float) -> str:
    """Runs a function in a process of its own; says why it did not end, or nothing."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_child, args=(function, arguments))
    process.start()
    process.join(limit_s)
    if process.exitcode == 0:
        return ""
    if process.exitcode is not None:
        return f"the process ended with {process.exitcode}"
    try:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
    except ProcessLookupError:
        process.kill()
    process.join()
    return f"killed after {limit_s:.0f} s"


def _child(function: Callable, arguments: tuple) -> None:
    os.setsid()
    function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # With virtual devices the interpreter's own exit aborts now and then.
    os._exit(0)


def _compile(config: Config, forms: list[str], arch: str, folder: Path) -> None:
    from .peer_graphs import compile_peer, use_virtual_devices

    use_virtual_devices(arch, config.n_ranks)
    for line in compile_peer(config, forms, folder / config.name):
        print(f"  {line}")


def _measure(todo: list[Case], options: argparse.Namespace, results: Path) -> None:
    from .peer_graphs import peer_of

    if todo[0].config.peer in FROM_TORCH:
        from . import peer_torch

        peer_torch.run(todo, options, results)
        return
    peer = peer_of(todo[0].config)
    peer.open(options.mefs)
    for case in todo:
        try:
            result = peer.measure(case, options.samples, options.replays)
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e} / {e.__cause__}"[:800]}
        write(results, case, result)
    peer.close()


# --------------------------------------------------------------------------- parent


def _compile_all(groups: dict[Config, list[Case]], options: argparse.Namespace) -> None:
    """Compiles each configuration, one at a time."""
    from .peer_graphs import is_compiled

    for config, todo in groups.items():
        if config.peer in WITHOUT_GRAPHS:
            continue
        forms = list(dict.fromkeys(case.form for case in todo))
        if is_compiled(config, options.out, forms):
            print(f"{config.name}: is there", flush=True)
            continue
        (options.out / config.name).mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        arguments = (config, forms, options.compile_for, options.out)
        error = in_child(_compile, arguments, options.limit_s)
        said = "" if is_compiled(config, options.out, forms) else f" FAILED {error}"
        print(f"{config.name}: {time.monotonic() - begin:.0f} s{said}", flush=True)


def _measure_all(
    kind: str, groups: dict[Config, list[Case]], options: argparse.Namespace
) -> None:
    about = runs.about(
        "bench.gpu_round_trip",
        **runs.gpus(max((config.n_ranks for config in groups), default=0)),
        torch=importlib.metadata.version("torch"),
        samples=options.samples,
        replays=options.replays,
        chain=max(config.n_layers for config in groups),
    )
    name = options.commit or runs.commit()
    rows: list[dict] = []
    for config, todo in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            error = in_child(_measure, (todo, options, results), options.limit_s)
            lines = results.read_text().splitlines() if results.exists() else []
        if error:
            print(f"{config.name}: {error}", flush=True)
        found = [json.loads(line) for line in lines]
        rows += [row for row in found if "us" in row]
        runs.save(options.out, kind, name, about, rows)
    print(f"saved {len(rows)} rows in {options.out.name}")
