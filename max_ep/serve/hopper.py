# SPDX-License-Identifier: Apache-2.0
"""Replacements for ops of MAX 26.7 that are wrong on Hopper in bfloat16.

MAX's grouped matmul does not compile, and its matmul writes past its result
(docs/decisions/0016-matmuls-on-hopper.md). Its latent attention gets short prompts
wrong (docs/decisions/0017-serving.md). On the CPU it compiles a matmul for minutes
(docs/decisions/0006-cpu-ranks.md). Each function here takes MAX's arguments, and calls
MAX's function on other devices and for other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from max.driver import accelerator_architecture_name
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops
from max.nn.activation import GatedActivation
from max.nn.kernels import grouped_matmul_ragged, mla_prefill_decode_graph
from max.nn.kv_cache import PagedCacheValues
from max.nn.linear import Linear, linear
from max.nn.moe import MoE, forward_moe_sharded_layers
from max.nn.norm import RMSNorm
from max.nn.stacked_linear import StackedLinear

from ..experts import (
    GPU_COLUMNS,
    GPU_K_STEP,
    PACKAGE,
    gpu_takes,
    grouped_matmul,
    grouped_swiglu,
)
from ..experts import linear as our_linear
from ..extension import add_op
from ..graph.moe import through_experts

TILE_ROWS = 128
"""Rows are padded to a multiple of it: twice the 64 rows that were seen written."""

_SIMD = 8
"""Elements that MAX's kernels for Hopper load at once: its matmul does not compile for
another multiple of columns, nor its activation of experts."""

NORM_COLUMNS = 8
"""Columns of our norm are a multiple of it: ``LANE`` of product.mojo."""

_PREFILLED_TOKENS = 9
"""A longest prompt for which MAX's latent attention prefills: one more than the
``MLA_DECODE_MAX_SEQ_LEN`` of its kernels."""


def is_hopper() -> bool:
    return accelerator_architecture_name().startswith("sm_90")


def _is_bfloat16_on_hopper(value: TensorValue) -> bool:
    is_bf16 = value.dtype == DType.bfloat16
    return is_bf16 and not value.device.is_cpu() and is_hopper()


def grouped_matmul_anywhere(
    hidden_states: TensorValue,
    weight: TensorValue,
    expert_start_indices: TensorValue,
    expert_ids: TensorValue,
    expert_usage_stats: TensorValue,
) -> TensorValue:
    """Replaces ``grouped_matmul_ragged``: ours, where MAX's does not compile."""
    if _is_bfloat16_on_hopper(weight):
        groups = expert_start_indices, expert_ids
        return grouped_matmul_of_any_size(hidden_states, weight, *groups)
    return grouped_matmul_ragged(
        hidden_states, weight, expert_start_indices, expert_ids, expert_usage_stats
    )


def grouped_matmul_of_any_size(
    rows: TensorValue, weights: TensorValue, *groups: TensorValue
) -> TensorValue:
    """Returns ``grouped_matmul``. Zeros fill up sizes that its GPU kernels do not take,
    which only tiny models have: they are copied each time."""
    n, k = weights.shape[-2:]
    if rows.device.is_cpu() or gpu_takes(n, k):
        return grouped_matmul(rows, weights, *groups)
    return product_of_whole_sizes(rows, weights, *groups)


def product_of_whole_sizes(
    rows: TensorValue, weights: TensorValue, *groups: TensorValue
) -> TensorValue:
    """Returns ``grouped_matmul`` by one of sizes that the GPU kernels take."""
    filled = _filled(_filled(weights, 1, GPU_COLUMNS), 2, GPU_K_STEP)
    product = grouped_matmul(_filled(rows, 1, GPU_K_STEP), filled, *groups)
    return product[:, : int(weights.shape[1])]


def swiglu_of_whole_sizes(
    rows: TensorValue, gate_up: TensorValue, down: TensorValue, *groups: TensorValue
) -> TensorValue:
    """Returns ``grouped_swiglu`` by one of sizes that the GPU kernels take; zeros fill
    up gate and up, each."""
    hidden, dim = rows.shape[1], int(gate_up.shape[1]) // 2
    halves = gate_up[:, :dim], gate_up[:, dim:]
    both = ops.concat([_filled(half, 1, GPU_K_STEP) for half in halves], axis=1)
    whole = [
        _filled(rows, 1, GPU_K_STEP),
        _filled(both, 2, GPU_K_STEP),
        _filled(_filled(down, 1, GPU_K_STEP), 2, GPU_K_STEP),
    ]
    return grouped_swiglu(*whole, *groups)[:, : int(hidden)]


def _filled(x: TensorValue, axis: int, multiple: int) -> TensorValue:
    """Returns ``x`` with zeros behind it, up to a multiple."""
    shape: list[Any] = list(x.shape)
    shape[axis] = -int(shape[axis]) % multiple
    if shape[axis] == 0:
        return x
    zeros = ops.broadcast_to(ops.constant(0, x.dtype, x.device), shape)
    return ops.concat([x, zeros], axis=axis)


