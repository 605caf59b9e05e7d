# SPDX-License-Identifier: Apache-2.0
"""How many bytes a round trip moves, and how unevenly; NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from max_ep import reference

from .gpu_shapes import FP8_BLOCK, Shape


def row_bytes(shape: Shape, dtype: str) -> tuple[int, int]:
    """Returns the bytes of one row in dispatch and in combine.

    Elements and scales only: 16-byte source information, padding, counts and
    flags of a protocol are its own affair and are not counted.
    """
    combine = 2 * shape.hidden_size
    if dtype == "bfloat16":
        return combine, combine
    return shape.hidden_size + 4 * shape.hidden_size // FP8_BLOCK, combine


@dataclass(frozen=True)
class Traffic:
    """Bytes of one dispatch + combine, for one rank."""

    logical: int
    """Rows that dispatch delivers and combine takes back, one for each (token,
    choice), local ones included; mean over the ranks."""
    wire: int
    """Rows that cross a link, of the busiest rank and its busier direction."""


SCHEMES = ("slots", "dedup", "gather")
"""How rows travel: one for each remote (token, choice); one for each (token,
remote rank); every token to every rank. Two with ``+``: dispatch's and
combine's."""


def bytes_moved(
    shape: Shape, dtype: str, ids: list[np.ndarray], scheme: str
) -> Traffic:
    """Counts the bytes of one dispatch and the combine behind it.

    This is the one definition of bytes in the benchmark: GB/s are these over
    the period of a round trip (1 GB is 1e9 bytes). Combine sends the rows of
    dispatch back, so its busiest direction is dispatch's reversed.

    Args:
        shape: Gives the row sizes, see :func:`row_bytes`.
        dtype: One of :data:`DTYPES`.
        ids: Experts of each rank's tokens, ``[n_tokens, top_k]``.
        scheme: One of :data:`SCHEMES`, or two.
    """
    n_ranks = len(ids)
    dispatch, combine = row_bytes(shape, dtype)
    there, _, back = scheme.partition("+")
    per_rank = np.zeros(n_ranks, np.int64)
    for of_phase, n_bytes in ((there, dispatch), (back or there, combine)):
        rows = rows_between(shape, ids, of_phase)
        off_diagonal = rows * (1 - np.eye(n_ranks, dtype=rows.dtype))
        sent, received = off_diagonal.sum(axis=1), off_diagonal.sum(axis=0)
        # A rank sends one and receives the other, in combine the other way
        # around. A link is full duplex, so the busier direction counts.
        per_rank += np.maximum(sent, received) * n_bytes
    n_choices = sum(int((rank_ids >= 0).sum()) for rank_ids in ids)
    return Traffic(
        logical=n_choices * (dispatch + combine) // n_ranks,
        wire=int(per_rank.max()),
    )


def rows_between(shape: Shape, ids: list[np.ndarray], scheme: str) -> np.ndarray:
    """Counts rows: ``int64 [n_ranks, n_ranks]``, from rank (row) to rank."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r}; there are {', '.join(SCHEMES)}")
    n_ranks = len(ids)
    n_local = reference.n_local_experts(shape.n_experts, n_ranks)
    rows = np.zeros((n_ranks, n_ranks), np.int64)
    for src, rank_ids in enumerate(ids):
        if scheme == "gather":
            rows[src] = len(rank_ids)
            continue
        goes_to = np.where(rank_ids >= 0, rank_ids // n_local, -1)
        for dst in range(n_ranks):
            hits = goes_to == dst
            rows[src, dst] = hits.sum() if scheme == "slots" else hits.any(axis=1).sum()
    return rows


@dataclass(frozen=True)
class Imbalance:
    """Largest over mean number of rows; 1 is even."""

    ranks: float
    experts: float


def imbalance(shape: Shape, ids: list[np.ndarray]) -> Imbalance:
    """Measures how unevenly rows fall on ranks and on experts."""
    per_rank = rows_between(shape, ids, "slots").sum(axis=0)
    chosen = np.concatenate(ids).reshape(-1)
    per_expert = np.bincount(chosen[chosen >= 0], minlength=shape.n_experts)
    return Imbalance(
        float(per_rank.max() / per_rank.mean()),
        float(per_expert.max() / per_expert.mean()),
    )
