# SPDX-License-Identifier: Apache-2.0
"""``graphs/changed_import.py`` with MAX's EP and with max_ep: the same results.

Both run in processes of their own, with the same arguments but ``--package``.

Equal bit for bit are all that dispatch delivers but the order of rows within an
expert, which MAX leaves open, and combine's sums of the runs in which float32
arithmetic is exact. Of random tokens and weights two things may differ: the
last bit of float32 sums, because MAX does not promise an order of addition or
fused multiply-adds; and the quantization of FP8, because it does not promise
how a scale is rounded. Each package's are compared with bounds for that, from
what it delivered itself; ``-s`` shows how many elements differ.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from max.driver import accelerator_count

from graphs.changed_import import (
    EXACT_RUNS,
    FP8_BLOCK,
    N_EXPERTS,
    OUTPUTS,
    RANDOM_RUN,
    TOP_K,
    by_expert,
    make_inputs,
    narrow,
    rows_of_experts,
    widen,
)
from max_ep import reference

ROOT = Path(__file__).resolve().parent.parent
MAX, OURS = "max.nn.comm.ep", "max_ep"
TIMEOUT_S = 400


@dataclass
class Run:
    """What one package gave in one run of one form, and what it was given."""

    where: str
    name: str
    counts: list[int]
    is_fp8: bool
    has_shared: bool = False
    sums: list[np.ndarray] = field(default_factory=list)
    """bfloat16 bits ``[n_tokens, hidden]`` of each rank."""
    dispatched: list[list[np.ndarray]] = field(default_factory=list)
    """Rows, for FP8 scales, row offsets, expert ids of each rank."""

    def __post_init__(self) -> None:
        given = make_inputs(self.name, self.counts, has_shared=self.has_shared)
        self.tokens, self.ids, self.weights, self.factors = given
        self.n_rows = rows_of_experts(self.ids, self.has_shared)
        self.is_exact = self.name in EXACT_RUNS

    def oracle(self) -> list[reference.DispatchResult]:
        return reference.dispatch(
            self.tokens if self.is_fp8 else [narrow(x) for x in self.tokens],
            self.ids,
            N_EXPERTS,
            quantize=reference.quantize_blockwise_fp8 if self.is_fp8 else None,
            shared_expert=self.has_shared,
        )


def run_script(package: str, arguments: str, folder: Path) -> dict[str, np.ndarray]:
    """Runs the program in a process of its own; returns what it saved."""
    path = folder / f"{package}.npz"
    command = [sys.executable, str(ROOT / "graphs/changed_import.py")]
    command += ["--package", package, *arguments.split(), "--save", str(path)]
    python_path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, python_path))},
    )
    print(f"{package} {arguments}\n{done.stdout}")
    assert done.returncode == 0, f"{package} {arguments}\n{done.stdout}\n{done.stderr}"
    with np.load(path) as saved:
        return dict(saved)


def take(saved: dict, form: str, run: str, package: str, **kind: bool) -> Run:
    def of(rank: int, names: tuple[str, ...]) -> list[np.ndarray]:
        keys = [f"{form}/{run}/{rank}/{name}" for name in names]
        return [saved[key] for key in keys if key in saved]

    counts = saved["counts"].tolist()
    got = Run(f"{package}, {form}, {run}", run, counts, **kind)
    for rank in range(len(counts)):
        got.sums += of(rank, OUTPUTS[:1])
        got.dispatched.append(of(rank, OUTPUTS[1:]))
    return got


def forms_of(saved: dict[str, np.ndarray]) -> list[str]:
    return list(dict.fromkeys(k.split("/")[0] for k in saved if "/" in k))


def check_rows_are_counted(got: Run) -> None:
    """Compares how many rows each expert got; of FP8 MAX rounds up to fours."""
    fill = 4 if got.is_fp8 and MAX in got.where else 1
    n_rows = -(-got.n_rows // fill) * fill
    for rank, (*_, row_offsets, expert_ids) in enumerate(got.dispatched):
        n_got = dict(zip(expert_ids.tolist(), np.diff(row_offsets.astype(int))))
        for expert, n in enumerate(n_rows[rank]):
            where = f"{got.where}: rank {rank}, expert {expert}"
            assert n_got.get(expert, 0) == n, f"{where}: {n_got}, not {n}"


def check_rows_are_the_oracles(got: Run) -> None:
    """Compares each expert's rows with the oracle's, as sets."""
    for rank, (g, w) in enumerate(zip(got.dispatched, got.oracle(), strict=True)):
        scales = [] if w.scales is None else [w.scales]
        wanted = [w.rows, *scales, w.row_offsets, w.expert_ids]
        pairs = (by_expert(x, got.n_rows[rank]) for x in (g, wanted))
        for expert, (have, need) in enumerate(zip(*pairs, strict=True)):
            where = f"{got.where}: rank {rank}, expert {expert}"
            assert have.shape == need.shape, f"{where}: {have.shape}, want {need.shape}"
            assert (have == need).all(), f"{where}: other rows"


def dequantize(dispatched: list[np.ndarray]) -> np.ndarray:
    """Returns a rank's rows in float32."""
    rows, *scales = dispatched[:-2]
    if not scales:
        return widen(rows)
    values = reference.float8_e4m3fn_to_float32(rows)
    return values * np.repeat(scales[0].T, FP8_BLOCK, axis=1)


