# SPDX-License-Identifier: Apache-2.0
"""Qwen3's attention with one pass between its first product and attention itself."""

from __future__ import annotations

from typing import Any

from max.graph import Graph, TensorType, TensorValue, ops
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import flash_attention_ragged
from max.nn.kv_cache import PagedCacheValues
from max.pipelines.architectures.qwen3.layers.attention import Qwen3Attention

from ..experts import PACKAGE
from ..extension import load_ops


class OnePassAttention(Qwen3Attention):
    """MAX's; on GPUs heads are normalized, rotated and cached in one op for four."""

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        freqs_cis: TensorValue,
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """Returns ``[n_tokens, hidden_size]`` of ``x`` of these sizes."""
        kv = self.kv_params
        takes = kv.dtype == x.dtype and kv.head_dim in (32, 64, 128, 256)
        if self.rope.interleaved or not takes or x.device.is_cpu():
            return super().__call__(
                layer_idx, x, kv_collection, freqs_cis, input_row_offsets
            )
        qkv = self.qkv_proj(x)

        def here(value: Any) -> TensorValue:
            return ops.cast(value, qkv.dtype).to(qkv.device)

        load_ops(Graph.current, PACKAGE)
        q = ops.inplace_custom(
            "max_ep.norm_rope_store",
            device=qkv.device,
            values=[
                kv_collection.kv_blocks,
                qkv,
                input_row_offsets,
                here(freqs_cis),
                kv_collection.cache_lengths,
                kv_collection.lookup_table,
                here(self.q_norm.weight),
                here(self.k_norm.weight),
                kv_collection.page_stride,
                layer_idx.reshape([1]),
            ],
            out_types=[
                TensorType(
                    qkv.dtype, [qkv.shape[0], self.n_heads, kv.head_dim], qkv.device
                )
            ],
            parameters=dict(
                size=kv.head_dim, epsilon_of_one=round(1 / self.qk_norm_eps)
            ),
        )[0].tensor
        attended = flash_attention_ragged(
            kv,
            input=q,
            kv_collection=kv_collection,
            layer_idx=layer_idx,
            input_row_offsets=input_row_offsets,
            mask_variant=MHAMaskVariant.CAUSAL_MASK,
            scale=self.scale,
        )
        return self.o_proj(ops.reshape(attended, [x.shape[0], -1]))
