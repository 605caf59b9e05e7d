# SPDX-License-Identifier: Apache-2.0
"""The MAX op of a routed layer of experts that are all on one Hopper GPU."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu

from .choices import Choices, launch_add, launch_sort, WeightedRows
from .few_rows import Chosen, launch_chosen, MAX_TOKENS, MAX_TOP_K
from .gather import GatheredSwiglu
from .hopper import launch_only_on_hopper
from .launch import launch_grouped
from .product import GroupedProduct, In, Out


@fieldwise_init
struct Sorted(Copyable, Movable):
    """Where choices are sorted, for more tokens than a few."""

    var row_offsets: Out[DType.uint32]
    """`[n_experts + 1]`."""
    var expert_ids: Out[DType.int32]
    """`[n_experts]`."""
    var token_of_row: Out[DType.int32]
    """`[n_tokens * top_k]`."""
    var row_of_choice: Out[DType.int32]
    """`[n_tokens][top_k]`."""
    var rows: Out[DType.bfloat16]
    """What experts return, `[n_tokens * top_k][hidden_size]`."""


def launch_sorted[
    top_k: Int
](of: Chosen, sorted: Sorted, context: DeviceContext) raises:
    """Sorts choices by expert, multiplies in groups, and adds up."""
    var n_rows = of.n_tokens * top_k
    launch_sort(
        Choices(
            row_offsets=sorted.row_offsets,
            expert_ids=sorted.expert_ids,
            token_of_row=sorted.token_of_row,
            row_of_choice=sorted.row_of_choice,
            ids=of.ids,
            n_choices=n_rows,
            n_experts=of.n_experts,
            top_k=top_k,
        ),
        context,
    )
    var gate_up = GroupedProduct[DType.bfloat16](
        y=of.activated,
        x=of.x,
        weights=of.gate_up,
        row_offsets={unsafe_from_address = Int(sorted.row_offsets)},
        expert_ids={unsafe_from_address = Int(sorted.expert_ids)},
        n_groups=of.n_experts,
        n_rows=n_rows,
        n_experts=of.n_experts,
        n=2 * of.moe_dim,
        k=of.hidden_size,
        one_group=0,
    )
    var down = gate_up
    down.y = sorted.rows
    down.x = {unsafe_from_address = Int(of.activated)}
    down.weights = of.down
    down.n, down.k = of.hidden_size, of.moe_dim
    var token_of_row = In[DType.int32](unsafe_from_address=Int(sorted.token_of_row))
    launch_only_on_hopper(
        "routed_swiglu", GatheredSwiglu(gate_up, token_of_row, of.n_tokens), context
    )
    launch_grouped[swiglu=False](down, context)
    launch_add(
        WeightedRows[DType.bfloat16, top_k](
            y=of.y,
            rows={unsafe_from_address = Int(sorted.rows)},
            row_of_choice={unsafe_from_address = Int(sorted.row_of_choice)},
            weights=of.weights,
            n_tokens=of.n_tokens,
            n_columns=of.hidden_size,
        ),
        context,
    )


@extensibility.register("max_ep.routed_swiglu")
struct RoutedSwiglu:
    """Runs SwiGLU experts that a router has chosen, and adds up a token's results.

    All results but the first are places that it needs. Up to `MAX_TOKENS` tokens go
    straight to their experts; of more the choices are sorted first.
    """

    @staticmethod
    def execute[
        target: StaticString, top_k: Int
    ](
        y: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        activated: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        rows: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        row_offsets: OutputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, rank=1, ...],
        token_of_row: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_of_choice: OutputTensor[dtype=DType.int32, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=2, ...],
        weights: InputTensor[dtype=DType.float32, rank=2, ...],
        gate_up: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        down: InputTensor[dtype=DType.bfloat16, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        var n_tokens = x.dim_size(0)
        if ids.dim_size(0) != n_tokens or weights.dim_size(0) != n_tokens:
            raise Error(
                t"max_ep: routed_swiglu takes choices of the tokens; given {n_tokens}"
                t" tokens, ids of {ids.dim_size(0)} and weights of"
                t" {weights.dim_size(0)}"
            )
        if n_tokens == 0:
            return
        var chosen = Chosen(
            y={unsafe_from_address = Int(y.unsafe_ptr())},
            activated={unsafe_from_address = Int(activated.unsafe_ptr())},
            x={unsafe_from_address = Int(x.unsafe_ptr())},
            ids={unsafe_from_address = Int(ids.unsafe_ptr())},
            weights={unsafe_from_address = Int(weights.unsafe_ptr())},
            gate_up={unsafe_from_address = Int(gate_up.unsafe_ptr())},
            down={unsafe_from_address = Int(down.unsafe_ptr())},
            n_tokens=n_tokens,
            top_k=top_k,
            n_experts=down.dim_size(0),
            hidden_size=x.dim_size(1),
            moe_dim=down.dim_size(2),
        )
        if n_tokens <= MAX_TOKENS and top_k <= MAX_TOP_K:
            launch_chosen(chosen, ctx)
            return
        var sorted = Sorted(
            row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            expert_ids={unsafe_from_address = Int(expert_ids.unsafe_ptr())},
            token_of_row={unsafe_from_address = Int(token_of_row.unsafe_ptr())},
            row_of_choice={unsafe_from_address = Int(row_of_choice.unsafe_ptr())},
            rows={unsafe_from_address = Int(rows.unsafe_ptr())},
        )
        launch_sorted[top_k](chosen, sorted, ctx)
