# SPDX-License-Identifier: Apache-2.0
"""What the processes of `test_processes.py` do.

Scenarios are runs of a healthy group; each has a group of its own, so that one which
fails does not take the next along. After them: processes that die.
"""

import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from max.engine import InferenceSession

from max_ep import EPConfig
from max_ep.cli.who import groups_of
from max_ep.limits import GROUP_VARIABLE, NODE_VARIABLE
from max_ep.memory.symmetric_memory import SharedMemory
from tests.children import ALL_CASES, names_of
from tests.cpu import gathering
from tests.harness import assert_same_bits, to_numpy
from tests.processes.generations import (
    GROUPS,
    N_RANKS,
    PHASED,
    SMALL,
    check_dispatched,
    config_of,
)
from tests.processes.process_graphs import ALL_GATHER, dispatcher_of
from tests.processes.processes import Engine, Member

_CYCLE = 28
"""Generations whose inputs are made in advance; the next `_CYCLE` have them again."""
# The protocol that "auto" takes on CPU has most.
_MOST, _SOME = (4000, 300) if ALL_CASES else (100, 50)
_SOAKED = {"async_wait": _SOME, "shared_by_rank": _MOST, "shared_sums": _SOME}


def _soak(member: Member, name: str) -> None:
    """Very many generations; token counts change, and ranks are late now and then. Of
    `async_wait`, ranks choose their form by themselves: on the wire there is one."""
    graph = name.removeprefix("soak_")
    prepared = [member.prepare(generation) for generation in range(1, _CYCLE + 1)]
    rng = np.random.default_rng(member.rank)
    for i in range(int(os.environ.get("MAX_EP_SOAK", _SOAKED[graph]))):
        if rng.random() < 0.005:
            time.sleep(rng.random() * 0.01)
        is_fused = graph == "async_wait" and (i + member.rank) % 3 == 0
        form = "fused" if is_fused else graph
        member.round_trip(form, i + 1, prepared[i % _CYCLE])


def _two_groups(member: Member, _: str) -> None:
    """Two groups at once, whose phases each rank mixes in an order of its own."""
    group = f"{os.environ[GROUP_VARIABLE]}-other"
    other = Member(member.engine, member.config, SMALL, group)
    members, rng = [member, other], np.random.default_rng(member.rank)
    try:
        for generation in range(1, 61 if ALL_CASES else 21):
            data = [generation, generation + 1000]  # of each group other tokens
            for i in rng.permutation(2):
                members[i].dispatch_async(data[i])
            received = {}
            for i in rng.permutation(2):
                received[i] = members[i].dispatch_wait(data[i])
            for i in rng.permutation(2):
                members[i].combine_async(data[i], *received[i])
            for i in rng.permutation(2):
                members[i].combine_wait(data[i], data[i])
    finally:
        other.comm.close()


def _sleep_at_random(rng: np.random.Generator) -> None:
    """Sleeps: often not at all, now and then for many generations' time."""
    time.sleep(rng.choice([0, 0, 0.002, 0.005, 0.03]))


def _delays_between_phases(member: Member, _: str) -> None:
    """Each rank is late by other times before each phase, of any protocol."""
    rng = np.random.default_rng(200 + member.rank)
    for generation in range(1, 31):
        member.phases(generation, lambda _: _sleep_at_random(rng))


def _silent_rank(member: Member, name: str) -> None:
    """Nobody exchanges anything with rank 2, which is early now and then, or late."""
    member.silent_rank = 2
    _delays_between_phases(member, name)


def _back_to_back(member: Member, graph: str) -> None:
    """Launches that are long, and close on each other's heels. A fast rank must not
    overwrite what a slow one is copying, nor unread partial sums."""
    rank = member.rank
    for generation in (2, 3, 6, 9, 10, 23) if ALL_CASES else (2, 3, 6):
        wants = [member.oracle(generation + i) for i in range(2)]
        dispatched = [want.dispatched[rank] for want in wants]
        inputs = [x for want in wants for x in want.inputs(rank)]
        for i in range(2):
            inputs.append(member.factors(rank, generation + i, dispatched[1]))
        got = member.run(graph, *inputs)
        for i in range(2):
            where = f"rank {rank}, generation {generation} ({i} of {graph})"
            check_dispatched(where, got[4 * i : 4 * i + 4], dispatched[i])
            want = wants[1].sums(rank, generation + i)
            assert_same_bits(f"{where}: sums", to_numpy(got[8 + i]), want)


def _with_delays(member: Member, graph: str) -> None:
    """Ranks that hold experts are slow, one that holds none is not. With a shared
    expert every rank has rows; its own may stand where they come from."""
    rng = np.random.default_rng(350 + member.rank)
    for generation in range(1, 31):
        if member.case.n_experts > member.rank * member.case.n_local_experts:
            _sleep_at_random(rng)
        member.round_trip(graph, generation)