def rows_by_token(dispatched, tokens, n_rows):
    """Finds each token's row for each expert by the signs of its elements."""
    rows, *_, row_offsets, expert_ids = dispatched
    sign_bit = 1 << (8 * rows.itemsize - 1)
    packed = np.packbits(rows & sign_bit != 0, axis=1)
    token_of = {
        signs.tobytes(): token
        for token, signs in enumerate(np.packbits(np.signbit(tokens), axis=1))
    }
    assert len(token_of) == len(tokens), "tokens of the same signs"
    found = {}
    for group, expert in enumerate(expert_ids):
        first = int(row_offsets[group])
        for row in range(first, first + int(n_rows[expert])):
            token = token_of.get(packed[row].tobytes())
            assert token is not None, f"expert {expert}: row {row} is no token"
            assert (int(expert), token) not in found, f"token {token} came twice"
            found[int(expert), token] = row
    return found


def check_rows_are_close(got: Run) -> None:
    """Compares quantized rows with their tokens, to FP8's rounding."""
    tokens, n_found = np.concatenate(got.tokens), 0
    for rank, dispatched in enumerate(got.dispatched):
        values, scales = dequantize(dispatched), dispatched[1]
        found = rows_by_token(dispatched, tokens, got.n_rows[rank])
        for (_, token), row in found.items():
            scale = np.repeat(scales[:, row], FP8_BLOCK)
            # Half a step of 3 mantissa bits, or of the subnormals; a little more
            # for the scale's own rounding.
            allowed = np.abs(tokens[token]) * (2.0**-4 * 1.02) + scale * 2.0**-9
            error = np.abs(values[row] - tokens[token])
            assert (error <= allowed).all(), f"{got.where}: token {token} is off"
            n_found += 1
    assert n_found == sum(ids.size for ids in got.ids), f"{got.where}: {n_found} rows"


