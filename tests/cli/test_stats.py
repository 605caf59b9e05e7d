# SPDX-License-Identifier: Apache-2.0
"""Statistics on request: what is measured, that it changes nothing, how it is shown."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from max.graph import Graph, Module, TensorValue

from max_ep import EPBatchManager, EPCommInitializer
from max_ep.stats import Statistics
from tests.children import ALL_CASES, slow
from tests.cli.test_programs import run
from tests.codegen.assembly import parse_ptx
from tests.codegen.kernels import compiled
from tests.errors import arguments_of, raises, refused
from tests.harness import (
    Groups,
    assert_round_trip,
    building,
    flatten,
    round_trip,
    take_outputs,
    to_numpy,
)
from tests.oracle.cases import SMALL_CASES, Case
from tests.oracle.drawn import make_inputs
from tests.oracle.oracle import expected

KERNELS = ["combine", "combine_sums", "dispatch"]

# Ops of two ranks are compiled anyway.
N_RANKS = 2
EARLY = SMALL_CASES["two_ranks"]
CASES = {
    "by_expert": EARLY,
    "sums": SMALL_CASES["shared_fp8_sums"],
}
if ALL_CASES:
    CASES["padded"] = SMALL_CASES["padded_fp8"]


class Watched:
    """An `EPBatchManager` that watches in front of each wait."""

    def __init__(self, manager: EPBatchManager) -> None:
        self._manager = manager
        self.statistics: list[list[TensorValue]] = []

    def __getattr__(self, name: str):
        return getattr(self._manager, name)

    def ep_dispatch_wait(self, rank: int) -> tuple[TensorValue, ...]:
        ns = self._manager.ep_watch("dispatch", rank)
        dispatched = self._manager.ep_dispatch_wait(rank)
        self.statistics.append([ns, self._manager.ep_received(dispatched)])
        return dispatched

    def ep_combine_wait(self, weights: TensorValue | None, rank: int) -> TensorValue:
        self.statistics[rank].append(self._manager.ep_watch("combine", rank))
        return self._manager.ep_combine_wait(weights, rank)


def watched_round_trip(manager, ranks):
    """Builds a round trip with three statistics after the results of each rank."""
    watched = Watched(manager)
    results = round_trip(watched, ranks)
    return [[*r, *s] for r, s in zip(results, watched.statistics, strict=True)]


CONFIGS = {"cpu": Case.config, "one_gpu": Case.on_one_gpu, "two_gpus": Case.on_gpus}
PLACES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("one_gpu", marks=pytest.mark.gpu(1), id="one_gpu"),
    pytest.param("two_gpus", marks=pytest.mark.gpu(2), id="two_gpus"),
]


def add_early(place: str, module: Module | None = None) -> Graph:
    """Builds a round trip whose rank 0 looks before rank 1 has sent, and after."""
    seen = []
    with building(f"early_{place}", EARLY, CONFIGS[place](EARLY), module) as started:
        manager, ranks, graph = started
        for order in manager._order:  # It would refuse to look before rank 1 has sent.
            order._in_turn = False
        for rank, given in enumerate(ranks):
            manager.ep_dispatch_async(given.tokens, given.ids, rank)
            seen.append(manager.ep_watch("dispatch", 0))
        rows = [manager.ep_dispatch_wait(rank)[0] for rank in range(N_RANKS)]
        for rank in range(N_RANKS):
            manager.ep_combine_async(rows[rank], rank)
            seen.append(manager.ep_watch("combine", 0))
        sums = [manager.ep_combine_wait(g.weights, r) for r, g in enumerate(ranks)]
        graph.output(*seen, *sums)
    return graph


def add_graphs(module: Module) -> Groups:
    add_early("cpu", module)
    return Groups(None, "watched_cpu", CASES, build=watched_round_trip, module=module)


@pytest.fixture(scope="module", params=PLACES)
def groups(request) -> Iterator[Groups]:
    place = request.param
    if place == "cpu":
        yield request.getfixturevalue("added")
        return
    session = request.getfixturevalue("gpu_session")
    how = dict(config=CONFIGS[place], build=watched_round_trip)
    made = Groups(session, f"watched_{place}", CASES, **how)
    yield made
    made.close()


@pytest.mark.parametrize("routing", ["uniform", "full", "masked", "all_masked"])
def test_what_is_watched_changes_nothing(groups, routing):
    given = {name: make_inputs(case, routing) for name, case in CASES.items()}
    outputs = iter(groups.model.execute(*groups.inputs(given)))
    for name, case in CASES.items():
        groups.comms[name].check()
        want, ranks = expected(case, given[name]), []
        for rank in range(N_RANKS):
            ranks += take_outputs(replace(case, n_ranks=1), outputs)
            dispatch_ns, received, combine_ns = (
                to_numpy(next(outputs)) for _ in range(3)
            )
            for ns in (dispatch_ns, combine_ns):
                assert ns.shape == (N_RANKS,) and ns.dtype == np.int64
                assert (0 <= ns).all() and (ns < 5e9).all(), (name, ns)
            assert received.tolist() == rows_of(case, want.dispatch[rank]), name
        assert_round_trip(f"{name}, {routing}", ranks, want)


@pytest.mark.parametrize("place", PLACES[:2])
def test_who_does_not_come(request, place):
    """Rank 0 looks before rank 1 has sent, and after; each has rows for the other."""
    config = CONFIGS[place](EARLY)
    session = request.getfixturevalue("session" if place == "cpu" else "gpu_session")
    if place == "cpu":
        model = request.getfixturevalue("one_module").models["early_cpu"]
    else:
        model = session.load(add_early(place))
    with EPCommInitializer(config) as comm:
        comm.ep_init(session)
        counts = [EARLY.max_tokens_per_rank] * N_RANKS
        given = make_inputs(EARLY, "uniform", "telling", counts)
        given = flatten(given, config)
        outputs = model.execute(*given, *comm.model_inputs())
        comm.check()
    times = [to_numpy(output) for output in outputs[:4]]
    for alone, together in (times[:2], times[2:]):
        assert alone[0] >= 0 and alone[1] == -1, times
        assert (together >= 0).all(), times


def rows_of(case: Case, dispatched) -> list[int]:
    """What each expert of a rank must have got, by the oracle."""
    if case.is_padded:
        return dispatched.recv_counts.tolist()
    rows = np.diff(dispatched.row_offsets.astype(int)).tolist()
    return rows[int(case.fused_shared_expert) :]


def test_assembly_writes_nothing_but_times():
    """And every loop that looks for a peer's word looks at the clock, too."""
    paths = sorted(compiled("codegen_watch.mojo").glob("*.s"))
    assert [path.name.split(".")[1] for path in paths] == KERNELS
    for path in paths:
        kernel = parse_ptx(path.read_text())
        stores = [op for op in kernel.ops if op.what in ("store", "atomic")]
        outside = [op for op in stores if op.space != "shared"]
        assert [(op.what, op.n_bytes, op.order) for op in outside] == [("store", 8, "")]
        assert not kernel.find(lambda op: op.space == "local")
        clock = kernel.find(lambda op: "%globaltimer" in op.text)
        orders = ("acquire", "relaxed", "volatile")
        looks = kernel.find_kind(*(f"load {order} system" for order in orders))
        loops = list(kernel.smallest_loops(looks))
        assert loops and all(loop.body & clock for loop in loops)


