# SPDX-License-Identifier: Apache-2.0
"""The programs a reader runs: graphs/, the benchmark, the command line."""

import contextlib
import functools
import os
import runpy
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import numpy as np
import pytest
from max.engine import InferenceSession, Model
from max.graph import Graph, Module

from graphs import moe_layer, overlap, own_experts
from max_ep.extension import extension_path
from max_ep.memory.setup_graph import setup_graph
from tests.children import ROOT, WHERE_WE_IMPORT, printed, slow
from tests.errors import refused
from tests.harness import selected

BIN = Path(sys.executable).parent


def run(command: str) -> str:
    program, *words = command.split()
    return printed(BIN / program, *words, cwd=ROOT, COLUMNS="120")


LAYERS = {
    # Its ops are those of the plain layer in `test_balance.py`.
    "moe_layer": "--shared-expert",
    "moe_layer_sums": "--shared-expert --sums --format mxfp8",
    "moe_layer_allreduce": "--allreduce",
}


ROUND_TRIP = ROOT / "graphs/round_trip.py"


class _Built(Exception):
    """The program would compile its graph now."""


def build_round_trip(module: Module) -> None:
    """Runs the program, which is read top-down, until its graph is built."""

    def stop(*_: object) -> NoReturn:
        raise _Built

    in_module = functools.partialmethod(Graph.__init__, module=module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "__init__", in_module)
        patch.setattr(InferenceSession, "load", stop)
        with contextlib.suppress(_Built):
            runpy.run_path(str(ROUND_TRIP))


def add_graphs(module: Module) -> None:
    build_round_trip(module)
    overlap.build(module)
    if "test_own_experts" in selected:
        own_experts.build(own_experts.make_config(0), module)
    for name, words in LAYERS.items():
        if name in selected:
            moe_layer.build(moe_layer.options_of(words.split()), module)


@pytest.fixture
def compiled(one_module, monkeypatch):
    """Programs load what was compiled with the others."""
    load = InferenceSession.load

    def load_compiled(session: InferenceSession, graph: Graph, **how: Any) -> Model:
        model = one_module.models.get(graph.name)
        return model or load(session, graph, **how)

    monkeypatch.setattr(InferenceSession, "load", load_compiled)


def test_round_trip(compiled, capsys):
    runpy.run_path(str(ROUND_TRIP))
    assert "came back doubled" in capsys.readouterr().out


def test_overlap(compiled, capsys):
    overlap.main()
    assert "generation 3: right on all 4 ranks" in capsys.readouterr().out


@slow
def test_own_experts(compiled, capsys):
    own_experts.main([])
    assert "57 tokens on 3 ranks of the CPU agree" in capsys.readouterr().out


@slow
def test_several_hosts():
    """Two processes, each with a rank on the CPU. Fails if what a process takes for its
    own ranks is not what comes back."""
    program = "graphs/several_hosts.py --hosts 2 --gpus 0".split()
    how = dict(cwd=ROOT, PYTHONPATH=WHERE_WE_IMPORT)
    how["MAX_EP_GROUP"] = f"hosts{os.getpid()}"

    def of_node(node: str) -> str:
        return printed(sys.executable, *program, MAX_EP_NODE_ID=node, **how)

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(of_node, "01"):
            assert said == "16 tokens of this process came back doubled\n"


@pytest.mark.parametrize(
    "n_gpus", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 3)]
)
def test_own_experts_on_gpus(n_gpus):
    said = run(f"python graphs/own_experts.py --gpus {n_gpus}")
    assert f"57 tokens on 3 ranks of {n_gpus} GPU" in said


FOR_GPUS = """
import os
from max.driver import (
    CPU, Accelerator, set_virtual_device_api, set_virtual_device_count,
    set_virtual_device_target_arch,
)
set_virtual_device_api("cuda")
set_virtual_device_target_arch("sm_90a")
set_virtual_device_count(3)
from max.engine import InferenceSession
from graphs.own_experts import build, make_config

session = InferenceSession(devices=[CPU(), *(Accelerator(i) for i in range(3))])
session.compile(build(make_config(3)))
print("compiled", flush=True)
os._exit(0)
"""


@slow
def test_own_experts_compile_for_gpus():
    """Virtual devices are for a whole process."""
    how = dict(PYTHONPATH=WHERE_WE_IMPORT, cwd=ROOT)
    assert "compiled" in printed(sys.executable, "-c", FOR_GPUS, **how)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] * ("_" in name[4:])) for name in LAYERS]
)
def test_moe_layer(compiled, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, *LAYERS[name].split()])
    moe_layer.main()
    assert "agree with the plain MoE" in capsys.readouterr().out


