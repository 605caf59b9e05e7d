# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: its tables, graphs and checks."""

import functools
import re
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from max.driver import Buffer

from bench import gpu_round_trip, report, summary
from max_ep import reference
from max_ep.bench import cases, checks, peer_graphs, peer_torch, processes, runs
from max_ep.bench.cases import Case, Config
from max_ep.formats import BY_NAME
from tests.children import slow

DATA = runs.load(report.DATA)


def test_the_pages_are_made_of_the_data():
    """`python -m bench.report` was run after the last change."""
    summed = report.SUMMARY.read_text()
    assert summed == report.page(summed, summary.tables(DATA))
    served = report.SERVING.read_text()
    assert served == report.page(served, {"ratios": summary.ratios(DATA)})
    text = report.PAGE.read_text()
    assert text == report.page(text, report.made_of(DATA))
    assert report.DATA.read_text() == runs.dump(DATA)
    names = re.findall(r"\]\((images/[^)]+)\)", text)
    assert len(names) == 4
    assert all((report.PAGE.parent / name).exists() for name in names)


def test_times_of_different_runs_have_no_ratio():
    case = dict(ranks=2, shape="h7168_e256_k8", dtype="fp8", routing="uniform")
    case |= dict(form="fused", wire_bytes=1)
    times = [("new", "sums", 1, 8.0), ("old", "sums", 8, 10.0)]
    times += [("old", "max", 1, 30.0), ("old", "max", 8, 30.0)]
    rows = [
        case | dict(run=run, peer=peer, tokens=n, us=us) for run, peer, n, us in times
    ]
    assert [line[1:] for line in report._group_lines(rows)] == [
        ["max_ep by_rank, sums", "captured", "8.00", "10.0", "1: new; 8: old"],
        ["MAX EP / max_ep by_rank, sums", "ratio", "", "3.00", "old"],
        ["MAX EP", "captured", "30.0", "30.0", "old"],
    ]


def test_rows_are_those_of_their_cases(monkeypatch):
    """Each is there once, names are known to the benchmark, and bytes are computed
    again."""
    # Most rows have the ids of another.
    monkeypatch.setattr(cases, "expert_ids", functools.cache(cases.expert_ids))
    of_kind = [(kind, row) for kind in ("gpu", "experts") for row in DATA[kind]]
    keys = [runs._key(DATA, *of_row) for of_row in of_kind]
    assert len(set(keys)) == len(keys)
    times = "run us p95 eager_us eager_p95 idle_us idle_p95".split()
    for _, row in of_kind:
        max_tokens = cases.max_tokens_for(row["tokens"], row["peer"])
        what = row["peer"], row["ranks"], row["shape"], row["dtype"], max_tokens
        case = Case(Config(*what), row["form"], row["tokens"], row["routing"])
        assert row["form"] in cases.FORMS[row["peer"]]
        assert case.row() == {k: v for k, v in row.items() if k not in times}


@pytest.mark.parametrize(
    "function, argument, limit_s, reason",
    [
        (print, "done", 600, ""),
        (time.sleep, 600, 5, "killed after 5 s"),
        (sys.exit, 3, 600, "the process ended with 3"),
    ],
    ids=["ends", "hangs", "dies"],
)
def test_a_child_that_does_not_end_is_killed(function, argument, limit_s, reason):
    assert processes.in_child(function, (argument,), limit_s) == reason


@pytest.mark.parametrize(
    "peer, form",
    [(p, f) for p, fs in cases.FORMS.items() for f in fs if p != "grouped_mm"],
)
def test_graphs_of_all_forms_are_built(monkeypatch, peer, form):
    """As where they are compiled ahead: without a GPU."""
    if peer in cases.FROM_TORCH:  # no graphs of MAX's
        config = Config(peer, 2, "h4096_e8_k2", "bfloat16", 128)
        assert peer_torch.layers_of(Case(config, form, 8, "uniform"))
        return
    dtypes = {"by_expert": "fp8", "sums": "nvfp4", "given": "mxfp8", "packed": "fp8"}
    dtype = dtypes.get(peer, "bfloat16")
    n_ranks = 1 if peer in ("max_layer", "experts") else 2
    shape = "h2048_e128_k8" if peer == "experts" else "h4096_e8_k2"
    built = peer_graphs.peer_of(Config(peer, n_ranks, shape, dtype, 128, n_layers=3))
    timed = built.graph(form, is_check=False)
    n_work = n_ranks if "work" in form else 0
    if built.has_check_graph:
        checked = built.graph(form, is_check=True)
        assert len(checked.inputs) == len(timed.inputs)
        assert len(timed.output_types) == n_ranks + n_work
        n_checked = 1 if peer == "experts" else 2 * n_ranks
        assert len(checked.output_types) >= n_checked


