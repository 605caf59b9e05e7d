# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md: what a user asks first, of docs/performance.json.

``bench.report`` writes them. docs/measurements.md has every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter

from max_ep.bench.cases import SHAPES
from max_ep.bench.systems import OURS, SYSTEMS
from max_ep.bench.tables import SERVING_PEERS, machine, number, table

TOKENS = (1, 8, 32, 128, 512, 4096)
_LAYER = {system.form for system in SYSTEMS}
_SYSTEMS = {
    (s.peer, s.form): (f"**{s.name}**" if s.peer in OURS else s.name, s.delivers)
    for s in SYSTEMS
}
_FORMATS = {"bfloat16": "bfloat16", "fp8": "blockwise FP8", "mxfp8": "MXFP8"}
_SUMS = {"sums": "**`sums`**", "sums_mxfp8": "**`sums` in MXFP8**"}
_MAIN = ("h7168_e256_k8", "uniform", "bfloat16")
_MIN_SIZES = 3
"""Fewer sizes of a series are in the measurements alone."""
_OTHERS = {s.peer: s.name for s in SYSTEMS if s.peer not in OURS}
_PARALLELISM = {"max_tensor_parallel": "tensor", "max_expert_parallel": "expert"}
_SIZES = (1, 16, 64, 0)
"""Clients; 0 is a prefill."""

Row = dict
Machine = tuple[int, str]


def _machines(data: dict) -> list[Machine]:
    """Lists a machine for each number of GPUs, largest first: that of the newest run.
    docs/measurements.md has the others."""
    newest = {r["ranks"]: data["runs"][r["run"]]["gpu"] for r in data["gpu"]}
    return [(n, newest[n]) for n in sorted(newest, reverse=True) if n > 1]


def _rows(data: dict, of: Machine, **wanted: str) -> Iterator[Row]:
    """Yields the rows of a machine in which some fields have these values."""
    for row in data["gpu"]:
        is_machine = of == (row["ranks"], data["runs"][row["run"]]["gpu"])
        if is_machine and all(row[name] == value for name, value in wanted.items()):
            yield row


def _times(rows: Iterator[Row], key: Callable[[Row], tuple]) -> dict:
    """Sorts times by a key of the row and by tokens; later rows are newer."""
    found: dict[tuple, dict[int, float]] = {}
    for row in rows:
        found.setdefault(key(row), {})[row["tokens"]] = row["us"]
    return found


def _cells(times: dict[int, float]) -> list[str]:
    return [number(times.get(n)) for n in TOKENS]


def _speed(data: dict) -> list[str]:
    """Lays out all systems of each machine."""
    what = dict(shape="h7168_e256_k8", dtype="bfloat16", routing="uniform")
    lines = []
    for of in _machines(data):
        times = _times(_rows(data, of, **what), lambda r: (r["peer"], r["form"]))
        name = machine(of[1], of[0])
        for system, (shown, delivers) in _SYSTEMS.items():
            if len(times.get(system, ())) >= _MIN_SIZES:
                lines.append([name, shown, delivers, *_cells(times[system])])
                name = ""
    return table(["machine", "system", "delivers", *map(str, TOKENS)], lines, 3)


def _others(data: dict) -> list[str]:
    """Lays out other formats, routing and models, beside MAX where it was timed."""
    lines = []
    for of in _machines(data):
        rows = _rows(data, of, form="fused")
        times = _times(rows, itemgetter("shape", "routing", "dtype", "peer"))
        for (shape, routing, dtype, peer), of_peer in sorted(times.items()):
            is_main = (shape, routing, dtype) == _MAIN
            if peer not in _SUMS or is_main or len(of_peer) < _MIN_SIZES:
                continue
            what = [
                machine(of[1], of[0]),
                SHAPES[shape].model,
                routing,
                _FORMATS[dtype],
            ]
            lines.append([*what, _SUMS[peer], *_cells(of_peer)])
            theirs = times.get((shape, routing, dtype, "max"), {})
            if peer == "sums" and len(theirs) >= _MIN_SIZES:
                lines.append(["", "", "", "", "MAX 26.7", *_cells(theirs)])
    columns = "machine, sizes of, routing, dispatch, system".split(", ")
    return table([*columns, *map(str, TOKENS)], lines, 5)


