# SPDX-License-Identifier: Apache-2.0
"""Matmuls of experts and layers: on the CPU in float32 and bfloat16, on NVIDIA GPUs in
bfloat16, on Hopper also in blockwise FP8.

Rows and weights in FP8 are pairs of values and scales. What has no kernel here is
refused when the graph is built. MAX's ``grouped_matmul_ragged`` has none for the CPU
and, in bfloat16, for Hopper (docs/upstream.md).
"""

from __future__ import annotations

from max.driver import accelerator_api, accelerator_architecture_name
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue, ops

from .extension import add_op
from .limits import FP8_BLOCK, FP8_COLUMNS, fp8_takes
from .plural import counted

Quantized = tuple[TensorValue, TensorValue]
"""Values in float8_e4m3fn and their float32 scales."""

PACKAGE = "max_ep_experts"
"""The Mojo package with the ops."""

# As in mojo/max_ep_experts/tile.mojo; tests/experts/test_experts.py compares.
GPU_COLUMNS = 16
"""On GPUs ``n`` of a weight is a multiple of it."""
GPU_K_STEP = 64
"""On GPUs ``k`` of a weight is a multiple of it."""
GATHER_COLUMNS = FP8_COLUMNS
"""Where rows are gathered, ``n`` of a weight is a multiple of it."""
GATHER_EXPERTS = 2048
"""Most experts there."""


def grouped_matmul(
    rows: TensorValue | Quantized,
    weights: TensorValue | Quantized,
    row_offsets: TensorValue,
    expert_ids: TensorValue,
) -> TensorValue:
    """Multiplies each expert's rows with that expert's weights.

    Args:
        rows: ``[n_rows, k]``, sorted by expert, as dispatch delivers them. On the CPU
            bfloat16 or float32. On NVIDIA GPUs bfloat16, ``k`` a multiple of 64 and
            ``n`` of 16. On Hopper also FP8, ``k`` a multiple of 128 and ``n`` of 256,
            with scales ``[k / 128, n_rows]``, as ``blockwise_fp8_quant_config()`` and
            ``scale_layout="transposed"`` give.
        weights: ``[n_local_experts, n, k]`` of the same dtype; scales
            ``[n_local_experts, n / 128, k / 128]``. A rank that holds fewer experts may
            have as many weights as it holds.
        row_offsets: ``[n_local_experts + 1]`` uint32, from dispatch.
        expert_ids: ``[n_local_experts]`` int32, from dispatch.

    Returns:
        ``[n_rows, n]``, of FP8 in bfloat16; rows from ``row_offsets[-1]`` on are
        undefined.

    Raises:
        TypeError: If the dtypes are not those.
        ValueError: If the inner sizes differ, or do not fit the kernel, or there is no
            kernel for the GPU.
    """
    groups = row_offsets, expert_ids
    if isinstance(rows, tuple):
        values, weight = rows[0], weights[0]
        shape = [values.shape[0], weight.shape[1]]
        result = TensorType(DType.bfloat16, shape, values.device)
        return _fp8("grouped_matmul_fp8", (*rows, *weights, *groups), [result])[0]
    _check("grouped_matmul", rows, weights)
    _check_groups(*groups)
    return _rows_of("grouped_matmul", weights.shape[1], rows, weights, *groups)


