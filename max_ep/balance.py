# SPDX-License-Identifier: Apache-2.0
"""Balanced experts: a placement of replicas, from measured loads of the experts.

Busy experts get replicas, and replicas are spread over ranks so that all ranks compute
about as many rows. The router selects *logical* experts; a *physical* expert is a place
for weights on a rank, as in MAX. Choice ``k`` of token ``n`` goes to replica
``(n * top_k + k) % count``. This file needs NumPy only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .limits import checked_int, is_integer
from .npz import read_npz
from .packing import SLACK, in_place, pack_hosts, replica_counts, swap
from .plural import counted

_NEAR = 1e-3
"""When a plan without an old one is good: the busiest rank is so near to the mean."""

_MOST_ROWS = 2.0**63


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
        n_physical, most = phy2log.shape[1], int(phy2log.max())
        if not is_integer(self.n_ranks) or not 1 <= self.n_ranks <= n_physical:
            raise ValueError(
                f"n_ranks={self.n_ranks!r} must be an integer from 1 to {n_physical}, "
                "the physical experts of a layer"
            )
        object.__setattr__(self, "n_ranks", int(self.n_ranks))
        # No table is as long as a wrong number says.
        is_in_range = 0 <= int(phy2log.min()) and most < n_physical
        if is_in_range:
            object.__setattr__(self, "phy2log", phy2log.astype(np.int32))
        if not is_in_range or not self.logcnt.all():
            raise ValueError(
                f"phy2log must name each logical expert of [0, {most + 1}) in "
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
        checked_int("max_replicas", max_replicas, 0)
        logcnt = self.logcnt
        most = int(logcnt.max())
        if 0 < max_replicas < most:
            raise ValueError(
                f"an expert has {counted(most, 'replica')}, above "
                f"max_replicas={max_replicas}"
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
        counts = _checked_rows(counts, "counts", "n_logical", self.logcnt.shape)
        shares = np.take_along_axis(counts / self.logcnt, self.phy2log, 1)
        rows = np.zeros((len(shares), self.n_ranks * self.n_local))
        rows[:, : shares.shape[1]] = shares
        return rows.reshape(len(rows), self.n_ranks, -1).sum(2)

    def imbalance(self, counts: np.ndarray) -> np.ndarray:
        """Predicts rows of the busiest rank, times the mean, ``[n_layers]``; 1 for a
        layer without rows."""
        loads = self.rank_loads(counts)
        most = loads.max(1, keepdims=True)
        loads = np.divide(loads, most, out=np.ones_like(loads), where=most > 0)
        return 1 / loads.mean(1)

    def logical_counts(self, counts: np.ndarray) -> np.ndarray:
        """Adds up rows of physical experts, ``[n_layers, n_physical]``."""
        _checked_rows(counts, "counts", "n_physical", self.phy2log.shape)
        is_float = np.asarray(counts).dtype.kind == "f"  # such as a mean of runs
        total = np.zeros(self.logcnt.shape, np.float64 if is_float else np.int64)
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
        maker = "max_ep.balance.Placement.save"
        return read_npz(path, Placement, maker, "phy2log", "n_ranks")


def unbalanced(n_layers: int, n_experts: int, n_ranks: int) -> Placement:
    """Returns the placement without replicas: each expert where its id says."""
    for name, n in (("n_layers", n_layers), ("n_experts", n_experts)):
        checked_int(name, n)
    return Placement(np.tile(np.arange(n_experts), (n_layers, 1)), n_ranks)


def default_replicas(n_experts: int, n_ranks: int, max_replicas: int = 0) -> int:
    """Returns how many replicas experts get if nobody says it: an eighth more, and as
    many as all ranks can hold equally."""
    for name, n in (("n_experts", n_experts), ("n_ranks", n_ranks)):
        checked_int(name, n)
    checked_int("max_replicas", max_replicas, 0)
    n_replicas = -(-n_experts * 9 // 8 // n_ranks) * n_ranks - n_experts
    most = min(max_replicas or n_ranks, n_ranks)
    return max(0, min(n_replicas, n_experts * (most - 1)))


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

    A rank never holds an expert twice.

    Args:
        counts: Rows of each logical expert, ``[n_layers, n_logical]``, or of one layer,
            finite and >= 0. In a layer without rows, which was not measured, experts
            get equally many replicas, or one more.
        n_ranks: Ranks of the group.
        n_replicas: Physical experts beyond the logical ones, at most
            ``n_logical * (n_ranks - 1)``: then each rank holds every expert.
        top_k: Experts of a token. An expert gets a number of replicas that shares no
            factor with it, where it can: then its replicas get equally much, even if
            it is always the first choice of a token.
        n_hosts: Hosts, each with ``n_ranks / n_hosts`` ranks, one after another. An
            expert has equally many replicas on each host, or one more, if all ranks
            hold equally many experts.
        max_replicas: Most replicas of an expert; 0, or more than ranks: ``n_ranks``.
        old: The placement before. Experts stay where they are if that costs little.

    Raises:
        ValueError: If no placement can have these sizes, or for other counts.
    """
    counts = _checked_rows(counts, "counts", "n_logical")
    for name, n, least in (
        ("n_ranks", n_ranks, 1),
        ("n_replicas", n_replicas, 0),
        ("top_k", top_k, 1),
        ("n_hosts", n_hosts, 1),
        ("max_replicas", max_replicas, 0),
    ):
        checked_int(name, n, least)
    n_logical, most = counts.shape[1], min(max_replicas or n_ranks, n_ranks)
    if n_ranks % n_hosts:
        raise ValueError(f"n_ranks={n_ranks} must be a multiple of n_hosts={n_hosts}")
    if n_replicas > n_logical * (most - 1):
        raise ValueError(
            f"n_replicas={n_replicas} must be in [0, {n_logical * (most - 1)}]: "
            f"{counted(n_logical, 'expert')} have at most {counted(most, 'replica')} "
            "each, one on a rank"
        )
    n_physical = n_logical + n_replicas
    if n_physical < n_ranks:
        raise ValueError(
            f"n_replicas={n_replicas} must be at least {n_ranks - n_logical}: there "
            f"are {counted(n_logical, 'expert')} for n_ranks={n_ranks}"
        )
    n_local = -(-n_physical // n_ranks)
    places = np.clip(n_physical - n_local * np.arange(n_ranks), 0, n_local)
    before = [[np.zeros(0, int)] * n_ranks] * len(counts)
    if old is not None:
        have = len(old.phy2log), old.n_logical, old.n_ranks
        if have != (*counts.shape, n_ranks):
            raise ValueError(
                f"old has (layers, experts, ranks) {have}, counts and n_ranks say "
                f"{(*counts.shape, n_ranks)}; leave old out for another group"
            )
        ends = np.arange(1, n_ranks) * old.n_local
        before = [np.split(row, ends) for row in old.phy2log]
    rows = []
    for of_layer, was in zip(counts, before):
        is_measured = bool(of_layer.any())
        loads = of_layer / of_layer.max() if is_measured else np.ones(n_logical)
        factors = top_k if is_measured else 1
        n_each = replica_counts(loads, n_replicas, places, factors, most)
        had = np.zeros((n_ranks, n_logical), bool)
        for rank, of_rank in enumerate(was):
            had[rank, of_rank] = True
        holds = pack_hosts(n_each, loads / n_each, places, n_hosts, had)
        enough = 1 + (_NEAR if old is None else SLACK)
        swap(holds, loads / n_each, n_hosts, enough)
        parts = map(np.flatnonzero, holds)
        rows.append(np.concatenate([in_place(*pair) for pair in zip(parts, was)]))
    return Placement(np.stack(rows), n_ranks)


def _checked_rows(
    counts: Any, name: str, columns: str, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Returns rows of experts, layer by layer, as float64; refuses what are none."""
    try:
        given = np.asarray(counts)
    except ValueError:  # rows of different lengths
        given = np.asarray(counts, object)
    wanted = f"{list(shape)}" if shape else f"[n_layers, {columns}]"
    wanted += ", rows of each expert: finite, and all >= 0"
    if given.dtype.kind not in "iuf":
        kind = "text" if given.dtype.kind in "SU" else f"of dtype {given.dtype}"
        raise ValueError(f"{name} is {kind}; it must be numbers {wanted}")
    rows = np.atleast_2d(given.astype(np.float64))
    if rows.ndim != 2 or 0 in rows.shape or rows.shape != (shape or rows.shape):
        raise ValueError(f"{name} has shape {list(given.shape)}; it must be {wanted}")
    wrong = np.argwhere(~((rows >= 0) & (rows < _MOST_ROWS)))
    if len(wrong):
        layer, expert = wrong[0].tolist()
        raise ValueError(
            f"{name} has {rows[layer, expert]:g} for expert {expert} of layer {layer}; "
            f"it must be {wanted}, below 2**63"
        )
    return rows


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
    for name, n in (("expert_bytes", expert_bytes), ("slice_bytes", slice_bytes)):
        checked_int(name, n, most=None)
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
            arrays or torch tensors ``[n_local_experts, ...]``, alike for all ranks and
            layers.
        old: Where the weights are.
        new: Where they go.
        slice_bytes: Most bytes of a step.

    Raises:
        TypeError, ValueError: If weights are missing or differ, before any is moved.
    """
    expert_bytes = _checked_weights(weights, old)
    slices = moves(old, new, expert_bytes, slice_bytes)
    return _rebalanced(weights, old, new, expert_bytes, slices)


def _rebalanced(
    weights: Sequence[Sequence[Sequence[Any]]],
    old: Placement,
    new: Placement,
    expert_bytes: int,
    slices: list[Slice],
) -> Iterator[Placement]:
    """Moves the slices."""
    phy2log, now = old.phy2log.copy(), old
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


def _checked_weights(weights: Any, placement: Placement) -> int:
    """Raises unless all weights of a placement are there, each where bytes can be
    moved, and all ranks have the same; returns the bytes of an expert."""
    n_layers, n_physical = placement.phy2log.shape
    n_ranks, n_local = placement.n_ranks, placement.n_local
    _check_length("weights", weights, n_layers, "layer")
    first: list[str] = []
    for layer, of_layer in enumerate(weights):
        _check_length(f"weights[{layer}]", of_layer, n_ranks, "rank")
        for rank, tensors in enumerate(of_layer):
            name = f"weights[{layer}][{rank}]"
            if not isinstance(tensors, (list, tuple)):
                raise TypeError(
                    f"{name} is a {type(tensors).__name__}; pass a list of arrays "
                    "[n_local_experts, ...], also of one"
                )
            n_held = min(max(n_physical - rank * n_local, 0), n_local)
            for i, tensor in enumerate(tensors):
                _check_tensor(f"{name}[{i}]", tensor, n_held, n_local)
            kinds = [f"{x.dtype} {[*x.shape[1:]]}" for x in tensors]
            first = first or kinds
            if kinds != first or not kinds:
                raise ValueError(
                    f"an expert of {name} has {', '.join(kinds) or 'no tensors'}, one "
                    f"of weights[0][0] {', '.join(first) or 'no tensors'}; pass the "
                    "same tensors for all ranks and layers"
                )
    return sum(x.nbytes // len(x) for x in weights[0][0])


def _check_length(name: str, given: Sequence[Any], n_wanted: int, of: str) -> None:
    if len(given) != n_wanted:
        raise ValueError(
            f"{name} has {counted(len(given), of)}, the old placement "
            f"{counted(n_wanted, of)}; pass the weights of all"
        )


def _check_tensor(name: str, tensor: Any, n_held: int, n_local: int) -> None:
    """Raises unless it has the experts of a rank, and its bytes can be changed."""
    is_numpy = isinstance(tensor, np.ndarray)
    if not is_numpy and not hasattr(tensor, "is_contiguous"):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}; it must be a NumPy array or a torch "
            "tensor [n_local_experts, ...]"
        )
    shape = [*tensor.shape]
    if not shape or not n_held <= shape[0] <= n_local:
        raise ValueError(
            f"{name} has shape {shape}; it must have the "
            f"{counted(n_held, 'expert')} of its rank: [n_local_experts, ...]"
        )
    flags = tensor.flags if is_numpy else None
    if not (flags.c_contiguous if flags else tensor.is_contiguous()):
        raise ValueError(f"{name} is not contiguous; weights must be contiguous")
    if not (flags.writeable if flags else tensor.device.type == "cpu"):
        where = "read-only" if flags else f"on {tensor.device}"
        raise ValueError(f"{name} is {where}; pass weights on the CPU, to be changed")


def _bytes_of(tensors: Sequence[Any], local: int) -> Iterator[np.ndarray]:
    """Views an expert's tensors as bytes."""
    for tensor in tensors:
        # In two dimensions: one number of an expert would be a copy.
        rows = tensor.reshape(len(tensor), -1)
        if not isinstance(tensor, np.ndarray):
            import torch

            rows = rows.detach().view(torch.uint8).numpy()
        yield rows[local].view(np.uint8)


def _main(given: str, planned: str) -> None:
    """Plans in a process of its own, for a server: counts of physical experts and the
    placement that they are of, ``.npz``; writes a placement."""
    os.nice(19)
    with np.load(given) as file:
        old = Placement(file["phy2log"], int(file["n_ranks"]))
        found = plan(
            old.logical_counts(file["counts"]),
            old.n_ranks,
            old.phy2log.shape[1] - old.n_logical,
            top_k=int(file["top_k"]),
            max_replicas=int(file["max_replicas"]),
            old=old,
        )
    found.save(planned)


if __name__ == "__main__":
    _main(*sys.argv[1:])
