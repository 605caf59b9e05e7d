# SPDX-License-Identifier: Apache-2.0
"""MoE layers of our decoder: a router, dispatch, experts, combine, a shared expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from max.dtype import DType
from max.graph import (
    DeviceRef,
    ShardingStrategy,
    StaticDim,
    TensorValue,
    Weight,
    ops,
)
from max.nn.layer import LayerList
from max.nn.linear import Linear
from max.nn.moe import MoE, MoEGate

from .. import EPBatchManager, EPConfig, softmax_top_k
from ..checkpoint.decoder import Moe
from ..experts import grouped_swiglu, routed_swiglu
from ..graph.moe import through_experts
from .held import HeldExperts
from .hopper import experts_anywhere, fp8_experts, grouped_matmul_of_any_size
from .routing import chosen_by

_ALPHA, _LIMIT = 1.702, 7.0
"""Constants of the activation of gpt-oss, as transformers has them."""


class Router(MoEGate):
    """Chooses experts as a checkpoint's description says."""

    def __init__(self, *, of: Moe, is_sharding: bool = False, **sizes: Any) -> None:
        super().__init__(is_sharding=is_sharding, **sizes)
        self._made_of = dict(of=of, **sizes)
        self._of, self._names = of.router, []
        n, device = [of.n_experts], self.devices[0]
        if self._of.has_bias:
            self._names.append("bias")
            self.bias = Weight("gate_score.bias", self.dtype, n, device)
        if of.has_correction:
            self._names.append("e_score_correction_bias")
            self.e_score_correction_bias = Weight(
                "e_score_correction_bias", DType.float32, n, device
            )

    def _set_sharding_strategy(self, strategy: ShardingStrategy) -> None:
        super()._set_sharding_strategy(strategy)
        for name in self._names:
            getattr(self, name).sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> Sequence[Router]:
        """Returns a copy for each device."""
        devices = list(devices)
        names = ["gate_score", *self._names]
        shards = {name: getattr(self, name).shard(devices) for name in names}
        copies = []
        for i, device in enumerate(devices):
            made_of = self._made_of | {"devices": [device]}
            copy = Router(is_sharding=True, **made_of)
            for name in names:
                setattr(copy, name, shards[name][i])
            copies.append(copy)
        return copies

    @property
    def first(self) -> Linear | None:
        """Returns the layer whose result is the logits, if there is one."""
        return self.gate_score if self._of.scores == "softmax" else None

    def __call__(
        self, hidden_state: TensorValue, logits: TensorValue | None = None
    ) -> tuple[TensorValue, TensorValue]:
        """Returns ids, int32, and weights, float32: ``[n_tokens, top_k]``; ``logits``
        are ``first`` of the hidden state."""
        if self._of.scores == "softmax":
            if logits is None:
                logits = self.gate_score(hidden_state)
            if self._of.has_bias:
                logits = logits + self.bias
            top_k = self.num_experts_per_token
            return softmax_top_k(logits, top_k, self._of.renormalizes)
        return self._by_sigmoid(hidden_state)

    def _by_sigmoid(self, x: TensorValue) -> tuple[TensorValue, TensorValue]:
        of = self._of
        if x.device.is_cpu():
            logits = self.gate_score(x)
        else:  # not rounded to bfloat16, which may change a choice
            weight = TensorValue(self.gate_score.weight).cast(DType.float32)
            logits = x.cast(DType.float32) @ ops.transpose(weight, 0, 1)
        if of.softcap:
            logits = ops.tanh(logits / of.softcap) * of.softcap
        scores = ops.sigmoid(logits)
        bias = None
        if "e_score_correction_bias" in self._names:
            bias = TensorValue(self.e_score_correction_bias)
        return chosen_by(of, scores, bias, self.num_experts_per_token)


