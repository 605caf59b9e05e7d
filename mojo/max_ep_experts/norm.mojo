# SPDX-License-Identifier: Apache-2.0
"""What stands between two products of a layer on a GPU: a sum, and its RMS norm.

MAX has a kernel for both, too. This one begins before the previous kernel has ended, and
lets the next one get its weights meanwhile.
"""
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import WARP_SIZE, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_gpu
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt
from std.utils import StaticTuple

from .groups import shared
from .overlap import await_kernel_before, overlapping, prefetch
from .product import Bf16In, Bf16Out, KernelArgument, LANE

comptime _MAX_THREADS = 1024
comptime _Floats = SIMD[DType.float32, LANE]


def threads_for(n_columns: Int) -> Int:
    """Returns the threads of a block."""
    return min(ceildiv(n_columns, LANE * WARP_SIZE) * WARP_SIZE, _MAX_THREADS)


@always_inline
def load_row(row: Bf16In, at: Int) -> _Floats:
    """Loads what the previous kernel may have written."""
    return row.unsafe_load[width=LANE, alignment=16, invariant=False](at).cast[
        DType.float32
    ]()


@fieldwise_init
struct AddNorm(KernelArgument):
    """Sums, and their norms: `total = x + more`, rounded, and
    `normed = round(total / sqrt(mean(total**2) + epsilon)) * weight`."""

    var total: Bf16Out
    """`[n_tokens][n_columns]`, as all but the weight; all 16-byte aligned."""
    var normed: Bf16Out
    var x: Bf16In
    var more: Bf16In
    var weight: Bf16In
    """`[n_columns]`."""

    @always_inline
    def add(self, at: Int) -> _Floats:
        """Returns elements of the sum, rounded."""
        var sum = load_row(self.x, at) + load_row(self.more, at)
        return sum.cast[DType.bfloat16]().cast[DType.float32]()

    @always_inline
    def norm(
        self, total: _Floats, scale: Float32, weight: _Floats
    ) -> SIMD[DType.bfloat16, LANE]:
        """Returns elements of the norm."""
        var rounded = (total * scale).cast[DType.bfloat16]()
        return (rounded.cast[DType.float32]() * weight).cast[DType.bfloat16]()


def add_norm_kernel[n_columns: Int](of: AddNorm, epsilon: Float32):
    """Adds and normalizes a token with each block.

    Launch: grid `n_tokens`, `threads_for(n_columns)` threads; `n_columns` a multiple of 8.
    """
    comptime n_threads = threads_for(n_columns)
    comptime n_warps = n_threads // WARP_SIZE
    comptime n_steps = ceildiv(n_columns, n_threads * LANE)
    var of_warps = shared[Float32, n_warps, 16]()
    var thread = Int(thread_idx.x)
    if thread == 0:
        prefetch(of.weight, 2 * n_columns)
    await_kernel_before()
    var first = Int(block_idx.x) * n_columns
    var totals = StaticTuple[_Floats, n_steps](fill=0)
    var weights = StaticTuple[_Floats, n_steps](fill=0)
    var squares = Float32(0)
    comptime for step in range(n_steps):
        var at = (step * n_threads + thread) * LANE
        if at < n_columns:
            totals[step] = of.add(first + at)
            weights[step] = load_row(of.weight, at)
            of.total.unsafe_store[alignment=16](
                first + at, totals[step].cast[DType.bfloat16]()
            )
            squares += (totals[step] * totals[step]).reduce_add()
    squares = warp.sum(squares)
    var warp_idx, lane = divmod(thread, WARP_SIZE)
    if lane == 0:
        of_warps[unsafe_offset=warp_idx] = squares
    barrier()
    var all = of_warps[unsafe_offset=0]
    comptime for other in range(1, n_warps):
        all += of_warps[unsafe_offset=other]
    var scale = rsqrt(all / Float32(n_columns) + epsilon)
    comptime for step in range(n_steps):
        var at = (step * n_threads + thread) * LANE
        if at < n_columns:
            var normed = of.norm(totals[step], scale, weights[step])
            of.normed.unsafe_store[alignment=16](first + at, normed)


def add_norm_of(
    total: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
    normed: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
    x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
    more: InputTensor[dtype=DType.bfloat16, rank=2, ...],
    weight: InputTensor[dtype=DType.bfloat16, rank=1, ...],
) raises -> AddNorm:
    """Describes the sums and norms of an op's tensors."""
    var n_columns = weight.dim_size(0)
    var fit = x.dim_size(1) == n_columns == more.dim_size(1)
    if not fit or more.dim_size(0) != x.dim_size(0):
        raise Error("max_ep: add_norm: shapes do not fit")
    return AddNorm(
        total={unsafe_from_address = Int(total.unsafe_ptr())},
        normed={unsafe_from_address = Int(normed.unsafe_ptr())},
        x={unsafe_from_address = Int(x.unsafe_ptr())},
        more={unsafe_from_address = Int(more.unsafe_ptr())},
        weight={unsafe_from_address = Int(weight.unsafe_ptr())},
    )


def launch_add_norm[
    n_columns: Int
](of: AddNorm, epsilon: Float32, n_tokens: Int, context: DeviceContext) raises:
    comptime assert n_columns % LANE == 0, "max_ep: columns are loaded in eights"
    if n_tokens == 0:
        return
    context.enqueue_function(
        context.compile_function[add_norm_kernel[n_columns]](),
        of,
        epsilon,
        grid_dim=n_tokens,
        block_dim=threads_for(n_columns),
        attributes=overlapping(),
    )


@extensibility.register("max_ep.add_norm")
struct AddNormOp:
    """Adds two tensors, and normalizes the sum's rows. The epsilon is on the host."""

    @staticmethod
    def execute[
        target: StaticString, n_columns: Int
    ](
        total: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        normed: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        x: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        more: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        weight: InputTensor[dtype=DType.bfloat16, rank=1, ...],
        epsilon: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert is_gpu[target](), "max_ep: this op is for GPUs"
        if weight.dim_size(0) != n_columns:
            raise Error("max_ep: add_norm: shapes do not fit")
        launch_add_norm[n_columns](
            add_norm_of(total, normed, x, more, weight),
            epsilon.unsafe_ptr()[unsafe_offset=0],
            x.dim_size(0),
            ctx,
        )
