# SPDX-License-Identifier: Apache-2.0
"""Warps and blocks of the emulator, and launches of several ranks at once."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from . import numbers
from .hopper import Hopper, TensorMap, mma
from .link import Link
from .memory import Clock, Memory
from .races import Races, Thread, meet
from .translation import M32, POLLS, Translation
from .trials import Trials

WARP = 32
IDLE_ROUNDS = 600
"""Rounds in which all that run only poll, after which a launch hangs."""
IDLE_ROUNDS_FOR_EVER = 40
"""The same, where no deadline ends a wait; some poll a few times only, and go on."""
NS_OF_IDLE_ROUND = 1_000_000
SLOW_SHARE = 0.2
"""Share of warps that run far more seldom than the others, so that races show."""
SLOW_TURNS = 0.05
LATE_SHARE = 0.3
"""How often half of its lanes are late."""


def exchanged(name: str, given: list) -> list:
    """Returns what each lane gets of an exchange of a whole warp."""
    what = name.rpartition(" ")[0]
    if name == "meet":
        return [None] * WARP
    if what.startswith("lane."):
        return [given[int(what[5:])]] * WARP
    if what == "several":
        names = given[0][0]
        columns = zip(*(values for _, values in given))
        return [*zip(*map(exchanged, names, columns))]
    if what == "mma":
        return mma(given)
    if what.startswith("shfl"):
        found = []
        for lane, (value, by, clamp) in enumerate(given):
            segment = clamp >> 8 & 31
            first = lane & segment
            if what == "shfl.up":
                source, is_there = lane - by, lane - by >= first
            else:
                last = first | clamp & 31 & ~segment
                source = lane ^ by
                if what == "shfl.idx":
                    source = first | by & ~segment & 31
                is_there = source <= last
            found.append(given[source][0] if is_there else value)
        return found
    if what == "vote.ballot":
        return [sum([bool(x) << i for i, x in enumerate(given)])] * WARP
    if what == "match.any":
        return [sum((x == y) << i for i, x in enumerate(given)) for y in given]
    if what == "redux.add":
        return [sum(given) & M32] * WARP
    if what == "redux.or":
        total = 0
        for x in given:
            total |= x
        return [total] * WARP
    if what == "redux.max":
        return [max(x ^ 1 << 31 for x in given) ^ 1 << 31] * WARP
    raise NotImplementedError(what)


@dataclass
class Warp:
    threads: list[Generator]
    block: Block
    requests: list = field(default_factory=lambda: [None] * WARP)
    answers: list = field(default_factory=lambda: [None] * WARP)
    n_waiting: int = 0
    """How many requests there are."""
    n_left: int = 0
    is_slow: bool = False
    watched: list[Thread] = field(default_factory=list)

    def turn(self, late: int) -> bool:
        """Runs each lane that is not late to where it waits, or has published; returns
        whether any did more than poll."""
        is_busy = False
        requests, answers = self.requests, self.answers
        for lane, thread in enumerate(self.threads):
            if requests[lane] is not None or thread is None:
                continue
            if late and late >> lane & 1:
                continue
            try:
                request = thread.send(answers[lane])
            except StopIteration:
                self.threads[lane] = None
                self.n_left += 1
                is_busy = True
                continue
            answers[lane] = None
            if request is POLLS:
                continue
            is_busy = True
            if request:
                requests[lane] = request
                self.n_waiting += 1
                if request[0] == "barrier":
                    self.block.arrive(self, lane, request)
        return self._exchange() or is_busy

    def _exchange(self) -> bool:
        requests = self.requests
        kinds = {x[0] for x in requests} if self.n_waiting == WARP else {"barrier"}
        if "barrier" in kinds:
            self._check_left()
            return False
        if len(kinds) > 1:
            raise RuntimeError(f"lanes take part in different exchanges: {kinds}")
        (name,) = kinds
        if name.startswith("wgmma"):
            return self.block.join(self)
        if name == "meet" and self.watched:
            meet(self.watched)
        self.answer(exchanged(name, [x[1] for x in requests]))
        return True

    def answer(self, answers: list) -> None:
        self.answers, self.requests, self.n_waiting = answers, [None] * WARP, 0

    def _check_left(self) -> None:
        if not self.n_left:
            return
        waits = {x[0] for x in self.requests if x is not None} - {"barrier"}
        if waits and self.n_left + sum(x is not None for x in self.requests) == len(
            self.threads
        ):
            raise RuntimeError(f"lanes wait in {waits} for lanes that have left")


@dataclass
class Block:
    hopper: Hopper
    warps: list[Warp] = field(default_factory=list)
    cluster: list[Block] = field(default_factory=list)
    arrived: dict[int | str, list] = field(default_factory=dict)

    def arrive(self, warp: Warp, lane: int, request: tuple) -> None:
        _, which, n_wanted = request
        of = self
        if which == "cluster":
            of, n_wanted = (
                self.cluster[0],
                sum(WARP * len(x.warps) for x in self.cluster),
            )
        there = of.arrived.setdefault(which, [])
        there.append((warp, lane))
        if len(there) == n_wanted:
            of.arrived[which] = []
            if warp.watched:
                meet([other.watched[of_lane] for other, of_lane in there])
            for other, of_lane in there:
                other.requests[of_lane] = None
                other.n_waiting -= 1

    def join(self, warp: Warp) -> bool:
        """Runs a `wgmma` when all four warps of a warpgroup are there."""
        group = self.warps.index(warp) // 4
        warps = self.warps[4 * group : 4 * group + 4]
        if any(x.n_waiting < WARP for x in warps):
            return False
        requests = [request for x in warps for request in x.requests]
        names = {x[0] for x in requests}
        if len(names) > 1:
            return False
        shape = names.pop().rpartition(" ")[0]
        found = self.hopper.multiply(group, shape, [x[1] for x in requests])
        for i, x in enumerate(warps):
            x.answer(found[WARP * i : WARP * i + WARP])
        return True


@dataclass
class Launch:
    """A grid of a kernel that a rank runs."""

    kernel: Emulated
    params: list[bytes]
    n_blocks: int = 1
    n_threads: int = 32
    maps: list[TensorMap | None] = field(default_factory=list)


class Params(dict):
    """Numbers in parameters, by the parameter and by where a number begins and ends."""

    def __init__(self, given: Sequence[bytes]) -> None:
        self._given = given

    def __missing__(self, key: tuple[int, int, int]) -> int:
        which, begin, end = key
        self[key] = int.from_bytes(self._given[which][begin:end], "little")
        return self[key]


class Emulated:
    """A kernel that can be launched."""

    def __init__(self, text: str, trials: Trials | None = None) -> None:
        self._translation = Translation(text)
        names = dict(vars(numbers))
        if trials:
            names |= dict(is_open=trials.is_open, begins=trials.begins)
            self._translation.trials = trials.of(self._translation.kernel)
        exec(compile(self._translation.program(), "kernel", "exec"), names)
        self._thread: Callable[..., Generator] = names["thread"]

    def warps(
        self,
        launch: Launch,
        memory: Memory,
        clock: Clock,
        rank: int,
        found: Races | None,
        link: Link | None = None,
    ) -> list[Warp]:
        blocks: list[Block] = []
        watched = found.begin(rank) if found else []
        params = Params(launch.params)
        for block_idx in range(launch.n_blocks):
            shared = Memory(1 << 18, gap=16)
            for begin, n_bytes in self._translation.shared.values():
                shared.open(begin, n_bytes)
            block = Block(Hopper(memory, shared, launch.maps))
            block.hopper.link = link and link.of_rank(rank)
            of_block = watched[block_idx * launch.n_threads :][: launch.n_threads]
            seen = [(memory, shared)] * launch.n_threads
            if found:
                seen = found.memories(of_block, memory, shared)
            threads = [
                self._thread(
                    *(tid, block_idx, launch.n_threads, launch.n_blocks),
                    *(params, *seen[tid], clock, block.hopper),
                )
                for tid in range(launch.n_threads)
            ]
            for first in range(0, launch.n_threads, WARP):
                warp = Warp(threads[first : first + WARP], block)
                warp.watched = of_block[first : first + WARP]
                block.warps.append(warp)
            blocks.append(block)
        n = 2 if self._translation.is_cluster else 1
        for i, block in enumerate(blocks):
            block.cluster = blocks[i // n * n : i // n * n + n]
            block.hopper.cluster = [x.hopper for x in block.cluster]
        return [warp for block in blocks for warp in block.warps]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """There are many small objects, and no garbage in circles before the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@without_collector()