def experts_anywhere(
    layer: MoE,
    dispatched: tuple[TensorValue, ...],
    x: TensorValue,
    n_rows: TensorValue,
) -> TensorValue:
    """Runs a layer's experts on dispatched rows: in FP8, SwiGLU in two matmuls of ours,
    others as MAX runs them, which takes about how many rows there are."""
    if dispatched[0].dtype == DType.float8_e4m3fn:
        return fp8_experts(layer, *dispatched)
    if _is_swiglu(layer) and _is_bfloat16_on_hopper(dispatched[0]):
        gate_up, down = layer.gate_up_proj, layer.down_proj
        rows, row_offsets, expert_ids, *_ = dispatched
        given = rows, gate_up, down, row_offsets, expert_ids
        if gpu_takes(*gate_up.shape[-2:]) and gpu_takes(*down.shape[-2:]):
            return grouped_swiglu(*given)
        if layer.moe_dim % _SIMD:  # MAX's op behind the product does not compile
            return swiglu_of_whole_sizes(*given)
    return layer._local_ep_compute(dispatched, x, n_rows)


def fp8_experts(
    layer: MoE, rows: TensorValue, row_scales: TensorValue, *groups: TensorValue
) -> TensorValue:
    """Runs a layer's experts in blockwise FP8 on rows in it."""
    experts = list(layer.experts)
    manager = layer._ep_batch_manager
    if manager is not None and manager.config.fused_shared_expert:
        experts.insert(0, layer.shared_experts)

    def scales(*names: str) -> TensorValue:
        """Stacks those of all experts' matrices of these names."""
        each = [getattr(e, name).weight_scale for e in experts for name in names]
        stacked = ops.stack([TensorValue(x) for x in each])
        columns = each[0].shape[1]
        return stacked.reshape((len(experts), -1, columns)).to(rows.device)

    gate_up = layer.gate_up_proj, scales("gate_proj", "up_proj")
    down = layer.down_proj, scales("down_proj")
    return grouped_swiglu((rows, row_scales), gate_up, down, *groups[:2])


def _is_swiglu(layer: MoE) -> bool:
    """Whether its experts have plain SwiGLU and no quantized weights."""
    return (
        type(layer)._local_ep_compute is MoE._local_ep_compute
        and layer.activation == GatedActivation()
        and not layer.interleaved_gate_up
    )


