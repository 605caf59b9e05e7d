# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on CPU ranks, bit for bit against the oracle."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from max.graph import DeviceRef, Module

from max_ep import EPCommInitializer
from max_ep.waits import at_address, n_words, place
from tests.children import ALL_CASES, slow
from tests.harness import (
    Groups,
    RankInputs,
    all_round_trip,
    assert_dispatched,
    assert_round_trip,
    assert_same_bits,
    building,
    flatten,
    fused_round_trip,
    round_trip,
    selected,
    to_numpy,
)
from tests.oracle.cases import (
    BY_RANK_CASES,
    CASES,
    LARGE_CASES,
    LAYOUT_CASES,
    SMALL_CASES,
    SMALL_CASES_OF_CI,
    SUMS_CASES,
    Case,
)
from tests.oracle.drawn import ROUTINGS, Inputs, make_inputs
from tests.oracle.oracle import expected, expected_dispatch

CPU = DeviceRef.CPU()

TWO = CASES["two_ranks"]
PADDED_SUMS = dict(output_layout="padded", protocol="by_rank", combine_mode="sums")
ONE = Case("one", 1, 5, 3, 80, 7, scales="each")
ONE_FP8 = Case("one_fp8", 1, 6, 2, 128, 7, "fp8_pow2")
MASKING = ONE.config(on_timeout="mask")
FORM_CASES = {
    "two_ranks": TWO,
    "one": ONE,
    "sums_padded": Case("sums_padded", 1, 6, 2, 128, 7, "fp8", **PADDED_SUMS),
}
"""What these have, `SMALL_CASES_OF_CI` has not."""
MORE_FORM_CASES = {
    "by_rank": BY_RANK_CASES["top_32_by_rank"],
    "sums": SUMS_CASES["uneven_7_on_3_sums"],
    "one_fp8": ONE_FP8,
    "padded": Case("padded", 1, 6, 2, 128, 7, "fp8", output_layout="padded"),
    "shared": Case("shared", 1, 6, 2, 128, 7, "fp8", fused_shared_expert=True),
    "padded_three": LAYOUT_CASES["padded_last_rank_empty"],
    "shared_three": LAYOUT_CASES["shared_last_rank_empty"],
}
"""By rank; a rank alone, as `one` and `sums_padded`; the last of three without experts.
"""
if ALL_CASES:
    FORM_CASES |= MORE_FORM_CASES
# Compiling a case for CPU ranks takes seconds, half of that if one op serves all ranks.
BUILD = round_trip if ALL_CASES else all_round_trip
SWEPT = {n: SMALL_CASES[n] for n in (SMALL_CASES if ALL_CASES else SMALL_CASES_OF_CI)}

# ------------------------------------------------------- cases times routings


def add_alone(module: Module) -> None:
    """One rank that may mask, whose ops are those of `one`."""
    with building("alone", ONE, MASKING, module) as (manager, ranks, graph):
        ((*_, result),) = fused_round_trip(manager, ranks)
        degraded = manager.ep_degraded(ranks[0].ids, ranks[0].weights, 0)
        graph.output(result, *degraded)


def add_graphs(module: Module) -> dict[str, Groups]:
    groups = {}
    if "test_one_rank_has_nobody_to_mask" in selected:
        add_alone(module)
    if "run_small" in selected:
        cases = {n: c for n, c in SWEPT.items() if n in selected}
        groups["small"] = Groups(None, "small_cases", cases, build=BUILD, module=module)
    if "test_large_launches" in selected:
        groups["large"] = Groups(None, "large_cases", LARGE_CASES, module=module)
    if "forms" in selected:
        groups["forms"] = Groups(
            None, "forms", FORM_CASES | LAYERS, build_all=build_forms, module=module
        )
    return groups


@pytest.fixture(scope="module")
def run_small(added):
    """Runs all selected cases with a routing and data, once for all tests."""

    @functools.cache
    def run(routing: str, data: str) -> SimpleNamespace:
        groups = added["small"]
        given = {n: make_inputs(c, routing, data) for n, c in groups.cases.items()}
        for name in {"padded_fp8", "padded_mxfp8"}.intersection(given):
            given[name].expert_rows = list(map(moved, given[name].expert_rows))
        got = groups.run(given)
        # Computed after the run: what the run damaged cannot look right.
        return SimpleNamespace(given=given, got=got)

    return run


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("data", ["telling", "random"])
@pytest.mark.parametrize("name", SWEPT)
def test_round_trip_is_the_oracles(run_small, name, data, routing):
    run = run_small(routing, data)
    want = expected(SWEPT[name], run.given[name])
    assert_round_trip(f"{name}, {routing}, {data}", run.got[name], want)