def run(
    queues: Iterable[Sequence[Launch | Callable[[], None]]],
    memory: Memory,
    clock: Clock,
    seed: int = 0,
    is_even: bool = False,
    found: Races | None = None,
    idle_rounds: int = IDLE_ROUNDS,
    link: Link | None = None,
) -> None:
    """Runs launches of all ranks at once, those of a queue one after another, and warps
    in an order that is drawn. A queue may have functions of the host. `is_even`: no
    warp is slow, and no lane late."""
    random_ = random.Random(seed)
    waiting = [list(queue) for queue in queues]
    running: list[list[Warp]] = [[] for _ in waiting]
    slow_share, late_share = (0, 0) if is_even else (SLOW_SHARE, LATE_SHARE)
    n_idle = 0
    while any(running) or any(waiting):
        for i, queue in enumerate(waiting):
            while queue and not running[i]:
                if isinstance(launch := queue.pop(0), Launch):
                    given = launch, memory, clock, i, found, link
                    running[i] = launch.kernel.warps(*given)
                    for warp in running[i]:
                        warp.is_slow = random_.random() < slow_share
                else:
                    launch()
        warps = [warp for of_queue in running for warp in of_queue]
        random_.shuffle(warps)
        is_busy = link is not None and link.carry(memory)
        for warp in warps:
            late = 0
            if not n_idle:  # When all poll, a slow or late one may go on.
                if warp.is_slow and random_.random() > SLOW_TURNS:
                    continue
                if random_.random() < late_share:
                    late = random_.getrandbits(WARP)
            for _ in range(random_.randrange(1, 9)):
                if not warp.turn(late):
                    break
                is_busy = True
        running = [[w for w in x if w.n_left < len(w.threads)] for x in running]
        n_idle = 0 if is_busy else n_idle + 1
        clock.ns += 1000 if is_busy else NS_OF_IDLE_ROUND
        if n_idle > idle_rounds:
            raise RuntimeError("the launches do not end")
    if link is not None:
        link.drain(memory)
