# SPDX-License-Identifier: Apache-2.0
"""A routed MoE layer: router, dispatch, SwiGLU experts, combine.

Each step is one call that you can copy and change. ``graphs/moe_layer.py`` is a program
that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.dtype import DType
from max.graph import TensorValue

from ..experts import grouped_swiglu, linear
from .manager import EPBatchManager
from .quantized import dequantize
from .routing import softmax_top_k


def through_experts(
    manager: EPBatchManager,
    xs: Sequence[TensorValue],
    ids: Sequence[TensorValue],
    weights: Sequence[TensorValue],
    experts: Callable[[int, tuple[TensorValue, ...]], TensorValue],
    layer: int = 0,
) -> list[TensorValue]:
    """Dispatches, runs experts, and combines, on all ranks of this process.

    Of each rank, ``xs`` are tokens ``[n_tokens, hidden_size]``, ``ids`` and ``weights``
    the router's ``[n_tokens, top_k]``. ``experts`` makes a rank's expert rows of what
    dispatch delivered to it. With ``eplb_enabled``, ``ids`` are of logical experts, and
    ``layer`` is that of the placement. Returns the weighted sums of each rank's tokens;
    with ``use_allreduce`` of the rows of the rank's own experts.
    """
    ranks = list(range(len(xs)))
    ids = [value.cast(DType.int32) for value in ids]
    if manager.config.eplb_enabled:
        ids = [manager.ep_balance_ids(ids[rank], rank, layer) for rank in ranks]
    weights = [value.cast(DType.float32) for value in weights]
    # With sums, the ranks of the experts weight the rows.
    of_dispatch, of_combine = (
        (weights, None) if manager.config.combines_sums else (None, weights)
    )
    dispatched = manager.ep_dispatch_all(xs, ids, ranks, router_weights=of_dispatch)
    rows = [experts(rank, dispatched[rank]) for rank in ranks]
    return manager.ep_combine_all(rows, of_combine, ranks)


def moe_layer(
    manager: EPBatchManager,
    x: Sequence[TensorValue],
    router: TensorValue,
    experts: Sequence[tuple[TensorValue, TensorValue]],
    layer: int = 0,
) -> tuple[list[TensorValue], list[TensorValue]]:
    """Runs the layer on all ranks of this process.

    ``x`` is ``[n_tokens, hidden_size]`` of each, ``router`` ``[n_experts,
    hidden_size]``, both float32; ``experts`` are ``gate_up`` and ``down`` of each, as
    ``grouped_swiglu`` takes them. Where dispatch quantizes, experts get its rows in
    float32 again, and ``combine_dtype`` is float32. With
    ``eplb_enabled``, ``layer`` is that of the placement. Returns the results of each
    rank, ``[n_tokens, hidden_size]``, and its ``topk_ids``, of logical experts.
    """
    config = manager.config
    routed = [softmax_top_k(linear(tokens, router), config.top_k) for tokens in x]
    ids, weights = map(list, zip(*routed))

    def run_experts(rank: int, dispatched: tuple[TensorValue, ...]) -> TensorValue:
        rows, *groups = dispatched
        if config.is_quantized:
            scales, *groups = groups
            row_scales = groups.pop(0) if config.nvfp4_dyn_global_scales else None
            rows = dequantize(rows, scales, config, row_scales)
        return grouped_swiglu(rows, *experts[rank], *groups[:2])

    return through_experts(manager, x, ids, weights, run_experts, layer), ids
