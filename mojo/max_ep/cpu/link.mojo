# SPDX-License-Identifier: Apache-2.0
"""The link of CPU ranks to ranks of other hosts: put, signal and fence, nothing else.

A rank appends what it asks for to a queue in its own memory; a thread of its process
carries it out (`max_ep/memory/link.py`): late, in any order, a put in pieces of at least
8 bytes. What a fence separates comes in order, for each rank.
"""
from std.time import sleep

from ..protocol.counters import Counters, Word
from ..protocol.flags import (
    Deadline,
    FlagPointer,
    load_acquire_sys,
    publish_word,
    SLEEP_SECONDS,
)
from ..protocol.kernel_argument import MutPointer
from ..protocol.token_format import BytePointer


struct Queue:
    """Kinds of requests, and the places of words of 8 bytes; Python asks for them."""

    comptime PUT = 0
    comptime SIGNAL = 1
    comptime FENCE = 2
    comptime N_KINDS = 256

    comptime ROOM = 0
    """How many requests there is room for."""
    comptime APPENDED = 1
    """How many were appended."""
    comptime CARRIED = 2
    """How many were carried out."""
    comptime FIRST = 8
    """The first request: kind + rank * `N_KINDS`; the place, as it is in this rank's own
    region; for a put where it reads and how many bytes, for a signal the word."""
    comptime REQUEST_WORDS = 8


@fieldwise_init
struct Link(TrivialRegisterPassable):
    """A rank's end of the link; one thread at a time uses it."""

    var queue: MutPointer[UInt64]

    @staticmethod
    def of(counters: Counters[...]) -> Self:
        var at = counters.at(Word.LINK).unsafe_bitcast[UInt64]()[]
        return Self(MutPointer[UInt64](unsafe_from_address=Int(at)))

    def put(
        self,
        rank: Int,
        to: BytePointer,
        from_: BytePointer,
        n_bytes: Int,
        end: Deadline,
    ) raises:
        """Asks for bytes to be put. They are read later: they may change once the peer
        has said that it has read them."""
        if n_bytes > 0:
            self._append(Queue.PUT, rank, Int(to), Int(from_), n_bytes, end)

    def signal(self, rank: Int, to: FlagPointer, word: UInt64, end: Deadline) raises:
        self._append(Queue.SIGNAL, rank, Int(to), Int(word), 0, end)

    def fence(self, end: Deadline) raises:
        """Has what is asked for from now on come after all that was asked for."""
        self._append(Queue.FENCE, 0, 0, 0, 0, end)

    def _append(
        self, kind: Int, rank: Int, to: Int, what: Int, n_bytes: Int, end: Deadline
    ) raises:
        var room = self.queue[unsafe_offset=Queue.ROOM]
        var n = self.queue[unsafe_offset=Queue.APPENDED]
        while n - load_acquire_sys(self.queue.unsafe_offset(Queue.CARRIED)) >= room:
            if end.has_passed():
                raise Error(
                    t"max_ep: the link to rank {rank} has not carried {room} requests"
                    t" in time; the thread of this process that carries them has ended."
                )
            sleep(SLEEP_SECONDS)
        var at = self.queue.unsafe_offset(
            Queue.FIRST + Int(n % room) * Queue.REQUEST_WORDS
        )
        at[unsafe_offset=0] = UInt64(kind + rank * Queue.N_KINDS)
        at[unsafe_offset=1] = UInt64(to)
        at[unsafe_offset=2] = UInt64(what)
        at[unsafe_offset=3] = UInt64(n_bytes)
        publish_word(self.queue.unsafe_offset(Queue.APPENDED), n + 1)
