# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark without a server: its clients, their cores, its rows."""

import asyncio
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import (
    cores,
    graph_times,
    max_on_hopper,
    report,
    served_max_ep,
    serving,
    summary,
)
from graphs.serve.checkpoint import DEEPSEEK_SIZES, make_checkpoint, to_blockwise_fp8
from max_ep.bench import runs
from tests.children import slow
from tests.errors import raises
from tests.serve.serving import NOISES, Reference, Tally


def test_new_rows_replace_those_of_the_same_machine():
    """Other machines' rows stay; a run without rows goes."""
    h200 = {"gpu": "NVIDIA H200"}
    old = {"peer": "sums", "form": "fused", "ranks": 2, "tokens": 1, "us": 10.0}
    data = {
        "runs": {"a": h200, "b": {"gpu": "NVIDIA H100"}},
        "gpu": [{"run": "a", **old}, {"run": "b", **old}],
    }
    new = {"runs": {"c": h200}, "gpu": [{"run": "c", **old, "us": 9.0}]}
    merged = runs.merge(data, new)
    assert [(row["run"], row["us"]) for row in merged["gpu"]] == [("b", 10), ("c", 9.0)]
    assert list(merged["runs"]) == ["b", "c"]
    data = runs.load(report.DATA)
    assert runs.merge(data, {"runs": {}}) == data


def test_what_a_log_said_does_not_stand_beside_what_clients_saw():
    row = {"run": "a", "peer": "max", "clients": 1, "step_ms": [1.0, 1.0, 1.0]}
    old = {"gpu": "NVIDIA H100", "layers": 16, "n_gpus": 1}
    data = {"runs": {"a": old}, "serving": [row]}
    new = {"runs": {"b": old | {"n_gpus": 2, "host": "a CPU"}}}
    new["serving"] = [row | {"run": "b"}]
    assert [r["run"] for r in runs.merge(data, {"runs": {}})["serving"]] == ["a"]
    assert [r["run"] for r in runs.merge(data, new)["serving"]] == ["b"]
    again = {"runs": {"c": old | {"host": "a CPU"}}, "serving": [row | {"run": "c"}]}
    both = runs.merge(runs.merge(data, new), again)
    assert [r["run"] for r in both["serving"]] == ["b", "c"]


def test_a_step_is_of_the_time_in_which_all_clients_receive_tokens():
    """Fails if waiting for another's prefill counts as a step, or what comes when
    others are done."""
    early = [0.0, 0.1, *(1 + 0.002 * i for i in range(50)), 5.0, 9.0]
    late = [0.0, *(1 + 0.002 * i for i in range(52))]
    assert serving.step_of([early, late]) == pytest.approx(2)
    assert serving.step_of([late]) == pytest.approx(2)
    assert serving.step_of([early, [0.0, *(8 + i for i in range(52))]]) is None


def test_servers_swap_their_cores():
    """Each has each share equally often, and clients keep theirs."""
    shares = cores.Shares(set(range(3, 11)), 3)
    assert (shares.of_each, shares.clients) == (2, {3, 4})
    for i in range(6):
        of_round = [shares.of_server(server, i) for server in range(3)]
        assert set.union(*of_round, shares.clients) == set(range(3, 11))
    for server in range(3):
        had = [min(shares.of_server(server, i)) for i in range(6)]
        assert sorted(had) == [5, 5, 7, 7, 9, 9]
    few = cores.Shares({1, 2}, 2)
    assert few.clients == few.of_server(1, 5) == {1, 2} and few.of_each == 0


def test_tables_say_host_and_cores():
    run = {"gpu": "NVIDIA H100", "layers": 16, "n_gpus": 2, "host": "a CPU"}
    row = {"peer": "max_ep", "clients": 1, "step_ms": 3 * [1.0], "graph_ms": 0.5}
    row |= {"first_ms": 1.0, "between_ms": 1.0, "tokens_per_s": 1.0}
    runs_of = {"a": run | {"cores": 5}, "b": run | {"cores": 0}}
    data = {"runs": runs_of, "serving": [row | {"run": name} for name in runs_of]}
    lines = report._serving_sections(data)
    assert "| max_ep | 1 | 1.00 (1.00 to 1.00) | 0.50 | 1.0 | 1.00 | 1 | a |" in lines
    of_a, of_b = (line for line in lines if "a CPU" in line)
    assert of_a.startswith("a: a CPU; 5 cores for each server, swapped")
    assert of_b == "b: a CPU; servers and clients shared its cores."


