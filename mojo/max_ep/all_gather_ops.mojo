# SPDX-License-Identifier: Apache-2.0
"""The MAX custom ops of an all-gather, for `AllGatherTokenDispatcher`.

Those of dispatch, with tokens that carry the router's choices to every rank.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from .api import (
    ep_dispatch_async_kernel_api,
    ep_dispatch_kernel_api,
    ep_dispatch_wait_kernel_api,
)
from .formats.with_metadata import RowsWithChoices, WithMetadataTokenFormat
from .ops import bytes_of, PointersTensor, router_weights_of, WordsTensor


@always_inline
def _rows_with_choices(
    tokens: OutputTensor[rank=2, ...],
    expert_ids: OutputTensor[dtype=DType.int32, rank=2, ...],
    probs: OutputTensor[dtype=DType.float32, rank=2, ...],
    n_gathered: OutputTensor[dtype=DType.int32, rank=1, ...],
) -> RowsWithChoices:
    return RowsWithChoices(
        bytes_of(tokens),
        bytes_of(expert_ids).unsafe_bitcast[Int32](),
        bytes_of(probs).unsafe_bitcast[Float32](),
        bytes_of(n_gathered).unsafe_bitcast[Int32](),
    )


@extensibility.register("max_ep.dispatch_async.with_choices")
struct DispatchAsyncWithChoices:
    """Sends tokens, and what the router chose, to all ranks."""

    @staticmethod
    def execute[
        target: StaticString,
        dispatch_dtype: DType,
        router_top_k: Int,
        hidden_size: Int,
        top_k: Int,
        n_experts: Int,
        max_tokens_per_rank: Int,
        n_gpus_per_node: Int,
        n_nodes: Int,
        n_sms: Int,
        has_input_scales: Bool,
        fused_shared_expert: Bool,
        protocol: Int,
    ](
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[rank=2, ...],
        topk_ids: InputTensor[dtype=DType.int32, rank=2, ...],
        input_scales: InputTensor[dtype=DType.float32, rank=1, ...],
        router_weights: InputTensor[dtype=DType.float32, rank=2, ...],
        send_ptrs: PointersTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_dispatch_async_kernel_api[
            WithMetadataTokenFormat[
                dispatch_dtype, hidden_size, top_k, router_top_k
            ],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            fused_shared_expert=fused_shared_expert,
            protocol=protocol,
            n_sms=n_sms,
        ](
            atomic_counters.to_tile_tensor(),
            input_tokens.to_tile_tensor(),
            topk_ids.to_tile_tensor(),
            send_ptrs.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
            router_weights_of(router_weights),
        )


@extensibility.register("max_ep.dispatch_wait.with_choices")
struct DispatchWaitWithChoices:
    """Completes receiving: all ranks' tokens, and what was chosen for them."""

    @staticmethod
    def execute[
        target: StaticString,
        dispatch_dtype: DType,
        router_top_k: Int,
        hidden_size: Int,
        top_k: Int,
        n_experts: Int,
        max_tokens_per_rank: Int,
        n_gpus_per_node: Int,
        n_nodes: Int,
        n_sms: Int,
        shares_gpu: Bool,
        fused_shared_expert: Bool,
        output_layout: StaticString,
        protocol: Int,
    ](
        output_tokens: OutputTensor[rank=2, ...],
        routing_map: OutputTensor[dtype=DType.int32, rank=2, ...],
        probs: OutputTensor[dtype=DType.float32, rank=2, ...],
        n_gathered: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: OutputTensor[rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, ...],
        src_info: OutputTensor[dtype=DType.int32, rank=2, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_dispatch_wait_kernel_api[
            WithMetadataTokenFormat[
                dispatch_dtype, hidden_size, top_k, router_top_k
            ],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            fused_shared_expert=fused_shared_expert,
            output_layout=output_layout,
            protocol=protocol,
            n_sms=n_sms,
            shares_gpu=shares_gpu,
        ](
            _rows_with_choices(output_tokens, routing_map, probs, n_gathered),
            row_offsets.to_tile_tensor(),
            expert_ids.to_tile_tensor(),
            src_info.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
        )


@extensibility.register("max_ep.dispatch.with_choices")
struct DispatchWithChoices:
    """Sends and receives in one launch."""

    @staticmethod
    def execute[
        target: StaticString,
        dispatch_dtype: DType,
        router_top_k: Int,
        hidden_size: Int,
        top_k: Int,
        n_experts: Int,
        max_tokens_per_rank: Int,
        n_gpus_per_node: Int,
        n_nodes: Int,
        n_sms: Int,
        has_input_scales: Bool,
        fused_shared_expert: Bool,
        output_layout: StaticString,
        protocol: Int,
    ](
        output_tokens: OutputTensor[rank=2, ...],
        routing_map: OutputTensor[dtype=DType.int32, rank=2, ...],
        probs: OutputTensor[dtype=DType.float32, rank=2, ...],
        n_gathered: OutputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: OutputTensor[rank=1, ...],
        expert_ids: OutputTensor[dtype=DType.int32, ...],
        src_info: OutputTensor[dtype=DType.int32, rank=2, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[rank=2, ...],
        topk_ids: InputTensor[dtype=DType.int32, rank=2, ...],
        input_scales: InputTensor[dtype=DType.float32, rank=1, ...],
        router_weights: InputTensor[dtype=DType.float32, rank=2, ...],
        send_ptrs: PointersTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_dispatch_kernel_api[
            WithMetadataTokenFormat[
                dispatch_dtype, hidden_size, top_k, router_top_k
            ],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            fused_shared_expert=fused_shared_expert,
            output_layout=output_layout,
            protocol=protocol,
            n_sms=n_sms,
        ](
            _rows_with_choices(output_tokens, routing_map, probs, n_gathered),
            row_offsets.to_tile_tensor(),
            expert_ids.to_tile_tensor(),
            src_info.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            input_tokens.to_tile_tensor(),
            topk_ids.to_tile_tensor(),
            send_ptrs.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
            router_weights_of(router_weights),
        )
