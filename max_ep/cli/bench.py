# SPDX-License-Identifier: Apache-2.0
"""``max-ep bench``: times dispatch and combine beside what else is installed.

Each system runs in processes of its own, is checked first, and is written to the file
as soon as it is measured, so a run that is stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

from ..bench import processes, runs
from ..bench.cases import (
    FROM_TORCH,
    LIBRARIES,
    TOKENS,
    Case,
    Config,
    max_tokens_for,
    shape_of,
)
from ..bench.systems import BY_PEER, DELIVERS, FIRST, OURS, SYSTEMS, System
from ..bench.tables import draw, number, table
from ..plural import counted

_COMPILE_SHARE = 0.6
"""The most of the time limit that compiling takes."""
_PROCESS_SHARE = 0.25
"""The most that one process takes."""
_CORES_OF_COMPILER = 3
NOT_IN_FULL = 3
"""Exit status: results were right, but a system was not measured in full."""
_SAMPLES, _REPLAYS = 30, 8
_GROUPS = (1, 2, 4, 8)
"""Numbers of GPUs that are timed."""
_ON_GPUS = dict(shape="h7168_e256_k8", tokens=TOKENS, layers=8)
_ON_CPU = dict(shape="h2048_e64_k8", tokens=(1, 8), layers=2)
"""What is measured if the options do not say it."""
_CPU_RANKS, _CPU_PEERS = 2, ("sums", "rows")


@dataclass
class Plan:
    """What this machine is asked to measure."""

    systems: list[System]
    n_ranks: int
    target: str
    shape: str
    tokens: list[int]
    routing: str
    n_layers: int
    arch: str
    """Architecture of the GPUs, as the compiler names it."""
    about: dict = field(default_factory=dict)
    """How the rows come to be, see ``runs.about``."""

    def cases(self, system: System) -> list[Case]:
        """Lists the cases of a system, small ones first."""
        form = "split" if self.target == "cpu" else system.form
        return [
            Case(self._config(system, n), form, n, self.routing)
            for n in self.tokens
            if n <= system.max_tokens
        ]

    def _config(self, system: System, n_tokens: int) -> Config:
        size = max_tokens_for(n_tokens, system.peer)
        sizes = self.shape, "bfloat16", size, self.target, self.n_layers
        return Config(system.peer, self.n_ranks, *sizes)

    def groups(self) -> Iterator[list[Case]]:
        """Yields the cases of each process, in the order in which they matter. MAX's
        graphs are for one ``max_tokens_per_rank``; PyTorch runs all sizes."""
        sizes = sorted({max_tokens_for(n, "") for n in self.tokens})
        for size in sizes:
            for system in sorted(self.systems, key=lambda s: s.peer not in FIRST):
                cases = self.cases(system)
                if system.peer in FROM_TORCH:
                    if size == sizes[0] and cases:
                        yield cases
                elif of_size := [c for c in cases if c.config.max_tokens == size]:
                    yield of_size


def run_bench(options: argparse.Namespace) -> int:
    """Measures, and prints the table; returns 1 if a result was wrong, or what is ours
    failed, and ``NOT_IN_FULL`` if the table lacks something for another reason."""
    begin = time.monotonic()
    plan = _plan(options)
    for line in _head(plan):
        print(line, flush=True)
    out = Path(options.out)
    found = _Results(plan, out, begin, options.time_limit)

    def left() -> float:
        return options.time_limit - (time.monotonic() - begin)

    with tempfile.TemporaryDirectory() as folder:
        reserve = (1 - _COMPILE_SHARE) * options.time_limit
        mefs = _compile(plan, found, lambda: left() - reserve)
        for cases in plan.groups():
            found.measure(cases, left(), mefs, Path(folder))
    print("\n" + "\n".join(found.tables()))
    for line in _not_installed(plan):
        print(line)
    print(f"saved {out}{found.draw(out)}")
    if found.is_wrong:
        return 1
    return NOT_IN_FULL if found.lacks_some else 0


def _plan(options: argparse.Namespace) -> Plan:
    """Reads the options and the machine."""
    if not find_spec("torch"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    n_gpus, arch = _gpus()
    fit = [0, *(n for n in _GROUPS if n <= n_gpus)]
    asked = fit[-1] if options.gpus is None else options.gpus
    if asked not in fit:
        fits = ", ".join(["0 (the CPU)", *map(str, fit[1:])])
        has = counted(n_gpus, "NVIDIA GPU")
        raise ValueError(f"--gpus {asked}: this machine has {has}; give one of {fits}")
    is_cpu = asked == 0
    for name, default in (_ON_CPU if is_cpu else _ON_GPUS).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    shape_of(options.shape)
    if not Path(options.out).parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder for it")
    if options.layers < 2 or options.layers % 2:
        raise ValueError(f"--layers {options.layers}: give an even number")
    if options.time_limit <= 0:
        raise ValueError(f"--time-limit {options.time_limit:g}: give seconds above 0")
    for n in options.tokens:
        if n < 1:
            raise ValueError(f"--tokens {n}: give 1 or more")
        max_tokens_for(n, "")
    if unknown := set(options.systems or ()) - set(BY_PEER):
        raise ValueError(
            f"--systems {' '.join(sorted(unknown))}: there are {', '.join(BY_PEER)}"
        )
    n_ranks = asked or _CPU_RANKS
    systems = {
        system.peer: system
        for system in SYSTEMS
        if system.ranks[0] <= n_ranks <= system.ranks[1]
        and (not is_cpu or system.peer in _CPU_PEERS)
    }
    wanted = options.systems or list(systems)
    if unfit := set(wanted) - set(systems):
        raise ValueError(
            f"--systems {' '.join(sorted(unfit))}: not with --gpus {asked}; there are "
            f"{', '.join(systems)}"
        )
    plan = Plan(
        [s for peer, s in systems.items() if peer in wanted and s.version()],
        n_ranks,
        "cpu" if is_cpu else "gpu",
        options.shape,
        sorted(set(options.tokens)),
        options.routing,
        options.layers,
        arch,
    )
    plan.about = _about(plan)
    return plan


def _gpus() -> tuple[int, str]:
    """Counts NVIDIA's GPUs and names their architecture, without a context on any."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_look_at_gpus).result()


