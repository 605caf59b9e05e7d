# SPDX-License-Identifier: Apache-2.0
"""The oracle of number formats, in NumPy: casts, quantization and dequantization.

NumPy has no bfloat16, and no type of 8 bits or fewer but integers: they are kept as
bits, `uint16` and `uint8`. `quantize_*` define the formats, with each rounding;
docs/formats.md says the same in words. They map float32 `[n, hidden]` to values and
scales of blocks, `[n, hidden / block]`.
"""

from __future__ import annotations

import numpy as np

FP8_MAX = np.float32(448)
"""Largest finite float8_e4m3fn."""

FP8_MIN_AMAX = np.float32(1e-4)
"""Floor of a block's `amax`, so that a block of zeros has a usable scale."""


def typed(name: str, x: np.ndarray, dtype: type) -> np.ndarray:
    """Returns `x` as an array; a silent cast would hide a second rounding."""
    x = np.asarray(x)
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {np.dtype(dtype)}, got {x.dtype}")
    return x


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widens bfloat16 bits (`uint16`, any shape) to float32; exact."""
    bits = typed("bits", bits, np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to bfloat16 bits, to nearest, ties to even; NaN is `0x7fc0`."""
    x = typed("x", x, np.float32)
    bits = np.where(np.isnan(x), np.uint32(0x7FC0_0000), x.view(np.uint32))
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = bits + np.uint32(0x7FFF) + is_odd
    return (rounded >> np.uint32(16)).astype(np.uint16)


def float8_e4m3fn_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widens float8_e4m3fn bits (`uint8`, any shape) to float32; exact.

    4 exponent bits, bias 7, 3 mantissa bits, no infinity; `0x7f` and `0xff` are NaN.
    """
    bits = typed("bits", bits, np.uint8)
    exponent = (bits >> 3).astype(np.int32) & 15
    steps = (bits & 7) + 8.0 * (exponent > 0)
    x = np.ldexp(steps, np.maximum(exponent, 1) - 10).astype(np.float32)
    x = np.where((bits & 0x7F) == 0x7F, np.float32(np.nan), x)
    return np.where(bits & 0x80, -x, x)


def float32_to_float8_e4m3fn(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to float8_e4m3fn bits, to nearest, ties to even.

    Beyond +-448, infinity too, is +-448 (`0x7e`, `0xfe`). Every NaN is `0x7f`.
    """
    x = typed("x", x, np.float32)
    magnitude = np.where(np.isnan(x), 0, np.minimum(np.abs(x), FP8_MAX))
    # In [2**e, 2**(e + 1)) values are 2**(e - 3) apart; below 2**-6 they stay
    # 2**-9 apart (subnormals). `steps` counts them, in [0, 16]; 16 is the first
    # value of the next `e`, and the sum below carries into it.
    e = np.frexp(np.maximum(magnitude, 2.0**-6))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - e))
    bits = ((e + 6) * 8 + steps).astype(np.uint8)
    bits = np.where(np.signbit(x), bits | np.uint8(0x80), bits)
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


def quantize_blockwise_fp8(
    x: np.ndarray, power_of_two_scales: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes finite tokens to float8_e4m3fn with a float32 scale for 128.

    The numbers are those of DeepEP's low-latency dispatch (`round_scale`). Its kernel
    has `amax * (1 / 448)` where its tests and this divide: a plain scale may differ
    from the kernel's in the last bit.
    """
    blocks = in_blocks(x, 128)
    amax = np.maximum(np.abs(blocks).max(axis=2, keepdims=True), FP8_MIN_AMAX)
    scales = amax / FP8_MAX
    factors = FP8_MAX / amax
    if power_of_two_scales:
        mantissa, exponent = np.frexp(scales)  # mantissa in [0.5, 1)
        scales = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
        factors = 1 / scales
    values = float32_to_float8_e4m3fn(blocks * factors)
    return values.reshape(x.shape), scales[:, :, 0]


def float8_e8m0fnu_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widens float8_e8m0fnu bits (`uint8`, any shape) to float32; exact.

    Powers of two, from 2**-127 to 2**127; 255 is NaN.
    """
    bits = typed("bits", bits, np.uint8)
    x = np.ldexp(np.float32(1), np.minimum(bits, 254).astype(np.int32) - 127)
    return np.where(bits == 255, np.float32(np.nan), x)


def quantize_mxfp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes tokens to float8_e4m3fn with a float8_e8m0fnu scale for 32."""
    blocks = in_blocks(x, 32)
    amax = np.abs(blocks).max(axis=2)
    mantissa, exponent = np.frexp(amax.astype(np.float64) / 448)  # mantissa in [0.5, 1)
    exponent = np.where(amax > 0, exponent - (mantissa == 0.5), -127)
    exponent = np.where(np.isfinite(amax), np.clip(exponent, -127, 120), 120)
    scales = np.where(np.isnan(amax), 255, exponent + 127).astype(np.uint8)
    values = float32_to_float8_e4m3fn(np.ldexp(blocks, -exponent[:, :, np.newaxis]))
    values = np.where(np.isnan(amax)[:, :, np.newaxis], np.uint8(0x7F), values)
    return values.reshape(x.shape), scales


def float4_e2m1fn_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widens pairs of float4_e2m1fn (`uint8` `[..., n]`) to float32 `[..., 2 * n]`.

    The first of a pair is the lower half of the byte.
    """
    bits = typed("bits", bits, np.uint8)
    pairs = np.stack([bits & 15, bits >> 4], axis=-1)
    magnitudes = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])[pairs & 7]
    x = np.where(pairs & 8, -magnitudes, magnitudes)
    return x.reshape(*bits.shape[:-1], 2 * bits.shape[-1])


