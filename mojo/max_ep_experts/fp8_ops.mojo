# SPDX-License-Identifier: Apache-2.0
"""The MAX ops of experts in blockwise FP8, on Hopper."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from .fp8 import BLOCK, FP8, ScaledProduct
from .launch import launch_only_on_hopper
from .product import product_of


def _launch[
    swiglu: Bool
](
    op: StaticString,
    y: OutputTensor[rank=2, ...],
    y_scales: Int,
    x: InputTensor[dtype=FP8, rank=2, ...],
    x_scales: InputTensor[dtype=DType.float32, rank=2, ...],
    weights: InputTensor[dtype=FP8, rank=3, ...],
    weight_scales: InputTensor[dtype=DType.float32, rank=3, ...],
    row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
    expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
    context: DeviceContext,
) raises:
    """Launches a product; `y_scales` is an address."""
    var n_rows, k = x.dim_size(0), x.dim_size(1)
    if x_scales.dim_size(0) * BLOCK != k or x_scales.dim_size(1) != n_rows:
        raise Error(
            t"max_ep: {op}: rows [{n_rows}, {k}] need scales [{k // BLOCK}, {n_rows}];"
            t" given [{x_scales.dim_size(0)}, {x_scales.dim_size(1)}]"
        )
    var scaled = ScaledProduct[swiglu](
        product_of[DType.bfloat16](y, x, weights, row_offsets, expert_ids),
        {unsafe_from_address = Int(x_scales.unsafe_ptr())},
        {unsafe_from_address = Int(weight_scales.unsafe_ptr())},
        {unsafe_from_address = y_scales},
    )
    launch_only_on_hopper(op, scaled, context)


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
            "grouped_matmul_fp8",
            y,
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
            "grouped_gate_up_fp8",
            y,
            Int(y_scales.unsafe_ptr()),
            x,
            x_scales,
            weights,
            weight_scales,
            row_offsets,
            expert_ids,
            ctx,
        )
