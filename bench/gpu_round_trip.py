# SPDX-License-Identifier: Apache-2.0
"""Round trips on GPUs beside other libraries: ``python -m bench.gpu_round_trip``.

On a machine without GPUs, compile the graphs (about a minute a configuration)::

    python -m bench.gpu_round_trip --compile-for sm_90a --out DIR --ranks 2

and on the GPU host, with the same checkout and the same options::

    python -m bench.gpu_round_trip --from DIR --ranks 2 --commit HASH --out FILE
    python -m bench.report --add FILE

Without ``--from`` the GPU host compiles. The permutation of one rank::

    --ranks 1 --tokens 128 1024 4096 8192 --peers sums rows max_layer --forms fused

Each configuration runs in a process of its own, which is killed after ``--limit-s``:
a hang costs the rest of its rows only. docs/performance.md says what is measured,
``bench/cases.py`` what peers and forms are.
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
from dataclasses import dataclass
from pathlib import Path

from . import runs
from .cases import DTYPES, FORMS, ROUTINGS, SHAPES, TOKENS, Case, Config, max_tokens_for

_FROM_TORCH = ("nccl", "buffer")
_BFLOAT16_ONLY = ("all_gather", "max_layer", *_FROM_TORCH)


@dataclass(frozen=True)
class Options:
    """What a child process gets."""

    samples: int
    replays: int
    mefs: Path | None
    results: Path

    def write(self, case: Case, result: dict) -> None:
        """Adds a row, so that it is there however the process ends."""
        with self.results.open("a") as file:
            file.write(json.dumps(case.row() | result) + "\n")
        shown = f"{result['us']:.2f} us" if "us" in result else result["error"]
        print(f"{case.name}: {shown}", flush=True)


def main() -> None:
    """Measures, or compiles."""
    options = _options()
    groups: dict[Config, list[Case]] = {}
    for case in cases_of(options):
        groups.setdefault(case.config, []).append(case)
    if options.compile_for:
        _compile_all(list(groups), options)
    else:
        _measure_all(groups, options)


def _options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(name: str, default: tuple, kind: type = str, **more: object) -> None:
        parser.add_argument(name, nargs="+", default=list(default), type=kind, **more)

    several("--ranks", (2,), int, help="GPUs used, one rank each")
    several("--tokens", TOKENS, int, help="tokens a rank")
    several("--shapes", tuple(SHAPES)[:1], choices=list(SHAPES))
    several("--dtypes", DTYPES[:1], choices=DTYPES)
    several("--routings", ROUTINGS[:1], choices=ROUTINGS)
    several("--peers", tuple(FORMS), choices=list(FORMS))
    several("--forms", (), help="default: all of a peer")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--replays", type=int, default=8, help="in a sample")
    parser.add_argument("--compile-for", metavar="ARCH", help="sm_90a, for instance")
    parser.add_argument(
        "--from", dest="mefs", type=Path, metavar="DIR", help="compiled graphs"
    )
    parser.add_argument("--limit-s", type=float, default=600, help="a configuration")
    parser.add_argument("--commit", help="default: asked of git")
    parser.add_argument(
        "--out", type=Path, help="rows, or compiled graphs; default gpu_round_trip.json"
    )
    options = parser.parse_args(arguments)
    if options.compile_for and options.out is None:
        parser.error("--compile-for needs --out DIR")
    options.out = options.out or Path("gpu_round_trip.json")
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Lists the cases, small ones first, so that a short run sees most."""
    cases = [
        Case(Config(peer, n_ranks, shape, dtype, max_tokens_for(n)), form, n, routing)
        for n_ranks in options.ranks
        for shape in options.shapes
        for dtype in options.dtypes
        for peer in options.peers
        if _can_run(peer, n_ranks, dtype)
        for n in sorted(options.tokens)
        for form in FORMS[peer]
        if not options.forms or form in options.forms
        for routing in options.routings
    ]
    return sorted(cases, key=lambda case: case.config.max_tokens)


def _can_run(peer: str, n_ranks: int, dtype: str) -> bool:
    """MAX's EP needs two ranks, its layer has one, NCCL has nothing to do for one."""
    if peer in _BFLOAT16_ONLY and dtype != "bfloat16":
        return False
    if (peer, dtype) == ("given", "bfloat16") or (peer == "packed" and dtype != "fp8"):
        return False  # there are no scales, or none that can be packed
    if peer == "max" and dtype not in ("bfloat16", "fp8"):
        return False  # its other formats are not for Hopper
    if peer == "max_layer":
        return n_ranks == 1
    return n_ranks > 1 or peer not in ("max", "nccl", "all_gather")


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


def _measure(todo: list[Case], options: Options) -> None:
    from .peer_graphs import peer_of

    if todo[0].config.peer in _FROM_TORCH:
        from . import peer_torch

        peer_torch.run(todo, options)
        return
    peer = peer_of(todo[0].config)
    peer.open(options.mefs)
    for case in todo:
        try:
            result = peer.measure(case, options.samples, options.replays)
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e} / {e.__cause__}"[:800]}
        options.write(case, result)
    peer.close()


# --------------------------------------------------------------------------- parent


def _compile_all(configs: list[Config], options: argparse.Namespace) -> None:
    """Compiles each configuration in a process of its own, one at a time."""
    from .peer_graphs import is_compiled

    for config in configs:
        if config.peer in _FROM_TORCH:
            continue
        chosen = options.forms or FORMS[config.peer]
        forms = [form for form in FORMS[config.peer] if form in chosen]
        if is_compiled(config, options.out, forms):
            print(f"{config.name}: is there", flush=True)
            continue
        (options.out / config.name).mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        arguments = (config, forms, options.compile_for, options.out)
        error = in_child(_compile, arguments, options.limit_s)
        said = "" if is_compiled(config, options.out, forms) else f" FAILED {error}"
        print(f"{config.name}: {time.monotonic() - begin:.0f} s{said}", flush=True)


def _measure_all(groups: dict[Config, list[Case]], options: argparse.Namespace) -> None:
    about = runs.about(
        "bench.gpu_round_trip",
        **runs.gpus(max(options.ranks)),
        torch=importlib.metadata.version("torch"),
        samples=options.samples,
        replays=options.replays,
    )
    name = options.commit or runs.commit()
    rows: list[dict] = []
    for config, todo in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            given = Options(options.samples, options.replays, options.mefs, results)
            error = in_child(_measure, (todo, given), options.limit_s)
            lines = results.read_text().splitlines() if results.exists() else []
        if error:
            print(f"{config.name}: {error}", flush=True)
        found = [json.loads(line) for line in lines]
        rows += [row for row in found if "us" in row]
        runs.save(options.out, "gpu", name, about, rows)
    print(f"saved {len(rows)} rows in {options.out.name}")


if __name__ == "__main__":
    main()
