# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on GPU ranks, bit for bit against the oracle.

On one GPU several ranks run one after another; on several, at the same time. Captured
graphs are replayed in test_gpu_replays.py.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, TensorType

from max_ep import EPBatchManager, EPCommInitializer
from max_ep.cli.who import groups_of
from tests.errors import raises
from tests.harness import (
    Groups,
    all_round_trip,
    assert_dispatched,
    assert_round_trip,
    building,
    flatten,
    graph_of,
    input_types,
    round_trip,
    take_inputs,
    take_outputs,
    to_numpy,
    weights_of,
)
from tests.oracle.cases import (
    BF16,
    BY_RANK_CASES,
    CAPPED,
    CAPPED_ON_TWO,
    CASES,
    F32,
    LAYOUT_CASES,
    PROTOCOLS,
    SUMS_CASES,
    TIGHT,
    Case,
    capped,
    in_protocols,
)
from tests.oracle.drawn import ROUTINGS, Inputs, make_inputs
from tests.oracle.oracle import expected, expected_dispatch

LARGE = in_protocols(
    [
        Case("large", 2, 12, 8, 2048, 160),
        Case("large_fp8", 2, 12, 8, 2048, 320, "fp8"),
        Case("large_padded", 2, 12, 8, 2048, 160, "fp8", output_layout="padded"),
        Case("large_shared", 2, 12, 8, 2048, 320, "fp8", fused_shared_expert=True),
        # With `by_rank` ranks with few tokens send otherwise than the rest.
        Case("large_mixed", 2, 12, 8, 1024, 600),
        # And a block counts for several experts.
        Case("large_experts", 2, 300, 8, 512, 300),
        Case("large_four", 4, 64, 8, 7168, 512),
        Case("large_four_fp8", 4, 64, 8, 7168, 128, "fp8"),
    ]
)


_FEW_RANKS = [
    Case("padded_one", 1, 6, 2, 128, 7, "fp8", output_layout="padded"),
    Case("padded_two", 2, 5, 3, 80, 7, output_layout="padded"),
    Case("shared_one", 1, 6, 2, 128, 7, "fp8", fused_shared_expert=True),
    Case("shared_two", 2, 5, 3, 80, 7, "float32", F32, BF16, fused_shared_expert=True),
]
_EIGHT_RANKS = [
    Case("eight", 8, 21, 8, 80, 7),  # seven ranks of 3 experts, and one without
    Case("eight_fp8", 8, 24, 8, 256, 9, "fp8"),
    Case("eight_mxfp8", 8, 24, 8, 96, 9, "mxfp8", F32),
    Case("eight_nvfp4", 8, 24, 3, 1120, 9, "nvfp4", scale_layout="tiles"),
    Case("eight_padded", 8, 24, 3, 80, 7, output_layout="padded"),
    Case("eight_shared", 8, 21, 3, 80, 7, "float32", F32, fused_shared_expert=True),
]
_SUMS = PROTOCOLS["_sums"]
_QUANTIZED_SUMS = [
    # Few tokens and many, of whole steps of a warp and not.
    Case("fp8_sums_two", 2, 12, 8, 2048, 160, partial="fp8", **_SUMS),
    Case("mxfp8_sums_two", 2, 5, 3, 1120, 7, "mxfp8", F32, partial="mxfp8", **_SUMS),
    Case("mxfp8_sums_eight", 8, 24, 8, 1120, 9, "mxfp8", partial="mxfp8", **_SUMS),
]
ALL_CASES = CASES | LAYOUT_CASES | BY_RANK_CASES | SUMS_CASES
ALL_CASES |= in_protocols([*_FEW_RANKS, *_EIGHT_RANKS])
ALL_CASES |= {case.name: case for case in _QUANTIZED_SUMS}
ALL_CASES |= capped([CAPPED, TIGHT, *CAPPED_ON_TWO])


