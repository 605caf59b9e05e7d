# SPDX-License-Identifier: Apache-2.0
"""What of MAX 26.7 is wrong on Hopper in bfloat16, and what takes its place.

The grouped matmul does not compile (docs/decisions/0016-grouped-matmul-on-hopper.md),
and a matmul writes behind its result (docs/decisions/0018-whole-tiles-on-hopper.md).
On CPU a matmul takes MAX minutes to compile (docs/decisions/0006-experts-on-cpu.md).
Elsewhere, and in other dtypes, MAX's own functions are called.
"""

from __future__ import annotations

from typing import Any

from max.driver import accelerator_architecture_name
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn import linear as max_linear
from max.nn import stacked_linear as max_stacked_linear
from max.nn.kernels import grouped_matmul_ragged
from max.nn.linear import linear
from max.nn.moe import moe as max_moe

from ..experts import grouped_matmul
from ..experts import linear as linear_on_cpu

TILE_ROWS = 128
"""Rows are filled up to a multiple of it: twice the 64 that were seen written."""


def _is_concerned(value: TensorValue) -> bool:
    if value.device.is_cpu() or value.dtype != DType.bfloat16:
        return False
    return accelerator_architecture_name().startswith("sm_90")


def grouped_matmul_anywhere(
    hidden_states: TensorValue,
    weight: TensorValue,
    expert_start_indices: TensorValue,
    expert_ids: TensorValue,
    expert_usage_stats: TensorValue,
) -> TensorValue:
    """Runs MAX's ``grouped_matmul_ragged``, or ours where that does not compile.

    The arguments are MAX's.
    """
    if _is_concerned(weight):
        return grouped_matmul(hidden_states, weight, expert_start_indices, expert_ids)
    return grouped_matmul_ragged(
        hidden_states, weight, expert_start_indices, expert_ids, expert_usage_stats
    )


def linear_anywhere(
    x: TensorValue, weight: TensorValue, *quantization: Any, **more: Any
) -> TensorValue:
    """Runs MAX's ``linear``, on whole tiles where it writes behind its result.

    On CPU in float32 it is ours. The arguments are MAX's.
    """
    is_quantized = any(value is not None for value in (*quantization, *more.values()))
    if not is_quantized and x.rank == 2:
        if _is_concerned(x):
            return matmul_of_whole_tiles(x, weight)
        if x.device.is_cpu() and x.dtype == weight.dtype == DType.float32:
            return linear_on_cpu(x, weight)
    return linear(x, weight, *quantization, **more)


def matmul_of_whole_tiles(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Multiplies rows, and zeros behind them up to a multiple of ``TILE_ROWS``.

    Args:
        x: ``[n_rows, k]``.
        weight: ``[n, k]`` of the same dtype.

    Returns:
        ``x @ weight.T``, ``[n_rows, n]``.
    """
    n_rows, k = x.shape
    n_more = (n_rows + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS - n_rows
    zeros = ops.broadcast_to(ops.constant(0, x.dtype, x.device), [n_more, k])
    product = ops.concat([x, zeros]) @ weight.T
    end = ops.shape_to_tensor(x.shape)[0]
    return ops.slice_tensor(product, [(slice(0, end), n_rows), ...])


REPLACED = [
    (max_moe, "grouped_matmul_ragged", grouped_matmul_anywhere),
    (max_linear, "linear", linear_anywhere),
    (max_stacked_linear, "linear", linear_anywhere),
]
"""Modules of MAX, names in them, and what stands there while a model is built."""
