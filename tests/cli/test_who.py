# SPDX-License-Identifier: Apache-2.0
"""Tests who waits for whom, with words of memory that are written here, without ranks.

`test_processes.py` looks at processes that hang.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from max_ep.cli import who
from max_ep.cli.who import groups_of
from max_ep.memory import answering
from max_ep.memory.answering import answer_for
from max_ep.processes.messages import said
from max_ep.processes.sockets import Answering, call, listen
from max_ep.waits import PHASES, Facts, RankWait, Waits, Words, cpu_wait, gpu_wait
from tests.errors import refused

# 3 ranks with 2, 2 and 1 experts; counts of dispatch, then of combine.
N_RANKS, N_EXPERTS, N_LOCAL = 3, 5, 2
N_PAIRS = N_LOCAL * N_RANKS
FACTS = Facts(
    n_ranks=N_RANKS,
    n_experts=N_EXPERTS,
    n_local_experts=N_LOCAL,
    dispatch_counts_offset=256,
    combine_counts_offset=512,
    combine_recv_offset=1024,
    generations_word=3,
    launch_word=28,
    protocol=2,
    max_tokens_per_rank=4,
    top_k=2,
    combine_msg_bytes=48,
    n_tokens_word=16,
    combine_of_word=18,
    choices_word=32,
    masked_word=32,
)
LAST = 6
"""The last generation of every phase."""


def memory_of() -> np.ndarray:
    """A region in which the flags of all phases are of generation `LAST`."""
    region = np.zeros(2048, np.uint8)
    region[FACTS.dispatch_counts_offset :].view(np.uint64)[:] = LAST << 32 | 17
    return region


def look(
    rank: int, phase: str, changed: dict[tuple[str, int], int], protocol: int = 2
) -> RankWait:
    """Looks at a rank that is in a phase; some flags are of other generations."""
    region = memory_of()
    flags = {
        "dispatch": region[FACTS.dispatch_counts_offset :].view(np.uint64),
        "combine": region[FACTS.combine_counts_offset :].view(np.uint64),
    }
    for (buffer, place), generation in changed.items():
        flags[buffer][place] = generation << 32
    header = np.zeros(32 + N_RANKS, np.int32)
    header[FACTS.masked_word + 1] = 1
    header[FACTS.generations_word :][:4] = LAST
    header[FACTS.launch_word] = 1 + PHASES.index(phase)
    header[FACTS.launch_word + 2 :][:2].view(np.int64)[0] = 10**9
    facts = replace(FACTS, protocol=protocol)

    def reads(memory: np.ndarray):
        return lambda at, n_bytes: memory.tobytes()[at : at + n_bytes]

    words = Words(reads(header), reads(region))
    return cpu_wait(facts, rank, words, now_ns=4 * 10**9)


def arrived(buffer: str, places: range, but: int = -1) -> dict[tuple[str, int], int]:
    return {(buffer, i): LAST + 1 for i in places if i != but}


@pytest.mark.parametrize(
    "phase, rank, changed, missing",
    [
        # Done words follow the counts: of the pairs, of the experts.
        ("dispatch_async", 0, {("dispatch", N_PAIRS + 1): LAST - 1}, [1]),
        ("dispatch_async", 0, {}, []),
        ("dispatch_wait", 0, {}, [0, 1, 2]),
        ("dispatch_wait", 0, arrived("dispatch", range(N_PAIRS), but=5), [2]),
        # Rank 2 has one expert, and awaits nothing of the second.
        ("dispatch_wait", 2, arrived("dispatch", range(N_RANKS)), []),
        ("combine_async", 1, {("combine", N_EXPERTS + 2): LAST - 1}, [2]),
        ("combine_wait", 1, arrived("combine", range(N_EXPERTS), but=3), [1]),
        ("combine_wait", 1, arrived("combine", range(4)), [2]),
    ],
)
def test_missing_ranks(phase, rank, changed, missing):
    wait = look(rank, phase, changed)
    assert (wait.phase, wait.generation, wait.missing) == (phase, LAST + 1, missing)
    assert wait.is_running and wait.since_s == 3


class GpuMemory:
    """What a rank leaves in dispatch 7 by rank, once it has all counts. It sent 3
    tokens, to experts 0 and 3, 4 and 1 (its own, so coded), 2 and none."""

    def __init__(self) -> None:
        self.header = np.zeros(32, np.int32)
        self.header[FACTS.generations_word :][:4] = 7, 7, 6, 6
        self.header[FACTS.combine_of_word] = 6
        self.header[FACTS.n_tokens_word + 1] = 3
        self.choices = np.zeros(16, np.int32)
        self.choices[8:14] = -2, 3, 4, -3, 2, -1
        self.region = memory_of()
        self.dispatch = self.region[FACTS.dispatch_counts_offset :].view(np.uint64)
        self.dispatch[:N_PAIRS] = 7 << 32
        self.dispatch[N_PAIRS + N_RANKS :][:N_RANKS] = 7 << 32 | 3

    def counters(self, first: int, n: int) -> np.ndarray:
        return np.concatenate([self.header, self.choices])[first : first + n].copy()

    def flags(self, offset: int, n: int) -> np.ndarray:
        return self.region[offset:].view(np.uint64)[:n]

    def send_row(self, choice: int) -> None:
        start = FACTS.combine_recv_offset + (choice + 1) * FACTS.combine_msg_bytes
        self.region[start - 16 :].view(np.uint64)[0] = 7 << 32


SUMS = replace(FACTS, protocol=3)
BY_EXPERT = replace(FACTS, protocol=1)


# By expert the generation advances when the launch ends. Rank 2 has not read dispatch
# 6. Of sums rank 1 has begun its combine, and so has read dispatch 7.
GPU_WAITS = """
FACTS: m.dispatch[1] = 6 << 32 | "dispatch_wait", 7, True, [1]
FACTS: m.dispatch[N + R + 2] = 6 << 32 | "dispatch_wait", 7, True, [2]
BY_EXPERT: m.header[3:5] = 6; m.dispatch[1] = 0 | "dispatch_wait", 7, True, [1]
FACTS: m.dispatch[:N] = 6 << 32; m.dispatch[N + 2] = 5 << 32 | \
"dispatch_async", 7, True, [2]
FACTS: m.send_row(1); m.send_row(4) | "combine_wait", 7, True, [2]
FACTS: m.send_row(1); m.send_row(2) | "combine_wait", 7, True, [1]
FACTS: m.header[5:7] = 7; m.header[18] = 7 | "combine_wait", 7, False, []
SUMS: 0 | "dispatch_wait", 7, False, []
SUMS: m.header[5:7] = 7; m.header[18] = 7; m.dispatch[N + 1] = 7 << 32 | \
"combine_wait", 7, True, [2]
FACTS: m.header[3:7] = 0; m.dispatch[:] = 0 | "", 0, False, []
"""


@refused(GPU_WAITS)
def test_gpu_ranks(arguments, words):
    memory, (facts, steps) = GpuMemory(), arguments.split(": ")
    exec(steps, {"m": memory, "N": N_PAIRS, "R": N_RANKS})
    wait = gpu_wait(globals()[facts], 0, memory)
    found = wait.phase, wait.generation, wait.is_running, wait.missing
    assert found == eval(words)


def test_processes_answer():
    """A process answers for its ranks, from a thread; a closed group says nothing."""

    class Initializer:
        def who_waits(self) -> Waits:
            return waits_of([1], [])

    class Closed:
        def who_waits(self) -> Waits:
            raise RuntimeError("before ep_init, or after close()")

    mine, closed = Initializer(), Closed()
    for initializer in (mine, closed):
        answer_for(initializer)
    deadline = time.monotonic() + 10
    while not (found := groups_of("g")) and time.monotonic() < deadline:
        time.sleep(0.01)
    # Other tests' processes answer, too.
    assert groups_of(str(os.getpid())) == found and found[0] in groups_of()
    assert found[0] in groups_of(str(os.getppid())), "who started it is known, too"
    assert not groups_of("h")
    assert {wait.pid for wait in found[0].ranks} == {os.getpid()}
    assert "Rank 1 keeps others waiting" in str(found[0])


@contextlib.contextmanager
def answering_with(text: bytes) -> Iterator[str]:
    """Answers every call so; yields the name that is called."""
    listener = listen("who", kind=socket.SOCK_STREAM)
    answers = Answering(listener, lambda line: line.sendall(text))
    yield listener.getsockname()[1:].decode()
    answers.close()


def test_who_asks_takes_no_nonsense(monkeypatch, capsys):
    """From a process of this user: text of any form, none, or without an end."""
    good = said(waits_of([1], []))
    bad = [b"[" * 99999, b"7", b"\xff", b"{}", good.replace(b"0", b'"0"'), good[:-1]]
    odd, pid = said(Waits("\033[2J", [])), os.getpid()
    silent = listen("who", kind=socket.SOCK_STREAM)
    monkeypatch.setattr(answering, "_ANSWER_S", 0.5)
    with answering_with(b"\n".join([*bad, good, odd])), answering_with(b"x"), silent:
        assert {"g", "?[2J"} <= {waits.group for waits in groups_of()}
        monkeypatch.setattr(answering, "_ANSWER_BYTES", 1)
        assert not {"g", "?[2J"} & {waits.group for waits in groups_of(str(pid))}
    assert f"max-ep who: process {pid} does not answer" in capsys.readouterr().err


def test_other_users_neither_ask_nor_answer(monkeypatch):
    """But root; `test_strangers.py` has two users."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with answering_with(said(Waits("to others", []))) as name:
        with call(name, socket.SOCK_STREAM) as line:
            line.settimeout(5)
            assert line.recv(100) == b""
        assert "to others" not in [waits.group for waits in groups_of()]