def test_the_set_up_graph_has_one_package():
    """After a graph with two as before it: MAX's cache has it under its packages."""
    overlap.build()
    graph = setup_graph(overlap.CONFIG)
    assert graph.kernel_libraries_paths == [extension_path()]


SMALL = "--ranks 4 --experts 16 --top-k 2 --hidden 64 --tokens 8"
LARGE = "--ranks 4 --experts 256 --top-k 8 --hidden 7168 --tokens 4096"
MSG = 7168 * 2 + 16


@pytest.mark.parametrize(
    "options, line, words",
    [
        # 4 ranks x 8 tokens x 2 choices; 4 local experts
        (SMALL, "dispatch output", [f" {4 * 8 * 2} x 64 "]),
        (f"{SMALL} --shared-expert", "dispatch output", [f" {4 * 8 * 2 + 8} x 64 "]),
        (f"{SMALL} --layout padded", "dispatch output", [f" 4 x {4 * 8} x 64 "]),
        (f"{LARGE} --combine-mode sums", "protocol", ["by_rank, combine sums"]),
        (LARGE, "MAX's EP would take", []),
        (
            LARGE.replace("4096", "65536"),
            "--protocol auto is",
            ["by_expert", "--tokens 65536 is above 65535", "231.00 GiB", "10.50 GiB"],
        ),
        (f"{LARGE} --dispatch mxfp8", "on the wire", ["7,392 B", "16 B"]),
        (f"{LARGE} --dispatch nvfp4", "on the wire", ["4,032 B", "16 B"]),
        (f"{LARGE} --dispatch mxfp4", "on the wire", ["3,808 B", "16 B"]),
        # One partial sum for each token from each rank.
        *(
            (f"{LARGE} --combine-mode sums {of}", "combine recv", [f"{16384 * n:,}"])
            for of, n in (
                ("", MSG),
                ("--partial float32", 7168 * 4 + 16),
                ("--partial fp8", 7168 + 7168 // 32 + 16),
            )
        ),
    ],
)
def test_plan_shows_sizes(run_cli, monkeypatch, options, line, words):
    monkeypatch.setenv("COLUMNS", "120")
    printed = run_cli("plan", *options.split())
    said = next(x for x in printed.splitlines() if line in x)
    assert all(word in said for word in words), said


@refused("""
--dispatch fp9 | --dispatch fp9 is unknown; there are bfloat16, float32, fp8,
--dispatch fp8 --hidden 100 | --hidden 100 must be a multiple of 128
--ranks 0 | --ranks 0 must be an integer >= 1
--ranks 400 | --ranks 400, at most 128
--tokens 0 | --tokens 0 must be
--top-k 9 | --top-k 9 is above --experts 8
--hidden 7 | --hidden 7 of bfloat16 (--dispatch) is 14 bytes
--hidden 2305843009213693952 | --hidden 2305843009213693952 is too large
--partial float32 | --partial float32 with --combine-mode rows
--partial fp8 | --partial fp8 with --combine-mode rows, which
--shared-expert --layout padded | --shared-expert needs --layout packed
--tokens 70000 --protocol by_rank | --protocol by_rank with --tokens 7
""")
def test_plan_names_the_option_that_cannot_be(run_cli, arguments, words):
    given = "--ranks 4 --experts 8 --top-k 2 --hidden 128 --tokens 1"
    error = run_cli("plan", *given.split(), *arguments.split(), status=1)
    assert error.startswith("max-ep plan: ") and words in error
    assert "=" not in error.replace(">=", "")


def test_sums_combine_is_as_exact_as_decided():
    """What docs/concepts.md and docs/formats.md say of 2 and of 8 ranks."""
    from bench.combine_error import measure

    for n_ranks, most, saved in ((2, 1.25, 0.74), (8, 1.4, 0.33)):
        m = measure(n_ranks)
        assert 1 < m["bfloat16"] / m["rows"] < most
        assert abs(m["float32"] / m["rows"] - 1) < 0.01
        assert 0.017 < m["fp8"] < m["mxfp8"] < 0.026
        assert 1 - m["n_partials"] / m["n_rows"] > saved


def test_output_that_nobody_reads_ends_quietly():
    """As in `max-ep doctor | head -1`: for all commands in one place."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [str(BIN / "max-ep"), "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        # Buffered: the last words are written when Python ends.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
    )
    os.close(writer)
    assert done.returncode != 0 and not done.stderr


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, run_cli):
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("max_ep.cli.doctor.run_doctor", interrupted)
    assert run_cli("doctor", status=130) == "max-ep: interrupted\n"


def test_doctor_finds_a_machine_that_can_run():
    printed = run("max-ep doctor")
    assert "FAIL" not in printed
    words = "max; mojo; compile cache; serving; cpu; torch; by_rank"
    assert [word for word in words.split("; ") if word not in printed] == []


def test_doctor_names_what_serving_lacks(monkeypatch, capsys):
    """Also: its lines fit 80 columns, but for words that are longer."""
    from max_ep.cli import doctor

    monkeypatch.setenv("COLUMNS", "80")
    version = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: "" if name == "uvicorn" else version(name)
    )
    assert doctor.run_doctor() == 0
    printed = capsys.readouterr().out
    assert "`max serve` cannot run; lacks uvicorn (uv pip" in printed
    lines = printed.splitlines()
    assert all(len(line) <= 80 or len(line[22:].split()) == 1 for line in lines)


def test_doctor_finds_a_cache_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """Below a file; an empty variable is none."""
    from max_ep import cache
    from max_ep.cli import doctor

    monkeypatch.setenv("MAX_EP_CACHE_DIR", "")
    assert cache.cache_dir().is_absolute()
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(file / "cache"))
    assert doctor.run_doctor() == 1
    assert "FAIL compile cache" in capsys.readouterr().out


def test_gpus_out_of_reach_are_refused(monkeypatch):
    """GPU 2 reads no other's memory."""
    from max_ep.memory import gpu as gpu_memory

    def enable_all_peer_access() -> None:
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(gpu_memory, "enable_all_peer_access", enable_all_peer_access)
    gpus = [SimpleNamespace(id=i, can_access=lambda _, i=i: i != 2) for i in range(3)]
    for n_ranks, says in (
        (3, r"GPU 0 and GPU 2; GPU 1 and GPU 2 \(peer access is.*ranks_per_gpu"),
        (2, r"not the ranks' own, but another .*CUDA_VISIBLE_DEVICES"),
    ):
        with pytest.raises(RuntimeError, match=says):
            gpu_memory.GpuMemory(gpus[:n_ranks], 64)  # type: ignore


def test_wheel_carries_the_mojo_sources(tmp_path):
    """All of them, in the place where an installed max_ep looks for them."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    printed(*pip, "--no-build-isolation", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("max_ep-*.whl")
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    assert (installed / "max_ep/py.typed").is_file()
    for path in (ROOT / "mojo").rglob("*.mojo"):
        there = installed / "max_ep" / "_mojo" / path.relative_to(ROOT / "mojo")
        assert there.read_text() == path.read_text()
    code = (
        "from max_ep.extension import mojo_dir; import max_ep; print(mojo_dir());"
        "print({name for name in max_ep.__all__ if not hasattr(max_ep, name)})"
    )
    how = dict(cwd=tmp_path, PYTHONPATH=str(installed))
    folder, missing = printed(sys.executable, "-c", code, **how).splitlines()
    assert missing == "set()"
    assert folder == str(installed / "max_ep" / "_mojo")


@pytest.mark.parametrize("is_lost", [False, True])
def test_demo_notices_a_wrong_result(monkeypatch, is_lost):
    """A layer gives what the oracle gives, or loses a token. Nothing is compiled: that
    the graph's result is right, `make demo` shows in CI."""
    from max_ep.cli import demo

    def layer(_, __, x, weights):
        x = demo.plain_moe(np.concatenate(x), weights)
        x[-3] *= not is_lost
        ids = np.zeros((demo.N_TOKENS, demo.TOP_K), np.int32)
        return np.split(x, demo.N_RANKS), [ids] * demo.N_RANKS

    for name in ("compile_graphs", "InferenceSession", "EPCommInitializer"):
        monkeypatch.setattr(demo, name, MagicMock())
    monkeypatch.setattr(demo, "run_layer", layer)
    monkeypatch.setattr(demo, "N_TOKENS", 8)
    monkeypatch.setattr(demo, "N_LAYERS", 2)
    assert demo.run_demo() == is_lost
