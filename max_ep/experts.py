# SPDX-License-Identifier: Apache-2.0
"""The experts between dispatch and combine, where MAX has no kernels for them.

That is on CPU, and in bfloat16 on Hopper for ``grouped_matmul``, as MAX's does not
compile there, and for ``linear``, as MAX's writes behind its result
(docs/decisions/0016-matmuls-on-hopper.md and
docs/decisions/0016-matmuls-on-hopper.md). Elsewhere use MAX's.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import Graph, StaticDim, TensorType, TensorValue, ops

from .extension import load_ops

# As in mojo/max_ep_gpu_experts/tile.mojo; tests/test_experts.py compares.
GPU_COLUMNS = 16
"""On GPUs ``n`` of a weight is a multiple of it."""
GPU_K_STEP = 64
"""And ``k`` of this."""


def grouped_matmul(
    rows: TensorValue,
    weights: TensorValue,
    row_offsets: TensorValue,
    expert_ids: TensorValue,
) -> TensorValue:
    """Multiplies each expert's rows with that expert's weights.

    Args:
        rows: ``[n_rows, k]``, sorted by expert, as dispatch delivers them. On GPUs
            bfloat16, ``k`` a multiple of 64 and ``n`` of 16.
        weights: ``[n_local_experts, n, k]`` of the same dtype.
        row_offsets: ``[n_local_experts + 1]`` uint32, from dispatch.
        expert_ids: ``[n_local_experts]`` int32, from dispatch.

    Returns:
        ``[n_rows, n]``; rows behind ``row_offsets[-1]`` are undefined.

    Raises:
        TypeError: If the dtypes are not those.
        ValueError: If the inner sizes differ, or do not fit the kernel.
    """
    if not rows.device.is_cpu():
        _check_for_gpu("grouped_matmul", rows, weights)
    _check_inner(rows, weights)
    if row_offsets.dtype != DType.uint32 or expert_ids.dtype != DType.int32:
        raise TypeError(
            f"row_offsets ({row_offsets.dtype}) must be uint32 and expert_ids "
            f"({expert_ids.dtype}) int32, as dispatch gives them"
        )
    package, op = "max_ep_experts", "max_ep.grouped_matmul"
    if not rows.device.is_cpu():
        package, op = "max_ep_gpu_experts", "max_ep.gpu_grouped_matmul"
    load_ops(Graph.current, package)
    return ops.custom(
        op,
        rows.device,
        [rows, weights, row_offsets, expert_ids],
        [TensorType(rows.dtype, [rows.shape[0], weights.shape[1]], rows.device)],
    )[0].tensor


def _sizes(value: TensorValue) -> str:
    return ", ".join(map(str, value.shape))


def _check_inner(rows: TensorValue, weights: TensorValue) -> None:
    if rows.dtype != weights.dtype:
        raise TypeError(f"rows are {rows.dtype} and weights {weights.dtype}; cast one")
    if rows.shape[1] != weights.shape[-1]:
        raise ValueError(
            f"rows have {rows.shape[1]} columns, weights [{_sizes(weights)}] need "
            f"{weights.shape[-1]}"
        )


def fits_gpu(weight: TensorValue) -> bool:
    """Tells whether ``n`` and ``k`` of a weight ``[..., n, k]`` are what GPUs take."""
    n, k = weight.shape[-2:]
    if not (isinstance(n, StaticDim) and isinstance(k, StaticDim)):
        return False
    return int(n) % GPU_COLUMNS == 0 and int(k) % GPU_K_STEP == 0


def _check_for_gpu(op: str, rows: TensorValue, weights: TensorValue) -> None:
    if rows.dtype != DType.bfloat16:
        raise TypeError(
            f"rows are {rows.dtype}; on GPUs {op} takes bfloat16. For others "
            f"use MAX's {_OF_MAX[op]}"
        )
    if not fits_gpu(weights):
        raise ValueError(
            f"weights are [{_sizes(weights)}]; on GPUs {op} takes n, the "
            f"last but one of these, a multiple of {GPU_COLUMNS} and k, the last one, "
            f"of {GPU_K_STEP}"
        )


_OF_MAX = {"grouped_matmul": "grouped_matmul_ragged", "linear": "linear"}


def linear(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Multiplies rows with the transpose of one weight, ``x @ weight.T``.

    On CPU a grouped matmul with one group: ``ops.matmul`` runs faster, but takes longer
    to compile (docs/decisions/0006-cpu-ranks.md). On GPUs bfloat16 on Hopper,
    where MAX's own writes behind its result
    (docs/decisions/0016-matmuls-on-hopper.md).

    Args:
        x: ``[n_rows, k]``; on GPUs ``k`` is a multiple of 64.
        weight: ``[n, k]`` of the same dtype; on GPUs ``n`` is one of 16.

    Returns:
        ``[n_rows, n]``.

    Raises:
        TypeError: If the dtypes are not those.
        ValueError: If the sizes do not fit the kernel.
    """
    if not x.device.is_cpu():
        _check_for_gpu("linear", x, weight)
        _check_inner(x, weight)
        load_ops(Graph.current, "max_ep_gpu_experts")
        rows = TensorType(x.dtype, [x.shape[0], weight.shape[0]], x.device)
        return ops.custom("max_ep.gpu_linear", x.device, [x, weight], [rows])[0].tensor
    n_rows = ops.shape_to_tensor(x.shape)[0].cast(DType.uint32).reshape([1])
    return grouped_matmul(
        x,
        ops.unsqueeze(weight, 0),
        ops.concat([ops.constant([0], DType.uint32, x.device), n_rows]),
        ops.constant([0], DType.int32, x.device),
    )


def fused_silu(rows: TensorValue, row_offsets: TensorValue) -> TensorValue:
    """Computes ``silu(gate) * up`` of rows that hold gate, then up.

    Args:
        rows: ``[n_rows, 2 * moe_dim]``.
        row_offsets: ``[n_local_experts + 1]`` uint32, from dispatch.

    Returns:
        ``[n_rows, moe_dim]``; rows behind ``row_offsets[-1]`` are undefined.
    """
    load_ops(Graph.current, "max_ep_experts")
    return ops.custom(
        "max_ep.fused_silu",
        rows.device,
        [rows, row_offsets],
        [TensorType(rows.dtype, [rows.shape[0], rows.shape[1] // 2], rows.device)],
    )[0].tensor


def grouped_swiglu(
    rows: TensorValue,
    gate_up: TensorValue,
    down: TensorValue,
    row_offsets: TensorValue,
    expert_ids: TensorValue,
) -> TensorValue:
    """Runs SwiGLU experts: ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``.

    Args:
        rows: ``[n_rows, hidden_size]``, sorted by expert.
        gate_up: ``[n_local_experts, 2 * moe_dim, hidden_size]``: gate, then up.
        down: ``[n_local_experts, hidden_size, moe_dim]``.
        row_offsets: ``[n_local_experts + 1]`` uint32.
        expert_ids: ``[n_local_experts]`` int32.

    Returns:
        ``[n_rows, hidden_size]``.
    """
    both = grouped_matmul(rows, gate_up, row_offsets, expert_ids)
    activated = fused_silu(both, row_offsets)
    return grouped_matmul(activated, down, row_offsets, expert_ids)
