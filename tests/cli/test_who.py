# SPDX-License-Identifier: Apache-2.0
"""Tests who waits for whom, with words of memory that are written here, without ranks.
Where they are, Mojo says.

`test_processes.py` looks at processes that hang.
"""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from max_ep.cli import who
from max_ep.cli.who import groups_of
from max_ep.extension import region_sizes
from max_ep.memory import answering
from max_ep.memory.answering import answer_for
from max_ep.processes.messages import said
from max_ep.processes.sockets import Answering, call, listen
from max_ep.waits import RankWait, Waits, Words, cpu_wait, gpu_wait, named, place
from tests.errors import refused

# 3 ranks with 2, 2 and 1 experts.
N_RANKS, N_EXPERTS, N_LOCAL = 3, 5, 2
GROUP = f"g-{os.getpid()}"
"""Other runs of the tests on this machine answer, too."""
LAST = 6
"""The last generation of every phase."""
DISPATCH_DONE, COMBINE_DONE = "done word of dispatch", "done word of combine"


@functools.cache
def sizes_of(protocol: str = "by_rank", mode: str = "rows", *masks: str):
    """What Mojo says of a group of these ranks, which send 4 tokens to two experts."""
    names = "n_experts n_ranks max_tokens_per_rank top_k hidden_size value_bits"
    numbers = zip(f"{names} combine_bytes".split(), (5, 3, 4, 2, 16, 16, 2))
    return region_sizes(protocol, mode, *(f"{n}={i}" for n, i in numbers), *masks)


class Memory:
    """A rank's counters, and a region in which all flags are of generation `LAST`."""

    def __init__(self, sizes, kinds) -> None:
        self.sizes, self.kinds = sizes, kinds
        self.counters = np.zeros(sizes.counters_words, np.int32)
        self.region = np.zeros(sizes.region_bytes, np.uint8)
        self.region.view(np.uint64)[:] = LAST << 32 | LAST

    def __getitem__(self, name: str) -> int:
        return int(self.counters[getattr(self.sizes, f"{name}_word")])

    def __setitem__(self, name: str, numbers) -> None:
        """Sets words of the counters, the first of which has this name."""
        words = np.atleast_1d(numbers)
        first = getattr(self.sizes, f"{name}_word")
        self.counters[first : first + len(words)] = words

    def flag(self, name: str, peer: int, generation: int, i: int = 0, count=0) -> None:
        at = place(named(self.kinds, name), peer, i)
        self.region[at : at + 8].view(np.uint64)[0] = generation << 32 | count

    def words(self) -> Words:
        def reads(memory: np.ndarray):
            return lambda at, n_bytes: memory.tobytes()[at : at + n_bytes]

        return Words(reads(self.counters), reads(self.region))


def look(rank: int, phase: str, changed=(), masks=()) -> RankWait:
    """Looks at a CPU rank that is in a phase; some flags are of other generations."""
    sizes = sizes_of("by_rank", "rows", *masks)
    memory = Memory(sizes, sizes.cpu)
    for name, peer, i, generation in changed:
        memory.flag(name, peer, generation, i)
    if masks:
        memory["masked"] = 0, 1, 0
    memory["generations"] = [LAST] * 4
    memory["launch"] = 1 + sizes.phases.index(phase)
    memory["launch_since"] = np.array([10**9]).view(np.int32)
    return cpu_wait(sizes, rank, memory.words(), now_ns=4 * 10**9)


def arrived(name: str, n: int, but=()) -> list[tuple[str, int, int, int]]:
    """All of `n` words of each peer, but for some (peer, word)."""
    all_ = [(peer, i) for peer in range(N_RANKS) for i in range(n)]
    return [(name, *x, LAST + 1) for x in all_ if x not in but]


@pytest.mark.parametrize(
    "phase, rank, changed, missing",
    [
        ("dispatch_async", 0, [(DISPATCH_DONE, 1, 0, LAST - 1)], [1]),
        ("dispatch_async", 0, [], []),
        ("dispatch_wait", 0, [], [0, 1, 2]),
        ("dispatch_wait", 0, arrived("count", N_LOCAL, but=[(2, 1)]), [2]),
        # Rank 2 has one expert, and awaits nothing of the second.
        ("dispatch_wait", 2, arrived("count", 1), []),
        ("combine_async", 1, [(COMBINE_DONE, 2, 0, LAST - 1)], [2]),
        (
            "combine_wait",
            1,
            arrived("combine count", N_LOCAL, but=[(1, 1), (2, 1)]),
            [1],
        ),
        (
            "combine_wait",
            1,
            arrived("combine count", N_LOCAL, but=[(2, 0), (2, 1)]),
            [2],
        ),
    ],
)
def test_missing_ranks(phase, rank, changed, missing):
    wait = look(rank, phase, changed)
    assert (wait.phase, wait.generation, wait.missing) == (phase, LAST + 1, missing)
    assert wait.is_running and wait.since_s == 3


