# SPDX-License-Identifier: Apache-2.0
"""Runs and their rows: how they are written, read and merged.

``runs`` says how each run came to be; every row names its run by the commit. A file
has one row a line. docs/performance.json is such a file.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import shlex
import subprocess
import sys
from pathlib import Path

from .. import __version__
from .cases import Case

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("gpu", "experts", "serving")
CPU_RANKS = "cpu_ranks"
"""The kind of rows that ``max-ep bench`` writes where there are no GPUs."""


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def dump(data: dict) -> str:
    """Writes runs and rows, one a line."""
    runs = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in data["runs"].items()]
    parts = ['"runs": {\n' + ",\n".join(runs) + "\n}"]
    for kind in (*KINDS, CPU_RANKS):
        if kind not in data:
            continue
        rows = [" " + json.dumps(row) for row in data[kind]]
        parts.append(f'"{kind}": [\n' + ",\n".join(rows) + "\n]")
    return "{" + ",\n".join(parts) + "}\n"


def write(results: Path, case: Case, result: dict) -> None:
    """Adds a row to a file, so that it is there however the process ends."""
    with results.open("a") as file:
        file.write(json.dumps(case.row() | result) + "\n")
    shown = f"{result['us']:.2f} us" if "us" in result else result["error"]
    print(f"{case.name}: {shown}", flush=True)


def save(path: Path, kind: str, commit: str, run: dict, rows: list[dict]) -> None:
    """Writes the rows of one run."""
    named = [{"run": commit} | row for row in rows]
    path.write_text(dump({"runs": {commit: run}, kind: named}))


def merge(data: dict, new: dict) -> dict:
    """Takes runs and rows into others.

    A row replaces those of the same machine, peer and size. Runs without rows go.
    """
    merged: dict = {}
    for kind in KINDS:
        added = new.get(kind, [])
        keys = {_key(new, kind, row) for row in added}
        kept = [r for r in data.get(kind, []) if _key(data, kind, r) not in keys]
        if kind == "serving" and added:
            # What a server's log said does not stand beside what clients saw.
            kept = [r for r in kept if "host" in data["runs"][r["run"]]]
        merged[kind] = kept + added
    used = {row.get("run") for kind in KINDS for row in merged[kind]}
    runs = {**data["runs"], **new["runs"]}
    return {"runs": {k: v for k, v in runs.items() if k in used}, **merged}


def _key(data: dict, kind: str, row: dict) -> tuple:
    """Returns what a row is of: its machine, and all of it that is no time."""
    run = data["runs"].get(row.get("run"), {})
    names = ("peer", "form", "ranks", "shape", "dtype", "routing", "tokens")
    names += ("clients", "prompt")
    machine = run.get("gpu")
    model = "layers" in run and (run["layers"], run["n_gpus"])  # that is served
    return kind, machine, model, *(row.get(name) for name in names)


# ------------------------------------------------------------------ of this run


def commit() -> str:
    """Names the commit, with a ``+`` if the checkout has other changes; or the version
    that is installed."""
    if not (ROOT / "mojo").is_dir():
        return __version__
    name = output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    is_changed = output(["git", "-C", str(ROOT), "status", "--porcelain"])
    return (name or "unknown") + "+" * bool(is_changed)


def about(program: str, **more: object) -> dict:
    """Says how rows come to be: date, version and command, without folders."""
    given = ["DIR" if "/" in a else a for a in sys.argv[1:]]
    command = shlex.join([*program.split(), *given])
    version = importlib.metadata.version("max")
    date = str(datetime.date.today())
    return {**more, "date": date, "max": version, "command": command}


def gpus(n: int) -> dict:
    """Names the GPUs of a run."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    first = (output(asked).splitlines() or ["no GPU, unknown"])[0]
    name, _, driver = first.partition(", ")
    return {"gpu": name, "n_gpus": n, "driver": driver}


def output(command: list[str]) -> str:
    """Returns what a command prints; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
