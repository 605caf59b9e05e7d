# SPDX-License-Identifier: Apache-2.0
"""Quantized tokens: dispatch takes them as pairs, or makes them; experts without
quantized matmuls widen them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from ..plural import counted
from ..quantize import FP8_MAX, FP8_MIN_AMAX, float4_e2m1fn_to_float32
from .communicator import Communicator, refuse
from .library import round_up

_FP8, _FP4 = torch.float8_e4m3fn, torch.uint8
_E8M0 = torch.float8_e8m0fnu
_FP4_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)
"""Two numbers in a byte, in PyTorch's own type; it can little but be viewed."""


class Wire(NamedTuple):
    """A quantized format, as PyTorch has its tensors."""

    block: int
    """Elements that share a scale."""
    values: torch.dtype
    scales: torch.dtype

    @property
    def per_byte(self) -> int:
        """Returns elements in a byte of values."""
        return 2 if self.values == _FP4 else 1

    @property
    def multiple(self) -> int:
        """Returns what ``hidden`` is a multiple of: values are of whole 16 bytes."""
        return max(self.block, 16 * self.per_byte)


FORMATS = {
    "fp8": Wire(128, _FP8, torch.float32),
    "mxfp8": Wire(32, _FP8, _E8M0),
    "nvfp4": Wire(16, _FP4, _FP8),
    "mxfp4": Wire(32, _FP4, _E8M0),
}
"""What ``format`` may be, in the words of docs/formats.md."""

_BLOCKS = {(wire.values, wire.scales): wire.block for wire in FORMATS.values()}
_BLOCKS[_FP8, torch.int32] = 128
"""Elements that share a scale, by the dtypes of values and scales."""


def checked_format(format: Any) -> Wire:
    """Returns a format of :data:`FORMATS`; raises for another name."""
    wire = FORMATS.get(format) if isinstance(format, str) else None
    if wire is None:
        refuse("format", f"={format!r} must be None or one of {', '.join(FORMATS)}")
    return wire