def check_sums(got: Run) -> None:
    """Compares sums with those of the rows that this package delivered. Float32 sums of
    ``n`` products are within ``n`` roundings of the exact one, in any order, products
    fused or not. Rounding to bfloat16 is monotone, so a sum lies between the rounded
    ends of that interval: where they are the same number, only that one is right. A
    shared expert's row is added to the rounded sum, which is rounded again."""
    ids, weights, factors = got.ids, got.weights, got.factors
    all_tokens, counts = np.concatenate(got.tokens), got.counts
    first = np.cumsum([0, *counts])
    n_local, n_shared = N_EXPERTS // len(counts), int(got.has_shared)
    pairs = zip(got.dispatched, got.n_rows)
    found = [rows_by_token(d, all_tokens, n) for d, n in pairs]
    values = [dequantize(d) for d in got.dispatched]

    def row_of(rank: int, group: int, token: int) -> np.ndarray:
        """Returns what an expert sent back of a token, ``[hidden]`` float64."""
        where = f"{got.where}: rank {rank}, expert {group}"
        assert (group, token) in found[rank], f"{where}: token {token} is missing"
        product = values[rank][found[rank][group, token]] * factors[rank][group]
        bits = reference.float32_to_bfloat16(product)
        return reference.bfloat16_to_float32(bits).astype(np.float64)

    for rank, n_tokens in enumerate(counts):
        exact = np.zeros((n_tokens, all_tokens.shape[1]))
        magnitude = np.zeros_like(exact)
        for token in range(n_tokens):
            for weight, expert in zip(weights[rank][token], ids[rank][token]):
                at, local_expert = divmod(int(expert), n_local)
                row = row_of(at, local_expert + n_shared, int(first[rank]) + token)
                exact[token] += np.float64(weight) * row
                magnitude[token] += np.abs(np.float64(weight) * row)
        slack = 0 if got.is_exact else (TOP_K + 1) * 2.0**-24
        low, high = (rounded(exact + sign * slack * magnitude) for sign in (-1, 1))
        if got.has_shared:
            numbers = range(int(first[rank]), int(first[rank]) + n_tokens)
            shared = np.array([row_of(rank, 0, number) for number in numbers])
            shared = shared.reshape(exact.shape)
            low, high = rounded(low + shared), rounded(high + shared)
        sums = widen(got.sums[rank])
        wrong = ~((low <= sums) & (sums <= high))
        where = f"{got.where}: rank {rank}"
        assert not wrong.any(), (
            f"{where}: {wrong.sum()} of {wrong.size} sums are off, "
            f"{(low < high).sum()} may be rounded either way; the first is "
            f"{sums[wrong][0]}, not in [{low[wrong][0]}, {high[wrong][0]}]"
        )


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds to bfloat16."""
    return widen(reference.float32_to_bfloat16(x.astype(np.float32)))


def check_run(got: Run) -> None:
    """Compares one package's run with the oracle."""
    check_rows_are_counted(got)
    if got.is_fp8 and not got.is_exact and MAX in got.where:
        check_rows_are_close(got)
    else:
        check_rows_are_the_oracles(got)
    check_sums(got)


ARGUMENTS = {
    "bfloat16": "",
    "fp8": "--fp8 --forms fused all",
    "bfloat16_weights": "--bfloat16-weights --forms split",
    "shared_expert": "--shared-expert --forms fused",
    "silent_rank": "--tokens 17 0 --forms fused",
    "four_bfloat16": "",
    "four_fp8": "--fp8 --forms fused",
}


