# SPDX-License-Identifier: Apache-2.0
"""Round trip on CPU beside memcpy: ``python -m bench.cpu_round_trip``.

All ranks in one process; dispatch, then combine of the dispatched rows (for
FP8: of other rows of the combine dtype), through a MAX graph. The roof is
``memcpy`` (NumPy, one thread, and all cores) of the bytes that must move: each
row once to its expert and once back, in the formats of the wire. Results are
checked against the oracle before and after timing. One file: a round trip, its roof,
and the table of both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType
from rich.console import Console
from rich.progress import track
from rich.table import Table

from max_ep import (
    EPBatchManager,
    EPCommInitializer,
    EPConfig,
    blockwise_fp8_quant_config,
    extension_path,
    reference,
)

WARM_UPS, SAMPLES = 5, 40


@dataclass(frozen=True)
class Shape:
    """What is sent."""

    name: str
    n_tokens: int  # a rank
    n_ranks: int = 4
    hidden_size: int = 2048
    n_experts: int = 64
    top_k: int = 8


SHAPES = (Shape("decode", 8), Shape("prefill", 512))
PROTOCOLS = ("by_expert", "by_rank")


def config_of(shape: Shape, wire: str, protocol: str = "auto") -> EPConfig:
    """Returns the group of a shape; ``wire`` is ``"bfloat16"`` or ``"fp8"``."""
    is_fp8 = wire == "fp8"
    return EPConfig(
        dispatch_dtype=DType.float8_e4m3fn if is_fp8 else DType.bfloat16,
        combine_dtype=DType.bfloat16,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        n_experts=shape.n_experts,
        max_tokens_per_rank=shape.n_tokens,
        n_gpus_per_node=shape.n_ranks,
        n_nodes=1,
        dispatch_quant_config=blockwise_fp8_quant_config() if is_fp8 else None,
        target="cpu",
        protocol=protocol,
    )


def bytes_to_move(config: EPConfig, n_rows: int) -> int:
    """Returns the token bytes on the wire: rows there, and rows back."""
    sizes = config.sizes()
    info = 16  # source info of a message; not counted, a plain copy has none
    return n_rows * (sizes.dispatch_msg_bytes + sizes.combine_msg_bytes - 2 * info)


class RoundTrip:
    """One shape in one wire format, ready to run and to check."""

    def __init__(self, module: Module, shape: Shape, wire: str, protocol: str) -> None:
        """Adds its graph to a module; `start` does the rest."""
        self.shape = shape
        self.config = config_of(shape, wire, protocol)
        rng = np.random.default_rng(0)
        ranks = range(shape.n_ranks)
        tokens = [shape.n_tokens, shape.hidden_size]
        self._x = [
            reference.float32_to_bfloat16(rng.standard_normal(tokens, np.float32))
            for _ in ranks
        ]
        self._ids = [
            np.argsort(rng.random((shape.n_tokens, shape.n_experts)))[
                :, : shape.top_k
            ].astype(np.int32)
            for _ in ranks
        ]
        self._weights = [
            rng.random((shape.n_tokens, shape.top_k), np.float32) for _ in ranks
        ]
        rows = [self.config.get_max_recv_tokens(), shape.hidden_size]
        # FP8 rows cannot be combined as they are; these stand for the experts'.
        self._expert_rows = (
            [
                reference.float32_to_bfloat16(rng.standard_normal(rows, np.float32))
                for _ in ranks
            ]
            if self.config.is_quantized
            else []
        )
        self.name = f"round_trip_{self.config.token_format}_{shape.name}_{protocol}"
        self._add_graph(module)
        self._comm = EPCommInitializer(self.config)

    def start(self, session: InferenceSession, model: Model) -> None:
        """Takes the compiled graph and sets up the group's memory."""
        self._model = model
        self._comm.ep_init(session)
        self._inputs = [
            *(_bfloat16(x) for x in self._x),
            *(Buffer.from_numpy(ids) for ids in self._ids),
            *(Buffer.from_numpy(w) for w in self._weights),
            *(_bfloat16(x) for x in self._expert_rows),
            *self._comm.model_inputs(),
        ]

    def _add_graph(self, module: Module) -> None:
        shape, config, cpu = self.shape, self.config, DeviceRef.CPU()
        ranks = list(range(shape.n_ranks))
        n = shape.n_ranks
        x_type = TensorType(DType.bfloat16, ["n_tokens", shape.hidden_size], cpu)
        id_type = TensorType(DType.int32, ["n_tokens", shape.top_k], cpu)
        weight_type = TensorType(DType.float32, ["n_tokens", shape.top_k], cpu)
        types = [x_type] * n + [id_type] * n + [weight_type] * n
        if config.is_quantized:
            rows = [config.get_max_recv_tokens(), shape.hidden_size]
            types += [TensorType(DType.bfloat16, rows, cpu)] * n
        manager = EPBatchManager(config)
        types_of_all = [*types, *manager.input_types()]
        with Graph(self.name, input_types=types_of_all, module=module) as graph:
            values = [value.tensor for value in graph.inputs[: len(types)]]
            manager.fetch_buffers(graph.inputs[len(types) :])
            dispatched = manager.ep_dispatch_all(values[:n], values[n : 2 * n], ranks)
            rows = values[3 * n :] or [outputs[0] for outputs in dispatched]
            graph.output(*manager.ep_combine_all(rows, values[2 * n : 3 * n], ranks))

    def run(self) -> list[Buffer]:
        """Runs one generation."""
        return self._model.execute(*self._inputs)

    def check(self) -> None:
        """Runs one generation and compares it with the oracle, bit for bit."""
        found = [y.view(DType.uint16, list(y.shape)).to_numpy() for y in self.run()]
        dispatched = reference.dispatch(self._x, self._ids, self.shape.n_experts)
        sent = (
            [x[: len(d.rows)] for x, d in zip(self._expert_rows, dispatched)]
            if self.config.is_quantized
            else [d.rows for d in dispatched]
        )
        rows = [reference.bfloat16_to_float32(x) for x in sent]
        expected = reference.combine(rows, dispatched, self._weights)
        for rank, y in enumerate(found):
            np.testing.assert_array_equal(
                y, reference.float32_to_bfloat16(expected[rank]), f"rank {rank}"
            )

    @property
    def n_rows(self) -> int:
        """Rows that move each way."""
        return sum(ids.size for ids in self._ids)

    def close(self) -> None:
        """Frees the memory."""
        self._comm.close()


