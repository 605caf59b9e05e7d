# SPDX-License-Identifier: Apache-2.0
"""CPU ranks of several hosts, which processes stand for, over a link that promises only
what a network does. `python -m tests.hosts.members 2 1 301` has 300 seeds.
"""

import re

import pytest

from max_ep import EPConfig, LaunchError, launch
from max_ep.limits import LINK_VARIABLE, STORE_VARIABLE
from max_ep.processes.store import StoreServer
from tests.children import ALL_CASES, slow
from tests.errors import raises, refused
from tests.hosts.members import CASES, KILLED, N_GENERATIONS, run_seeds

pytestmark = pytest.mark.usefixtures("all_cores")
N_SEEDS = 3 if ALL_CASES else 1
SUMS = ("hosts_sums",)


@pytest.mark.parametrize(
    "n_ranks, per_host, is_fused, cases",
    [
        pytest.param(4, 2, False, tuple(CASES), id="2x2"),
        pytest.param(4, 1, False, tuple(CASES), id="4x1"),
        pytest.param(8, 4, True, SUMS, id="2x4-fused", marks=slow),
    ],
)
def test_what_crosses_is_that_of_one_host(
    n_ranks, per_host, is_fused, cases, monkeypatch
):
    """Rows, tables and results are the oracle's, bit for bit, whatever the order. Four
    hosts share a store alone."""
    server = StoreServer("127.0.0.1")
    if per_host == 1:
        monkeypatch.setenv(STORE_VARIABLE, f"127.0.0.1:{server.port}")
    given = n_ranks, per_host, range(N_SEEDS), is_fused, cases
    n_right = launch(run_seeds, n_ranks, given, timeout_s=900)
    assert n_right == [N_SEEDS * N_GENERATIONS * len(cases)] * n_ranks


def failures(fault: str) -> dict[int, str]:
    """Runs with a fault till each process has failed; returns what they say."""
    given = 4, 2, range(1), False, tuple(CASES), fault
    with pytest.raises(LaunchError) as caught:
        launch(run_seeds, 4, given, timeout_s=900)
    return caught.value.failures


def test_a_link_without_fences_is_noticed():
    """Counts come before what they announce."""
    assert any("hosts_" in text for text in failures("no fences").values())


def test_who_is_killed_is_named(monkeypatch):
    """By ranks of its host, and by those that only the link reaches."""
    monkeypatch.setitem(launch.__globals__, "_GRACE_S", 20.0)
    said = failures("killed")
    assert sorted(said) == list(range(4))
    assert "died without a result (exit code -9)" in said.pop(KILLED)
    for rank, text in said.items():
        named = re.findall(rf"on rank {rank}: timed out .* from rank (\d)", text)
        assert named, text
    assert any(f"from rank {KILLED}" in text for text in said.values())


def config(**changes: object) -> EPConfig:
    given = dict(n_nodes=4, n_gpus_per_node=1, node_id=0) | changes
    return CASES["hosts_rows"].config(**given)


@refused("""
2:x, {} | MAX_EP_LINK='2:x' must be RANKS:SEED; unset it
3:1, {} | '3:1'; divide the group's 4
2:1, dict(n_gpus_per_node=4, n_nodes=2) | '2:1'; the 4 of a process
2:1, dict(protocol="by_expert") | by_expert; pass protocol='by_rank'
2:1, dict(on_timeout="mask") | on_timeout='mask'; MAX_EP_STORE=HOST:PORT
""")
def test_what_several_hosts_cannot_have(arguments, words, monkeypatch):
    link, changes = arguments.split(", ", 1)
    monkeypatch.setenv(LINK_VARIABLE, link)
    with raises(ValueError, words):
        config(**eval(changes))
