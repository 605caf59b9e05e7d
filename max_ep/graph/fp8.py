# SPDX-License-Identifier: Apache-2.0
"""FP8 rows as experts without FP8 matmuls take them."""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import StaticDim, TensorValue, ops

from ..formats import FP8_BLOCK
from ..reference import float8_e4m3fn_to_float32


def dequantize_blockwise_fp8(rows: TensorValue, scales: TensorValue) -> TensorValue:
    """Multiplies the FP8 rows that dispatch delivers by their scales, in float32.

    The same numbers as ``max_ep.reference.dequantize_blockwise_fp8``, which takes the
    scales as quantization makes them, ``[n_rows, hidden / 128]``. On GPUs, where it has
    not been run yet, MAX's own FP8 matmuls take rows and scales as they are; our
    bfloat16 ones (``max_ep.experts``) want the result cast.

    Args:
        rows: ``[n_rows, hidden]``, or with ``output_layout="padded"``
            ``[n_local_experts, capacity, hidden]``; on CPU uint8, the bits of
            float8_e4m3fn, on GPUs float8_e4m3fn.
        scales: ``[hidden / 128, n_rows]`` float32, or ``[n_local_experts,
            hidden / 128, capacity]``: as dispatch delivers them.

    Returns:
        float32 of the shape of ``rows``; behind the last row that arrived undefined.

    Raises:
        TypeError: If the dtypes are not those.
        ValueError: If the scales are not one for 128 elements of each row, or the
            graph does not know how many elements a row has.
    """
    if rows.dtype not in (DType.uint8, DType.float8_e4m3fn):
        raise TypeError(
            f"rows are {rows.dtype}; dispatch delivers uint8 (on CPU) or float8_e4m3fn "
            "where it quantizes, and others need no dequantize_blockwise_fp8"
        )
    if scales.dtype != DType.float32:
        raise TypeError(f"scales are {scales.dtype}; dispatch delivers float32")
    shape = list(rows.shape)
    hidden = shape[-1] if len(shape) > 1 else None
    known = int(hidden) if isinstance(hidden, StaticDim) else 0
    n_blocks = known // FP8_BLOCK if known % FP8_BLOCK == 0 else 0
    outer, n_rows = shape[:-2], shape[-2:-1]
    if n_blocks == 0 or list(scales.shape) != [*outer, n_blocks, *n_rows]:
        raise ValueError(
            f"rows are {rows.shape} and scales {scales.shape}; for rows [..., n_rows, "
            f"hidden], hidden a multiple of {FP8_BLOCK}, give scales [..., hidden / "
            f"{FP8_BLOCK}, n_rows], as dispatch delivers them"
        )
    if rows.dtype == DType.uint8:
        of_bits = float8_e4m3fn_to_float32(np.arange(256, dtype=np.uint8))
        table = ops.constant(of_bits, DType.float32, rows.device)
        values = ops.gather(table, rows.cast(DType.int32), axis=0)
    else:
        values = rows.cast(DType.float32)
    blocks = ops.reshape(values, [*outer, *n_rows, n_blocks, FP8_BLOCK])
    by_row = ops.unsqueeze(ops.transpose(scales, -1, -2), -1)
    return ops.reshape(blocks * by_row, rows.shape)