def _served(data: dict) -> dict[tuple, dict[tuple[str, int], float]]:
    """Finds the medians of each machine, layers and run, by server and clients: of a
    step, and with 0 clients the prefill of a prompt that is not cached."""
    times: dict[tuple, dict[tuple[str, int], float]] = {}
    for row in data["serving"]:
        run = data["runs"][row["run"]]
        of_run = times.setdefault(
            (run["n_gpus"], run["gpu"], run["layers"], row["run"]), {}
        )
        # Runs of 2026-11-26 and before have the time that a server's log says.
        name = "execution_ms" if "execution_ms" in row else "cold_ms"
        name = "step_ms" if "clients" in row else name
        if name in row and "dtype" not in row:
            of_run[row["peer"], row.get("clients", 0)] = row[name][1]
    return times


def ratios(data: dict) -> list[str]:
    """Lays out times of max_ep over those of MAX, of one run each: steps, and the
    prefill of a prompt that is not cached."""
    times = _served(data)
    lines = []
    for (n, gpu, layers, _), of_run in sorted(times.items()):
        for peer, parallelism in _PARALLELISM.items():
            if {("max_ep", 1), (peer, 1)} <= of_run.keys():
                head = [f"{n} × {gpu.split()[1]}", str(layers)]
                cells = []
                for size in _SIZES:
                    ours, theirs = (
                        of_run.get(("max_ep", size)),
                        of_run.get((peer, size)),
                    )
                    cells.append(f"{ours / theirs:.2f}" if ours and theirs else "")
                lines.append([*head, "none" if n == 1 else parallelism, *cells])
    columns = ["GPUs", "layers", "MAX's parallelism", "1 client", "16", "64", "prefill"]
    return table(columns, lines, 3)


def _slower(data: dict) -> list[str]:
    """Lists each size at which another system is faster than the best of ours, in runs
    of the default protocol."""
    best: dict[tuple, dict[str, float]] = {}
    for row in data["gpu"]:
        if row["form"] in _LAYER:
            gpu = data["runs"][row["run"]]["gpu"]
            key = row["ranks"], gpu, row["shape"], row["dtype"], row["routing"]
            of_size = best.setdefault((*key, row["tokens"], row["run"]), {})
            of_size[row["peer"]] = row["us"]
    lines = []
    for (ranks, gpu, shape, dtype, routing, n, _), of_peer in sorted(best.items()):
        ours = [us for peer, us in of_peer.items() if peer not in _OTHERS]
        for peer, us in of_peer.items():
            is_default = set(OURS) & set(of_peer)
            if is_default and peer in _OTHERS and us < min(ours):
                what = f"{n} tokens, {SHAPES[shape].model}, {dtype}, {routing}"
                times = [number(us), number(min(ours)), f"{min(ours) / us:.2f}"]
                lines.append([machine(gpu, ranks), _OTHERS[peer], what, *times])
    for (ranks, gpu, layers, _), of_run in sorted(_served(data).items()):
        for (peer, n), ms in sorted(of_run.items(), key=itemgetter(0)):
            ours_ms = of_run.get(("max_ep", n), 0.0)
            if peer in _PARALLELISM and ms < ours_ms:
                what = f"a step of {n} client{'s' * (n > 1)}" if n else "a prefill"
                times = [f"{ms:.2f}", f"{ours_ms:.2f}", f"{ours_ms / ms:.2f}"]
                what = f"{what}, {layers} layers, ms"
                lines.append([machine(gpu, ranks), SERVING_PEERS[peer], what, *times])
    columns = ["machine", "system", "what", "its time", "max_ep", "ratio"]
    return table(columns, lines, 3)


def tables(data: dict) -> dict[str, list[str]]:
    """Makes the tables, by their names in the page."""
    return {
        "speed": _speed(data),
        "others": _others(data),
        "slower": _slower(data),
    }
