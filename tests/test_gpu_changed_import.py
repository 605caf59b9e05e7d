# SPDX-License-Identifier: Apache-2.0
"""``graphs/changed_import.py`` with MAX's EP and with max_ep: the same results.

Both run in processes of their own, with the same arguments but ``--package``. They
print the same digests: of the rows of each expert, whose order MAX leaves open, and of
sums for which float32 is exact. What max_ep delivers is the oracle's, bit for bit, of
random tokens too.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import BF16, F32, Case, Inputs
from children import ALL_CASES, ROOT, WHERE_WE_IMPORT, printed
from harness import assert_same_bits
from max.driver import accelerator_count
from oracle import expected, expected_dispatch

from graphs.changed_import import (
    EXACT_RUNS,
    MAX_REPLICAS,
    N_EXPERTS,
    OUTPUTS,
    PHY2LOG,
    RANDOM_RUN,
    Kind,
    make_inputs,
    narrow,
    widen,
)
from max_ep.balance import Placement
from max_ep.formats import BY_NAME
from max_ep.reference import balance_ids, float32_to_bfloat16

QUANTIZED = BY_NAME["fp8"]
MAX, OURS = "max.nn.comm.ep", "max_ep"


def run_script(package: str, arguments: str, folder: Path) -> tuple[str, dict]:
    path = folder / f"{package}.npz"
    command = [sys.executable, str(ROOT / "graphs/changed_import.py")]
    command += ["--package", package, *arguments.split(), "--save", str(path)]
    said = printed(*command, timeout=400, PYTHONPATH=WHERE_WE_IMPORT)
    print(f"{package} {arguments}\n{said}")
    with np.load(path) as saved:
        return said, dict(saved)


def wanted(run: str, counts: list[int], kind: Kind) -> list[dict]:
    tokens, ids, weights, factors = make_inputs(run, counts, kind)
    n_experts = N_EXPERTS
    if kind.is_balanced:
        placement = Placement(np.array([PHY2LOG]), len(counts))
        (log2phy,), (logcnt,) = placement.log2phy(MAX_REPLICAS), placement.logcnt
        ids = [balance_ids(x, log2phy, logcnt) for x in ids]
        n_experts = len(PHY2LOG)
    sizes = len(counts), n_experts, ids[0].shape[1], tokens[0].shape[1], max(counts)
    wire = ("fp8", F32) if kind.is_fp8 else ("bfloat16", BF16)
    more = dict(fused_shared_expert=kind.has_shared, use_allreduce=kind.adds_up)
    case = Case("changed_import", *sizes, *wire, **more)
    sent = tokens if kind.is_fp8 else [narrow(x) for x in tokens]
    given = Inputs(sent, ids, weights, None, None)
    ask = expected_dispatch if kind.is_fp8 else lambda *asked: expected(*asked).dispatch
    results, rows = ask(case, given), []
    for result, of_rank in zip(results, factors):
        x = widen(result.rows)
        if kind.is_fp8:
            x = QUANTIZED.dequantize(result.rows, result.scales.T)
        factor = np.repeat(of_rank, np.diff(result.row_offsets.astype(int)))
        rows.append(float32_to_bfloat16(x * factor[:, np.newaxis]))
    sums = expected(case, replace(given, expert_rows=rows)).combine
    return [vars(result) | {"sums": x} for result, x in zip(results, sums)]


def check(saved: dict, forms: list[str], kind: Kind) -> None:
    """Compares all that one package has saved with the oracle."""
    saved, counts = dict(saved), saved["counts"].tolist()
    del saved["counts"]
    for run in (*EXACT_RUNS, RANDOM_RUN):
        for rank, want in enumerate(wanted(run, counts, kind)):
            n = len(want["rows"])
            for form in forms:
                for name in (x for x in OUTPUTS if kind.is_fp8 or x != "scales"):
                    got = saved.pop(where := f"{form}/{run}/{rank}/{name}")
                    got = {"rows": got[:n], "scales": got[..., :n]}.get(name, got)
                    assert_same_bits(where, got, want[name])
    assert not saved, "more forms than were asked for"


ARGUMENTS = {
    "bfloat16": "--forms split fused all",
    "fp8": "--fp8 --forms fused all",
    "bfloat16_weights": "--bfloat16-weights --forms split",
    "shared_expert": "--shared-expert --forms fused",
    "balanced": "--balanced --forms fused all",
    "allreduce": "--allreduce --forms fused",
    "fused_send": "--fused-send --forms fused",
    "silent_rank": "--tokens 17 0 --forms fused",
    "four_bfloat16": "--forms split fused all",
    "four_fp8": "--fp8 --forms fused",
}


def check_ours(saved: dict, arguments: str) -> None:
    words = arguments.partition("--forms")[2].split()
    forms = [word for word in words if not word.startswith("--")]
    options = "--fp8", "--shared", "--balanced", "--allreduce", "--fused"
    check(saved, forms, Kind(*(option in arguments for option in options)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpu(4 if "four" in name else 2))
        for name in ARGUMENTS
    ],
)
def test_only_the_import_changes(tmp_path, name):
    arguments = f"--ranks {4 if 'four' in name else 2} {ARGUMENTS[name]}"
    digests, theirs = run_script(MAX, arguments, tmp_path)
    our_digests, ours = run_script(OURS, arguments, tmp_path)
    assert our_digests == digests
    check_ours(ours, arguments)
    assert theirs.keys() == ours.keys()
    for key, array in ours.items():
        assert (theirs[key].dtype, theirs[key].shape) == (array.dtype, array.shape), key


# On CPU ranks the round trips have the split forms, too, and it compiles as long.
HAS_SPLIT = accelerator_count() > 0 or ALL_CASES


@pytest.mark.parametrize(
    "arguments",
    [
        "--balanced --bfloat16-weights --shared-expert --fused-send --forms all",
        *["--forms split", "--balanced --allreduce --forms fused"] * HAS_SPLIT,
    ],
)
def test_max_ep_alone(arguments, tmp_path):
    """Ours, on what there is: two ranks of the CPU where there is no GPU. One bit that
    is not the oracle's is noticed, wherever it is."""
    # Each further rank's experts are compiled by themselves.
    ranks = "" if accelerator_count() else "--ranks 2"
    _, saved = run_script(OURS, f"{ranks} {arguments}", tmp_path)
    check_ours(saved, arguments)
    for key in saved.keys() - {"counts"}:
        spoiled = saved[key].copy()
        spoiled.view(np.uint8).flat[0] ^= 1
        with pytest.raises(AssertionError, match=key):
            check_ours(saved | {key: spoiled}, arguments)
