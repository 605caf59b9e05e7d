# SPDX-License-Identifier: Apache-2.0
"""Checks the oracle from outside: torch, C, plain loops.

Every other test trusts `max_ep/reference.py`, so nothing here may be computed
with it twice: an expected value comes from torch, from C, or from loops that say the
same in another way.
"""

import ctypes
import ctypes.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from max_ep import reference
from max_ep.reference import (
    bfloat16_to_float32,
    combine,
    combine_sums,
    dispatch,
    float8_e4m3fn_to_float32,
    float32_to_bfloat16,
    float32_to_float8_e4m3fn,
    fma,
    moe,
    quantize_blockwise_fp8,
)
from tests import harness
from tests.errors import raises, refused
from tests.oracle.cases import Case
from tests.oracle.drawn import expert_ids, telling_tokens
from tests.oracle.row_layouts import drop_rows, kept_rows, pad, unpad

HIDDEN = 16


def f32(*values) -> np.ndarray:
    return np.array(values, np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds to what bfloat16 holds."""
    return bfloat16_to_float32(float32_to_bfloat16(x))


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Compares bit for bit, so that -0.0 is not 0.0; any NaN equals any NaN."""
    if got.dtype.kind == want.dtype.kind == "f":
        got, want = (np.where(np.isnan(x), x.dtype.type("nan"), x) for x in (got, want))
    harness.assert_same_bits("", got, want)


# --- Element types ---------------------------------------------------------


def float32_samples() -> np.ndarray:
    """Float32 of every magnitude, and both neighbours of every rounding tie."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    ordinary = rng.normal(0, 50, 50_000).astype(np.float32)
    bf16_ties = (np.arange(2**17, dtype=np.uint32) << np.uint32(15)).view(np.float32)
    fp8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    fp8 = fp8.to(torch.float32).numpy()
    fp8_ties = np.concatenate([fp8, (fp8[1:] + fp8[:-1]) / 2, f32(464, 480)])
    ties = np.concatenate([bf16_ties, fp8_ties, -fp8_ties])
    with np.errstate(over="ignore", invalid="ignore"):
        below, above = (np.nextafter(ties, f32(end)) for end in (-np.inf, np.inf))
    special = f32(0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38)
    return np.concatenate([x, ordinary, ties, below, above, special])


# To bits, from bits, in torch, type of the bits, NaN.
BF16 = float32_to_bfloat16, bfloat16_to_float32, torch.bfloat16, np.uint16, 0x7FC0
FP8 = (
    *(float32_to_float8_e4m3fn, float8_e4m3fn_to_float32),
    *(torch.float8_e4m3fn, np.uint8, 0x7F),
)


@pytest.mark.parametrize("narrow, widen, dtype, kind, nan", [BF16, FP8])
def test_element_types_are_torchs(narrow, widen, dtype, kind, nan):
    """Rounding of all samples; every bit pattern widened, and back again."""
    bits = np.arange(np.iinfo(kind).max + 1, dtype=kind)
    x = float32_samples()
    wide = torch.from_numpy(x)
    if kind == np.uint8:  # Not every torch saturates; NaN passes through.
        wide = wide.clamp(-448, 448)
    want = wide.to(dtype).view(torch.from_numpy(bits).dtype).numpy()
    got, is_nan = narrow(x), np.isnan(x)
    assert_same_bits(got[~is_nan], want[~is_nan])
    assert is_nan.any() and (got[is_nan] == nan).all()

    x = widen(bits)
    assert_same_bits(x, torch.from_numpy(bits).view(dtype).to(torch.float32).numpy())
    is_number = ~np.isnan(x)
    assert_same_bits(narrow(x[is_number]), bits[is_number])


# --- Fused multiply-add ----------------------------------------------------


fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
"""That of C, which rounds once."""
fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3


ULP = 2.0**-23


def fma_samples() -> dict[str, tuple]:
    """Draws factors and addends, by kind."""
    rng = np.random.default_rng(3)
    n = 4000
    c = rng.uniform(1, 2, n).astype(np.float32)
    tie = rng.choice([-1, 1], n) * 2.0**-24
    off, ulps = 2.0 ** -rng.integers(1, 12, n), rng.integers(1, 4, (2, n)) * ULP
    bits = rng.integers(0, 2**32, (3, 12000), dtype=np.uint64)
    any_bits = bits.astype(np.uint32).view(np.float32)
    small = rng.uniform(-4, 4, (3, n)) * 2.0**-75
    large = rng.uniform(0.9, 1.1, (3, n)) * 2.0**64
    large[1, 1::2] *= -1
    samples = {
        "beside a tie": (1 + off, tie * (1 - off), c),
        "nearer than float64": (1 + ulps[0], tie * (1 - ulps[1]), c),
        "any bits": any_bits[:, np.isfinite(any_bits).all(axis=0)],
        "subnormal": (*small[:2], small[2] * 2.0**-72),
        "largest": (*large[:2], large[2] * 2.0**39),
    }
    values = f32(0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, 1e-45)
    samples["special"] = [x.ravel() for x in np.meshgrid(values, values, values)]
    return {name: tuple(f32(*x) for x in of) for name, of in samples.items()}


@pytest.mark.parametrize("name", SAMPLES := fma_samples())
def test_fma_is_that_of_c(name):
    a, b, c = SAMPLES[name]
    with np.errstate(invalid="ignore", over="ignore"):
        assert_same_bits(fma(a, b, c), f32(*map(fmaf, a, b, c)))


# --- Dispatch --------------------------------------------------------------

# (n_tokens of each rank, n_experts, top_k, routing)
CASES = {
    "one_rank": ([7], 4, 2, "uniform"),
    "four_ranks": ([16, 16, 16, 16], 32, 8, "uniform"),
    "uneven_7_on_5": ([4, 7, 5, 1, 2], 7, 3, "uniform"),  # last rank: none
    "fewer_experts_than_ranks": ([3, 3, 3, 3], 2, 2, "uniform"),
    "one_expert": ([3, 2], 1, 1, "uniform"),
    "empty_first_rank": ([0, 3], 4, 2, "uniform"),
    "no_tokens": ([0, 0], 4, 2, "uniform"),
    "all_to_one": ([9, 9, 9], 6, 1, "full"),
    "all_masked": ([5, 5], 8, 4, "all_masked"),
    "masked_empty_uneven": ([0, 13, 7, 2], 11, 5, "masked"),
    "top_32": ([5, 6], 40, 32, "uniform"),
    "top_all": ([4, 4, 4], 9, 9, "uniform"),
    "same_expert_twice": ([6, 5], 3, 5, "repeated"),
}


def make_tokens(counts: list[int], hidden: int = HIDDEN) -> list[np.ndarray]:
    case = Case("tokens", len(counts), 1, 1, hidden, max(counts))
    return [telling_tokens(case, rank, n) for rank, n in enumerate(counts)]


def make_case(counts, n_experts, top_k, routing) -> SimpleNamespace:
    rng = np.random.default_rng(6)
    case = Case("", len(counts), n_experts, top_k, HIDDEN, max(counts))
    if routing == "repeated":
        ids = [rng.integers(0, n_experts, (n, top_k), dtype=np.int32) for n in counts]
    else:
        ids = expert_ids(case, routing, counts)
    return SimpleNamespace(
        n_ranks=case.n_ranks,
        n_experts=n_experts,
        n_local=case.n_local_experts,
        top_k=top_k,
        n_tokens=counts,
        tokens=make_tokens(counts),
        ids=ids,
        weights=[rng.random((n, top_k), np.float32) - 0.25 for n in counts],
    )


@pytest.fixture(params=CASES)
def c(request) -> SimpleNamespace:
    return make_case(*CASES[request.param])


def rows_in_order(c, rank: int, local_expert: int) -> list[tuple[int, int, int]]:
    """Says the order of an expert's rows as plain loops: source rank, token, k."""
    expert = rank * c.n_local + local_expert
    return [
        (src_rank, token_idx, k)
        for src_rank in range(c.n_ranks)
        for token_idx in range(len(c.tokens[src_rank]))
        for k in range(c.top_k)
        if c.ids[src_rank][token_idx, k] == expert
    ]


def test_dispatch_is_the_plain_loops(c):
    """Also of padded rows, where each expert's begin at its own first."""
    results = dispatch(c.tokens, c.ids, c.n_experts)
    assert len(results) == c.n_ranks
    capacity = c.n_ranks * max(*map(len, c.ids), 1, 1) * c.top_k
    for rank, result in enumerate(results):
        groups = [rows_in_order(c, rank, e) for e in range(c.n_local)]
        rows = sum(groups, [])
        want = f32(*(c.tokens[r][t] for r, t, _ in rows)).reshape(-1, HIDDEN)
        assert_same_bits(result.rows, want)
        offsets = np.cumsum([0, *map(len, groups)])
        assert_same_bits(result.row_offsets, offsets.astype(np.uint32))
        numbers = np.array(rows, np.int32).reshape(-1, 3)
        assert_same_bits(result.src_info, numbers[:, 1:])
        assert_same_bits(result.src_ranks, numbers[:, 0])
        assert_same_bits(result.expert_ids, np.arange(c.n_local, dtype=np.int32))
        assert result.scales is None
        padded = pad(result, c.n_ranks, capacity)
        assert padded.rows.shape == (c.n_local, capacity, HIDDEN)
        for e, group in enumerate(groups):
            n, sources = len(group), [src_rank for src_rank, _, _ in group]
            mine = slice(offsets[e], offsets[e + 1])
            assert_same_bits(padded.rows[e, :n], want[mine])
            assert_same_bits(padded.src_info[e, :n], numbers[mine, 1:])
            assert padded.recv_counts[e] == n
            for src_rank in range(c.n_ranks):
                begin = sum(source < src_rank for source in sources)
                of_source = [begin, sources.count(src_rank)]
                assert padded.recv_ranges[e, src_rank].tolist() == of_source
        assert_same_bits(unpad(padded.rows, padded.recv_counts), result.rows)


def test_dispatch_quantizes(c):
    """And the scales of padded rows: `s` of row `j` is at `[expert, s, j]`."""
    tokens = make_tokens(c.n_tokens, hidden=256)
    quantized = [quantize_blockwise_fp8(t) for t in tokens]
    results = dispatch(tokens, c.ids, c.n_experts, quantize=quantize_blockwise_fp8)
    for result in results:
        n = len(result.src_ranks)
        assert (result.rows.shape, result.rows.dtype) == ((n, 256), np.uint8)
        assert (result.scales.shape, result.scales.dtype) == ((2, n), np.float32)
        assert result.scales.flags.c_contiguous
        padded = pad(result, c.n_ranks, max(n, 1))
        starts = result.row_offsets.astype(int)
        for row in range(n):
            values, scales = quantized[result.src_ranks[row]]
            token_idx = result.src_info[row, 0]
            assert_same_bits(result.rows[row], values[token_idx])
            assert_same_bits(result.scales[:, row], scales[token_idx])
            e = np.searchsorted(starts, row, "right") - 1
            at = (e * 2 + np.arange(2)) * max(n, 1) + row - starts[e]
            assert_same_bits(padded.scales.reshape(-1)[at], scales[token_idx])


# --- Other layouts of the rows ----------------------------------------------


IDS = np.zeros((3, 2), np.int32)
WEIGHTS = np.ones((3, 2), np.float32)
REFUSED = """
to_bfloat16(np.ones(2)) | got float64
to_fp8(np.ones(2)) | got float64
quantize_blockwise_fp8(np.ones((2, 128))) | got float64
fma(f32(1), f32(1), np.ones(1)) | got float64
n_local_experts(0, 1) | n_ranks=1
n_local_experts(4, 0) | n_ranks=0
dispatch([x, x], [IDS, IDS + 7], 7) | rank 1, token 0, choice 0: id 7 is outside [-1, 7)
dispatch([x, x], [IDS - 2, IDS], 7) | rank 0, token 0, choice 0: id -2 is outside [-1
dispatch([x, x[:2]], [IDS, IDS], 7) | n_tokens
dispatch([x], [IDS, IDS], 7) | n_tokens
dispatch([x, x], [IDS, IDS[:, :1]], 7) | top_k
dispatch([x, half], [IDS, IDS], 7) | element type
dispatch([half], [IDS], 7, quantize=quantize_blockwise_fp8) | must be float32
combine([both, x], sent, [WEIGHTS, WEIGHTS]) | rank 1: 3 rows, needs 0
combine([both, none], sent, [WEIGHTS, np.ones((3, 2))]) | topk_weights must be float32
combine([both, none], sent, [WEIGHTS, WEIGHTS[:, :1]]) | rank 1: topk_weights
combine_sums([both, none], sent, [WEIGHTS, WEIGHTS[:2]]) | rank 1: topk_weights
combine_sums([both, x], sent, [WEIGHTS, WEIGHTS]) | rank 1: 3 rows, needs 0
moe(x, IDS - 2, WEIGHTS, None) | id -2 is outside
moe(x, IDS.astype(np.float32), WEIGHTS, None) | integers, got float32
moe(x, IDS[:1], WEIGHTS, None) | n_tokens
moe(x, IDS, WEIGHTS[:, :1], None) | shape of topk_ids
moe(x, IDS, WEIGHTS, lambda e, x: np.tile(x, (2, 1))) | expert 0; [12, 16]; [6, 16]
moe(x, IDS, WEIGHTS, lambda e, x: x, lambda x: x[:1]) | shared_fn; [1, 16]; [3, 16]
dispatch([x], [], 7) | n_tokens
combine([both], sent, [WEIGHTS, WEIGHTS]) | one entry a rank, got [1, 2, 2]
combine([both, none], sent, [WEIGHTS]) | one entry a rank, got [2, 2, 1]
combine_sums([both, none], sent, [WEIGHTS]) | one entry a rank, got [2, 2, 1]
combine([both, none], sent, [WEIGHTS[0]] * 2) | topk_weights must be a matrix, got [2]
softmax_top_k(x, 0) | top_k=0 must be an integer from 1 to 16
softmax_top_k(x, 17) | top_k=17 must be an integer from 1 to 16
softmax_top_k(x[0], 1) | logits must be [n_tokens, n_experts], got [16]
degraded(IDS, WEIGHTS[:, :1], 2, [0, 1]) | shape of topk_ids
balance_ids(IDS, IDS, IDS[0]) | [3, 2] and [2]; one layer
"""


@refused(REFUSED)
def test_what_does_not_fit_is_refused(arguments, words):
    (x,) = make_tokens([3])
    sent = dispatch([x, x], [IDS, IDS], 2)
    given = dict(x=x, half=x.astype(np.float16), sent=sent, none=x[:0])
    given |= dict(both=sent[0].rows, to_bfloat16=BF16[0], to_fp8=FP8[0])
    with raises((ValueError, TypeError), words):
        eval(arguments, vars(reference) | globals() | given)


def test_shared_rows_come_first(c):
    """All own tokens, masked ones too; after them all is as without."""
    plain = dispatch(c.tokens, c.ids, c.n_experts)
    shared = dispatch(c.tokens, c.ids, c.n_experts, shared_expert=True)
    for rank, (without, result) in enumerate(zip(plain, shared)):
        n = len(c.tokens[rank])
        own = np.stack([np.arange(n), np.full(n, -1)], axis=1).astype(np.int32)
        for name, first in (
            ("rows", c.tokens[rank]),
            ("src_info", own),
            ("src_ranks", np.full(n, rank, np.int32)),
        ):
            want = np.concatenate([first, getattr(without, name)])
            assert_same_bits(getattr(result, name), want)
        offsets = [0, *(without.row_offsets.astype(np.int64) + n)]
        assert result.row_offsets.tolist() == offsets
        assert result.expert_ids.tolist() == list(range(len(offsets) - 1))


def test_shared_rows_are_added_last(c):
    results = dispatch(c.tokens, c.ids, c.n_experts, shared_expert=True)
    plain = dispatch(c.tokens, c.ids, c.n_experts)
    factor = np.float32(-1 / 3)
    rows = [r.rows * factor for r in results]
    routed = combine([x[n:] for x, n in zip(rows, c.n_tokens)], plain, c.weights)
    got = combine(rows, results, c.weights)
    for rank, given in enumerate(zip(c.tokens, c.ids, c.weights)):
        assert_same_bits(got[rank], routed[rank] + rows[rank][: c.n_tokens[rank]])
        expert = dict(shared_fn=lambda x: x * factor)
        assert_same_bits(got[rank], moe(*given, lambda _, x: x * factor, **expert))


@pytest.mark.parametrize("sum_up", [combine, combine_sums])
def test_the_sum_is_rounded_before_the_shared_row_is_added(sum_up):
    """256 and 1 are 257, which is no bfloat16: it is 256 when a shared 1 comes."""
    results = dispatch([f32(0)[:, None]], [np.array([[0, 1]])], 2, shared_expert=True)
    rows, weights = [f32(1, 256, 1)[:, None]], [f32(1, 1)[None, :]]
    assert sum_up(rows, results, weights)[0].tolist() == [[258]]
    assert sum_up(rows, results, weights, round_sum=rounded)[0].tolist() == [[257]]


def test_the_largest_pairs_lose_first():
    """A level for all pairs; what is left over goes to the first ones."""
    counts = np.array([[9, 1, 4], [0, 4, 2]])
    assert (kept_rows(counts, 20) == counts).all()
    assert kept_rows(counts, 15).tolist() == [[4, 1, 4], [0, 4, 2]]
    assert kept_rows(counts, 14).tolist() == [[4, 1, 4], [0, 3, 2]]
    assert kept_rows(counts, 11).tolist() == [[3, 1, 3], [0, 2, 2]]
    assert kept_rows(counts, 2).tolist() == [[1, 1, 0], [0, 0, 0]]


def test_a_pair_keeps_its_first_tokens():
    tokens = [np.arange(4, dtype=np.float32)[:, np.newaxis]]
    (result,) = dispatch(tokens, [np.array([[0, 1]] * 3 + [[1, -1]])], 2)
    kept = drop_rows(result, 1, 5)
    assert kept.src_info.tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert kept.row_offsets.tolist() == [0, 3, 5]


# --- Combine and whole layers ----------------------------------------------


# How results are combined: how the sums of a rank are rounded, if it adds up.
@pytest.mark.parametrize(
    "round_partial",
    [None, lambda x: x, rounded],
    ids=["rows", "sums", "sums, bfloat16"],
)
def test_combine_rounds_once_a_step(c, round_partial):
    """C's sums, in choice order; of sums: by rank, then over ranks."""
    results = dispatch(c.tokens, c.ids, c.n_experts)
    rng = np.random.default_rng(8)
    rows = [rng.normal(size=(len(r.rows), 3)).astype(np.float32) for r in results]
    add = combine if round_partial is None else combine_sums
    got = add(rows, results, c.weights, *[round_partial] * (add is combine_sums))
    row_of = {
        (int(src_rank), int(token_idx), int(k)): (owner, row)
        for owner, (r, of_owner) in enumerate(zip(results, rows))
        for src_rank, (token_idx, k), row in zip(r.src_ranks, r.src_info, of_owner)
    }
    for rank, weights in enumerate(c.weights):
        for token_idx, column in np.ndindex(len(weights), 3):
            partials = {}
            for k in range(c.top_k):
                if (rank, token_idx, k) not in row_of:
                    continue
                owner, row = row_of[rank, token_idx, k]
                owner = rank if round_partial is None else owner
                given = weights[token_idx, k], row[column], partials.get(owner, 0.0)
                partials[owner] = fmaf(*given)
            acc = f32(partials.pop(rank, 0.0))
            for owner in sorted(partials):
                acc = acc + round_partial(f32(partials[owner]))
            assert got[rank][token_idx, column] == acc[0]


def test_combine_skips_rather_than_adds_zero():
    """Masked choices have NaN weights here: nobody may look at them."""
    tokens = make_tokens([2, 2])
    ids = [np.array([[-1, 3, -1], [-1, -1, -1]], np.int32)] * 2
    weights = [np.where(i == -1, np.nan, 0.5).astype(np.float32) for i in ids]
    results = dispatch(tokens, ids, 4)
    got = combine([r.rows for r in results], results, weights)
    for x, y in zip(tokens, got):
        assert_same_bits(y, np.stack([x[0] / 2, np.zeros_like(x[1])]))


def scaled_expert(expert_id: int, x: np.ndarray) -> np.ndarray:
    """An expert whose output row depends on its input row only, bit for bit."""
    factors = np.random.default_rng(expert_id).normal(size=x.shape[1])
    y = x * factors.astype(np.float32) + np.float32(expert_id)
    return np.tanh(y / np.float32(64))


def test_layer_over_ranks_is_the_layer_without_ranks(c):
    """Dispatch, experts and combine are `moe`, however tokens are spread over ranks."""
    results = dispatch(c.tokens, c.ids, c.n_experts)
    expert_rows = []
    for rank, r in enumerate(results):
        groups = zip(r.expert_ids, r.row_offsets, r.row_offsets[1:])
        first = rank * len(r.expert_ids)
        rows = [scaled_expert(first + int(e), r.rows[i:j]) for e, i, j in groups]
        expert_rows.append(np.concatenate(rows))
    got = combine(expert_rows, results, c.weights)
    for y, *given in zip(got, c.tokens, c.ids, c.weights):
        assert_same_bits(y, moe(*given, scaled_expert))
