# SPDX-License-Identifier: Apache-2.0
"""The MAX ops of experts on any device."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .cpu import cpu_fused_silu, cpu_grouped_matmul
from .launch import launch_grouped
from .product import product_of


@extensibility.register("max_ep.grouped_matmul")
struct GroupedMatmul:
    """Multiplies each expert's rows with the transpose of its weight.

    Rows `[row_offsets[i], row_offsets[i + 1])` belong to `expert_ids[i]`; rows
    behind the last offset stay untouched. The arguments of MAX's
    `grouped_matmul_ragged`; products and sums are float32. On GPUs bfloat16.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        weights: InputTensor[dtype=y.dtype, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime if is_gpu[target]():
            comptime assert y.dtype == DType.bfloat16, "max_ep: bfloat16 only"
            launch_grouped[swiglu=False](
                product_of[DType.bfloat16](y, x, weights, row_offsets, expert_ids), ctx
            )
        else:
            cpu_grouped_matmul(
                product_of[y.dtype](y, x, weights, row_offsets, expert_ids)
            )


@extensibility.register("max_ep.grouped_gate_up")
struct GroupedGateUp:
    """Computes `silu(x @ gate.T) * (x @ up.T)` of each expert's rows, on GPUs.

    The arguments are those of `grouped_matmul`; a weight is gate, then up.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        weights: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        launch_grouped[swiglu=True](
            product_of[DType.bfloat16](y, x, weights, row_offsets, expert_ids), ctx
        )


@extensibility.register("max_ep.fused_silu")
struct FusedSilu:
    """Computes `silu(gate) * up` of rows `[gate | up]`, in float32, on the CPU.

    Only the rows before the last offset, as MAX's `fused_silu`, which GPUs have.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert not is_gpu[target](), "max_ep: use MAX's fused_silu"
        var n = y.dim_size(1)
        var n_rows = Int(
            row_offsets.unsafe_ptr()[unsafe_offset=row_offsets.dim_size(0) - 1]
        )
        if n_rows > y.dim_size(0) or x.dim_size(1) != 2 * n:
            raise Error("max_ep: fused_silu: shapes do not fit")
        cpu_fused_silu[y.dtype](
            {unsafe_from_address = Int(y.unsafe_ptr())},
            {unsafe_from_address = Int(x.unsafe_ptr())},
            n_rows,
            n,
        )
