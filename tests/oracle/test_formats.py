# SPDX-License-Identifier: Apache-2.0
"""Quantized formats: the oracle's against torch, and dequantization in a graph.

What dispatch delivers goes through it in ``graphs/moe_layer.py --format``.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType

from max_ep import EPConfig, dequantize
from max_ep.formats import FORMATS, TokenFormat, format_of, on_target, widen_bits
from max_ep.quantize import (
    float4_e2m1fn_to_float32,
    float8_e8m0fnu_to_float32,
    float32_to_float4_e2m1fn,
    in_blocks,
    quantize_mxfp8,
)
from max_ep.reference import quantize_blockwise_fp8
from tests.children import slow
from tests.errors import raises, refused
from tests.harness import building, to_numpy
from tests.oracle.cases import F32, Case
from tests.oracle.row_layouts import scales_of_tiles
from tests.oracle.test_reference import assert_same_bits

CPU_DEVICE = DeviceRef.CPU()
HIDDEN = 256


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
    assert_same_bits(QUANTIZED["fp8"].dequantize(values, scales), want.numpy())


# ----------------------------------------------------------- microscaling formats

QUANTIZED = {f.name: f for f in FORMATS if f.is_quantized}


def test_float8_e8m0fnu_is_torchs():
    bits = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(bits).view(torch.float8_e8m0fnu).float().numpy()
    assert_same_bits(float8_e8m0fnu_to_float32(bits)[:255], want[:255])
    assert np.isnan(float8_e8m0fnu_to_float32(bits)[255]) and np.isnan(want[255])


def mx_tokens() -> np.ndarray:
    """Float32 `[n, 96]` of all magnitudes, with what is next to a change of scale."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(64, 3, 32)) * 2.0 ** rng.integers(-140, 120, (64, 3, 1))
    x = x.astype(np.float32)
    for i, largest in enumerate((1, 1.75, 448, 1.5, 2.0**-119, 1.75 * 2.0**-119)):
        near = np.float32(largest) * np.float32([0.5, -1, 1, 0.3])
        x[3 * i : 3 * i + 3] = rng.choice(near, (3, 3, 32))
        x[3 * i + 1, :, 7] = np.nextafter(np.float32(largest), np.float32(np.inf))
        x[3 * i + 2, :, 7] = np.nextafter(np.float32(largest), np.float32(0))
        x[3 * i + 1 : 3 * i + 3][np.abs(x[3 * i + 1 : 3 * i + 3]) == largest] = 0
    x[20], x[21], x[22, 1] = 0, -0.0, np.float32(1e-45)
    x[23] = np.finfo(np.float32).max
    return x.reshape(64, 96)


def test_mxfp8_is_torchs():
    """Torch casts to both types; its scales are powers of two already."""
    x = mx_tokens()
    values, scales = quantize_mxfp8(x)
    blocks = torch.from_numpy(x).unflatten(1, (-1, 32)).double()
    amax = blocks.abs().amax(dim=2)
    exponent = torch.ceil(torch.log2(amax / 448)).clamp(-127, 120)
    as_types = torch.exp2(exponent).float().to(torch.float8_e8m0fnu)
    assert_same_bits(scales, as_types.view(torch.uint8).numpy())
    want = (blocks * torch.exp2(-exponent)[..., None]).float().clamp(-448, 448)
    want = want.to(torch.float8_e4m3fn).view(torch.uint8)
    assert_same_bits(values, want.flatten(1).numpy())
    assert 0 in scales and 247 in scales


