# SPDX-License-Identifier: Apache-2.0
"""Layers of other libraries without them: what is said of a version that has other
names, and that what they deliver is compared."""

import inspect
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from max_ep import install
from max_ep.bench import checks, other_layers, peer_torch, processes, systems
from max_ep.bench.cases import Case, Config
from max_ep.cli import bench

RANK, N_RANKS = 1, 2
CASE = Case(
    Config("trtllm", N_RANKS, "h256_e8_k2", "bfloat16", 128, n_layers=3),
    "fused",
    16,
    "uniform",
)


@dataclass(frozen=True)
class BootstrapConfig:
    world_size: int
    rank: int
    process_group: Any = None


@dataclass(frozen=True)
class MoEEpCommParams:
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int


@dataclass
class Received:
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor


class NVLinkOneSidedAlltoAll:
    """FlashInfer's of 0.7.4, for rank 1 of two: the other rank is played by the layer
    that the test gives, which knows the tokens of all."""

    layers: other_layers.OneSided

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: Any = None
    ) -> None:
        assert (bootstrap.rank, bootstrap.world_size) == (RANK, N_RANKS)
        self.params, self.is_open = params, True
        size = N_RANKS * params.max_tokens_per_rank
        self.buffer = torch.full((size, params.hidden_size), 7.0).bfloat16()

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        runtime_max_tokens_per_rank: int | None = None,
    ) -> Received:
        n = self.n = runtime_max_tokens_per_rank
        assert len(hidden_states) == len(topk_ids) == len(topk_weights) == n
        data = self.layers._data
        (self.layer,) = [
            i for i, ids in enumerate(data.ids) if np.array_equal(ids[RANK], topk_ids)
        ]
        # Rows that no token fills hold what an earlier step left there.
        rows = torch.full((N_RANKS * n, self.params.hidden_size), 3.0).bfloat16()
        ids = torch.full((N_RANKS * n, self.params.top_k), -1, dtype=torch.int32)
        tokens = checks.stack_tokens(data.x, "cpu")
        all_ids = np.concatenate(data.ids[self.layer])
        for src in range(N_RANKS):
            arrived = self.layers.tokens_of_rank(self.layer)
            arrived = arrived[arrived // n == src]
            place = slice(src * n, src * n + len(arrived))
            rows[place] = tokens[arrived]
            ids[place] = torch.from_numpy(all_ids[arrived])
        return Received(rows, ids)

    def get_combine_input_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        assert dtype == torch.bfloat16
        return self.buffer[: N_RANKS * self.n]

    def combine(self, expert_output: torch.Tensor) -> torch.Tensor:
        assert expert_output.data_ptr() == self.buffer.data_ptr()
        own = expert_output[0].double()
        row = torch.from_numpy(other_layers.expert_row(CASE.config.shape, 0)).double()
        is_on = self.layers.ranks_of_tokens(self.layer).double()
        return (is_on @ torch.stack([row, own])).bfloat16()

    def destroy(self) -> None:
        self.is_open = False


FAKES = (BootstrapConfig, MoEEpCommParams, NVLinkOneSidedAlltoAll)


@pytest.fixture
def one_sided(monkeypatch: pytest.MonkeyPatch) -> other_layers.OneSided:
    """The layers, of a library that does what FlashInfer's kernels do."""
    package, module = types.ModuleType("flashinfer"), types.ModuleType("moe_ep")
    package.moe_ep = module
    for fake in FAKES:
        setattr(module, fake.__name__, fake)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", module)
    monkeypatch.setattr(dist, "new_group", lambda backend: backend)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layers = other_layers.OneSided(CASE, RANK, torch.device("cpu"))
    monkeypatch.setattr(NVLinkOneSidedAlltoAll, "layers", layers, raising=False)
    return layers


def test_rows_of_flashinfer_are_compared(one_sided):
    """Rows of each rank, and sums; a row of another token, one that is not there,
    and what another rank's experts return are errors."""
    one_sided.check_dispatch()
    one_sided.check_sums(one_sided.run())
    library = one_sided._all_to_all
    right = library.dispatch

    def check(change: Callable[[Received], None]) -> None:
        def dispatch(*given: Any, **more: Any) -> Received:
            sent = right(*given, **more)
            change(sent)
            return sent

        library.dispatch = dispatch
        one_sided.check_dispatch()

    def swap_ranks(sent: Received) -> None:
        sent.hidden_states[:] = sent.hidden_states.roll(CASE.n_tokens, 0)

    def lose(sent: Received) -> None:
        sent.topk_ids[0] = -1

    check(lambda sent: None)
    with pytest.raises(checks.CheckError, match="rows of the wrong tokens"):
        check(swap_ranks)
    with pytest.raises(checks.CheckError, match="rows, needs"):
        check(lose)
    library.dispatch = right
    one_sided._row = one_sided._row.roll(1)
    with pytest.raises(checks.CheckError, match="of the chain differ"):
        one_sided.check_sums(one_sided.run())
    one_sided.close()
    assert not library.is_open


@pytest.mark.skipif(not find_spec("flashinfer"), reason="needs flashinfer-python")
def test_the_fake_is_flashinfers():
    """Every argument that the fake takes, the library takes, in the same place."""
    import flashinfer.moe_ep as moe_ep

    for fake in FAKES:
        real = getattr(moe_ep, fake.__name__)
        for name in ("__init__", "dispatch", "combine", "get_combine_input_buffer"):
            if not hasattr(fake, name):
                continue
            ours = inspect.signature(getattr(fake, name)).parameters.values()
            theirs = inspect.signature(getattr(real, name)).parameters
            assert [p.name for p in ours if p.name not in theirs] == []
            places = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
            if fake is NVLinkOneSidedAlltoAll:
                assert places == list(theirs)[: len(places)]


def failed(do: Callable[[], object]) -> str:
    """Returns what is said of the error that a library's layer ends in."""
    with pytest.raises(Exception) as error:
        do()
    return peer_torch.in_words(error.value, systems.BY_PEER["trtllm"])


def test_another_interface_is_told_from_a_library_that_does_not_load(
    one_sided, monkeypatch
):
    """A module, a name, an argument or a method that is not there: the version that was
    tried is named. Other errors are said as they are."""
    monkeypatch.setattr(systems.System, "version", lambda self: "0.9.0")
    says = "flashinfer-python 0.9.0 is installed, but its interface is not that of "
    says += f"{install.TRIED['flashinfer-python']}, which this calls: "

    def reopen() -> None:
        other_layers.OneSided(CASE, RANK, torch.device("cpu"))

    monkeypatch.delattr(sys.modules["flashinfer.moe_ep"], "BootstrapConfig")
    assert failed(reopen).startswith(says + "AttributeError: module 'moe_ep' has no")
    monkeypatch.setattr(MoEEpCommParams, "__init__", lambda self, experts: None)
    monkeypatch.setattr(
        sys.modules["flashinfer.moe_ep"],
        "BootstrapConfig",
        BootstrapConfig,
        raising=False,
    )
    assert failed(reopen).startswith(says + "TypeError: ")
    monkeypatch.delitem(sys.modules, "flashinfer.moe_ep")
    del sys.modules["flashinfer"].moe_ep
    assert failed(reopen).startswith(says + "ModuleNotFoundError: ")
    monkeypatch.setattr(NVLinkOneSidedAlltoAll, "combine", None)
    one_sided.dispatch(0)
    assert failed(one_sided.run).startswith(says + "TypeError: ")

    def load() -> None:
        raise ImportError("libnvshmem_host.so.3: cannot open shared object file")

    assert failed(load).startswith("ImportError: libnvshmem_host.so.3")


@pytest.fixture
def group(tmp_path, monkeypatch):
    """This process, as a group of one; a bench that runs its cases in it."""
    place = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_what_one_system_lacks_leaves_the_others(group, tmp_path, monkeypatch, capsys):
    """A library of another interface ends after its first size. The table keeps what
    others have, says why one is not in it, and the exit status shows it."""
    monkeypatch.setattr(systems.System, "version", lambda self: "0.9.0")
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))

    def opened(*_: Any) -> None:
        import flashinfer.moe_ep  # noqa: F401

    monkeypatch.setattr(peer_torch, "layers_of", lambda case: opened)
    results = tmp_path / "results"
    cases = [Case(CASE.config, "fused", n, "uniform") for n in (1, 8)]
    peer_torch.run_rank(0, 1, cases, None, results)
    (row,) = map(json.loads, results.read_text().splitlines())
    assert peer_torch.OTHER_INTERFACE in row["error"]

    about = {"gpu": "NVIDIA H100", "n_gpus": 2, "driver": "1", "max": "26.7.0"}
    about |= {"date": "today", "samples": 30, "replays": 8}
    two = [systems.BY_PEER[peer] for peer in ("nccl", "trtllm")]
    sizes = "gpu", CASE.config.shape_name, [1, 8], "uniform", 8, "sm_90a", about
    plan = bench.Plan(two, 2, *sizes)
    monkeypatch.setattr(bench, "_plan", lambda options: plan)
    monkeypatch.setattr(bench, "_compile", lambda *_: None)

    def measure(
        self: Any, cases: list[Case], left: float, mefs: Any, folder: Path
    ) -> None:
        system = systems.BY_PEER[cases[0].config.peer]
        times = [case.row() | {"us": 8.0, "p95": 9.0} for case in cases]
        self.take(system, times if system.peer == "nccl" else [row], "")

    monkeypatch.setattr(bench._Results, "measure", measure)
    options = types.SimpleNamespace(out=tmp_path / "out.json", time_limit=60)
    assert bench.run_bench(options) == bench.NOT_IN_FULL
    said = capsys.readouterr().out
    assert "| NCCL all-gather, reduce-scatter | all | 8.00 | 8.00 |" in said
    assert "not measured in full: TensorRT-LLM, one-sided: 1 token: flashinfer" in said
    assert len(json.loads(options.out.read_text())["gpu"]) == 2
    plan.systems = two[:1]
    assert bench.run_bench(options) == 0