def test_all_threads_of_a_server_move():
    """Its child processes' threads, too, and nobody else's."""
    mine = os.sched_getaffinity(0)
    child = "import os, time; os.fork(); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", child]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        process.stdout.read(2)
        assert cores.move(process.pid, {min(mine)}) == 2
        assert os.sched_getaffinity(process.pid) == {min(mine)}
        assert os.sched_getaffinity(0) == mine
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Batch:
    batch_size: int


class _Runner:
    """Replays as MAX's runner of captured graphs."""

    def __init__(self) -> None:
        self.replayed: list[tuple] = []
        self._records, self._signal_buffers = {"two": "key"}, ["signals"]
        self.synchronized = 0
        device = SimpleNamespace(id=0, is_host=False, synchronize=self._synchronize)
        self._signal_buffers = [SimpleNamespace(device=device)]
        self.graph_entries = {"key": ((), "outputs")}
        self._engine_model = self

    def _synchronize(self) -> None:
        self.synchronized += 1

    def replay(self, *given: Any) -> None:
        self.replayed.append(given)

    def of_max(self, *, batch_characteristics: Any) -> str:
        self.replay(batch_characteristics)
        return "outputs"


def test_graphs_are_timed_only_while_their_file_is_there(tmp_path, monkeypatch):
    """A step has its own outputs in any case."""
    monkeypatch.setattr(graph_times, "LOOK_EVERY_S", 0)
    path, runner = tmp_path / "times", _Runner()
    of_max = SimpleNamespace(_pack_model_graph_key=lambda key: f"packed {key}")
    replay = graph_times.timing(_Runner.of_max, path, of_max)
    batch = Batch(2)
    runner._records = {batch: "key"}
    assert replay(runner, batch_characteristics=batch) == "outputs"
    assert len(runner.replayed) == 1
    path.write_text("")
    for _ in range(9):
        assert replay(runner, batch_characteristics=batch) == "outputs"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["requests"] for row in rows} == {2} and len(rows) == 3
    assert all(row["ms"] > 0 and row["kernels"] == {} for row in rows)  # no GPU
    assert len(runner.replayed) == 10 + 3 * 21
    assert runner.replayed[-1] == (batch,)
    assert runner.replayed[-10] == ("packed key", *runner._signal_buffers)
    assert runner.synchronized == 12
    path.unlink()
    assert replay(runner, batch_characteristics=batch) == "outputs"
    assert not path.exists()


def test_the_gpu_time_is_that_of_all_clients(tmp_path, monkeypatch, capsys):
    """A server that replays nothing meanwhile has no time, and the others go on."""
    monkeypatch.setattr(serving, "LOOK_EVERY_S", 0)
    path = tmp_path / "times"
    rows = [(1, 9.0, {}), (2, 0.5, {}), (2, 0.25, {"few": (1, 2.0), "many": (3, 5.0)})]

    def run(*_: Any) -> None:
        named = ("requests", "ms", "kernels")
        path.write_text("".join(json.dumps(dict(zip(named, r))) + "\n" for r in rows))

    monkeypatch.setattr(serving, "run_clients", run)
    assert serving.time_graphs(None, None, 2, path) == {"graph_ms": [0.5, 0.25]}
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in said] == ["many", "few"] and not path.exists()
    rows.clear()
    with raises(RuntimeError, "has timed none"):
        serving.time_graphs(None, None, 2, path)


@pytest.mark.parametrize("module", [served_max_ep, max_on_hopper])
def test_the_worker_times_graphs(module):
    """It is another process, which imports the module of its model's class."""
    for architecture in module.ARCHITECTURES:
        model = architecture.pipeline_model
        assert model.__module__ == module.__name__
        assert pickle.loads(pickle.dumps(model)) is model


def test_what_is_timed_of_max_is_there():
    """Fails if a version of MAX replays graphs in another way."""
    from max.pipelines.lib import graph_capture

    runner = graph_capture.ServeGraphCaptureRunner
    source = inspect.getsource(runner)
    for name in ("graph_entries[", "_records.get(", "_signal_buffers", "_engine_model"):
        assert f"self.{name}" in source, name
    assert callable(graph_capture._pack_model_graph_key)
    assert "batch_characteristics" in inspect.signature(runner.replay).parameters