def test_mxfp8_of_what_is_not_finite():
    """A NaN makes its block NaN. An infinity stays one; the rest of its block is as
    far from 0 as before."""
    x = np.ones((3, 64), np.float32)
    x[0, 5], x[1, 5], x[2, 5], x[2, 6] = np.nan, -np.inf, np.inf, -np.nan
    values, scales = quantize_mxfp8(x)
    assert (scales == [[255, 119], [247, 119], [255, 119]]).all()
    assert (values[[0, 2], :32] == 0x7F).all()
    with np.errstate(over="ignore"):
        wide = QUANTIZED["mxfp8"].dequantize(values, scales)
    assert np.isnan(wide[[0, 2], :32]).all() and (wide[:, 32:] == 1).all()
    assert wide[1, 5] == -np.inf and (np.delete(wide[1, :32], 5) == 0).all()


def test_float4_e2m1fn_is_ml_dtypes():
    """All values, and floats next to each tie; ours has no -0."""
    bits = np.arange(256, dtype=np.uint8)[:, np.newaxis]
    pairs = np.concatenate([bits & 15, bits >> 4], axis=1)
    want = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bits(float4_e2m1fn_to_float32(bits), want)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7])
    x = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(9))])
    x = np.concatenate([x, -x, np.float32([np.inf, -np.inf, 0, -0.0, 1e-45, 1e38])])
    got = float32_to_float4_e2m1fn(x)
    wide = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bits(float4_e2m1fn_to_float32(got), np.where(wide == 0, 0, wide))
    assert float32_to_float4_e2m1fn(np.float32([np.nan, 1]))[0] == 0x27


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_fp4_is_ml_dtypes(name):
    """A second computation, with the casts of ml_dtypes."""
    x = mx_tokens()
    values, scales = QUANTIZED[name].quantize(x)
    blocks = in_blocks(x, QUANTIZED[name].scale_block)
    amax = np.abs(blocks).max(axis=2)
    if name == "mxfp4":
        exact = np.log2(np.maximum(amax, np.float32(1e-45)).astype(np.float64))
        exponent = np.maximum(np.floor(exact) - 2, -127)
        as_type = np.exp2(exponent).astype(ml_dtypes.float8_e8m0fnu)
        factors = np.exp2(-exponent)
    else:
        exact = np.minimum(amax / np.float32(6), 448)
        as_type = exact.astype(ml_dtypes.float8_e4m3fn)
        wide = as_type.astype(np.float32)
        factors = np.where(wide == 0, 0, 1 / np.where(wide == 0, 1, wide))
        factors = factors.astype(np.float32)
    assert_same_bits(scales, as_type.view(np.uint8))
    want = (blocks * factors[..., np.newaxis]).astype(np.float32)
    want = want.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    got = float4_e2m1fn_to_float32(values)
    assert_same_bits(got, np.where(want == 0, 0, want).reshape(x.shape))


