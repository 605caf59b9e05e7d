# SPDX-License-Identifier: Apache-2.0
"""The MAX op of the pass in front of attention."""
import extensibility
from extensibility import (
    _MutableInputTensor as MutableInputTensor,
    InputTensor,
    OutputTensor,
)
from max.gpu.host import DeviceContext

from .heads import Heads, launch_heads


@extensibility.register("max_ep.norm_rope_store")
struct NormRopeStore:
    """Normalizes and rotates heads; keys and values go into the KV cache.

    `n_q` heads are queries, and as many are keys as values. The layer and the distance of
    pages, in elements, are on the host. `epsilon` is one over `epsilon_of_one`.
    """

    @staticmethod
    def execute[
        target: StaticString, size: Int, epsilon_of_one: Int
    ](
        q: OutputTensor[rank=3, ...],
        cache: MutableInputTensor[dtype=q.dtype, rank=6, ...],
        qkv: InputTensor[dtype=q.dtype, rank=2, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        rotary: InputTensor[dtype=q.dtype, rank=2, ...],
        lengths: InputTensor[dtype=DType.uint32, rank=1, ...],
        pages: InputTensor[dtype=DType.uint32, rank=2, ...],
        q_weight: InputTensor[dtype=q.dtype, rank=1, ...],
        k_weight: InputTensor[dtype=q.dtype, rank=1, ...],
        page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
        layer: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var n_q, n_kv = q.dim_size(1), cache.dim_size(4)
        if qkv.dim_size(1) != (n_q + 2 * n_kv) * size or cache.dim_size(5) != size:
            raise Error("max_ep: norm_rope_store: shapes do not fit")
        var stride = Int(page_stride.unsafe_ptr()[unsafe_offset=0])
        var packed = 2 * cache.dim_size(2) * cache.dim_size(3) * n_kv * size
        var heads = Heads[q.dtype, size](
            q={unsafe_from_address = Int(q.unsafe_ptr())},
            cache={unsafe_from_address = Int(cache.unsafe_ptr())},
            qkv={unsafe_from_address = Int(qkv.unsafe_ptr())},
            row_offsets={unsafe_from_address = Int(row_offsets.unsafe_ptr())},
            rotary={unsafe_from_address = Int(rotary.unsafe_ptr())},
            lengths={unsafe_from_address = Int(lengths.unsafe_ptr())},
            pages={unsafe_from_address = Int(pages.unsafe_ptr())},
            q_weight={unsafe_from_address = Int(q_weight.unsafe_ptr())},
            k_weight={unsafe_from_address = Int(k_weight.unsafe_ptr())},
            n_tokens=qkv.dim_size(0),
            n_sequences=row_offsets.dim_size(0) - 1,
            n_q=n_q,
            n_kv=n_kv,
            max_pages=pages.dim_size(1),
            page_stride=stride if stride > 0 else packed,
            page_size=cache.dim_size(3),
            n_layers=cache.dim_size(2),
            layer=Int(layer.unsafe_ptr()[unsafe_offset=0]),
            epsilon=Float32(1) / Float32(epsilon_of_one),
        )
        launch_heads[target](heads, ctx)
