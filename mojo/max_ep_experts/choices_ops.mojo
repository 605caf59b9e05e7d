# SPDX-License-Identifier: Apache-2.0
"""The MAX ops of experts that are all on one device."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .choices import Choices, launch_add, launch_sort, WeightedRows
from .gather import GatheredSwiglu
from .launch import launch_only_on_hopper
from .product import product_of


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
        var choices = Choices(
            row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            expert_ids={unsafe_from_address = Int(expert_ids.unsafe_ptr())},
            token_of_row={unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            row_of_choice={unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            ids={unsafe_from_address = Int(ids.unsafe_ptr())},
            n_choices=ids.dim_size(0) * ids.dim_size(1),
            n_experts=expert_ids.dim_size(0),
            top_k=ids.dim_size(1),
        )
        launch_sort[target](choices, ctx)


@extensibility.register("max_ep.grouped_gate_up_gathered")
struct GroupedGateUpGathered:
    """As `grouped_gate_up`, of tokens: row `r` is of token `token_of_row[r]`."""

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
        var gathered = GatheredSwiglu(
            product_of[DType.bfloat16](y, tokens, weights, row_offsets, expert_ids),
            {unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            tokens.dim_size(0),
        )
        launch_only_on_hopper("grouped_gate_up_gathered", gathered, ctx)


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
        if row_of_choice.dim_size(0) != added.n_tokens:
            raise Error(
                t"max_ep: add_rows takes weights of the tokens of the choices; given"
                t" {added.n_tokens} and {row_of_choice.dim_size(0)} tokens"
            )
        launch_add[target](added, ctx)