two_on_each = functools.partial(Case.on_gpus, ranks_per_gpu=2)
_PLACES = {
    "one_gpu": (1, Case.on_one_gpu, round_trip, range(1, 6)),
    "one_gpu_eight": (1, Case.on_one_gpu, round_trip, [8]),
    "one_rank_fused": (1, Case.on_gpus, all_round_trip, [1]),
    "two_gpus": (2, Case.on_gpus, round_trip, [2]),
    "two_gpus_fused": (2, Case.on_gpus, all_round_trip, [2]),
    "two_gpus_two_on_each": (2, two_on_each, round_trip, [4]),
    "four_gpus": (4, Case.on_gpus, round_trip, [3, 4]),
    "four_gpus_fused": (4, Case.on_gpus, all_round_trip, [3, 4]),
    "four_gpus_two_on_each": (4, two_on_each, round_trip, [8]),
}
# A graph for each protocol at a place.
PLACES = {
    f"{place}{suffix}": (*what, changes)
    for place, what in _PLACES.items()
    for suffix, changes in PROTOCOLS.items()
}


def is_of(case: Case, protocol: dict) -> bool:
    default = {"protocol": "by_expert", "combine_mode": "rows"}
    wanted = {k: v for k, v in (default | protocol).items() if k in default}
    return all(getattr(case, k) == v for k, v in wanted.items())


CASES_OF = {
    place: [
        n for n, c in ALL_CASES.items() if c.n_ranks in n_ranks and is_of(c, protocol)
    ]
    for place, (_, _, _, n_ranks, protocol) in PLACES.items()
}


def marked(names: dict[str, list[str]]) -> list:
    return [
        pytest.param(place, name, marks=pytest.mark.gpu(PLACES[place][0]))
        for place, of_place in names.items()
        for name in of_place
    ]


@pytest.fixture(scope="module")
def groups_at(gpu_session) -> Iterator[Callable]:
    made = {}

    def get(place: str) -> Groups:
        if place not in made:
            _, config, build, *_ = PLACES[place]
            cases = {n: ALL_CASES[n] for n in CASES_OF[place]}
            made[place] = Groups(
                gpu_session, f"gpu_{place}", cases, config=config, build=build
            )
        return made[place]

    yield get
    for groups in made.values():
        groups.close()


@pytest.fixture(scope="module")
def run_at(groups_at: Callable) -> Callable:
    @functools.cache
    def run(place: str, routing: str, data: str) -> SimpleNamespace:
        groups = groups_at(place)
        given = {n: make_inputs(c, routing, data) for n, c in groups.cases.items()}
        return SimpleNamespace(given=given, got=groups.run(given))

    return run


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("data", ["telling", "random"])
@pytest.mark.parametrize("place, name", marked(CASES_OF))
def test_round_trip_is_the_oracles(run_at, place, name, data, routing):
    run = run_at(place, routing, data)
    want = expected(ALL_CASES[name], run.given[name])
    assert_round_trip(f"{place}, {name}, {routing}, {data}", run.got[name], want)


PLAIN = {
    place: [
        n for n in names if not ALL_CASES[n].is_quantized and not ALL_CASES[n].scales
    ]
    for place, names in CASES_OF.items()
}


@pytest.mark.parametrize("place, name", marked(PLAIN))
def test_dispatch_copies_any_bits(run_at, place, name):
    run = run_at(place, "uniform", "any_bits")
    want = expected_dispatch(ALL_CASES[name], run.given[name])
    assert_dispatched(f"{place}, {name}, any bits", run.got[name], want)


def without_signs(rows: np.ndarray) -> np.ndarray:
    bits = rows.view(f"u{rows.itemsize}")
    return bits & (np.iinfo(bits.dtype).max >> 1)


_BY_RANK = {
    place: [n for n in names if not ALL_CASES[n].is_padded]
    for place, names in PLAIN.items()
    if PLACES[place][-1]  # Not `by_expert`.
}


