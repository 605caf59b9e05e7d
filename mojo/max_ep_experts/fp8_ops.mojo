# SPDX-License-Identifier: Apache-2.0
"""The MAX ops of experts in blockwise FP8, on Hopper."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from .fp8 import BLOCK, FP8, ScaledProduct
from .hopper import fits, launch_on_hopper
from .launch import is_hopper
from .product import GroupedProduct
from .ring import MAX_GROUPS
from .tiles import BN


def _launch[
    swiglu: Bool
](
    y: Int,
    y_scales: Int,
    x: InputTensor[dtype=FP8, rank=2, ...],
    x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
    weights: InputTensor[dtype=FP8, rank=3, ...],
    weight_scales: InputTensor[dtype=DType.float32, rank=3, ...],
    row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
    context: DeviceContext,
) raises:
    """Launches a product; `y` and `y_scales` are addresses."""
    var n, k = weights.dim_size(1), weights.dim_size(2)
    if (
        x_scales.dim_size(0) * BLOCK != k
        or x_scales.dim_size(1) != x.dim_size(0)
        or weight_scales.dim_size(1) * BLOCK != n
        or weight_scales.dim_size(2) * BLOCK != k
    ):
        raise Error(
            t"max_ep: rows [{x.dim_size(0)}, {k}] and weights of n={n} need scales"
            t" [{k // BLOCK}, {x.dim_size(0)}] and [n_experts, {n // BLOCK},"
            t" {k // BLOCK}]; given [{x_scales.dim_size(0)}, {x_scales.dim_size(1)}]"
            t" and [n_experts, {weight_scales.dim_size(1)},"
            t" {weight_scales.dim_size(2)}]"
        )
    var product = GroupedProduct[DType.bfloat16](
        y={unsafe_from_address = y},
        x={unsafe_from_address = Int(x.unsafe_ptr())},
        weights={unsafe_from_address = Int(weights.unsafe_ptr())},
        row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
        expert_ids={unsafe_from_address = Int(expert_ids.unsafe_ptr())},
        one_group=0,
        n_groups=row_offsets.dim_size(0) - 1,
        n_rows=x.dim_size(0),
        n_experts=weights.dim_size(0),
        n=n,
        k=k // 2,
    )
    if not fits(product):
        raise Error(
            t"max_ep: FP8 matmuls of experts take n in multiples of {BN} and k of"
            t" {BLOCK}, up to {MAX_GROUPS} experts; given n={n}, k={k} and"
            t" {product.n_groups} experts"
        )
    comptime if is_hopper():
        var scaled = ScaledProduct[swiglu](
            product,
            {unsafe_from_address = Int(x_scales.unsafe_ptr())},
            {unsafe_from_address = Int(weight_scales.unsafe_ptr())},
            {unsafe_from_address = y_scales},
        )
        launch_on_hopper(scaled, context, context.stream())
    else:
        raise Error("max_ep: FP8 matmuls of experts are for Hopper")


@extensibility.register("max_ep.grouped_matmul_fp8")
struct GroupedMatmulFp8:
    """Multiplies each expert's rows with the transpose of its weight.

    As `grouped_matmul`, with a scale for each 128 elements of a row, `[k / 128,
    n_rows]`, and for each 128 x 128 of a weight, `[n_experts, n / 128, k / 128]`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=FP8, rank=2, ...],
        x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
        weights: InputTensor[dtype=FP8, rank=3, ...],
        weight_scales: InputTensor[dtype=DType.float32, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        _launch[swiglu=False](
            Int(y.unsafe_ptr()),
            0,
            x,
            x_scales,
            weights,
            weight_scales,
            row_offsets,
            expert_ids,
            ctx,
        )


@extensibility.register("max_ep.grouped_gate_up_fp8")
struct GroupedGateUpFp8:
    """Computes `silu(x @ gate.T) * (x @ up.T)` of each expert's rows, quantized again.

    `y_scales` is `[n / 256, n_rows]`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=FP8, rank=2, ...],
        y_scales: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=FP8, rank=2, ...],
        x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
        weights: InputTensor[dtype=FP8, rank=3, ...],
        weight_scales: InputTensor[dtype=DType.float32, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        _launch[swiglu=True](
            Int(y.unsafe_ptr()),
            Int(y_scales.unsafe_ptr()),
            x,
            x_scales,
            weights,
            weight_scales,
            row_offsets,
            expert_ids,
            ctx,
        )
