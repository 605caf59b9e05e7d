# SPDX-License-Identifier: Apache-2.0
"""The experts between dispatch and combine, where MAX has no kernels for them.

That is on CPU, and for ``grouped_matmul`` in bfloat16 on Hopper
(docs/decisions/0016-grouped-matmul-on-hopper.md). Elsewhere use MAX's
``grouped_matmul_ragged``.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import Graph, TensorType, TensorValue, ops

from .extension import load_ops

# As in mojo/max_ep_experts/gpu_matmul.mojo; tests/test_experts.py compares.
GPU_COLUMNS = 16
"""On GPUs ``n`` of a grouped matmul is a multiple of it."""
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
        _check_for_gpu(rows, weights)
    if rows.dtype != weights.dtype:
        raise TypeError(f"rows are {rows.dtype} and weights {weights.dtype}; cast one")
    if row_offsets.dtype != DType.uint32 or expert_ids.dtype != DType.int32:
        raise TypeError(
            f"row_offsets ({row_offsets.dtype}) must be uint32 and expert_ids "
            f"({expert_ids.dtype}) int32, as dispatch gives them"
        )
    if rows.shape[1] != weights.shape[2]:
        raise ValueError(
            f"rows have {rows.shape[1]} columns, weights [{weights.shape[0]}, "
            f"{weights.shape[1]}, {weights.shape[2]}] need {weights.shape[2]}"
        )
    load_ops(Graph.current, "max_ep_experts")
    return ops.custom(
        "max_ep.grouped_matmul",
        rows.device,
        [rows, weights, row_offsets, expert_ids],
        [TensorType(rows.dtype, [rows.shape[0], weights.shape[1]], rows.device)],
    )[0].tensor


def _check_for_gpu(rows: TensorValue, weights: TensorValue) -> None:
    if rows.dtype != DType.bfloat16:
        raise TypeError(
            f"rows are {rows.dtype}; on GPUs grouped_matmul takes bfloat16. For others "
            "use MAX's grouped_matmul_ragged"
        )
    n, k = (int(dim) for dim in weights.shape[1:])
    if n % GPU_COLUMNS or k % GPU_K_STEP:
        raise ValueError(
            f"weights are [{weights.shape[0]}, {n}, {k}]; on GPUs grouped_matmul takes "
            f"[n_local_experts, n, k] with n a multiple of {GPU_COLUMNS} and k of "
            f"{GPU_K_STEP}"
        )


def linear(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Multiplies rows with the transpose of one weight, ``x @ weight.T``.

    A grouped matmul with one group. ``ops.matmul`` does the same and runs
    faster, but takes longer to compile (docs/decisions/0006-experts-on-cpu.md).

    Args:
        x: ``[n_rows, k]``.
        weight: ``[n, k]`` of the same dtype.

    Returns:
        ``[n_rows, n]``.
    """
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
