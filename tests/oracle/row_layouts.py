# SPDX-License-Identifier: Apache-2.0
"""Other layouts of the rows of `max_ep/reference.py`, and which rows are dropped.

It needs NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from max_ep.reference import DispatchResult


def kept_rows(counts: np.ndarray, max_rows: int) -> np.ndarray:
    """Says how many rows of each pair a rank keeps, `EPConfig.max_output_rows`.

    `counts` are `[n_local_experts, n_ranks]`: rows of each expert from each source. If
    all do not fit, a pair keeps at most `T`, the largest number with which all fit, and
    the first pairs that have more keep one more, until `max_rows` are kept.
    """
    if counts.sum() <= max_rows:
        return counts.copy()
    level = max(t for t in range(max_rows + 1) if counts.clip(0, t).sum() <= max_rows)
    kept = counts.clip(0, level)
    kept.flat[np.flatnonzero(counts > level)[: max_rows - kept.sum()]] += 1
    return kept


def drop_rows(result: DispatchResult, n_ranks: int, max_rows: int) -> DispatchResult:
    """Drops the rows of a rank that do not fit; a pair keeps its first ones.

    A shared expert's rows, which come first, are neither counted nor dropped.
    """
    is_routed = result.src_info[:, 1] >= 0
    group_of = np.repeat(result.expert_ids, np.diff(result.row_offsets.astype(int)))
    n_groups = len(result.expert_ids)
    pair_of = group_of * n_ranks + result.src_ranks
    counts = np.bincount(pair_of[is_routed], minlength=n_groups * n_ranks)
    kept = kept_rows(counts, max_rows)
    # Rows of a pair stand one after another.
    position = np.arange(len(pair_of)) - np.searchsorted(pair_of, pair_of)
    stays = ~is_routed | (position < kept[pair_of])
    sizes = np.bincount(group_of[stays], minlength=n_groups)
    return DispatchResult(
        rows=result.rows[stays],
        scales=None if result.scales is None else result.scales[:, stays].copy(),
        row_offsets=np.cumsum([0, *sizes]).astype(np.uint32),
        expert_ids=result.expert_ids,
        src_info=result.src_info[stays],
        src_ranks=result.src_ranks[stays],
    )


@dataclass
class PaddedResult:
    """What dispatch delivers to one rank whose experts have rows of their own.

    As DeepEP's low-latency dispatch, `packed_recv_*`. Rows after `recv_counts` are
    undefined; here they are zero.
    """

    rows: np.ndarray
    """`[n_local_experts, capacity, ...]`."""
    scales: np.ndarray | None
    """`[n_local_experts, n_blocks, capacity]`."""
    recv_counts: np.ndarray
    """int32 `[n_local_experts]`: rows of each."""
    src_info: np.ndarray
    """int32 `[n_local_experts, capacity, 2]`: token index and `k`."""
    recv_ranges: np.ndarray
    """int32 `[n_local_experts, n_ranks, 2]`: of the rows from each source rank the
    first, within the expert's, and how many."""


def pad(result: DispatchResult, n_ranks: int, capacity: int) -> PaddedResult:
    """Gives each local expert `capacity` rows of its own, in the same order.

    `capacity` is `n_ranks * max_tokens_per_rank`; there is no shared expert.
    """
    bounds = result.row_offsets.astype(np.int64)
    n_local = len(bounds) - 1
    padded = PaddedResult(
        rows=np.zeros((n_local, capacity, *result.rows.shape[1:]), result.rows.dtype),
        scales=None,
        recv_counts=np.diff(bounds).astype(np.int32),
        src_info=np.zeros((n_local, capacity, 2), np.int32),
        recv_ranges=np.zeros((n_local, n_ranks, 2), np.int32),
    )
    if result.scales is not None:
        n_blocks = len(result.scales)
        shape = (n_local, n_blocks, capacity)
        padded.scales = np.zeros(shape, result.scales.dtype)
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        n_rows = end - begin
        padded.rows[expert, :n_rows] = result.rows[begin:end]
        padded.src_info[expert, :n_rows] = result.src_info[begin:end]
        if padded.scales is not None:
            padded.scales[expert, :, :n_rows] = result.scales[:, begin:end]
        counts = np.bincount(result.src_ranks[begin:end], minlength=n_ranks)
        padded.recv_ranges[expert, :, 0] = np.cumsum(counts) - counts
        padded.recv_ranges[expert, :, 1] = counts
    return padded


def unpad(rows: np.ndarray, recv_counts: np.ndarray) -> np.ndarray:
    """Puts padded rows one after another: `[n_rows, ...]`, as `combine` takes them."""
    return np.concatenate([own[:n] for own, n in zip(rows, recv_counts)])


def scales_of_tiles(
    tiles: np.ndarray, row_offsets: np.ndarray, n_blocks: int
) -> np.ndarray:
    """Extracts the scales `[n_rows, n_blocks]` of packed rows from tiles.

    Tiles, `[n_tiles, ceil(n_blocks / 4), 32, 4, 4]`, hold 128 rows and 4 blocks each.
    Expert `e`, whose rows are `[row_offsets[e], row_offsets[e + 1])`, begins with tile
    `row_offsets[e] // 128 + e`. Row `r` of a tile is at `[r % 32, r // 32]`.
    """
    bounds = row_offsets.astype(np.int64)
    expert = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    row_of_expert = np.arange(bounds[-1]) - bounds[expert]
    tile = bounds[expert] // 128 + expert + row_of_expert // 128
    row = row_of_expert % 128
    by_row = tiles[tile, :, row % 32, row // 32]
    return by_row.reshape(len(by_row), 4 * tiles.shape[1])[:, :n_blocks]
