# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: its tables, and children that hang or die."""

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import (
    cases,
    checks,
    gpu_round_trip,
    peer_graphs,
    peer_nccl,
    report,
    runs,
    serving,
)
from bench.cases import Case, Config
from graphs.serve.checkpoint import make_checkpoint
from max_ep.formats import BY_SHORT_NAME

DATA = runs.load(report.DATA)


def test_the_page_is_made_of_the_data():
    """`python -m bench.report` was run after the last change."""
    assert report.PAGE.read_text() == report.page(DATA)
    assert report.DATA.read_text() == runs.dump(DATA)
    names = re.findall(r"\]\((images/[^)]+)\)", report.PAGE.read_text())
    assert len(names) == 3
    assert all((report.PAGE.parent / name).exists() for name in names)


def test_rows_are_those_of_their_cases():
    """Names are known to the benchmark, and bytes are computed again."""
    times = ("run", "us", "p95", "eager_us", "eager_p95")
    for row in DATA["gpu"]:
        max_tokens = cases.max_tokens_for(row["tokens"])
        what = row["peer"], row["ranks"], row["shape"], row["dtype"], max_tokens
        case = Case(Config(*what), row["form"], row["tokens"], row["routing"])
        assert row["form"] in cases.FORMS[row["peer"]]
        assert case.row() == {k: v for k, v in row.items() if k not in times}


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
    assert runs.merge(DATA, {"runs": {}}) == DATA


@pytest.mark.parametrize(
    "function, arguments, reason",
    [
        (print, ("done",), ""),
        (time.sleep, (60,), "killed after 5 s"),
        (sys.exit, (3,), "the process ended with 3"),
    ],
    ids=["ends", "hangs", "dies"],
)
def test_a_child_that_does_not_end_is_killed(function, arguments, reason):
    begin = time.monotonic()
    assert gpu_round_trip.in_child(function, arguments, 5) == reason
    assert time.monotonic() - begin < 30


def test_cases_are_those_that_can_run():
    asked = "--ranks 1 2 --tokens 128 4096 --forms fused all_gather".split()
    found = gpu_round_trip.cases_of(gpu_round_trip._options(asked))
    peers = {n: {c.config.peer for c in found if c.config.n_ranks == n} for n in (1, 2)}
    assert peers[1] == {*cases.OURS, "max_layer"} - {"all_gather"}
    assert peers[2] == {*cases.FORMS} - {"max_layer"}
    assert [c.n_tokens for c in found] == sorted(c.n_tokens for c in found)


@pytest.mark.parametrize(
    "peer, form", [(p, f) for p, forms in cases.FORMS.items() for f in forms]
)
def test_graphs_of_all_forms_are_built(monkeypatch, peer, form):
    """As where they are compiled ahead: without a GPU."""
    if peer == "nccl":  # no graphs of MAX's
        assert form in peer_nccl.LAYERS
        return
    monkeypatch.setitem(cases._LAYERS, 128, 3)
    dtype = {"by_expert": "fp8", "sums": "nvfp4"}.get(peer, "bfloat16")
    n_ranks = 1 if peer == "max_layer" else 2
    built = peer_graphs.peer_of(Config(peer, n_ranks, "h4096_e8_k2", dtype, 128))
    timed = built.graph(form, is_check=False)
    n_work = n_ranks if "work" in form else 0
    if built.has_check_graph:
        checked = built.graph(form, is_check=True)
        assert len(checked.inputs) == len(timed.inputs)
        assert len(timed.output_types) == n_ranks + n_work
        assert len(checked.output_types) > 2 * n_ranks


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_delivered_rows_are_compared(dtype):
    """Those of the oracle pass; one that is another's, or a changed byte, does not."""
    shape = cases.Shape("small", 256, 4, 2, "")
    x = cases.tokens(shape, 1, 6)
    routes = cases.routes(shape, cases.expert_ids(shape, "uniform", 1, 6))
    numbers, offsets = routes.token_numbers[0], routes.row_offsets[0]
    all_tokens = checks.stack_tokens(x, "cpu")
    rows, scales = all_tokens[numbers], None
    if dtype != "bfloat16":
        values, scales = BY_SHORT_NAME[dtype].quantize(rows.float().numpy())
        rows = torch.from_numpy(values)
        scales = torch.from_numpy(scales.T.copy() if dtype == "fp8" else scales)

    def check(rows: torch.Tensor) -> None:
        experts = torch.arange(4)
        got = checks.Delivered(dtype, rows, scales, torch.from_numpy(offsets), experts)
        checks.check_dispatch("here", got, numbers, offsets, all_tokens, exact=True)

    check(rows)
    with pytest.raises(checks.CheckError, match="out of order"):
        check(rows.flip(0))
    rows.view(torch.uint8)[3, -1] ^= 1
    with pytest.raises(checks.CheckError, match="differ|is off"):
        check(rows)


