# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: its tables, and children that hang or die."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_shapes, gpu_traffic, report, served_step, serving, watched
from bench.command import said_command
from graphs.serve.checkpoint import make_checkpoint

DATA = report.load()
SCHEMES = {
    "sums": "dedup",
    "rows": "dedup+slots",
    "by_expert": "slots",
    "max": "slots",
    "all_gather": "gather",
    ("nccl", "all_gather"): "gather",
    ("nccl", "all_to_all"): "dedup",
}
"""How rows travel, see ``bench.gpu_traffic``."""


def test_the_page_is_made_of_the_data() -> None:
    """`python -m bench.report` was run after the last change."""
    assert report.PAGE.read_text() == report.page(DATA)
    assert report.DATA.read_text() == report.dump(DATA)
    names = re.findall(r"\]\((images/[^)]+)\)", report.PAGE.read_text())
    assert len(names) == 3
    assert all((report.PAGE.parent / name).exists() for name in names)


def test_bytes_are_those_of_the_rows() -> None:
    for row in DATA["gpu"]:
        shape = gpu_shapes.SHAPES[row["shape"]]
        ids = gpu_shapes.expert_ids(shape, row["routing"], row["ranks"], row["tokens"])
        scheme = SCHEMES.get((row["peer"], row["form"])) or SCHEMES[row["peer"]]
        moved = gpu_traffic.bytes_moved(shape, row["dtype"], ids, scheme)
        assert row["wire_bytes"] == moved.wire, row


def test_new_rows_replace_those_of_the_same_machine() -> None:
    """Other machines' rows stay; a run without rows goes."""
    h200 = {"gpu": "NVIDIA H200"}
    old = {"peer": "sums", "form": "fused", "ranks": 2, "tokens": 1, "us": 10.0}
    data = {
        "runs": {"a": h200, "b": {"gpu": "NVIDIA H100"}},
        "gpu": [{"run": "a", **old}, {"run": "b", **old}],
    }
    new = {"runs": {"c": h200}, "gpu": [{"run": "c", **old, "us": 9.0}]}
    merged = report.merge(data, new)
    assert [(row["run"], row["us"]) for row in merged["gpu"]] == [("c", 9.0), ("b", 10)]
    assert list(merged["runs"]) == ["b", "c"]


def child(program: str) -> subprocess.Popen:
    """Starts what stands for a child of the benchmark."""
    return subprocess.Popen(
        [sys.executable, "-ISu", "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


SAYS = 'print("""@@ {"start": "case", "step": "replay"}"""); '


@pytest.mark.parametrize(
    "program, reason",
    [
        ("pass", ""),
        ("import time; time.sleep(60)", "said nothing for 5 s"),
        ("print('bad'); exit(3)", "the process died: bad"),
        ("import time\nwhile True: print('busy'); time.sleep(0.2)", watched.TIME_UP),
    ],
    ids=["ends", "hangs", "dies", "late"],
)
def test_a_child_that_does_not_end_is_killed_and_named(
    program: str, reason: str
) -> None:
    process = child(SAYS + "\n" + program)
    end = watched.watch(process, 5, time.monotonic() + 10)
    assert (end.at, end.step, end.reason) == ("case", "replay", reason)
    assert process.returncode is not None


def test_steps_are_read_from_the_server_s_log() -> None:
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
    assert serving.steps_of(log, 64) == [2.86, 0.9805, 1200.0]
    assert serving.steps_of(log, 1) == [2.86, 0.9805, 2.0, 1200.0]


def test_kernels_of_a_step_are_summed_up() -> None:
    events = [("combine", 2.0), ("dispatch", 6.0), ("combine", 3.0), ("copy", 1.0)]
    rows = served_step.table(events, n_steps=2, n_kernels=2).splitlines()[2:]
    assert rows == [
        "| all | 6.0 | 2.0 | 3.00 |",
        "| dispatch | 3.0 | 0.5 | 6.00 |",
        "| combine | 2.5 | 1.0 | 2.50 |",
    ]


def test_a_gpu_is_at_work_once_at_a_time() -> None:
    """Kernels that overlap count once, a pause of the host's does not."""
    overlapping = [(10.0, 12.0), (11.0, 11.5), (13.0, 15.0)]
    assert served_step.at_work_us([(100.0, 101.0), *overlapping]) == 6.0


@pytest.mark.parametrize("n_ids", [64, 3])
def test_answers_without_text_are_asked_for_their_tokens(
    tmp_path: Path, n_ids: int
) -> None:
    """Of four requests of a client one has no text: has it its tokens?"""
    log = tmp_path / "peer.log"
    log.write_text("TG batch with 1 reqs | Execution: 9.00ms |\n")
    silent = serving._prompt(serving._seed(0, 2))

    def stream(prompt: str, n: int) -> list[str]:
        return [] if prompt == silent else ["a"] * n

    def complete(prompt: str, n: int, return_token_ids: bool) -> dict:
        assert prompt == silent and return_token_ids
        return {"token_ids": [2] * n_ids}

    server = SimpleNamespace(log=log, stream=stream, complete=complete)
    if n_ids < 64:
        with pytest.raises(RuntimeError, match="peer: an answer of 3 tokens"):
            serving.measure(server, 1)
        return
    answers, wall_s, steps = serving.measure(server, 1)
    assert [n for _, _, n in answers] == [64, 64, 0, 64] and steps == []
    row = serving.row_of("peer", 1, [(answers, 2.0, [1.0, 2.0, 3.0])])
    assert row.tokens_per_s == 4 * 64 / 2 and row.step_ms == (1.0, 2.0, 3.0)


def test_commands_that_are_saved_name_no_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["bench", "--out", "/some/folder", "--tokens", "1", "8"]
    monkeypatch.setattr(sys, "argv", given)
    wanted = "python -m bench.serving --out DIR --tokens 1 8"
    assert said_command("bench.serving") == wanted


def test_a_peers_wrong_answer_leaves_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """And the tallies of all peers are printed."""
    make_checkpoint(tmp_path, "tiny", "bfloat16")
    tests = serving._tests()
    reference = tests.Reference(tmp_path, in_bfloat16=True, counts_ties=False)
    asked = [5, 6, 7]
    logits = reference.logits(torch.tensor([asked]))[0][-1]
    right, wrong = (
        [tests.Answer(asked, [int(f())], None)] for f in (logits.argmax, logits.argmin)
    )
    serving._check({"ours": right}, tmp_path)
    with pytest.raises(SystemExit, match="no table; max_ep: "):
        serving._check({"max_ep": wrong, "max_tp": right}, tmp_path)
    assert capsys.readouterr().out.count("Tally(n_tokens=1") == 3
