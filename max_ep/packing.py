# SPDX-License-Identifier: Apache-2.0
"""How one layer's experts are put on ranks: which get replicas, and who holds them.

Arrays in, arrays out; ``balance.py`` says what a placement is, and checks what it is
given. ``places`` are the experts that each rank may hold, ``loads`` rows by expert.
"""

from __future__ import annotations

import math

import numpy as np

SLACK = 0.05
"""Part of a rank's mean load that is given up for an expert that need not move."""

_MOST_SWAPS = 200


def _fits(copies: np.ndarray, places: np.ndarray) -> bool:
    """Whether bins have places for copies of experts, at most one of each in a bin (by
    Gale and Ryser)."""
    most = (places[:, None] > np.arange(len(copies))).sum(0).cumsum()
    return bool((np.sort(copies)[::-1].cumsum() <= most).all())


def replica_counts(
    loads: np.ndarray, n_more: int, places: np.ndarray, top_k: int, most: int
) -> np.ndarray:
    """Gives replicas to the experts whose replicas have most to do."""
    n_each = np.ones(len(loads), int)
    for factors, is_rest in ((top_k, False), (1, True)):
        counts = [n for n in range(2, most + 1) if math.gcd(n, factors) == 1]
        counts = np.array([*counts, n_more + most + 1])  # the last one is never reached
        is_full = np.zeros(len(loads), bool)
        while n_more:
            step = counts[np.searchsorted(counts, n_each, "right")] - n_each
            is_full |= step > n_more
            # The rest first goes to experts whose number it does not spoil; of equal
            # loads, to those that have the fewest.
            has_some = is_rest & (n_each > 1) & (np.gcd(n_each, top_k) == 1)
            best = np.lexsort((n_each, -loads / n_each, has_some, is_full))[0]
            if is_full[best]:
                break
            n_each[best] += step[best]
            if _fits(n_each, places):
                n_more -= step[best]
            else:  # some ranks hold fewer experts, or none
                n_each[best] -= step[best]
                is_full[best] = True
    return n_each


def pack_hosts(
    n_each: np.ndarray,
    loads: np.ndarray,
    places: np.ndarray,
    n_hosts: int,
    had: np.ndarray,
) -> np.ndarray:
    """Says which rank holds which expert, bool ``[n_ranks, n_logical]``; ``had`` is the
    same of the placement before.

    Hosts come first: each has equally many of an expert, or one more. If some ranks
    hold fewer experts, that may be impossible; then hosts do not matter.
    """

    def of_hosts(x: np.ndarray) -> np.ndarray:
        return x.reshape(n_hosts, -1, *x.shape[1:])

    on_all, more = np.divmod(n_each, n_hosts)
    free = of_hosts(places).sum(1) - on_all.sum()
    if n_hosts > 1 and free.min() >= 0 and _fits(more, free):
        copies = on_all + _pack(more, loads, free, of_hosts(had).any(1))
        if all(map(_fits, copies, of_hosts(places))):
            given = zip(copies, of_hosts(places), of_hosts(had))
            return np.concatenate([_pack(n, loads, at, was) for n, at, was in given])
    return _pack(n_each, loads, places, had)


def _pack(
    copies: np.ndarray, loads: np.ndarray, places: np.ndarray, had: np.ndarray
) -> np.ndarray:
    """Divides copies over bins with so many places, at most one of an expert to a bin:
    the heaviest first, to the bins with the least load; ``_fits`` says that it can be.
    """
    holds, load = np.zeros(had.shape, bool), np.zeros(len(places))
    free, rest = places.copy(), copies.copy()
    gain = SLACK * (copies @ loads) / len(places) * had
    for expert in np.argsort(-loads, kind="stable"):
        n, rest[expert] = copies[expert], 0
        order = np.lexsort((load - gain[:, expert], free == 0))
        chosen = np.zeros(len(places), bool)
        chosen[order[:n]] = True
        # If later experts would find no places, take bins with more of them.
        while n and not ((free >= chosen).all() and _fits(rest, free - chosen)):
            fullest = np.argmin(np.where(chosen, free, free.max() + 1))
            chosen[np.argmax(np.where(chosen, -1, free))] = True
            chosen[fullest] = False
        holds[:, expert] = chosen
        load += chosen * loads[expert]
        free -= chosen
    return holds


def swap(holds: np.ndarray, loads: np.ndarray, n_hosts: int, enough: float) -> None:
    """Swaps experts of the busiest rank for lighter ones of other ranks, until it has
    ``enough`` times the mean, or no swap helps; hosts keep as many of an expert."""
    n_ranks = len(holds)
    host = np.arange(n_ranks) * n_hosts // n_ranks
    for _ in range(_MOST_SWAPS):
        load = holds @ loads
        busy = int(load.argmax())
        if load[busy] <= enough * load.mean():
            return
        on_host = holds.reshape(n_hosts, -1, len(loads)).sum(1)[host]
        is_here = host == host[busy]
        gives = holds[busy] & ~holds & (is_here[:, None] | (on_host < on_host[busy]))
        takes = holds & ~holds[busy] & (is_here[:, None] | (on_host > on_host[busy]))
        own = np.flatnonzero(holds[busy])
        less = loads[own, None] - loads
        gap = (load[busy] - load)[:, None, None]
        helps = gives[:, own, None] & takes[:, None] & (less > 0) & (less < gap)
        # Both ranks then have about as much.
        far = np.where(helps, np.abs(less - gap / 2), np.inf)
        rank, i, expert = np.unravel_index(far.argmin(), far.shape)
        if not helps[rank, i, expert]:
            return
        holds[[busy, rank], own[i]] = False, True
        holds[[busy, rank], expert] = True, False


def in_place(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Orders a rank's experts so that those it had keep their places."""
    rest, placed = new.tolist(), np.full(len(new), -1)
    for place, expert in enumerate(old[: len(new)].tolist()):
        if expert in rest:
            rest.remove(expert)
            placed[place] = expert
    placed[placed < 0] = rest
    return placed
