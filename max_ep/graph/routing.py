# SPDX-License-Identifier: Apache-2.0
"""The router's top-k, as inputs of dispatch."""

from __future__ import annotations

from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    Graph,
    StaticDim,
    TensorType,
    TensorValue,
    ops,
)

from ..extension import load_ops
from ..formats import PLAIN_DTYPES
from ..limits import MAX_TOP_K

MAX_GPU_EXPERTS = 1024
"""A lane of a warp has 32 of them in registers."""


def balance_ids(
    topk_ids: TensorValue,
    log2phy: BufferValue,
    logcnt: BufferValue,
    layer: int | TensorValue,
) -> TensorValue:
    """Replaces the router's logical experts by physical ones, which dispatch takes.

    Choice ``k`` of token ``n`` goes to replica ``(n * top_k + k) % count``. Takes and
    returns ``[n_tokens, top_k]`` int32. Ids below 0 stay. An id that no expert has
    becomes -2, which dispatch drops and reports. The tables are those of all layers, on
    the rank's device; ``layer`` is a number, in a subgraph an int32 on the host.
    """
    if topk_ids.dtype != DType.int32:
        raise TypeError(f"topk_ids are {topk_ids.dtype}; balance_ids takes int32: cast")
    if not isinstance(layer, TensorValue):
        n_layers = int(logcnt.shape[0])
        if not 0 <= layer < n_layers:
            raise ValueError(f"layer={layer} must be in [0, num_moe_layers={n_layers})")
        layer = ops.constant([layer], DType.int32, DeviceRef.CPU())
    load_ops(Graph.current)
    (ids,) = ops.inplace_custom(
        "max_ep.balance_ids",
        device=topk_ids.device,
        values=[log2phy, logcnt, topk_ids, layer.reshape([1])],
        out_types=[topk_ids.type],
    )
    return ids.tensor


def own_ids(
    topk_ids: TensorValue, first: int, n_local: int, n_experts: int
) -> TensorValue:
    """Numbers the choices of a rank's own experts from 0, and drops others.

    Those of other ranks become -1, "no expert". Ids that no expert has become -2, which
    dispatch reports.
    """

    def all_of(value: int) -> TensorValue:
        return ops.constant(value, DType.int32, topk_ids.device)

    local = topk_ids - first
    is_own = ops.logical_and(local >= 0, local < n_local)
    is_known = ops.logical_and(topk_ids >= -1, topk_ids < n_experts)
    return ops.where(is_own, local, ops.where(is_known, all_of(-1), all_of(-2)))


def softmax_top_k(
    logits: TensorValue, top_k: int, renormalize: bool = True
) -> tuple[TensorValue, TensorValue]:
    """Chooses the experts of each token by the softmax of a router's logits.

    One op in place of a softmax, ``ops.top_k``, a sum, a division and casts. All sums
    are in float32. As transformers' ``Qwen3MoeTopKRouter`` defines it, with
    ``norm_topk_prob`` for ``renormalize``. Not for routers with a sigmoid, a bias or
    groups of experts; MAX has kernels for those.

    Args:
        logits: ``[n_tokens, n_experts]``, float32 or bfloat16; on GPUs up to 1024
            experts.
        top_k: Experts of a token, up to 32.
        renormalize: Whether a token's weights are divided by their sum.

    Returns:
        Expert ids, ``[n_tokens, top_k]`` int32, and weights, float32: by
        falling logit, of equal ones the lower id first. NaN counts as the largest. A
        token with NaN, with an infinite logit or with nothing but ``-inf`` has ids of
        experts that there are, and weights of NaN.
    """
    if logits.dtype not in PLAIN_DTYPES:
        raise TypeError(
            f"logits are {logits.dtype}; softmax_top_k takes float32 or bfloat16: cast"
        )
    if logits.rank != 2 or not isinstance(logits.shape[1], StaticDim):
        raise ValueError(
            f"logits are {logits.shape}; softmax_top_k takes [n_tokens, n_experts] "
            "with a number of experts known to the graph"
        )
    n_tokens, n_experts = logits.shape[0], int(logits.shape[1])
    if not 1 <= top_k <= min(n_experts, MAX_TOP_K):
        raise ValueError(
            f"top_k={top_k} of {n_experts} experts; it must be at least 1, and at most "
            f"{MAX_TOP_K} and the number of experts"
        )
    if n_experts > MAX_GPU_EXPERTS and not logits.device.is_cpu():
        raise ValueError(
            f"{n_experts} experts; on GPUs softmax_top_k takes up to "
            f"{MAX_GPU_EXPERTS}: use ops.softmax and ops.top_k"
        )
    load_ops(Graph.current)
    types = [
        TensorType(dtype, [n_tokens, top_k], logits.device)
        for dtype in (DType.int32, DType.float32)
    ]
    ids, weights = ops.custom(
        "max_ep.softmax_top_k",
        device=logits.device,
        values=[logits],
        out_types=types,
        parameters=dict(n_experts=n_experts, top_k=top_k, renormalize=renormalize),
    )
    return ids.tensor, weights.tensor
