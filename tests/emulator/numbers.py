# SPDX-License-Identifier: Apache-2.0
"""What instructions do that Python has no word for; numbers are their bits."""

import math
import operator
import struct
from array import array
from collections.abc import Callable
from functools import partial

import numpy as np

from max_ep.quantize import float8_e4m3fn_to_float32, float32_to_float8_e4m3fn

_float_in, _bytes_of = struct.Struct("<f").unpack, struct.Struct("<I").pack


class _Floats(dict):
    """Numbers by their bits. Most come again and again."""

    def __missing__(self, bits: int) -> float:
        made = self[bits] = _float_in(_bytes_of(bits))[0]
        return made


floats = _Floats()
to_float = floats.__getitem__
cell = array("f", [0.0])
"""Rounds what is stored in it to float32; `cell_bits` reads its bits."""
cell_bits = memoryview(cell).cast("B").cast("I")


def to_bits(x: float) -> int:
    cell[0] = x
    return cell_bits[0]


def quotient(a: float, b: float) -> float:
    if b:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1, b) if a else math.nan


def to_bf16(bits: int) -> int:
    """Rounds float32 to bfloat16, to even."""
    if bits & 0x7FFF_FFFF > 0x7F80_0000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


FP8 = float8_e4m3fn_to_float32(np.arange(256, dtype=np.uint8))


def to_fp8(bits: int) -> int:
    """Rounds float32 to float8_e4m3fn, to even, at most its largest number."""
    x = np.array([bits], np.uint32).view(np.float32)
    return int(float32_to_float8_e4m3fn(x)[0])


def _bf16x2(how: Callable[[float, float], float], a: int, b: int) -> int:
    low, high = (
        to_bits(how(to_float(x & 0xFFFF_0000), to_float(y & 0xFFFF_0000)))
        for x, y in ((a << 16, b << 16), (a, b))
    )
    return to_bf16(high) << 16 | to_bf16(low)


add_bf16x2 = partial(_bf16x2, operator.add)
mul_bf16x2 = partial(_bf16x2, operator.mul)


def fp8_to_f16x2(both: int) -> int:
    low, high = FP8[[both & 255, both >> 8 & 255]].astype(np.float16).view(np.uint16)
    return int(high) << 16 | int(low)


def f16_to_bits(half: int) -> int:
    return to_bits(struct.unpack("<e", struct.pack("<H", half & 0xFFFF))[0])


def permuted(a: int, b: int, how: int) -> int:
    both = a | b << 32
    return sum((both >> 8 * (how >> 4 * i & 7) & 255) << 8 * i for i in range(4))


def divided(a: int, b: int, bits: int) -> int:
    """Divides signed numbers, towards zero."""
    half = 1 << bits - 1
    a, b = (a ^ half) - half, (b ^ half) - half
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