def linear_of_whole_sizes(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Returns ``x @ weight.T`` by a product of sizes that our GPU kernel takes; only
    tiny models need it."""
    filled = _filled(_filled(weight, 0, GPU_COLUMNS), 1, GPU_K_STEP)
    product = our_linear(_filled(x, 1, GPU_K_STEP), filled)
    return product[:, : int(weight.shape[0])]


def linear_anywhere(
    x: TensorValue, weight: TensorValue, *quantization: Any, **more: Any
) -> TensorValue:
    """Replaces ``linear``: ours on the CPU in float32, and on Hopper in bfloat16."""
    is_quantized = any(value is not None for value in (*quantization, *more.values()))
    is_plain = not is_quantized and x.rank == 2 and x.dtype == weight.dtype
    is_float32_on_cpu = x.dtype == DType.float32 and x.device.is_cpu()
    is_on_hopper = _is_bfloat16_on_hopper(x) and gpu_takes(*weight.shape[-2:])
    if is_plain and (is_float32_on_cpu or is_on_hopper):
        return our_linear(x, weight)
    if is_plain and _is_bfloat16_on_hopper(x) and int(weight.shape[1]) % _SIMD:
        return linear_of_whole_sizes(x, weight)
    return linear(x, weight, *quantization, **more)


def product_anywhere(x: TensorValue, other: Any) -> TensorValue:
    """Replaces ``x @ other``: on whole tiles, where MAX writes past its result."""
    are_matrices = x.rank == 2 and getattr(other, "rank", None) == 2
    if are_matrices and _is_bfloat16_on_hopper(x):
        return product_of_whole_tiles(x, other)
    return ops.matmul(x, other)


def product_of_whole_tiles(x: TensorValue, other: TensorValue) -> TensorValue:
    """Returns ``x @ other``, with rows padded to a multiple of ``TILE_ROWS``."""
    n_rows, k = x.shape
    n_more = (n_rows + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS - n_rows
    zeros = ops.broadcast_to(ops.constant(0, x.dtype, x.device), [n_more, k])
    product = ops.matmul(ops.concat([x, zeros]), other)
    end = ops.shape_to_tensor(x.shape)[0]
    return ops.slice_tensor(product, [(slice(0, end), n_rows), ...])


def add_norm_anywhere(
    norm: RMSNorm, x: TensorValue, more: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Returns ``x + more`` and its norm, ``[n_tokens, dim]`` each: on Hopper by an op
    of ours, so that the next product gets its weights meanwhile."""
    if not _has_our_norm(norm, x, more):
        total = x + more
        return total, norm(total)
    weight, epsilon = _of_norm(norm, x)
    values, results = [x, more, weight, epsilon], [x.type, x.type]
    how = dict(n_columns=norm.dim)
    return tuple(add_op("add_norm", x.device, values, results, PACKAGE, **how))


def add_norm_linear_anywhere(
    norm: RMSNorm, x: TensorValue, more: TensorValue, layer: Linear | StackedLinear
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Returns ``x + more``, its norm, and ``layer`` of that: on Hopper by our op,
    which loads constant weights before the kernel before it has ended."""
    weight = _constant_weight(layer, x) if _has_our_norm(norm, x, more) else None
    if weight is None:
        total, normed = add_norm_anywhere(norm, x, more)
        return total, normed, layer(normed)
    of_norm, epsilon = _of_norm(norm, x)
    product = TensorType(x.dtype, [x.shape[0], weight.shape[0]], x.device)
    values, results = [x, more, of_norm, weight, epsilon], [x.type, x.type, product]
    how = dict(n_columns=norm.dim)
    return tuple(add_op("add_norm_linear", x.device, values, results, PACKAGE, **how))


def _has_our_norm(norm: RMSNorm, x: TensorValue, more: TensorValue) -> bool:
    is_ours = _is_bfloat16_on_hopper(x) and more.dtype == x.dtype
    is_plain = norm.dim % NORM_COLUMNS == 0 == norm.weight_offset
    return is_ours and is_plain and not norm.multiply_before_cast


def _constant_weight(
    layer: Linear | StackedLinear, x: TensorValue
) -> TensorValue | None:
    """Returns its weight, if a product with it is all that the layer is, and our GPU
    kernels take it."""
    is_stacked = isinstance(layer, StackedLinear)
    if layer._has_bias if is_stacked else layer.bias is not None:
        return None
    weight = TensorValue(layer.stacked_weight if is_stacked else layer.weight)
    fits = weight.dtype == x.dtype and weight.device == x.device
    return weight if fits and gpu_takes(*weight.shape) else None


def _of_norm(norm: RMSNorm, x: TensorValue) -> tuple[TensorValue, TensorValue]:
    """Returns its weight and epsilon, as our ops take them."""
    epsilon = ops.constant([norm.eps], DType.float32, DeviceRef.CPU())
    return norm.weight.cast(x.dtype).to(x.device), epsilon


def latent_attention_anywhere(
    *args: Any, kv_collection: PagedCacheValues, **more: Any
) -> TensorValue:
    """Replaces ``mla_prefill_decode_graph``: MAX's decode kernel is wrong for prompts
    of 2 to 8 tokens. A length of 9 selects the prefill kernel and only bounds work."""
    if _is_bfloat16_on_hopper(more["q"]):
        longest, cpu = kv_collection.max_prompt_length, DeviceRef.CPU()
        one = ops.constant(1, longest.dtype, cpu)
        enough = ops.constant(_PREFILLED_TOKENS, longest.dtype, cpu)
        bound = ops.where(longest > one, ops.max(longest, enough), longest)
        kv_collection = replace(kv_collection, max_prompt_length=bound)
    return mla_prefill_decode_graph(*args, kv_collection=kv_collection, **more)


class PlacedMoE(MoE):
    """MAX's MoE layer, with a place for each replica if experts are balanced, and with
    experts in FP8 if they stay in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        manager = kwargs.get("ep_batch_manager")
        group = None if manager is None else manager.config
        if group is not None and group.eplb_enabled:
            kwargs["num_experts"] = group.n_experts
            kwargs["num_logical_experts"] = group.num_logical_experts
        if group is not None and group.is_quantized:
            # A shared expert that goes through dispatch is one of the others.
            is_one = group.fused_shared_expert
            of_shared = group.dispatch_dtype if is_one else kwargs["dtype"]
            kwargs["shared_experts_dtype"] = of_shared
            kwargs["dtype"] = group.dispatch_dtype
            kwargs["quant_config"] = group.dispatch_quant_config
        super().__init__(*args, **kwargs)


def forward_layers(
    shards: Sequence[Any], xs: list[TensorValue], *eplb: Any
) -> list[TensorValue]:
    """Replaces MAX's ``forward_moe_sharded_layers``; the result on each device.

    Layers without experts are left to MAX. ``eplb`` is for its load balancing.
    """
    if getattr(shards[0], "_ep_batch_manager", None) is None:
        return forward_moe_sharded_layers(shards, xs, *eplb)
    manager = shards[0].ep_batch_manager
    ids, weights = zip(*(shard.gate(x) for shard, x in zip(shards, xs)))
    n_tokens = sum(ops.shape_to_tensor(x.shape)[0] for x in xs)
    n_rows = n_tokens * shards[0].num_experts_per_token // len(shards)
    about_n_rows = n_rows.cast(DType.uint32)

    def experts(rank: int, dispatched: tuple[TensorValue, ...]) -> TensorValue:
        return experts_anywhere(shards[rank], dispatched, xs[rank], about_n_rows)

    layer = getattr(shards[0], "layer_idx", None)
    layer = 0 if layer is None else layer
    results = through_experts(manager, xs, ids, weights, experts, layer)
    if shards[0].has_shared_experts and not manager.config.fused_shared_expert:
        shared = [shard.shared_experts(x) for shard, x in zip(shards, xs)]
        results = [result + more for result, more in zip(results, shared)]
    return [result.cast(x.dtype) for result, x in zip(results, xs)]
