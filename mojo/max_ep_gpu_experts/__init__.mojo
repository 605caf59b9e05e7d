# SPDX-License-Identifier: Apache-2.0
"""Products of experts and layers where MAX has none, or a wrong one: on Hopper.

In bfloat16. Why not MAX's: docs/decisions/0016-matmuls-on-hopper.md and
docs/decisions/0016-matmuls-on-hopper.md. A package of its own: it has MAX's matmul
in it, which takes a minute to read.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from layout import Coord, Idx, TileTensor, row_major
from linalg.matmul import matmul
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .grouped_matmul import launch_grouped_matmul
from .linear import FEW_ROWS, launch_linear


@extensibility.register("max_ep.gpu_grouped_matmul")
struct GpuGroupedMatmul:
    """Multiplies each expert's rows with the transpose of its weight.

    Rows `[row_offsets[i], row_offsets[i + 1])` belong to `expert_ids[i]`; rows
    behind the last offset stay untouched. The arguments of MAX's
    `grouped_matmul_ragged`; products and sums in float32.
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
        launch_grouped_matmul(
            {unsafe_from_address = Int(y.unsafe_ptr())},
            {unsafe_from_address = Int(x.unsafe_ptr())},
            {unsafe_from_address = Int(weights.unsafe_ptr())},
            {unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            {unsafe_from_address = Int(expert_ids.unsafe_ptr())},
            row_offsets.dim_size(0) - 1,
            x.dim_size(0),
            weights.dim_size(0),
            weights.dim_size(1),
            weights.dim_size(2),
            ctx,
        )


@extensibility.register("max_ep.gpu_linear")
struct GpuLinear:
    """Multiplies rows with the transpose of a weight.

    Few rows with `linear_kernel`, more with MAX's matmul, which writes behind its
    result unless that ends with a whole tile: so the last `FEW_ROWS` rows by
    themselves, behind all whole tiles, which may have some of them, too.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        weight: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        var n_rows = x.dim_size(0)
        var n = weight.dim_size(0)
        var k = weight.dim_size(1)
        if n_rows < FEW_ROWS:
            launch_linear(
                {unsafe_from_address = Int(y.unsafe_ptr())},
                {unsafe_from_address = Int(x.unsafe_ptr())},
                {unsafe_from_address = Int(weight.unsafe_ptr())},
                n_rows,
                n,
                k,
                ctx,
            )
            return
        var weights = weight.to_tile_tensor[DType.int64]()
        comptime n_static = weights.static_shape[0]
        comptime k_static = weights.static_shape[1]

        @always_inline
        def multiply(first: Int, count: Int) raises {imm}:
            matmul[transpose_b=True, target=target](
                TileTensor(
                    y.unsafe_ptr().unsafe_offset(first * n),
                    row_major(Coord(Int64(count), Idx[n_static])),
                ),
                TileTensor(
                    x.unsafe_ptr().unsafe_offset(first * k),
                    row_major(Coord(Int64(count), Idx[k_static])),
                ),
                weights,
                ctx,
            )

        multiply(0, n_rows // FEW_ROWS * FEW_ROWS)
        if n_rows % FEW_ROWS > 0:
            multiply(n_rows - FEW_ROWS, FEW_ROWS)