def _all_gather(member: Member, graph: str) -> None:
    """Everything goes to everybody, also from ranks that are late, or have nothing."""
    rng = np.random.default_rng(360 + member.rank)
    for generation in range(1, 31):
        _sleep_at_random(rng)
        given, rank = member.oracle(generation).given, member.rank
        outputs = member.run(graph, *gathering.inputs_of(given, rank))
        where = f"rank {rank}, generation {generation} (all-gather)"
        gathering.check(where, list(map(to_numpy, outputs)), given, rank)


SLOW_RANK = 1


def _one_phase_only(member: Member, name: str) -> dict[str, list[float]]:
    """Only dispatches, or combines one dispatch again and again, each time other rows.
    Nothing but the done words keeps fast ranks from overwriting what the slow one has
    not read. Returns when each generation was sent, and when its rows were read."""
    times: dict[str, list[float]] = {"sent": [], "looked": []}
    is_combine = name.startswith("combine_only")
    if is_combine:
        member.dispatch_async(2)
        rows, src_info = member.dispatch_wait(2)
        bounds = member.oracle(2).dispatched[member.rank]
    for generation in range(1, 13):
        if is_combine:
            member.send_rows(generation, bounds, rows, src_info)
        else:
            member.dispatch_async(generation)
        times["sent"].append(time.monotonic())
        time.sleep(0.04 if member.rank == SLOW_RANK else 0)
        times["looked"].append(time.monotonic())
        if is_combine:
            member.combine_wait(2, generation)
        else:
            member.dispatch_wait(generation)
    return times


STOPPED_S = 0.5


def _stopped(member: Member, _: str) -> None:
    """Rank 2 is stopped three times, wherever it is then, and all wait for it."""
    stoppers, begin = [], time.monotonic()
    for generation in range(1, 61):
        if member.rank == 2 and generation in (10, 25, 40):
            pid = os.getpid()
            command = f"sleep {generation / 10_000}; kill -STOP {pid};"
            command += f" sleep {STOPPED_S}; kill -CONT {pid}"
            stoppers.append(subprocess.Popen(command, shell=True))
        if stoppers and generation in (24, 39, 60):  # on a busy machine it is late
            stoppers[-1].wait()
        time.sleep(0.002)
        member.phases(generation, lambda _: None)
    assert time.monotonic() - begin > 3 * STOPPED_S


MISSING_RANK = 2
LOOK_S = 50.0
"""How long rank 0 looks until all others wait: less than they wait."""


def _who_waits(member: Member, _: str) -> dict[str, str]:
    """Rank 2 does not call, then is stopped, until rank 0 has looked from another
    thread and sends it a SIGCONT."""
    said: dict[str, str] = {}
    lookers: list[threading.Thread] = []
    continued: list[int] = []
    signal.signal(signal.SIGCONT, lambda number, _: continued.append(number))

    def look(when: str, phase: str) -> None:
        end_s, others_wait = time.monotonic() + LOOK_S, False
        while not others_wait and time.monotonic() < end_s:
            time.sleep(0.01)
            waits = member.comm.who_waits()
            missing = waits.ranks.pop(MISSING_RANK)
            others_wait = not missing.is_running and all(
                (wait.phase, wait.generation, wait.missing)
                == (phase, 2, [MISSING_RANK])
                for wait in waits.ranks
            )
            if when == "is stopped":
                others_wait &= missing.process.endswith(when)
        try:
            said[when] = str(member.comm.who_waits())
            (waits,) = groups_of(member.comm._memory.group)
            said[f"{when} from outside"] = str(waits)
        finally:
            os.kill(missing.pid, signal.SIGCONT)

    def look_meanwhile(*given: str) -> None:
        if member.rank == 0:
            lookers.append(threading.Thread(target=look, args=given))
            lookers[-1].start()

    member.phases(1, lambda _: None)
    look_meanwhile("does not call", "dispatch_wait")
    while member.rank == MISSING_RANK and not continued:
        time.sleep(0.01)
    member.dispatch_async(2)
    rows, src_info = member.dispatch_wait(2)
    look_meanwhile("is stopped", "combine_wait")
    if member.rank == MISSING_RANK:
        os.kill(os.getpid(), signal.SIGSTOP)
    member.combine_async(2, rows, src_info)
    member.combine_wait(2, 2)
    for looker in lookers:
        looker.join()
    return said


SCENARIOS: dict[str, Callable[[Member, str], Any]] = {
    **{f"soak_{graph}": _soak for graph in _SOAKED},
    "two_groups": _two_groups,
    **{f"delays_{n}": _delays_between_phases for n in GROUPS if n.startswith("small")},
    "silent_rank": _silent_rank,
    **{n: _back_to_back for n in GROUPS if n.startswith("large")},
    **{n: _with_delays for n in GROUPS if n.startswith(("few", "shared"))},
    **({ALL_GATHER: _all_gather} if ALL_CASES else {}),
    **{f"dispatch_only_{n}": _one_phase_only for n in PHASED},
    **{f"combine_only_{n}": _one_phase_only for n in PHASED},
    "stopped": _stopped,
    "who_waits": _who_waits,
}


