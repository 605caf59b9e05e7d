# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own: data, generations, time-outs, deaths.

Most tests only look at what one launch of four processes brought home
(`four`): starting processes is what costs.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from max_ep import LaunchError, launch
from tests.children import names_of, ran, slow
from tests.errors import raises, refused
from tests.processes import process_graphs, scenarios
from tests.processes.generations import N_RANKS, PHASED
from tests.processes.in_turn import Group
from tests.processes.scenarios import KILLED_AT, KILLED_RANK, SCENARIOS, Outcome

pytestmark = pytest.mark.usefixtures("all_cores")
add_process_graphs = process_graphs.add_process_graphs

TIMEOUT_S = 2.0
SLACK_S = 30.0
"""What a wait may take on top of its time-out on a busy machine."""
START_S = 600.0
"""How long processes may take to import MAX there."""


Outcomes = list[dict[str, Outcome]]
"""Outcomes of each process, by name."""


def launched(function: Callable, *arguments: object) -> list:
    return launch(function, N_RANKS, arguments, timeout_s=START_S)


@pytest.fixture(scope="module")
def four(graphs: str, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    notes = str(tmp_path_factory.mktemp("four"))
    run = scenarios.run_scenarios
    return launched(run, graphs, list(SCENARIOS), notes)


def assert_well(outcomes: list[Outcome]) -> None:
    errors = [f"process {i}: {o.error}" for i, o in enumerate(outcomes) if o.error]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(four, name):
    """Every row and every sum is the oracle's, bit for bit. `MAX_EP_SOAK=10000`: so
    many generations of each of `soak_*`."""
    assert_well([outcomes[name] for outcomes in four])


@pytest.mark.parametrize("name", [n for n in SCENARIOS if "_only" in n])
def test_fast_rank_waits_for_slow_reader(four, name):
    """Nobody has sent a generation before the slow rank looked at the last."""
    assert_well([outcomes[name] for outcomes in four])
    looked = four[scenarios.SLOW_RANK][name].value["looked"]
    for rank, outcomes in enumerate(four):
        sent = outcomes[name].value["sent"]
        early = [g for g in range(1, len(sent)) if sent[g] < looked[g - 1]]
        assert not early, f"rank {rank} overwrote unread rows in {early}"


@pytest.mark.parametrize("where", ["", " from outside"])
@pytest.mark.parametrize(
    "when, phase, after",
    [
        ("does not call", "dispatch_wait", "combine_wait 1"),
        ("is stopped", "combine_wait", "dispatch_wait 2"),
    ],
)
def test_who_waits_names_the_missing_rank(four, where, when, phase, after):
    """While it hangs; the process that is stopped takes no part."""
    assert_well([outcomes["who_waits"] for outcomes in four])
    _, _, *lines = four[0]["who_waits"].value[when + where].splitlines()
    table, said = lines[:N_RANKS], " ".join(lines[N_RANKS:])
    missing = scenarios.MISSING_RANK
    for rank, line in enumerate(table):
        assert len(line) <= 80
        phase_of_rank = after.replace(" ", r" +") if rank == missing else f"{phase} +2"
        blamed = "-" if rank == missing else str(missing)
        pattern = rf" +{rank}  (after )?{phase_of_rank} +\d+\.\d s  {blamed}"
        assert re.match(pattern, line), line
    assert f"Rank {missing} keeps others waiting: it is in no EP launch" in said
    assert f"since {after}, " in said
    assert ("is stopped" in said) == (when == "is stopped")


def test_two_processes_of_two_ranks(graphs):
    assert_well(launch(scenarios.run_two_by_two, 2, (graphs,), timeout_s=START_S))


@pytest.mark.parametrize(
    "where, missed",
    [
        # (killed in front of, what the others then say they wait for)
        ("dispatch_async", "dispatch_wait|count"),
        ("combine_async", "combine_wait|count"),
        # In a program that only dispatches the killed rank has sent; what is
        # missing is its done word.
        pytest.param("dispatch_wait", "dispatch_async|done word", marks=slow),
    ],
)
def test_killed_rank_is_named(graphs, tmp_path, monkeypatch, where, missed):
    monkeypatch.setitem(launch.__globals__, "_GRACE_S", START_S)
    with pytest.raises(LaunchError) as caught:
        launched(scenarios.die, graphs, where, TIMEOUT_S, str(tmp_path))
    failures = caught.value.failures
    assert sorted(failures) == list(range(N_RANKS))
    assert failures[KILLED_RANK] == "died without a result (exit code -9)"
    assert f"node {KILLED_RANK}: died without a result" in str(caught.value)
    phase, what = missed.split("|")
    for rank in range(N_RANKS):
        if rank == KILLED_RANK:
            continue
        text = failures[rank]
        assert re.search(
            rf"max_ep: {phase} on rank {rank}: timed out after 2000 ms waiting for"
            rf" {what}( for expert \d+)? of generation {KILLED_AT} from rank"
            rf" {KILLED_RANK} \(last seen: generation {KILLED_AT - 1}\)",
            text,
        ), text
        seconds = float(re.search(r"after ([\d.]+) s in generation", text)[1])
        assert TIMEOUT_S - 0.05 < seconds < TIMEOUT_S + SLACK_S, text
    assert names_of((tmp_path / "group").read_text()) == []


def test_results_are_in_order():
    results = launch(scenarios.multiply, 3, (10,), timeout_s=START_S)
    assert [r[0] for r in results] == [0, 10, 20]
    assert [r[1] for r in results] == ["0", "1", "2"]
    assert all(r[3] for r in results), "graphs are compiled by each"
    groups = {r[2] for r in results}
    assert len(groups) == 1 and len(groups.pop()) >= 16


@refused("""
lambda node_id: node_id, 2 | lambda; top of a module
scenarios.multiply, 0, (10,) | n_nodes=0: pass how many
scenarios.multiply, 2, (lambda: 10,) | lambda; args that can be pickled
scenarios.multiply, 2, "abc" | args='abc' must be a sequence of arg
scenarios.multiply, 2, 10 | args=10 must be a sequence of arg
""")
def test_what_cannot_be_launched_is_said(arguments, words):
    with raises((ValueError, TypeError), words):
        eval(f"launch({arguments})", globals())


def test_a_script_that_starts_itself_again_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import max_ep\n\nmax_ep.launch(print, 2)\n")
    done = ran(sys.executable, script)
    assert done.returncode != 0
    assert 'under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]


def test_every_failure_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(launch.__globals__, "_GRACE_S", START_S)
    with pytest.raises(LaunchError) as caught:
        launch(scenarios.fail_in_various_ways, 5, (str(tmp_path),), timeout_s=START_S)
    failures = caught.value.failures
    assert sorted(failures) == [0, 1, 2, 3]
    assert failures[0].startswith("Traceback")
    assert "in _raise_deep_inside" in failures[0]
    assert "LookupError: the reason" in failures[0]
    assert failures[1] == "died without a result (exit code -9)"
    assert failures[2] == "died without a result (exit code 7)"
    assert "pickle" in failures[3]
    for node_id, text in failures.items():
        assert f"node {node_id}: {text}" in str(caught.value)
    # 1 and 2 had no time to remove their names.
    assert names_of((tmp_path / "group").read_text()) == []


def test_time_limit_kills(tmp_path):
    for limit_s in (15.0, 60.0, 240.0):  # processes import MAX before they hang
        begin = time.monotonic()
        with pytest.raises(LaunchError) as caught:
            launch(scenarios.sleep_for_long, 3, (str(tmp_path),), timeout_s=limit_s)
        assert limit_s <= time.monotonic() - begin < limit_s + SLACK_S
        if all((tmp_path / note).exists() for note in "12"):
            break
    assert list(caught.value.failures) == [1, 2]
    for text in caught.value.failures.values():
        assert text == f"no result after {limit_s} s; killed"
    for note in ("1", "2"):
        pid, group = (tmp_path / note).read_text().split()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
        assert names_of(group) == []


def test_an_interrupt_waits_for_nobody(tmp_path, monkeypatch):
    """Ctrl-C: processes may be in a wait of an hour, and not come to hear of it."""
    monkeypatch.setitem(launch.__globals__, "_GRACE_S", START_S)
    interrupted_at: list[float] = []

    def interrupt() -> None:
        while not all((tmp_path / note).exists() for note in "12"):
            time.sleep(0.01)
        interrupted_at.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # Processes of pytest-xdist ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(scenarios.sleep_for_long, 3, (str(tmp_path),), timeout_s=START_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - interrupted_at[0] < SLACK_S
    for note in "12":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / note).read_text().split()[0]), 0)