def quantize(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes tokens, with the bits of ``max_ep.quantize`` (docs/formats.md).

    Args:
        x: bfloat16 or float32 ``[n_tokens, hidden]``; ``hidden`` is a multiple of the
            format's block.
        format: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"`` or ``"mxfp4"``.

    Returns:
        Values, float8_e4m3fn ``[n_tokens, hidden]`` or uint8 ``[n_tokens, hidden / 2]``
        (two float4_e2m1fn in a byte), and scales ``[n_tokens, hidden / block]``:
        float32, float8_e8m0fnu, or of NVFP4 float8_e4m3fn.

    Raises:
        TypeError: If ``x`` is no tensor of these dtypes.
        ValueError: If the format has another name, or ``hidden`` is no multiple.
    """
    wire = checked_format(format)
    block = wire.block
    if not isinstance(x, torch.Tensor) or x.ndim != 2:
        raise TypeError("max_ep: x must be a tensor [n_tokens, hidden]")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"max_ep: x must be bfloat16 or float32, got {x.dtype}")
    if x.shape[1] == 0 or x.shape[1] % block != 0:
        has = counted(x.shape[1], "column")
        refuse("x", f"has {has}; {format} needs a multiple of {block}")
    # Numbers are divided by tensors: a GPU multiplies by the inverse of a number.
    n, hidden = x.shape
    row = n, hidden // wire.per_byte
    blocks = x.float().reshape(n, hidden // block, block)
    largest = blocks.abs().amax(2)
    if format == "fp8":
        largest = largest.clamp(min=float(FP8_MIN_AMAX))
        most = largest.new_full((), float(FP8_MAX))
        values = _to_fp8(blocks * (most / largest)[..., None])
        return values.reshape(row), largest / most
    if format == "nvfp4":
        scales = _to_fp8(largest / largest.new_full((), 6))
        is_zero = scales.view(torch.uint8) == 0
        factors = torch.where(is_zero, 0, 1 / scales.float())
        values = _to_fp4(blocks * factors[..., None])
        return values.reshape(row), scales
    # Exponents of the largest, as float32 has them.
    bits = largest.view(torch.int32)
    if format == "mxfp8":  # 448 is 1.75 * 2**8
        exponents = ((bits + 0x1FFFFF) >> 23).clamp(min=8) - 8
    else:
        exponents = (bits >> 23).clamp(min=2) - 2
    is_nan = largest.isnan()
    blocks = blocks * _power_of_two(127 - exponents)[..., None]
    blocks = torch.where(is_nan[..., None], float("nan"), blocks)
    values = (_to_fp8 if format == "mxfp8" else _to_fp4)(blocks)
    scales = torch.where(is_nan, 255, exponents).to(torch.uint8).view(_E8M0)
    return values.reshape(row), scales


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Returns exact float32, of int32 in ``[-126, 127]``."""
    return ((exponent + 127) << 23).view(torch.float32)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest even, and saturates; NaN has one form."""
    bits = x.clamp(-448, 448).to(_FP8).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, bits).view(_FP8)


def _to_fp4(x: torch.Tensor) -> torch.Tensor:
    """Rounds ``[..., n]`` to nearest even, and saturates, to pairs ``[..., n / 2]``; 0
    has no sign, a NaN is 6."""
    magnitude = torch.where(x.isnan(), 6, x.abs().clamp(max=6))
    exponent = (magnitude >= 2).int() + (magnitude >= 4).int()
    # Numbers are 2 ** (exponent - 1) apart.
    steps = (magnitude * _power_of_two(1 - exponent)).round().int()
    bits = 2 * exponent + steps
    bits = torch.where((x < 0) & (bits > 0), bits | 8, bits).to(torch.uint8)
    return bits[..., ::2] | bits[..., 1::2] << 4


def dequantize(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies values by the scales of their blocks, as ``max_ep.dequantize`` does.

    Args:
        rows: float8_e4m3fn ``[..., hidden]``, or uint8 ``[..., hidden / 2]``: two
            float4_e2m1fn in a byte.
        scales: ``[..., hidden / block]``, as docs/formats.md lists them, of any
            strides; of FP8 also int32 ``[..., hidden / 512]``: four UE8M0 in a word.

    Returns:
        float32 ``[..., hidden]``.

    Raises:
        TypeError: If no format has these dtypes.
        ValueError: If there is not a scale for each block.
    """
    for name, given in (("rows", rows), ("scales", scales)):
        if not isinstance(given, torch.Tensor) or given.ndim == 0:
            kind = "a number" if isinstance(given, torch.Tensor) else repr(type(given))
            raise TypeError(f"max_ep: {name} must be a tensor of rows, not {kind}")
    if rows.dtype == _FP4_PAIRS:
        rows = rows.view(torch.uint8)
    block = _BLOCKS.get((rows.dtype, scales.dtype))
    if block is None:
        raise TypeError(
            f"max_ep: rows are {rows.dtype}, scales {scales.dtype}; dequantize takes "
            + ", ".join(f"{values} with {of}" for values, of in _BLOCKS)
            + ". Bits in another dtype: .view() them"
        )
    hidden = rows.shape[-1] * (2 if rows.dtype == torch.uint8 else 1)
    per_word = 4 if scales.dtype == torch.int32 else 1
    wanted = [*rows.shape[:-1], hidden // (block * per_word)]
    if list(scales.shape) != wanted or hidden % (block * per_word) != 0:
        raise ValueError(
            f"max_ep: scales of rows {list(rows.shape)} are {list(scales.shape)}; "
            f"there must be one for {counted(block * per_word, 'element')}: {wanted}"
        )
    if per_word > 1:
        scales = scales.contiguous().view(torch.float8_e8m0fnu)
    if rows.dtype == torch.uint8:
        values = _fp4_pairs(rows.device)[rows.long()]
    else:
        values = rows.float()
    blocks = values.reshape(*scales.shape, block)
    return (blocks * scales.float().unsqueeze(-1)).reshape(*rows.shape[:-1], hidden)


@functools.cache
def _fp4_pairs(device: torch.device) -> torch.Tensor:
    """Returns the two numbers of each byte, ``[256, 2]``."""
    bytes_ = np.arange(256, dtype=np.uint8)[:, np.newaxis]
    return torch.from_numpy(float4_e2m1fn_to_float32(bytes_)).to(device)


class Given(NamedTuple):
    """Tokens as they are dispatched."""

    rows: torch.Tensor
    """``[n_tokens, n]``, contiguous; FP4 as bytes."""
    words: torch.Tensor | None = None
    """Their scales, int32 ``[n_tokens, m]``, of any strides."""
    scales: torch.Tensor | None = None
    """The scales as they were given: the dtype and number of those that arrive."""

    @property
    def hidden(self) -> int:
        """Returns the elements of a token."""
        are_pairs = self.rows.dtype == torch.uint8 and self.scales is not None
        return self.rows.shape[1] * (2 if are_pairs else 1)

    @property
    def format(self) -> str:
        """Returns a format with these values and such scales, or the dtype."""
        rows, scales = self.rows.dtype, self.scales
        for name, wire in FORMATS.items():
            if scales is not None and rows == wire.values:
                if scales.element_size() == 4 or scales.dtype == wire.scales:
                    return name
        return str(rows).removeprefix("torch.")

    def arrived(self, rows: torch.Tensor, words: torch.Tensor | None) -> Any:
        """Returns rows that have arrived, as the caller gave his own."""
        if words is None or self.scales is None:
            return rows
        if self.scales.element_size() == 4:
            return rows, words.view(self.scales.dtype)
        scales = words.view(torch.uint8)[:, : self.scales.shape[1]]
        return rows, scales.view(self.scales.dtype)


def checked_pair(comm: Communicator, pair: Any) -> Given:
    """Takes values and scales; refuses what no format has.

    FP8 may have any number of scales of 4 bytes. Scales of 1 byte are one for each
    block, and travel as words.
    """
    if len(pair) != 2:
        refuse("x", f"is a tuple of {len(pair)}; pass rows, or (rows, scales)")
    rows, scales = pair
    if isinstance(rows, torch.Tensor) and rows.dtype == _FP4_PAIRS:
        rows = rows.view(torch.uint8)
    comm.check_tensor("x[0]", rows, None, (None, None), True)
    # Any strides will do: matmuls want columns.
    comm.check_tensor("scales of x", scales, None, (rows.shape[0], None), True)
    found = rows.dtype, scales.dtype
    if found != (_FP8, torch.float32) and found not in _BLOCKS:
        raise TypeError(
            f"max_ep: x is {rows.dtype}, its scales {scales.dtype}; dispatch takes "
            + ", ".join(f"{values} with {of}" for values, of in _BLOCKS)
            + ". Bits in another dtype: .view() them"
        )
    n_scales = scales.shape[1]
    if scales.element_size() == 4:
        if not 0 < n_scales <= rows.shape[1]:
            refuse("scales of x", f"have {counted(n_scales, 'column')}")
        return Given(rows.contiguous(), scales.view(torch.int32), scales)
    block = _BLOCKS[found]
    per_byte = 2 if rows.dtype == torch.uint8 else 1
    hidden = rows.shape[1] * per_byte
    if n_scales * block != hidden:
        what = (
            f"have {counted(n_scales, 'column')}; of {counted(hidden, 'element')} "
            "there must be one for"
        )
        refuse("scales of x", f"{what} {block}")
    padded = scales.new_zeros((rows.shape[0], round_up(n_scales, 4)), dtype=torch.uint8)
    padded[:, :n_scales].copy_(scales.view(torch.uint8))
    return Given(rows.contiguous(), padded.view(torch.int32), scales)


def given_as(comm: Communicator, x: Any, format: str | None) -> Given:
    """Returns tokens to dispatch: bfloat16, a pair, or bfloat16 that is quantized."""
    if isinstance(x, (tuple, list)):
        if format is not None:
            refuse(
                "format", f"={format!r}, and x is a pair, which is quantized already"
            )
        return checked_pair(comm, x)
    comm.check_tensor("x", x, torch.bfloat16, (None, None), True)
    if format is None:
        return Given(x.contiguous())
    return checked_pair(comm, quantize(x, format))


def joined_pair(comm: Communicator, pair: Any) -> tuple[torch.Tensor, str, int]:
    """Returns a pair as low-latency kernels forward it, uint8 ``[n_tokens, n]``, with
    values, then scales, of whole 16 bytes; its format, and elements of a token.

    Bits that no token of the format has are replaced, as docs/formats.md says.
    """
    given = checked_pair(comm, pair)
    names = [name for name, wire in FORMATS.items() if _is(wire, given)]
    if not names:
        kind = f"{given.rows.dtype} with {given.scales.dtype} {given.scales.shape[1]}"
        refuse("x", f"is {kind} in a row; no low-latency format has these scales")
    values = given.rows.view(torch.uint8)
    if given.rows.dtype == _FP8:
        values = torch.where((values & 0x7F) == 0x7F, 0x7F, values)
    else:
        magnitudes = values & 0x77
        values = magnitudes | (values & (magnitudes + 0x77) & 0x88)
    scales = given.scales.contiguous()
    if scales.dtype == torch.float32:
        scales = torch.where(scales.isnan(), float("nan"), scales).view(torch.uint8)
    elif scales.dtype == _FP8:
        scales = scales.view(torch.uint8) & 0x7F
    else:
        scales = scales.view(torch.uint8)
        scales = torch.where(scales == 0xFE, 0xFD, scales)
    n_values, n_scales = values.shape[1], scales.shape[1]
    shape = (values.shape[0], n_values + round_up(n_scales, 16))
    joined = values.new_zeros(shape)
    joined[:, :n_values] = values
    joined[:, n_values:][:, :n_scales] = scales
    return joined, names[0], given.hidden


def _is(wire: Wire, given: Given) -> bool:
    """Returns whether a pair is of a format."""
    found = given.rows.dtype, given.scales.dtype
    n_scales = given.scales.shape[1]
    return (wire.values, wire.scales) == found and n_scales * wire.block == given.hidden
