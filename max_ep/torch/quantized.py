# SPDX-License-Identifier: Apache-2.0
"""Dequantizes rows, for experts without FP8 matmuls."""

from __future__ import annotations

import torch

from ..limits import FP8_BLOCK


def dequantize(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies values by the scales of their blocks of 128, in float32.

    Args:
        rows: float8_e4m3fn ``[..., hidden]``, as ``Buffer`` returns them.
        scales: float32 ``[..., hidden / 128]``, or int32 ``[..., hidden / 512]``: four
            UE8M0 in a word. Of any strides.

    Returns:
        float32 ``[..., hidden]``.
    """
    is_packed = scales.dtype == torch.int32
    if rows.dtype != torch.float8_e4m3fn or not (
        is_packed or scales.dtype == torch.float32
    ):
        raise TypeError(
            f"max_ep: rows are {rows.dtype}, scales {scales.dtype}; dequantize takes "
            "float8_e4m3fn with float32 or int32. Bits in another dtype: .view() them"
        )
    hidden, n_values = rows.shape[-1], FP8_BLOCK * (4 if is_packed else 1)
    wanted = [*rows.shape[:-1], hidden // n_values]
    if list(scales.shape) != wanted or hidden % n_values != 0:
        raise ValueError(
            f"max_ep: scales of rows {list(rows.shape)} are {list(scales.shape)}; "
            f"there must be one for {n_values} elements: {wanted}"
        )
    if is_packed:
        scales = scales.contiguous().view(torch.float8_e8m0fnu)
    blocks = rows.float().reshape(*scales.shape, FP8_BLOCK)
    return (blocks * scales.float().unsqueeze(-1)).reshape(rows.shape)
