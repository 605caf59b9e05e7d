# SPDX-License-Identifier: Apache-2.0
"""Balanced experts: a placement of replicas, from measured loads of the experts.

Busy experts get replicas, and replicas are spread over ranks so that all ranks compute
about as many rows. The router selects *logical* experts; a *physical* expert is a place
for weights on a rank, as in MAX. Choice ``k`` of token ``n`` goes to replica
``(n * top_k + k) % count``. This file needs NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

_SLACK = 0.05
"""Part of a rank's mean load that is given up for an expert that need not move."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The logical expert of each physical expert, layer by layer."""

    phy2log: np.ndarray
    """int32 ``[n_layers, n_physical]``; ranks hold ``n_physical / n_ranks`` each,
    rounded up, so the last ones may hold fewer."""
    n_ranks: int

    def __post_init__(self) -> None:
        try:
            phy2log = np.asarray(self.phy2log)
        except ValueError:  # rows of different lengths
            phy2log = np.asarray(self.phy2log, object)
        if phy2log.ndim != 2 or 0 in phy2log.shape or phy2log.dtype.kind not in "iu":
            raise ValueError(
                f"phy2log is {phy2log.dtype} {list(phy2log.shape)}; it must have "
                "integers [n_layers, n_physical]"
            )
        object.__setattr__(self, "phy2log", phy2log.astype(np.int32))
        if phy2log.min() < 0 or not self.logcnt.all():
            raise ValueError(
                f"phy2log must name each logical expert of [0, {self.n_logical}) in "
                "each layer, and nothing else"
            )

    @property
    def n_logical(self) -> int:
        """Logical experts."""
        return int(self.phy2log.max()) + 1

    @property
    def n_local(self) -> int:
        """Places for experts on a rank."""
        return -(-self.phy2log.shape[1] // self.n_ranks)

    @property
    def logcnt(self) -> np.ndarray:
        """Replicas of each expert, int32 ``[n_layers, n_logical]``."""
        n = self.n_logical
        of_layers = [np.bincount(row, minlength=n) for row in self.phy2log]
        return np.stack(of_layers).astype(np.int32)

    def log2phy(self, max_replicas: int = 0) -> np.ndarray:
        """Returns the physical experts of each logical one; -1 after the last.

        They are int32 ``[n_layers, n_logical, max_replicas]``; 0: as many as needed.
        """
        logcnt = self.logcnt
        most = int(logcnt.max())
        if 0 < max_replicas < most:
            raise ValueError(
                f"an expert has {most} replicas, above max_replicas={max_replicas}"
            )
        table = np.full((*logcnt.shape, max_replicas or most), -1, np.int32)
        for layer, row in enumerate(self.phy2log):
            order = np.argsort(row, kind="stable")
            first = np.cumsum(logcnt[layer]) - logcnt[layer]
            table[layer, row[order], np.arange(len(row)) - first[row[order]]] = order
        return table

    def rank_loads(self, counts: np.ndarray) -> np.ndarray:
        """Predicts the rows of each rank, ``[n_layers, n_ranks]``.

        ``counts`` are rows of logical experts, ``[n_layers, n_logical]``.
        """
        shares = np.take_along_axis(counts / self.logcnt, self.phy2log, 1)
        rows = np.zeros((len(shares), self.n_ranks * self.n_local))
        rows[:, : shares.shape[1]] = shares
        return rows.reshape(len(rows), self.n_ranks, -1).sum(2)

    def imbalance(self, counts: np.ndarray) -> np.ndarray:
        """Predicts rows of the busiest rank, times the mean, ``[n_layers]``."""
        loads = self.rank_loads(counts)
        return loads.max(1) / np.maximum(loads.mean(1), 1e-9)

    def logical_counts(self, counts: np.ndarray) -> np.ndarray:
        """Adds up rows of physical experts, ``[n_layers, n_physical]``."""
        total = np.zeros(self.logcnt.shape, np.int64)
        np.add.at(total, (np.arange(len(total))[:, None], self.phy2log), counts)
        return total

    def save(self, path: str | Path) -> None:
        """Writes ``phy2log``, ``log2phy``, ``logcnt`` and ``n_ranks`` as ``.npz``."""
        tables = dict(phy2log=self.phy2log, log2phy=self.log2phy(), logcnt=self.logcnt)
        with open(path, "wb") as file:
            np.savez(file, **tables, n_ranks=self.n_ranks)

    @staticmethod
    def load(path: str | Path) -> Placement:
        """Reads what :meth:`save` wrote. Raises a ``ValueError`` for other files."""
        saved = read_npz(path, "max_ep.balance.Placement.save", "phy2log", "n_ranks")
        return Placement(saved["phy2log"], int(saved["n_ranks"]))


def read_npz(path: str | Path, maker: str, *names: str) -> dict[str, np.ndarray]:
    """Reads arrays of these names. Raises a ``ValueError`` for other files."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in names}
    except (AttributeError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(f"{path} is no file of {maker}") from error


def unbalanced(n_layers: int, n_experts: int, n_ranks: int) -> Placement:
    """Returns the placement without replicas: each expert where its id says."""
    return Placement(np.tile(np.arange(n_experts), (n_layers, 1)), n_ranks)


def plan(
    counts: np.ndarray,
    n_ranks: int,
    n_replicas: int,
    *,
    top_k: int = 8,
    n_hosts: int = 1,
    max_replicas: int = 0,
    old: Placement | None = None,
) -> Placement:
    """Makes a placement that spreads rows evenly over ranks, and so over hosts.

    Args:
        counts: Rows of each logical expert, ``[n_layers, n_logical]``, or of one layer.
        n_ranks: Ranks of the group.
        n_replicas: Physical experts beyond the logical ones.
        top_k: Experts of a token. An expert gets a number of replicas that shares no
            factor with it, where it can: then its replicas get equally much, even if
            it is always the first choice of a token.
        n_hosts: Hosts, each with ``n_ranks / n_hosts`` ranks, one after another.
        max_replicas: Most replicas of an expert; 0: one more than there are ranks.
        old: The placement before. Experts stay where they are if that costs little.
    """
    counts = np.atleast_2d(np.asarray(counts, float))
    if counts.ndim != 2 or 0 in counts.shape or not (counts >= 0).all():
        raise ValueError(
            f"counts has shape {list(counts.shape)}; it must be [n_layers, n_logical], "
            "rows of each expert, all >= 0"
        )
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be 1 or more: experts of a token")
    n_physical = counts.shape[1] + n_replicas
    most = max_replicas or n_ranks + 1
    if n_ranks < 1 or n_hosts < 1 or n_ranks % n_hosts:
        raise ValueError(
            f"n_ranks={n_ranks} must be a multiple of n_hosts={n_hosts}, both >= 1"
        )
    if not 0 <= n_replicas <= counts.shape[1] * (most - 1):
        raise ValueError(
            f"n_replicas={n_replicas} must be in [0, {counts.shape[1] * (most - 1)}]: "
            f"{counts.shape[1]} experts have at most {most} replicas each"
        )
    n_local = -(-n_physical // n_ranks)
    sizes = np.bincount(np.arange(n_physical) // n_local, minlength=n_ranks)
    before = [[np.zeros(0, int)] * n_ranks] * len(counts)
    if old is not None:
        ends = np.arange(1, n_ranks) * old.n_local
        before = [np.split(row, ends) for row in old.phy2log]
    rows = []
    for loads, was in zip(counts, before):
        n_each = _replica_counts(loads, n_replicas, top_k, most)
        experts = np.repeat(np.arange(len(loads)), n_each)
        parts = _pack(experts, loads / n_each, sizes, n_hosts, was)
        rows.append(np.concatenate([_in_place(*pair) for pair in zip(parts, was)]))
    return Placement(np.stack(rows), n_ranks)


def _replica_counts(
    loads: np.ndarray, n_more: int, top_k: int, most: int
) -> np.ndarray:
    """Gives replicas to the experts whose replicas have most to do."""
    n_each = np.ones(len(loads), int)
    for factors, is_rest in ((top_k, False), (1, True)):
        counts = [n for n in range(2, most + 1) if math.gcd(n, factors) == 1]
        counts = np.array([*counts, n_more + most + 1])  # the last one is never reached
        while n_more:
            step = counts[np.searchsorted(counts, n_each, "right")] - n_each
            # The rest goes to experts without replicas first.
            alone = is_rest * (n_each == 1)
            order = np.lexsort((loads / n_each, alone, step <= n_more))
            if step[order[-1]] > n_more:
                break
            n_each[order[-1]] += step[order[-1]]
            n_more -= step[order[-1]]
    return n_each


def _pack(
    experts: np.ndarray,
    loads: np.ndarray,
    sizes: np.ndarray,
    n_hosts: int,
    before: Sequence[np.ndarray],
) -> list[list[int]]:
    """Divides replicas, each of so much load, over ranks with so many places: the
    heaviest first, to host and rank with the fewest of its expert and the least load.
    """
    n = len(sizes)
    parts: list[list[int]] = [[] for _ in range(n)]
    load, n_same = np.zeros(n), np.zeros((n, len(loads)), int)
    gain = np.zeros((n, len(loads)))
    for rank in range(n):
        gain[rank, before[rank]] = _SLACK * loads[experts].sum() / n
    for expert in experts[np.argsort(-loads[experts], kind="stable")]:
        on_rank = n_same[:, expert]
        on_host = np.repeat(on_rank.reshape(n_hosts, -1).sum(1), n // n_hosts)
        cost = load - gain[:, expert]
        best = np.lexsort((cost, on_rank, on_host, n_same.sum(1) >= sizes))[0]
        parts[best].append(int(expert))
        load[best] += loads[expert]
        n_same[best, expert] += 1
    return parts


def _in_place(new: list[int], old: np.ndarray) -> np.ndarray:
    """Orders a rank's experts so that those it had keep their places."""
    rest, placed = sorted(new), np.full(len(new), -1)
    for place, expert in enumerate(old[: len(new)].tolist()):
        if expert in rest:
            rest.remove(expert)
            placed[place] = expert
    placed[placed < 0] = rest
    return placed


class Slice(NamedTuple):
    """Bytes of an expert's weights that go from one place to another."""

    layer: int
    src_rank: int
    src_local: int
    dst_rank: int
    dst_local: int
    begin: int
    """First byte of the expert's weights, all its tensors one after another."""
    end: int


def moves(
    old: Placement, new: Placement, expert_bytes: int, slice_bytes: int
) -> list[Slice]:
    """Lists what must be moved, layer by layer, ``slice_bytes`` or less at a time.

    An expert comes from a replica on the same rank, or from the replica on the rank
    that sends least. Sources are places of the old placement.
    """
    if old.phy2log.shape != new.phy2log.shape or old.n_ranks != new.n_ranks:
        raise ValueError("both placements must have the same layers, experts and ranks")
    if slice_bytes < 1:
        raise ValueError(f"slice_bytes={slice_bytes} must be at least 1")
    n_sent, slices = np.zeros(new.n_ranks, int), []
    for layer, row in enumerate(new.phy2log):
        for dst in np.flatnonzero(row != old.phy2log[layer]):
            dst_rank, dst_local = divmod(int(dst), new.n_local)
            places = np.flatnonzero(old.phy2log[layer] == row[dst])
            ranks = places // new.n_local
            src = places[np.lexsort((n_sent[ranks], ranks != dst_rank))[0]]
            src_rank, src_local = divmod(int(src), new.n_local)
            n_sent[src_rank] += src_rank != dst_rank
            for begin in range(0, expert_bytes, slice_bytes):
                end = min(begin + slice_bytes, expert_bytes)
                place = src_rank, src_local, dst_rank, dst_local
                slices.append(Slice(layer, *place, begin, end))
    return slices


def rebalance(
    weights: Sequence[Sequence[Sequence[Any]]],
    old: Placement,
    new: Placement,
    slice_bytes: int,
) -> Iterator[Placement]:
    """Moves weights on the CPU, a slice a step; yields the placement that holds then.

    A layer keeps its old placement until all its weights have come. They wait in
    memory of their own, and all take their places in the layer's last step.

    Args:
        weights: Of each layer and rank: ``weights[layer][rank]`` is a list of NumPy
            arrays or torch tensors ``[n_local_experts, ...]``.
        old: Where the weights are.
        new: Where they go.
        slice_bytes: Most bytes of a step.
    """
    for layer, of_layer in enumerate(weights):
        for rank, tensors in enumerate(of_layer):
            if not isinstance(tensors, (list, tuple)):
                raise TypeError(
                    f"weights[{layer}][{rank}] is a {type(tensors).__name__}; pass a "
                    "list of arrays [n_local_experts, ...], also of one"
                )
    expert_bytes = sum(x[0].nbytes for x in weights[0][0])
    phy2log, now = old.phy2log.copy(), old
    slices = moves(old, new, expert_bytes, slice_bytes)
    for layer, of_layer in groupby(slices, lambda s: s.layer):
        arrived: dict[tuple[int, int], np.ndarray] = {}
        for s in of_layer:
            place = s.dst_rank, s.dst_local
            there = arrived.setdefault(place, np.empty(expert_bytes, np.uint8))
            first = 0
            for part in _bytes_of(weights[layer][s.src_rank], s.src_local):
                begin, end = max(s.begin - first, 0), min(s.end - first, len(part))
                if begin < end:
                    there[first + begin : first + end] = part[begin:end]
                first += len(part)
            yield now
        for (rank, local), there in arrived.items():
            first = 0
            for part in _bytes_of(weights[layer][rank], local):
                part[:] = there[first : first + len(part)]
                first += len(part)
        phy2log[layer] = new.phy2log[layer]
        now = Placement(phy2log, new.n_ranks)
        yield now


def _bytes_of(tensors: Sequence[Any], local: int) -> Iterator[np.ndarray]:
    """Views an expert's tensors as bytes."""
    for tensor in tensors:
        if not isinstance(tensor, np.ndarray):
            import torch

            tensor = tensor.view(torch.uint8).numpy()
        if not tensor.flags.c_contiguous:
            raise ValueError("weights must be contiguous")
        yield tensor[local].reshape(-1).view(np.uint8)
