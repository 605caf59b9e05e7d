# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's calls of emulated kernels, over a network that keeps no more than it says.

A put is carried late, in pieces of whole words of 8 bytes, which come in any order. A
signal comes after its own put. What is put must not change before it has been carried.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from .memory import Memory
from .races import Race, Races, Thread, Watched

_CALL = re.compile(
    r"\{ // callseq \d+, \d+\n(.*?)call\.uni (?:\(retval0\), )?(\w+), \((.*?)\);"
    r"(.*?)\} // callseq \d+",
    re.S,
)
_SIGNAL_SET = 9
_WORD_BYTES = 8
_IDLE_SHARE = 0.8
"""Share of rounds in which nothing is carried."""
_N_SLOTS = 64
"""Puts of a rank whose order is told apart."""


def with_calls(text: str) -> str:
    """Makes one operation of each call, `link.NAME result, arguments`."""

    def joined(found: re.Match) -> str:
        before, name, _, after = found.groups()
        stores = dict(re.findall(r"st\.param\S* \t?\[param(\d+)\], (\S+);", before))
        of = [stores[str(i)] for i in range(len(stores))]
        of = re.findall(r"ld\.param\S* \t?(\S+), \[retval0\]", after) + of
        lines = "".join(re.findall(r"\s*\.loc[^\n]*\n", before)[-1:])
        return f"{lines}\tlink.{name} {', '.join(of)};"

    return _CALL.sub(joined, text)


def statements(place: int, name: str, of: Sequence[str]) -> list[str]:
    """Translates a call. Of one by a warp each lane reads a part; that all take part
    orders nothing."""
    if name == "nvshmem_ptr":
        return [f"{of[0]} = block.link.mapped({of[1]}, {of[2]})"]
    if name == "nvshmemx_signal_op":
        to, word, how, rank = of
        return [f"block.link.signal(mem, {to}, {word}, {how}, {rank})"]
    assert name in ("nvshmemx_putmem_nbi_warp", "nvshmemx_putmem_signal_nbi_warp"), name
    return [
        f"_ = yield ('vote.ballot {place}', True)",
        f"block.link.read(mem, tid & 31, {of[1]}, {of[2]})",
        f"_ = yield ('vote.ballot {place}', True)",
        f"if tid & 31 == 0: block.link.put(mem, {', '.join(of)})",
    ]


@dataclass
class _Put:
    """What is under way."""

    pieces: list[tuple[int, int, bytes]]
    """Where to, where from, and what was there when the put began."""
    signal: tuple[int, int] | None
    carrier: Thread | None
    """As which its stores are watched; it has seen what the caller had."""
    released: array | None
    """What a reader of the signal has then seen."""


class Link:
    """The link of all ranks of a group."""

    is_nvlink = False
    """Whether the memory of other hosts is mapped, too, though ranks put to them."""

    def __init__(
        self, regions: Sequence[int], region_bytes: int, n_mapped: int, seed: int
    ) -> None:
        self.regions, self.region_bytes = list(regions), region_bytes
        self.n_mapped, self._random = n_mapped, random.Random(seed)
        self._pending: list[_Put] = []
        self._n_puts = 0
        self._fenced: dict[int, array] = {}
        self.found: Races | None = None

    def seed(self, seed: int) -> None:
        self._random.seed(seed)

    def of_rank(self, rank: int) -> End:
        return End(self, rank)

    @property
    def n_more(self) -> int:
        """Numbers of threads that the link needs."""
        return _N_SLOTS * len(self.regions)

    def begin(self, rank: int, thread: Thread | None, clocks: array | None, put: _Put):
        if thread is not None:
            slot = self._n_puts % _N_SLOTS + rank * _N_SLOTS
            number = len(thread.seen) - self.n_more + slot
            put.carrier = Thread(number, rank, -1, 0)
            put.carrier.seen = thread.seen[:]
            put.carrier.seen[thread.number] = thread.now
            put.carrier.now = self._n_puts // _N_SLOTS + 1
            released = clocks[:] if clocks else array("I", [0]) * len(thread.seen)
            released[number] = put.carrier.now
            put.released = released
            thread.now += 1
        self._n_puts += 1
        self._pending.append(put)

    def carry(self, memory: Memory) -> bool:
        """Carries some pieces; returns whether there were any."""
        was_there = bool(self._pending)
        if self._random.random() < _IDLE_SHARE:
            return was_there
        for _ in range(self._random.randrange(12)):
            if self._pending:
                self._carry_one(memory, self._random.randrange(len(self._pending)))
        return was_there

    def drain(self, memory: Memory) -> None:
        while self._pending:
            self.carry(memory)

    def _carry_one(self, memory: Memory, i: int) -> None:
        put = self._pending[i]
        watched = None
        if put.carrier is not None and self.found is not None:
            watched = Watched(put.carrier, memory, self.found.words, False)
        if put.pieces:
            to, from_, was = put.pieces.pop()
            if memory.bytes[from_ : from_ + len(was)] != was:
                raise Race(f"what is put from {from_:#x} has changed")
            for at in range(0, len(was), _WORD_BYTES):
                word = int.from_bytes(was[at : at + _WORD_BYTES], "little")
                if watched is None:
                    memory.store_8(to + at, word)
                elif put.signal is None:  # words that announce themselves
                    watched.order(to + at, 8, "st", "relaxed", "sys", None)
                    memory.store_8(to + at, word)
                else:
                    watched.store_8(to + at, word)
        elif put.signal is not None:
            to, word = put.signal
            if watched is not None:
                watched.order(to, 8, "st", "release", "sys", None)
                of = self.found.words[to >> 2]
                of.releases = ((put.carrier, "sys", put.released),)
            memory.store_8(to, word)
            put.signal = None
        if not put.pieces and put.signal is None:
            del self._pending[i]


