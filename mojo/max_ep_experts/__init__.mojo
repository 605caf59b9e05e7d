# SPDX-License-Identifier: Apache-2.0
"""Expert computations on CPU, where MAX has none.

Small and readable rather than fast: they make the examples, the tests and served
models complete. Why not MAX's: docs/decisions/0006-cpu-ranks.md. For GPUs there
is max_ep_gpu_experts.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.math import exp, fma
from std.sys import simd_width_of


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
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], ImmUntrackedOrigin],
    weight: Pointer[Scalar[dtype], ImmUntrackedOrigin],
    n: Int,
    k: Int,
):
    """Computes `n_rows` x `n_columns` dot products, in float32.

    Parameters:
        dtype: Element type.
        n_rows: Rows of the block.
        n_columns: Columns of the block.

    Args:
        y: First result; rows stand `n` apart.
        x: First row; rows stand `k` apart.
        weight: First column's weights; columns stand `k` apart.
        n: Columns of `y`.
        k: Length of the dot products.
    """
    comptime Vector = SIMD[DType.float32, _WIDTH]
    var acc = Array[Vector, n_rows * n_columns](fill=0)
    var whole = k // _WIDTH * _WIDTH
    for p in range(0, whole, _WIDTH):
        var w = Array[Vector, n_columns](fill=0)
        comptime for j in range(n_columns):
            w[j] = weight.unsafe_load[width=_WIDTH](j * k + p).cast[
                DType.float32
            ]()
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
](
    y: Pointer[Scalar[dtype], MutUntrackedOrigin],
    x: Pointer[Scalar[dtype], ImmUntrackedOrigin],
    weight: Pointer[Scalar[dtype], ImmUntrackedOrigin],
    n_rows: Int,
    n: Int,
    k: Int,
):
    """Computes some columns of all rows.

    Parameters:
        dtype: Element type.
        n_columns: Columns, as in `_dot_block`.

    Args:
        y: As in `_dot_block`.
        x: As in `_dot_block`.
        weight: As in `_dot_block`.
        n_rows: Rows.
        n: Columns of `y`.
        k: Length of the dot products.
    """
    var whole = n_rows // _BLOCK * _BLOCK
    for row in range(0, whole, _BLOCK):
        _dot_block[dtype, _BLOCK, n_columns](
            y.unsafe_offset(row * n), x.unsafe_offset(row * k), weight, n, k
        )
    for row in range(whole, n_rows):
        _dot_block[dtype, 1, n_columns](
            y.unsafe_offset(row * n), x.unsafe_offset(row * k), weight, n, k
        )


@extensibility.register("max_ep.grouped_matmul")
struct GroupedMatmul:
    """Multiplies each expert's rows with the transpose of its weight.

    Rows `[row_offsets[i], row_offsets[i + 1])` belong to `expert_ids[i]`; rows
    behind the last offset stay untouched. The arguments of MAX's
    `grouped_matmul_ragged`; products and sums in float32.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        weights: InputTensor[dtype=y.dtype, rank=3, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        expert_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var n = weights.dim_size(1)
        var k = weights.dim_size(2)
        var n_groups = row_offsets.dim_size(0) - 1
        var offsets = row_offsets.unsafe_ptr()
        var experts = expert_ids.unsafe_ptr()
        for i in range(n_groups):
            if (
                offsets[unsafe_offset=i] > offsets[unsafe_offset=i + 1]
                or Int(offsets[unsafe_offset=i + 1]) > x.dim_size(0)
                or experts[unsafe_offset=i] < 0
                or Int(experts[unsafe_offset=i]) >= weights.dim_size(0)
            ):
                raise Error(
                    "max_ep: grouped_matmul: rows [",
                    offsets[unsafe_offset=i],
                    ", ",
                    offsets[unsafe_offset=i + 1],
                    ") for expert ",
                    experts[unsafe_offset=i],
                    "; there are ",
                    x.dim_size(0),
                    " rows and ",
                    weights.dim_size(0),
                    " experts.",
                )
        var y_ptr = Pointer[Scalar[y.dtype], MutUntrackedOrigin](
            unsafe_from_address=Int(y.unsafe_ptr())
        )
        var x_ptr = Pointer[Scalar[y.dtype], ImmUntrackedOrigin](
            unsafe_from_address=Int(x.unsafe_ptr())
        )
        var weight_ptr = Pointer[Scalar[y.dtype], ImmUntrackedOrigin](
            unsafe_from_address=Int(weights.unsafe_ptr())
        )
        var tasks_per_group = (n + _COLUMNS_PER_TASK - 1) // _COLUMNS_PER_TASK

        def run_task(task: Int) {imm}:
            var group, tile = divmod(task, tasks_per_group)
            var begin = Int(offsets[unsafe_offset=group])
            var n_rows = Int(offsets[unsafe_offset=group + 1]) - begin
            var weight = weight_ptr.unsafe_offset(
                Int(experts[unsafe_offset=group]) * n * k
            )
            var rows = x_ptr.unsafe_offset(begin * k)
            var results = y_ptr.unsafe_offset(begin * n)
            var column = tile * _COLUMNS_PER_TASK
            var last = min(column + _COLUMNS_PER_TASK, n)
            while column + _BLOCK <= last:
                _dot_columns[y.dtype, _BLOCK](
                    results.unsafe_offset(column),
                    rows,
                    weight.unsafe_offset(column * k),
                    n_rows,
                    n,
                    k,
                )
                column += _BLOCK
            for rest in range(column, last):
                _dot_columns[y.dtype, 1](
                    results.unsafe_offset(rest),
                    rows,
                    weight.unsafe_offset(rest * k),
                    n_rows,
                    n,
                    k,
                )

        sync_parallelize(run_task, n_groups * tasks_per_group)


@extensibility.register("max_ep.fused_silu")
struct FusedSilu:
    """Computes `silu(gate) * up` of rows `[gate | up]`, in float32.

    Only the rows before the last offset, as MAX's `fused_silu`.
    """

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        row_offsets: InputTensor[dtype=DType.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var n = y.dim_size(1)
        var n_rows = Int(
            row_offsets.unsafe_ptr()[unsafe_offset=row_offsets.dim_size(0) - 1]
        )
        if n_rows > y.dim_size(0) or x.dim_size(1) != 2 * n:
            raise Error("max_ep: fused_silu: shapes do not fit")
        var src = x.unsafe_ptr()
        var dst = y.unsafe_ptr()
        var n_chunks = min(n_rows, parallelism_level(None))

        def run_chunk(chunk: Int) {imm}:
            var first = chunk * n_rows // n_chunks
            var last = (chunk + 1) * n_rows // n_chunks
            for row in range(first, last):
                var gate = src.unsafe_offset(row * 2 * n)
                var up = gate.unsafe_offset(n)
                var result = dst.unsafe_offset(row * n)

                @always_inline
                def columns[w: Int](i: Int) {imm}:
                    var g = gate.unsafe_load[width=w](i).cast[DType.float32]()
                    var u = up.unsafe_load[width=w](i).cast[DType.float32]()
                    result.unsafe_store(
                        i, (g / (1 + exp(-g)) * u).cast[y.dtype]()
                    )

                for i in range(0, n // _WIDTH * _WIDTH, _WIDTH):
                    columns[_WIDTH](i)
                for i in range(n // _WIDTH * _WIDTH, n):
                    columns[1](i)

        if n_chunks > 0:
            sync_parallelize(run_chunk, n_chunks)