@dataclass
class Outcome:
    """How a scenario went on one process."""

    error: str | None
    value: Any = None


def run_scenarios(
    node_id: int, graphs: str, names: list[str], notes: str
) -> dict[str, Outcome]:
    """Runs scenarios of four processes, each in a group of its own."""
    engine = Engine(graphs)
    outcomes = {}
    for name in names:
        # Where one failed, some processes come from there later than others.
        meet(notes, name, node_id, N_RANKS)
        group = name.removeprefix("soak_").removeprefix("delays_")
        case = GROUPS.get(group.rpartition("_only_")[2], SMALL)
        config = config_of(case, node_id)
        if name == ALL_GATHER:
            config = dispatcher_of(node_id).config
        outcomes[name] = _run(engine, config, name, SCENARIOS[name], case)
    return outcomes


def run_two_by_two(node_id: int, graphs: str) -> Outcome:
    config = config_of(SMALL, node_id, n_nodes=2, n_gpus_per_node=2)
    return _run(Engine(graphs), config, "two_by_two", _with_delays, SMALL)


def _run(engine, config: EPConfig, name: str, scenario: Callable, case) -> Outcome:
    group = f"{os.environ[GROUP_VARIABLE]}-{name}"
    error = value = member = None
    try:
        member = Member(engine, config, case, group)
        assert f"@max_ep/0/{group}-{config.node_id}" not in names_of(group)
        value = scenario(member, name)
    except Exception:
        error = traceback.format_exc()
    finally:
        if member is not None:
            member.comm.close()
    return Outcome(error, value)


def meet(notes: str, what: str, node_id: int, n_nodes: int) -> None:
    """Waits until all processes are here: nobody is late for what follows."""
    Path(notes, f"{what}-{node_id}").touch()
    while not all(Path(notes, f"{what}-{i}").exists() for i in range(n_nodes)):
        time.sleep(0.002)


KILLED_RANK = 3
KILLED_AT = 4
"""The generation."""


def die(node_id: int, graphs: str, where: str, timeout_s: float, notes: str) -> None:
    """Runs a group in which one rank is killed in front of a phase. The others raise
    what they saw, with the time it took them."""
    Path(notes, "group").write_text(os.environ[GROUP_VARIABLE])
    config = config_of(SMALL, node_id, timeout_s=timeout_s)
    engine = Engine(graphs)
    # The time-out is for those that wait for the dead, not for slow starters.
    meet(notes, "loaded", node_id, N_RANKS)
    member = Member(engine, config)
    begin = time.monotonic()

    def pause(phase: str) -> None:
        nonlocal begin
        begin = time.monotonic()
        if node_id == KILLED_RANK and generation == KILLED_AT and phase == where:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for generation in range(1, KILLED_AT + 2):
            if where == "dispatch_wait":  # a program that only dispatches
                pause("dispatch_async")
                member.dispatch_async(generation)
                pause("dispatch_wait")
                member.dispatch_wait(generation)
            else:
                member.phases(generation, pause)
    except ValueError as error:
        after = f"after {time.monotonic() - begin:.2f} s in generation {generation}"
        raise RuntimeError(after) from error
    finally:
        member.comm.close()


def multiply(node_id: int, factor: int) -> tuple[int, str, str, bool]:
    group, node = os.environ[GROUP_VARIABLE], os.environ[NODE_VARIABLE]
    compiles_once = hasattr(InferenceSession.compile, "__wrapped__")
    return node_id * factor, node, group, compiles_once


def fail_in_various_ways(node_id: int, notes: str) -> Any:
    """0 raises, 1 is killed, 2 exits, 3 cannot be answered, 4 is well. 1 is killed when
    its memory has a name, 2 has left one."""
    group = os.environ[GROUP_VARIABLE]
    memory = SharedMemory(group, node_id, 5, 1, 4096, "")
    Path(notes, "group").write_text(group)
    meet(notes, "here", node_id, 5)  # those that come later would be ended
    if node_id == 0:
        _raise_deep_inside()
    if node_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if node_id == 2:
        os._exit(7)
    memory.close()
    return threading.Lock() if node_id == 3 else "well"  # a lock cannot be pickled


def _raise_deep_inside() -> None:
    raise LookupError("the reason")


def sleep_for_long(node_id: int, notes: str) -> int:
    """Node 0 returns at once; the others write down their pid and hang."""
    if node_id == 0:
        return 0
    SharedMemory(os.environ[GROUP_VARIABLE], node_id, 3, 1, 4096, "")
    note = Path(notes, f"{node_id}.tmp")
    note.write_text(f"{os.getpid()} {os.environ[GROUP_VARIABLE]}")
    note.rename(Path(notes, f"{node_id}"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return node_id
