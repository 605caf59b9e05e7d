# SPDX-License-Identifier: Apache-2.0
"""The ops on the CPU: small and quickly compiled rather than fast."""
from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level
from std.math import exp, fma
from std.sys import simd_width_of

from .product import GroupedProduct, In, Out

comptime _WIDTH = simd_width_of[DType.float32]()
comptime _BLOCK = 4
"""Rows and columns of a register block: 16 accumulators hide the latency of
the multiply-adds and fit the vector registers."""

comptime _COLUMNS_PER_TASK = 32
"""Columns of one work item: small enough to even out experts of unequal
load, large enough that waking a worker does not count."""


@always_inline
def _dot_block[
    dtype: DType, n_rows: Int, n_columns: Int
](y: Out[dtype], x: In[dtype], weight: In[dtype], n: Int, k: Int):
    """Computes `n_rows` x `n_columns` dot products of length `k`, in float32.

    Rows of `y` are `n` elements apart, those of `x` and `weight` `k`.
    """
    comptime Vector = SIMD[DType.float32, _WIDTH]
    var acc = Array[Vector, n_rows * n_columns](fill=0)
    var whole = k // _WIDTH * _WIDTH
    for p in range(0, whole, _WIDTH):
        var w = Array[Vector, n_columns](fill=0)
        comptime for j in range(n_columns):
            w[j] = weight.unsafe_load[width=_WIDTH](j * k + p).cast[DType.float32]()
        comptime for i in range(n_rows):
            var v = x.unsafe_load[width=_WIDTH](i * k + p).cast[DType.float32]()
            comptime for j in range(n_columns):
                acc[i * n_columns + j] = fma(v, w[j], acc[i * n_columns + j])
    comptime for i in range(n_rows):
        comptime for j in range(n_columns):
            var total = acc[i * n_columns + j].reduce_add()
            for p in range(whole, k):
                total += (
                    x[unsafe_offset=i * k + p].cast[DType.float32]()
                    * weight[unsafe_offset=j * k + p].cast[DType.float32]()
                )
            y[unsafe_offset=i * n + j] = total.cast[dtype]()


@always_inline
def _dot_columns[
    dtype: DType, n_columns: Int
](y: Out[dtype], x: In[dtype], weight: In[dtype], n_rows: Int, n: Int, k: Int):
    var whole = n_rows // _BLOCK * _BLOCK
    for row in range(0, whole, _BLOCK):
        _dot_block[dtype, _BLOCK, n_columns](
            y.unsafe_offset(row * n), x.unsafe_offset(row * k), weight, n, k
        )
    for row in range(whole, n_rows):
        _dot_block[dtype, 1, n_columns](
            y.unsafe_offset(row * n), x.unsafe_offset(row * k), weight, n, k
        )


def cpu_grouped_matmul[dtype: DType](product: GroupedProduct[dtype]) raises:
    """Computes the product on all workers; raises if a group has rows that do not exist,
    or rows of an expert that does not."""
    for i in range(product.n_groups):
        var begin = Int(product.row_offsets[unsafe_offset=i])
        var end = Int(product.row_offsets[unsafe_offset=i + 1])
        var expert = Int(product.expert_ids[unsafe_offset=i])
        var has_weight = begin == end or 0 <= expert < product.n_experts
        if not (begin <= end <= product.n_rows and has_weight):
            raise Error(
                t"max_ep: grouped_matmul: rows [{begin}, {end}) for expert"
                t" {expert}; there are {product.n_rows} rows and"
                t" {product.n_experts} experts."
            )
    var n, k = product.n, product.k
    var tasks_per_group = (n + _COLUMNS_PER_TASK - 1) // _COLUMNS_PER_TASK

    def run_task(task: Int) {imm}:
        var group, tile = divmod(task, tasks_per_group)
        var begin = Int(product.row_offsets[unsafe_offset=group])
        var n_rows = Int(product.row_offsets[unsafe_offset=group + 1]) - begin
        var expert = Int(product.expert_ids[unsafe_offset=group])
        var weight = product.weights.unsafe_offset(expert * n * k)
        var x = product.x.unsafe_offset(begin * k)
        var y = product.y.unsafe_offset(begin * n)
        var column = tile * _COLUMNS_PER_TASK
        var last = min(column + _COLUMNS_PER_TASK, n)

        @always_inline
        def multiply[n_columns: Int](at: Int) {imm}:
            _dot_columns[dtype, n_columns](
                y.unsafe_offset(at), x, weight.unsafe_offset(at * k), n_rows, n, k
            )

        while column + _BLOCK <= last:
            multiply[_BLOCK](column)
            column += _BLOCK
        for rest in range(column, last):
            multiply[1](rest)

    sync_parallelize(run_task, product.n_groups * tasks_per_group)


def cpu_fused_silu[dtype: DType](y: Out[dtype], x: In[dtype], n_rows: Int, n: Int):
    """Computes `y = silu(gate) * up` of rows `[gate | up]`; `y` is `[n_rows][n]`."""
    var n_chunks = min(n_rows, parallelism_level(None))

    def run_chunk(chunk: Int) {imm}:
        var first = chunk * n_rows // n_chunks
        var last = (chunk + 1) * n_rows // n_chunks
        for row in range(first, last):
            var gate = x.unsafe_offset(row * 2 * n)
            var up = gate.unsafe_offset(n)
            var result = y.unsafe_offset(row * n)

            @always_inline
            def columns[w: Int](i: Int) {imm}:
                var g = gate.unsafe_load[width=w](i).cast[DType.float32]()
                var u = up.unsafe_load[width=w](i).cast[DType.float32]()
                result.unsafe_store(i, (g / (1 + exp(-g)) * u).cast[dtype]())

            for i in range(0, n // _WIDTH * _WIDTH, _WIDTH):
                columns[_WIDTH](i)
            for i in range(n // _WIDTH * _WIDTH, n):
                columns[1](i)

    if n_chunks > 0:
        sync_parallelize(run_chunk, n_chunks)
