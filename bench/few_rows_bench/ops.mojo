# SPDX-License-Identifier: Apache-2.0
"""Variant 0 is the kernels for any number of rows; `bench/few_rows.py` names the others.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max_ep_experts.few_rows import (
    Chosen,
    DOWN,
    launch_chosen_down,
    launch_chosen_gate_up,
    launch_few_rows,
    MAX_TOKENS,
    TUNING,
    Tuning,
)
from max_ep_experts.linear import launch_linear
from max_ep_experts.norm import add_norm_of, launch_add_norm
from max_ep_experts.norm_product import launch_norm_product, NORM_TUNING
from max_ep_experts.product import GroupedProduct
from max_ep_experts.routed import launch_sorted, Sorted

comptime TOP_K = 8
# Warps of a block, warps along k, rows of a warp, steps, `Tuning.overlaps`.
comptime DENSE = [
    TUNING,
    Tuning(8, 8, 4, 1, False),
    Tuning(8, 4, 4, 2, True),
    Tuning(8, 2, 4, 4, True),
    Tuning(4, 2, 4, 4, True),
    Tuning(8, 1, 2, 8, True),
    Tuning(8, 2, 2, 4, True),
    Tuning(8, 8, 8, 1, True),
    Tuning(4, 4, 4, 2, True),
    Tuning(4, 2, 2, 4, True),
    Tuning(16, 4, 4, 2, True),
]
comptime OF_DOWN = [
    DOWN,
    Tuning(0, 0, 4, 1, False),
    Tuning(0, 0, 4, 3, True),
    Tuning(0, 0, 2, 3, True),
    Tuning(0, 0, 8, 1, True),
    Tuning(0, 0, 8, 3, True),
]
# All warps of a block share k; steps follow from k.
comptime OF_NORM = [
    NORM_TUNING,
    Tuning(8, 8, 4, 0, False),
    Tuning(8, 8, 8, 0, True),
    Tuning(8, 8, 2, 0, True),
    Tuning(4, 4, 4, 0, True),
    Tuning(4, 4, 8, 0, True),
    Tuning(4, 4, 2, 0, True),
]
comptime N_DENSE = 11
comptime N_DOWN = 6
comptime N_NORM = 7


def product_of(
    y: Int, x: Int, weights: Int, n_rows: Int, n: Int, k: Int
) -> GroupedProduct[DType.bfloat16]:
    return GroupedProduct[DType.bfloat16](
        y={unsafe_from_address = y},
        x={unsafe_from_address = x},
        weights={unsafe_from_address = weights},
        row_offsets={unsafe_from_address = x},
        expert_ids={unsafe_from_address = x},
        one_group=1,
        n_groups=1,
        n_rows=n_rows,
        n_experts=1,
        n=n,
        k=k,
    )


def multiply(
    product: GroupedProduct[DType.bfloat16], variant: Int, ctx: DeviceContext
) raises:
    if variant == 0 or product.n_rows > MAX_TOKENS:
        launch_linear(product, ctx)
    comptime for i in range(N_DENSE):
        if variant == i + 1:
            launch_few_rows[DENSE[i], MAX_TOKENS](product, ctx)


def run_experts(
    of: Chosen, sorted: Sorted, gate_up: Int, down: Int, ctx: DeviceContext
) raises:
    """With variants 0 of both today's kernels; -1 leaves one out."""
    if gate_up == 0 and down == 0:
        launch_sorted[TOP_K](of, sorted, ctx)
    comptime for i in range(N_DENSE):
        if gate_up == i + 1:
            launch_chosen_gate_up[DENSE[i]](of, ctx)
    comptime for i in range(N_DOWN):
        if down == i + 1:
            launch_chosen_down[OF_DOWN[i]](of, ctx)


@extensibility.register("bench.dense")
struct Dense:
    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=3, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        weights: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        variant: Int32,
        ctx: DeviceContext,
    ) raises:
        var n_rows, n, k = x.dim_size(0), weights.dim_size(1), weights.dim_size(2)
        for i in range(y.dim_size(0)):
            multiply(
                product_of(
                    Int(y.unsafe_ptr()) + 2 * i * n_rows * n,
                    Int(x.unsafe_ptr()),
                    Int(weights.unsafe_ptr()) + 2 * i * n * k,
                    n_rows,
                    n,
                    k,
                ),
                Int(variant),
                ctx,
            )


