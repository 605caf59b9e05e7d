# SPDX-License-Identifier: Apache-2.0
"""Dispatch into fewer rows than some routings need: `EPConfig.max_output_rows`.

What is kept is the oracle's, bit for bit; what is dropped is counted.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases import ROUTINGS, Case, expected, in_protocols, make_inputs
from harness import (
    assert_round_trip,
    building,
    flatten,
    round_trip,
    take_outputs,
    to_numpy,
)
from max.engine import InferenceSession
from max.graph import Module

from max_ep import EPCommInitializer
from max_ep.reference import dispatch, drop_rows, kept_rows

# 3 ranks with 2, 2 and 1 experts. "full": 3 * 7 rows of each of 3 experts.
CAPPED = Case("capped", 3, 5, 3, 80, 7, max_output_rows=17)
TIGHT = replace(CAPPED, name="tight", max_output_rows=1, fused_shared_expert=True)
CASES = in_protocols([CAPPED]) | {"tight": TIGHT}


def add_graphs(module: Module) -> None:
    for case in CASES.values():
        with building(case.name, case, module=module) as (manager, ranks, graph):
            built = [
                value for of_rank in round_trip(manager, ranks) for value in of_rank
            ]
            for rank, given in enumerate(ranks):
                built += manager.ep_dropped(given.ids, rank)
            graph.output(*built)


@pytest.fixture(scope="module", params=CASES)
def comm(request, session: InferenceSession, one_module) -> Iterator[EPCommInitializer]:
    comm = EPCommInitializer(CASES[request.param].config())
    comm.ep_init(session)
    comm.case, comm.model = CASES[request.param], one_module.models[request.param]
    yield comm
    comm.close()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_fits_is_the_oracles_and_the_rest_is_counted(comm, routing):
    """Twice: what was dropped before leaves nothing behind."""
    case, given = comm.case, make_inputs(comm.case, routing)
    want = expected(case, given)
    all_rows = expected(replace(case, max_output_rows=None), given).dispatch
    for _ in range(2):
        inputs = flatten(given) + comm.model_inputs()
        outputs = iter(comm.model.execute(*inputs))
        got = take_outputs(case, outputs)
        assert_round_trip(f"{case.name}, {routing}", got, want)
        n_came = [np.zeros(len(ids), int) for ids in given.ids]
        for result in want.dispatch:
            for src_rank, (token, k) in zip(result.src_ranks, result.src_info):
                n_came[src_rank][token] += k >= 0
        for rank, ids in enumerate(given.ids):
            of_tokens, of_experts = to_numpy(next(outputs)), to_numpy(next(outputs))
            assert (of_tokens == (ids >= 0).sum(axis=1) - n_came[rank]).all()
            sizes = [
                np.diff(r.row_offsets.astype(int))
                for r in (all_rows[rank], want.dispatch[rank])
            ]
            n_local = case.n_local_experts
            assert (of_experts == (sizes[0] - sizes[1])[-n_local:]).all()
        assert routing != "full" or of_tokens.any()


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
