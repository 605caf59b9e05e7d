# SPDX-License-Identifier: Apache-2.0
"""Checks the oracle from outside: torch, exact fractions, plain loops.

Every other test trusts `max_ep/reference.py`, so nothing here may be computed
with it twice: an expected value comes from torch, from `fractions.Fraction`, or
from loops that say the same in another way.
"""

import ast
import math
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from max_ep import reference
from max_ep.reference import (
    bfloat16_to_float32,
    combine,
    combine_sums,
    dequantize_blockwise_fp8,
    dispatch,
    float8_e4m3fn_to_float32,
    float32_to_bfloat16,
    float32_to_float8_e4m3fn,
    fma,
    moe,
    n_local_experts,
    pad,
    quantize_blockwise_fp8,
    unpad,
)

HIDDEN = 16


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Compares bit for bit, so that -0.0 is not 0.0; any NaN equals any NaN."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    as_bits = np.dtype(f"u{got.dtype.itemsize}")
    is_same = np.ascontiguousarray(got).view(as_bits) == np.ascontiguousarray(
        want
    ).view(as_bits)
    if got.dtype.kind == "f":
        is_same |= np.isnan(got) & np.isnan(want)
    where = np.argwhere(~is_same)
    assert len(where) == 0, (
        f"{len(where)} of {got.size} differ, first at {where[0]}:"
        f" got {got[tuple(where[0])]}, want {want[tuple(where[0])]}"
    )


# --- Element types ---------------------------------------------------------


def float32_samples() -> np.ndarray:
    """Float32 of every magnitude, and both neighbours of every rounding tie."""
    rng = np.random.default_rng(1)
    any_bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64)
    x = any_bits.astype(np.uint32).view(np.float32)
    ordinary = rng.normal(0, 50, 50_000).astype(np.float32)
    halves = np.arange(2**17, dtype=np.uint32) << np.uint32(15)
    bf16_ties = halves.view(np.float32)
    fp8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    fp8 = fp8.to(torch.float32).numpy()
    fp8_ties = np.concatenate([fp8, (fp8[1:] + fp8[:-1]) / 2, f32(464, 480)])
    ties = np.concatenate([bf16_ties, fp8_ties, -fp8_ties])
    with np.errstate(over="ignore", invalid="ignore"):
        below = np.nextafter(ties, np.float32(-np.inf))
        above = np.nextafter(ties, np.float32(np.inf))
    special = f32(0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38)
    return np.concatenate([x, ordinary, ties, below, above, special])


