# SPDX-License-Identifier: Apache-2.0
"""The MAX custom ops: tensors in, launcher call out, no logic.

Every op takes `order`, a mutable tensor it never touches: MAX runs ops that
share a mutable tensor in graph order, and ops that do not concurrently.
"""
import extensibility
from extensibility import (
    _MutableInputTensor as MutableInputTensor,
    InputTensor,
    OutputTensor,
)
from max.gpu.host import DeviceContext

from .api import (
    ep_combine_async_kernel_api,
    ep_combine_kernel_api,
    ep_combine_wait_kernel_api,
    ep_dispatch_async_kernel_api,
    ep_dispatch_kernel_api,
    ep_dispatch_wait_kernel_api,
    InputScales,
)
from .formats.blockwise_fp8 import BlockwiseFP8TokenFormat, ScaledRows
from .setup import init
from .token_format import (
    BytePointer,
    PlainRows,
    PlainTokenFormat,
    RouterWeights,
    SharedRows,
)

comptime WordsTensor = MutableInputTensor[dtype=DType.int32, rank=1, ...]
"""Words that an op changes: counters, or the order of the ops."""

comptime PointersTensor = InputTensor[dtype=DType.uint64, rank=1, ...]
"""One address a rank."""


@always_inline
def bytes_of(tensor: MutableInputTensor) -> BytePointer:
    """Takes a tensor's address."""
    return BytePointer(unsafe_from_address=Int(tensor.unsafe_ptr()))


@always_inline
def bytes_of(tensor: OutputTensor) -> BytePointer:
    """Takes a tensor's address."""
    return BytePointer(unsafe_from_address=Int(tensor.unsafe_ptr()))


@always_inline
def _scaled_rows(
    tokens: BytePointer, scales: BytePointer, row_stride: Int
) -> ScaledRows:
    return ScaledRows(tokens, scales.unsafe_bitcast[Float32](), row_stride)


@always_inline
def router_weights_of(
    tensor: InputTensor[dtype=DType.float32, rank=2, ...],
) -> RouterWeights:
    """Takes router weights as the launchers do."""
    return RouterWeights(
        Pointer[Float32, ImmUntrackedOrigin](
            unsafe_from_address=Int(tensor.unsafe_ptr())
        ),
        tensor.dim_size(0),
        tensor.dim_size(1),
    )


