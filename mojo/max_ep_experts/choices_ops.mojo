# SPDX-License-Identifier: Apache-2.0
"""The MAX ops of experts that are all on one device."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .choices import Choices, launch_add, launch_sort, WeightedRows
from .gather import GatheredSwiglu
from .hopper import fits, launch_on_hopper
from .launch import is_hopper
from .product import product_of
from .ring import MAX_GROUPS
from .tile import K_STEP
from .tiles import BN


@extensibility.register("max_ep.sort_choices")
struct SortChoices:
    """Sorts a router's choices by expert; those of one expert stay in order.

    `row_offsets` and `expert_ids` are as dispatch gives them.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        row_offsets: OutputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, rank=1, ...],
        token_of_row: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_of_choice: OutputTensor[dtype=DType.int32, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var n_choices = ids.dim_size(0) * ids.dim_size(1)
        var n_experts = expert_ids.dim_size(0)
        if (
            row_offsets.dim_size(0) != n_experts + 1
            or token_of_row.dim_size(0) != n_choices
            or row_of_choice.dim_size(0) * row_of_choice.dim_size(1) != n_choices
        ):
            raise Error(
                t"max_ep: sort_choices of ids [{ids.dim_size(0)}, {ids.dim_size(1)}]"
                t" for {n_experts} experts gives {n_experts + 1} offsets and"
                t" {n_choices} tokens and rows; given {row_offsets.dim_size(0)},"
                t" {token_of_row.dim_size(0)} and [{row_of_choice.dim_size(0)},"
                t" {row_of_choice.dim_size(1)}]"
            )
        var choices = Choices(
            row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            expert_ids={unsafe_from_address = Int(expert_ids.unsafe_ptr())},
            token_of_row={unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            row_of_choice={unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            ids={unsafe_from_address = Int(ids.unsafe_ptr())},
            n_choices=n_choices,
            n_experts=n_experts,
            top_k=ids.dim_size(1),
        )
        launch_sort[target](choices, ctx)


@extensibility.register("max_ep.grouped_gate_up_gathered")
struct GroupedGateUpGathered:
    """As `grouped_gate_up`, of tokens: row `r` is of token `token_of_row[r]`.

    On Hopper, for sizes that `hopper_kernel` takes.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        tokens: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        weights: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        token_of_row: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        var product = product_of(y, tokens, weights, row_offsets, expert_ids)
        if (
            token_of_row.dim_size(0) != product.n_rows
            or tokens.dim_size(1) != product.k
            or 2 * y.dim_size(1) != product.n
            or expert_ids.dim_size(0) != product.n_groups
        ):
            raise Error(
                t"max_ep: grouped_gate_up_gathered: {token_of_row.dim_size(0)} rows of"
                t" tokens [{tokens.dim_size(0)}, {tokens.dim_size(1)}],"
                t" {product.n_groups} groups, {expert_ids.dim_size(0)} experts and"
                t" weights [n_experts, {product.n}, {product.k}] do not give"
                t" [{product.n_rows}, {y.dim_size(1)}]; it needs the results of"
                t" sort_choices, and tokens and weights with equal last sizes"
            )
        if not fits(product) or Int(y.unsafe_ptr()) % 16 != 0:
            raise Error(
                t"max_ep: grouped_gate_up_gathered takes n in multiples of {BN} and k"
                t" of {K_STEP}, up to {MAX_GROUPS} experts, and results that are"
                t" aligned to 16 bytes; given n={product.n}, k={product.k} and"
                t" {product.n_groups} experts"
            )
        comptime if is_hopper():
            var gathered = GatheredSwiglu(
                product,
                {unsafe_from_address = Int(token_of_row.unsafe_ptr())},
                tokens.dim_size(0),
            )
            launch_on_hopper(gathered, ctx, ctx.stream())
        else:
            raise Error("max_ep: grouped_gate_up_gathered is for Hopper")


@extensibility.register("max_ep.add_rows")
struct AddRows:
    """Adds up the weighted rows of each token in order of its choices, in float32."""

    @staticmethod
    def execute[
        target: StaticString, top_k: Int
    ](
        y: OutputTensor[rank=2, ...],
        rows: InputTensor[dtype=y.dtype, rank=2, ...],
        row_of_choice: InputTensor[dtype=DType.int32, rank=2, ...],
        weights: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var added = WeightedRows[y.dtype, top_k](
            y={unsafe_from_address = Int(y.unsafe_ptr())},
            rows={unsafe_from_address = Int(rows.unsafe_ptr())},
            row_of_choice={unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            weights={unsafe_from_address = Int(weights.unsafe_ptr())},
            n_tokens=y.dim_size(0),
            n_columns=y.dim_size(1),
        )
        if (
            rows.dim_size(1) != added.n_columns
            or added.n_columns % added.width != 0
            or row_of_choice.dim_size(0) != added.n_tokens
            or row_of_choice.dim_size(1) != top_k
            or weights.dim_size(0) != added.n_tokens
            or weights.dim_size(1) != top_k
        ):
            raise Error(
                t"max_ep: add_rows to [{added.n_tokens}, {added.n_columns}] takes rows"
                t" of as many columns, a multiple of {added.width}, and choices and"
                t" weights [{added.n_tokens}, {top_k}]; given"
                t" {rows.dim_size(1)} columns, [{row_of_choice.dim_size(0)},"
                t" {row_of_choice.dim_size(1)}] and [{weights.dim_size(0)},"
                t" {weights.dim_size(1)}]"
            )
        launch_add[target](added, ctx)
