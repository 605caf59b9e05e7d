# SPDX-License-Identifier: Apache-2.0
"""Experts that move while a model is served: its tokens stay the same, ranks get as
many rows, and a step waits for little.

A decoder on ranks of the CPU, as `test_architectures.py` has it. What a server adds,
`test_serve.py` tries.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from max.driver import Buffer

from graphs.serve.checkpoint import make_checkpoint
from max_ep.balance import Placement
from max_ep.checkpoint import check_config, config_in, why_not_balanced
from max_ep.cli import main
from max_ep.limits import BALANCE_VARIABLE
from max_ep.serve import balancer, settings
from max_ep.serve.balancer import start_planner
from tests.children import slow
from tests.serve.decoders import SLICE_BYTES, Decoders
from tests.serve.serving import model_of

N_RANKS, SIZE = 4, "tiny"
LIMIT_S = 300.0
"""How long a plan may take on a busy machine."""


@pytest.fixture(scope="module")
def decoders(session, tmp_path_factory) -> Iterator[tuple[Decoders, Path]]:
    folder = tmp_path_factory.mktemp("made") / SIZE
    make_checkpoint(folder, SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BALANCE_VARIABLE, "0.001")
        made = Decoders(session, [folder], N_RANKS)
    yield made, folder
    made.close()


def _prompts(n: int, seed: int) -> list[list[int]]:
    """Makes prompts in which a few tokens are most: few experts get most rows."""
    rng = np.random.default_rng(seed)
    return [(5 + rng.zipf(2.0, 40) % 12).tolist() for _ in range(n)]


class _Watched:
    """Steps of a decoder, with what its balancer does before each."""

    def __init__(self, made: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made, self.balancer = made, made.balancers[SIZE]
        assert self.balancer is not None
        self.copied: list[int] = []
        """Bytes that were copied before each step."""
        self.waits = 0
        whole = balancer.Balancer._bytes

        def bytes_of(of: balancer.Balancer, *where: int) -> Buffer:
            kind, rank, place, begin, end = where
            self.copied[-1] += (end - begin) // 2  # source and destination
            return whole(of, *where)

        monkeypatch.setattr(balancer.Balancer, "_bytes", bytes_of)

    def step(self, texts: list[list[int]]) -> np.ndarray:
        self.copied.append(0)
        self.balancer.between_steps()
        self._made.begin(SIZE, len(texts))
        return self._made.step(SIZE, texts, [0] * len(texts))


@slow
def test_experts_move_and_tokens_stay(decoders, monkeypatch, caplog):
    """Fails if a layer's table changes before its weights are there, if a weight is cut
    wrongly, or if a replica gets the weights of another expert."""
    made, folder = decoders
    caplog.set_level("INFO", "max.pipelines.max_ep")
    reference = model_of(folder, dtype=torch.float32).eval()
    texts = _prompts(3, seed=1)
    with torch.no_grad():
        wanted = reference(torch.tensor(texts)).logits[:, -1].numpy()
    watched = _Watched(made, monkeypatch)
    ours = watched.balancer
    before = ours.placement.phy2log.copy()
    assert before.shape == (2, 20)
    tables = [[t.to_numpy().copy() for t in of_rank] for of_rank in ours._tables]
    end = time.monotonic() + LIMIT_S
    while "moved" not in caplog.text and time.monotonic() < end:
        np.testing.assert_allclose(watched.step(texts), wanted, rtol=1e-3, atol=1e-4)
        time.sleep(0.002)  # for the process that plans
    after = ours.placement
    assert (after.phy2log != before).any()
    # A slice, or all that a layer puts into place on its ranks.
    expert = sum(kind.expert_bytes for kind in ours._held.kinds)
    most = max((after.phy2log != before).sum(1)) * expert
    slices = [n for n in watched.copied if 0 < n <= SLICE_BYTES]
    assert len(slices) > 40 and max(watched.copied) <= most + SLICE_BYTES
    assert sum(n > SLICE_BYTES for n in watched.copied) <= len(before)
    for of_ranks, was, now in zip(
        ours._tables, tables, (after.log2phy(N_RANKS), after.logcnt)
    ):
        for table, old in zip(of_ranks, was):
            assert (table.to_numpy() == now).all() and (old != now).any()
    # What was counted, with these prompts: the busiest rank over the mean.
    was, rest = caplog.text.partition(" times the mean of rows")[::2]
    first = float(was.split()[-1])
    ours._read = ours._sums()
    for _ in range(4):
        np.testing.assert_allclose(watched.step(texts), wanted, rtol=1e-3, atol=1e-4)
        monkeypatch.setattr(ours, "_looked", float("inf"))
    rows = np.diff(ours._sums() - ours._read).astype(np.int64).sum(2).T
    assert rows.sum() == 4 * 3 * 40 * 4 * 2  # steps, prompts, tokens, choices, layers
    last = float((rows.max(1) / rows.mean(1)).mean())
    print(f"busiest rank over mean: {first:.2f} before, {last:.2f} after")
    assert first > 1.25 and last < 1.12 and last < first - 0.15


@slow
def test_counts_stay_right_when_they_overflow(decoders, monkeypatch):
    """They are 32 bits, and a server runs for months."""
    made, _ = decoders
    watched = _Watched(made, monkeypatch)
    ours = watched.balancer
    monkeypatch.setattr(ours, "_seconds", float("inf"))
    texts = _prompts(3, seed=2)
    found = []
    for begin in (0, 2**32 - 30):
        for counts in ours._counts:
            counts.inplace_copy_from(
                Buffer.from_numpy(np.full(counts.shape, begin, np.uint32))
            )
        read = ours._sums()
        watched.step(texts)
        found.append(np.diff(ours._sums() - read))
    assert (found[0] == found[1]).all()
    assert found[0].sum() == 3 * 40 * 4 * 2


@slow
def test_no_plan_no_move(decoders, monkeypatch, caplog):
    """A server goes on where the planning process fails, and says why."""
    made, _ = decoders
    ours = made.balancers[SIZE]
    monkeypatch.setattr(balancer, "WORTH", 0.0)
    monkeypatch.setattr(balancer, "_LEAST_ROWS", 0)
    monkeypatch.setattr(ours, "_seconds", 0.0)
    monkeypatch.setattr(ours, "_looked", 0.0)
    was = ours.placement.phy2log.copy()
    monkeypatch.setattr(balancer.sys, "executable", "false")
    end = time.monotonic() + LIMIT_S
    while "no plan" not in caplog.text and time.monotonic() < end:
        ours.between_steps()
        time.sleep(0.005)
    assert "no plan for experts was made: nothing" in caplog.text
    assert ours._work is None and (ours.placement.phy2log == was).all()


def test_who_cannot_be_balanced(tmp_path, capsys, monkeypatch):
    """In one sentence, by the command and by the server."""
    for size, n_ranks, why in (
        ("gpt_oss_tiny", 2, "biases of experts have no replicas"),
        ("deepseek_tiny", 2, "MAX's own model serves DeepseekV3ForCausalLM"),
        ("tiny", 1, "one rank has all experts"),
        ("tiny", 2, ""),
    ):
        if not (tmp_path / size).exists():
            make_checkpoint(tmp_path / size, size)
        config = check_config(config_in(tmp_path / size))
        said = why_not_balanced(config, n_ranks)
        assert said.startswith(why) and bool(said) == bool(why)
    monkeypatch.delenv(BALANCE_VARIABLE, raising=False)
    command = ["serve", str(tmp_path / "tiny"), "--gpus", "0", "--dry-run", "--balance"]
    assert main([*command, "--ranks", "1"]) == 1
    assert "--balance: one rank has all experts" in capsys.readouterr().err
    assert main([*command, "--ranks", "2"]) == 0
    assert "MAX_EP_BALANCE=60 max serve" in capsys.readouterr().out
    repo = SimpleNamespace(repo_type="local", local_path=str(tmp_path / "tiny"))
    repo.subfolder = None
    with monkeypatch.context() as here:
        here.setenv(BALANCE_VARIABLE, "often")
        with pytest.raises(ValueError, match="MAX_EP_BALANCE='often' must be seconds"):
            settings.balance_s()


def test_a_planner_s_process(tmp_path):
    """It reads what a server writes, and changes little where little is gained."""
    old = Placement(np.arange(20)[np.newaxis] % 16, 4)
    counts = np.full((1, 20), 100)
    counts[0, :2] = 3000
    given, planned = tmp_path / "given.npz", tmp_path / "planned.npz"
    numbers = dict(n_ranks=4, top_k=4, max_replicas=4)
    np.savez(given, counts=counts, phy2log=old.phy2log, **numbers)
    with start_planner(given, planned) as process:
        assert process.wait(LIMIT_S) == 0
    new = Placement.load(planned)
    logical = old.logical_counts(counts)
    assert new.imbalance(logical)[0] < old.imbalance(logical)[0] - 0.3
    assert json.dumps(new.phy2log.shape) == "[1, 20]"