@pytest.mark.parametrize(
    "name", [n for n, c in SWEPT.items() if not c.is_quantized and not c.scales]
)
def test_dispatch_copies_any_bits(run_small, name):
    """NaN payloads and infinities travel as they are; arithmetic comes later."""
    run = run_small("uniform", "any_bits")
    want = expected_dispatch(SWEPT[name], run.given[name])
    assert_dispatched(f"{name}, any bits", run.got[name], want)


@pytest.mark.parametrize("name", SWEPT)
def test_bounds_are_kept_and_reached(run_small, name):
    """Stats are upper bounds; `full` routing fills rank 0, or its fullest expert."""
    case = SWEPT[name]
    first = run_small("full", "random").got[name][0]
    if case.is_padded:
        assert first.recv_counts.max() == case.capacity == first.rows.shape[1]
        return
    assert [first.row_offsets[-1]] == case.rows_shape == [len(first.rows)]
    for routing in ("full", "uniform", "all_silent"):
        for rank, got in enumerate(run_small(routing, "random").got[name]):
            where = f"{name}, {routing}, rank {rank}: stats {got.stats}"
            rows_of = np.diff(got.row_offsets.astype(np.int64))
            assert got.stats.dtype == np.uint32 and got.stats.shape == (2,), where
            assert rows_of.max() <= got.stats[0], where
            assert np.count_nonzero(rows_of) <= got.stats[1], where


ANNOUNCED = {"number of tokens", "entry", "row", "partial sum"}
"""Words that a CPU rank reads without waiting: it has awaited a count that says so."""


@pytest.mark.parametrize("name", SWEPT)
def test_peers_write_the_words_of_the_list(added, run_small, name):
    """Fails if CPU ranks publish a word that the list has not, or has for GPUs only; if
    it has one that nobody publishes; and if it says that nobody awaits one."""
    run_small("uniform", "random")
    comm = added["small"].comms[name]
    sizes, local = comm.config.sizes(), comm._ranks.local
    assert {kind.name for kind in sizes.cpu if not kind.phase} <= ANNOUNCED
    lengths = sizes.dispatch_counts_bytes, sizes.combine_counts_bytes
    ranks = range(sizes.n_ranks)  # one, where an all-reduce adds their results up
    for i, region in enumerate(local.regions):
        # A rank also publishes to peers that do not wait for it.
        awaited, listed = set(), set()
        for kind, peer in itertools.product(sizes.cpu, ranks):
            at = place(kind, peer, np.arange(kind.n)).tolist()
            awaited |= {*at[: n_words(sizes, kind, i % len(ranks), peer)]}
            listed |= {*at}
        for begin, n_bytes in zip(local.offsets[:, -1].tolist(), lengths):
            words = np.frombuffer(at_address(region)(begin, n_bytes), np.uint64)
            written = {*(begin + 8 * np.flatnonzero(words)).tolist()}
            assert awaited.intersection(range(begin, begin + n_bytes)) <= written
            assert written <= listed


def moved(rows: np.ndarray) -> np.ndarray:
    """Puts an array off a 16-byte boundary, as a caller's may be."""
    memory = np.zeros(rows.size + 32, rows.dtype)
    start = (-memory.ctypes.data % 64) // rows.itemsize + 1
    there = memory[start : start + rows.size].reshape(rows.shape)
    there[:] = rows
    assert there.ctypes.data % 16 == rows.itemsize
    return there


@slow
@pytest.mark.parametrize("routing", ["uniform", "full", "masked"])
def test_large_launches(added, routing):
    """Launches spread over worker threads and writing past the caches. `make test` has
    those of sums in `test_processes`."""
    given = {}
    for name, case in LARGE_CASES.items():
        counts = [case.max_tokens_per_rank, case.max_tokens_per_rank - 3]
        counts = None if routing == "full" else counts
        given[name] = make_inputs(case, routing, counts=counts)
    rows = given["large_fp8"].expert_rows
    given["large_fp8"].expert_rows = list(map(moved, rows))
    got = added["large"].run(given)
    for name, case in LARGE_CASES.items():
        want = expected(case, given[name])
        assert_round_trip(f"{name}, {routing}", got[name], want)


# -------------------------------------------------- forms, layers, generations

FORMS = {
    "two_ranks": [round_trip, all_round_trip],
    "one": [fused_round_trip],
    "one_fp8": [fused_round_trip, all_round_trip],
    "by_rank": [all_round_trip],
    "sums": [all_round_trip],
    "sums_padded": [fused_round_trip],
    "padded": [fused_round_trip],
    "padded_three": [all_round_trip],
    "shared": [fused_round_trip],
    "shared_three": [all_round_trip],
}
"""`round_trip`, the form of the small cases, only where layers follow each other."""