class End:
    """A rank's end of the link, which its kernels call."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link, self._rank = link, rank

    def mapped(self, at: int, rank: int) -> int:
        link = self._link
        is_far = rank // link.n_mapped != self._rank // link.n_mapped
        if is_far and not link.is_nvlink:
            return 0
        return self._there(at, rank)

    def _there(self, at: int, rank: int) -> int:
        offset = at - self._link.regions[self._rank]
        if not 0 <= offset < self._link.region_bytes:
            raise IndexError(f"{at:#x} is not in the region of rank {self._rank}")
        return self._link.regions[rank] + offset

    def fence(self, memory: Memory | Watched) -> None:
        if isinstance(memory, Watched):
            thread = memory.thread
            self._link._fenced[thread.number] = thread.clocks()

    def signal(self, memory, to: int, word: int, how: int, rank: int) -> None:
        """Begins a signal, after which comes what the last fence has ordered."""
        assert how == _SIGNAL_SET
        thread = getattr(memory, "thread", None)
        clocks = self._link._fenced.get(thread.number) if thread else None
        put = _Put([], (self._there(to, rank), word), None, None)
        self._link.begin(self._rank, thread, clocks, put)

    def read(self, memory, lane: int, from_: int, n_bytes: int) -> None:
        """Reads a lane's words of what is put."""
        for at in range(from_ + lane * _WORD_BYTES, from_ + n_bytes, 32 * _WORD_BYTES):
            memory.load_8(at)

    def put(self, memory, to: int, from_: int, n_bytes: int, *more: int) -> None:
        """Begins a put; the rank comes last, and before it a signal may stand."""
        *signal, rank = more
        rank &= 0xFFFF_FFFF
        assert not (to | from_ | n_bytes) % _WORD_BYTES and n_bytes > 0
        self._there(from_ + n_bytes - 1, self._rank)
        self._there(to + n_bytes - 1, self._rank)
        bytes_ = getattr(memory, "unordered", memory).bytes
        random_ = self._link._random
        n_words = n_bytes // _WORD_BYTES
        cuts = sorted(random_.sample(range(1, n_words), min(n_words - 1, 3)))
        pieces = []
        for a, b in zip([0, *cuts], [*cuts, n_words]):
            a, b = a * _WORD_BYTES, b * _WORD_BYTES
            piece = bytes(bytes_[from_ + a : from_ + b])
            pieces.append((self._there(to, rank) + a, from_ + a, piece))
        random_.shuffle(pieces)
        put = _Put(pieces, None, None, None)
        if signal:
            flag, word, how = signal
            assert how == _SIGNAL_SET
            put.signal = self._there(flag, rank), word
        self._link.begin(self._rank, getattr(memory, "thread", None), None, put)