def test_a_watch_needs_the_async_ops_before_it():
    with building("refused", CASES["sums"]) as (manager, ranks, _):
        says = "device 0 without ep_dispatch_async before it"
        with pytest.raises(ValueError, match=says):
            manager.ep_watch("dispatch", 0)
        with pytest.raises(ValueError, match="'dispatch' and 'combine'"):
            manager.ep_watch("gossip", 0)
        # Ranks that run one after another, as the wait does, would wait for ever.
        given = ranks[0]
        manager.ep_dispatch_async(given.tokens, given.ids, 0, None, given.weights)
        with pytest.raises(ValueError, match=r"ep_dispatch_async on devices \[1\]"):
            manager.ep_watch("dispatch", 0)


def some_statistics() -> Statistics:
    n_experts = 2
    ns = np.array([[[0, 1_500], [-1, 0]], [[0, 2_500], [-1, 500]]])
    received = np.arange(2 * 2 * n_experts, dtype=np.int32)
    received = received.reshape(2, 2, n_experts)
    return Statistics(ns, 2 * ns.clip(0), received, 2 * n_experts)


def test_text():
    """Medians in us of a rank (line) for a rank (column), then rows of each expert."""
    lines = some_statistics().text().splitlines()
    tables = [[line.split() for line in lines[i : i + 2]] for i in (2, 8)]
    assert tables[0] == [["0", "0.0", "2.0"], ["1", "nan", "0.2"]]
    assert tables[1] == [["0", "0.0", "4.0"], ["1", "0.0", "0.5"]]
    assert lines[4] == "2 waits timed out and are not counted"
    assert "28 rows, 4 experts, the fullest has 1.4 times the mean" in lines[-5]
    bars = [line.split() for line in lines[-4:]]
    assert [(n, rows, len(bar)) for n, rows, bar in bars] == [
        (str(i), str(4 + 2 * i), 16 + 8 * i) for i in range(4)
    ]


