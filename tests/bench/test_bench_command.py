# SPDX-License-Identifier: Apache-2.0
"""`max-ep bench` without a GPU: its checks, what it keeps, and what it says."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from max_ep import cli, extension
from max_ep.bench import peer_graphs, processes, systems
from max_ep.bench.cases import FORMS, FROM_TORCH, LIBRARIES, Case, Config
from max_ep.bench.checks import CheckError
from max_ep.bench.peer_graphs import GraphPeer
from max_ep.bench.torch_layers import Layers
from max_ep.cli import bench
from max_ep.torch import library
from max_ep.torch.calls import PLAIN, memory_for
from max_ep.torch.sums import Sizes
from tests.children import slow


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """The first two rows have changed places."""
    return rows[[1, 0, *range(2, len(rows))]]


@slow
def test_a_swapped_row_is_found(tmp_path, monkeypatch, capsys):
    """Ranks of the CPU pass; then two rows that dispatch delivers change places, then
    two sums. The command fails, and says which rank has what is wrong."""

    def in_this_process(function: Any, given: tuple, limit_s: float) -> str:
        function(*given)
        return ""

    monkeypatch.setattr(processes, "in_child", in_this_process)
    monkeypatch.setattr(bench, "_gpus", lambda: (0, ""))
    monkeypatch.setattr(bench, "_SAMPLES", 2)
    out = tmp_path / "out.json"
    command = f"bench --systems sums --tokens 8 --time-limit 3000 --out {out}".split()

    def tensor_of(swaps: str) -> Any:
        def tensor(self: GraphPeer, buffer: Any, rank: int) -> Any:
            got = torch.from_dlpack(buffer)
            is_of_dispatch = len(got) != 8
            if got.dim() == 2 and swaps == ("rows" if is_of_dispatch else "sums"):
                return swapped(got)
            return got

        return tensor

    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "NO GPUs" in said and "| max_ep, `sums` | experts |" in said
    (row,) = json.loads(out.read_text())["cpu_ranks"]
    assert row["tokens"] == 8 and row["us"] > 0
    for swaps, says in (("rows", "out of order"), ("sums", "of the chain differ")):
        monkeypatch.setattr(GraphPeer, "tensor", tensor_of(swaps))
        assert cli.main(command) == 1
        said = capsys.readouterr().out
        assert "not measured in full: max_ep, `sums`: 8 tokens: CheckError" in said
        assert says in said
        assert json.loads(out.read_text())["cpu_ranks"] == []


class Perfect(Layers):
    """What a library would deliver, and the sums that it would return."""

    def dispatch(self, layer: int) -> list[torch.Tensor]:
        of_group = torch.cat([torch.from_numpy(x.view(np.int16)) for x in self._data.x])
        experts = range(self.rank * self.n_local, (self.rank + 1) * self.n_local)
        tokens = [self.tokens_of_expert(layer, expert) for expert in experts]
        return [of_group[which].view(torch.bfloat16) for which in tokens]

    def combine(self, layer: int, sent: Any) -> torch.Tensor:
        return self.wanted(layer).bfloat16()

    def delivered(
        self, layer: int, sent: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        for local, rows in enumerate(sent):
            yield rows, self.tokens_of_expert(layer, self.rank * self.n_local + local)


def test_swapped_rows_of_other_libraries_are_found(monkeypatch):
    """Rows of an expert may stand in any order; rows of two experts, one changed
    element and swapped sums are errors, in every layer."""
    config = Config("nccl_ep", 2, "h256_e8_k2", "bfloat16", 128, n_layers=4)
    case = Case(config, "fused", 16, "uniform")
    layers = Perfect(case, 1, torch.device("cpu"))
    layers.check_dispatch()
    sums = layers.run()
    layers.check_sums(sums)
    for layer in range(4):
        wrong = [swapped(x) if i == layer else x for i, x in enumerate(sums)]
        with pytest.raises(CheckError, match=f"layer {layer}: .* of the chain differ"):
            layers.check_sums(wrong)
    right = Perfect.dispatch

    def changed(change: Any) -> Any:
        def dispatch(self: Perfect, layer: int) -> list[torch.Tensor]:
            rows = right(self, layer)
            if layer == 3:
                change(rows)
            return rows

        return dispatch

    def swap_experts(rows: list[torch.Tensor]) -> None:
        rows[0][0], rows[1][0] = rows[1][0].clone(), rows[0][0].clone()

    def change_a_bit(rows: list[torch.Tensor]) -> None:
        rows[2].view(torch.int16)[1, -1] ^= 1

    def lose(rows: list[torch.Tensor]) -> None:
        rows[3] = rows[3][1:]

    def reorder(rows: list[torch.Tensor]) -> None:
        rows[0] = rows[0].flip(0)

    monkeypatch.setattr(Perfect, "dispatch", changed(reorder))
    layers.check_dispatch()
    for change, says in (
        (swap_experts, "rows of the wrong tokens"),
        (change_a_bit, "a row's payload differs"),
        (lose, "rows, needs"),
    ):
        monkeypatch.setattr(Perfect, "dispatch", changed(change))
        with pytest.raises(CheckError, match=f"rank 1, layer 3: .*{says}"):
            layers.check_dispatch()


def test_kernels_are_compiled_before_times(monkeypatch, capsys):
    """All of ours from PyTorch has some; of plain rows a dispatch opens the same."""
    assert {*LIBRARIES} == {*systems.OURS} & {*FROM_TORCH}
    monkeypatch.setattr(library, "build", lambda settings: settings.facts())
    config = Config("elastic", 2, "h7168_e256_k8", "bfloat16", 512, "gpu", 8)
    processes.build_library(config, "sm_90a")
    comm = SimpleNamespace(for_calls=dict(target="sm_90a", ranks=2, hosts=1), n_ranks=2)
    sizes = Sizes(comm, PLAIN, 256, 8, 1, 5, 10, memory_for(512), 512, True)
    modes = dict(allow_multiple_reduction=True, allow_hybrid_mode=True)
    opened = sizes.call(7168, "bfloat16", None, **modes).rows()
    assert capsys.readouterr().out.strip() == opened.facts()


@pytest.fixture
def plan() -> bench.Plan:
    about = {"gpu": "NVIDIA H100", "n_gpus": 2, "driver": "1", "max": "26.7.0"}
    about |= {"date": "today", "samples": 30, "replays": 8}
    rest = "gpu", "h7168_e256_k8", [1, 512], "uniform", 8, "sm_90a", about
    found = [s for s in systems.SYSTEMS if s.peer in ("sums", "max", "nccl")]
    return bench.Plan(found, 2, *rest)


def test_max_sets_up_while_others_compile(plan, monkeypatch, tmp_path):
    """Its initializer compiles two graphs for each size; then no time limit has it."""
    ran: list[tuple] = []

    def in_child(function: Any, given: tuple, limit_s: float) -> str:
        ran.append((function, *given))
        return ""

    monkeypatch.setattr(processes, "in_child", in_child)
    monkeypatch.setattr(peer_graphs, "is_compiled", lambda *_: True)
    monkeypatch.setattr(extension, "extension_path", lambda: tmp_path)
    found = bench._Results(plan, tmp_path / "out.json", time.monotonic(), 600)
    bench._compile(plan, found, lambda: 600.0)
    sizes = {given[0].max_tokens for f, *given in ran if f is processes.set_up_max}
    assert sizes == {128, 512}
    assert {given[0].peer for _, *given in ran} == {"max"}  # all graphs are there


def test_partial_results(plan, tmp_path):
    """A system that ends early keeps its rows; the table says what is missing, and the
    file has what there is."""
    out = tmp_path / "out.json"
    found = bench._Results(plan, out, time.monotonic(), 600)
    sums, of_max, nccl = plan.systems
    times = [("sums", 1, 8.0, 11.5), ("sums", 512, 76.25, 80.0), ("max", 1, 34.0, 39.0)]
    rows = [
        replace(case, n_tokens=n).row() | {"us": us, "p95": us, "idle_us": idle}
        for peer, n, us, idle in times
        for case in plan.cases(systems.BY_PEER[peer])[:1]
    ]
    found.take(sums, rows[:2], "")
    found.take(of_max, rows[2:], "killed after 150 s")
    found.measure(plan.cases(nccl), 3.0, None, tmp_path)
    assert not found.is_wrong and found.lacks_some
    assert [row["us"] for row in json.loads(out.read_text())["gpu"]] == [8, 76.25, 34]
    lines = list(found.tables())
    assert lines[3:5] == [
        "| max_ep, `sums` | experts | 8.00 | 76.2 |",
        "| MAX 26.7 | experts | 34.0 |  |",
    ]
    assert "| max_ep, `sums` | experts | 11.5 | 80.0 |" in lines
    assert "not measured in full: MAX 26.7: killed after 150 s" in lines
    assert f"not measured in full: {nccl.name}: the time limit" in lines
    found.take(sums, [rows[0] | {"error": "CheckError: rank 1"}], "")
    assert found.is_wrong


def test_each_process_and_each_system_is_known(plan, monkeypatch):
    """Small sizes come first, graphs of one size share a process, and PyTorch has one
    for all; what is not installed is named with the command that brings it."""
    asked = [[(c.config.peer, c.n_tokens) for c in cases] for cases in plan.groups()]
    assert asked == [
        [("sums", 1)],
        [("max", 1)],
        [("nccl", 1), ("nccl", 512)],
        [("sums", 512)],
        [("max", 512)],
    ]
    for system in systems.SYSTEMS:
        assert system.form in FORMS[system.peer]
        assert system.delivers in systems.DELIVERS
    monkeypatch.setattr(systems.System, "version", lambda self: "")
    missing = [line for line in bench._head(plan) if line.startswith("not installed")]
    assert len(missing) == sum(s.ranks[1] > 1 for s in systems.SYSTEMS)
    assert all(": pip install " in line for line in missing)


@pytest.mark.parametrize(
    "words, says",
    [
        (
            "--gpus 3",
            "--gpus 3: this machine has 5 NVIDIA GPUs; give one",
        ),
        (
            "--gpus 8",
            "--gpus 8: this machine has 5 NVIDIA GPUs; give one of 0 (the CPU), 1,",
        ),
        ("--systems sums foo", "--systems foo: there are sums, rows, "),
        ("--gpus 1 --systems sums max", "--systems max: not with --gpus 1; there are"),
        (
            "--gpus 0 --systems nccl",
            "--systems nccl: not with --gpus 0; there are sums",
        ),
        ("--shape foo", "shape 'foo': needs hHIDDEN_eEXPERTS_kTOP_K, such as"),
        ("--tokens 0", "--tokens 0: give 1 or more"),
        ("--tokens 9000", "9000 tokens a rank: at most 8192"),
        ("--layers 3", "--layers 3: give an even number"),
        ("--gpus 0 --layers 0", "--layers 0: give an even number"),
        ("--time-limit 0", "--time-limit 0: give seconds above 0"),
        ("--out no/such/folder.json", "--out no/such/folder.json: there is no folder"),
    ],
)
def test_wrong_words(words, says, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_gpus", lambda: (5, "sm_90a"))
    assert cli.main(["bench", *words.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"max-ep bench: {says}") and error.count("\n") == 1


def test_cpu_ranks_measure_what_is_asked(tmp_path, monkeypatch):
    """They had sizes of their own, whatever the command said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_gpus", lambda: (0, ""))
    plans: list[bench.Plan] = []
    monkeypatch.setattr(bench, "_head", lambda plan: plans.append(plan) or iter(()))
    monkeypatch.setattr(bench._Results, "measure", lambda *_: None)
    for words in ("", "--shape h1024_e8_k2 --layers 4 --tokens 8 2"):
        assert cli.main(["bench", *words.split()]) == 0
    own, asked = ((p.shape, p.n_layers, p.tokens) for p in plans)
    assert own == ("h2048_e64_k8", 2, [1, 8])
    assert asked == ("h1024_e8_k2", 4, [2, 8])


def test_a_plot(plan, tmp_path: Path):
    found = bench._Results(plan, tmp_path / "x.json", time.monotonic(), 600)
    case = plan.cases(plan.systems[0])[0]
    found.take(plan.systems[0], [case.row() | {"us": 8.0, "p95": 9.0}], "")
    assert found.draw(tmp_path / "x.json").endswith("x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
