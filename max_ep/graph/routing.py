# SPDX-License-Identifier: Apache-2.0
"""The router's top-k, as inputs of dispatch."""

from __future__ import annotations

from dataclasses import dataclass

from max.dtype import DType
from max.graph import BufferValue, DeviceRef, StaticDim, TensorType, TensorValue, ops

from ..extension import add_op
from ..formats import PLAIN_DTYPES
from ..limits import MAX_TOP_K, is_integer
from ..plural import counted
from .checks import check_value

MAX_GPU_EXPERTS = 1024
"""A lane of a warp has 32 of them in registers."""


@dataclass(frozen=True)
class Replicas:
    """The placement of a layer's experts on a rank's device: what
    ``EPBatchManager.eplb_replicas`` returns."""

    log2phy: BufferValue
    """int32 ``[num_moe_layers, num_logical_experts, max_replicas]``."""
    logcnt: BufferValue
    """int32 ``[num_moe_layers, num_logical_experts]``."""
    layer: int | TensorValue
    """The layer, ``[0, num_moe_layers)``; in a subgraph an int32 on the host."""

    def operands(self) -> tuple[list[BufferValue], TensorValue]:
        """Returns the tables, and the layer as the ops take it."""
        layer = self.layer
        if not isinstance(layer, TensorValue):
            n_layers = int(self.logcnt.shape[0])
            if not is_integer(layer) or not 0 <= layer < n_layers:
                raise ValueError(
                    f"layer={layer!r} must be an integer in [0, num_moe_layers="
                    f"{n_layers})"
                )
            layer = ops.constant([layer], DType.int32, DeviceRef.CPU())
        return [self.log2phy, self.logcnt], layer.reshape([1])


def balance_ids(topk_ids: TensorValue, replicas: Replicas) -> TensorValue:
    """Replaces the router's logical experts by physical ones, which dispatch takes.

    Choice ``k`` of token ``n`` goes to replica ``(n * top_k + k) % count``. Takes and
    returns ``[n_tokens, top_k]`` int32. Ids below 0 stay. An id that no expert has
    becomes another that no expert has: dispatch drops it, and reports what it was.
    """
    check_value(topk_ids, "topk_ids", DType.int32, [None, None], None)
    tables, layer = replicas.operands()
    values = [*tables, topk_ids, layer]
    return add_op("balance_ids", topk_ids.device, values, [topk_ids.type])[0]


def own_ids(
    topk_ids: TensorValue, first: int, n_local: int, n_experts: int
) -> TensorValue:
    """Numbers the choices of a rank's own experts from 0. Those of other ranks become
    -1. Ids that no expert has stay, for dispatch to report."""
    local = topk_ids - first
    is_own = ops.logical_and(local >= 0, local < n_local)
    is_known = ops.logical_and(topk_ids >= -1, topk_ids < n_experts)
    elsewhere = ops.constant(-1, DType.int32, topk_ids.device)
    return ops.where(is_own, local, ops.where(is_known, elsewhere, topk_ids))


def softmax_top_k(
    logits: TensorValue,
    top_k: int,
    renormalize: bool = True,
    replicas: Replicas | None = None,
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
        replicas: With balanced experts, the layer's placement: ids become those of
            physical experts, as :func:`balance_ids` makes them.

    Returns:
        Expert ids, ``[n_tokens, top_k]`` int32, and weights, float32: by
        falling logit, of equal ones the lower id first. NaN counts as the largest. A
        token with NaN, with an infinite logit or with nothing but ``-inf`` has ids of
        experts that there are, and weights of NaN.

    Raises:
        TypeError: If the dtype is not one of those.
        ValueError: If the number of experts is not known, less than ``top_k``, or
            more than a GPU's kernel takes, or ``top_k`` is out of range.
    """
    check_value(logits, "logits", PLAIN_DTYPES, [None, None], None)
    if not isinstance(logits.shape[1], StaticDim):
        raise ValueError(
            f"logits are {logits.shape}; softmax_top_k takes [n_tokens, n_experts] "
            "with a number of experts known to the graph"
        )
    n_tokens, n_experts = logits.shape[0], int(logits.shape[1])
    if not is_integer(top_k) or not 1 <= top_k <= min(n_experts, MAX_TOP_K):
        raise ValueError(
            f"top_k={top_k!r} of {counted(n_experts, 'expert')}; it must be an "
            f"integer, at least 1, and at most {MAX_TOP_K} and the number of experts"
        )
    if n_experts > MAX_GPU_EXPERTS and not logits.device.is_cpu():
        raise ValueError(
            f"{counted(n_experts, 'expert')}; on GPUs softmax_top_k takes up to "
            f"{MAX_GPU_EXPERTS}: use ops.softmax and ops.top_k"
        )
    shape, dtypes = [n_tokens, top_k], (DType.int32, DType.float32)
    types = [TensorType(dtype, shape, logits.device) for dtype in dtypes]
    parameters = dict(n_experts=n_experts, top_k=top_k, renormalize=renormalize)
    name, values = "softmax_top_k", [logits]
    if replicas is not None:
        tables, layer = replicas.operands()
        name, values = "softmax_top_k_balanced", [*tables, logits, layer]
    ids, weights = add_op(name, logits.device, values, types, **parameters)
    return ids, weights
