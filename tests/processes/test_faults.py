# SPDX-License-Identifier: Apache-2.0
"""A rank dies, or is stopped: the others go on, and take it in again.

Every result is compared with the oracle, bit for bit, and so are the flags of tokens.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from max.engine import InferenceSession
from max.graph import Module

from graphs import late_rank
from max_ep import EPCommInitializer, launch
from max_ep.memory.masked_ranks import MaskedRanks
from max_ep.memory.setup_graph import SETUP_GRAPH
from max_ep.processes.meeting import Owner
from max_ep.processes.membership import (
    MEMBER,
    Membership,
    Note,
    decide,
    notes_of,
)
from max_ep.processes.messages import said
from max_ep.processes.notes import _LOG_BYTES, Notes
from max_ep.processes.sockets import Answering, group_name, listen
from tests.children import ALL_CASES, handles, names_of, new_handles, slow
from tests.errors import raises
from tests.processes.faults import (
    ALL,
    JOIN,
    MASKING,
    N_RANKS,
    PHASES,
    RECONCILE,
    Fault,
    Group,
    RankStep,
    Step,
    add_masking,
    check,
    draw,
    lost_ranks,
)
from tests.processes.generations import config_of
from tests.processes.processes import Engine

pytestmark = pytest.mark.usefixtures("all_cores")

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
BY_RANK, *_, SUMS = [*MASKING][-2:] * 2


def add_process_graphs(module: Module) -> None:
    add_masking(module)
    if ALL_CASES:
        late_rank.build(module)


@pytest.fixture(scope="module")
def group(session, graphs) -> Iterator[Group]:
    """Four processes that all tests of this file share."""
    name = f"faults-{os.getpid()}"
    members = Group(graphs, name, 2 * ("MAX_EP_FAULTS" in os.environ))
    members.models, members.graphs = session.load_all(graphs), graphs
    try:
        for protocol in MASKING:
            assert members.step(protocol, ALL) == []
        yield members
    finally:
        members.close()
    assert names_of(name) == []


def late_member(rank: int, graphs: str) -> list[int]:
    """Runs a rank of the program with graphs that the parent compiled."""
    models = Engine(graphs).models
    InferenceSession.load = lambda _, graph, **how: models[graph.name]
    return late_rank.run_rank(rank)


@slow
def test_the_program_of_the_page(group):
    """The late rank is masked, expelled and taken in again; no sum is wrong."""
    n_degraded = launch(late_member, late_rank.N_RANKS, (group.graphs,))
    for counts in n_degraded:
        assert max(counts) > 0 and counts[0] == counts[-1] == 0


RECONCILED = (KILL, 30), (STOP, 60), (STOP, 140)


def _slow_but(first: object, *others: object) -> list:
    return [first, *(pytest.param(x, marks=slow) for x in others)]


@pytest.mark.parametrize("phase", _slow_but(*PHASES[::-1]))
def test_a_stopped_rank_is_masked_and_rejoins(group, phase):
    """It finishes its step alone, later, with its own tokens right or flagged."""
    rank = PHASES.index(phase)
    group.survive([SUMS, BY_RANK][rank % 2], Fault(rank, STOP, phase))


@pytest.mark.parametrize("phase", _slow_but(*PHASES[1:3]))
def test_a_killed_rank_is_masked_and_restarts(group, phase):
    group.survive(BY_RANK, Fault(3, KILL, phase))


@slow
def test_two_at_once(group):
    """In different phases: one time-out is enough for both."""
    faults = Fault(0, STOP, "dispatch_wait"), Fault(2, STOP, "combine_wait")
    group.survive(next(iter(MASKING)), *faults)
    faults = Fault(1, KILL, "dispatch_async"), Fault(2, STOP, "combine_async")
    group.survive(SUMS, *faults)


def test_one_rank_masks_another(group):
    """The others wait for neither: each is right, or flagged, and then they agree."""
    assert group.step(BY_RANK, ALL) == []
    begin = time.monotonic()
    assert group.step(BY_RANK, ALL) == []
    silences = group.ask(ALL, BY_RANK, "silent_s", 0)
    assert 0 <= min(silences) and max(silences) <= time.monotonic() - begin
    assert group.ask([1], BY_RANK, "mask", 3) == [[0, 1, 2]]
    assert group.step(BY_RANK, ALL) == []
    *active, expelled = group.reconcile(BY_RANK, ALL).values()
    assert active == 3 * [[0, 1, 2]] and "RankExpelled" in expelled
    group.pipes[3].send((BY_RANK, "step", 1, None))
    assert "was freed" in group.answer(3)
    group.heal(BY_RANK, {})
    assert group.step(BY_RANK, ALL) == []


@pytest.mark.parametrize(
    "how, line",
    [(KILL, 110), *(pytest.param(*x, marks=slow) for x in RECONCILED)],
)
def test_a_rank_is_lost_in_reconcile(group, how, line):
    group.survive(SUMS, Fault(line % 4, how, RECONCILE, line=line))


@pytest.mark.parametrize(
    "how, line", [(KILL, 400), pytest.param(STOP, 150, marks=slow)]
)
def test_a_rank_is_lost_as_it_joins(group, how, line):
    """And another one in the same reconcile()."""
    group.survive(BY_RANK, Fault(line % 4, how, JOIN, line=line))


@pytest.mark.parametrize("name", MASKING)
def test_ranks_of_one_process(group, session, name):
    """One is masked, or does not come, from any phase on; and is taken in again."""
    case = MASKING[name]
    sizes = dict(n_nodes=1, n_gpus_per_node=N_RANKS, on_timeout="mask")
    with EPCommInitializer(config_of(case, 0, **sizes)) as comm:
        comm.ep_init(session, group.models[SETUP_GRAPH])

        def step(generation: int, missing: int = -1, phase: str = PHASES[0]) -> None:
            inputs = comm.model_inputs()

            def run_on(rank: int) -> Callable:
                mine = [inputs[rank], inputs[N_RANKS + rank], *inputs[2 * N_RANKS :]]

                def run_op(op: str, *given: Any) -> list:
                    return group.models[f"{op}_{name}"].execute(*given, *mine)

                return run_op

            ranks = [RankStep(run_on(r), case, r, generation) for r in ALL]
            for now in PHASES:
                is_missing = PHASES.index(now) >= PHASES.index(phase)
                for rank in ALL:
                    if not (is_missing and rank == missing):
                        ranks[rank].run(now)
            for rank in set(ALL) - {missing}:
                results = ranks[rank].results
                check(name, generation, rank, Step(0, *results, lost_ranks(comm)))

        step(1)
        assert comm.active_ranks() == ALL
        for i, phase in enumerate(PHASES):
            step(3 * i + 2, 2, phase)
            step(3 * i + 3, 2)
            assert comm.active_ranks() == [0, 1, 3]
            comm.readmit(2)
            step(3 * i + 4)
            assert comm.active_ranks() == ALL
        comm.mask(0, 3)
        assert comm.active_ranks() == [1, 2]
        comm.readmit(0)
        assert comm.active_ranks() == [0, 1, 2]


@pytest.mark.parametrize("rank", [-1, N_RANKS, 1.0, "0"])
def test_ranks_that_are_none_are_refused(rank):
    """-1 was the last one for `readmit`, which then stayed masked."""
    sizes = dict(n_nodes=1, n_gpus_per_node=N_RANKS, on_timeout="mask")
    config = config_of(MASKING[SUMS], 0, **sizes)
    ranks = MaskedRanks(SimpleNamespace(config=config), None)
    for call in (ranks.mask, ranks.readmit):
        with raises(ValueError, f"rank {rank!r} must be an integer in; {N_RANKS}"):
            call(rank)


@pytest.mark.skipif(
    "MAX_EP_FAULTS" not in os.environ, reason="a soak: MAX_EP_FAULTS=1000"
)
def test_faults_of_a_seed(group):
    seed = int(os.environ.get("MAX_EP_FUZZ_SEED", 1))
    for number in range(int(os.environ["MAX_EP_FAULTS"])):
        name, faults = draw(seed, number)
        print(f"{number}: {name}, {faults}", flush=True)
        group.survive(name, *faults)


def note(masked: list[int], generations: list[int] | None = None) -> Note:
    return Note(
        Owner.myself(""), masked=masked, generations=generations or [3, 3, 3, 3]
    )


@pytest.mark.parametrize(
    "notes, joining, members, joined",
    [
        ({0: [], 1: [], 2: []}, [], [0, 1, 2], []),
        ({0: [2], 1: [2]}, [], [0, 1], []),
        # One is masked by one: the lower of the two stays.
        ({0: [2], 1: [], 2: [0]}, [], [0, 1], []),
        # Was stopped, and masks all: the others stay.
        ({0: [1, 2], 1: [0], 2: [0]}, [], [1, 2], []),
        # A rank that masks one that stays does not stay.
        ({0: [], 1: [0, 2], 2: [1]}, [], [0, 2], []),
        # A rank that is expelled expels nobody.
        ({0: [1], 1: [2], 2: []}, [], [0, 2], []),
        ({0: [2], 1: [2]}, [2], [0, 1, 2], [2]),
    ],
)
def test_the_rule(notes, joining, members, joined):
    found = decide(7, [0, 1, 2], {n: note(m) for n, m in notes.items()}, joining)
    assert (found.epoch, found.members, found.joined) == (7, members, joined)
    assert found.generations == [3, 3, 3, 3]


def test_who_ran_something_else_is_expelled():
    notes = {0: note([]), 1: note([], [2, 2, 2, 2]), 2: note([])}
    assert decide(1, [0, 1, 2], notes, []).members == [0, 2]


@pytest.fixture
def notes(request) -> Iterator[Callable[..., Membership]]:
    """Makes members of a group, by node; all have its notes."""
    name, made = f"notes-{os.getpid()}", []
    descriptor = Notes.make(3)

    def make(node: int, n_nodes: int = 1, timeout_s: float = 2.0) -> Membership:
        known = name, node, n_nodes, Owner.myself(""), timeout_s
        made.append(Membership(*known, Notes(os.dup(descriptor), 3)))
        return made[-1]

    yield make
    for member in made:
        member.close()
    os.close(descriptor)
    assert names_of(name) == []


def test_the_first_decision_of_an_epoch_counts(notes):
    """Also for one that comes late, and finds only what has not been forgotten."""
    first, slow = notes(0), notes(0)
    text = "x" * 100_000
    first.publish(state=MEMBER)
    for epoch in range(1, 300):
        first._decide(replace(first.decision, epoch=epoch, joined=[epoch]))
        first._notes.append(text.encode())  # of a process that was killed
        first._decide(replace(first.decision, epoch=epoch, joined=[]))
        assert first.latest().joined == [epoch]
    # One that was stopped.
    first._decide(replace(first.decision, epoch=7, joined=[7]))
    n_bytes = os.fstat(first._notes.descriptor)
    assert n_bytes.st_size > 299 * len(text)
    assert n_bytes.st_blocks * 512 < 3 * _LOG_BYTES
    for late in (slow, notes(0)):
        assert (late.latest().epoch, late.latest().joined) == (299, [299])


def test_what_a_killed_process_has_begun_is_no_decision(notes):
    """Nor what is none for another reason; the line of the next process counts."""
    first, other = notes(0), notes(0)
    descriptor = first._notes.descriptor
    for begun in (
        b'\n{"epoch": 1, "members"',
        b"\n[[[[",
        b"\xff\n",
        b"\n" + b"[" * 99999,
    ):
        os.write(descriptor, begun)
    assert first.latest().epoch == 0
    other._decide(replace(other.decision, epoch=1))
    assert first.latest().epoch == other.latest().epoch == 1


def test_a_note_is_read_whole(notes):
    """While its process writes others."""
    writer, reader = notes(0), notes(0)
    assert reader.note(0) is None
    with ThreadPoolExecutor() as pool:
        lengths = [*range(1, 400)]
        done = pool.submit(
            lambda: [writer.publish(masked=n * [0], epoch=n) for n in lengths]
        )
        while not done.done():
            if note := reader.note(0):
                assert len(note.masked) == note.epoch
    assert reader.note(0).epoch == 399


def test_a_process_that_dies_as_it_writes_leaves_its_last_note(notes):
    writer, reader = notes(0), notes(0)
    writer.publish(epoch=1)
    writer.publish(epoch=2)
    place = writer._notes._place(0, 3)
    writer._notes._map[place + 8 : place + 100] = b"?" * 92
    assert reader.note(0).epoch == 2
    notes(0).publish(epoch=4)  # its successor
    assert reader.note(0).epoch == 4


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[" * 60_000, b"\xff", b"7"])
def test_a_damaged_note_is_said_to_be(notes, monkeypatch, text):
    member = notes(0)
    member._notes.write(0, text)
    with raises(
        RuntimeError, "the notes of the group are damaged; node 0; start it ag"
    ):
        member.notes()
    member._notes.write(0, said(note([])))
    assert member.notes()
    monkeypatch.setattr("max_ep.processes.notes._TRY_S", 0)
    member._notes._map[member._notes._place(0, 2) + 30] ^= 1
    with raises(
        RuntimeError, "damaged: the note of node 0 is not whole; start it again"
    ):
        member.notes()
    member._notes.write(0, said(note([])))  # so that it can close


def test_notes_are_handed_on(notes, monkeypatch):
    """By members that are alive; what another hands is not taken, and who says nothing
    holds up nobody."""
    member = notes(0, 3)
    group = member._group
    assert notes_of(group, 3, 1.0) is None
    silent = listen(f"{group_name(group)}-2/notes")
    with raises(
        TimeoutError, "none of its processes; has answered for 0.2 s; end those"
    ):
        notes_of(group, 3, 0.2)
    wrong = Answering(
        listen(f"{group_name(group)}-1/notes"),
        lambda line: socket.send_fds(line, [b"notes"], [0]),
    )
    member.publish(epoch=5)
    member.hand_on()
    before = handles()
    handed = Notes(notes_of(group, 3, 60.0), 3)
    joins = Membership(group, 1, 3, Owner.myself(""), 2.0, handed)
    assert joins.note(0).epoch == 5
    joins.close()
    assert not new_handles(before)
    wrong.close()
    silent.close()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert notes_of(group, 3, 1.0) is None, "of another user"


def test_who_is_forgotten_does_not_join(notes):
    """The members have ended."""
    expelled = notes(1, 2)
    assert not expelled.is_running()
    with pytest.raises(RuntimeError, match="the group ended before"):
        expelled.join(1.0)


def test_who_waits_to_be_let_in_says_so(notes, monkeypatch, capfd):
    monkeypatch.setattr("max_ep.processes.membership._REPORT_EVERY_S", 0.1)
    member, joins = notes(0, 2), notes(1, 2)
    member.publish(state=MEMBER)
    words = (
        "node 1 of group 'notes-; waited; s for the members [0] to call; reconcile()"
    )
    with raises(TimeoutError, words):
        joins.join(1.0)
    assert 1 <= capfd.readouterr().err.count("max_ep: node 1 of group 'notes-") <= 10


def test_most_must_come(notes):
    """One that comes too early expels nobody, and calls again."""
    members = [notes(node, 3, 0.2) for node in range(3)]
    for member in members:
        member.publish(state=MEMBER)
    with pytest.raises(TimeoutError, match=r"waited 0.2 s for nodes \[1, 2\], which"):
        members[0].reconcile([], [1])

    def reconcile(member: Membership) -> list[int]:
        if member is members[2]:  # still waits in a launch
            time.sleep(0.5)
        return member.reconcile([], [1], lambda nodes: time.monotonic()).members

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(reconcile, members)) == 3 * [[0, 1, 2]]