@pytest.fixture(scope="module")
def saved_by_both(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Runs both packages, once for each name."""

    @functools.cache
    def run(name: str) -> dict[str, dict[str, np.ndarray]]:
        n_ranks = 4 if name.startswith("four") else 2
        arguments = f"--ranks {n_ranks} {ARGUMENTS[name]}"
        folder = tmp_path_factory.mktemp(name)
        return {p: run_script(p, arguments, folder) for p in (MAX, OURS)}

    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpu(4 if "four" in name else 2))
        for name in ARGUMENTS
    ],
)
def test_only_the_import_changes(saved_by_both, name):
    saved = saved_by_both(name)
    assert saved[MAX].keys() == saved[OURS].keys()
    kind = {"is_fp8": "fp8" in name, "has_shared": "shared" in name}
    for form in forms_of(saved[OURS]):
        for run in (*EXACT_RUNS, RANDOM_RUN):
            theirs, ours = (take(saved[p], form, run, p, **kind) for p in (MAX, OURS))
            for got in (theirs, ours):
                check_run(got)
            differ = [(a != b).sum() for a, b in zip(theirs.sums, ours.sums)]
            print(f"{name}, {form}, {run}: {sum(differ)} sums differ")
            if run in EXACT_RUNS:
                assert not any(differ), f"{form}, {run}: {differ} sums differ"
            for rank in range(len(ours.counts)):
                pairs = zip(theirs.dispatched[rank], ours.dispatched[rank], strict=True)
                for a, b in pairs:
                    assert (a.dtype, a.shape) == (b.dtype, b.shape)


# On CPU ranks the round trips have the split forms, too, and it compiles as long.
HAS_SPLIT = accelerator_count() > 0 or "MAX_EP_ALL_CASES" in os.environ


@pytest.mark.parametrize(
    "arguments",
    ["--forms all --bfloat16-weights --shared-expert", *["--forms split"] * HAS_SPLIT],
)
def test_max_ep_alone(arguments, tmp_path):
    """Ours, on what there is: two ranks of the CPU where there is no GPU."""
    # Each further rank's experts are compiled by themselves.
    ranks = "" if accelerator_count() else "--ranks 2"
    saved = run_script(OURS, f"{ranks} {arguments}", tmp_path)
    kind = {"is_fp8": False, "has_shared": "shared" in arguments}
    (form,) = forms_of(saved)
    for run in (*EXACT_RUNS, RANDOM_RUN):
        check_run(take(saved, form, run, OURS, **kind))


COUNTS = [20, 0, 3, 7]


def perfect_run(run: str, is_fp8: bool) -> Run:
    """Makes what MAX may give: the oracle's, an expert's rows turned and filled up."""
    got = Run(f"{MAX}, perfect, {run}", run, COUNTS, is_fp8)
    results, expert_rows = got.oracle(), []
    for rank, result in enumerate(results):
        scales = [] if result.scales is None else [result.scales]
        arrays = [result.rows, *scales, result.row_offsets, result.expert_ids]
        factor = np.repeat(got.factors[rank], np.diff(result.row_offsets.astype(int)))
        product = dequantize(arrays) * factor[:, np.newaxis]
        expert_rows.append(rounded(product))
        order, offsets = [], [0]
        for begin, end in zip(result.row_offsets[:-1], result.row_offsets[1:]):
            order += range(int(end) - 1, int(begin) - 1, -1)
            order += [0] * (-len(order) % 4 * is_fp8)
            offsets.append(len(order))
        turned = [result.rows[order], *(x[:, order] for x in scales)]
        row_offsets = np.array(offsets, np.uint32)
        got.dispatched.append([*turned, row_offsets, result.expert_ids])
    sums = reference.combine(expert_rows, results, got.weights)
    got.sums = [reference.float32_to_bfloat16(x) for x in sums]
    return got


def off_by_one_bit(got: Run) -> None:
    got.sums[0][5, 7] ^= 1


def other_row(got: Run) -> None:
    got.dispatched[1][0][0] = got.dispatched[1][0][1]


def other_expert(got: Run) -> None:
    got.dispatched[0][-2][1] -= 1


def large_scale(got: Run) -> None:
    got.dispatched[0][1][2, 0] *= 1.2


@pytest.mark.parametrize(
    "is_fp8, run, spoil",
    [
        (False, "uniform", None),
        (False, "random", None),
        (True, "uniform", None),
        (True, "random", None),
        (False, "crowded", off_by_one_bit),
        (False, "random", off_by_one_bit),
        (True, "uniform", off_by_one_bit),
        (False, "random", other_row),
        (True, "random", other_row),
        (False, "uniform", other_expert),
        (True, "random", other_expert),
        (True, "random", large_scale),
    ],
)
def test_the_checks(is_fp8, run, spoil):
    """They pass what is right in another order, and notice what is not."""
    got = perfect_run(run, is_fp8)
    if spoil is None:
        check_run(got)
        return
    spoil(got)
    with pytest.raises(AssertionError):
        check_run(got)


def test_a_last_bit_of_a_scale_may_differ():
    """FP8 of random tokens, quantized by a rounding that is not the oracle's."""
    got = perfect_run("random", is_fp8=True)
    for dispatched in got.dispatched:
        dispatched[1] = np.nextafter(dispatched[1], np.float32(np.inf))
    check_rows_are_close(got)
    with pytest.raises(AssertionError, match="other rows"):
        check_rows_are_the_oracles(got)