@pytest.mark.parametrize("place, name", marked(_BY_RANK))
def test_data_that_looks_like_the_sentinel_arrives(groups_at, place, name):
    """Tokens of which every 16 bytes look as if they had not come. They are NaN, and
    stay that; their sign may change (`avoid_sentinel`). Run twice: what was put back
    must be there."""
    groups = groups_at(place)
    given = {n: make_inputs(c, "full") for n, c in groups.cases.items()}
    for tokens in given[name].tokens:
        tokens.view(np.uint8)[:] = 0xFF
    want = expected_dispatch(ALL_CASES[name], given[name])
    for result in want:
        result.rows = without_signs(result.rows)
    for _ in range(2):
        got = groups.run(given)[name]
        for rank in got:
            rank.rows = without_signs(rank.rows)
        assert_dispatched(f"{place}, {name}, all ones", got, want)


# ------------------------------------------------------------------ large cases


with_few_sms = functools.partial(Case.on_gpus, n_sms=2)
"""Each rank uses less of its GPU: each warp has more to do."""
LARGE_PLACES = {
    "one_gpu": (1, Case.on_one_gpu, round_trip, 2),
    "two_gpus_fused": (2, Case.on_gpus, all_round_trip, 2),
    "two_gpus_few_sms": (2, with_few_sms, all_round_trip, 2),
    "four_gpus_fused": (4, Case.on_gpus, all_round_trip, 4),
}


@pytest.mark.parametrize("suffix", PROTOCOLS)
@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=pytest.mark.gpu(v[0])) for p, v in LARGE_PLACES.items()],
)
def test_large_launches(gpu_session, place, suffix):
    _, config, build, n_ranks = LARGE_PLACES[place]
    of_place = {n: c for n, c in LARGE.items() if c.n_ranks == n_ranks}
    cases = {n: c for n, c in of_place.items() if is_of(c, PROTOCOLS[suffix])}
    name = f"large_{place}{suffix}"
    groups = Groups(gpu_session, name, cases, config=config, build=build)
    with contextlib.closing(groups):
        for routing in ("uniform", "full", "zipf", "masked", "all_masked"):
            given = {n: make_inputs(c, routing) for n, c in cases.items()}
            got = groups.run(given)
            for name, case in cases.items():
                want = expected(case, given[name])
                assert_round_trip(f"{place}, {name}, {routing}", got[name], want)


# -------------------------------------------------------------------- failures


def assert_nan(bits: np.ndarray) -> None:
    assert ((bits & 0x7FFF) > 0x7F80).all(), "what is missing must be NaN"


@contextlib.contextmanager
def fails(comm: EPCommInitializer, words: str) -> Iterator[None]:
    yield
    with raises(RuntimeError, words):
        comm.check()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("suffix", PROTOCOLS)
def test_a_missing_peer_is_named(gpu_session, suffix):
    """Rank 1 does not send: rank 0 ends its wait, and says who is missing. While its
    kernel waits, another stream reads whom it waits for."""
    case = in_protocols([Case("missing", 2, 5, 3, 512, 7)])[f"missing{suffix}"]
    config = case.config(target="gpu", timeout_s=1)
    with building(case.name, case, config) as (manager, ranks, graph):
        given = ranks[0]
        with_tokens, with_rows = weights_of(config, given)
        d = manager.ep_dispatch(given.tokens, given.ids, 0, router_weight=with_tokens)
        graph.output(manager.ep_combine(d[0], with_rows, 0))
    model = gpu_session.load(graph)
    with EPCommInitializer(config) as comm:
        comm.ep_init(gpu_session)
        inputs = flatten(make_inputs(case, "full"), config) + comm.model_inputs()
        waited = "timed out after 1000 ms; waiting for count; generation 1"
        with fails(comm, f"dispatch_wait on rank 0; {waited}; from rank 1"):
            (result,) = model.execute(*inputs)
            waits = comm.who_waits()
            (answered,) = groups_of(str(os.getpid()))
        assert_nan(to_numpy(result))
        for seen in (waits, answered):
            of_rank_0, of_rank_1 = seen.ranks
            assert (of_rank_0.phase, of_rank_0.missing) == ("dispatch_wait", [1])
            assert of_rank_1.phase == "" and seen.culprits() == [1]
        comm.reset()
        comm.check()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("suffix", PROTOCOLS)
