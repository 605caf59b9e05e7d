# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark without a server: its clients, the log it reads, its rows."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import report, serving
from graphs.serve.checkpoint import make_checkpoint
from max_ep.bench import runs
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


def test_ties_are_not_wrong_tokens(tmp_path):
    """In a model whose experts change with a rounding."""
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