@extensibility.register("max_ep.init")
struct Init:
    """Prepares a rank's region and counters; hands out the addresses."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        device_ptrs: OutputTensor[dtype=DType.uint64, rank=2, ...],
        my_rank: OutputTensor[dtype=DType.int32, rank=1, ...],
        counters_group_0: WordsTensor,
        counters_group_1: WordsTensor,
        setup: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        init[target](
            device_ptrs.to_tile_tensor(),
            my_rank.to_tile_tensor(),
            counters_group_0.to_tile_tensor(),
            counters_group_1.to_tile_tensor(),
            setup.to_tile_tensor(),
            ctx,
        )


@extensibility.register("max_ep.dispatch_async")
struct DispatchAsync:
    """Sends tokens to their experts."""

    @staticmethod
    def execute[
        target: StaticString,
        dispatch_dtype: DType,
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

        @__parameter
        @always_inline
        def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
            var idx = expert_id if input_scales.dim_size(0) > 1 else 0
            return input_scales.unsafe_ptr()[unsafe_offset=idx].cast[dtype]()

        ep_dispatch_async_kernel_api[
            PlainTokenFormat[dispatch_dtype, hidden_size, top_k],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            InputScales(scale_of) if has_input_scales else None,
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


@extensibility.register("max_ep.dispatch_wait")
struct DispatchWait:
    """Completes receiving: rows by expert."""

    @staticmethod
    def execute[
        target: StaticString,
        dispatch_dtype: DType,
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
            PlainTokenFormat[dispatch_dtype, hidden_size, top_k],
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
            PlainRows(bytes_of(output_tokens)),
            row_offsets.to_tile_tensor(),
            expert_ids.to_tile_tensor(),
            src_info.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
        )


@extensibility.register("max_ep.dispatch")
struct Dispatch:
    """Sends and receives in one launch."""

    @staticmethod
    def execute[
        target: StaticString,
        dispatch_dtype: DType,
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

        @__parameter
        @always_inline
        def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
            var idx = expert_id if input_scales.dim_size(0) > 1 else 0
            return input_scales.unsafe_ptr()[unsafe_offset=idx].cast[dtype]()

        ep_dispatch_kernel_api[
            PlainTokenFormat[dispatch_dtype, hidden_size, top_k],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            InputScales(scale_of) if has_input_scales else None,
            fused_shared_expert=fused_shared_expert,
            output_layout=output_layout,
            protocol=protocol,
            n_sms=n_sms,
        ](
            PlainRows(bytes_of(output_tokens)),
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


@extensibility.register("max_ep.dispatch_async.fp8")
struct DispatchAsyncFP8:
    """Sends tokens to their experts, in blockwise FP8."""

    @staticmethod
    def execute[
        target: StaticString,
        power_of_two_scales: Bool,
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

        @__parameter
        @always_inline
        def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
            var idx = expert_id if input_scales.dim_size(0) > 1 else 0
            return input_scales.unsafe_ptr()[unsafe_offset=idx].cast[dtype]()

        ep_dispatch_async_kernel_api[
            BlockwiseFP8TokenFormat[hidden_size, top_k, power_of_two_scales],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            InputScales(scale_of) if has_input_scales else None,
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


@extensibility.register("max_ep.dispatch_wait.fp8")
struct DispatchWaitFP8:
    """Completes receiving: rows by expert, in blockwise FP8."""

    @staticmethod
    def execute[
        target: StaticString,
        power_of_two_scales: Bool,
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
        output_scales: OutputTensor[dtype=DType.float32, rank=2, ...],
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
            BlockwiseFP8TokenFormat[hidden_size, top_k, power_of_two_scales],
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
            _scaled_rows(
                bytes_of(output_tokens),
                bytes_of(output_scales),
                output_scales.dim_size(1),
            ),
            row_offsets.to_tile_tensor(),
            expert_ids.to_tile_tensor(),
            src_info.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
        )


@extensibility.register("max_ep.dispatch.fp8")
struct DispatchFP8:
    """Sends and receives in one launch, in blockwise FP8."""

    @staticmethod
    def execute[
        target: StaticString,
        power_of_two_scales: Bool,
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
        output_scales: OutputTensor[dtype=DType.float32, rank=2, ...],
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

        @__parameter
        @always_inline
        def scale_of[dtype: DType](expert_id: Int) -> Scalar[dtype]:
            var idx = expert_id if input_scales.dim_size(0) > 1 else 0
            return input_scales.unsafe_ptr()[unsafe_offset=idx].cast[dtype]()

        ep_dispatch_kernel_api[
            BlockwiseFP8TokenFormat[hidden_size, top_k, power_of_two_scales],
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            InputScales(scale_of) if has_input_scales else None,
            fused_shared_expert=fused_shared_expert,
            output_layout=output_layout,
            protocol=protocol,
            n_sms=n_sms,
        ](
            _scaled_rows(
                bytes_of(output_tokens),
                bytes_of(output_scales),
                output_scales.dim_size(1),
            ),
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


@extensibility.register("max_ep.combine_async")
struct CombineAsync:
    """Sends expert rows back to where their tokens came from."""

    @staticmethod
    def execute[
        target: StaticString,
        combine_dtype: DType,
        hidden_size: Int,
        top_k: Int,
        n_experts: Int,
        max_tokens_per_rank: Int,
        n_gpus_per_node: Int,
        n_nodes: Int,
        n_sms: Int,
        protocol: Int,
        partial_dtype: DType,
    ](
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[dtype=combine_dtype, rank=2, ...],
        src_info: InputTensor[dtype=DType.int32, rank=2, ...],
        send_ptrs: PointersTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_combine_async_kernel_api[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            protocol=protocol,
            partial_dtype=partial_dtype,
            n_sms=n_sms,
        ](
            atomic_counters.to_tile_tensor(),
            input_tokens.to_tile_tensor(),
            src_info.to_tile_tensor(),
            send_ptrs.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
        )


@extensibility.register("max_ep.combine_wait")
struct CombineWait:
    """Completes combine: the weighted sum of each token's rows."""

    @staticmethod
    def execute[
        target: StaticString,
        combine_dtype: DType,
        hidden_size: Int,
        top_k: Int,
        n_experts: Int,
        max_tokens_per_rank: Int,
        n_gpus_per_node: Int,
        n_nodes: Int,
        n_sms: Int,
        shares_gpu: Bool,
        fused_shared_expert: Bool,
        protocol: Int,
        partial_dtype: DType,
    ](
        output_tokens: OutputTensor[dtype=combine_dtype, rank=2, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[dtype=combine_dtype, rank=2, ...],
        router_weights: InputTensor[dtype=DType.float32, rank=2, ...],
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_combine_wait_kernel_api[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            fused_shared_expert=fused_shared_expert,
            protocol=protocol,
            partial_dtype=partial_dtype,
            n_sms=n_sms,
            shares_gpu=shares_gpu,
        ](
            output_tokens.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            router_weights.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
            SharedRows(
                BytePointer(unsafe_from_address=Int(input_tokens.unsafe_ptr())),
                input_tokens.dim_size(0),
            ),
        )


@extensibility.register("max_ep.combine")
struct Combine:
    """Sends rows back and reduces them in one launch."""

    @staticmethod
    def execute[
        target: StaticString,
        combine_dtype: DType,
        hidden_size: Int,
        top_k: Int,
        n_experts: Int,
        max_tokens_per_rank: Int,
        n_gpus_per_node: Int,
        n_nodes: Int,
        n_sms: Int,
        fused_shared_expert: Bool,
        protocol: Int,
        partial_dtype: DType,
    ](
        output_tokens: OutputTensor[dtype=combine_dtype, rank=2, ...],
        atomic_counters: WordsTensor,
        order: WordsTensor,
        input_tokens: InputTensor[dtype=combine_dtype, rank=2, ...],
        src_info: InputTensor[dtype=DType.int32, rank=2, ...],
        router_weights: InputTensor[dtype=DType.float32, rank=2, ...],
        send_ptrs: PointersTensor,
        recv_ptrs: PointersTensor,
        recv_count_ptrs: PointersTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_combine_kernel_api[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            fused_shared_expert=fused_shared_expert,
            protocol=protocol,
            partial_dtype=partial_dtype,
            n_sms=n_sms,
        ](
            output_tokens.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            input_tokens.to_tile_tensor(),
            src_info.to_tile_tensor(),
            router_weights.to_tile_tensor(),
            send_ptrs.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
        )
