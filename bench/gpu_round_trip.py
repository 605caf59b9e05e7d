# SPDX-License-Identifier: Apache-2.0
"""Round trips on GPUs beside other libraries: ``python -m bench.gpu_round_trip``.

On a machine without GPUs, compile the graphs (about a minute a configuration)::

    python -m bench.gpu_round_trip --compile-for sm_90a --out DIR --ranks 2

and on the GPU host, with the same checkout and the same options::

    python -m bench.gpu_round_trip --from DIR --ranks 2 --commit HASH --out FILE
    python -m bench.report --add FILE

Without ``--from`` the GPU host compiles. The permutation of one rank::

    --ranks 1 --tokens 128 1024 4096 8192 --peers sums rows max_layer --forms fused

and layers of experts behind their router, and both products alone (``peer_experts.py``
says how weights are kept out of the cache)::

    --ranks 1 --tokens 1 4 16 64 512 1024 4096 --shapes h2048_e128_k8 \
        --peers experts grouped_mm

Each configuration runs in a process of its own.
docs/measurements.md says what is measured, ``max_ep/bench/cases.py`` what peers
and forms are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path

from max_ep.bench import processes, runs
from max_ep.bench.cases import (
    DTYPES,
    EXPERTS,
    FORMS,
    FROM_TORCH,
    ROUTINGS,
    SHAPES,
    TOKENS,
    WITHOUT_GRAPHS,
    Case,
    Config,
    max_tokens_for,
)

_ON_ONE = ("max_layer", *EXPERTS)
_BFLOAT16_ONLY = ("all_gather", *_ON_ONE, *FROM_TORCH)


def main() -> None:
    options = _options()
    kind = "experts" if options.peers[0] in EXPERTS else "gpu"
    _run(kind, cases_of(options), options)


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
    peers = [p for p in FORMS if p not in EXPERTS and p not in FROM_TORCH[2:]]
    several("--peers", peers, choices=list(FORMS))
    several("--forms", (), help="default: all of a peer")
    options = _parse(parser, arguments)
    if len({peer in EXPERTS for peer in options.peers}) > 1:
        parser.error("--peers: experts have a section of their own; run them alone")
    if not cases_of(options):
        parser.error("there is no such case; layers on one GPU need --ranks 1")
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Lists the cases, small ones first, so that a short run sees most."""
    cases = [
        Case(
            Config(
                peer,
                n_ranks,
                shape,
                dtype,
                max_tokens_for(n, peer),
                n_layers=options.layers,
            ),
            form,
            n,
            routing,
        )
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
    """MAX's EP needs two ranks, layers of experts have one, for which NCCL has nothing
    to do."""
    if peer in _BFLOAT16_ONLY and dtype != "bfloat16":
        return False
    if (peer, dtype) == ("given", "bfloat16") or (peer == "packed" and dtype != "fp8"):
        return False  # there are no scales, or none that can be packed
    if peer == "max" and dtype not in ("bfloat16", "fp8"):
        return False  # its other formats are not for Hopper
    if peer in _ON_ONE:
        return n_ranks == 1
    needs_two = {"max", "all_gather", *FROM_TORCH} - {"buffer", "buffer_sums"}
    return n_ranks > 1 or peer not in needs_two


def _parse(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> argparse.Namespace:
    """Adds the options of how to run, and reads all."""
    out = "gpu_round_trip.json"
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--replays", type=int, default=8, help="in a sample")
    parser.add_argument("--layers", type=int, default=8, help="in a graph")
    parser.add_argument("--eager", action="store_true", help="also without a graph")
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


def _run(kind: str, cases: list[Case], options: argparse.Namespace) -> None:
    """Measures, or compiles. Rows are of a ``kind`` of ``bench.runs``."""
    groups: dict[Config, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.config, []).append(case)
    if options.compile_for:
        _compile_all(groups, options)
    else:
        _measure_all(kind, groups, options)


def _compile_all(groups: dict[Config, list[Case]], options: argparse.Namespace) -> None:
    """Compiles each configuration, one at a time."""
    from max_ep.bench.peer_graphs import is_compiled

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
        error = processes.in_child(processes.compile_graphs, arguments, options.limit_s)
        said = "" if is_compiled(config, options.out, forms) else f" FAILED {error}"
        print(f"{config.name}: {time.monotonic() - begin:.0f} s{said}", flush=True)


def _measure_all(
    kind: str, groups: dict[Config, list[Case]], options: argparse.Namespace
) -> None:
    about = runs.about(
        "python -m bench.gpu_round_trip",
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
            error = processes.in_child(
                processes.measure, (todo, options, results), options.limit_s
            )
            lines = results.read_text().splitlines() if results.exists() else []
        if error:
            print(f"{config.name}: {error}", flush=True)
        found = [json.loads(line) for line in lines]
        rows += [row for row in found if "us" in row]
        runs.save(options.out, kind, name, about, rows)
    print(f"saved {len(rows)} rows in {options.out.name}")


if __name__ == "__main__":
    main()
