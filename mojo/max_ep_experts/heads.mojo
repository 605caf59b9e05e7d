# SPDX-License-Identifier: Apache-2.0
"""What stands between the first product of an attention layer and attention, in one pass.

Heads of queries and keys are normalized and rotated by their position; keys and values go
into the paged KV cache. MAX has four ops for it.
"""
import extensibility
from extensibility import (
    _MutableInputTensor as MutableInputTensor,
    InputTensor,
    OutputTensor,
)
from max.algorithm import sync_parallelize
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt

from .groups import group_of
from .overlap import await_kernel_before, overlapping
from .product import In, KernelArgument, Out

comptime _N_THREADS = 256
comptime _FOUR = 4
"""Elements of a lane in each half of a head."""
comptime _Four = SIMD[DType.float32, _FOUR]


@always_inline
def _now(words: In[DType.uint32], i: Int) -> UInt32:
    """Loads what the previous kernel may have written."""
    return words.unsafe_load[invariant=False](i)


@fieldwise_init
struct Heads[dtype: DType, size: Int](KernelArgument):
    """The heads of some tokens: of each token those of queries, keys and values.

    A position rotates element `i` of a head and element `i + size / 2` together.
    """

    comptime N_LANES = Self.size // (2 * _FOUR)

    var q: Out[Self.dtype]
    """`[n_tokens][n_q][size]`."""
    var cache: Out[Self.dtype]
    """`[pages][2][n_layers][page_size][n_kv][size]`, pages `page_stride` apart."""
    var qkv: In[Self.dtype]
    """`[n_tokens][n_q + 2 * n_kv][size]`."""
    var row_offsets: In[DType.uint32]
    """First token of each sequence, `[n_sequences + 1]`."""
    var rotary: In[Self.dtype]
    """`[positions][size / 2]` pairs of cosine and sine."""
    var lengths: In[DType.uint32]
    """Tokens of each sequence that are in the cache already."""
    var pages: In[DType.uint32]
    """Pages of each sequence, `[n_sequences][max_pages]`."""
    var q_weight: In[Self.dtype]
    """`[size]`."""
    var k_weight: In[Self.dtype]
    """`[size]`."""
    var n_tokens: Int
    var n_sequences: Int
    var n_q: Int
    var n_kv: Int
    var max_pages: Int
    var page_stride: Int
    var page_size: Int
    var n_layers: Int
    var layer: Int
    var epsilon: Float32

    @always_inline
    def n_heads(self) -> Int:
        return self.n_q + 2 * self.n_kv

    @always_inline
    def n_blocks(self) -> Int:
        """Returns the blocks of `_N_THREADS` threads for all heads."""
        return ceildiv(self.n_tokens * self.n_heads() * Self.N_LANES, _N_THREADS)

    @always_inline
    def load(self, head: Int, lane: Int) -> Tuple[_Four, _Four]:
        """Returns a lane's elements of a head, counted from that of the first token."""
        var first = self.qkv.unsafe_offset(head * Self.size + _FOUR * lane)
        return (
            first.unsafe_load[width=_FOUR, invariant=False]().cast[DType.float32](),
            first.unsafe_load[width=_FOUR, invariant=False](Self.size // 2).cast[
                DType.float32
            ](),
        )

    @always_inline
    def sequence_of(self, token: Int) -> Int:
        @always_inline
        def before(sequence: Int) {imm} -> UInt32:
            return _now(self.row_offsets, sequence)

        return group_of(UInt32(token), self.n_sequences, before)

    @always_inline
    def store(self, head: Int, lane: Int, var a: _Four, var b: _Four, squares: Float32):
        """Stores a lane's elements; `squares` is the sum of the squares of the head."""
        var token, of_token = divmod(head, self.n_heads())
        var sequence = self.sequence_of(token)
        var position = (
            token
            + Int(_now(self.lengths, sequence))
            - Int(_now(self.row_offsets, sequence))
        )
        if of_token < self.n_q + self.n_kv:
            var weight = self.q_weight if of_token < self.n_q else self.k_weight
            var at = weight.unsafe_offset(_FOUR * lane)
            var scale = rsqrt(squares / Float32(Self.size) + self.epsilon)
            a *= (
                scale
                * at.unsafe_load[width=_FOUR, invariant=False]().cast[DType.float32]()
            )
            b *= (
                scale
                * at.unsafe_load[width=_FOUR, invariant=False](Self.size // 2).cast[
                    DType.float32
                ]()
            )
            var pairs = (
                self.rotary.unsafe_load[width=2 * _FOUR, invariant=False](
                    position * Self.size + 2 * _FOUR * lane
                )
                .cast[DType.float32]()
                .deinterleave()
            )
            var rotated = a * pairs[0] - b * pairs[1]
            b = a * pairs[1] + b * pairs[0]
            a = rotated
        var to = self.q.unsafe_offset((token * self.n_q + of_token) * Self.size)
        if of_token >= self.n_q:
            var kind, kv_head = divmod(of_token - self.n_q, self.n_kv)
            var page, row = divmod(position, self.page_size)
            var rows = (kind * self.n_layers + self.layer) * self.page_size + row
            var first = self.page_stride * Int(
                _now(self.pages, sequence * self.max_pages + page)
            )
            to = self.cache.unsafe_offset(
                first + (rows * self.n_kv + kv_head) * Self.size
            )
        to.unsafe_store(_FOUR * lane, a.cast[Self.dtype]())
        to.unsafe_store(Self.size // 2 + _FOUR * lane, b.cast[Self.dtype]())


def heads_kernel[dtype: DType, size: Int](heads: Heads[dtype, size]):
    """Takes `N_LANES` lanes for each head of each token.

    Launch: grid `heads.n_blocks()`, `_N_THREADS` threads.
    """
    comptime n_lanes = heads.N_LANES
    await_kernel_before()
    var thread = Int(block_idx.x) * _N_THREADS + Int(thread_idx.x)
    var head, lane = divmod(thread, n_lanes)
    var n_heads = heads.n_tokens * heads.n_heads()
    # All lanes of a warp take part in the sum.
    var a, b = heads.load(min(head, n_heads - 1), lane)
    var squares = (a * a + b * b).reduce_add()
    comptime for i in range(5):
        comptime if 1 << i < n_lanes:
            squares += warp.shuffle_xor(squares, UInt32(1 << i))
    if head < n_heads:
        heads.store(head, lane, a, b, squares)


def cpu_heads[dtype: DType, size: Int](heads: Heads[dtype, size]):
    def run_token(token: Int) {imm}:
        comptime n_lanes = heads.N_LANES
        for head in range(token * heads.n_heads(), (token + 1) * heads.n_heads()):
            var squares = Float32(0)
            comptime for lane in range(n_lanes):
                var a, b = heads.load(head, lane)
                squares += (a * a + b * b).reduce_add()
            comptime for lane in range(n_lanes):
                var a, b = heads.load(head, lane)
                heads.store(head, lane, a, b, squares)

    sync_parallelize(run_token, heads.n_tokens)


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
        if heads.n_tokens == 0:
            return
        comptime if is_gpu[target]():
            ctx.enqueue_function(
                ctx.compile_function[heads_kernel[q.dtype, size]](),
                heads,
                grid_dim=heads.n_blocks(),
                block_dim=_N_THREADS,
                attributes=overlapping(),
            )
        else:
            cpu_heads(heads)