def gpu_memory(*group: str) -> Memory:
    """What rank 0 leaves in dispatch 7, once it has all counts. It sent 3 tokens, to
    experts 0 and 3, 4 and 1 (its own, so coded), 2 and none."""
    sizes = sizes_of(*group)
    memory = Memory(sizes, sizes.gpu)
    memory["generations"] = 7, 7, 6, 6
    memory["combine_of"] = 6
    memory["n_tokens"] = 0, 3
    memory["choices"] = [0] * 8 + [-2, 3, 4, -3, 2, -1]
    for peer in range(N_RANKS):
        for i in range(N_LOCAL):
            memory.flag("count", peer, 7, i)
        if group[0] == "by_rank":
            memory.flag("number of tokens", peer, 7, count=3)
    return memory


# Rank 2 has not read dispatch 6. Rows are awaited once combine 7 has begun; those of a
# later one have come. Of sums, who has begun its combine has read dispatch 7.
GPU_WAITS = """
by_rank rows: m.flag("count", 1, 6) | "dispatch_wait", 7, True, [1]
by_rank rows: m.flag("number of tokens", 2, 6) | "dispatch_wait", 7, True, [2]
by_expert rows: m.flag("count", 1, 0) | "dispatch_wait", 7, True, [1]
by_rank rows: m.flag("count", 0, 6); m.flag(DISPATCH_DONE, 2, 5) | \
"dispatch_async", 7, True, [2]
by_rank rows: 0 | "dispatch_wait", 7, False, []
by_rank rows: begin_combine(m) | "combine_wait", 7, True, [1, 2]
by_expert rows: begin_combine(m); send_row(m, 1, 1); send_row(m, 1, 4) | \
"combine_wait", 7, True, [2]
by_rank rows: begin_combine(m); send_row(m, 1, 1); send_row(m, 2, 2) | \
"combine_wait", 7, True, [1]
by_rank rows: begin_combine(m); [send_row(m, 1, i, 8) for i in (1, 2, 4)] | \
"combine_wait", 7, False, []
by_rank rows: begin_combine(m); m.flag(DISPATCH_DONE, 1, 7, count=5) | \
"combine_async", 7, True, [1]
by_rank sums: 0 | "dispatch_wait", 7, False, []
by_rank sums: begin_combine(m, 0, 1) | "combine_wait", 7, True, [2]
by_rank sums: begin_combine(m); m.flag(DISPATCH_DONE, 1, 7, count=5) | \
"combine_async", 7, True, [1]
by_rank rows masks: begin_combine(m); m["masked"] = 0, 1, 0 | \
"combine_wait", 7, True, [2]
by_rank rows: m["generations"] = [0] * 4; m["combine_of"] = 0; m.region[:] = 0 | \
"", 0, False, []
"""


def send_row(memory: Memory, peer: int, choice: int, generation: int = 7) -> None:
    memory.flag("row", peer, generation, choice)


def begin_combine(memory: Memory, *begun: int) -> None:
    """Begins combine 7 on this rank; some ranks have said that they have, too."""
    memory["generations"] = [7] * 4
    memory["combine_of"] = 7
    for peer in begun:
        memory.flag(DISPATCH_DONE, peer, 7, count=6)


@refused(GPU_WAITS)
def test_gpu_ranks(arguments, words):
    group, steps = arguments.split(": ")
    memory = gpu_memory(*group.split())
    exec(steps, globals() | {"m": memory})
    wait = gpu_wait(memory.sizes, 0, memory.words())
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
    deadline = time.monotonic() + 60
    while not (found := groups_of(GROUP)) and time.monotonic() < deadline:
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
    with answering_with(b"\n".join([*bad, good, odd])), answering_with(b"x"), silent:
        for limit_s in (0.5, 5.0, 50.0):  # on a busy machine answers take longer
            monkeypatch.setattr(answering, "_ANSWER_S", limit_s)
            if right := {GROUP, "?[2J"} <= {waits.group for waits in groups_of()}:
                break
        assert right
        monkeypatch.setattr(answering, "_ANSWER_BYTES", 1)
        assert not {GROUP, "?[2J"} & {waits.group for waits in groups_of(str(pid))}
    assert f"max-ep who: process {pid} does not answer" in capsys.readouterr().err


def test_other_users_neither_ask_nor_answer(monkeypatch):
    """But root; `test_strangers.py` has two users."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with answering_with(said(Waits("to others", []))) as name:
        with call(name, socket.SOCK_STREAM) as line:
            line.settimeout(60)
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
    assert look(0, "dispatch_wait").missing == [0, 1, 2]
    assert look(0, "dispatch_wait", masks=["masks"]).missing == [0, 2]


def waits_of(*missing: list[int]) -> Waits:
    return Waits(
        GROUP,
        [RankWait(i, "dispatch_wait", 4, True, 1.0, m) for i, m in enumerate(missing)],
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
