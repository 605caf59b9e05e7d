# SPDX-License-Identifier: Apache-2.0
"""What a child process of ``bench.gpu_round_trip`` does.

``python -m bench.gpu_children SPEC``: a JSON file says it. The child tells on its
output what it begins, so that a hang has a name; results go to a file, a line each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .gpu_shapes import OURS, Case, Config
from .watched import say

DONE_NAME = "compiled.json"
"""Stands beside compiled graphs, and says what they were made of."""


def main() -> None:
    """Does what the file says."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    task = spec["task"]
    if task == "compile":
        _compile_child(spec)
    elif task == "links":
        from . import gpu_peers_nccl

        say({"links": gpu_peers_nccl.measure_links(spec["n_gpus"])})
    elif task == "nccl":
        from . import gpu_peers_nccl

        n_ranks = spec["cases"][0]["config"]["n_ranks"]
        gpu_peers_nccl.run_cases(n_ranks, spec["cases"], spec, spec["results"])
    else:
        _graph_child(spec)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _compile_child(spec: dict) -> None:
    """Compiles one configuration for virtual GPUs."""
    from . import gpu_graphs_max

    config = Config(**spec["config"])
    gpu_graphs_max.use_virtual_devices(config.n_ranks)
    folder = Path(spec["folder"])
    said = gpu_graphs_max.compile_config(config, tuple(spec["forms"]), folder)
    for line in said:
        print(line)
    sys.stdout.flush()
    sys.stderr.flush()
    # With virtual devices the interpreter's own exit aborts now and then.
    os._exit(1 if any("FAILED" in line for line in said) else 0)


def _graph_child(spec: dict) -> None:
    """Measures cases of ours or of MAX's EP; one runner a configuration."""
    from . import gpu_peers_all_gather

    results = Path(spec["results"])
    todo_names = set(spec["todo"])
    cases = [Case.from_json(values) for values in spec["cases"]]

    def write(case: Case, form: str, result: dict) -> None:
        row = {"case": case.to_json(), "form": form, **result}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say({"done": f"{case.name} {form}"})

    for config in dict.fromkeys(case.config for case in cases):
        mine = [case for case in cases if case.config == config]
        todo = [
            (case, form)
            for case in mine
            for form in spec["forms"]
            if f"{case.name} {form}" in todo_names
        ]
        if not todo:
            continue
        say({"start": f"open_{config.name}"})
        try:
            runner = gpu_peers_all_gather.runner_of(config, _mef_folder(config, spec))
        except Exception as e:
            for case, form in todo:
                write(case, form, {"error": _cause(e)})
            continue
        for case, form in todo:
            name = f"{case.name} {form}"
            say({"start": name})

            def note(step: str, name: str = name) -> None:
                say({"start": name, "step": step})

            try:
                result = runner.measure(
                    case,
                    form,
                    spec["samples"],
                    note,
                    n_replays=spec["replays"],
                    with_profiler=spec["with_profiler"],
                )
                write(case, form, result)
            except Exception as e:
                write(case, form, {"error": _cause(e)})
        runner.close()


def _mef_folder(config: Config, spec: dict) -> Path | None:
    if spec["mef_dir"] is None:
        return None
    folder = Path(spec["mef_dir"]) / config.name
    done = folder / DONE_NAME
    if not done.exists():
        raise FileNotFoundError(
            f"{done} is missing: compile with --compile-only, or run without --mef-dir"
        )
    compiled_from = json.loads(done.read_text())["sources"]
    if compiled_from != sources_of(config.peer):
        raise RuntimeError(
            f"{folder} was compiled from other Mojo sources than this checkout's; "
            "compile again with --compile-only"
        )
    return folder


def sources_of(peer: str) -> str:
    """Names what the graphs were compiled from; ours change with the checkout."""
    if peer not in OURS:
        return ""
    from max_ep.extension import sources_hash

    return sources_hash()


def _cause(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    if error.__cause__ is not None:
        said += f" / {error.__cause__}"
    return said[:800]


if __name__ == "__main__":
    main()
