# SPDX-License-Identifier: Apache-2.0
"""CPU ranks of several hosts, which processes stand for, over a link that promises only
what a network does. `python -m tests.hosts.members 2 1 301` has 300 seeds.
"""

import functools
import re
from collections.abc import Callable

import pytest
from max.graph import Module

from max_ep import EPConfig, launch
from max_ep.limits import LINK_VARIABLE, STORE_VARIABLE
from max_ep.processes.store import StoreServer
from tests.children import ALL_CASES, slow
from tests.errors import raises, refused
from tests.harness import building
from tests.hosts.members import CASES, N_GENERATIONS, OF_CI, Run, Stage, said_of
from tests.hosts.part import Part

pytestmark = pytest.mark.usefixtures("all_cores")
SEEDS = range(3 if ALL_CASES else 1)
USED = tuple(CASES) if ALL_CASES else OF_CI
NO_FENCES = Stage(2, range(1), "no fences")
ONE, HOST = (Stage(2, range(1), "killed", ranks) for ranks in [(2,), (2, 3)])
RELAY = "hosts_relay", "hosts_relay_fp8"
RUNS = {
    "2x2": Run(4, [Stage(2, SEEDS), NO_FENCES, HOST], not ALL_CASES, USED),
    "4x1": Run(4, [Stage(1, SEEDS), ONE]),
    "2x4-fused": Run(8, [Stage(4, SEEDS)], True, ("hosts_sums", "hosts_relay")),
    "3x2": Run(6, [Stage(2, SEEDS), Stage(2, range(1), "killed", (3,))], cases=RELAY),
}


def add_process_graphs(module: Module) -> None:
    for run in RUNS.values() if ALL_CASES else [RUNS["2x2"]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(LINK_VARIABLE, f"{run.stages[0].per_host}:1")
            run.graph(module)


@pytest.fixture
def said(graphs: str) -> Callable[[str], dict[int, list[str]]]:
    """Says what each process says of its stages, and how it died."""
    return functools.partial(_said, graphs)


@functools.cache
def _said(graphs: str, run: str) -> dict[int, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launch.__globals__, "_GRACE_S", 600.0)
        if run == "4x1":
            server = StoreServer("127.0.0.1")
            patch.setenv(STORE_VARIABLE, f"127.0.0.1:{server.port}")
        return said_of(RUNS[run], graphs)


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[slow] * (run != "2x2")) for run in RUNS],
)
def test_what_crosses_is_that_of_one_host(said, run):
    """Rows, tables and results are the oracle's, bit for bit, whatever the order. Four
    hosts share a store alone."""
    n_right = len(SEEDS) * N_GENERATIONS * len(RUNS[run].cases)
    assert len(said(run)) == RUNS[run].n_ranks
    assert all(stages[0] == f"{n_right} right" for stages in said(run).values())


def test_a_link_without_fences_is_noticed(said):
    """Counts come before what they announce: what a process gets is wrong."""
    assert any("hosts_" in stages[1] for stages in said("2x2").values())


@pytest.mark.parametrize(
    "run, killed", [pytest.param("4x1", ONE, marks=slow), ("2x2", HOST)]
)
def test_who_is_killed_is_named(said, run, killed):
    """A process by the one of its host, and by those that only the link reaches; a host
    by the other, in a group that has begun again after it failed."""
    named = set()
    for rank, stages in said(run).items():
        if rank in killed.killed:
            assert stages[-1] == "died without a result (exit code -9)"
            continue
        found = re.findall(rf"on rank {rank}: timed out .* from rank (\d)", stages[-1])
        assert found, stages[-1]
        named.update(map(int, found))
    assert named & {*killed.killed}


RELAYED = dict(hierarchical=True, combine_mode="sums", output_layout="packed")


def config(**changes: object) -> EPConfig:
    given = dict(n_nodes=4, n_gpus_per_node=1, node_id=0) | changes
    return CASES["hosts_rows"].config(**given)


@refused("""
2:x, {} | MAX_EP_LINK='2:x' must be RANKS:SEED; unset it
3:1, {} | '3:1'; divide the group's 4
2:1, dict(n_gpus_per_node=4, n_nodes=2) | '2:1'; the 4 of a process
2:1, dict(protocol="by_expert", on_timeout="mask") | with protocol='by_expert'
2:1, dict(on_timeout="mask") | on_timeout='mask'; MAX_EP_STORE=HOST:PORT
2:1, dict(hierarchical=True) | combine_mode='rows'; pass combine_mode='sums'
2:1, dict(**RELAYED) | hierarchical=True with n_experts=5 on 4 ranks; hierarchical=False
2:1, dict(**RELAYED, max_output_rows=9) | max_output_rows=9; pass max_output_rows=None
4:1, dict(**RELAYED, on_timeout="mask") | on_timeout='mask'; pass on_timeout='raise'
""")
def test_what_several_hosts_cannot_have(arguments, words, monkeypatch):
    link, changes = arguments.split(", ", 1)
    monkeypatch.setenv(LINK_VARIABLE, link)
    with raises(ValueError, words):
        config(**eval(changes))


def test_what_relays_bring_is_not_watched(monkeypatch):
    """A rank gets most through others of its host; times would be theirs."""
    monkeypatch.setenv(LINK_VARIABLE, "2:1")
    case = CASES["hosts_relay"]
    relayed = case.config(n_nodes=4, n_gpus_per_node=1, node_id=0)
    with building("refused", Part.of(case, 1), relayed) as (manager, (given,), _):
        manager.ep_dispatch_async(given.tokens, given.ids, 0, None, given.weights)
        with raises(ValueError, "hierarchical=True; leave one of them out"):
            manager.ep_watch("dispatch", 0)
