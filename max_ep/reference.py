# SPDX-License-Identifier: Apache-2.0
"""The oracle: what dispatch and combine mean, in NumPy.

Every implementation and protocol must give these results, bit for bit. Here all ranks
are in one process and nothing is sent: a list with one entry per rank is the group.

    tokens, topk_ids  --dispatch-->  rows by expert  --experts-->  expert rows
    sums, not yet rounded  <--combine, with topk_weights--  expert rows

`combine_sums` is the combine of `EPConfig.combine_mode="sums"`. NumPy has no bfloat16:
its bits are kept as `uint16`. This file needs NumPy only. Number formats are in
`quantize.py`; padded and dropped rows, which tests compare, in
`tests/oracle/row_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .limits import MAX_EXPERTS, checked_int
from .plural import counted
from .quantize import bfloat16_to_float32 as bfloat16_to_float32
from .quantize import float8_e4m3fn_to_float32 as float8_e4m3fn_to_float32
from .quantize import float32_to_bfloat16 as float32_to_bfloat16
from .quantize import float32_to_float8_e4m3fn as float32_to_float8_e4m3fn
from .quantize import quantize_blockwise_fp8 as quantize_blockwise_fp8
from .quantize import typed


def n_local_experts(n_experts: int, n_ranks: int) -> int:
    """Counts a rank's places for experts; the last ranks may hold fewer, or none.

    Expert `e` is local expert `e % n_local_experts` of rank `e // n_local_experts`.
    """
    if n_experts < 1 or n_ranks < 1:
        raise ValueError(f"need n_experts={n_experts}, n_ranks={n_ranks} >= 1")
    return -(-n_experts // n_ranks)


@dataclass
class DispatchResult:
    """What dispatch delivers to one rank.

    The tensors of MAX's `ep_dispatch_wait`, without the rows after those that arrived,
    and `src_ranks`, which a rank knows from the peers' counts.
    """

    rows: np.ndarray
    """`[n_rows, ...]`, element type of the tokens (or of quantized values)."""
    scales: np.ndarray | None
    """`[n_blocks, n_rows]`: `scales[b, r]` is of row `r`, block `b`."""
    row_offsets: np.ndarray
    """uint32 `[n_groups + 1]`: group `e` has the rows `[row_offsets[e],
    row_offsets[e + 1])`. A group is a local expert; with a shared expert that
    is group 0, and local expert `e` is group `e + 1`."""
    expert_ids: np.ndarray
    """int32 `[n_groups]`: 0, 1, ..."""
    src_info: np.ndarray
    """int32 `[n_rows, 2]`: token index on its source rank, and `k`, the
    position of the choice in `[0, top_k)`; -1 for the shared expert."""
    src_ranks: np.ndarray
    """int32 `[n_rows]`: the rank that the row came from."""


def dispatch(
    tokens: Sequence[np.ndarray],
    topk_ids: Sequence[np.ndarray],
    n_experts: int,
    *,
    quantize: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
    shared_expert: bool = False,
) -> list[DispatchResult]:
    """Brings each choice's token to the rank of its expert, as one row.

    Rows of a rank are ordered by local expert, then source rank, then token index, then
    `k`. With a shared expert, all of the rank's own tokens stand in front of them.

    Args:
        tokens: Each rank's tokens, `[n_tokens, hidden]`, any element type.
        topk_ids: Each rank's expert ids, integer `[n_tokens, top_k]` in
            `[-1, n_experts)`; -1 means "no expert".
        n_experts: Experts of the group.
        quantize: Maps float32 `[n, hidden]` to values `[n, hidden]` and scales
            `[n, n_blocks]`. If given, tokens are float32 and rows are values.
        shared_expert: Whether every rank's tokens go to its shared expert too.

    Returns:
        One result a rank.

    Raises:
        TypeError: If ids are not integers, or tokens to be quantized not float32.
        ValueError: If shapes do not fit, or an id is outside `[-1, n_experts)`.
    """
    n_ranks, n_tokens = len(tokens), [len(t) for t in tokens]
    n_local = n_local_experts(n_experts, n_ranks)
    _check_ids(topk_ids, n_tokens, n_experts)
    if len({(t.shape[1:], t.dtype) for t in tokens}) > 1:
        raise ValueError("hidden size or element type differs between ranks")
    scales = None
    if quantize is not None:
        quantized = [quantize(typed("tokens", t, np.float32)) for t in tokens]
        tokens = [values for values, _ in quantized]
        scales = np.concatenate([s for _, s in quantized])

    # All tokens of the group, and which rank each is from.
    all_tokens = np.concatenate(tokens)
    src_rank_of = np.repeat(np.arange(n_ranks, dtype=np.int32), n_tokens)
    first_token_of = np.cumsum([0, *n_tokens])
    # All choices stand by source rank, token index, k. A stable sort by expert
    # keeps that order within each expert, which is the order of rows.
    top_k = topk_ids[0].shape[1]
    choice_ids = np.concatenate(topk_ids).reshape(-1)
    order = np.argsort(choice_ids, kind="stable")
    order = order[choice_ids[order] >= 0]

    results = []
    for rank in range(n_ranks):
        experts = rank * n_local + np.arange(n_local + 1)
        bounds = np.searchsorted(choice_ids[order], experts)
        source, k = np.divmod(order[bounds[0] : bounds[-1]], top_k)
        row_offsets = bounds - bounds[0]
        if shared_expert:
            own = np.arange(first_token_of[rank], first_token_of[rank + 1])
            source = np.concatenate([own, source])
            k = np.concatenate([np.full(len(own), -1), k])
            row_offsets = np.concatenate([[0], row_offsets + len(own)])
        src_ranks = src_rank_of[source]
        token_idx = source - first_token_of[src_ranks]
        results.append(
            DispatchResult(
                rows=all_tokens[source],
                scales=None if scales is None else scales[source].T.copy(),
                row_offsets=row_offsets.astype(np.uint32),
                expert_ids=np.arange(len(row_offsets) - 1, dtype=np.int32),
                src_info=np.stack([token_idx, k], axis=1).astype(np.int32),
                src_ranks=src_ranks,
            )
        )
    return results


def combine(
    expert_rows: Sequence[np.ndarray],
    results: Sequence[DispatchResult],
    topk_weights: Sequence[np.ndarray],
    round_sum: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> list[np.ndarray]:
    """Brings rows back to their tokens and adds them up, weighted.

    docs/formats.md#combine has the rule. A choice without a row (its id was -1) is
    skipped. The sum is the same for every number of ranks.

    `expert_rows` are float32 `[n_rows, hidden]` in the order of `results[rank].rows`,
    `topk_weights` float32 `[n_tokens, top_k]`. `round_sum` rounds float32 to what the
    combine dtype holds, as float32. Returns each rank's sums, float32 `[n_tokens,
    hidden]`, *before* their last rounding, the caller's (`float32_to_bfloat16`).
    """
    _check_combine(expert_rows, results, topk_weights)
    all_rows, sums = np.concatenate(list(expert_rows)), []
    src_ranks = np.concatenate([r.src_ranks for r in results])
    src_info = np.concatenate([r.src_info for r in results])
    of_all = replace(results[0], src_ranks=src_ranks, src_info=src_info)
    for rank, weights in enumerate(topk_weights):
        acc, _ = _sum_of_rank(rank, all_rows, of_all, weights)
        _add_shared_expert(acc, expert_rows[rank], results[rank], round_sum)
        sums.append(acc)
    return sums


def combine_sums(
    expert_rows: Sequence[np.ndarray],
    results: Sequence[DispatchResult],
    topk_weights: Sequence[np.ndarray],
    round_partial: Callable = lambda x: x,
    round_sum: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    rounds_own: bool = False,
    ranks_per_host: int | None = None,
) -> list[np.ndarray]:
    """Adds up a token's rows on each rank of its experts, then these sums.

    docs/formats.md#combine has the rule. The sum depends on where experts live, unlike
    that of `combine`. With one rank both are the same, bit for bit.

    `round_partial` rounds float32 to what the wire's type holds, as float32; by default
    the wire has float32. If it quantizes, it returns values and a scale for each, both
    float32, and then `acc = fma(value, scale, acc)`. `rounds_own`: whether the sum of
    the token's own rank, too, is rounded by `round_sum` (low-latency calls of PyTorch).
    `ranks_per_host`: with `EPConfig.hierarchical` one rank of each other host, that
    with the place of the token's rank, adds its host's sums to its own, and sends that.
    The other arguments and the result are those of `combine`.
    """
    _check_combine(expert_rows, results, topk_weights)
    sums = []
    for rank, weights in enumerate(topk_weights):
        groups = zip(expert_rows, results)
        partials = [_sum_of_rank(rank, *group, weights) for group in groups]
        if ranks_per_host:
            partials = _sums_of_hosts(partials, rank, ranks_per_host, round_partial)
        acc, _ = partials.pop(rank)
        if rounds_own:
            acc = typed("sum", round_sum(acc), np.float32)
        for partial in partials:
            _add_partial(acc, *partial, round_partial)
        _add_shared_expert(acc, expert_rows[rank], results[rank], round_sum)
        sums.append(acc)
    return sums


def softmax_top_k(
    logits: np.ndarray, top_k: int, renormalize: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the experts of each token, as `max_ep.softmax_top_k` does.

    `logits` are `[n_tokens, n_experts]`. Returns ids `[n_tokens, top_k]` int32, by
    falling logit, NaN first, equal ones by id; and their weights float64, before they
    are rounded to float32. With `renormalize` a token's weights add up to one.
    """
    if logits.ndim != 2:
        shape = list(logits.shape)
        raise ValueError(f"logits must be [n_tokens, n_experts], got {shape}")
    checked_int("top_k", top_k, 1, logits.shape[1], ", the experts of logits")
    is_nan = np.isnan(logits)
    falling = np.where(is_nan, -np.inf, -logits.astype(np.float64))
    by_id = np.broadcast_to(np.arange(logits.shape[1]), logits.shape)
    ids = np.lexsort((by_id, falling, ~is_nan), axis=1)[:, :top_k]
    chosen = np.take_along_axis(logits.astype(np.float64), ids, 1)
    with np.errstate(invalid="ignore"):
        weights = np.exp(chosen - chosen[:, :1])
        of_all = weights if renormalize else np.exp(logits - chosen[:, :1])
        return ids.astype(np.int32), weights / of_all.sum(1, keepdims=True)


def balance_ids(
    topk_ids: np.ndarray, log2phy: np.ndarray, logcnt: np.ndarray
) -> np.ndarray:
    """Replaces a rank's logical experts by replicas, as `max_ep.balance_ids` does.

    The tables are those of one layer, `[n_logical, max_replicas]` and `[n_logical]`.
    Choice `k` of token `n` goes to replica `(n * top_k + k) % count`. An id below 0
    stays; one that no expert has becomes what no physical expert has.
    """
    n_logical = len(logcnt)
    if log2phy.ndim != 2 or logcnt.shape != log2phy.shape[:1]:
        raise ValueError(
            "log2phy and logcnt must be [n_logical, max_replicas] and [n_logical], got"
            f" {list(log2phy.shape)} and {list(logcnt.shape)}; pass those of one layer"
        )
    expert = topk_ids.clip(0, n_logical - 1)
    choice = np.arange(topk_ids.size).reshape(topk_ids.shape)
    physical = log2phy[expert, choice % np.maximum(logcnt[expert], 1)]
    # As `as_no_expert` in `failures.mojo` says, which takes it back for the error.
    marked = topk_ids - np.int64(2**31)
    wrong = np.where(topk_ids < MAX_EXPERTS, marked, topk_ids)
    physical = np.where(topk_ids < n_logical, physical, wrong)
    return np.where(topk_ids < 0, topk_ids, physical).astype(np.int32)


def degraded(
    topk_ids: np.ndarray, topk_weights: np.ndarray, n_experts: int, masked: Sequence
) -> tuple[np.ndarray, np.ndarray]:
    """Says which tokens have a choice on a masked rank, and what share the others have.

    Args:
        topk_ids: int32 `[n_tokens, top_k]`; ids outside `[0, n_experts)` do not count.
        topk_weights: float32 `[n_tokens, top_k]`.
        n_experts: Experts of the group.
        masked: Whether each rank is masked, `[n_ranks]`.

    Returns:
        Flags, bool `[n_tokens]`, and shares, float32 `[n_tokens]`; 1 without a flag.
    """
    _check_same_shape(topk_weights, topk_ids)
    is_expert = (topk_ids >= 0) & (topk_ids < n_experts)
    owners = np.where(is_expert, topk_ids, 0) // n_local_experts(n_experts, len(masked))
    is_lost = is_expert & np.asarray(masked, bool)[owners]
    all_of = np.zeros(len(topk_ids), np.float32)
    live = all_of.copy()
    for k in range(topk_ids.shape[1]):
        all_of += np.where(is_expert[:, k], topk_weights[:, k], 0)
        live += np.where(is_expert[:, k] & ~is_lost[:, k], topk_weights[:, k], 0)
    flags = is_lost.any(axis=1)
    share = np.divide(live, all_of, out=np.ones_like(live), where=flags & (all_of > 0))
    return flags, share


def moe(
    tokens: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    expert_fn: Callable[[int, np.ndarray], np.ndarray],
    shared_fn: Callable[[np.ndarray], np.ndarray] | None = None,
    round_sum: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Computes an MoE layer without ranks, to check a whole layer.

    `expert_fn` maps an expert id and its tokens, float32 `[m, hidden]`, to float32
    `[m, hidden]`, and is called once for each expert with tokens; `shared_fn` maps all
    tokens. The other arguments are one rank's of `combine`. Returns float32
    `[n_tokens, hidden]`, summed as `combine` does.
    """
    _check_ids([topk_ids], [len(tokens)], np.iinfo(np.int64).max)
    _check_same_shape(topk_weights, topk_ids)
    row_of_choice = np.full(topk_ids.shape, -1)
    expert_rows = [typed("tokens", tokens, np.float32)[:0]]
    n_rows = 0
    for expert_id in np.unique(topk_ids[topk_ids >= 0]):
        token_idx, k = np.nonzero(topk_ids == expert_id)
        row_of_choice[token_idx, k] = n_rows + np.arange(len(k))
        given = tokens[token_idx]
        made = expert_fn(int(expert_id), given)
        _check_made(f"expert_fn made of the tokens of expert {expert_id}", made, given)
        expert_rows.append(made)
        n_rows += len(k)
    all_rows = np.concatenate(expert_rows)
    acc = _weighted_sum(all_rows, row_of_choice, topk_weights)
    if shared_fn is None:
        return acc
    shared = shared_fn(tokens)
    _check_made("shared_fn made of the tokens", shared, tokens)
    return round_sum(acc) + shared


def swiglu(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Runs one SwiGLU expert on its rows, ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``.

    ``x`` is ``[n_rows, hidden_size]``, ``gate_up`` ``[2 * moe_dim, hidden_size]``, gate
    first, and ``down`` ``[hidden_size, moe_dim]``. Returns ``[n_rows, hidden_size]``.
    """
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Computes `a * b + c` of float32 with one rounding, to nearest even.

    The product is exact in float64; the sum is not, and rounded to float64 it may land
    on a tie of the rounding to float32. So the first rounding is *to odd* (truncate,
    and set the last bit if anything was lost), which never makes a tie (Boldo and
    Melquiond, 2008).
    """
    a, b, c = (typed("fma", x, np.float32) for x in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        product = a.astype(np.float64) * b  # exact
        total = np.asarray(product + c)
        # TwoSum (Knuth): `product + c` is `total + lost`, exactly.
        part = total - product
        lost = (product - (total - part)) + (c - part)
        is_inexact = np.isfinite(total) & (lost != 0)
        is_magnitude_up = is_inexact & ((lost < 0) != (total < 0))
        bits = (total.view(np.int64) - is_magnitude_up) | is_inexact
        return bits.view(np.float64).astype(np.float32)


def _add_partial(
    acc: np.ndarray, partial: np.ndarray, has: np.ndarray, round_partial: Callable
) -> None:
    """Adds what is sent of a partial sum."""
    rounded = round_partial(partial[has])
    if isinstance(rounded, tuple):
        acc[has] = fma(*rounded, acc[has])
    else:
        acc[has] += typed("partial", rounded, np.float32)


def _sums_of_hosts(
    partials: list[tuple[np.ndarray, np.ndarray]],
    rank: int,
    ranks_per_host: int,
    round_partial: Callable,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Has one rank of each other host add its host's partial sums to its own."""
    added = list(partials)
    for first in range(0, len(partials), ranks_per_host):
        if first <= rank < first + ranks_per_host:
            continue
        relay = first + rank % ranks_per_host
        acc, has = (x.copy() for x in partials[relay])
        for other in range(first, first + ranks_per_host):
            if other != relay:
                _add_partial(acc, *partials[other], round_partial)
                has |= partials[other][1]
                added[other] = partials[other][0], np.zeros_like(has)
        added[relay] = acc, has
    return added


def _sum_of_rank(
    rank: int, rows: np.ndarray, result: DispatchResult, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of a rank's tokens; returns sums, and which tokens have rows."""
    info = result.src_info
    mine = np.flatnonzero((result.src_ranks == rank) & (info[:, 1] >= 0))
    row_of_choice = np.full(weights.shape, -1)
    row_of_choice[info[mine, 0], info[mine, 1]] = mine
    has = (row_of_choice >= 0).any(axis=1)
    return _weighted_sum(rows, row_of_choice, weights), has


def _add_shared_expert(
    acc: np.ndarray, rows: np.ndarray, result: DispatchResult, round_sum: Callable
) -> None:
    """Adds what a rank's shared expert, if there is one, made of its tokens."""
    shared = np.flatnonzero(result.src_info[:, 1] == -1)
    if len(shared):
        acc[:] = typed("sum", round_sum(acc), np.float32)
        acc[result.src_info[shared, 0]] += rows[shared]


def _weighted_sum(
    rows: np.ndarray, row_of_choice: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Adds each token's weighted rows with `fma`, in choice order.

    `row_of_choice` is `[n_tokens, top_k]`; -1 means that there is no row.
    """
    rows = typed("expert rows", rows, np.float32)
    weights = typed("topk_weights", weights, np.float32)
    acc = np.zeros((len(weights), rows.shape[1]), np.float32)
    for k in range(weights.shape[1]):
        has = np.flatnonzero(row_of_choice[:, k] >= 0)
        row = rows[row_of_choice[has, k]]
        acc[has] = fma(weights[has, k, np.newaxis], row, acc[has])
    return acc


def _check_combine(
    expert_rows: Sequence[np.ndarray],
    results: Sequence[DispatchResult],
    topk_weights: Sequence[np.ndarray],
) -> None:
    """Raises a `ValueError` unless each rank has a row for each it was given, and each
    choice that has a row has a weight."""
    numbers = [len(expert_rows), len(results), len(topk_weights)]
    if numbers != [len(results) or 1] * 3:
        raise ValueError(
            "expert_rows, results and topk_weights must have one entry a rank, got"
            f" {numbers}"
        )
    for name, arrays in (("expert_rows", expert_rows), ("topk_weights", topk_weights)):
        for rank, array in enumerate(arrays):
            if array.ndim != 2:
                shape = list(array.shape)
                raise ValueError(f"rank {rank}: {name} must be a matrix, got {shape}")
    for rank, (rows, result) in enumerate(zip(expert_rows, results)):
        if len(rows) != (n := len(result.src_ranks)):
            raise ValueError(f"rank {rank}: {counted(len(rows), 'row')}, needs {n}")
    for rank, weights in enumerate(topk_weights):
        for result in results:
            choices = result.src_info[result.src_ranks == rank]
            for token_idx, k in choices[(choices >= weights.shape).any(axis=1)][:1]:
                raise ValueError(
                    f"rank {rank}: topk_weights is {list(weights.shape)}, and token"
                    f" {token_idx}, choice {k} was dispatched; pass a weight for"
                    " each choice, [n_tokens, top_k]"
                )


def _check_same_shape(topk_weights: np.ndarray, topk_ids: np.ndarray) -> None:
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights must have the shape of topk_ids, {list(topk_ids.shape)}, "
            f"got {list(topk_weights.shape)}"
        )


def _check_made(what: str, made: np.ndarray, given: np.ndarray) -> None:
    """Raises a `ValueError` unless there is a row of the same size for each token."""
    if np.shape(made) != given.shape:
        shape, wanted = list(np.shape(made)), list(given.shape)
        raise ValueError(f"what {what} has shape {shape}; it must have {wanted}")


def _check_ids(
    topk_ids: Sequence[np.ndarray], n_tokens: Sequence[int], n_experts: int
) -> None:
    """Raises a `ValueError` that says which rank's ids are wrong, if any."""
    shapes = [ids.shape for ids in topk_ids]
    if not shapes or shapes != [(n, *shapes[0][-1:]) for n in n_tokens]:
        raise ValueError(
            f"topk_ids must be [n_tokens, top_k] on each rank, with n_tokens"
            f" {list(n_tokens)} and one top_k, got {shapes}"
        )
    for rank, ids in enumerate(topk_ids):
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"rank {rank}: topk_ids must be integers, got {ids.dtype}")
        for token_idx, k in np.argwhere((ids < -1) | (ids >= n_experts))[:1]:
            raise ValueError(
                f"rank {rank}, token {token_idx}, choice {k}: id"
                f" {ids[token_idx, k]} is outside [-1, {n_experts})"
            )
