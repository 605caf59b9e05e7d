# SPDX-License-Identifier: Apache-2.0
"""Dequantizes rows, for experts without quantized matmuls."""

from __future__ import annotations

import numpy as np
from max.dtype import DType
from max.graph import StaticDim, TensorValue, ops

from ..config import EPConfig
from ..formats import on_target, widen_bits


def dequantize(
    rows: TensorValue,
    scales: TensorValue,
    config: EPConfig,
    row_scales: TensorValue | None = None,
) -> TensorValue:
    """Multiplies the rows that a quantizing dispatch delivers by their scales.

    The numbers are those of ``config.token_format.dequantize``, in NumPy. On GPUs
    MAX's own matmuls take rows and scales as they are; our bfloat16 ones
    (``max_ep.experts``) want the result cast.

    Args:
        rows: As dispatch delivers them: ``[n_rows, hidden]``, or with
            ``output_layout="padded"`` ``[n_local_experts, capacity, hidden]``.
        scales: As dispatch delivers them, with ``scale_layout="rows"`` or
            ``"transposed"``.
        config: The group.
        row_scales: With ``nvfp4_dyn_global_scales``, as dispatch delivers them.

    Returns:
        float32 ``[..., hidden]``; rows after the last received one are undefined.

    Raises:
        TypeError: If the dtypes are not those.
        ValueError: If the config has no scales, or in tiles; if there is not one for
            each block, or the graph does not know how many elements a row has.
    """
    if config.scale_layout not in ("rows", "transposed"):
        raise ValueError(
            f"dequantize with dispatch_dtype={config.dispatch_dtype} and scale_layout="
            f"{config.scale_layout!r}: it takes scales in the layout 'rows' or "
            "'transposed'"
        )
    if config.nvfp4_dyn_global_scales != (row_scales is not None):
        raise ValueError(
            "row_scales are needed exactly with nvfp4_dyn_global_scales="
            f"{config.nvfp4_dyn_global_scales}: what dispatch delivers behind scales"
        )
    token_format, is_transposed = config.token_format, config.scale_layout != "rows"
    block = token_format.scale_block
    for what, value, dtype in (
        ("rows", rows, token_format.dtype),
        ("scales", scales, token_format.scale_dtype),
    ):
        of_cpu = on_target(dtype, "cpu")
        if value.dtype not in (dtype, of_cpu):
            raise TypeError(
                f"{what} are {value.dtype}; {token_format.name} dispatch "
                f"delivers {of_cpu} on CPU and {dtype} on GPUs"
            )
    *by_row, columns = rows.shape
    known = int(columns) if by_row and isinstance(columns, StaticDim) else 0
    hidden = known * token_format.values_per_byte
    by_block = [*by_row, hidden // block]
    want, wanted = by_block, f"n_rows, hidden / {block}"
    if is_transposed:
        want = [*by_row[:-1], hidden // block, *by_row[-1:]]
        wanted = f"hidden / {block}, n_rows"
    if hidden == 0 or hidden % block or list(scales.shape) != want:
        raise ValueError(
            f"rows are {rows.shape} and scales {scales.shape}; for rows [..., n_rows, "
            f"hidden], hidden a multiple of {block}, give scales [..., {wanted}], as "
            "dispatch delivers them"
        )
    values = ops.reshape(_widen(rows, token_format.dtype), [*by_block, block])
    factors = _widen(scales, token_format.scale_dtype)
    if is_transposed:
        factors = ops.transpose(factors, -1, -2)
    wide = values * ops.unsqueeze(factors, -1)
    wide = ops.reshape(wide, [*by_row, hidden])
    if row_scales is None:
        return wide
    return wide * ops.unsqueeze(row_scales.cast(DType.float32), -1)


def _widen(value: TensorValue, dtype: DType) -> TensorValue:
    """Makes float32 of values or scales; of bits, with a table of all there are."""
    if value.dtype != DType.uint8:
        return value.cast(DType.float32)
    of_bits = widen_bits(dtype, np.arange(256, dtype=np.uint8)[:, np.newaxis])
    table = ops.constant(of_bits, DType.float32, value.device)
    wide = ops.gather(table, value.cast(DType.int32), axis=0)
    *outer, n = value.shape
    return ops.reshape(wide, [*outer, n * of_bits.shape[1]])
