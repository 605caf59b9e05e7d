# SPDX-License-Identifier: Apache-2.0
"""The MAX custom op of a router's choice."""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from .routing import launch_softmax_top_k


@extensibility.register("max_ep.softmax_top_k")
struct SoftmaxTopK:
    """Chooses the experts of each token, and weighs them."""

    @staticmethod
    def execute[
        target: StaticString, n_experts: Int, top_k: Int, renormalize: Bool
    ](
        ids: OutputTensor[dtype=DType.int32, rank=2, ...],
        weights: OutputTensor[dtype=DType.float32, rank=2, ...],
        logits: InputTensor[rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op; see the launcher of its name."""
        launch_softmax_top_k[target, logits.dtype, n_experts, top_k, renormalize](
            {unsafe_from_address = Int(ids.unsafe_ptr())},
            {unsafe_from_address = Int(weights.unsafe_ptr())},
            {unsafe_from_address = Int(logits.unsafe_ptr())},
            logits.dim_size(0),
            ctx,
        )