def _look_at_gpus() -> tuple[int, str]:
    from max.driver import Accelerator, accelerator_count

    n_gpus = accelerator_count()
    if not n_gpus or Accelerator().api != "cuda":
        return 0, ""
    name = Accelerator().architecture_name
    # The compiler knows by the letter what only this architecture has.
    return n_gpus, name + "a" * bool(re.fullmatch(r"sm_(9|1\d)\d", name))


def _about(plan: Plan) -> dict:
    if plan.target == "cpu":
        cores = counted(len(os.sched_getaffinity(0)), "core")
        machine = {"cpu": f"{cores}, {platform.machine()}"}
    else:
        machine = runs.gpus(plan.n_ranks)
    versions = {s.package: s.version() for s in plan.systems if s.package != "max"}
    return runs.about(
        "max-ep",
        **machine,
        **versions,
        samples=_SAMPLES,
        replays=1 if plan.target == "cpu" else _REPLAYS,
        chain=plan.n_layers,
    )


def _head(plan: Plan) -> Iterator[str]:
    """Says what is measured, how, and what is not installed."""
    shape, about = shape_of(plan.shape), plan.about
    if plan.target == "cpu":
        ranks = counted(plan.n_ranks, "rank")
        where = f"NO GPUs: {ranks} on the CPU, which say nothing of GPUs"
    else:
        where = f"{plan.n_ranks} x {about['gpu']}, driver {about['driver']}"
    yield f"max_ep {runs.commit()}, MAX {about['max']}, {about['date']}, {where}"
    yield (
        f"hidden {shape.hidden_size}, top-{shape.top_k} of "
        f"{counted(shape.n_experts, 'expert')}, bfloat16, {plan.routing} routing; µs "
        "of one dispatch and one combine, by tokens per rank"
    )
    how = "launched one by one, by the host's clock"
    if plan.target == "gpu":
        how = "a captured graph, by CUDA events on the rank that takes longest"
    yield (
        f"{counted(plan.n_layers, 'layer')}, each with ids of its own, {how}; median "
        f"of {about['samples']}; results are checked before and after"
    )
    yield from _not_installed(plan)