# ------------------------------------------------------- replays, in one process


@pytest.fixture(params=PHASED)
def group(request: pytest.FixtureRequest, groups: dict[str, Group]) -> Group:
    groups[request.param].comm.reset()
    return groups[request.param]


@pytest.mark.parametrize(
    "steps",
    [
        "D1 D1 D2 D3 C3",  # dispatch replayed without combine
        "D1 C1 C1 C1 D2 C2",  # combine replayed
        "D1 C1 D2 C2 D1 C1 D2 C2",  # two models of a group, alternately
        "D1 C1 D2 D3 C3 C3 D1 D1 C1",
        "D1 d2 C1 w2 C2",  # the next tokens travel while rows come back
    ],
)
def test_orders_that_work(group, steps):
    """To the bit, whatever ran before."""
    group.do(steps)


@pytest.mark.parametrize("name", [n for n in PHASED if not n.endswith("sums")])
def test_rows_are_added_up_after_two_dispatches(groups, name):
    """The first one's number of tokens is not kept so long."""
    groups[name].comm.reset()
    groups[name].do("D1 c1 D2 d3 v1 w3 C3")


@refused("""
D1, d2 d3 | dispatch_async on rank 0 again, before its dispatch_wait
D1, w1 | dispatch_wait on rank 0 before its dispatch_async
D1 c1, c1 | combine_async on rank 0 again, before its combine_wait
D1 C1, v1 | combine_wait on rank 0 before its combine_async
D1, v1 | combine_wait on rank 0 before its combine_async
, w1 | dispatch_wait on rank 0 before its dispatch_async
D1 r, c1 | nothing was dispatched to this rank yet
""")
def test_orders_that_are_refused(group, arguments, words):
    """At once, also where ranks are processes that could wait."""
    steps, last = arguments.split(", ")
    group.do(steps)
    with raises(ValueError, words):
        group.do(last)


def test_rows_of_an_earlier_dispatch(group):
    """Graph A dispatches, graph B dispatches, graph A combines."""
    group.do("D1")
    received = [rank.received for rank in group.ranks]
    group.do("D2")
    for rank, kept in zip(group.ranks, received):
        rank.received = kept
    with pytest.raises(ValueError, match="is not that of this rank's last dispatch_"):
        group.do("c1")