def linear(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Multiplies rows with the transpose of one weight, ``x @ weight.T``.

    On the CPU this is a grouped matmul with one group: ``ops.matmul`` runs faster, but
    takes longer to compile (docs/decisions/0006-cpu-ranks.md).

    ``x`` is ``[n_rows, k]``, ``weight`` ``[n, k]`` of the same dtype; on GPUs they are
    as in :func:`grouped_matmul`. Returns ``[n_rows, n]``.
    """
    _check("linear", x, weight)
    if not x.device.is_cpu():
        return _rows_of("gpu_linear", weight.shape[0], x, weight)
    n_rows = ops.shape_to_tensor(x.shape)[0].cast(DType.uint32).reshape([1])
    return grouped_matmul(
        x,
        ops.unsqueeze(weight, 0),
        ops.concat([ops.constant([0], DType.uint32, x.device), n_rows]),
        ops.constant([0], DType.int32, x.device),
    )


def grouped_gate_up(
    rows: TensorValue | Quantized,
    gate_up: TensorValue | Quantized,
    row_offsets: TensorValue,
    expert_ids: TensorValue,
    token_of_row: TensorValue | None = None,
) -> TensorValue | Quantized:
    """Computes ``silu(x @ gate.T) * (x @ up.T)``, on GPUs in one op.

    The arguments are those of :func:`grouped_swiglu`. With ``token_of_row``, int32
    ``[n_rows]``, as :func:`sort_choices` gives it, ``rows`` are tokens, ``[n_tokens,
    hidden_size]``, and ``token_of_row[r]`` is row ``r``; on GPUs where
    :func:`gather_takes` says so. Returns ``[n_rows, moe_dim]``, of FP8 quantized as
    dispatched rows are; rows from ``row_offsets[-1]`` on are undefined.

    Raises:
        TypeError: If the dtypes are not those.
        ValueError: If the sizes do not fit, or rows in FP8 were to be gathered.
    """
    groups = row_offsets, expert_ids
    if isinstance(rows, tuple):
        if token_of_row is not None:
            raise ValueError("grouped_gate_up gathers no rows in FP8; dispatch them")
        values, moe_dim = rows[0], gate_up[0].shape[1] // 2
        n_rows, device = values.shape[0], values.device
        results = [
            TensorType(values.dtype, [n_rows, moe_dim], device),
            TensorType(DType.float32, [moe_dim // FP8_BLOCK, n_rows], device),
        ]
        made = _fp8("grouped_gate_up_fp8", (*rows, *gate_up, *groups), results)
        return made[0], made[1]
    if rows.device.is_cpu():
        if token_of_row is not None:
            rows = ops.gather(rows, token_of_row, axis=0)
        both = grouped_matmul(rows, gate_up, *groups)
        return _rows_of("fused_silu", gate_up.shape[1] // 2, both, row_offsets)
    _check("grouped_gate_up", rows, gate_up)
    _check_groups(*groups)
    moe_dim = gate_up.shape[1] // 2
    if token_of_row is None:
        return _rows_of("grouped_gate_up", moe_dim, rows, gate_up, *groups)
    if token_of_row.dtype != DType.int32:
        raise TypeError(f"token_of_row is {token_of_row.dtype}; it must be int32")
    _check_gathers(gate_up)
    result = TensorType(rows.dtype, [token_of_row.shape[0], moe_dim], rows.device)
    values = [rows, gate_up, *groups, token_of_row]
    return _op("grouped_gate_up_gathered", values, [result])[0]


def grouped_swiglu(
    rows: TensorValue | Quantized,
    gate_up: TensorValue | Quantized,
    down: TensorValue | Quantized,
    row_offsets: TensorValue,
    expert_ids: TensorValue,
) -> TensorValue:
    """Runs SwiGLU experts: ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``.

    The arguments are those of :func:`grouped_matmul`, with ``gate_up``
    ``[n_local_experts, 2 * moe_dim, hidden_size]``, gate first, and ``down``
    ``[n_local_experts, hidden_size, moe_dim]``. Returns ``[n_rows, hidden_size]``.
    """
    groups = row_offsets, expert_ids
    return grouped_matmul(grouped_gate_up(rows, gate_up, *groups), down, *groups)


def sort_choices(
    topk_ids: TensorValue, n_experts: int
) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue]:
    """Sorts a router's choices by expert; those of one expert keep their order.

    It stands in for dispatch if all experts are on one device: rows are not copied.
    Returns ``row_offsets`` and ``expert_ids``, as from dispatch; the token of each row,
    int32 ``[n_tokens * top_k]``; and the row of each choice, int32 ``[n_tokens,
    top_k]``. A choice of no expert is dropped: its row is -1, its token behind all.
    """
    if topk_ids.dtype != DType.int32:
        raise TypeError(
            f"topk_ids are {topk_ids.dtype}; sort_choices takes int32: cast"
        )
    n_tokens, top_k = topk_ids.shape
    device = topk_ids.device
    results = [
        TensorType(DType.uint32, [n_experts + 1], device),
        TensorType(DType.int32, [n_experts], device),
        TensorType(DType.int32, [n_tokens * top_k], device),
        TensorType(DType.int32, [n_tokens, top_k], device),
    ]
    return tuple(_op("sort_choices", [topk_ids], results))


def add_rows(
    rows: TensorValue, row_of_choice: TensorValue, weights: TensorValue
) -> TensorValue:
    """Adds up the weighted rows of each token, in float32, in order of its choices.

    ``rows`` are ``[n_rows, hidden_size]``, of whole 16 bytes each; ``row_of_choice`` is
    from :func:`sort_choices`, ``weights`` are the router's,
    float32 ``[n_tokens, top_k]``. Returns ``[n_tokens, hidden_size]``.
    """
    if row_of_choice.dtype != DType.int32 or weights.dtype != DType.float32:
        raise TypeError(
            f"row_of_choice ({row_of_choice.dtype}) must be int32 and weights "
            f"({weights.dtype}) float32"
        )
    hidden_size, top_k = rows.shape[1], int(row_of_choice.shape[1])
    if int(hidden_size) * rows.dtype.size_in_bytes % 16 or weights.shape[1] != top_k:
        raise ValueError(
            f"rows have {counted(hidden_size, 'element')} of {rows.dtype}, and weights "
            f"{counted(weights.shape[1], 'column')}; add_rows takes rows in multiples "
            f"of 16 bytes and a weight for each of {counted(top_k, 'choice')}"
        )
    result = TensorType(rows.dtype, [weights.shape[0], hidden_size], rows.device)
    return _op("add_rows", [rows, row_of_choice, weights], [result], top_k=top_k)[0]


def routed_swiglu(
    x: TensorValue,
    topk_ids: TensorValue,
    weights: TensorValue,
    gate_up: TensorValue,
    down: TensorValue,
) -> TensorValue:
    """Runs a routed layer of SwiGLU experts that are all on one device; on GPUs where
    :func:`gather_takes` says so. ``x`` is ``[n_tokens, hidden_size]``, and so is the
    result; weights are those of :func:`grouped_swiglu`. On GPUs it is one op, in which
    up to four tokens go straight to their experts."""
    if not x.device.is_cpu():
        return _routed_on_gpu(x, topk_ids, weights, gate_up, down)
    *groups, token_of_row, row_of_choice = sort_choices(topk_ids, int(down.shape[0]))
    activated = grouped_gate_up(x, gate_up, *groups, token_of_row)
    return add_rows(grouped_matmul(activated, down, *groups), row_of_choice, weights)


def _routed_on_gpu(
    x: TensorValue,
    topk_ids: TensorValue,
    weights: TensorValue,
    gate_up: TensorValue,
    down: TensorValue,
) -> TensorValue:
    if topk_ids.dtype != DType.int32 or weights.dtype != DType.float32:
        raise TypeError(
            f"topk_ids ({topk_ids.dtype}) must be int32 and weights ({weights.dtype}) "
            "float32"
        )
    _check("routed_swiglu", x, gate_up)
    _check_gathers(gate_up)
    (n_tokens, hidden_size), top_k = x.shape, int(topk_ids.shape[1])
    n_experts, moe_dim = int(gate_up.shape[0]), int(gate_up.shape[1]) // 2
    wanted = [n_experts, hidden_size, moe_dim]
    if list(down.shape) != wanted or down.dtype != x.dtype or moe_dim % GPU_K_STEP:
        raise ValueError(
            f"down is {list(down.shape)} of {down.dtype}; it must be {wanted} of "
            f"{x.dtype}, the last a multiple of {GPU_K_STEP}"
        )
    n_rows, device = n_tokens * top_k, x.device
    results = [
        TensorType(x.dtype, [n_tokens, hidden_size], device),
        TensorType(x.dtype, [n_rows, moe_dim], device),
        TensorType(x.dtype, [n_rows, hidden_size], device),
        TensorType(DType.uint32, [n_experts + 1], device),
        TensorType(DType.int32, [n_experts], device),
        TensorType(DType.int32, [n_rows], device),
        TensorType(DType.int32, [n_tokens, top_k], device),
    ]
    values = [x, topk_ids, weights, gate_up, down]
    return _op("routed_swiglu", values, results, top_k=top_k)[0]


def _fp8(
    op: str, inputs: tuple[TensorValue, ...], results: list[TensorType]
) -> list[TensorValue]:
    """Adds an op of blockwise FP8; refuses what it cannot multiply."""
    rows, row_scales, weights, weight_scales, row_offsets, expert_ids = inputs
    _check_groups(row_offsets, expert_ids)
    if rows.device.is_cpu():
        raise ValueError(
            f"{op} has no kernel for the CPU; dequantize the rows (max_ep.dequantize) "
            "and pass them with weights in float32"
        )
    _check_gpu(op, rows.device, is_for_hopper=True)
    for value in (rows, weights):
        if value.dtype != DType.float8_e4m3fn:
            raise TypeError(f"{op} takes float8_e4m3fn; given {value.dtype}")
    for scales in (row_scales, weight_scales):
        if scales.dtype != DType.float32:
            raise TypeError(f"{op} takes scales in float32; given {scales.dtype}")
    n_experts, n, k = map(int, weights.shape)
    blocks = [n_experts, n // FP8_BLOCK, k // FP8_BLOCK]
    if not fp8_takes(n, k) or rows.shape[1] != k or list(weight_scales.shape) != blocks:
        raise ValueError(
            f"{op} takes rows of k elements, weights [n_experts, n, k] and scales "
            f"[n_experts, n / {FP8_BLOCK}, k / {FP8_BLOCK}], n a multiple of "
            f"{FP8_COLUMNS} and k of {FP8_BLOCK}; given "
            f"{rows.shape[1]}, {[n_experts, n, k]} and "
            f"{[int(size) for size in weight_scales.shape]}"
        )
    return _op(op, list(inputs), results)


def gpu_takes(n: int | Dim, k: int | Dim) -> bool:
    """Returns whether the GPU kernels support weights of ``n`` rows, ``k`` columns."""
    are_known = all(isinstance(size, int | StaticDim) for size in (n, k))
    return are_known and int(n) % GPU_COLUMNS == int(k) % GPU_K_STEP == 0


def gather_takes(n_experts: int, n: int, k: int) -> bool:
    """Returns whether a product on Hopper can gather its rows, for such weights."""
    return (
        n_experts <= GATHER_EXPERTS and n % GATHER_COLUMNS == 0 and k % GPU_K_STEP == 0
    )


def _rows_of(
    op: str, n_columns: Dim, rows: TensorValue, *more: TensorValue
) -> TensorValue:
    result = TensorType(rows.dtype, [rows.shape[0], n_columns], rows.device)
    return _op(op, [rows, *more], [result])[0]


def _op(
    name: str, values: list[TensorValue], results: list[TensorType], **parameters: int
) -> list[TensorValue]:
    return add_op(name, values[0].device, values, results, PACKAGE, **parameters)


def _check_groups(row_offsets: TensorValue, expert_ids: TensorValue) -> None:
    if row_offsets.dtype != DType.uint32 or expert_ids.dtype != DType.int32:
        raise TypeError(
            f"row_offsets ({row_offsets.dtype}) must be uint32 and expert_ids "
            f"({expert_ids.dtype}) int32, as dispatch gives them"
        )
    n_offsets, n_groups = row_offsets.shape[0], expert_ids.shape[0]
    are_known = isinstance(n_offsets, StaticDim) and isinstance(n_groups, StaticDim)
    if are_known and int(n_offsets) != int(n_groups) + 1:
        raise ValueError(
            f"row_offsets have {counted(n_offsets, 'element')} and expert_ids "
            f"{n_groups}; pass one offset more than experts, as dispatch gives them"
        )


def _check_gpu(op: str, device: DeviceRef, is_for_hopper: bool = False) -> None:
    """Refuses a GPU for which there is no kernel; a graph may be built without one."""
    if (api := accelerator_api()) == "cpu":
        return
    arch = accelerator_architecture_name()
    if api != "cuda" or (is_for_hopper and not arch.startswith("sm_90")):
        kinds = "Hopper (sm_90)" if is_for_hopper else "NVIDIA GPUs"
        raise ValueError(
            f"{op} on {device} of {arch}: it has kernels for {kinds} only; use MAX's "
            "grouped_matmul_ragged or linear there"
        )


def _check_gathers(gate_up: TensorValue) -> None:
    """Refuses weights whose product cannot gather its rows."""
    _check_gpu("a product that gathers its rows", gate_up.device, is_for_hopper=True)
    if not gather_takes(*map(int, gate_up.shape)):
        raise ValueError(
            f"gate_up is {[int(size) for size in gate_up.shape]}; rows are gathered "
            f"for up to {GATHER_EXPERTS} experts, n in multiples of {GATHER_COLUMNS} "
            f"and k of {GPU_K_STEP}"
        )


def _check(op: str, rows: TensorValue, weights: TensorValue) -> None:
    sizes = ", ".join(map(str, weights.shape))
    if rows.device.is_cpu():
        if rows.dtype not in (DType.bfloat16, DType.float32):
            raise TypeError(
                f"rows are {rows.dtype}; on the CPU {op} takes bfloat16 and float32. "
                "Pass quantized rows through max_ep.dequantize first"
            )
    else:
        _check_gpu(op, rows.device)
        if rows.dtype != DType.bfloat16:
            of_max = "linear" if op == "linear" else "grouped_matmul_ragged"
            raise TypeError(
                f"rows are {rows.dtype}; on GPUs {op} takes bfloat16. For others use "
                f"MAX's {of_max}"
            )
        if not gpu_takes(*weights.shape[-2:]):
            raise ValueError(
                f"weights are [{sizes}]; on GPUs {op} takes n, the last but one, "
                f"in multiples of {GPU_COLUMNS}, and k, the last, of {GPU_K_STEP}"
            )
    if rows.dtype != weights.dtype:
        raise TypeError(f"rows are {rows.dtype} and weights {weights.dtype}; cast one")
    has, needs = rows.shape[1], weights.shape[-1]
    if has != needs:
        raise ValueError(
            f"rows have {counted(has, 'column')}, weights [{sizes}] need {needs}"
        )