class _Peer:
    """Answers as ``max serve`` does, and one token too few if a prompt comes again."""

    def __init__(self) -> None:
        self.model, self.asked = "m", []

    async def answer(self, reader: Any, writer: Any) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        n_bytes = int(re.search(r"Content-Length: (\d+)", head)[1])
        asked = json.loads(await reader.readexactly(n_bytes))
        is_new = asked["prompt"] not in self.asked
        self.asked.append(asked["prompt"])
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(asked["max_tokens"] - (not is_new)):
            choice = {"token_ids": [7], "text": ""}
            event = json.dumps({"choices": [choice]})
            await asyncio.sleep(0.001)
            writer.write(f"1f\r\ndata: {event}\n\n\r\n".encode())
        writer.write(b"data: [DONE]\n\n")
        writer.close()


@pytest.fixture
def peer() -> Iterator[_Peer]:
    loop, peer = asyncio.new_event_loop(), _Peer()
    served = asyncio.start_server(peer.answer, "127.0.0.1", 0)
    peer.port = loop.run_until_complete(served).sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield peer
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_clients_repeat_no_prompt_and_count_tokens(peer):
    """Tokens without a text, too; an answer that lacks one is refused."""
    with ThreadPoolExecutor(4) as pool:
        found = serving.decode(pool, peer, 5)
        assert {len(prompt) for prompt in peer.asked} == {128}
        assert len(peer.asked) == 5 * (1 + 4)
        assert len(found["first_ms"]) == len(found["between_ms"]) == 5 * 4
        assert found["tokens_per_s"][0] > 0
        assert max(found["step_ms"]) > 0.5  # tokens may come in bursts
        with pytest.raises(RuntimeError, match="0 of 1 tokens came"):
            serving.prefill(pool, peer, 64)  # asks twice


def test_rows_are_medians_and_quartiles():
    rounds = [
        {"step_ms": [1.0, 2.0], "first_ms": [3.0]},
        {"step_ms": [3.0], "first_ms": [5]},
    ]
    assert serving.row_of("max", "clients", 4, rounds) == {
        "peer": "max",
        "clients": 4,
        "step_ms": [1.0, 2.0, 3.0],
        "first_ms": 4.0,
    }
    row = serving.row_of("max", "clients", 4, [{"step_ms": [1.0]}, {"step_ms": []}])
    assert row["step_ms"] == [1.0, 1.0, 1.0]
    assert "step_ms" not in serving.row_of("max", "clients", 4, [{"step_ms": []}])


def test_ratios_are_of_one_run_and_one_size():
    """Also fails if prompts that are cached count."""
    run = {"gpu": "NVIDIA H100", "layers": 16, "n_gpus": 2}
    of_peer = {"max_ep": 1.0, "max_tensor_parallel": 2.0, "max_expert_parallel": 4.0}
    rows = [
        {"run": "a", "peer": peer, "clients": n, "step_ms": [0, ms * ms * n, 9]}
        for peer, ms in of_peer.items()
        for n in (1, 64)
    ]
    rows += [
        {
            "run": "a",
            "peer": peer,
            "prompt": 9,
            "cold_ms": [0, ms, 0],
            "cached_ms": 3 * [7],
        }
        for peer, ms in of_peer.items()
    ]
    rows.append(rows[0] | {"run": "b"})
    rows.append(rows[3] | {"dtype": "float8", "step_ms": [1, 1, 1]})
    data = {"runs": {"a": run, "b": run}, "serving": rows}
    assert summary.ratios(data)[2:-1] == [
        "| 2 × H100 | 16 | tensor | 0.25 |  | 0.25 | 0.50 |",
        "| 2 × H100 | 16 | expert | 0.06 |  | 0.06 | 0.25 |",
    ]


