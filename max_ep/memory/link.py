# SPDX-License-Identifier: Apache-2.0
"""Carries what CPU ranks ask for to ranks of other hosts, as badly as a network may.

Tests set :data:`max_ep.limits.LINK_VARIABLE`: processes of one machine then stand for
several hosts. A rank gets no address of another host's memory. It appends requests to a
queue (``mojo/max_ep/cpu/link.mojo``). A thread of its process carries them out in an
order drawn from a seed: late, and a put in pieces of at least 8 bytes, which are read
when they are carried. A signal is one word. Only a fence orders, for each receiver.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_N_REQUESTS = 1 << 12
_WORD_BYTES = 8
_MOST_PIECES = 4
_IDLE_S = 50e-6
_LATE_SHARE, _LATE_S = 0.02, 1e-3
_CLOSING_S = 10.0


@dataclass
class _Request:
    """What is not carried yet."""

    epoch: int
    """How many fences its rank had asked for before."""
    pieces: list[tuple[int, int, int]]
    """To, from, bytes; of a signal to, the word, and 0."""


class Link:
    """What one process carries for its ranks, with a thread."""

    def __init__(
        self,
        local_ranks: Sequence[int],
        regions: Sequence[int],
        seed: int,
        sizes: Any,
        keeps_fences: bool = True,
    ) -> None:
        """Begins to carry. ``regions`` are those of all ranks, as this process maps
        them; ``sizes`` are the group's, which say how queues are laid out. Tests of
        tests have a link that keeps no fences."""
        self._regions, self._keeps_fences = list(regions), keeps_fences
        self._words = sizes
        n_words = sizes.link_first + _N_REQUESTS * sizes.link_request_words
        self._queues = {rank: (ctypes.c_uint64 * n_words)() for rank in local_ranks}
        self._epochs: dict[int, int] = defaultdict(int)
        self._pending: dict[tuple[int, int], list[_Request]] = {}
        """By sender and receiver, in the order of their epochs."""
        self._random = random.Random(f"{seed} {list(local_ranks)}")
        for queue in self._queues.values():
            queue[sizes.link_room] = _N_REQUESTS
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name="max_ep-link", daemon=True
        )
        self._thread.start()

    def queues(self) -> Mapping[int, int]:
        """Returns the address of each local rank's queue."""
        return {rank: ctypes.addressof(q) for rank, q in self._queues.items()}

    def reach(self, rank: int, region: int) -> None:
        """Carries to a rank at another address of its region. All that was asked for
        must have been carried."""
        self._regions[rank] = region

    def settle(self, timeout_s: float) -> bool:
        """Returns once all is carried that was asked for, or the time is over; whether
        it is carried."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            queues = self._queues.values()  # What is taken is pending before that.
            words = self._words.link_carried, self._words.link_appended
            is_taken = all(q[words[0]] == q[words[1]] for q in queues)
            if is_taken and not self._pending:
                return True
            time.sleep(_IDLE_S)
        return False

    def close(self) -> None:
        """Carries what is left, and ends; no rank may ask for more."""
        self._is_closing = True
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while True:
            is_closing = self._is_closing  # What was asked for before is taken below.
            for rank, queue in self._queues.items():
                self._take(rank, queue)
            if self._pending:
                self._carry()
            elif is_closing:
                return
            else:
                time.sleep(_IDLE_S)

    def _take(self, rank: int, queue: ctypes.Array) -> None:
        """Takes what a rank has asked for since."""
        words = self._words
        for n in range(queue[words.link_carried], queue[words.link_appended]):
            at = words.link_first + n % _N_REQUESTS * words.link_request_words
            what, to, of, n_bytes = queue[at : at + 4]
            peer, kind = divmod(what, words.link_n_kinds)
            if kind == words.link_fence:
                self._epochs[rank] += self._keeps_fences
            else:
                to += self._regions[peer] - self._regions[rank]
                pieces = [(to, of, 0)]
                if kind == words.link_put:
                    pieces = self._pieces(to, of, n_bytes)
                request = _Request(self._epochs[rank], pieces)
                self._pending.setdefault((rank, peer), []).append(request)
            queue[words.link_carried] = n + 1

    def _pieces(self, to: int, of: int, n_bytes: int) -> list[tuple[int, int, int]]:
        """Cuts a put into pieces of whole words, in any order."""
        n = n_bytes // _WORD_BYTES
        n_cuts = self._random.randint(0, min(_MOST_PIECES, n) - 1)
        cuts = sorted(self._random.sample(range(1, n), n_cuts))
        pieces = [
            (to + a * _WORD_BYTES, of + a * _WORD_BYTES, (b - a) * _WORD_BYTES)
            for a, b in zip([0, *cuts], [*cuts, n])
        ]
        self._random.shuffle(pieces)
        return pieces

    def _carry(self) -> None:
        """Carries a piece of one of the requests that may be carried now."""
        draw = self._random
        if draw.random() < _LATE_SHARE:
            time.sleep(draw.random() * _LATE_S)
        pair = draw.choice([*self._pending])
        requests = self._pending[pair]
        first = requests[0].epoch
        n = next((i for i, x in enumerate(requests) if x.epoch != first), len(requests))
        i = draw.randrange(n)
        to, of, n_bytes = requests[i].pieces.pop()
        self._write(pair[1], to, of, n_bytes)
        if not requests[i].pieces:
            del requests[i]
        if not requests:
            del self._pending[pair]

    def _write(self, peer: int, to: int, of: int, n_bytes: int) -> None:
        """Writes a piece of a put into a peer's region, or the word of a signal."""
        if n_bytes:
            ctypes.memmove(to, of, n_bytes)
        else:
            ctypes.c_uint64.from_address(to).value = of
