# SPDX-License-Identifier: Apache-2.0
"""Round trip on GPUs beside MAX's EP and NCCL: ``python -m bench.gpu_round_trip``.

On a machine without GPUs, compile the graphs (about a minute a configuration)::

    python -m bench.gpu_round_trip --compile-only --mef-dir DIR --ranks 4

and on the GPU host, with the same checkout and the same options::

    python3 -m bench.gpu_round_trip --mef-dir DIR --ranks 4 --commit HASH --out OUT

Without ``--mef-dir`` the GPU host compiles. ``--quick`` is a first look.
``--budget-s`` starts nothing new after so many seconds; ``--merge FILE...``
takes the rows of earlier runs along into this one's table, and skips their
cases. Each configuration's library runs in a child process, which is killed
when it says nothing for ``--stall-s``: a hang costs its own row only.

What is measured, and how, stands in ``METHOD`` of ``bench/gpu_report.py``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import gpu_report, gpu_rows
from .command import said_command
from .gpu_children import DONE_NAME, sources_of
from .gpu_shapes import (
    DTYPES,
    OURS,
    ROUTINGS,
    SHAPES,
    TOKENS,
    Case,
    Config,
    max_tokens_for,
)
from .watched import TIME_UP, messages, results, start, watch

PEERS = (*OURS, "max", "nccl")
_MAX_RESTARTS = 6


def main() -> None:
    """Measures, or compiles."""
    options = _options()
    if options.compile_only:
        _compile_all(options)
    else:
        _measure_all(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(name: str, default: tuple, kind: type = str, **more: Any) -> None:
        parser.add_argument(name, nargs="+", default=list(default), type=kind, **more)

    several("--ranks", (4,), int, help="GPUs used, one rank each: 1, 2, 4")
    several("--tokens", TOKENS, int, help="tokens a rank")
    several("--shapes", tuple(SHAPES)[:1], choices=[*SHAPES, "all"])
    several("--dtypes", DTYPES, choices=DTYPES)
    several("--routings", ROUTINGS, choices=ROUTINGS)
    several("--peers", PEERS, choices=PEERS)
    several("--forms", (), help="forms of chains; default: all of a peer")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument(
        "--replays", type=int, default=8, help="of a captured chain, in each sample"
    )
    parser.add_argument(
        "--quick", action="store_true", help="8 and 128 tokens, bfloat16, uniform"
    )
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--mef-dir", type=Path, help="folder of compiled graphs")
    parser.add_argument("--no-profiler", action="store_true", help="do not use CUPTI")
    parser.add_argument("--no-links", action="store_true", help="no peer copies")
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument(
        "--stall-s", type=float, help="default: 60, or 240 where graphs are compiled"
    )
    parser.add_argument("--merge", nargs="+", type=Path, default=[])
    parser.add_argument("--commit", help="default: asked of git")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    if "all" in options.shapes:
        options.shapes = list(SHAPES)
    if options.quick:
        options.tokens, options.dtypes = [8, 128], ["bfloat16"]
        options.routings, options.samples = ["uniform"], min(options.samples, 30)
    if options.stall_s is None:
        options.stall_s = 60.0 if options.mef_dir else 240.0
    if options.compile_only and options.mef_dir is None:
        parser.error("--compile-only needs --mef-dir DIR to write to")
    return options


def _cases(options: argparse.Namespace) -> list[Case]:
    """Lists the cases, small ones first, so that a short run sees most."""
    cases = [
        Case(
            Config(peer, n_ranks, shape, dtype, max_tokens_for(n_tokens)),
            n_tokens,
            routing,
        )
        for n_ranks in options.ranks
        for shape in options.shapes
        for dtype in options.dtypes
        for peer in options.peers
        for n_tokens in sorted(options.tokens)
        for routing in options.routings
        # MAX's EP needs two ranks, and NCCL has nothing to do for one.
        if n_ranks > 1 or peer in OURS
    ]
    return sorted(cases, key=lambda case: case.config.max_tokens)


def _forms(peer: str, options: argparse.Namespace) -> list[str]:
    from .gpu_graphs_max import DEFAULT_FORMS

    wanted = DEFAULT_FORMS[peer]
    return [f for f in wanted if not options.forms or f in options.forms]


# ------------------------------------------------------------------------ compile


def _compile_all(options: argparse.Namespace) -> None:
    """Compiles each configuration in a process of its own, one at a time."""
    cases = [case for case in _cases(options) if case.config.peer != "nccl"]
    for config in dict.fromkeys(case.config for case in cases):
        folder = options.mef_dir / config.name
        forms = _forms(config.peer, options)
        stamp = {"forms": forms, "sources": sources_of(config.peer)}
        done = folder / DONE_NAME
        if done.exists() and json.loads(done.read_text()) == stamp:
            print(f"{config.name}: is there")
            continue
        begin = time.perf_counter()
        spec = {"task": "compile", "config": asdict(config), "forms": forms}
        spec["folder"] = str(folder)
        for old in (*folder.glob("*.mef"), done):
            old.unlink(missing_ok=True)
        process = start(spec)
        for line in process.stdout or ():
            print(f"  {line.rstrip()[:3000]}")
        if process.wait() == 0:
            done.write_text(json.dumps(stamp) + "\n")
        n_bytes = sum(path.stat().st_size for path in folder.glob("*.mef"))
        print(
            f"{config.name}: {time.perf_counter() - begin:.0f} s, "
            f"{n_bytes / 1e6:.1f} MB",
            flush=True,
        )


# ------------------------------------------------------------------------ measure


def _measure_all(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    about = gpu_rows.header(
        options.commit,
        said_command("bench.gpu_round_trip"),
        options.samples,
        options.replays,
    )
    rows, links = _merged(options.merge, options.replays)
    known = {_row_name(row) for row in rows if not row["error"]}
    if not options.no_links and max(options.ranks) > 1 and "all_to_all" not in links:
        links = _links(max(options.ranks), options)
        print(f"links: {gpu_report.describe_links(links)}", flush=True)
    groups: dict[tuple, list[Case]] = {}
    for case in _cases(options):
        config = case.config
        key: tuple = (config.peer, config.n_ranks, config.max_tokens)
        if config.peer != "nccl" and config.max_tokens > 512:
            # Its memory is gigabytes, and only the process's end gives it back.
            key = (config,)
        groups.setdefault(key, []).append(case)
    for cases in groups.values():
        left = options.budget_s - (time.monotonic() - begin)
        for case, form, result in _run_group(cases, options, known, left):
            row = gpu_rows.row_of(case, form, result, links)
            rows.append(row)
            shown = result.get("captured", {}).get("median")
            said = f"{shown:.2f} us" if shown else result.get("error", "")[:200]
            print(f"{case.name} {form}: {said}", flush=True)
            gpu_rows.save_json(options.out, about, rows, links)
    gpu_rows.add_phases(rows)
    gpu_report.show(rows)
    for path in gpu_report.save(options.out, about, rows, links):
        print(f"saved {path}")
    print(f"{time.monotonic() - begin:.0f} s in all")


def _row_name(row: dict) -> str:
    config = Config(
        *(row[k] for k in ("peer", "n_ranks", "shape", "dtype")), row["max_tokens"]
    )
    return f"{Case(config, row['n_tokens'], row['routing']).name} {row['form']}"


def _merged(paths: list[Path], n_replays: int) -> tuple[list[dict], dict]:
    """Returns rows of earlier runs (of each case the last) and their links.

    Raises:
        ValueError: Their samples have another number of replays.
    """
    rows: dict[str, dict] = {}
    links: dict = {}
    for path in paths:
        saved = json.loads(path.read_text())
        n_saved = saved["about"].get("replays", 1)
        if n_saved != n_replays:
            raise ValueError(
                f"a sample of {path} has {n_saved} replays, one of this run "
                f"{n_replays}: give --replays {n_saved}, or do not merge it"
            )
        links = saved["links"] or links
        for row in saved["rows"]:
            if not row["error"] or _row_name(row) not in rows:
                rows[_row_name(row)] = row
    return list(rows.values()), links


def _links(n_gpus: int, options: argparse.Namespace) -> dict:
    process = start({"task": "links", "n_gpus": n_gpus})
    for message in messages(process, options.stall_s):
        if isinstance(message, dict) and "links" in message:
            return message["links"]
    return {}


def _run_group(
    cases: list[Case], options: argparse.Namespace, known: set[str], left_s: float
) -> Iterator[tuple[Case, str, dict]]:
    """Runs cases in a child, and in another if that one hangs or dies.

    A form that has hung twice is given up for the rest of the group.

    Yields:
        Case, form and result of each; ``error`` says why there is none.
    """
    forms = _forms(cases[0].config.peer, options)
    todo = {
        f"{case.name} {form}": (case, form)
        for case in cases
        for form in forms
        if f"{case.name} {form}" not in known
    }
    deadline = time.monotonic() + left_s
    with_profiler = not options.no_profiler
    n_hangs = dict.fromkeys(forms, 0)
    for _ in range(_MAX_RESTARTS):
        if not todo or time.monotonic() > deadline:
            break
        with tempfile.TemporaryDirectory() as folder:
            spec = {
                "task": cases[0].config.peer,
                "cases": [case.to_json() for case in cases],
                "forms": forms,
                "todo": list(todo),
                "samples": options.samples,
                "replays": options.replays,
                "mef_dir": str(options.mef_dir) if options.mef_dir else None,
                "with_profiler": with_profiler,
                "results": str(Path(folder) / "results.jsonl"),
            }
            end = watch(start(spec), options.stall_s, deadline)
            for result in results(Path(spec["results"])):
                case, form = Case.from_json(result.pop("case")), result.pop("form")
                if todo.pop(f"{case.name} {form}", None):
                    yield case, form, result
        if end.reason == "":
            break
        if end.reason == TIME_UP:
            continue
        if end.step == "profiler":
            with_profiler = False
            continue
        # What the child was at is lost; the next child goes on behind it.
        error = {"error": f"{end.at} {end.step}: {end.reason}"}
        lost = [name for name in todo if end.blames(name, todo[name][0])]
        if end.at in todo and "said nothing" in end.reason:
            hung_form = todo[end.at][1]
            n_hangs[hung_form] += 1
            if n_hangs[hung_form] > 1:
                lost += [n for n in todo if todo[n][1] == hung_form and n not in lost]
        for name in lost:
            yield *todo.pop(name), error
    for case, form in todo.values():
        yield case, form, {"error": "not started: time was up, or children failed"}


if __name__ == "__main__":
    main()