def float32_to_float4_e2m1fn(x: np.ndarray) -> np.ndarray:
    """Rounds float32 `[..., 2 * n]` to pairs of float4_e2m1fn, `uint8` `[..., n]`.

    To nearest, ties to even; beyond +-6, infinity too, is +-6. Every NaN is 6. What
    rounds to zero is 0, never -0.
    """
    x = typed("x", x, np.float32)
    magnitude = np.where(np.isnan(x), 6, np.minimum(np.abs(x), 6))
    e = np.frexp(np.maximum(magnitude, 1))[1] - 1  # values are 2**(e - 1) apart
    bits = (e * 2 + np.rint(np.ldexp(magnitude, 1 - e))).astype(np.uint8)
    bits = np.where((x < 0) & (bits > 0), bits | np.uint8(8), bits)
    return bits[..., ::2] | bits[..., 1::2] << 4


def quantize_mxfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes tokens to pairs of float4_e2m1fn with a float8_e8m0fnu scale for 32."""
    blocks = in_blocks(x, 32)
    amax = np.abs(blocks).max(axis=2)
    finite = np.where(np.isfinite(amax) & (amax > 0), amax, 1)
    exponent = np.maximum(np.frexp(finite)[1] - 3, -127)
    exponent = np.where(amax > 0, np.where(np.isinf(amax), 126, exponent), -127)
    scales = np.where(np.isnan(amax), 255, exponent + 127).astype(np.uint8)
    scaled = np.ldexp(blocks, -exponent[:, :, np.newaxis])
    scaled = np.where(np.isnan(amax)[:, :, np.newaxis], np.float32(np.nan), scaled)
    return float32_to_float4_e2m1fn(scaled.reshape(x.shape)), scales


def quantize_nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes tokens to pairs of float4_e2m1fn with a float8_e4m3fn scale for 16.

    With an input scale `s`, `x` is what `s` times the token rounds to.
    """
    blocks = in_blocks(x, 16)
    scales = float32_to_float8_e4m3fn(np.abs(blocks).max(axis=2) / np.float32(6))
    widened = float8_e4m3fn_to_float32(np.maximum(scales, 1))
    factors = np.where(scales == 0, np.float32(0), np.float32(1) / widened)
    scaled = blocks * factors[:, :, np.newaxis]
    return float32_to_float4_e2m1fn(scaled.reshape(x.shape)), scales


def quantize_nvfp4_dynamic(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantizes tokens to NVFP4, each with a scale of its own; returns float32 `[n]` of
    these, too."""
    with np.errstate(invalid="ignore"):
        row_max = np.maximum(np.abs(x).max(axis=1), np.float32(1e-30))
        values, scales = quantize_nvfp4(x * (np.float32(2688) / row_max)[:, np.newaxis])
    inverse = float32_to_bfloat16(row_max / np.float32(2688))
    return values, scales, bfloat16_to_float32(inverse)


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """Views float32 `[n, hidden]` as `[n, hidden / block, block]`."""
    n, hidden = typed("x", x, np.float32).shape
    if hidden % block != 0:
        raise ValueError(f"hidden={hidden} is not a multiple of block={block}")
    return x.reshape(n, hidden // block, block)
