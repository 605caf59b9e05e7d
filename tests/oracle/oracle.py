# SPDX-License-Identifier: Apache-2.0
"""What ranks must get of a case's inputs: `max_ep/reference.py` is asked.

It knows no input scales, no protocols and no ranks that add up for themselves.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from max.dtype import DType

from max_ep.formats import BY_NAME
from max_ep.quantize import quantize_nvfp4_dynamic
from max_ep.reference import (
    DispatchResult,
    combine,
    combine_sums,
    dispatch,
    float32_to_bfloat16,
)
from tests.oracle.cases import Case
from tests.oracle.drawn import Inputs, narrow, widen
from tests.oracle.row_layouts import PaddedResult, drop_rows, pad, unpad


@dataclass
class Expected:
    """What the oracle says, all as bits of the tensors' element types."""

    dispatch: list[DispatchResult] | list[PaddedResult]
    combine: list[np.ndarray]
    dropped: list[tuple[np.ndarray, np.ndarray]] | None = None
    """With a cap on rows: how many are dropped of each token, of each local expert."""

    def of(self, ranks: slice) -> "Expected":
        """What some of the ranks must get."""
        dropped = self.dropped and self.dropped[ranks]
        return Expected(self.dispatch[ranks], self.combine[ranks], dropped)


def expected(case: Case, given: Inputs, ranks_per_host: int | None = None) -> Expected:
    if case.use_allreduce:
        return _each_rank_alone(case, given)
    results = _dispatch(case, given)
    dispatched = _in_layout(case, results)
    if given.expert_rows is None:
        rows = [r.rows for r in results]
    elif case.is_padded:
        counts = [p.recv_counts for p in dispatched]
        rows = [unpad(x, n) for x, n in zip(given.expert_rows, counts)]
    else:
        rows = [x[: len(r.rows)] for x, r in zip(given.expert_rows, results)]
    rows = [widen(x) for x in rows]

    def rounds_to(dtype: DType) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: widen(narrow(x, dtype))

    round_sum = rounds_to(case.combine)
    if case.combines_sums:
        round_partial = rounds_to(case.partial_dtype or case.combine)
        if case.partial is not None:
            form = BY_NAME[case.partial]
            round_partial = lambda x: form.widen(*form.quantize(x))  # noqa: E731
        how = dict(ranks_per_host=ranks_per_host if case.hierarchical else None)
        rounds = round_partial, round_sum
        sums = combine_sums(rows, results, given.weights, *rounds, **how)
    else:
        sums = combine(rows, results, given.weights, round_sum)
    is_capped = case.max_output_rows is not None
    dropped = _dropped(case, given, results) if is_capped else None
    return Expected(dispatched, [narrow(x, case.combine) for x in sums], dropped)


def _dropped(
    case: Case, given: Inputs, kept: list[DispatchResult]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts what is chosen and does not come."""
    of_tokens = [(ids >= 0).sum(axis=1) for ids in given.ids]
    for result in kept:
        for src_rank, (token, k) in zip(result.src_ranks, result.src_info):
            of_tokens[src_rank][token] -= k >= 0
    all_rows = _dispatch(replace(case, max_output_rows=None), given)
    of_experts = [
        np.diff(many.row_offsets.astype(int)) - np.diff(few.row_offsets.astype(int))
        for many, few in zip(all_rows, kept)
    ]
    return list(zip(of_tokens, (n[-case.n_local_experts :] for n in of_experts)))


def _each_rank_alone(case: Case, given: Inputs) -> Expected:
    """Asks the oracle about each rank, with the experts that are there."""
    n_local = case.n_local_experts
    alone = replace(case, n_ranks=1, n_experts=n_local, use_allreduce=False)
    both = Expected([], [])
    for rank in range(case.n_ranks):
        first = rank * n_local
        ids, here = given.ids[rank] - first, slice(rank, rank + 1)
        scales, rows = given.input_scales, given.expert_rows
        of_rank = Inputs(
            given.tokens[here],
            [np.where((ids >= 0) & (ids < n_local), ids, -1)],
            given.weights[here],
            None if scales is None else scales[first : first + n_local],
            None if rows is None else rows[here],
        )
        want = expected(alone, of_rank)
        both.dispatch += want.dispatch
        both.combine += want.combine
    return both


def expected_dispatch(
    case: Case, given: Inputs
) -> list[DispatchResult] | list[PaddedResult]:
    return _in_layout(case, _dispatch(case, given))


def _in_layout(
    case: Case, results: list[DispatchResult]
) -> list[DispatchResult] | list[PaddedResult]:
    if not case.is_padded:
        return results
    return [pad(result, case.n_ranks, case.capacity) for result in results]


def _dispatch(case: Case, given: Inputs) -> list[DispatchResult]:
    quantize = case.token_format.quantize
    if case.has_rounded_scales:
        quantize = functools.partial(quantize, power_of_two_scales=True)
    tokens = [widen(t) for t in given.tokens] if quantize else given.tokens
    # The oracle knows no input scales: then it routes only.
    how = dict(quantize=quantize, shared_expert=case.fused_shared_expert)
    has_scales = given.input_scales is not None
    results = dispatch(tokens, given.ids, case.n_experts, **({} if has_scales else how))
    for rank, result in enumerate(results):
        if has_scales:
            # Every row is scaled by the expert it stands for, then encoded.
            first = rank * case.n_local_experts
            per_expert = np.diff(result.row_offsets.astype(np.int64))
            expert_of = first + np.repeat(np.arange(case.n_local_experts), per_expert)
            scale_of = given.input_scales[expert_of % len(given.input_scales)]
            result.rows = widen(result.rows) * scale_of[:, np.newaxis]
            if quantize:
                result.rows, scales = quantize(result.rows)
                result.scales = scales.T.copy()
            else:
                result.rows = narrow(result.rows, case.tokens)
        if case.row_scales:
            of_tokens = [quantize_nvfp4_dynamic(x)[2] for x in tokens]
            where = zip(result.src_ranks, result.src_info[:, 0])
            scales = np.array([of_tokens[r][t] for r, t in where], np.float32)
            result.row_scales = float32_to_bfloat16(scales)
    if case.max_output_rows is None:
        return results
    return [drop_rows(r, case.n_ranks, case.max_output_rows) for r in results]