def test_who_has_a_successor_is_not_shown(monkeypatch):
    """Whoever answers last: not all have mapped the successor's memory."""
    dead = waits_of([1], [])
    dead.ranks[1].process, dead.ranks[1].pid = "process 7 is dead", 7
    well = waits_of([1], [])
    for order in ([dead, well], [well, dead]):
        monkeypatch.setattr(who, "answers", lambda x=order: [(7, x)])
        (found,) = groups_of()
        assert [wait.process for wait in found.ranks] == ["", ""]


def test_nobody_waits_for_a_masked_rank():
    """The mask of rank 1 stands there in any case; only groups that mask read it."""
    assert look(0, "dispatch_wait", {}).missing == [0, 1, 2]
    assert look(0, "dispatch_wait", {}, protocol=2 + 8).missing == [0, 2]


def waits_of(*missing: list[int]) -> Waits:
    return Waits(
        "g", [RankWait(i, PHASES[1], 4, True, 1.0, m) for i, m in enumerate(missing)]
    )


@pytest.mark.parametrize(
    "missing, culprits, said",
    [
        ([[], [], []], [], "No rank waits for another."),
        # 0 waits for 1, which waits for 2: both are late because of 2.
        ([[1], [2], []], [2], "Rank 2 keeps others waiting: it is in dispatch_wait 4"),
        ([[2, 3], [2, 3], [], []], [2, 3], "Rank 2 keeps others waiting (and 3 too)"),
        ([[1], [0], [0, 1]], [], "Ranks 0-2 wait for each other"),
    ],
)
def test_culprit(missing, culprits, said):
    waits = waits_of(*missing)
    assert waits.culprits() == culprits
    assert waits.sentence().startswith(said)


def test_who_without_a_group(monkeypatch, run_cli):
    groups = [[], [Waits("g1", []), Waits("g2", [])]]
    monkeypatch.setattr(who, "groups_of", lambda target=None: groups[target is None])
    said = run_cli("who", "no-such-group", status=1)
    assert "no group of no-such-group found here; there are g1, g2." in said