def _not_installed(plan: Plan) -> Iterator[str]:
    """Names the systems that could run beside ours here, and what brings them."""
    if plan.target == "gpu":
        for system in SYSTEMS:
            fits = system.ranks[0] <= plan.n_ranks <= system.ranks[1]
            if fits and not system.version():
                yield f"not installed: {system.name}: {system.brings}"


def _compile(plan: Plan, found: _Results, left: Callable[[], float]) -> Path | None:
    """Compiles for GPUs, several things at a time, before anything is timed: MAX's
    graphs, whose folder it returns, and the kernels of ``max_ep.torch``."""
    if plan.target == "cpu":
        return None
    from ..bench.peer_graphs import is_compiled
    from ..cache import cache_dir, check_folder
    from ..extension import extension_path

    cases = [case for of_process in plan.groups() for case in of_process]
    forms = {case.config: [case.form] for case in cases}
    check_folder(cache_dir())
    mefs, on_gpus = cache_dir() / "bench", threading.Lock()

    def compile_one(config: Config) -> None:
        error, limit = "", max(1.0, left())
        if config.peer in LIBRARIES:
            given = config, plan.arch
            error = processes.in_child(processes.build_library, given, limit)
        elif config.peer in FROM_TORCH:
            error = processes.in_child(processes.build_one_sided, (), limit)
        elif not is_compiled(config, mefs, forms[config]):
            (mefs / config.name).mkdir(parents=True, exist_ok=True)
            given = config, forms[config], plan.arch, mefs
            error = processes.in_child(processes.compile_graphs, given, limit)
            if is_compiled(config, mefs, forms[config]):
                error = ""
        if config.peer == "max" and not error:
            with on_gpus:  # one process at a time takes their memory
                given, limit = (config,), max(1.0, left())
                error = processes.in_child(processes.set_up_max, given, limit)
        found.say(f"compiled {config.name}{': ' * bool(error)}{error}")

    # Others have nothing to compile, or do it for each of their sizes themselves.
    todo = [c for c in forms if c.peer in LIBRARIES or c.peer not in FROM_TORCH]
    todo = [c for c in forms if c.peer == "trtllm"][:1] + todo
    todo.sort(key=lambda config: config.peer != "max")  # these take longest
    if todo:
        extension_path()
        cores = len(os.sched_getaffinity(0))
        n_workers = max(1, min(len(todo), cores // _CORES_OF_COMPILER))
        what = counted(len(todo), "configuration")
        found.say(f"compiling for {what}, {n_workers} at a time")
        with ThreadPoolExecutor(n_workers) as pool:
            list(pool.map(compile_one, todo))
    return mefs


class _Results:
    """Rows as they come, and the tables of them."""

    def __init__(self, plan: Plan, out: Path, begin: float, limit_s: float) -> None:
        self._plan, self._out, self._begin = plan, out, begin
        self._limit_s = limit_s
        self._rows: list[dict] = []
        self._errors: dict[str, str] = {}
        self.is_wrong = False
        """Whether a result was not the oracle's."""

    @property
    def lacks_some(self) -> bool:
        """Whether a system was not measured in full."""
        return bool(self._errors)

    def say(self, text: str) -> None:
        """Prints a line of progress."""
        print(f"[{time.monotonic() - self._begin:4.0f} s] {text}", flush=True)

    def measure(
        self, cases: list[Case], left_s: float, mefs: Path | None, folder: Path
    ) -> None:
        """Measures the cases of one process, and saves what there is."""
        system = BY_PEER[cases[0].config.peer]
        sizes = ", ".join(str(case.n_tokens) for case in cases)
        if left_s < 10:
            self._errors[system.name] = "the time limit"
            return
        self.say(f"{system.name}, tokens per rank: {sizes}")
        results = folder / "results"
        results.unlink(missing_ok=True)
        about = self._plan.about
        how = SimpleNamespace(
            samples=about["samples"], replays=about["replays"], eager=False, mefs=None
        )
        if mefs is not None and system.peer not in FROM_TORCH:
            from ..bench.peer_graphs import is_compiled

            config = cases[0].config
            how.mefs = mefs if is_compiled(config, mefs, [cases[0].form]) else None
        if self._plan.target == "gpu":  # one that hangs must leave time for others
            left_s = min(left_s, max(60, _PROCESS_SHARE * self._limit_s))
        error = processes.in_child(processes.measure, (cases, how, results), left_s)
        lines = results.read_text().splitlines() if results.exists() else []
        self.take(system, [json.loads(line) for line in lines], error)

    def take(self, system: System, rows: list[dict], error: str) -> None:
        """Takes rows of a system, and why its process did not end."""
        for row in rows:
            if "error" in row:
                n = counted(row["tokens"], "token")
                error = error or f"{n}: {row['error']}"
                self.is_wrong |= row["error"].startswith("CheckError")
            else:
                self._rows.append(row)
        if error:
            self._errors[system.name] = error
            self.is_wrong |= system.peer in OURS and "killed" not in error
        kind = runs.CPU_RANKS if self._plan.target == "cpu" else "gpu"
        runs.save(self._out, kind, runs.commit(), self._plan.about, self._rows)

    def tables(self) -> Iterator[str]:
        """Yields the table, and that of one replay from idle."""
        steady = "replays without a pause"
        if self._plan.target == "cpu":
            steady = "NO GPUs: CPU ranks"
        yield from self._table("us", steady)
        if any("idle_us" in row for row in self._rows):
            n = self._plan.n_layers
            yield from self._table(
                "idle_us", f"one replay of {counted(n, 'layer')}, from idle"
            )
        for word in dict.fromkeys(system.delivers for system in self._plan.systems):
            yield f"delivers {word}: {DELIVERS[word]}"
        for name, error in self._errors.items():
            yield f"not measured in full: {name}: {error}"

    def _table(self, of: str, what: str) -> Iterator[str]:
        times: dict[str, dict[int, float]] = {}
        for row in self._rows:
            times.setdefault(row["peer"], {})[row["tokens"]] = row.get(of)
        tokens = self._plan.tokens
        cells = [
            [s.name, s.delivers, *(number(times[s.peer].get(n)) for n in tokens)]
            for s in self._plan.systems
            if s.peer in times
        ]
        yield f"{what}, µs a layer\n"
        yield from table(["system", "delivers", *map(str, tokens)], cells, 2)

    def draw(self, out: Path) -> str:
        """Draws the times beside the file, if that can be; says so."""
        series = {
            system.name.replace("`", ""): {
                row["tokens"]: row["us"]
                for row in self._rows
                if row["peer"] == system.peer
            }
            for system in self._plan.systems
        }
        if not self._rows:
            return ""
        about = self._plan.about
        title = about.get("cpu") or f"{about['n_gpus']} x {about['gpu']}"
        try:
            path = draw(series, title, out.with_suffix(".png"))
        except ModuleNotFoundError:
            from ..install import MATPLOTLIB

            return f"; for a plot: {MATPLOTLIB}"
        return f" and {path}"
