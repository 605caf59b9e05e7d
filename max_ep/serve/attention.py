# SPDX-License-Identifier: Apache-2.0
"""Attention of our decoder: what a checkpoint's description says, on a paged cache."""

from __future__ import annotations

from collections.abc import Iterable

from max.dtype import DType
from max.graph import (
    DeviceRef,
    ShardingStrategy,
    TensorType,
    TensorValue,
    Weight,
    ops,
)
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import (
    flash_attention_ragged,
    rope_ragged,
    store_k_cache_ragged,
    store_v_cache_ragged,
)
from max.nn.kv_cache import KVCacheParams, PagedCacheValues
from max.nn.layer import Module, Shardable
from max.nn.linear import Linear
from max.nn.stacked_linear import StackedLinear

from ..checkpoint.decoder import Attention
from ..experts import PACKAGE
from ..extension import add_op

_PROJECTIONS = ["q_proj", "k_proj", "v_proj"]


class HeadsAttention(Module, Shardable):
    """Grouped attention of a layer.

    On GPUs heads are normalized, rotated and cached in one op, where that is all.
    """

    def __init__(
        self,
        of: Attention,
        hidden_size: int,
        eps: float,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
    ) -> None:
        super().__init__()
        self._made_of = of, hidden_size, eps, kv_params, dtype
        self._of, self._eps, self._kv_params = of, eps, kv_params
        queries, keys = of.n_heads * of.head_dim, of.n_kv_heads * of.head_dim
        self.qkv_proj = StackedLinear(
            in_dim=hidden_size,
            out_dims=[queries, keys, keys],
            names=_PROJECTIONS,
            dtype=dtype,
            device=device,
            has_bias=of.has_bias,
        )
        self.o_proj = Linear(
            queries, hidden_size, dtype, device, has_bias=of.has_output_bias
        )
        sizes = {}
        if of.norm:
            whole = of.norm == "all"
            sizes["q_norm.weight"] = [queries if whole else of.head_dim]
            sizes["k_norm.weight"] = [keys if whole else of.head_dim]
        if of.has_sinks:
            sizes["sinks"] = [of.n_heads]
        self._vectors = {name.partition(".")[0]: name for name in sizes}
        for attribute, name in self._vectors.items():
            setattr(self, attribute, Weight(name, dtype, sizes[name], device))
        if of.has_gate:
            self.g_proj = Linear(hidden_size, of.n_heads, dtype, device)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        return self.o_proj.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        if not strategy.is_replicate:
            raise ValueError("each GPU has all heads, of its own requests")
        for name in self._parts():
            getattr(self, name).sharding_strategy = strategy

    def _parts(self) -> list[str]:
        """Returns the names of what has weights."""
        gate = ["g_proj"] * self._of.has_gate
        return ["qkv_proj", "o_proj", *self._vectors, *gate]

    def shard(self, devices: Iterable[DeviceRef]) -> list[HeadsAttention]:
        """Returns a copy for each device."""
        devices, names = list(devices), self._parts()
        shards = {name: getattr(self, name).shard(devices) for name in names}
        copies = []
        for i, device in enumerate(devices):
            copy = HeadsAttention(*self._made_of, device)
            for name in names:
                setattr(copy, name, shards[name][i])
            copies.append(copy)
        return copies

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        qkv: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Returns ``[n_tokens, hidden_size]`` of ``x`` of these sizes, and of
        ``qkv_proj`` of it."""
        of = self._of
        where = layer_idx, kv_collection, input_row_offsets
        freqs = ops.cast(freqs_cis, qkv.dtype).to(qkv.device)
        is_one_op = self._is_plain() and self._kv_params.dtype == qkv.dtype
        is_one_op = is_one_op and not qkv.device.is_cpu()
        heads = self._one_op if is_one_op else self._many_ops
        window = {}
        mask = MHAMaskVariant.CAUSAL_MASK
        if of.window is not None:
            mask = MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
            window["local_window_size"] = of.window
        if of.has_sinks:
            window["sink_weights"] = TensorValue(self.sinks)
        attended = flash_attention_ragged(
            self._kv_params,
            input=heads(qkv, freqs, *where),
            kv_collection=kv_collection,
            layer_idx=layer_idx,
            input_row_offsets=input_row_offsets,
            mask_variant=mask,
            scale=of.head_dim**-0.5,
            **window,
        )
        if of.has_gate:
            gates = ops.cast(self.g_proj(x), DType.float32)
            gates = ops.unsqueeze(_softplus(gates), -1).cast(attended.dtype)
            attended = attended * gates
        return self.o_proj(ops.reshape(attended, [x.shape[0], -1]))

    def _is_plain(self) -> bool:
        """Whether heads are normalized and rotated as a whole, of sizes that are few
        in models, and one over the norm's epsilon is an integer, as the op has it."""
        of, of_one = self._of, 1 / self._eps
        return (
            abs(round(of_one) - of_one) < 1e-6 * of_one
            and of.norm == "head"
            and of.clip is None
            and of.rope.dim == of.head_dim
            and of.head_dim in (32, 64, 128, 256)
        )

    def _one_op(
        self,
        qkv: TensorValue,
        freqs: TensorValue,
        layer_idx: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        values = [
            kv_collection.kv_blocks,
            qkv,
            input_row_offsets,
            freqs,
            kv_collection.cache_lengths,
            kv_collection.lookup_table,
            TensorValue(self.q_norm),
            TensorValue(self.k_norm),
            kv_collection.page_stride,
            layer_idx.reshape([1]),
        ]
        size = self._of.head_dim
        result = TensorType(
            qkv.dtype, [qkv.shape[0], self._of.n_heads, size], qkv.device
        )
        (q,) = add_op(
            "norm_rope_store",
            qkv.device,
            values,
            [result],
            PACKAGE,
            size=size,
            epsilon_of_one=round(1 / self._eps),
        )
        return q

    def _many_ops(
        self,
        qkv: TensorValue,
        freqs: TensorValue,
        layer_idx: TensorValue,
        kv_collection: PagedCacheValues,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        of = self._of
        queries, keys = of.n_heads * of.head_dim, of.n_kv_heads * of.head_dim
        q, k, v = ops.split(qkv, [queries, keys, keys], axis=1)
        if of.norm == "all":
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if of.clip is not None:
            q, k, v = (ops.min(ops.max(x, -of.clip), of.clip) for x in (q, k, v))
        q, k, v = (x.reshape([x.shape[0], -1, of.head_dim]) for x in (q, k, v))
        if of.norm == "head":
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k = (
            self._rotated(x, freqs, kv_collection.cache_lengths, input_row_offsets)
            for x in (q, k)
        )
        store_k_cache_ragged(kv_collection, k, input_row_offsets, layer_idx)
        store_v_cache_ragged(kv_collection, v, input_row_offsets, layer_idx)
        return q

    def _normed(self, x: TensorValue, weight: Weight) -> TensorValue:
        return ops.rms_norm(x, weight=TensorValue(weight), epsilon=self._eps)

    def _rotated(
        self,
        x: TensorValue,
        freqs: TensorValue,
        begins: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Rotates the first elements of each head."""
        dim = self._of.rope.dim
        turned = rope_ragged(
            x if dim == self._of.head_dim else x[:, :, :dim],
            input_row_offsets,
            begins,
            freqs,
            interleaved=False,
        )
        if dim == self._of.head_dim:
            return turned
        return ops.concat([turned, x[:, :, dim:]], axis=2)


def _softplus(x: TensorValue) -> TensorValue:
    """Returns ``log(1 + exp(x))``, which does not overflow."""
    return ops.max(x, 0) + ops.log1p(ops.exp(-ops.abs(x)))