def test_flashinfer_is_compiled_ahead_once(tmp_path, monkeypatch, capsys):
    """They take longer than a process has. If they do not compile, others still run."""
    calls = []

    def in_child(function: Any, given: tuple, limit: float) -> str:
        calls.append(function)
        return "the process ended with 1"

    monkeypatch.setenv("MAX_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("max_ep.extension.extension_path", lambda: None)
    monkeypatch.setattr(processes, "in_child", in_child)
    two = [systems.BY_PEER[peer] for peer in ("nccl", "trtllm")]
    sizes = "gpu", CASE.config.shape_name, [1, 512, 4096], "uniform", 8, "sm_90a", {}
    plan = bench.Plan(two, 2, *sizes)
    found = bench._Results(plan, tmp_path / "out.json", 0.0, 600)
    assert bench._compile(plan, found, lambda: 100.0)
    assert calls == [processes.build_one_sided]
    assert "_t128_l8: the process ended with 1" in capsys.readouterr().out
    plan.systems = two[:1]
    bench._compile(plan, found, lambda: 100.0)
    assert len(calls) == 1


def test_commands_bring_the_versions_that_are_known():
    brings = {system.package: system.brings for system in systems.SYSTEMS}
    for package, version in install.TRIED.items():
        assert f"=={version}" in brings[package]
