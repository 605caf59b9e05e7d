# SPDX-License-Identifier: Apache-2.0
"""Round trip on CPU beside memcpy: ``python -m bench.cpu_round_trip``.

All ranks in one process: dispatch, then combine of the dispatched rows (for FP8 of
other rows of the combine dtype), through a MAX graph. The roof is ``memcpy`` (NumPy,
one thread, and all cores) of the bytes that must move: each row once to its expert
and once back. Results are compared with the oracle before and after timing.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
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

from max_ep import (
    EPBatchManager,
    EPCommInitializer,
    EPConfig,
    extension_path,
    reference,
)
from max_ep.formats import BY_SHORT_NAME

from . import cases, runs

WARM_UPS, SAMPLES = 5, 40
LAYER = cases.Shape("cpu", 2048, 64, 8, model="none")
PROTOCOLS = ("by_expert", "by_rank")


@dataclass(frozen=True)
class Size:
    """How much is sent."""

    name: str
    n_tokens: int  # a rank
    n_ranks: int = 4


SIZES = (Size("decode", 8), Size("prefill", 512))


class RoundTrip:
    """One size in one wire format and protocol, ready to run and to check."""

    def __init__(self, module: Module, size: Size, wire: str, protocol: str) -> None:
        """Adds its graph to a module; `start` does the rest."""
        n, wire_format = size.n_ranks, BY_SHORT_NAME[wire]
        make_quant_config = wire_format.make_quant_config
        self.config = EPConfig(
            dispatch_dtype=wire_format.dtype,
            combine_dtype=DType.bfloat16,
            hidden_size=LAYER.hidden_size,
            top_k=LAYER.top_k,
            n_experts=LAYER.n_experts,
            max_tokens_per_rank=size.n_tokens,
            n_gpus_per_node=n,
            n_nodes=1,
            dispatch_quant_config=make_quant_config() if make_quant_config else None,
            target="cpu",
            protocol=protocol,
        )
        self._x = cases.tokens(LAYER, n, size.n_tokens)
        self._ids = cases.expert_ids(LAYER, "uniform", n, size.n_tokens)
        self._weights = cases.router_weights(LAYER, n, size.n_tokens)
        # FP8 rows cannot be combined as they are; these stand for the experts'.
        n_rows = self.config.get_max_recv_tokens()
        drawn = np.random.default_rng(0).standard_normal(
            [n_rows, LAYER.hidden_size], "f"
        )
        rows = reference.float32_to_bfloat16(drawn)
        self._expert_rows = [rows] * n if self.config.is_quantized else []
        self._add_graph(f"round_trip_{wire}_{size.name}_{protocol}", module)
        self._comm = EPCommInitializer(self.config)

    def start(self, session: InferenceSession, model: Model) -> None:
        """Takes the compiled graph and sets up the group's memory."""
        self._model = model
        self._comm.ep_init(session)
        self._inputs = [
            *(_bfloat16(x) for x in self._x),
            *(Buffer.from_numpy(x) for x in (*self._ids, *self._weights)),
            *(_bfloat16(x) for x in self._expert_rows),
            *self._comm.model_inputs(),
        ]

    def _add_graph(self, name: str, module: Module) -> None:
        config, n = self.config, self.config.n_ranks

        def types(dtype: DType, *dims: str | int) -> list[TensorType]:
            return [TensorType(dtype, dims, DeviceRef.CPU())] * n

        inputs = types(DType.bfloat16, "n_tokens", config.hidden_size)
        inputs += types(DType.int32, "n_tokens", config.top_k)
        inputs += types(DType.float32, "n_tokens", config.top_k)
        if config.is_quantized:
            n_rows = config.get_max_recv_tokens()
            inputs += types(DType.bfloat16, n_rows, config.hidden_size)
        manager, ranks = EPBatchManager(config), list(range(n))
        all_types = [*inputs, *manager.input_types()]
        with Graph(name, input_types=all_types, module=module) as graph:
            values = [value.tensor for value in graph.inputs[: len(inputs)]]
            manager.fetch_buffers(graph.inputs[len(inputs) :])
            dispatched = manager.ep_dispatch_all(values[:n], values[n : 2 * n], ranks)
            rows = values[3 * n :] or [outputs[0] for outputs in dispatched]
            graph.output(*manager.ep_combine_all(rows, values[2 * n : 3 * n], ranks))

    def run(self) -> list[Buffer]:
        """Runs one generation."""
        return self._model.execute(*self._inputs)

    def check(self) -> None:
        """Runs one generation and compares it with the oracle, bit for bit."""
        found = [y.view(DType.uint16, list(y.shape)).to_numpy() for y in self.run()]
        dispatched = reference.dispatch(self._x, self._ids, LAYER.n_experts)
        given = self._expert_rows or [d.rows for d in dispatched]
        rows = [
            reference.bfloat16_to_float32(x[: len(d.rows)])
            for x, d in zip(given, dispatched)
        ]
        expected = reference.combine(rows, dispatched, self._weights)
        for rank, y in enumerate(found):
            want = reference.float32_to_bfloat16(expected[rank])
            np.testing.assert_array_equal(y, want, f"rank {rank}")

    def bytes_to_move(self) -> int:
        """Returns the token bytes on the wire: a row for each choice, both ways."""
        wire = "fp8" if self.config.is_quantized else "bfloat16"
        n_bytes = sum(cases.row_bytes(LAYER, w) for w in (wire, "bfloat16"))
        return sum(ids.size for ids in self._ids) * n_bytes

    def close(self) -> None:
        """Frees the memory."""
        self._comm.close()


def _bfloat16(bits: np.ndarray) -> Buffer:
    return Buffer.from_numpy(bits).view(DType.bfloat16, list(bits.shape))


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


def measure(session: InferenceSession, size: Size, wire: str, n_cores: int) -> dict:
    """Measures one row of the table."""
    module = Module()
    trips = {p: RoundTrip(module, size, wire, p) for p in PROTOCOLS}
    try:
        models = session.load_all(module, custom_extensions=[extension_path()])
        for trip, model in zip(trips.values(), models.values()):
            trip.start(session, model)
            trip.check()
        n_bytes = trips[PROTOCOLS[0]].bytes_to_move()
        times = sample(
            {name: trip.run for name, trip in trips.items()}
            | {"memcpy_1": memcpy(n_bytes, 1), "memcpy_all": memcpy(n_bytes, n_cores)}
        )
        for trip in trips.values():
            trip.check()
    finally:
        for trip in trips.values():
            trip.close()
    row = {"shape": size.name, "tokens": size.n_tokens, "wire": wire}
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
    run = runs.about("bench.cpu_round_trip", cpu=cpu, samples=SAMPLES)
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