def test_bad_ids_are_dropped_and_reported(gpu_session, suffix):
    name = f"bad_ids{suffix}"
    case = in_protocols([Case("bad_ids", 1, 5, 3, 512, 7)])[name]
    groups = Groups(gpu_session, name, {case.name: case}, config=Case.on_gpus)
    with contextlib.closing(groups):
        given = make_inputs(case, "full")
        good = [ids.copy() for ids in given.ids]
        given.ids[0][4, 1] = 5
        with pytest.raises(RuntimeError, match="token 4, k 1: expert 5"):
            groups.run({case.name: given})
        groups.comms[case.name].reset()
        given = Inputs(given.tokens, good, given.weights, None, None)
        got = groups.run({case.name: given})
        assert_round_trip("after a reset", got[case.name], expected(case, given))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("suffix", PROTOCOLS)
def test_memory_of_another_config_is_not_touched(gpu_session, suffix):
    """The launcher cannot see whose counters it is given: the kernels look."""
    case = Case("other_config", 1, 5, 3, 512, 7)
    # Half as large a region, but as many counters, so MAX takes them.
    half = replace(case, name="other_config_half", hidden_size=256)
    cases = in_protocols([case, half])
    case, half = cases[f"other_config{suffix}"], cases[f"other_config_half{suffix}"]
    said = "bytes of a dispatch message: 528 there, 1040 in the graph"
    for build in (round_trip, all_round_trip):
        name = f"other_config_{build.__name__}{suffix}"
        how = dict(config=Case.on_gpus, build=build)
        groups = Groups(gpu_session, name, {case.name: case}, **how)
        with EPCommInitializer(half.on_gpus()) as comm, contextlib.closing(groups):
            comm.ep_init(gpu_session)
            inputs = flatten(make_inputs(case, "full"), case.on_gpus())
            with fails(comm, f"dispatch_async on rank 0; another EPConfig; {said}"):
                outputs = groups.model.execute(*inputs, *comm.model_inputs())
            (got,) = take_outputs(case, iter(outputs))
            assert not got.row_offsets.any()
            assert_nan(got.result)
            comm.reset()  # or leaving the block would raise what it says again


@pytest.mark.gpu(2)
@pytest.mark.parametrize("build", [all_round_trip, round_trip])
@pytest.mark.parametrize("suffix", PROTOCOLS)
def test_the_first_run_waits_for_a_late_rank(gpu_session, suffix, build):
    """The CPU makes rank 1's tokens, while rank 0 has its own. Fails if rank 0 is
    launched before: the next kernel that is loaded on its GPU blocks the thread that
    launches rank 1."""
    case = in_protocols([Case("late", 2, 5, 3, 80, 7)])[f"late{suffix}"]
    manager = EPBatchManager(case.on_gpus())
    matrices = TensorType(DType.float32, [2048, 2048], DeviceRef.CPU())
    types = [matrices, *input_types(case, config=manager.config)]
    name = f"late_{build.__name__}{suffix}"
    with graph_of(manager, name, types) as (graph, (matrix, *values)):
        first, late = take_inputs(case, iter(values))
        for _ in range(5):
            matrix = matrix @ matrix
        # -0, which changes no bits; +0 would make +0 of -0.
        nothing = -matrix[0, 0].cast(DType.bfloat16).to(DeviceRef.GPU(1))
        late = replace(late, tokens=late.tokens + nothing)
        built = build(manager, [first, late])
        # Kernels that are loaded behind combine.
        more = [of_rank[-1] * 3 for of_rank in built]
        graph.output(*(value for of_rank in built for value in of_rank), *more)
    model = gpu_session.load(graph)
    inputs = make_inputs(case, "uniform", "random")
    with EPCommInitializer(manager.config) as comm:
        comm.ep_init(gpu_session)
        zeros = Buffer.from_numpy(np.zeros((2048, 2048), np.float32))
        given = flatten(inputs, manager.config)
        outputs = iter(model.execute(zeros, *given, *comm.model_inputs()))
        comm.check()
        assert_round_trip(name, take_outputs(case, outputs), expected(case, inputs))