def test_fp4_of_what_is_not_finite():
    """A NaN makes its block NaN; infinities are the largest there is."""
    x = np.ones((2, 64), np.float32)
    x[0, 5], x[1, 5] = np.nan, -np.inf
    for name, largest in (("mxfp4", np.inf), ("nvfp4", 6 * 448)):
        values, scales = QUANTIZED[name].quantize(x)
        with np.errstate(over="ignore"):
            wide = QUANTIZED[name].dequantize(values, scales)
        n = QUANTIZED[name].scale_block
        assert np.isnan(wide[0, :n]).all() and (values[0, : n // 2] == 0x77).all()
        assert wide[1, 5] == -largest and (np.delete(wide[1, :n], 5) == 0).all()
        assert (np.abs(wide[:, n:] - 1) < 0.05).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_shapes_of_formats(name):
    token_format = QUANTIZED[name]
    block = token_format.scale_block
    for n in (0, 3):
        values, scales = token_format.quantize(np.ones((n, 2 * block), np.float32))
        assert scales.shape == (n, 2)
        assert token_format.dequantize(values, scales).shape == (n, 2 * block)
    with pytest.raises(ValueError, match=f"block={block}"):
        token_format.quantize(np.ones((1, block + 1), np.float32))


def test_entries_of_formats():
    """A config selects each, and each that has scales has a definition."""
    for f in FORMATS:
        assert format_of(f.dtype, f.make_quant_config and f.make_quant_config()) == f
        assert f.is_quantized == (f.quantize is not None)


@slow
def test_dispatch_compares_the_entry_with_mojo(session, monkeypatch):
    """While it is compiled; test_mojo.py has what differs."""
    said = QUANTIZED["mxfp8"].words()
    said = [x.replace("_block=32", "_block=64") for x in said]
    monkeypatch.setattr(TokenFormat, "words", lambda _: said)
    case = Case("differs", 1, 1, 1, HIDDEN, 1, "mxfp8", tokens=F32)
    with building("differs", case) as (manager, (given,), graph):
        rows, *_ = manager.ep_dispatch(given.tokens, given.ids, 0)
        graph.output(rows)
    with raises(RuntimeError, "Failed to compile the model"):
        session.load(graph)


def test_only_some_float32_scales_are_rounded():
    unrounded = replace(QUANTIZED["fp8"], rounds_scales=False)
    assert "packed" in QUANTIZED["fp8"].scale_layouts
    assert "packed" not in unrounded.scale_layouts


def test_bits_of_what_numpy_has():
    bits = np.uint8([1, 127, 128, 255])
    assert_same_bits(widen_bits(DType.int8, bits), np.float32([1, 127, -128, -1]))


def test_tiles_are_those_of_the_picture():
    """Every scale of two experts once, with the second in a tile of its own."""
    offsets, n_blocks = np.uint32([0, 130, 131]), 5
    tiles = np.arange(4 * 2 * 32 * 4 * 4).reshape(4, 2, 32, 4, 4)
    got = scales_of_tiles(tiles, offsets, n_blocks)
    assert got.shape == (131, 5) and len(np.unique(got)) == got.size
    assert got[0, 0] == tiles[0, 0, 0, 0, 0] and got[33, 4] == tiles[0, 1, 1, 1, 0]
    assert got[128, 2] == tiles[1, 0, 0, 0, 2] and got[130, 3] == tiles[2, 0, 0, 0, 3]


# ------------------------------------------------------------ dequantize in graphs


def config_of(wire: str, layout: str = "auto") -> EPConfig:
    return Case("of_format", 1, 3, 1, HIDDEN, 5, wire, scale_layout=layout).config()


CONFIGS = {
    (name, layout): config_of(name, layout)
    for name, f in QUANTIZED.items()
    for layout in f.scale_layouts
    if layout in ("rows", "transposed")
}
FP8 = CONFIGS["fp8", "transposed"]


def graph_of_all(device: DeviceRef, **where: Module) -> Graph:
    target, types = "cpu" if device.is_cpu() else "gpu", []
    for (name, layout), config in CONFIGS.items():
        n, n_scales, of = f"{name}_{layout}", config.n_scales, config.token_format
        shape = [n, n_scales] if layout == "rows" else [n_scales, n]
        types += [
            TensorType(on_target(of.dtype, target), [n, config.row_columns], device),
            TensorType(on_target(of.scale_dtype, target), shape, device),
        ]
    with Graph("dequantize_all", input_types=types, **where) as graph:
        values = iter(value.tensor for value in graph.inputs)
        given = zip(values, values, CONFIGS.values())
        graph.output(*(dequantize(*of_one) for of_one in given))
    return graph


def add_graphs(module: Module) -> None:
    padded = [
        TensorType(DType.uint8, [3, 5, HIDDEN], CPU_DEVICE),
        TensorType(DType.float32, [3, HIDDEN // 128, 5], CPU_DEVICE),
    ]
    Graph("dequantize_padded", dequantize, padded, module=module, config=FP8)
    graph_of_all(CPU_DEVICE, module=module)


def rows_of_all(n_rows: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draws rows and scales of any bits; returns them, and what the oracle makes."""
    rng = np.random.default_rng(n_rows)
    given, want = [], []
    for (name, layout), config in CONFIGS.items():
        rows = rng.integers(0, 256, (n_rows, config.row_columns), np.uint8)
        # On CPU, MAX's own ops make 0 of what is subnormal.
        scales = rng.integers(16, 256, (n_rows, config.n_scales), np.uint8)
        if config.scales_dtype == DType.float32:
            scales = rng.standard_normal(scales.shape).astype(np.float32)
        with np.errstate(all="ignore"):
            want.append(QUANTIZED[name].dequantize(rows, scales))
        given += [rows, np.ascontiguousarray(scales if layout == "rows" else scales.T)]
    return given, want


@pytest.mark.parametrize("n_rows", [0, 1, 7])
def test_dequantize_is_the_oracles(one_module, n_rows):
    """Every format and layout."""
    given, want = rows_of_all(n_rows)
    for got, y in zip(one_module.models["dequantize_all"].execute(*given), want):
        np.testing.assert_array_equal(got.to_numpy(), y)


@pytest.mark.gpu(1)
def test_dequantize_on_a_gpu(gpu_session):
    """There values and scales are float8, and MAX casts them."""
    graph = graph_of_all(DeviceRef.GPU(0))
    given, want = rows_of_all(7)
    types = [value.tensor.dtype for value in graph.inputs]
    gpu = gpu_session.devices[1]
    buffers = [Buffer.from_numpy(x).view(t).to(gpu) for x, t in zip(given, types)]
    for got, y in zip(gpu_session.load(graph).execute(*buffers), want, strict=True):
        np.testing.assert_array_equal(to_numpy(got), y)


def test_padded_rows_are_the_oracles(one_module):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (3, 5, HIDDEN), np.uint8)
    scales = rng.standard_normal((3, HIDDEN // 128, 5)).astype(np.float32)
    (got,) = one_module.models["dequantize_padded"].execute(rows, scales)
    want = [QUANTIZED["fp8"].dequantize(x, of.T.copy()) for x, of in zip(rows, scales)]
    np.testing.assert_array_equal(got.to_numpy(), np.stack(want))


@refused("""
rows("float32", "n", 256), scales("float32", 2, "n") | rows are; float32
rows("uint8", "n", 256), scales("bfloat16", 2, "n") | scales are; bfloat
rows("uint8", "n", 256), scales("float32", "n", 2) | hidden / 128, n_ro
rows("uint8", "n", "k"), scales("float32", 2, "n") | hidden / 128, n_ro
rows("uint8", "n", 64), scales("float32", 0, "n") | hidden / 128, n_ro
rows("uint8", "n", 200), scales("float32", 1, "n") | a multiple of 128
rows("uint8", 256), scales("float32", 2) | hidden / 128, n_ro
rows("uint8", 3, 5, 256), scales("float32", 2, 5) | hidden / 128, n_ro
""")
def test_refusals(arguments, words):
    def make(dtype: str, *shape: int | str) -> TensorType:
        return TensorType(DType[dtype], shape, CPU_DEVICE)

    given = eval(arguments, dict(rows=make, scales=make))
    with raises((TypeError, ValueError), words):
        Graph("refused", dequantize, given, config=FP8)


def test_rows_of_gpus_are_float8():
    """As far as a graph goes that is not run."""
    gpu = DeviceRef.GPU(0)
    given = [
        TensorType(DType.float8_e4m3fn, ["n_rows", HIDDEN], gpu),
        TensorType(DType.float32, [HIDDEN // 128, "n_rows"], gpu),
    ]
    (rows,) = Graph("of_gpu", dequantize, given, config=FP8).output_types
    assert (rows.dtype, rows.device) == (DType.float32, gpu)
    assert list(rows.shape) == list(given[0].shape)


def test_what_is_not_dequantized():
    for config in (config_of("bfloat16"), config_of("mxfp8", "tiles")):
        with pytest.raises(ValueError, match="'rows' or 'transposed'"):
            dequantize(None, None, config)