@pytest.mark.parametrize("peer", ["sums", "all_gather"])
def test_set_up_is_compiled_ahead_without_memory(peer: str) -> None:
    """A virtual device refuses allocations."""
    loaded: list[str] = []
    session = SimpleNamespace(load=lambda graph: loaded.append(graph.name))
    config = Config(peer, 2, "h4096_e8_k2", "bfloat16", 128)
    peer_graphs.peer_of(config).compile_set_up(session)
    assert loaded == ["max_ep_init"]


def test_steps_are_read_from_the_server_s_log():
    """As MAX 26.7 writes them, with a queue of batches and without."""
    line = (
        "05:18:52.475 INFO: Enqueued {0} batch with {1} reqs | Pending: 0 reqs | "
        "Batch creation: 258.75us | Completed {2} batch with {3} reqs | Terminated: 0 "
        "reqs | Prompt Tput: 700.1 tok/s | Execution: {4} | All Preemptions: 0 reqs\n"
    )
    log = line.format("TG", 64, "TG", 64, "2.86ms")
    log += line.format("TG", 64, "TG", 57, "980.50us")
    log += line.format("TG", 64, "TG", 56, "2.00ms")  # too few
    log += line.format("TG", 64, "CE", 64, "30.00ms")  # not a decoding
    log += "05:18:53.000 INFO: Enqueued TG batch with 64 reqs | Pending: 0 reqs\n"
    log += "05:18:54.000 INFO: Executed TG batch with 64 reqs | Execution: 1.20s |\n"
    assert serving.batches_of(log, "TG", 57) == [2.86, 0.9805, 1200.0]
    assert serving.batches_of(log, "TG", 1) == [2.86, 0.9805, 2.0, 1200.0]
    assert serving.batches_of(log, "CE", 1) == [30.0]


class _Peer:
    """Answers as ``max serve`` does, and one token too few if a prompt comes again."""

    def __init__(self, log: Path) -> None:
        self.log, self.model, self.asked = log, "m", []
        self.log.write_text("")

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
def peer(tmp_path: Path) -> Iterator[_Peer]:
    loop, peer = asyncio.new_event_loop(), _Peer(tmp_path / "peer.log")
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
        assert found["tokens_per_s"][0] > 0 and found["step_ms"] == []
        with pytest.raises(RuntimeError, match="0 of 1 tokens came"):
            serving.prefill(pool, peer, 64)  # asks twice


def test_rows_are_medians_and_quartiles(capsys):
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
    row = serving.row_of("max", "clients", 4, [{"step_ms": [1.0]}])
    assert np.isnan(row["step_ms"]).all()
    assert "its log has no step_ms of 4 clients" in capsys.readouterr().out


def test_commands_that_are_saved_name_no_folder(monkeypatch):
    given = ["bench", "--out", "/some/folder", "--tokens", "1", "8"]
    monkeypatch.setattr(sys, "argv", given)
    wanted = "python -m bench.serving --out DIR --tokens 1 8"
    assert runs.about("bench.serving")["command"] == wanted


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
