# SPDX-License-Identifier: Apache-2.0
"""From PyTorch: DeepEP's Buffer, one process a rank, against the oracle.

What a launch of processes does is in `torch_member.py`. On GPUs: `pytest -m gpu -k
torch`, where ranks that are more than GPUs share them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch_member

from max_ep import LaunchError, launch

pytestmark = pytest.mark.usefixtures("all_cores")

HEALTHY = ["low_latency", "in_flight", "normal", "arguments"]
RUNS = {
    1: (["low_latency", "in_flight"], ["bf16"]),
    2: (HEALTHY, ["bf16"]),
    4: (
        [*HEALTHY, "normal_fp8", "stopped", "other_arguments", "late"],
        ["bf16", "fp8", "round"],
    ),
}


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("max_ep-torch")}


def run(n_ranks: int, folder: Path) -> list[dict]:
    names, kinds = RUNS[n_ranks]
    arguments = (n_ranks, str(folder / "store"), names, kinds)
    outcomes = launch(torch_member.member, n_ranks, arguments, timeout_s=300)
    for rank, outcome in enumerate(outcomes):
        for name, (error, _) in outcome.items():
            assert not error, f"rank {rank}, {name}:\n{error}"
        assert "was destroyed" in outcome["destroyed"][1]
    return outcomes


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_EP_TORCH_DEVICE", "cpu")


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_cpu(on_cpu: None, n_ranks: int, tmp_path: Path) -> None:
    run(n_ranks, tmp_path)


def check_faults(outcomes: list[dict]) -> None:
    for rank, outcome in enumerate(outcomes):
        text = outcome["other_arguments"][1]
        culprit = 0 if rank == 1 else 1
        assert re.match(rf"max_ep: rank {culprit} calls .*tokens=", text.lower()), text
        if rank != 1:
            text = outcome["late"][1]
            assert re.search(r"timed out after 3000 ms waiting .* from rank 1", text)
            assert "Buffer.reset()" in text and "EPC" not in text, text


def test_cpu_of_four(on_cpu: None, tmp_path: Path) -> None:
    """Also a peer that is stopped, has other arguments, or does not come."""
    before = segments()
    check_faults(run(4, tmp_path))
    assert segments() <= before


def check_killed(folder: Path) -> None:
    """Survivors end by their time-out and name the dead; the next run works."""
    before = segments()
    with pytest.raises(LaunchError) as caught:
        launch(torch_member.killed, 4, (str(folder / "killed"),), timeout_s=60)
    for rank in (0, 2):
        text = caught.value.failures[rank]
        assert re.search(r"timed out after 3000 ms waiting .* from rank 1", text), text
    for rank in (1, 3):
        assert caught.value.failures[rank] == "died without a result (exit code -9)"
    assert segments() <= before


def test_killed(on_cpu: None, tmp_path: Path) -> None:
    check_killed(tmp_path)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_one_gpu_or_more(n_ranks: int, tmp_path: Path) -> None:
    outcomes = run(n_ranks, tmp_path)
    if n_ranks == 4:
        check_faults(outcomes)
        check_killed(tmp_path)


def test_no_max_is_loaded() -> None:
    program = "import sys, max_ep.torch; sys.exit('max' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
