# SPDX-License-Identifier: Apache-2.0
"""Dispatch into fewer rows than some routings need: `EPConfig.max_output_rows`.

What is kept is the oracle's, bit for bit; what is dropped is counted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from cases import (
    PROTOCOLS,
    ROUTINGS,
    Case,
    Inputs,
    expected,
    in_protocols,
    make_inputs,
)
from harness import (
    Built,
    Groups,
    RankInputs,
    assert_round_trip,
    building,
    flatten,
    fused_round_trip,
    round_trip,
    take_outputs,
    to_numpy,
)
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import Module

from max_ep import EPBatchManager, EPCommInitializer
from max_ep.reference import dispatch, drop_rows, kept_rows

# 3 ranks with 2, 2 and 1 experts. "full": 3 * 7 rows of each of 3 experts.
CAPPED = Case("capped", 3, 5, 3, 80, 7, max_output_rows=17)
TIGHT = replace(CAPPED, name="tight", max_output_rows=1, fused_shared_expert=True)
CASES = in_protocols([CAPPED]) | {"tight": TIGHT}
# Pairs of two counting warps; more tokens than can be inline.
MANY = Case("capped_many", 2, 300, 3, 80, 300, max_output_rows=301)


def capped_round_trip(
    manager: EPBatchManager, ranks: Sequence[RankInputs], trip: Callable = round_trip
) -> Built:
    built = trip(manager, ranks)
    return [
        [*of_rank, *manager.ep_dropped(given.ids, rank)]
        for rank, (of_rank, given) in enumerate(zip(built, ranks))
    ]


def fused_capped_round_trip(
    manager: EPBatchManager, ranks: Sequence[RankInputs]
) -> Built:
    return capped_round_trip(manager, ranks, fused_round_trip)


def add_graphs(module: Module) -> None:
    for case in CASES.values():
        with building(case.name, case, module=module) as (manager, ranks, graph):
            built = capped_round_trip(manager, ranks)
            graph.output(*(value for of_rank in built for value in of_rank))


@pytest.fixture(scope="module", params=CASES)
def comm(request, session: InferenceSession, one_module) -> Iterator[EPCommInitializer]:
    comm = EPCommInitializer(CASES[request.param].config())
    comm.ep_init(session)
    comm.case, comm.model = CASES[request.param], one_module.models[request.param]
    yield comm
    comm.close()


def assert_capped(case: Case, given: Inputs, outputs: Iterator[Buffer]) -> int:
    """Compares rows and results with the oracle's, and what is said to be dropped.
    Returns how many rows are."""
    want = expected(case, given)
    all_rows = expected(replace(case, max_output_rows=None), given).dispatch
    n_came = [np.zeros(len(ids), int) for ids in given.ids]
    for result in want.dispatch:
        for src_rank, (token, k) in zip(result.src_ranks, result.src_info):
            n_came[src_rank][token] += k >= 0
    got = []
    for rank, ids in enumerate(given.ids):
        got += take_outputs(replace(case, n_ranks=1), outputs)
        of_tokens, of_experts = to_numpy(next(outputs)), to_numpy(next(outputs))
        assert (of_tokens == (ids >= 0).sum(axis=1) - n_came[rank]).all()
        sizes = [
            np.diff(r.row_offsets.astype(int))
            for r in (all_rows[rank], want.dispatch[rank])
        ]
        n_local = case.n_local_experts
        assert (of_experts == (sizes[0] - sizes[1])[-n_local:]).all()
    assert_round_trip(case.name, got, want)
    return sum((x >= 0).sum() for x in given.ids) - sum(x.sum() for x in n_came)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_fits_is_the_oracles_and_the_rest_is_counted(comm, routing):
    """Twice: what was dropped before leaves nothing behind."""
    given = make_inputs(comm.case, routing)
    for _ in range(2):
        inputs = flatten(given) + comm.model_inputs()
        outputs = iter(comm.model.execute(*inputs))
        assert assert_capped(comm.case, given, outputs) or routing != "full"


def check_gpu(session: InferenceSession, cases: list[Case], on: str, build: Callable):
    """Runs and replays what drops rows, and what drops none, of all cases at once."""
    by_name = {case.name: case for case in cases}
    name = f"{cases[0].name}_{on}"
    groups = Groups(
        session, name, by_name, config=lambda c: getattr(c, on)(), build=build
    )

    def check(given: dict[str, Inputs], outputs: Iterable[Buffer]) -> None:
        outputs = iter(outputs)
        for comm in groups.comms.values():
            comm.check()
        dropped = [assert_capped(case, given[case.name], outputs) for case in cases]
        assert all(dropped) or routing != "full"

    try:
        for routing in ROUTINGS:
            given = {case.name: make_inputs(case, routing) for case in cases}
            for _ in range(2):
                check(given, groups.model.execute(*groups.inputs(given)))
        full = {case.name: [case.max_tokens_per_rank] * case.n_ranks for case in cases}
        given = {case.name: make_inputs(case, "full") for case in cases}
        inputs = groups.inputs(given)
        groups.model.execute(*inputs)
        captured = groups.model.capture(1, *inputs)
        for routing in ("full", "uniform", "zipf", "full"):
            given = {
                name: make_inputs(case, routing, counts=full[name])
                for name, case in by_name.items()
            }
            for to, what in zip(inputs, groups.inputs(given)):
                if to is not what and not to.is_host:
                    to.inplace_copy_from(what)
            groups.model.replay(1, *inputs)
            check(given, captured)
    finally:
        groups.close()


def gpu_cases(suffix: str) -> list[Case]:
    cases = in_protocols([CAPPED, TIGHT, MANY])
    return [cases[f"{case.name}{suffix}"] for case in (CAPPED, TIGHT, MANY)]


BY_RANK = [suffix for suffix in PROTOCOLS if suffix]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("suffix", BY_RANK)
def test_ranks_of_one_gpu_keep_the_same(gpu_session, suffix):
    check_gpu(gpu_session, gpu_cases(suffix), "on_one_gpu", capped_round_trip)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("suffix", BY_RANK)
def test_two_gpus_keep_the_same(gpu_session, suffix):
    """In one launch a direction; of few experts, and of many."""
    cases = [
        replace(case, name=f"{case.name}_2", n_ranks=2) for case in gpu_cases(suffix)
    ]
    check_gpu(gpu_session, cases, "on_gpus", fused_capped_round_trip)


def test_the_largest_pairs_lose_first():
    """A level for all pairs; what is left over goes to the first ones."""
    counts = np.array([[9, 1, 4], [0, 4, 2]])
    assert (kept_rows(counts, 20) == counts).all()
    assert kept_rows(counts, 15).tolist() == [[4, 1, 4], [0, 4, 2]]
    assert kept_rows(counts, 14).tolist() == [[4, 1, 4], [0, 3, 2]]
    assert kept_rows(counts, 11).tolist() == [[3, 1, 3], [0, 2, 2]]
    assert kept_rows(counts, 2).tolist() == [[1, 1, 0], [0, 0, 0]]


def test_a_pair_keeps_its_first_tokens():
    tokens = [np.arange(4, dtype=np.float32)[:, np.newaxis]]
    (result,) = dispatch(tokens, [np.array([[0, 1]] * 3 + [[1, -1]])], 2)
    kept = drop_rows(result, 1, 5)
    assert kept.src_info.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert kept.row_offsets.tolist() == [0, 3, 5]