def test_fp8_is_a_dtype_of_the_peer_s_checkpoint(tmp_path):
    """Made of the same weights; a row does not stand among those in bfloat16."""
    row = serving.named({"peer": "max_ep_fp8", "clients": 1, "step_ms": [1, 1, 1]})
    assert (row["peer"], row["dtype"]) == ("max_ep", "float8")
    assert serving.named({"peer": "max_ep"}) == {"peer": "max_ep"}
    flags = [serving.peer_flags(peer, 2) for peer in ("max_ep", "max_ep_fp8")]
    assert flags[0] == flags[1]
    make_checkpoint(tmp_path / "a", "tiny", "bfloat16")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    to_blockwise_fp8(tmp_path / "b")
    make_checkpoint(tmp_path / "c", "tiny", "float8")
    of_b, of_c = (load_file(tmp_path / x / "model.safetensors") for x in "bc")
    assert of_b.keys() == of_c.keys()
    assert all(torch.equal(w.float(), of_c[name].float()) for name, w in of_b.items())
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_transformers_is_a_peer_without_a_server(tmp_path):
    make_checkpoint(tmp_path, "tiny", "bfloat16")
    times = serving.prefill_in_transformers(tmp_path, 32, "cpu")
    row = serving.row_of("transformers", "prompt", 32, [times])
    line = report.serving_tables([{**row, "run": "c"}])[2]
    assert re.match(r"\| transformers, grouped_mm \| 32 \|  \|  \| \d", line)


def test_commands_that_are_saved_name_no_folder(monkeypatch):
    given = ["bench", "--out", "/some/folder", "--tokens", "1", "8"]
    monkeypatch.setattr(sys, "argv", given)
    wanted = "python -m bench.serving --out DIR --tokens 1 8"
    assert runs.about("python -m bench.serving")["command"] == wanted


def test_a_peers_wrong_answer_is_found(tmp_path, capsys):
    """And the tallies of all peers are printed."""
    make_checkpoint(tmp_path, "tiny", "bfloat16")
    tests = serving._tests()
    reference = tests.Reference(tmp_path, in_bfloat16=True, counts_ties=False)
    asked = [5, 6, 7]
    logits = reference.logits(torch.tensor([asked]))[0][-1]
    right, wrong = (
        [tests.Answer(asked, [int(f())], None)] for f in (logits.argmax, logits.argmin)
    )
    found = tests.wrong_answers({"max": wrong, "max_ep": right}, tmp_path)
    assert len(found) == 1 and found[0].startswith("max: ")
    assert capsys.readouterr().out.count("Tally(n_tokens=1") == 2


@slow
def test_ties_are_not_wrong_tokens(tmp_path, monkeypatch):
    """In a model whose experts change with a rounding: one of few heads."""
    few = dict(num_attention_heads=2, num_key_value_heads=2)
    sizes = DEEPSEEK_SIZES["deepseek_tiny"] | few
    monkeypatch.setitem(DEEPSEEK_SIZES, "deepseek_tiny", sizes)
    make_checkpoint(tmp_path, "deepseek_tiny", "bfloat16")
    reference = Reference(tmp_path, in_bfloat16=True, noises=NOISES)
    torch.manual_seed(0)
    tolerance = 0.02
    for _ in range(20):
        ids = torch.randint(3, 400, (1, 128))
        exact, rounded = reference.logits(ids)
        chosen = rounded.argmax(1, keepdim=True)
        gaps = exact.amax(1) - exact.gather(1, chosen)[:, 0]
        at = int(gaps.argmax())
        if gaps[at] > tolerance:
            break
    asked, token = ids[0, : at + 1].tolist(), int(chosen[at])
    reference.check(asked, [token], tolerance)
    assert reference.tally.n_by_noise == 1
    # The second choice, where that is hardly less likely.
    best, second = exact.topk(2, 1).values.T
    at = int((best - second - 0.1).abs().argmin())
    assert 0.05 < best[at] - second[at] < 0.15
    with pytest.raises(AssertionError):
        wrong = int(exact[at].topk(2).indices[1])
        reference.check(ids[0, : at + 1].tolist(), [wrong], tolerance)


def test_a_first_token_is_likely_in_bfloat16_too():
    """As one was, 0.083 behind, of four H200s."""
    exact, near = torch.tensor([[2.228, 2.145]]), torch.tensor([[2.172, 2.172]])
    reference = object.__new__(Reference)
    reference._noises, reference.tally = (), Tally()
    reference.logits = lambda _ids: [exact, near]
    reference.check([7], [1], 0.15)
    reference.logits = lambda _ids: [exact, exact]
    with pytest.raises(AssertionError):
        reference.check([7], [1], 0.15)