@extensibility.register("bench.norms")
struct Norms:
    """A sum, its norm, and a product of it in each layer, with variant 0 by two kernels.
    """

    @staticmethod
    def execute[
        target: StaticString, n_columns: Int
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=3, ...],
        total: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        normed: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        more: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        norm_weight: InputTensor[dtype=DType.bfloat16, rank=1, ...],
        weights: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        variant: Int32,
        ctx: DeviceContext,
    ) raises:
        var n_rows, n, k = x.dim_size(0), weights.dim_size(1), weights.dim_size(2)
        var sums = add_norm_of(total, normed, x, more, norm_weight)
        for i in range(y.dim_size(0)):
            var to = Int(y.unsafe_ptr()) + 2 * i * n_rows * n
            var weight = Int(weights.unsafe_ptr()) + 2 * i * n * k
            if variant == 0:
                launch_add_norm[n_columns](sums, 1e-6, n_rows, ctx)
                launch_few_rows[TUNING, MAX_TOKENS](
                    product_of(to, Int(normed.unsafe_ptr()), weight, n_rows, n, k), ctx
                )
            comptime for at in range(N_NORM):
                if Int(variant) == at + 1:
                    launch_norm_product[n_columns, MAX_TOKENS, OF_NORM[at]](
                        n_rows,
                        {unsafe_from_address = to},
                        sums,
                        1e-6,
                        {unsafe_from_address = weight},
                        n,
                        ctx,
                    )


@extensibility.register("bench.layers")
struct Layers:
    """Layers of experts; with `dense` three products before each, of `x` too."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=3, ...],
        activated: OutputTensor[dtype=DType.bfloat16, rank=3, ...],
        rows: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        row_offsets: OutputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, rank=1, ...],
        token_of_row: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_of_choice: OutputTensor[dtype=DType.int32, rank=1, ...],
        products: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        wide: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=3, ...],
        weights: InputTensor[dtype=DType.float32, rank=3, ...],
        gate_up: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        down: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        qkv: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        output: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        router: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        of_dense: Int32,
        of_gate_up: Int32,
        of_down: Int32,
        ctx: DeviceContext,
    ) raises:
        var n, hidden, moe_dim = x.dim_size(0), x.dim_size(1), down.dim_size(2)
        var sorted = Sorted(
            {unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            {unsafe_from_address = Int(expert_ids.unsafe_ptr())},
            {unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            {unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            {unsafe_from_address = Int(rows.unsafe_ptr())},
        )
        for i in range(y.dim_size(0)):
            if of_dense >= 0:
                var at = Int(products.unsafe_ptr())

                @always_inline
                def run(w: Int, source: Int, rows: Int, k: Int) raises {imm}:
                    multiply(
                        product_of(at, source, w + 2 * i * rows * k, n, rows, k),
                        Int(of_dense),
                        ctx,
                    )

                var narrow = Int(x.unsafe_ptr())
                run(Int(qkv.unsafe_ptr()), narrow, qkv.dim_size(1), hidden)
                run(
                    Int(output.unsafe_ptr()),
                    Int(wide.unsafe_ptr()),
                    hidden,
                    output.dim_size(2),
                )
                run(Int(router.unsafe_ptr()), narrow, router.dim_size(1), hidden)
            run_experts(
                Chosen(
                    y={unsafe_from_address = Int(y.unsafe_ptr()) + 2 * i * n * hidden},
                    activated={
                        unsafe_from_address = Int(activated.unsafe_ptr())
                        + 2 * i * n * TOP_K * moe_dim
                    },
                    x={unsafe_from_address = Int(x.unsafe_ptr())},
                    ids={
                        unsafe_from_address = Int(ids.unsafe_ptr()) + 4 * i * n * TOP_K
                    },
                    weights={
                        unsafe_from_address = Int(weights.unsafe_ptr())
                        + 4 * i * n * TOP_K
                    },
                    gate_up={unsafe_from_address = Int(gate_up.unsafe_ptr())},
                    down={unsafe_from_address = Int(down.unsafe_ptr())},
                    n_tokens=n,
                    top_k=TOP_K,
                    n_experts=down.dim_size(0),
                    hidden_size=hidden,
                    moe_dim=moe_dim,
                ),
                sorted,
                Int(of_gate_up),
                Int(of_down),
                ctx,
            )