@pytest.mark.parametrize("dtype", [*cases.DTYPES, "fp8 packed"])
def test_delivered_rows_are_compared(dtype):
    """Rows of the oracle pass; others' rows, tables, or a changed byte do not."""
    dtype, *packed = dtype.split()
    shape = cases.Shape("small", 512, 4, 2, "")
    x = cases.tokens(shape, 1, 6)
    (wanted,) = cases.routes(shape, cases.expert_ids(shape, "uniform", 1, 6))
    numbers, offsets = wanted.rows[:, 0], wanted.row_offsets.astype(np.int64)
    all_tokens = checks.stack_tokens(x, "cpu")
    rows, scales = all_tokens[numbers], None
    if dtype != "bfloat16":
        more = dict(power_of_two_scales=True) if packed else {}
        values, scales = BY_NAME[dtype].quantize(rows.float().numpy(), **more)
        rows = torch.from_numpy(values)
        if packed:
            scales = (scales.view(np.int32) >> 23).astype(np.uint8).view(np.int32)
        scales = torch.from_numpy(scales.T.copy() if dtype == "fp8" else scales)

    def check(rows: torch.Tensor, more: int = 0, exact: bool = True) -> None:
        tables = torch.from_numpy(offsets + np.uint32(more)), torch.arange(4)
        got = checks.Delivered(dtype, rows, scales, *tables, bool(packed))
        checks.check_dispatch("here", got, wanted, all_tokens, exact=exact)

    check(rows)
    with pytest.raises(checks.CheckError, match="out of order"):
        check(rows.flip(0))
    with pytest.raises(checks.CheckError, match="not as many"):
        check(rows, more=1)
    with pytest.raises(checks.CheckError, match="an expert has the wrong tokens"):
        check(rows.flip(0), exact=False)
    rows.view(torch.uint8)[3, -1] ^= 1
    with pytest.raises(checks.CheckError, match="differ|is off"):
        check(rows)


SHAPE = cases.Shape("small", 256, n_experts=16, top_k=4, model="none")
N_RANKS = 2
N_TOKENS = 64


