# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a case are given.

A *routing* says how many tokens each rank has and which experts they choose. *Data* is
what the tokens hold. Everything is a function of names and a fixed seed, so any process
can make the same again. Bfloat16 is kept as its bits (`uint16`), as in the oracle.
"""

from dataclasses import dataclass

import numpy as np
from max.dtype import DType

from max_ep.reference import bfloat16_to_float32, float32_to_bfloat16
from tests.oracle.cases import BF16, Case

ROUTINGS = [
    "uniform",  # as many tokens as it comes; experts without preference
    "zipf",  # expert e is 1 / (e + 1) as likely as expert 0
    "full",  # all ranks full, all tokens to the same top_k experts
    "one_silent",  # one rank has no token
    "all_silent",  # no rank has a token
    "masked",  # ids of -1 here and there, and whole tokens of them
    "all_masked",  # nothing but -1
]


@dataclass
class Inputs:
    """What the ranks of one case are given: lists with one entry a rank."""

    tokens: list[np.ndarray]
    ids: list[np.ndarray]
    weights: list[np.ndarray]
    input_scales: np.ndarray | None  # The same on every rank; None if the case has none
    expert_rows: list[np.ndarray] | None
    """`[*rows_shape, hidden_size]`, or None: the dispatched rows go back."""


def _rng(*names: object) -> np.random.Generator:
    """Makes a generator of its own for everything that has a name."""
    return np.random.default_rng(list("/".join(map(str, names)).encode()))


def token_counts(case: Case, routing: str) -> list[int]:
    n, most = case.n_ranks, case.max_tokens_per_rank
    if routing == "full":
        return [most] * n
    if routing == "all_silent":
        return [0] * n
    counts = _rng(case, routing).integers(1, most + 1, n).tolist()
    if routing == "one_silent":
        counts[len(counts) // 2] = 0
    return counts


def expert_ids(case: Case, routing: str, counts: list[int]) -> list[np.ndarray]:
    """Picks the experts of each token: int32 `[n_tokens, top_k]` a rank."""
    rng = _rng(case, routing, "ids")
    weight = np.ones(case.n_experts)
    if routing == "zipf":
        weight = 1 / np.arange(1, case.n_experts + 1)
    n_choosable = case.top_k if routing == "full" else case.n_experts
    picked = []
    for n in counts:
        # The top_k of `weight` with Gumbel noise: drawn without replacement.
        noise = rng.gumbel(size=(n, n_choosable))
        order = np.argsort(-(np.log(weight[:n_choosable]) + noise), axis=1)
        ids = order[:, : case.top_k].astype(np.int32)
        if routing == "masked":
            ids[rng.random(ids.shape) < 0.4] = -1
            ids[1::3] = -1
        if routing == "all_masked":
            ids[:] = -1
        picked.append(ids)
    return picked


def telling_tokens(case: Case, rank: int, n: int) -> np.ndarray:
    """Makes tokens that say where they are from, as float32 `[n, hidden]`. Column 0
    holds the rank and column 1 the token's index; every element is an integer in [-127,
    127], so exact in bfloat16 and a product with a small power of two."""
    token, column = np.ogrid[:n, : case.hidden_size]
    x = (7 * column + 31 * token + 53 * rank) % 255 - 127
    x[:, 0] = rank + 1
    x[:, 1] = np.arange(n) % 127 + 1
    return x.astype(np.float32)


def random_tokens(case: Case, rank: int, n: int) -> np.ndarray:
    """Makes float32 `[n, hidden]` of which blocks differ much in magnitude. Among the
    blocks are zeros, both of them, and some below the floor of the FP8 scales."""
    rng = _rng(case, "tokens", rank, n)
    x = rng.normal(size=(n, case.hidden_size))
    block = np.arange(case.hidden_size) // 128
    x *= 10.0 ** rng.integers(-7, 7, (n, block[-1] + 1))[:, block]
    x[rng.random(x.shape) < 0.05] = 0
    x[rng.random(x.shape) < 0.05] *= -0.0
    x[2::4, :128] = -0.0
    return x.astype(np.float32)


def make_inputs(
    case: Case, routing: str, data: str = "random", counts: list[int] | None = None
) -> Inputs:
    """Makes what the ranks are given; `data`: `telling`, `random` or `any_bits`."""
    counts = token_counts(case, routing) if counts is None else counts
    rng = _rng(case, routing, data)
    make = telling_tokens if data == "telling" else random_tokens
    tokens = [narrow(make(case, r, n), case.tokens) for r, n in enumerate(counts)]
    if data == "any_bits":
        tokens = [
            rng.integers(0, 1 << 8 * t.itemsize, t.shape, np.uint64)
            .astype(f"u{t.itemsize}")
            .view(t.dtype)
            for t in tokens
        ]
    scales = input_scales(case, rng)
    rows = None
    if not case.sends_rows_back:
        shape = (*case.rows_shape, case.hidden_size)
        rows = [
            narrow(rng.normal(size=shape).astype(np.float32), case.combine)
            for _ in counts
        ]
    return Inputs(
        tokens=tokens,
        ids=expert_ids(case, routing, counts),
        weights=[rng.normal(size=(n, case.top_k)).astype(np.float32) for n in counts],
        input_scales=scales,
        expert_rows=rows,
    )


def input_scales(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    if case.scales is None:
        return None
    n_scales = 1 if case.scales == "one" else case.n_experts
    return rng.uniform(0.1, 3, n_scales).astype(np.float32)


def narrow(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Rounds float32 to a dtype's bits; float32 stays what it is."""
    return float32_to_bfloat16(x) if dtype == BF16 else x


def widen(bits: np.ndarray) -> np.ndarray:
    return bfloat16_to_float32(bits) if bits.dtype == np.uint16 else bits
