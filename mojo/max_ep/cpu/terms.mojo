# SPDX-License-Identifier: Apache-2.0
"""The rows of a token on one CPU rank, each with its weight, and their sum in order."""
from std.math import fma, gcd
from std.sys import size_of

from ..protocol.entries import value_of_word
from ..protocol.flags import flag_at, load_acquire_sys
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer, LocalRows
from .rank import CpuRank


struct Terms[dtype: DType, n_max: Int](Movable):
    """Rows of a token, each with its weight, in the order in which they are added."""

    var rows: Array[Int, Self.n_max]
    var weights: Array[Float32, Self.n_max]
    var n: Int

    @always_inline
    def __init__(out self):
        self.rows = Array[Int, Self.n_max](fill=0)
        self.weights = Array[Float32, Self.n_max](fill=0)
        self.n = 0

    @always_inline
    def append(mut self, row: BytePointer, weight: Float32):
        self.rows[self.n] = Int(row)
        self.weights[self.n] = weight
        self.n += 1

    @always_inline
    def add_to[
        width: Int
    ](self, acc: SIMD[DType.float32, width], column: Int) -> SIMD[DType.float32, width]:
        """Adds some columns of the weighted rows to a sum, in order."""
        var result = acc
        for i in range(self.n):
            var row = BytePointer(unsafe_from_address=self.rows[i])
            var x = columns_of[Self.dtype, width](row, column)
            var weight = SIMD[DType.float32, width](self.weights[i])
            result = fma(weight, x, result)
        return result


@always_inline
def columns_of[
    dtype: DType, width: Int
](row: BytePointer, column: Int) -> SIMD[DType.float32, width]:
    return (
        row.unsafe_bitcast[Scalar[dtype]]()
        .unsafe_load[width=width](column)
        .cast[DType.float32]()
    )


@always_inline
def own_terms[
    group: Group, //, dtype: DType
](
    expert_rows: LocalRows,
    given_weights: ImmPointer[Float32],
    source: Int,
    token_idx: Int,
    rank: CpuRank[group],
) -> Terms[dtype, group.top_k]:
    """Finds the rows of a token that the last `dispatch_wait` put here. `given_weights`:
    those of this rank's tokens."""
    var terms = Terms[dtype, group.top_k]()
    var n_tokens = rank.counters.received_tokens()[unsafe_offset=source]
    if token_idx >= Int(n_tokens):
        return terms^
    var rows = rank.counters.received_rows(source)
    var weights = rank.counters.received_weights(source)
    for k in range(group.top_k):
        var choice = group.choice(token_idx, k)
        var row = rows[unsafe_offset=choice]
        if row >= 0:
            var weight: Float32 = 1
            comptime if group.late_weights:
                # Source 0 is this rank.
                weight = given_weights[unsafe_offset=choice] if source == 0 else (
                    _late_weight(source, choice, rank)
                )
            elif not group.is_given():
                weight = weights[unsafe_offset=choice]
            terms.append(row_at[group, dtype](expert_rows, Int(row)), weight)
    return terms^


@always_inline
def _late_weight[
    group: Group, //
](source: Int, choice: Int, rank: CpuRank[group]) -> Float32:
    """Reads a weight that was awaited."""
    var src_rank = group.rank_of_relative(rank.my_rank, source)
    var offset = group.late_weight_offset(src_rank, choice)
    return value_of_word[DType.float32](
        load_acquire_sys(flag_at(rank.recv_buf(), offset))
    )


@always_inline
def row_at[group: Group, dtype: DType](expert_rows: LocalRows, row: Int) -> BytePointer:
    return expert_rows.rows.unsafe_offset(
        row * group.hidden_size * size_of[Scalar[dtype]]()
    )


comptime columns_at_once[hidden_size: Int] = gcd(hidden_size, 32)
"""Columns of a row that are added at once."""