class DecoderMoe(MoE):
    """MAX's MoE layer, which holds the weights, as our decoder runs it."""

    def __init__(self, **kwargs: Any) -> None:
        """Makes MAX's ``MoE``; ``gate_cls`` is a ``partial`` of :class:`Router`."""
        super().__init__(**kwargs)
        self.of: Moe = kwargs["gate_cls"].keywords["of"]
        sizes = {}
        if self.of.has_shared_gate:
            sizes["shared_gate"] = [1, self.hidden_dim]
        if self.of.is_clamped:
            sizes["experts.gate_up_proj_bias"] = [self.num_experts, 2 * self.moe_dim]
            sizes["experts.down_proj_bias"] = [self.num_experts, self.hidden_dim]
        self._vectors = {name.rpartition(".")[2]: name for name in sizes}
        dtype = self.shared_experts_dtype
        for attribute, name in self._vectors.items():
            weight = Weight(name, dtype, sizes[name], self.devices[0])
            setattr(self, attribute, weight)

    def _set_sharding_strategy(self, strategy: ShardingStrategy) -> None:
        super()._set_sharding_strategy(strategy)
        each = ShardingStrategy.replicate(strategy.num_devices)
        for name in self._vectors:
            getattr(self, name).sharding_strategy = each

    def shard(self, devices: Iterable[DeviceRef]) -> list[DecoderMoe]:
        """Returns a layer for each device, with its own experts."""
        devices = list(devices)
        shards = super().shard(devices)
        for name in self._vectors:
            for shard, weight in zip(shards, getattr(self, name).shard(devices)):
                setattr(shard, name, weight)
        return shards

    def with_shared(self, x: TensorValue, routed: TensorValue) -> TensorValue:
        """Adds the shared expert's result to that of the others."""
        if not self.has_shared_experts:
            return routed
        shared = self.shared_experts(x)
        if self.of.has_shared_gate:
            wide = x.cast(DType.float32) * TensorValue(self.shared_gate)
            gate = ops.sigmoid(ops.sum(wide, axis=-1))
            shared = shared * gate.cast(shared.dtype)
        return routed + shared

    def experts_of(
        self, config: EPConfig, rank: int, dispatched: tuple[TensorValue, ...]
    ) -> TensorValue:
        """Runs the experts of a rank on the rows it received; the layer has those of
        all ranks, or its own."""
        n = config.n_local_experts
        has_all = config.n_ranks > 1 and len(self.experts) > n
        own = slice(rank * n, (rank + 1) * n) if has_all else slice(0, None)
        rows, *groups = dispatched
        if config.is_quantized:
            return fp8_experts(self, rows, *groups)
        if self.of.is_clamped:
            return self._clamped(rank * n, own, rows, *groups[:2])
        if rows.device.is_cpu():
            weights = self.gate_up_proj[own], self.down_proj[own]
            return grouped_swiglu(rows, *weights, *groups[:2])
        n_rows = ops.shape_to_tensor(rows.shape)[0].cast(DType.uint32)
        return experts_anywhere(self, dispatched, rows, n_rows)

    def _clamped(
        self,
        first: int,
        own: slice,
        rows: TensorValue,
        row_offsets: TensorValue,
        expert_ids: TensorValue,
    ) -> TensorValue:
        """Runs experts of gpt-oss, of which this rank has those from ``first`` on."""
        groups = row_offsets, expert_ids
        of_row = expert_of_rows(rows, *groups) + first
        both = grouped_matmul_of_any_size(rows, self.gate_up_proj[own], *groups)
        both = both.cast(DType.float32)
        biases = ops.gather(TensorValue(self.gate_up_proj_bias), of_row, axis=0)
        biases = biases.cast(DType.float32)
        gate = ops.min(both[:, : self.moe_dim] + biases[:, 0::2], _LIMIT)
        up = both[:, self.moe_dim :] + biases[:, 1::2]
        up = ops.min(ops.max(up, -_LIMIT), _LIMIT)
        activated = ((up + 1) * gate * ops.sigmoid(gate * _ALPHA)).cast(rows.dtype)
        down = self.down_proj[own]
        results = grouped_matmul_of_any_size(activated, down, *groups)
        return results + ops.gather(TensorValue(self.down_proj_bias), of_row, axis=0)


