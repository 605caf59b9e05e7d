# SPDX-License-Identifier: Apache-2.0
"""Ranks of two hosts, which processes stand for: one dies, or a host with all its
ranks. The others go on, agree over a store, and take it in again.

Every result is compared with the oracle, bit for bit, and so are the flags of tokens.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from max.graph import Module

from max_ep import extension_path
from max_ep.limits import LINK_VARIABLE, STORE_VARIABLE
from max_ep.memory.setup_graph import setup_graph
from max_ep.processes.store import StoreServer
from tests.children import names_of, slow
from tests.processes.faults import (
    ALL,
    JOIN,
    MASKING,
    PHASES,
    RECONCILE,
    Fault,
    Group,
    add_masking,
    check,
    draw,
)

pytestmark = [pytest.mark.usefixtures("all_cores"), slow]

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
NAMES = [name for name in MASKING if name != "masking"]
"""Groups that are by rank."""
SUMS = NAMES[-1]
HOST = [2, 3]


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with contextlib.closing(StoreServer("127.0.0.1")) as server:
        yield server


@pytest.fixture(scope="module")
def group(session, tmp_path_factory, store) -> Iterator[Group]:
    """Four processes of two hosts, which share a store."""
    path = tmp_path_factory.mktemp("masks") / "masks.mef"
    name = f"masks-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        seed = os.environ.get("MAX_EP_FUZZ_SEED", "7")
        patch.setenv(LINK_VARIABLE, f"2:{seed}")
        patch.setenv(STORE_VARIABLE, f"127.0.0.1:{store.port}")
        module = Module()
        setup_graph(MASKING[SUMS].config(), module)
        add_masking(module, NAMES)
        packages = [extension_path()]
        session.compile(module, custom_extensions=packages).export_mef(path)
        members = Group(str(path), name, 2 * ("MAX_EP_FAULTS" in os.environ), NAMES)
        try:
            for protocol in NAMES:
                assert members.step(protocol, ALL) == []
            yield members
        finally:
            members.close()
    assert names_of(name) == []


def host(how: signal.Signals, phase: str) -> list[Fault]:
    return [Fault(rank, how, phase) for rank in HOST]


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_is_killed_and_restarts(group, phase):
    """All its processes; the other host is right or flagged, and takes it in again."""
    group.survive(NAMES[PHASES.index(phase) % len(NAMES)], *host(KILL, phase))


@pytest.mark.parametrize("phase", PHASES)
def test_a_host_is_stopped_and_rejoins(group, phase):
    """What it has asked its link for comes later, to places that nobody reads."""
    group.survive(SUMS, *host(STOP, phase))


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_killed(group, phase):
    """Ranks of its host, and of the other one, mask it."""
    group.survive(SUMS, Fault(1, KILL, phase))


def test_ranks_of_two_hosts_mask_each_other(group):
    """As if no network were between them, but to the store: one host goes on."""
    assert group.step(SUMS, ALL) == []
    for rank in ALL[:2]:
        for other in HOST:
            group.ask([rank], SUMS, "mask", other)
            group.ask([other], SUMS, "mask", rank)
    steps = group._run(SUMS, "step", ALL, (), group.generation + 1)
    group.generation += 1
    for rank, step in steps.items():
        check(SUMS, group.generation, rank, step)
        assert step.masked == (HOST if rank in ALL[:2] else ALL[:2])
    active = group.reconcile(SUMS, ALL)
    assert [active[rank] for rank in ALL[:2]] == 2 * [ALL[:2]]
    assert all("RankExpelled" in active[rank] for rank in HOST)
    group.heal(SUMS, {})
    assert group.step(SUMS, ALL) == []


@pytest.mark.parametrize("how, line", [(KILL, 110), (STOP, 60), (KILL, 30)])
def test_a_host_is_lost_in_reconcile(group, how, line):
    group.survive(SUMS, *(Fault(rank, how, RECONCILE, line=line) for rank in HOST))


@pytest.mark.parametrize("how, line", [(KILL, 400), (STOP, 150)])
def test_a_rank_is_lost_as_it_joins(group, how, line):
    group.survive(SUMS, Fault(3, how, JOIN, line=line))


@pytest.mark.skipif(
    "MAX_EP_FAULTS" not in os.environ, reason="a soak: MAX_EP_FAULTS=100"
)
def test_faults_of_a_seed(group):
    """Every third strikes all ranks of a host, at the same place."""
    seed = int(os.environ.get("MAX_EP_FUZZ_SEED", 1))
    for number in range(int(os.environ["MAX_EP_FAULTS"])):
        name, faults = draw(seed, number, NAMES)
        if number % 3 == 0:
            first = 2 * (faults[0].rank // 2)
            faults = [replace(faults[0], rank=first + i) for i in range(2)]
        print(f"{number}: {name}, {faults}", flush=True)
        group.survive(name, *faults)


def test_a_group_without_its_store_goes_on(group, store):
    """The last test: steps mask who dies, and nobody can agree."""
    store.close()
    for of_group in [*store._groups.values()]:
        for line in [*of_group.lines]:
            line.connection.shutdown(socket.SHUT_RDWR)
    assert group.step(SUMS, ALL, Fault(3, KILL, "dispatch_wait")) == [3]
    for _ in range(2):
        for answer in group.ask(ALL[:3], SUMS, "reconcile", None):
            assert "StoreLost: max_ep: the store 127.0.0.1:" in answer, answer
    assert group.step(SUMS, ALL[:3]) == [3]
