# SPDX-License-Identifier: Apache-2.0
"""The MAX custom ops of the router's top-k, and of balanced experts.

Ops that read a placement take the tables of all layers, and the layer on the host.
"""
import extensibility
from extensibility import (
    _MutableInputTensor as MutableInputTensor,
    InputTensor,
    OutputTensor,
)
from max.gpu.host import DeviceContext

from ..protocol.kernel_argument import ImmPointer, unused
from ..work.for_each import for_each
from .routing import ChooseExperts, Replicas, ToReplicas

comptime Log2PhyTensor = MutableInputTensor[dtype=DType.int32, rank=3, ...]
"""Physical experts `[n_layers, n_logical, max_replicas]`."""

comptime LogcntTensor = MutableInputTensor[dtype=DType.int32, rank=2, ...]
"""Replicas of each expert, `[n_layers, n_logical]`."""

comptime LayerTensor = InputTensor[dtype=DType.int32, rank=1, ...]
"""The layer, `[1]`, on the host."""


def _replicas_of(
    log2phy: Log2PhyTensor, logcnt: LogcntTensor, layer: LayerTensor
) raises -> Replicas:
    """Takes a layer's replicas out of the tables of all layers."""
    var n_logical, max_replicas = log2phy.dim_size(1), log2phy.dim_size(2)
    var i = Int(layer.unsafe_ptr()[unsafe_offset=0])
    if not 0 <= i < logcnt.dim_size(0):
        raise Error(
            t"max_ep: layer {i} of a placement of {logcnt.dim_size(0)} MoE layers"
        )
    comptime Table = ImmPointer[Int32]
    var first = Table(unsafe_from_address=Int(log2phy.unsafe_ptr()))
    var counts = Table(unsafe_from_address=Int(logcnt.unsafe_ptr()))
    return Replicas(
        first.unsafe_offset(i * n_logical * max_replicas),
        counts.unsafe_offset(i * n_logical),
        Int32(n_logical),
        Int32(max_replicas),
    )


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
        var work = ChooseExperts[logits.dtype, n_experts, top_k, renormalize, False](
            {unsafe_from_address = Int(ids.unsafe_ptr())},
            {unsafe_from_address = Int(weights.unsafe_ptr())},
            {unsafe_from_address = Int(logits.unsafe_ptr())},
            unused[Replicas](),
        )
        for_each[target](logits.dim_size(0), work, ctx)


@extensibility.register("max_ep.softmax_top_k_balanced")
struct SoftmaxTopKBalanced:
    """The same; a replica stands for each expert."""

    @staticmethod
    def execute[
        target: StaticString, n_experts: Int, top_k: Int, renormalize: Bool
    ](
        ids: OutputTensor[dtype=DType.int32, rank=2, ...],
        weights: OutputTensor[dtype=DType.float32, rank=2, ...],
        log2phy: Log2PhyTensor,
        logcnt: LogcntTensor,
        logits: InputTensor[rank=2, ...],
        layer: LayerTensor,
        ctx: DeviceContext,
    ) raises:
        var work = ChooseExperts[logits.dtype, n_experts, top_k, renormalize, True](
            {unsafe_from_address = Int(ids.unsafe_ptr())},
            {unsafe_from_address = Int(weights.unsafe_ptr())},
            {unsafe_from_address = Int(logits.unsafe_ptr())},
            _replicas_of(log2phy, logcnt, layer),
        )
        for_each[target](logits.dim_size(0), work, ctx)


@extensibility.register("max_ep.balance_ids")
struct BalanceIds:
    """Replaces logical experts by replicas."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        physical: OutputTensor[dtype=DType.int32, rank=2, ...],
        log2phy: Log2PhyTensor,
        logcnt: LogcntTensor,
        ids: InputTensor[dtype=DType.int32, rank=2, ...],
        layer: LayerTensor,
        ctx: DeviceContext,
    ) raises:
        var work = ToReplicas(
            {unsafe_from_address = Int(physical.unsafe_ptr())},
            {unsafe_from_address = Int(ids.unsafe_ptr())},
            _replicas_of(log2phy, logcnt, layer),
        )
        for_each[target](ids.dim_size(0) * ids.dim_size(1), work, ctx)