class HeldMoe(DecoderMoe):
    """A layer whose experts' weights are inputs of the graph."""

    def _init_experts(self) -> None:
        self._all_experts, self.experts = [], LayerList([])
        self.num_local_experts = 0  # MAX gives a shard none


def expert_of_rows(
    rows: TensorValue, row_offsets: TensorValue, expert_ids: TensorValue
) -> TensorValue:
    """Returns the expert of each row, int32 ``[n_rows]``."""
    n_rows, device = rows.shape[0], rows.device
    end: Any = ops.shape_to_tensor(rows.shape)[0]
    if isinstance(n_rows, StaticDim):  # as dispatch gives them
        end = int(n_rows)
    how = dict(out_dim=n_rows, device=device, dtype=DType.int64)
    each = ops.range(0, end, 1, **how)
    begins = row_offsets[1:-1].cast(DType.int64)
    is_behind = ops.unsqueeze(each, 1) >= ops.unsqueeze(begins, 0)
    places = ops.squeeze(ops.sum(is_behind.cast(DType.int32), axis=1), 1)
    return ops.gather(expert_ids, places, axis=0)


def run_moe(
    shards: Sequence[DecoderMoe],
    xs: Sequence[TensorValue],
    logits: Sequence[TensorValue | None],
    manager: EPBatchManager,
    layer: int,
    gathers: bool,
    held: HeldExperts | None = None,
) -> list[TensorValue]:
    """Runs a layer on each device's tokens, ``[n_tokens, hidden_size]``.

    Of the layers with experts it is number ``layer``. ``logits`` are those of the
    routers, where they are known. On the CPU all ranks share the
    device, and each has a slice of the tokens. With ``gathers`` experts gather their
    tokens, in place of dispatch and combine. ``held`` are the experts' weights, if they
    may move.
    """
    config = manager.config
    routed = [shard.gate(*values) for shard, *values in zip(shards, xs, logits)]
    if gathers:
        (moe,), (x,), ((ids, weights),) = shards, xs, routed
        sums = [routed_swiglu(x, ids, weights, moe.gate_up_proj, moe.down_proj)]
    else:
        of_ranks = [[x, *choices] for x, choices in zip(xs, routed)]
        if len(xs) == 1:
            sliced = [_slices(values, config.n_ranks) for values in of_ranks[0]]
            of_ranks = list(zip(*sliced))

        def experts(rank: int, dispatched: tuple[TensorValue, ...]) -> TensorValue:
            if held is not None:
                return held.run(layer, rank, dispatched)
            return shards[min(rank, len(shards) - 1)].experts_of(
                config, rank, dispatched
            )

        sums = through_experts(manager, *map(list, zip(*of_ranks)), experts, layer)
        if len(xs) == 1 < len(sums):
            sums = [ops.concat(sums)]
    sums = [ops.rebind(total, x.shape).cast(x.dtype) for total, x in zip(sums, xs)]
    return [shard.with_shared(x, y) for shard, x, y in zip(shards, xs, sums)]


def _slices(values: TensorValue, n: int) -> list[TensorValue]:
    """Divides rows into ``n`` slices of equal size; the last ones may be shorter."""
    if n == 1:
        return [values]
    total = ops.shape_to_tensor(values.shape)[0]
    size = (total + (n - 1)) // n
    zero = ops.constant(0, total.dtype, total.device)
    ends = [zero, *(ops.min(size * i, total) for i in range(1, n)), total]
    return [
        ops.slice_tensor(values, [(slice(begin, end), f"tokens_of_rank_{i}"), ...])
        for i, (begin, end) in enumerate(zip(ends, ends[1:]))
    ]
