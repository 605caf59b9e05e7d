# SPDX-License-Identifier: Apache-2.0
"""MAX's EP and max_ep give the same: `changed_import.py` with either import.

Where numbers are exact, both deliver to each expert the oracle's rows, whose order MAX
leaves open, and return its sums. What max_ep delivers is the oracle's, bit for bit, of
random tokens too.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from max.driver import CPU, accelerator_count
from max.graph import Module

import max_ep
from max_ep import launch
from max_ep.reference import balance_ids, float8_e4m3fn_to_float32
from tests.children import ALL_CASES
from tests.gpu import changed_import
from tests.gpu.changed_import import (
    RUNS,
    Results,
    build,
    case_of,
    config_of,
    factors_of,
    given_to,
    graph_name,
    placement,
    run_in,
)
from tests.harness import assert_same_bits, selected
from tests.oracle.cases import BF16, Case
from tests.oracle.drawn import Inputs, narrow, widen
from tests.oracle.oracle import expected, expected_dispatch

MAX, OURS = "max.nn.comm.ep", "max_ep"


def results_of(package: str, *what: object) -> Results:
    return launch(changed_import.run, 1, (package, *what), timeout_s=400)[0]


def names_of(case: Case) -> list[str]:
    return [
        "sums",
        "rows",
        *["scales"] * case.is_quantized,
        "row_offsets",
        "expert_ids",
    ]


def wanted(case: Case, kind: str, routing: str) -> list[SimpleNamespace]:
    given = given_to(case, kind, routing)
    if "balanced" in kind:
        (log2phy,), (logcnt,) = placement(case.n_ranks)
        given.ids = [balance_ids(x, log2phy, logcnt) for x in given.ids]
    if case.is_quantized:
        dispatched = expected_dispatch(case, given)
    else:
        dispatched = expected(case, given).dispatch
    rows = []
    for result, factors in zip(dispatched, factors_of(case, kind)):
        is_fp8 = case.is_quantized
        x = float8_e4m3fn_to_float32(result.rows) if is_fp8 else widen(result.rows)
        factor = np.repeat(factors, np.diff(result.row_offsets.astype(int)))
        rows.append(narrow(x * factor[:, np.newaxis], BF16))
    lists = given.tokens, given.ids, given.weights
    sums = expected(case, Inputs(*lists, None, rows)).combine
    return [SimpleNamespace(**vars(r), sums=y) for r, y in zip(dispatched, sums)]


def by_expert(of_rank: SimpleNamespace, n_of: np.ndarray) -> list[np.ndarray]:
    """Sorts the bytes of each expert's rows, of FP8 with their scales. MAX lets every
    expert's FP8 rows begin at a multiple of four; what follows them is left out."""
    columns = [of_rank.rows]
    if of_rank.scales is not None:
        columns.append(np.ascontiguousarray(of_rank.scales.T))
    rows = np.concatenate([c.view(np.uint8) for c in columns], axis=1)
    found = [rows[:0]] * len(n_of)
    offsets = of_rank.row_offsets.astype(int)
    for expert, begin, end in zip(of_rank.expert_ids, offsets, offsets[1:]):
        if end > begin:
            mine = rows[begin : min(end, begin + n_of[expert])]
            found[expert] = mine[np.lexsort(mine.T[::-1])]
    return found


def check_theirs(results: Results, case: Case, kind: str) -> None:
    """Checks runs that are exact: elsewhere MAX may round otherwise, to FP8 too."""
    for (form, routing), ranks in results.items():
        for rank, want in enumerate(
            wanted(case, kind, routing) if RUNS[routing] else ()
        ):
            where = f"MAX, {form}, {routing}, rank {rank}"
            named = dict(scales=None) | dict(zip(names_of(case), ranks[rank]))
            n_of = np.diff(want.row_offsets.astype(int))
            of_both = (by_expert(x, n_of) for x in (SimpleNamespace(**named), want))
            for expert, (got, need) in enumerate(zip(*of_both)):
                assert_same_bits(f"{where}, expert {expert}", got, need)
            assert_same_bits(f"{where}: sums", named["sums"], want.sums)


def check_ours(results: Results, case: Case, kind: str) -> None:
    for (form, routing), ranks in results.items():
        for rank, want in enumerate(wanted(case, kind, routing)):
            n = len(want.rows)
            for name, got in zip(names_of(case), ranks[rank], strict=True):
                where = f"{form}, {routing}, rank {rank}: {name}"
                got = {"rows": got[:n], "scales": got[..., :n]}.get(name, got)
                assert_same_bits(where, got, getattr(want, name))


KINDS = {
    "bfloat16": "split fused all",
    "fp8": "fused all",
    "bfloat16_weights": "split",
    "shared": "fused",
    "balanced": "fused all",
    "allreduce": "fused",
    "fused_send": "fused",
    "silent": "fused",
}
ON_FOUR = {"bfloat16": "split fused all", "fp8": "fused"}


@pytest.mark.parametrize(
    "n_ranks, kind, forms",
    [
        pytest.param(n, kind, forms.split(), marks=pytest.mark.gpu(n), id=f"{n}-{kind}")
        for n, kinds in ((2, KINDS), (4, ON_FOUR))
        for kind, forms in kinds.items()
    ],
)
def test_only_the_import_changes(n_ranks, kind, forms):
    case = case_of(n_ranks, kind)
    theirs, ours = (results_of(x, n_ranks, kind, forms) for x in (MAX, OURS))
    check_theirs(theirs, case, kind)
    check_ours(ours, case, kind)
    for where, ranks in ours.items():
        for mine, other in zip(ranks, theirs[where], strict=True):
            shapes = [[(x.dtype, x.shape) for x in of] for of in (mine, other)]
            assert shapes[0] == shapes[1], where


# On CPU ranks the round trips have the split forms, too, and it compiles as long.
HAS_SPLIT = accelerator_count() > 0 or ALL_CASES
EVERYTHING = "bfloat16_weights shared fused_send"
ALONE = [(EVERYTHING, "all")]
ALONE += [("bfloat16", "split"), ("balanced allreduce", "fused")] * HAS_SPLIT


def add_graphs(module: Module) -> None:
    if "test_max_ep_alone" in selected and not accelerator_count():
        for kind, form in ALONE:
            case = case_of(2, kind)
            manager = max_ep.EPBatchManager(config_of(max_ep, case, kind))
            build(manager, form, case, kind, module)


@pytest.mark.parametrize("kind, form", ALONE)
def test_max_ep_alone(request, kind, form):
    """Ours, on what there is: two ranks of the CPU where there is no GPU."""
    n_ranks = min(accelerator_count() or 2, 2)
    case = case_of(n_ranks, kind)
    if accelerator_count():
        results = results_of(OURS, n_ranks, kind, [form])
    else:
        session, module = map(request.getfixturevalue, ("session", "one_module"))
        models = {form: module.models[graph_name(form, case, kind)]}
        results = run_in(session, [CPU()] * n_ranks, max_ep, kind, models)
    assert len(results) == len(RUNS)
    check_ours(results, case, kind)
    check_theirs(results, case, kind)
