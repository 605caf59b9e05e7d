# SPDX-License-Identifier: Apache-2.0
"""The MAX custom op that watches."""
import extensibility
from extensibility import (
    _MutableInputTensor as MutableInputTensor,
    InputTensor,
    OutputTensor,
)
from max.gpu.host import DeviceContext

from .watch import ep_watch_kernel_api


@extensibility.register("max_ep.watch")
struct Watch:
    """Measures how long a rank waits for each peer."""

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
        is_combine: Bool,
    ](
        waits_ns: OutputTensor[dtype=DType.int64, rank=1, ...],
        atomic_counters: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        order: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        recv_ptrs: InputTensor[dtype=DType.uint64, rank=1, ...],
        recv_count_ptrs: InputTensor[dtype=DType.uint64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op on one rank; see the launcher of its name."""
        ep_watch_kernel_api[
            combine_dtype,
            hidden_size,
            top_k,
            n_experts,
            max_tokens_per_rank,
            n_gpus_per_node,
            n_nodes,
            target,
            protocol,
            partial_dtype,
            is_combine,
        ](
            waits_ns.to_tile_tensor(),
            atomic_counters.to_tile_tensor(),
            recv_ptrs.to_tile_tensor(),
            recv_count_ptrs.to_tile_tensor(),
            ctx,
        )
