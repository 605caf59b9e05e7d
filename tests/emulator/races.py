# SPDX-License-Identifier: Apache-2.0
"""Finds races of emulated threads, whatever order they happen to run in.

Two accesses to a word, not both ordered ones, must be in an order that barriers, or a
release and the acquire that reads it, make. Each thread has a clock for each other one:
how far that was, when what it did then was last made visible to this one.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from .memory import SIZES, Memory

ORDERS = ("nc", "relaxed", "acquire", "release", "acq_rel")
SCOPES = ("cta", "gpu", "sys")


class Race(Exception):
    """Two accesses that nothing orders."""


NOBODY: dict[int, int] = {}
"""Is not written to."""


class Word:
    """Accesses to a word (by whom, when) since an ordinary store has written it."""

    __slots__ = "writer written reads loads stores observers launch releases".split()
    __slots__ += "is_watched", "has_one_writer"

    def __init__(self, is_watched: bool = True, has_one_writer: bool = True) -> None:
        """`is_watched`: not a word that lanes read without using it. `has_one_writer`:
        only one thread may write it at a time."""
        self.is_watched, self.has_one_writer = is_watched, has_one_writer
        self.releases: tuple[tuple[Thread, str, array], ...] = ()
        """Releases of what is there: the thread, its scope, and its clocks."""
        self.write(-1, 0)

    def write(self, writer: int, written: int) -> None:
        self.writer, self.written = writer, written
        self.reads = self.loads = self.stores = self.observers = NOBODY
        """`loads` and `stores` are ordered; `observers` have loaded the last store."""
        self.launch = 0
        """That of the observers; the next one polls for what is stored next."""


class Words(defaultdict):
    """Words by their numbers. `changes` counts stores into each 16 bytes."""

    def __init__(self) -> None:
        super().__init__(Word)
        self.changes: dict[int, int] = defaultdict(int)


class Thread:
    """A thread of a launch; the next launch of the rank has the same ones."""

    __slots__ = "number rank block now seen launch polled".split()

    def __init__(self, number: int, rank: int, block: int, n_threads: int) -> None:
        self.number, self.rank, self.block = number, rank, block
        self.now, self.seen = 1, array("I", [0]) * n_threads
        self.launch = 0
        self.polled: set[int] = set()
        """Addresses that it has loaded as what other ranks store."""

    def clocks(self) -> array:
        """Copies what it has seen, and goes on."""
        found = self.seen[:]
        found[self.number] = self.now
        self.now += 1
        return found

    def hear(self, other: Thread, clocks: array) -> None:
        if self.seen[other.number] < clocks[other.number]:
            joined = np.maximum(np.asarray(self.seen), np.asarray(clocks))
            self.seen = array("I", joined.tobytes())

    def check(self, at: int, what: str, others: Iterable[tuple[int, int]]) -> None:
        for other, when in others:
            if other != self.number and self.seen[other] < when:
                raise Race(f"thread {self.number} {what} {at:#x}; {other} was there")

    def is_in(self, scope: str, other: Thread) -> bool:
        """Returns whether another thread is in a scope around this one."""
        if self.rank != other.rank:
            return scope == "sys"
        return scope != "cta" or self.block == other.block


def meet(threads: list[Thread]) -> None:
    """Each has then seen what the others have done."""
    seen = list({id(x.seen): x.seen for x in threads}.values())
    joined = seen[0][:]
    if len(seen) > 1:
        joined = array("I", np.maximum.reduce([np.asarray(x) for x in seen]).tobytes())
    for thread in threads:
        joined[thread.number] = thread.now
        thread.now += 1
    for thread in threads:
        thread.seen = joined


def _load(n_bytes: int) -> Callable[[Watched, int], int]:
    """Makes the method of ordinary loads of so many bytes."""
    offsets = (0, 1)[: 1 + n_bytes // 8]

    def load(self: Watched, at: int) -> int:
        thread, words = self.thread, self.words
        for i in offsets:
            word = words[(at >> 2) + i]
            if word.is_watched:
                if thread.seen[word.writer] < word.written:
                    thread.check(at, "reads", [(word.writer, word.written)])
                if word.stores:
                    thread.check(at, "reads", word.stores.items())
                if word.reads is NOBODY:
                    word.reads = {}
                word.reads[thread.number] = thread.now
        return self.unordered.loads[n_bytes](at)

    return load


def _store(n_bytes: int) -> Callable[[Watched, int, int], None]:
    """Makes the method of ordinary stores of so many bytes."""
    offsets, mask = (0, 1)[: 1 + n_bytes // 8], (1 << 8 * n_bytes) - 1

    def store(self: Watched, at: int, value: int) -> None:
        thread, words, memory = self.thread, self.words, self.unordered
        if self.lets_equal and memory.loads[n_bytes](at) == value & mask:
            return
        number = thread.number
        for i in offsets:
            word = words[(at >> 2) + i]
            if word.has_one_writer:
                if thread.seen[word.writer] < word.written:
                    thread.check(at, "writes", [(word.writer, word.written)])
                for others in (word.reads, word.loads):
                    if others:
                        thread.check(at, "writes", others.items())
                if word.stores and number not in word.observers:
                    thread.check(at, "writes", word.stores.items())
                word.write(number, thread.now)
        words.changes[at >> 4] += 1
        memory.stores[n_bytes](at, value)

    return store


class Watched:
    """Memory as a thread sees it."""

    __slots__ = "thread", "words", "unordered", "lets_equal", "polls"
    load_1, load_2, load_4, load_8 = map(_load, SIZES)
    store_1, store_2, store_4, store_8 = map(_store, SIZES)

    def __init__(
        self,
        thread: Thread,
        memory: Memory,
        words: Words,
        lets_equal: bool,
    ) -> None:
        self.thread, self.words, self.unordered = thread, words, memory
        self.lets_equal = lets_equal
        self.polls: dict[int, tuple] = {}
        """For addresses, the last poll: another one like it, if nothing was stored
        since and the thread has not gone on, finds what this one has found."""

    def poll(self, at: int, n_bytes: int, order: str, scope: str) -> None:
        """Is called at each ordered load."""
        thread, words = self.thread, self.words
        number, now, launch = thread.number, thread.now, thread.launch
        poll = words.changes[at >> 4], now, n_bytes, order, scope
        if self.polls.get(at) == poll:
            return
        self.polls[at] = poll
        if scope == "sys":
            thread.polled.add(at)
        for place in range(at >> 2, at + n_bytes + 3 >> 2):
            word = words[place]
            if not word.is_watched:
                break
            if thread.seen[word.writer] < word.written:
                thread.check(at, order, [(word.writer, word.written)])
            if order == "nc" and (word.writer >= 0 or word.stores):
                raise Race(f"{at:#x} is read as a constant, and was written")
            if word.stores and (not word.launch or word.launch == launch):
                word.launch = launch
                if word.observers is NOBODY:
                    word.observers = {}
                word.observers.setdefault(number, now)
            if word.loads is NOBODY:
                word.loads = {}
            word.loads[number] = now
        if order == "acquire":
            self._acquire(words[at >> 2], scope)

    def _acquire(self, word: Word, scope: str) -> None:
        thread = self.thread
        for there, scope_there, clocks in word.releases:
            if thread.is_in(scope, there) and there.is_in(scope_there, thread):
                thread.hear(there, clocks)

    def order(
        self,
        at: int,
        n_bytes: int,
        how: str,
        order: str,
        scope: str,
        stored: int | None,
    ) -> None:
        """Is called at each other ordered access; some say what is stored."""
        thread = self.thread
        if self.lets_equal and stored is not None and order == "relaxed":
            loads = self.unordered.loads
            there = [loads[min(n_bytes, 8)](at + i) for i in range(0, n_bytes, 8)]
            if sum(x << 64 * i for i, x in enumerate(there)) == stored:
                return
        for place in range(at >> 2, at + n_bytes + 3 >> 2):
            word = self.words[place]
            if not word.is_watched:
                break
            if thread.seen[word.writer] < word.written:
                thread.check(at, order, [(word.writer, word.written)])
            if word.reads:
                thread.check(at, order, word.reads.items())
            if how == "st" and order == "relaxed" and word.observers:
                # Data: what was stored before must have been read.
                thread.check(at, order, word.observers.items())
            word.observers, word.launch = NOBODY, 0
            if word.stores is NOBODY:
                word.stores = {}
            word.stores[thread.number] = thread.now
        self.words.changes[at >> 4] += 1
        word = self.words[at >> 2]
        if how == "st":
            word.releases = ()
        elif order in ("acquire", "acq_rel"):
            self._acquire(word, scope)
        if order in ("release", "acq_rel"):
            word.releases += ((thread, scope, thread.clocks()),)


class Races:
    """Watches the launches of a group, all of one size; those of a rank follow each
    other. `unwatched`: addresses of words that are read without being used.
    `lets_equal`: what stores the value that is there changes nothing."""

    def __init__(
        self,
        n_ranks: int,
        n_blocks: int,
        n_threads: int,
        unwatched: Iterable[int] = (),
        lets_equal: bool = False,
        n_more: int = 0,
        unread: Iterable[int] = (),
    ) -> None:
        n = n_blocks * n_threads
        n_all = n_ranks * n + n_more  # with those that carry puts
        self.threads = [
            [Thread(rank * n + i, rank, i // n_threads, n_all) for i in range(n)]
            for rank in range(n_ranks)
        ]
        self.words = Words()
        self.words |= {at >> 2: Word(False, False) for at in unwatched}
        self.words |= {at >> 2: Word(False) for at in unread}
        self.lets_equal = lets_equal

    def begin(self, rank: int) -> list[Thread]:
        """Begins a launch: it sees all that those before it have done."""
        meet(self.threads[rank])
        for thread in self.threads[rank]:
            thread.launch += 1
        return self.threads[rank]

    def memories(self, threads: list[Thread], memory: Memory, shared: Memory) -> list:
        """What the threads of a block see."""
        words = Words()
        return [
            (
                Watched(x, memory, self.words, self.lets_equal),
                Watched(x, shared, words, self.lets_equal),
            )
            for x in threads
        ]