# To bits, from bits, in torch, all bits, NaN.
ELEMENTS = {
    "bfloat16": (
        float32_to_bfloat16,
        bfloat16_to_float32,
        torch.bfloat16,
        np.arange(2**16, dtype=np.uint16),
        0x7FC0,
    ),
    "float8": (
        float32_to_float8_e4m3fn,
        float8_e4m3fn_to_float32,
        torch.float8_e4m3fn,
        np.arange(256, dtype=np.uint8),
        0x7F,
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_element_types_are_torchs(name):
    """Rounding of all samples; every bit pattern widened, and back again."""
    narrow, widen, dtype, bits, nan = ELEMENTS[name]
    of_bits = torch.uint16 if bits.itemsize == 2 else torch.uint8
    x = float32_samples()
    wide = torch.from_numpy(x)
    if name == "float8":  # Not every torch saturates; NaN passes through.
        wide = wide.clamp(-448, 448)
    want = wide.to(dtype).view(of_bits).numpy()
    got, is_nan = narrow(x), np.isnan(x)
    assert_same_bits(got[~is_nan], want[~is_nan])
    assert is_nan.any() and (got[is_nan] == nan).all()

    x = widen(bits)
    assert_same_bits(x, torch.from_numpy(bits).view(dtype).to(torch.float32).numpy())
    is_number = ~np.isnan(x)
    assert_same_bits(narrow(x[is_number]), bits[is_number])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_element_types_take_any_shape(shape):
    x = np.ones(shape, np.float32)
    assert_same_bits(bfloat16_to_float32(float32_to_bfloat16(x)), x)
    assert_same_bits(float8_e4m3fn_to_float32(float32_to_float8_e4m3fn(x)), x)
    assert_same_bits(np.asarray(fma(x, x, x)), 2 * x)


def test_other_element_types_are_refused():
    x = np.ones((2, 128))  # float64: a cast would round unseen
    for convert in (
        float32_to_bfloat16,
        float32_to_float8_e4m3fn,
        quantize_blockwise_fp8,
        bfloat16_to_float32,
        float8_e4m3fn_to_float32,
    ):
        with pytest.raises(TypeError, match="got float64"):
            convert(x)
    with pytest.raises(TypeError, match="got float64"):
        fma(f32(1), f32(1), np.ones(1))


# --- Blockwise float8 ------------------------------------------------------


def fp8_tokens() -> np.ndarray:
    """Float32 `[n, 384]` with blocks of all magnitudes, zeros, tiny ones."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(97, 3, 128))
    x *= 10.0 ** rng.uniform(-6, 6, size=(97, 3, 1))
    x[5] = 0
    x[6, 1] = 1e-5  # below the floor of amax
    x[7] = np.float32(1e-4)  # the floor itself
    x[8] = 448  # scale exactly 1
    x[9] = np.nextafter(np.float32(448), np.float32(1e9))
    x[10, :, 0] = -1e30
    x[11] = -0.0
    # Values that land next to ties, so that every rounding before shows.
    ties = rng.choice(np.arange(17, 28, 2), (48, 3, 128)) * 16.0
    x[12:60] = ties * (x[12:60, :, :1] / 448)
    x[12:60, :, 0] *= 448 / ties[:, :, 0]
    return x.reshape(97, 384).astype(np.float32)


def quantize_with_torch(x, is_power_of_two):
    blocks = torch.from_numpy(x).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(dim=2).clamp(1e-4)
    scales = amax / 448.0
    # Not `448.0 / amax`: that torch computes as `amax.reciprocal() * 448.0`.
    factors = torch.tensor(448.0) / amax
    if is_power_of_two:
        # log2 is near enough but for values next to a power of two.
        exponent = torch.ceil(torch.log2(scales.double()))
        scales = torch.exp2(exponent).float()
        factors = torch.exp2(-exponent).float()
    values = (blocks * factors.unsqueeze(2)).clamp(-448, 448)
    values = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return values.flatten(1).numpy(), scales.numpy()


@pytest.mark.parametrize("is_power_of_two", [False, True])
def test_blockwise_fp8_is_torchs(is_power_of_two):
    """To bytes and scales, and from them."""
    x = fp8_tokens()
    values, scales = quantize_blockwise_fp8(x, is_power_of_two)
    want_values, want_scales = quantize_with_torch(x, is_power_of_two)
    assert_same_bits(scales, want_scales)
    assert_same_bits(values, want_values)
    wide = torch.from_numpy(values).view(torch.float8_e4m3fn).float()
    want = wide * torch.from_numpy(scales).repeat_interleave(128, 1)
    assert_same_bits(dequantize_blockwise_fp8(values, scales), want.numpy())


def test_blockwise_fp8_shapes():
    values, scales = quantize_blockwise_fp8(np.zeros((0, 256), np.float32))
    assert values.shape == (0, 256)
    assert scales.shape == (0, 2)
    assert dequantize_blockwise_fp8(values, scales).shape == (0, 256)
    x = np.arange(64, dtype=np.float32).reshape(2, 32)
    assert quantize_blockwise_fp8(x, block=16)[1].shape == (2, 2)
    with pytest.raises(ValueError, match="hidden=200"):
        quantize_blockwise_fp8(np.zeros((1, 200), np.float32))
    values, scales = quantize_blockwise_fp8(np.ones((3, 256), np.float32))
    with pytest.raises(ValueError, match=r"\[3, 2\], got \[2, 3\].*pass scales.T"):
        dequantize_blockwise_fp8(values, scales.T)  # as dispatch delivers them


# --- Fused multiply-add ----------------------------------------------------


def round_to_float32(x: Fraction) -> float:
    """Rounds to the nearest float32, ties to even, in integers."""
    if x == 0:
        return 0.0
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length()
    exponent -= magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1  # now 2**exponent <= magnitude < 2**(exponent + 1)
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / step) * step  # Python rounds ties to even
    if rounded >= 2**128:
        rounded = math.inf
    return math.copysign(float(rounded), x)


def assert_fma_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())
    ]
    want = f32(*map(round_to_float32, exact))
    got = fma(a, b, c)
    is_zero = np.array([x == 0 for x in exact])  # their sign is tested below
    assert_same_bits(np.abs(got[is_zero]), np.abs(want[is_zero]))
    assert_same_bits(got[~is_zero], want[~is_zero])


def naive_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounds twice: the sum to float64, and that to float32."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


ULP = 2.0**-23


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "a, b, c, want",
    [
        # Each sum is next to a tie, nearer than float64 can hold, and the tie
        # goes the other way: 1 + 1.5 ulp less 2**-70, 1 + 0.5 ulp and 2**-70,
        ((1 + ULP) * 2**-12, (1 - ULP) * 2**-12, 1 + ULP, 1 + ULP),
        ((1 + ULP) * 2**-12, -(1 - ULP) * 2**-12, 1 + ULP, 1 + ULP),
        # and a product that is the tie 1.25 + 2.5 ulp, and 2**-63.
        (1 + 2 * ULP, 1.25, 2**-63, 1.25 + 3 * ULP),
    ],
)
def test_fma_where_rounding_twice_is_wrong(a, b, c, want, sign):
    a, b, c, want = f32(a), f32(sign * b), f32(sign * c), f32(sign * want)
    assert_same_bits(fma(a, b, c), want)
    assert naive_fma(a, b, c) != want
    assert_fma_exact(a, b, c)


def fma_samples(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws factors and addends of a kind."""
    rng = np.random.default_rng(3)
    n = 4000
    if name in ("random", "cancelling"):
        a, b = (rng.normal(size=n).astype(np.float32) for _ in range(2))
        if name == "cancelling":  # all but the product's rounding
            return a, b, -(a * b)
        # Addends near the product, up to 2**60 times larger or smaller.
        apart = 2.0 ** rng.integers(-60, 61, n) * rng.choice([-1, 1], n)
        return a, b, (-a * b * apart).astype(np.float32)
    if name in ("beside a tie", "nearer than float64"):
        c = rng.uniform(1, 2, n).astype(np.float32)
        tie = rng.choice([-1, 1], n) * 2.0**-24
        if name == "beside a tie":
            off = 2.0 ** -rng.integers(1, 12, n)
            return (1 + off).astype(np.float32), (tie * (1 - off)).astype(np.float32), c
        off = rng.integers(1, 4, (2, n)) * ULP
        a, b = (1 + off[0]).astype(np.float32), (tie * (1 - off[1])).astype(np.float32)
        n_twice_wrong = np.count_nonzero(fma(a, b, c) != naive_fma(a, b, c))
        assert n_twice_wrong > n // 20  # the cases have teeth
        return a, b, c
    if name == "any bits":
        bits = rng.integers(0, 2**32, (3, 12000), dtype=np.uint64)
        x = bits.astype(np.uint32).view(np.float32)
        return tuple(x[:, np.isfinite(x).all(axis=0)])
    if name == "subnormal":
        x = (rng.uniform(-4, 4, (3, n)) * 2.0**-75).astype(np.float32)
        x[2] *= np.float32(2.0**-72)
        return tuple(x)
    x = (rng.uniform(0.9, 1.1, (3, n)) * 2.0**64).astype(np.float32)
    x[2] *= np.float32(2.0**39)
    x[1, 1::2] *= -1
    return tuple(x)


@pytest.mark.parametrize(
    "name",
    ["random", "cancelling", "beside a tie", "nearer than float64", "any bits"]
    + ["subnormal", "largest"],
)
def test_fma_is_exact(name):
    assert_fma_exact(*fma_samples(name))


def test_fma_of_zeros_infinities_and_nan_is_ieee():
    values = f32(0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, 1e-45)
    a, b, c = (x.ravel() for x in np.meshgrid(values, values, values))
    got = fma(a, b, c)
    with np.errstate(invalid="ignore", over="ignore"):
        want = a.astype(np.float64) * b + c
    # No tie among these: float64 is right, also about the signs of zeros.
    with np.errstate(over="ignore"):
        assert_same_bits(got, want.astype(np.float32))


def test_fma_broadcasts():
    assert fma(f32(2)[:, None], np.ones((3, 4), np.float32), f32(1)).shape == (3, 4)


# --- Dispatch --------------------------------------------------------------

# (n_tokens of each rank, n_experts, top_k, routing)
CASES = {
    "one_rank": ([7], 4, 2, "random"),
    "two_ranks": ([5, 8], 6, 2, "random"),
    "four_ranks": ([16, 16, 16, 16], 32, 8, "random"),
    "uneven_7_on_3": ([4, 7, 5], 7, 3, "random"),
    "uneven_7_on_5": ([4, 7, 5, 1, 2], 7, 3, "random"),  # last rank: none
    "fewer_experts_than_ranks": ([3, 3, 3, 3], 2, 2, "random"),
    "one_expert": ([3, 2], 1, 1, "random"),
    "empty_rank": ([6, 0, 3], 9, 4, "random"),
    "empty_first_rank": ([0, 3], 4, 2, "random"),
    "no_tokens": ([0, 0], 4, 2, "random"),
    "all_to_one": ([9, 9, 9], 6, 1, "one"),
    "half_masked": ([11, 6], 8, 4, "masked"),
    "all_masked": ([5, 5], 8, 4, "none"),
    "masked_empty_uneven": ([0, 13, 7, 2], 11, 5, "masked"),
    "top_1": ([8, 8], 16, 1, "random"),
    "top_32": ([5, 6], 40, 32, "random"),
    "top_all": ([4, 4, 4], 9, 9, "random"),
    "same_expert_twice": ([6, 5], 3, 5, "repeated"),
}

cases = pytest.mark.parametrize("case", CASES)


def make_ids(rng, n_tokens: int, n_experts: int, top_k: int, routing: str):
    """Makes int32 `[n_tokens, top_k]`, in no order of experts."""
    shape = (n_tokens, top_k)
    if routing == "one":
        return np.full(shape, n_experts - 2, np.int32)
    if routing == "none":
        return np.full(shape, -1, np.int32)
    if routing == "repeated":
        return rng.integers(0, n_experts, shape, dtype=np.int32)
    rows = [rng.permutation(n_experts)[:top_k] for _ in range(n_tokens)]
    ids = np.array(rows, np.int32).reshape(shape)
    if routing == "masked":
        ids[rng.random(shape) < 0.5] = -1
        ids[::4] = -1
    return ids


def make_tokens(n_tokens: list[int], hidden: int = HIDDEN) -> list[np.ndarray]:
    """Makes tokens that show where they are from: rank, token, column."""
    columns = np.arange(hidden) / 1024
    return [
        (1000 * rank + np.arange(n)[:, None] + columns).astype(np.float32)
        for rank, n in enumerate(n_tokens, start=1)
    ]


def make_case(case: str) -> SimpleNamespace:
    n_tokens, n_experts, top_k, routing = CASES[case]
    rng = np.random.default_rng(6)
    return SimpleNamespace(
        n_ranks=len(n_tokens),
        n_experts=n_experts,
        top_k=top_k,
        tokens=make_tokens(n_tokens),
        ids=[make_ids(rng, n, n_experts, top_k, routing) for n in n_tokens],
        weights=[rng.random((n, top_k), np.float32) - 0.25 for n in n_tokens],
    )


@pytest.mark.parametrize(
    "n_experts, n_ranks, want",
    [(8, 4, 2), (7, 3, 3), (7, 5, 2), (1, 4, 1), (256, 8, 32), (5, 1, 5)],
)
def test_n_local_experts(n_experts, n_ranks, want):
    assert n_local_experts(n_experts, n_ranks) == want
    for bad in ((0, 1), (4, 0), (-1, 2)):
        with pytest.raises(ValueError, match=f"n_ranks={bad[1]}"):
            n_local_experts(*bad)


@cases
def test_dispatch_is_the_plain_loops(case):
    """Says the order of rows as five nested loops."""
    c = make_case(case)
    n_local = math.ceil(c.n_experts / c.n_ranks)
    results = dispatch(c.tokens, c.ids, c.n_experts)
    assert len(results) == c.n_ranks
    for rank, result in enumerate(results):
        rows, src_info, src_ranks, row_offsets = [], [], [], [0]
        for local_expert in range(n_local):
            for src_rank in range(c.n_ranks):
                for token_idx in range(len(c.tokens[src_rank])):
                    for k in range(c.top_k):
                        expert_id = rank * n_local + local_expert
                        if c.ids[src_rank][token_idx, k] == expert_id:
                            rows.append(c.tokens[src_rank][token_idx])
                            src_info.append((token_idx, k))
                            src_ranks.append(src_rank)
            row_offsets.append(len(rows))
        n = len(rows)
        assert_same_bits(result.rows, f32(*rows).reshape(n, HIDDEN))
        assert_same_bits(result.row_offsets, np.array(row_offsets, np.uint32))
        assert_same_bits(result.src_info, np.array(src_info, np.int32).reshape(n, 2))
        assert_same_bits(result.src_ranks, np.array(src_ranks, np.int32))
        assert_same_bits(result.expert_ids, np.arange(n_local, dtype=np.int32))
        assert result.scales is None


def test_bits_are_copied_as_they_are():
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)  # with every NaN
    tokens = [bits[:100], bits[100:]]
    rng = np.random.default_rng(7)
    ids = [make_ids(rng, len(t), 4, 2, "random") for t in tokens]
    for result in dispatch(tokens, ids, 4):
        assert result.rows.dtype == np.uint16
        for row, src_rank, (token_idx, _) in zip(
            result.rows, result.src_ranks, result.src_info
        ):
            assert_same_bits(row, tokens[src_rank][token_idx])


@cases
def test_dispatch_quantizes(case):
    c = make_case(case)
    tokens = make_tokens([len(t) for t in c.tokens], hidden=256)
    quantized = [quantize_with_torch(t, False) for t in tokens]
    results = dispatch(tokens, c.ids, c.n_experts, quantize=quantize_blockwise_fp8)
    for result in results:
        n = len(result.src_ranks)
        assert result.rows.shape == (n, 256)
        assert result.rows.dtype == np.uint8
        assert result.scales.shape == (2, n)
        assert result.scales.dtype == np.float32
        assert result.scales.flags.c_contiguous
        for row in range(n):
            values, scales = quantized[result.src_ranks[row]]
            token_idx = result.src_info[row, 0]
            assert_same_bits(result.rows[row], values[token_idx])
            assert_same_bits(result.scales[:, row], scales[token_idx])


@pytest.mark.parametrize("wrong_id", [7, -2, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_is_named(wrong_id):
    ids = [np.zeros((4, 2), np.int32) for _ in range(3)]
    ids[1][3, 1] = wrong_id
    with pytest.raises(
        ValueError,
        match=rf"rank 1, token 3, choice 1: id {wrong_id} is outside \[-1, 7\)",
    ):
        dispatch(make_tokens([4, 4, 4]), ids, 7)


def test_shapes_that_do_not_fit_are_refused():
    ids = [np.zeros((4, 2), np.int32), np.zeros((3, 2), np.int32)]
    tokens = make_tokens([4, 3])
    with pytest.raises(ValueError, match="n_tokens"):
        dispatch(make_tokens([4, 4]), ids, 2)
    with pytest.raises(ValueError, match="n_tokens"):
        dispatch(tokens[:1], ids, 2)
    with pytest.raises(ValueError, match="top_k"):
        dispatch(tokens, [ids[0], ids[1][:, :1]], 2)
    with pytest.raises(ValueError, match="element type"):
        dispatch([tokens[0], tokens[1].astype(np.float16)], ids, 2)
    with pytest.raises(TypeError, match="tokens must be float32"):
        dispatch(
            [t.astype(np.float16) for t in tokens],
            ids,
            2,
            quantize=quantize_blockwise_fp8,
        )
    results = dispatch(tokens, ids, 2)
    rows = [r.rows for r in results]
    weights = [np.ones((4, 2), np.float32), np.ones((3, 2), np.float32)]
    with pytest.raises(ValueError, match="rank 1: 1 rows, needs 0"):
        combine([rows[0], rows[0][:1]], results, weights)
    with pytest.raises(TypeError, match="topk_weights must be float32"):
        combine(rows, results, [w.astype(np.float64) for w in weights])
    for add in (combine, combine_sums):
        for short in (weights[1][:, :1], weights[1][:2]):
            with pytest.raises(ValueError, match="rank 1: topk_weights.*dispatched"):
                add(rows, results, [weights[0], short])


# --- Other layouts of the rows ----------------------------------------------


@cases
def test_padded_is_the_plain_loops(case):
    """Each expert's rows begin at its own first, by source rank."""
    c = make_case(case)
    n_local = math.ceil(c.n_experts / c.n_ranks)
    capacity = c.n_ranks * max(max(map(len, c.ids)), 1) * c.top_k
    for rank, result in enumerate(dispatch(c.tokens, c.ids, c.n_experts)):
        padded = pad(result, c.n_ranks, capacity)
        assert padded.rows.shape == (n_local, capacity, HIDDEN)
        assert padded.src_info.shape == (n_local, capacity, 2)
        assert padded.scales is None
        for local_expert in range(n_local):
            expert_id, row = rank * n_local + local_expert, 0
            for src_rank in range(c.n_ranks):
                begin = row
                for token_idx, k in np.argwhere(c.ids[src_rank] == expert_id):
                    got = padded.rows[local_expert, row]
                    assert_same_bits(got, c.tokens[src_rank][token_idx])
                    info = padded.src_info[local_expert, row]
                    assert info.tolist() == [token_idx, k]
                    row += 1
                got = padded.recv_ranges[local_expert, src_rank].tolist()
                assert got == [begin, row - begin]
            assert padded.recv_counts[local_expert] == row
        assert_same_bits(unpad(padded.rows, padded.recv_counts), result.rows)


def test_padded_scales_stand_by_column():
    """Scale `s` of row `j` of expert `e` is at `(e * n_scales + s) * capacity + j`."""
    c = make_case("two_ranks")
    tokens = [np.repeat(t, 128, axis=1) for t in c.tokens]
    results = dispatch(tokens, c.ids, c.n_experts, quantize=quantize_blockwise_fp8)
    for result in results:
        capacity, n_scales = 16, HIDDEN
        padded = pad(result, c.n_ranks, capacity)
        assert padded.scales is not None and result.scales is not None
        flat = padded.scales.reshape(-1)
        row = 0
        for e, count in enumerate(padded.recv_counts):
            for j in range(count):
                at = (e * n_scales + np.arange(n_scales)) * capacity + j
                assert_same_bits(flat[at], result.scales[:, row])
                row += 1


@cases
def test_shared_rows_come_first(case):
    """All own tokens, masked ones too; behind them all is as without."""
    c = make_case(case)
    plain = dispatch(c.tokens, c.ids, c.n_experts)
    shared = dispatch(c.tokens, c.ids, c.n_experts, shared_expert=True)
    for rank, (without, result) in enumerate(zip(plain, shared)):
        n = len(c.tokens[rank])
        assert_same_bits(result.rows[:n], c.tokens[rank])
        assert result.src_info[:n].tolist() == [[t, -1] for t in range(n)]
        assert (result.src_ranks[:n] == rank).all()
        assert_same_bits(result.rows[n:], without.rows)
        assert_same_bits(result.src_info[n:], without.src_info)
        assert_same_bits(result.src_ranks[n:], without.src_ranks)
        offsets = [0, *(without.row_offsets.astype(np.int64) + n)]
        assert result.row_offsets.tolist() == offsets
        assert result.expert_ids.tolist() == list(range(len(offsets) - 1))


@cases
def test_shared_rows_are_added_last(case):
    c = make_case(case)
    results = dispatch(c.tokens, c.ids, c.n_experts, shared_expert=True)
    factor = np.float32(-1 / 3)
    rows = [r.rows * factor for r in results]
    n_tokens = [len(t) for t in c.tokens]
    routed = combine(
        [x[n:] for x, n in zip(rows, n_tokens)],
        dispatch(c.tokens, c.ids, c.n_experts),
        c.weights,
    )
    got = combine(rows, results, c.weights)
    for rank, n in enumerate(n_tokens):
        assert_same_bits(got[rank], routed[rank] + rows[rank][:n])
        want = moe(
            c.tokens[rank],
            c.ids[rank],
            c.weights[rank],
            lambda _, x: x * factor,
            shared_fn=lambda x: x * factor,
        )
        assert_same_bits(got[rank], want)


@pytest.mark.parametrize("sum_up", [combine, combine_sums])
def test_the_sum_is_rounded_before_the_shared_row_is_added(sum_up):
    """256 and 1 are 257, which is no bfloat16: it is 256 when a shared 1 comes."""
    results = dispatch([f32(0)[:, None]], [np.array([[0, 1]])], 2, shared_expert=True)
    rows, weights = [f32(1, 256, 1)[:, None]], [f32(1, 1)[None, :]]

    def rounded(x: np.ndarray) -> np.ndarray:
        return bfloat16_to_float32(float32_to_bfloat16(x))

    assert sum_up(rows, results, weights)[0].tolist() == [[258]]
    assert sum_up(rows, results, weights, round_sum=rounded)[0].tolist() == [[257]]


# --- Combine and whole layers ----------------------------------------------


ADDED_UP = {
    "rows": None,
    "sums": lambda x: x,
    "sums, bfloat16 partials": lambda x: bfloat16_to_float32(float32_to_bfloat16(x)),
}
"""How results are combined: how the sums of a rank are rounded, if it adds up."""


@pytest.mark.parametrize("mode", ADDED_UP)
@cases
def test_combine_rounds_once_a_step(case, mode):
    """Exact sums of fractions, in choice order; of sums: by rank, then over ranks."""
    c = make_case(case)
    round_partial = ADDED_UP[mode]
    results = dispatch(c.tokens, c.ids, c.n_experts)
    rng = np.random.default_rng(8)
    rows = [rng.normal(size=(len(r.rows), 3)).astype(np.float32) for r in results]
    if round_partial is None:
        got = combine(rows, results, c.weights)
    else:
        got = combine_sums(rows, results, c.weights, round_partial)
    row_of = {
        (int(src_rank), int(token_idx), int(k)): (owner, row)
        for owner, (result, of_owner) in enumerate(zip(results, rows))
        for src_rank, (token_idx, k), row in zip(
            result.src_ranks, result.src_info, of_owner
        )
    }
    for rank, weights in enumerate(c.weights):
        for token_idx, column in np.ndindex(len(weights), 3):
            partials = {}
            for k in range(c.top_k):
                if (rank, token_idx, k) not in row_of:
                    continue
                owner, row = row_of[rank, token_idx, k]
                owner = rank if round_partial is None else owner
                exact = Fraction(float(weights[token_idx, k]))
                exact = exact * Fraction(float(row[column]))
                exact += Fraction(partials.get(owner, 0.0))
                partials[owner] = round_to_float32(exact)
            acc = partials.pop(rank, 0.0)
            for owner in sorted(partials):
                sent = float(round_partial(f32(partials[owner]))[0])
                acc = round_to_float32(Fraction(acc) + Fraction(sent))
            assert float(got[rank][token_idx, column]) == acc


def test_combine_does_not_round_twice():
    """Adds `1 * (1 + ULP)`, then a product where a second rounding shows."""
    results = dispatch([np.zeros((1, 1), np.float32)], [np.array([[0, 1]])], 2)
    rows = f32(1 + ULP, (1 - ULP) * 2**-12)[:, None]
    weights = f32(1, (1 + ULP) * 2**-12)[None, :]
    (got,) = combine([rows], results, [weights])
    assert_same_bits(got, f32(1 + ULP)[None, :])


def test_combine_skips_rather_than_adds_zero():
    """Masked choices have NaN weights here: nobody may look at them."""
    tokens = make_tokens([2, 2])
    ids = [np.array([[-1, 3, -1], [-1, -1, -1]], np.int32)] * 2
    weights = [np.where(i == -1, np.nan, 0.5).astype(np.float32) for i in ids]
    results = dispatch(tokens, ids, 4)
    got = combine([r.rows for r in results], results, weights)
    for x, y in zip(tokens, got):
        assert_same_bits(y, np.stack([x[0] / 2, np.zeros_like(x[1])]))


def test_sums_combine_adds_the_shared_row_last():
    """A half ULP, 1, a half ULP: added in this order, both halves are lost."""
    tokens = [f32(0)[:, None], np.zeros((0, 1), np.float32)]
    ids = [np.array([[1, 0]]), np.zeros((0, 2), int)]
    results = dispatch(tokens, ids, 2, shared_expert=True)
    rows = [f32(ULP / 2, ULP / 2)[:, None], f32(1)[:, None]]
    weights = [f32(1, 1)[None, :], np.zeros((0, 2), np.float32)]
    sums = combine_sums(rows, results, weights)
    assert_same_bits(sums[0], f32(1)[:, None])
    with pytest.raises(ValueError, match="rank 1: 0 rows, needs 1"):
        combine_sums([rows[0], rows[1][:0]], results, weights)


def scaled_expert(expert_id: int, x: np.ndarray) -> np.ndarray:
    """An expert whose output row depends on its input row only, bit for bit."""
    factors = np.random.default_rng(expert_id).normal(size=x.shape[1])
    y = x * factors.astype(np.float32) + np.float32(expert_id)
    return np.tanh(y / np.float32(64))


@cases
def test_layer_over_ranks_is_the_layer_without_ranks(case):
    """Dispatch, experts and combine are `moe`, however tokens are spread over ranks."""
    c = make_case(case)
    results = dispatch(c.tokens, c.ids, c.n_experts)
    expert_rows = []
    for rank, result in enumerate(results):
        first = rank * len(result.expert_ids)
        groups = zip(result.expert_ids, result.row_offsets, result.row_offsets[1:])
        rows = [scaled_expert(first + int(e), result.rows[i:j]) for e, i, j in groups]
        expert_rows.append(np.concatenate(rows))
    got = combine(expert_rows, results, c.weights)
    for y, x, ids, weights in zip(got, c.tokens, c.ids, c.weights):
        assert_same_bits(y, moe(x, ids, weights, scaled_expert))


def test_moe_refuses_what_dispatch_refuses():
    (tokens,) = make_tokens([2])
    ids, weights = np.zeros((2, 3), np.int32), np.ones((2, 3), np.float32)
    for bad_ids, bad_weights, error, words in (
        (ids - 2, weights, ValueError, "id -2 is outside"),
        (ids.astype(np.float32), weights, TypeError, "integers, got float32"),
        (ids[:1], weights, ValueError, "n_tokens"),
        (ids, weights[:, :2], ValueError, "shape of topk_ids"),
    ):
        with pytest.raises(error, match=words):
            moe(tokens, bad_ids, bad_weights, None)  # no expert is called


def test_moe_calls_each_expert_once_with_its_tokens_in_order():
    ids = np.array([[2, 0], [-1, 2], [0, 5]], np.int32)
    (tokens,) = make_tokens([3])
    calls = []

    def expert_fn(expert_id: int, x: np.ndarray) -> np.ndarray:
        calls.append((expert_id, x.copy()))
        return x

    moe(tokens, ids, np.ones((3, 2), np.float32), expert_fn)
    assert [expert_id for expert_id, _ in calls] == [0, 2, 5]
    for (_, x), token_idx in zip(calls, [[0, 2], [0, 1], [2]]):
        assert_same_bits(x, tokens[token_idx])


# --- The file itself -------------------------------------------------------


def test_reference_needs_numpy_only():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    others = {m.split(".")[0] for m in modules} - set(sys.stdlib_module_names)
    assert others == {"numpy"}