def test_sums_of_experts_that_return_a_row():
    """They are the oracle's, and exact; another token's are noticed."""
    ids = cases.expert_ids(SHAPE, "uniform", N_RANKS, N_TOKENS)[0]
    weights = cases.exact_weights(SHAPE, N_RANKS, ids)

    def expert(number: int, rows: np.ndarray) -> np.ndarray:
        row = cases.expert_row(SHAPE, number // (SHAPE.n_experts // N_RANKS))
        return np.broadcast_to(row, rows.shape).copy()

    x = np.zeros((N_TOKENS, SHAPE.hidden_size), np.float32)
    sums = checks.expert_sums(SHAPE, N_RANKS, ids, weights, "cpu")
    assert (sums.numpy() == reference.moe(x, ids, weights, expert)).all()
    checks.check_chain("here", sums.bfloat16(), sums)
    bad = sums.bfloat16()
    bad[5] = bad[int((sums != sums[5]).any(1).int().argmax())]
    with pytest.raises(checks.CheckError, match="here"):
        checks.check_chain("here", bad, sums)


@pytest.mark.parametrize("wire", ["bfloat16", "fp8"])
def test_a_chain_tells_tokens_apart(wire):
    """Also of ranks, and where experts return one row for all tokens."""
    config = Config("by_expert", N_RANKS, "h2048_e64_k8", wire, 8, "cpu", 1)
    case, peer = Case(config, "split", 8, "uniform"), peer_graphs.peer_of(config)
    data, sums = peer_graphs.make_data(case, 0), []
    for x, ids, weights in zip(data.x, data.ids[0], data.weights[0]):
        want = checks.from_bits(x).double() * cases.chain_factor(1)
        if wire == "fp8":
            want = checks.expert_sums(config.shape, N_RANKS, ids, weights, "cpu")
        sums.append(want.bfloat16())

    def check(sums: list[torch.Tensor]) -> None:
        peer.check_chain(case, data, [Buffer.from_dlpack(x) for x in sums])

    check(sums)
    for wrong in (sums[::-1], [sums[0], sums[1].roll(1, 0)]):
        with pytest.raises(checks.CheckError, match="elements of the chain differ"):
            check(wrong)


def test_experts_are_timed_at_each_size(capsys):
    """And those of torch, which are not compiled ahead."""
    asked = "--ranks 1 --peers experts grouped_mm --tokens 16 1".split()
    found = gpu_round_trip.cases_of(gpu_round_trip._options(asked))
    wanted = [("experts", f, n) for n in (1, 16) for f in cases.EXPERTS["experts"]]
    wanted += [("grouped_mm", "products", n) for n in (1, 16)]
    assert [(c.config.peer, c.form, c.n_tokens) for c in found] == wanted
    asked += ["--compile-for", "sm_90a"]
    mixed = ["--peers", "sums", "experts"]
    none = ["--peers", "experts"], "need --ranks 1"
    for wrong, says in ((asked, "needs --out"), (mixed, "run them alone"), none):
        with pytest.raises(SystemExit):
            gpu_round_trip._options(wrong)
        assert says in capsys.readouterr().err
    with pytest.raises(ValueError, match="at most 4096"):
        gpu_round_trip._options([*asked[:6], "5000"])


EXPERTS = cases.Shape("experts", 128, 8, 2, "none", moe_dim=64)


@pytest.fixture
def torch_layers(monkeypatch) -> tuple[peer_graphs.GraphPeer, Case]:
    """The peer whose layers the CPU runs without compiling them."""
    monkeypatch.setitem(cases.SHAPES, EXPERTS.name, EXPERTS)
    config = Config("grouped_mm", 1, EXPERTS.name, "bfloat16", 128, "cpu")
    peer = peer_graphs.peer_of(config)
    peer.open(None)
    return peer, Case(config, "products", 16, "uniform")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[slow] * (form != "dispatched"))
        for form in cases.EXPERTS["experts"]
    ],
)
def test_layers_of_experts_are_compared(torch_layers, form):
    """Layers of torch's products pass; one element of the wrong sign does not."""
    peer, case = torch_layers
    case = replace(case, form=form)
    data = peer.make_data(case, 1)
    x, (offsets, *_) = checks.from_bits(data.x), data.choices[0]
    is_routed = form in ("gathered", "dispatched")
    if form == "gathered_products":
        x = x[data.choices[0][2]]
    if is_routed:
        ids, weights = map(torch.from_numpy, data.choices[0])
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS.n_experts)
        offsets = np.append(0, counts.cumsum(0)).astype(np.uint32)
        x = x[order // EXPERTS.top_k]
    given = x, *peer.weights, torch.from_numpy(offsets)
    layer = peer._model("products", is_check=True)
    rows = torch.from_dlpack(layer.execute(*map(Buffer.from_dlpack, given))[0])
    if is_routed:
        of_choice = torch.empty_like(rows)
        of_choice[order] = rows
        of_choice = of_choice.unflatten(0, ids.shape) * weights.unsqueeze(2)
        rows = of_choice.sum(1).bfloat16()
    peer.check_layer(case, data, [Buffer.from_dlpack(rows)])
    rows[-1, rows[-1].abs().argsort()[EXPERTS.hidden_size // 2]] *= -1
    with pytest.raises(checks.CheckError, match=f"{form}.*a row is off by 0"):
        peer.check_layer(case, data, [Buffer.from_dlpack(rows)])


@slow
def test_a_chain_of_experts_is_its_layers(torch_layers):
    """To the bit, and each has its own choices."""
    peer, case = torch_layers
    inputs, check = peer.start(case)
    (made,) = peer._model(case.form).execute(*inputs)
    check([made])
    assert torch.from_dlpack(made).isfinite().all()
    inputs[-2:], inputs[-4:-2] = inputs[-4:-2], inputs[-2:]
    with pytest.raises(checks.CheckError, match="the chain and its layers differ"):
        check(peer._model(case.form).execute(*inputs))


def test_the_summary_says_where_others_are_faster():
    """A made-up row of MAX that is faster than ours appears, and one that is slower
    does not; so do steps and prefills of servers."""
    of = dict(run="r", ranks=2, shape="h7168_e256_k8", dtype="bfloat16", form="fused")
    rows = [
        of | dict(peer=peer, routing="uniform", tokens=n, us=us)
        for n, times in {8: (3.0, 2.0), 32: (3.0, 4.0)}.items()
        for peer, us in zip(("sums", "max"), times)
    ]
    data = {"runs": {"r": {"gpu": "NVIDIA H100", "n_gpus": 2}}, "gpu": rows}
    lines = summary.tables(data | {"serving": []})["slower"]
    (line,) = lines[2:-1]
    assert line.startswith("| Two H100s | MAX 26.7 | 8 tokens, ")
    assert line.endswith("| 2.00 | 3.00 | 1.50 |")
    data["runs"]["r"]["layers"] = 16
    serving = []
    for peer, ms in dict(max_ep=3.0, max_tensor_parallel=2.0).items():
        of = dict(run="r", peer=peer)
        serving.append(of | dict(clients=1, step_ms=[ms] * 3))
        serving.append(of | dict(clients=16, step_ms=[5 - ms] * 3))
        serving.append(of | dict(prompt=4096, execution_ms=[2 * ms] * 3))
    lines = summary.tables(data | {"serving": serving})["slower"][3:-1]
    whats = [line.split(" | ")[2:] for line in lines]
    assert whats == [
        ["a prefill, 16 layers, ms", "4.00", "6.00", "1.50 |"],
        ["a step of 1 client, 16 layers, ms", "2.00", "3.00", "1.50 |"],
    ]