def test_plot(tmp_path, run_cli):
    some_statistics().save(tmp_path / "saved.npz")
    picture = tmp_path / "plot.png"
    run_cli("stats", tmp_path / "saved.npz", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@refused("""
received=np.ones((2, 2, 2)) | received is of dtype float64, it must be integers
received=-np.ones((2, 2, 2), int) | received has numbers in [-1, -1]; in [0, 2147483647]
received=np.full((2, 2, 2), 2**40) | received has numbers in [1099511627776
received=np.ones((2, 2), int) | received has shape [2, 2]
combine_ns=np.full((2, 2, 2), np.nan) | combine_ns is of dtype float64
dispatch_ns=[["a"]] | dispatch_ns is of dtype <U1
dispatch_ns=np.zeros((2, 2, 3), int) | dispatch_ns has shape [2, 2, 3]
n_experts=4.0 | n_experts=4.0 must be an integer
n_experts=5 | n_experts=5, but received has 2 on each of 2 ranks
""")
def test_statistics_are_numbers(arguments, words):
    with raises(ValueError, words):
        replace(some_statistics(), **arguments_of(arguments, globals()))


@slow
def test_a_late_rank_is_seen(tmp_path):
    """graphs/who_waits.py, whose rank 2 comes 5 ms late, and the command for it."""
    path = tmp_path / "waits.npz"
    as_in_the_readme = "python graphs/who_waits.py --save waits.npz"
    assert "saved" in run(as_in_the_readme.replace("waits.npz", str(path)))
    waits = np.median(Statistics.load(path).dispatch_ns, axis=0)
    longest = np.unravel_index(waits.argmax(), waits.shape)
    assert longest[1] == 2 and waits.max() > 1e6, waits
    as_in_the_readme = "max-ep stats waits.npz"
    said = run(as_in_the_readme.replace("waits.npz", str(path)))
    assert "received: 10240 rows, 32 experts" in said


def test_command_says_what_is_wrong(tmp_path, monkeypatch, run_cli):
    """About pictures. Files that cannot be read are in `test_command_line.py`."""
    good = tmp_path / "good.npz"
    some_statistics().save(good)
    for picture in ("nowhere/x.png", "x.doc", "."):
        path = tmp_path / picture
        said = run_cli("stats", good, "--plot", path, status=1)
        assert f"max-ep stats: --plot {path}: " in said
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = run_cli("stats", good, "--plot", "x.png", status=1)
    assert "pip install 'matplotlib>=3.8'" in said