def build_forms(managers: dict, ranks: dict) -> dict:
    """Builds every form of every group, and layers of `TWO`.

    Each form is one generation of its group's one set of buffers. `layer_2` takes the
    results of `round_trip` as its tokens, but routing and weights of its own. `other`
    is a second set of buffers, and its steps stand between those of `between`, which
    uses the first set.
    """
    built = {
        (name, form.__name__): form(managers[name], ranks[name])
        for name, forms in FORMS.items()
        if name in FORM_CASES
        for form in forms
    }
    first = built["two_ranks", "round_trip"]
    second = [
        RankInputs(r[-1], x.ids, x.weights) for r, x in zip(first, ranks["second"])
    ]
    built["two_ranks", "layer_2"] = round_trip(managers["two_ranks"], second)

    sides = [(managers[name], ranks[name]) for name in ("two_ranks", "other")]
    each = range(TWO.n_ranks)
    for rank in each:
        for manager, given in sides:
            manager.ep_dispatch_async(given[rank].tokens, given[rank].ids, rank)
    between = [
        [[*m.ep_dispatch_wait(r), m._src_info[r]] for m, _ in sides] for r in each
    ]
    for rank in reversed(each):
        for (manager, _), d in zip(sides, between[rank]):
            manager.ep_combine_async(d[0], rank)
    for rank in each:
        for (manager, given), d in zip(sides, between[rank]):
            d.append(manager.ep_combine_wait(given[rank].weights, rank))
    built["two_ranks", "between"], built["other", "between"] = zip(*between)
    return built


LAYERS = {"other": TWO, "second": TWO}


def make_forms(routing: str, counts: list[int] | None = None) -> dict[str, Inputs]:
    """Makes what the forms are given: for `counts`, tokens of `two_ranks`."""
    given = {n: make_inputs(c, routing) for n, c in FORM_CASES.items()}
    given["two_ranks"] = make_inputs(TWO, routing, counts=counts)
    given["other"] = make_inputs(TWO, "masked", "telling")
    n_tokens = [len(t) for t in given["two_ranks"].tokens]
    given["second"] = make_inputs(TWO, "zipf", "telling", counts=n_tokens)
    return given


def check_forms(
    forms: Groups, where: str, routing: str, counts: list[int] | None = None
) -> None:
    given = make_forms(routing, counts)
    got = forms.run(given)
    wants = {n: expected(c, given[n]) for n, c in (FORM_CASES | LAYERS).items()}
    results = [r.result for r in got["two_ranks", "round_trip"]]
    after = given["second"]
    after = Inputs(results, after.ids, after.weights, None, None)
    for (name, form), received in got.items():
        want = expected(TWO, after) if form == "layer_2" else wants[name]
        assert_round_trip(f"{where}, {name}, {form}", received, want)


@pytest.fixture(scope="module")
def forms(added) -> Groups:
    return added["forms"]


@pytest.mark.parametrize("routing", ["uniform", "full", "masked", "one_silent"])
def test_every_form_gives_the_same(forms, routing):
    """The oracle's bits, from whatever form the graph was built of.

    Layers share one set of buffers, and two sets do not touch each other.
    """
    check_forms(forms, routing, routing)


def test_200_generations_through_one_set_of_buffers(forms):
    """Token counts change from run to run; nothing of an old one shows."""
    rng = np.random.default_rng(3)
    for i in range(200):
        counts = rng.integers(0, TWO.max_tokens_per_rank + 1, 2).tolist()
        routing = ["uniform", "masked", "zipf"][i % 3]
        check_forms(forms, f"run {i}, tokens {counts}, {routing}", routing, counts)


@pytest.mark.parametrize("routing", ["full", "masked"])
def test_one_rank_has_nobody_to_mask(session, one_module, routing):
    given = make_inputs(ONE, routing)
    with EPCommInitializer(MASKING) as comm:
        comm.ep_init(session)
        assert comm.active_ranks() == [0]
        comm.mask(0)
        assert comm.active_ranks() == [0]
        model = one_module.models["alone"]
        outputs = model.execute(*flatten(given), *comm.model_inputs())
        comm.check()
    result, degraded, live_share = map(to_numpy, outputs)
    assert_same_bits("result", result, expected(ONE, given).combine[0])
    assert len(degraded) == len(given.ids[0]) > 0
    assert not degraded.any() and (live_share == 1).all()


def test_the_generation_may_wrap(forms):
    """2**32 generations come to pass: at 3000 a second, after 17 days."""
    try:
        for comm in forms.comms.values():
            comm._ranks.local.prepare(was_used=True, generations=2 * (2**32 - 3,))
        for i, routing in enumerate(["uniform", "masked", "full", "masked"]):
            check_forms(forms, f"around the wrap, run {i}", routing)
    finally:
        forms.reset()
