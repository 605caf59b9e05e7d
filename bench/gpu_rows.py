# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark keeps: rows, how they came to be, and JSON.

A *row* is a flat dictionary, one for each case and form; ``row_of`` makes it.
Times are microseconds of one layer, GB/s are 1e9 bytes a second, and bytes are
those of ``bench.gpu_traffic.bytes_moved``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

from . import gpu_shapes, gpu_traffic
from .gpu_shapes import Case

CASE_KEYS = ("n_ranks", "shape", "dtype", "routing", "n_tokens")
"""What makes rows of several peers a case."""

_SCHEMES = {
    "ours": "slots",
    "ours_by_rank": "dedup+slots",
    "ours_reduced": "dedup",
    "ours_gather": "gather+slots",
    "ours_gather_reduced": "gather+dedup",
    "ours_all_gather": "gather",
    "max": "slots",
}


def scheme_of(peer: str, form: str) -> str:
    """Returns how a peer's rows travel, see ``bench.gpu_traffic.SCHEMES``."""
    if peer == "nccl":
        return {"all_gather": "gather", "all_to_all": "dedup"}[form]
    return _SCHEMES[peer]


def row_of(case: Case, form: str, result: dict, links: dict | None) -> dict:
    """Makes a row of what a child process said.

    Args:
        case: What was measured.
        form: In which form.
        result: ``captured`` and ``eager`` (``median`` and ``p95``), perhaps
            ``kernels``; or ``error``.
        links: What ``measure_links`` returned, if it ran.
    """
    config, shape = case.config, case.config.shape
    ids = gpu_shapes.expert_ids(shape, case.routing, config.n_ranks, case.n_tokens)
    scheme = scheme_of(config.peer, form)
    traffic = gpu_traffic.bytes_moved(shape, config.dtype, ids, scheme)
    uneven = gpu_traffic.imbalance(shape, ids)
    row: dict[str, Any] = {
        "peer": config.peer,
        "form": form,
        "n_ranks": config.n_ranks,
        "shape": config.shape_name,
        "dtype": config.dtype,
        "routing": case.routing,
        "n_tokens": case.n_tokens,
        "max_tokens": config.max_tokens,
        "n_layers": config.n_layers(form),
        "imbalance_ranks": uneven.ranks,
        "imbalance_experts": uneven.experts,
        "scheme": scheme,
        "wire_bytes": traffic.wire,
        "logical_bytes": traffic.logical,
        "error": result.get("error", ""),
    }
    for mode in ("captured", "eager"):
        times = result.get(mode)
        if times:
            row[f"{mode}_us"] = times["median"]
            row[f"{mode}_p95_us"] = times["p95"]
    kernels = result.get("kernels")
    if isinstance(kernels, dict):
        row |= {f"kernel_{phase}_us": us for phase, us in kernels.items()}
    elif kernels:
        row["kernels_note"] = kernels
    if "captured_us" in row and form != "dispatch":
        row["logical_gbps"] = traffic.logical / row["captured_us"] / 1e3
        if config.n_ranks > 1:
            row["wire_gbps"] = traffic.wire / row["captured_us"] / 1e3
            if links and "all_to_all" in links:
                row["link_share"] = row["wire_gbps"] / links["all_to_all"]
    return row


def add_phases(rows: list[dict]) -> None:
    """Gives ``fused`` rows their phases, from the ``dispatch`` rows of the case."""

    def key(row: dict) -> tuple:
        return (row["peer"], *(row[k] for k in CASE_KEYS))

    alone = {
        key(row): row["captured_us"]
        for row in rows
        if row["form"] == "dispatch" and "captured_us" in row
    }
    for row in rows:
        if row["form"] == "fused" and "captured_us" in row and key(row) in alone:
            row["dispatch_us"] = alone[key(row)]
            row["combine_us"] = row["captured_us"] - alone[key(row)]


def save_json(folder: Path, about: dict, rows: list[dict], links: dict) -> Path:
    """Writes ``gpu_round_trip.json``; quick, so done after every row."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu_round_trip.json"
    text = json.dumps({"about": about, "links": links, "rows": rows}, indent=1)
    path.write_text(text + "\n")
    return path


def header(commit: str | None, command: str, n_samples: int, n_replays: int) -> dict:
    """Collects what a table must say about how it came to be."""
    name, driver, n_gpus = _gpu()
    return {
        "commit": commit or _commit(),
        "gpu": name,
        "n_gpus": n_gpus,
        "driver": driver,
        "max": _version("max"),
        "torch": _version("torch"),
        "date": str(datetime.date.today()),
        "command": command,
        "samples": n_samples,
        "replays": n_replays,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _commit() -> str:
    said = _said(["git", "rev-parse", "--short", "HEAD"])
    if not said:
        return "unknown"
    return said + ("+" if _said(["git", "status", "--porcelain"]) else "")


def _gpu() -> tuple[str, str, int]:
    lines = _said(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    ).splitlines()
    if not lines:
        return "no GPU", "unknown", 0
    name, _, driver = lines[0].partition(", ")
    return name, driver, len(lines)


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
