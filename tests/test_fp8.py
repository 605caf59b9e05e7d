# SPDX-License-Identifier: Apache-2.0
"""Blockwise FP8: the oracle's against torch, and dequantization in a graph.

What dispatch delivers goes through it in ``graphs/moe_layer.py --fp8``.
"""

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType
from test_reference import assert_same_bits

from max_ep import dequantize_blockwise_fp8
from max_ep.reference import dequantize_blockwise_fp8 as oracle
from max_ep.reference import quantize_blockwise_fp8

CPU_DEVICE = DeviceRef.CPU()
HIDDEN = 256
PADDED = (3, 5)
"""Local experts, and rows of each."""


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


def quantize_with_torch(x: np.ndarray, is_power_of_two: bool) -> tuple:
    blocks = torch.from_numpy(x).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(dim=2).clamp(1e-4)
    scales = amax / 448.0
    # Not `448.0 / amax`: that torch computes as `amax.reciprocal() * 448.0`.
    factors = torch.tensor(448.0) / amax
    if is_power_of_two:
        # log2 is near enough but for values next to a power of two.
        exponent = torch.ceil(torch.log2(scales.double()))
        scales, factors = (torch.exp2(e).float() for e in (exponent, -exponent))
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
    assert_same_bits(oracle(values, scales), want.numpy())


def test_blockwise_fp8_shapes():
    values, scales = quantize_blockwise_fp8(np.zeros((0, 256), np.float32))
    assert (values.shape, scales.shape) == ((0, 256), (0, 2))
    assert oracle(values, scales).shape == (0, 256)
    x = np.arange(64, dtype=np.float32).reshape(2, 32)
    assert quantize_blockwise_fp8(x, block=16)[1].shape == (2, 2)
    with pytest.raises(ValueError, match="hidden=200"):
        quantize_blockwise_fp8(np.zeros((1, 200), np.float32))
    values, scales = quantize_blockwise_fp8(np.ones((3, 256), np.float32))
    with pytest.raises(ValueError, match=r"\[3, 2\], got \[2, 3\].*pass scales.T"):
        oracle(values, scales.T)  # as dispatch delivers them


def types(rows: list, scales: list) -> list[TensorType]:
    return [
        TensorType(DType.uint8, rows, CPU_DEVICE),
        TensorType(DType.float32, scales, CPU_DEVICE),
    ]


def add_graphs(module: Module) -> None:
    """Adds both layouts."""
    of_both = [
        *types(["n_rows", HIDDEN], [HIDDEN // 128, "n_rows"]),
        *types([*PADDED, HIDDEN], [PADDED[0], HIDDEN // 128, PADDED[1]]),
    ]
    with Graph("dequantize", input_types=of_both, module=module) as graph:
        packed, scales, padded, more = (value.tensor for value in graph.inputs)
        graph.output(
            dequantize_blockwise_fp8(packed, scales),
            dequantize_blockwise_fp8(padded, more),
        )


def test_rows_are_the_oracles(one_module):
    """All 256 values, NaN among them, in both layouts; no rows, too."""
    model = one_module.models["dequantize"]
    rng = np.random.default_rng(0)
    padded = rng.integers(0, 256, (*PADDED, HIDDEN), np.uint8)
    more = rng.standard_normal((PADDED[0], PADDED[1], 2)).astype(np.float32)
    for n_rows in (0, 1, 7):
        packed = np.tile(np.arange(256, dtype=np.uint8), (n_rows, 1))
        scales = rng.standard_normal((n_rows, 2)).astype(np.float32)
        got, got_padded = model.execute(
            packed,
            np.ascontiguousarray(scales.T),
            padded,
            np.ascontiguousarray(more.transpose(0, 2, 1)),
        )
        np.testing.assert_array_equal(got.to_numpy(), oracle(packed, scales))
        want = [oracle(rows, of_rows) for rows, of_rows in zip(padded, more)]
        np.testing.assert_array_equal(got_padded.to_numpy(), np.stack(want))


@pytest.mark.parametrize(
    ("dtypes", "rows", "scales", "error", "says"),
    [
        (("float32", "float32"), ["n", 256], [2, "n"], TypeError, "rows are .*float32"),
        (("uint8", "bfloat16"), ["n", 256], [2, "n"], TypeError, "scales are .*bfloat"),
        (("uint8", "float32"), ["n", 256], ["n", 2], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), ["n", "k"], [2, "n"], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), ["n", 64], [0, "n"], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), ["n", 200], [1, "n"], ValueError, r"a multiple of 128"),
        (("uint8", "float32"), [256], [2], ValueError, r"hidden / 128, n_ro"),
        (("uint8", "float32"), [3, 5, 256], [2, 5], ValueError, r"hidden / 128, n_ro"),
    ],
)
def test_refusals(dtypes, rows, scales, error, says):
    given = [
        TensorType(DType[dtype], shape, CPU_DEVICE)
        for dtype, shape in zip(dtypes, (rows, scales))
    ]
    with Graph("refused", input_types=given) as graph:
        with pytest.raises(error, match=says):
            dequantize_blockwise_fp8(*(value.tensor for value in graph.inputs))


def test_rows_of_gpus_are_float8():
    """As far as a graph goes that is not run."""
    gpu = DeviceRef.GPU(0)
    given = [
        TensorType(DType.float8_e4m3fn, ["n_rows", HIDDEN], gpu),
        TensorType(DType.float32, [HIDDEN // 128, "n_rows"], gpu),
    ]
    with Graph("of_gpu", input_types=given) as graph:
        rows = dequantize_blockwise_fp8(*(value.tensor for value in graph.inputs))
        graph.output(rows)
    assert (rows.dtype, rows.device) == (DType.float32, gpu)
    assert list(rows.shape) == list(given[0].shape)
