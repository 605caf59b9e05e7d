# SPDX-License-Identifier: Apache-2.0
"""Dequantizes rows, for experts without quantized matmuls."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..quantize import float4_e2m1fn_to_float32

# Elements that share a scale, by the dtypes of values and scales.
_BLOCKS = {
    (torch.float8_e4m3fn, torch.float32): 128,
    (torch.float8_e4m3fn, torch.int32): 128,
    (torch.float8_e4m3fn, torch.float8_e8m0fnu): 32,
    (torch.uint8, torch.float8_e4m3fn): 16,
    (torch.uint8, torch.float8_e8m0fnu): 32,
}


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
    if rows.dtype == getattr(torch, "float4_e2m1fn_x2", None):
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
            f"there must be one for {block * per_word} elements: {wanted}"
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