def _bfloat16(bits: np.ndarray) -> Buffer:
    return Buffer.from_numpy(bits).view(DType.bfloat16, list(bits.shape))


def memcpy(n_bytes: int, n_threads: int) -> Callable[[], None]:
    """Returns a function that copies ``n_bytes``, dealt over threads."""
    source = np.ones(n_bytes, np.uint8)
    target = np.zeros(n_bytes, np.uint8)
    cuts = [n_bytes * i // n_threads for i in range(n_threads + 1)]
    parts = [slice(a, b) for a, b in zip(cuts, cuts[1:])]

    def copy_part(part: slice) -> None:
        np.copyto(target[part], source[part])

    def copy() -> None:
        helpers = [
            threading.Thread(target=copy_part, args=[part]) for part in parts[1:]
        ]
        for helper in helpers:
            helper.start()
        copy_part(parts[0])
        for helper in helpers:
            helper.join()

    return copy


def sample(functions: dict[str, Callable[[], object]], what: str) -> dict[str, list]:
    """Times functions in turn, so that a busy moment meets all of them.

    Returns:
        Milliseconds of each run, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    rounds = range(-WARM_UPS, SAMPLES)
    for i in track(rounds, f"{what:<20}", transient=True):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if i >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def measure(session: InferenceSession, shape: Shape, wire: str, n_cores: int) -> dict:
    """Measures one row of the table."""
    module = Module()
    trips = {p: RoundTrip(module, shape, wire, p) for p in PROTOCOLS}
    try:
        models = session.load_all(module, custom_extensions=[extension_path()])
        for trip in trips.values():
            trip.start(session, models[trip.name])
        for trip in trips.values():
            trip.check()
        n_bytes = bytes_to_move(trip.config, trip.n_rows)
        times = sample(
            {
                **{name: trip.run for name, trip in trips.items()},
                "memcpy_1": memcpy(n_bytes, 1),
                "memcpy_all": memcpy(n_bytes, n_cores),
            },
            f"{shape.name} {wire}",
        )
        for trip in trips.values():
            trip.check()
    finally:
        for trip in trips.values():
            trip.close()
    row = {
        "shape": shape.name,
        "tokens_per_rank": shape.n_tokens,
        "wire": wire,
        "mb": n_bytes / 1e6,
        "samples": SAMPLES,
    }
    for name, values in times.items():
        row[f"{name}_ms"] = statistics.median(values)
        row[f"{name}_p95_ms"] = float(np.percentile(values, 95))
    for name in PROTOCOLS:
        row[f"{name}_ratio"] = row[f"{name}_ms"] / row["memcpy_1_ms"]
    return row


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def save(folder: Path, header: str, rows: list[dict]) -> Path:
    """Writes the table as Markdown and JSON; returns the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Round trip on CPU",
        "",
        f"`python -m bench.cpu_round_trip --save` · {header}",
        "",
        "Four ranks in one process, hidden 2048, 64 experts, top-8, uniform "
        f"routing, {WARM_UPS} warm-ups, {SAMPLES} samples, all columns sampled in "
        "turn; medians, p95 in brackets. MB: a row for each choice, there and back "
        "(rank_slots moves less on the way there). memcpy: of as many bytes.",
        "",
        "| shape | tokens a rank | wire | MB | expert_slots ms | rank_slots ms "
        "| memcpy, 1 thread ms | memcpy, all cores ms "
        "| expert_slots, rank_slots / memcpy, 1 thread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(
            f"{row[f'{name}_ms']:.2f} ({row[f'{name}_p95_ms']:.2f})"
            for name in (*PROTOCOLS, "memcpy_1", "memcpy_all")
        )
        ratios = ", ".join(f"{row[f'{name}_ratio']:.2f}" for name in PROTOCOLS)
        lines.append(
            f"| {row['shape']} | {row['tokens_per_rank']} | {row['wire']} "
            f"| {row['mb']:.1f} | {times} | {ratios} |"
        )
    path = folder / "cpu_round_trip.md"
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(
        json.dumps({"header": header, "rows": rows}, indent=1) + "\n"
    )
    return path


