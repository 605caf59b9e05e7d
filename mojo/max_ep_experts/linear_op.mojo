# SPDX-License-Identifier: Apache-2.0
"""The MAX ops `gpu_linear` and `add_norm_linear`.

A file of its own, which no other file imports: it imports MAX's matmul, which takes 20
CPU-seconds to read. MAX reads a file of ops only for graphs that have one of them.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from layout import Coord, Idx, TileTensor, row_major
from linalg.matmul import matmul
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .few_rows import launch_few_rows, MAX_ROWS, TUNING
from .hopper import fits, is_hopper, launch_on_hopper
from .linear import FEW_ROWS, launch_linear
from .norm import add_norm_of, launch_add_norm
from .norm_product import launch_norm_product, MAX_STEPS, steps_for
from .product import Bf16In, GroupedProduct
from .wgmma import Bf16Product


def multiply_rows[
    target: StaticString
](
    y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
    x: Bf16In,
    weight: InputTensor[dtype=DType.bfloat16, rank=2, ...],
    ctx: DeviceContext,
) raises:
    """Multiplies rows with the transpose of a weight, as `GpuLinear` says."""
    var n_rows = y.dim_size(0)
    var n = weight.dim_size(0)
    var product = GroupedProduct[DType.bfloat16](
        y={unsafe_from_address = Int(y.unsafe_ptr())},
        x={unsafe_from_address = Int(x)},
        weights={unsafe_from_address = Int(weight.unsafe_ptr())},
        row_offsets={unsafe_from_address = Int(x)},
        expert_ids={unsafe_from_address = Int(x)},
        one_group=1,
        n_groups=1,
        n_rows=n_rows,
        n_experts=1,
        n=n,
        k=weight.dim_size(1),
    )
    comptime if is_hopper():
        if n_rows <= MAX_ROWS:
            launch_few_rows[TUNING, MAX_ROWS](product, ctx)
            return
    if n_rows < FEW_ROWS:
        launch_linear(product, ctx)
        return
    comptime if is_hopper():
        if n_rows % FEW_ROWS > 0 and fits(product):
            launch_on_hopper(Bf16Product[False, 128](product), ctx)
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
                x.unsafe_offset(first * product.k),
                row_major(Coord(Int64(count), Idx[k_static])),
            ),
            weights,
            ctx,
        )

    multiply(0, n_rows // FEW_ROWS * FEW_ROWS)
    if n_rows % FEW_ROWS > 0:
        multiply(n_rows - FEW_ROWS, FEW_ROWS)


@extensibility.register("max_ep.gpu_linear")
struct GpuLinear:
    """Multiplies rows with the transpose of a weight, in bfloat16, on GPUs.

    On Hopper `few_rows_kernel` multiplies up to `MAX_ROWS` rows. `linear_kernel`
    multiplies fewer than `FEW_ROWS` rows, MAX's matmul more. That one
    writes behind its result unless the result ends with a whole tile. Where it does not,
    `hopper_kernel` multiplies all rows. For sizes which that does not take, MAX's gets all
    whole tiles, then the last `FEW_ROWS` rows, some of them in the last whole tile, too.
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
        if y.dim_size(0) != x.dim_size(0) or x.dim_size(1) != weight.dim_size(1):
            raise Error("max_ep: gpu_linear: shapes do not fit")
        multiply_rows[target](
            y, {unsafe_from_address = Int(x.unsafe_ptr())}, weight, ctx
        )


@extensibility.register("max_ep.add_norm_linear")
struct AddNormLinear:
    """Adds two tensors, normalizes the sum's rows, and multiplies them with the transpose
    of a weight, on GPUs. The epsilon is on the host.

    On Hopper one kernel does it for up to `MAX_ROWS` rows. It reads the weights, and that
    of the norm, before the previous kernel has ended: they must be constants. For more
    rows this is `add_norm` and `gpu_linear`.
    """

    @staticmethod
    def execute[
        target: StaticString, n_columns: Int
    ](
        total: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        normed: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        more: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        norm_weight: InputTensor[dtype=DType.bfloat16, rank=1, ...],
        weight: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        epsilon: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        var n_tokens, n = x.dim_size(0), weight.dim_size(0)
        var fit = norm_weight.dim_size(0) == n_columns == weight.dim_size(1)
        if not fit or y.dim_size(0) != n_tokens or y.dim_size(1) != n:
            raise Error("max_ep: add_norm_linear: shapes do not fit")
        var sums = add_norm_of(total, normed, x, more, norm_weight)
        var one = epsilon.unsafe_ptr()[unsafe_offset=0]
        comptime if is_hopper() and steps_for(n_columns) <= MAX_STEPS:
            if n_tokens <= MAX_ROWS:
                launch_norm_product[n_columns, MAX_ROWS](
                    n_tokens,
                    {unsafe_from_address = Int(y.unsafe_ptr())},
                    sums,
                    one,
                    {unsafe_from_address = Int(weight.unsafe_ptr())},
                    n,
                    ctx,
                )
                return
        launch_add_norm[n_columns](sums, one, n_tokens, ctx)
        multiply_rows[target](
            y, {unsafe_from_address = Int(normed.unsafe_ptr())}, weight, ctx
        )
