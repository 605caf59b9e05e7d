# SPDX-License-Identifier: Apache-2.0
"""What combining to sums costs in precision, and what it saves on the wire.

    python -m bench.combine_error

Computed by the oracle: no ranks run. Expert rows are normal and bfloat16, router
weights a softmax, experts drawn uniformly. The error is that of a result against
the sum in float64, as root mean square, relative to that of the results.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from max_ep.formats import BY_NAME
from max_ep.reference import (
    bfloat16_to_float32,
    combine,
    combine_sums,
    dispatch,
    float32_to_bfloat16,
)

N_EXPERTS, TOP_K, HIDDEN_SIZE, N_TOKENS = 256, 8, 256, 64
PARTIALS = ("bfloat16", "float32", "fp8", "mxfp8")
"""What partial sums may be."""


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return bfloat16_to_float32(float32_to_bfloat16(x))


def measure(n_ranks: int) -> dict[str, float]:
    """Returns relative errors of combining ``rows``, and to sums of :data:`PARTIALS`;
    and how many rows and partials of a token cross between ranks."""
    rng = np.random.default_rng(1)
    ids, weights = [], []
    for _ in range(n_ranks):
        logits = rng.normal(size=(N_TOKENS, N_EXPERTS))
        picked = np.argsort(-logits, axis=1)[:, :TOP_K]
        ids.append(picked.astype(np.int32))
        odds = np.exp(np.take_along_axis(logits, picked, 1))
        weights.append((odds / odds.sum(1, keepdims=True)).astype(np.float32))
    tokens = [np.zeros((N_TOKENS, 1), np.float32)] * n_ranks
    results = dispatch(tokens, ids, N_EXPERTS)
    rows = [
        to_bfloat16(rng.normal(size=(len(r.rows), HIDDEN_SIZE)).astype(np.float32))
        for r in results
    ]
    exact = [np.zeros((N_TOKENS, HIDDEN_SIZE)) for _ in range(n_ranks)]
    for own, result in zip(rows, results):
        for src_rank in range(n_ranks):
            mine = result.src_ranks == src_rank
            token_idx, k = result.src_info[mine].T
            weight = weights[src_rank][token_idx, k, None].astype(np.float64)
            np.add.at(exact[src_rank], token_idx, weight * own[mine])

    def error(sums: list[np.ndarray]) -> float:
        got = to_bfloat16(np.stack(sums))
        want = np.stack(exact)
        return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))

    def quantize(name: str) -> Callable:
        form = BY_NAME[name]
        return lambda x: form.widen(*form.quantize(x))

    rounds = {"bfloat16": to_bfloat16, "float32": lambda x: x}
    rounds |= {name: quantize(name) for name in PARTIALS[2:]}
    owners = [np.sort(x // -(-N_EXPERTS // n_ranks), axis=1) for x in ids]
    is_away = [x != rank for rank, x in enumerate(owners)]
    is_first = [np.diff(x, axis=1, prepend=-1) > 0 for x in owners]
    return {
        "rows": error(combine(rows, results, weights)),
        **{
            n: error(combine_sums(rows, results, weights, f)) for n, f in rounds.items()
        },
        "n_rows": np.mean([x.sum(1) for x in is_away]),
        "n_partials": np.mean([(a & f).sum(1) for a, f in zip(is_away, is_first)]),
    }


def main() -> None:
    """Prints what docs/concepts.md and docs/formats.md say of errors."""
    columns = ["ranks", "rows", *(f"{name} partials" for name in PARTIALS)]
    columns.append("rows of a token that cross, and partial sums instead")
    print(f"| {' | '.join(columns)} |")
    print("| --- " * len(columns) + "|")
    for n_ranks in (2, 4, 8, 16):
        m = measure(n_ranks)
        print(
            f"| {n_ranks} | "
            + " | ".join(f"{m[name]:.2e}" for name in ("rows", *PARTIALS))
            + f" | {m['n_rows']:.2f}, {m['n_partials']:.2f} |"
        )


if __name__ == "__main__":
    main()