def main() -> None:
    """Prints the table, and saves it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save",
        action="store_true",
        help="write docs/performance.md and .json",
    )
    options = parser.parse_args()
    n_cores = len(os.sched_getaffinity(0))
    header = (
        f"max_ep {_commit()} · {n_cores} cores of {_cpu_model()} · MAX 26.7 · "
        f"{datetime.date.today()}"
    )
    console = Console()
    console.print(header)
    console.print("compiling and checking (about half a minute a row at first)")
    session = InferenceSession(devices=[CPU()])
    rows = [
        measure(session, shape, wire, n_cores)
        for shape in SHAPES
        for wire in ("bfloat16", "fp8")
    ]
    table = Table()
    for column in (
        "shape",
        "wire",
        "MB",
        *(f"{name} ms" for name in PROTOCOLS),
        "memcpy ms",
        f"memcpy x{n_cores} ms",
        "ratios",
    ):
        table.add_column(column, justify="left" if column in "shape wire" else "right")
    for row in rows:
        table.add_row(
            f"{row['shape']} ({row['tokens_per_rank']})",
            row["wire"],
            f"{row['mb']:.1f}",
            *(
                f"{row[f'{name}_ms']:.2f}"
                for name in (*PROTOCOLS, "memcpy_1", "memcpy_all")
            ),
            ", ".join(f"{row[f'{name}_ratio']:.2f}" for name in PROTOCOLS),
        )
    console.print(table)
    if options.save:
        console.print(f"saved {save(Path('docs/results'), header, rows)}")


if __name__ == "__main__":
    main()
