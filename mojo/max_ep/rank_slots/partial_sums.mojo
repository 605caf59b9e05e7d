# SPDX-License-Identifier: Apache-2.0
"""Partial sums: how rows and they are cut into lanes' shares, and how rows are added.

Both halves of a reduced combine add this rank's rows of a token here: the sending
half to send the sum, the receiving half as its own part of the result.
"""
import max.gpu.primitives.warp as warp
from max.gpu import WARP_SIZE
from std.bit import count_trailing_zeros
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import size_of

from ..counters import NO_ROW
from ..expert_slots.device_steps import load16, store16
from ..flags import put_16
from ..layout import MESSAGE_ALIGN
from ..token_format import BytePointer, LaneBytes
from .device_steps import without_empty


comptime SEND_LOADS = 8
"""Loads of rows that a lane has under way when it sends, of several rows or
several steps."""

comptime FEW_SEND_LOADS = 6
"""The same if it adds one step at once: less code."""

comptime ADD_LOADS = 4
"""The same when it also looks at partial sums; more do not fit into registers."""


struct PartialFormat[
    combine_dtype: DType, partial_dtype: DType, hidden_size: Int
]:
    """How a lane's share of a row and of a partial sum are cut into 16 bytes.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
    """

    comptime row_element = size_of[Scalar[Self.combine_dtype]]()
    """Bytes of an element of a row."""
    comptime partial_element = size_of[Scalar[Self.partial_dtype]]()
    """Bytes of an element of a partial sum."""
    comptime width = MESSAGE_ALIGN // min(
        Self.row_element, Self.partial_element
    )
    """Elements of a lane in one step."""
    comptime n_row_vectors = Self.width * Self.row_element // MESSAGE_ALIGN
    """16 bytes of a row that they fill."""
    comptime n_partial_vectors = (
        Self.width * Self.partial_element // MESSAGE_ALIGN
    )
    """16 bytes of a partial sum that they fill."""
    comptime n_shares = Self.hidden_size // Self.width
    """Shares of a row."""
    comptime n_steps = ceildiv(Self.n_shares, WARP_SIZE)
    """Steps of a warp over a row."""
    comptime Sum = SIMD[DType.float32, Self.width]
    """A lane's share, as it is added."""

    @staticmethod
    @always_inline
    def n_steps_at_once[are_few: Bool]() -> Int:
        """Chooses how many steps are added at once: what registers hold, or one.

        Parameters:
            are_few: Whether `are_few_tokens`.

        Returns:
            Steps.
        """
        comptime n_vectors = max(Self.n_row_vectors, Self.n_partial_vectors)
        return 1 if are_few else max(1, _MOST_VECTORS // n_vectors)

    @staticmethod
    @always_inline
    def row_vector(row: BytePointer, share: Int, i: Int) -> BytePointer:
        """Locates 16 bytes of a row.

        Args:
            row: `[hidden_size]` of the combine dtype.
            share: Which share.
            i: Which of its 16 bytes.

        Returns:
            Where they stand.
        """
        return row.unsafe_offset(
            (share * Self.n_row_vectors + i) * MESSAGE_ALIGN
        )

    @staticmethod
    @always_inline
    def widen(
        bytes: LaneBytes,
    ) -> SIMD[DType.float32, Self.width // Self.n_row_vectors]:
        """Reads 16 bytes of a row as numbers.

        Args:
            bytes: The bytes.

        Returns:
            The numbers.
        """
        return bitcast[Self.combine_dtype, Self.width // Self.n_row_vectors](
            bytes
        ).cast[DType.float32]()

    @staticmethod
    @always_inline
    def store_row(row: BytePointer, share: Int, sum: Self.Sum):
        """Rounds a share once, and stores it.

        Args:
            row: `[hidden_size]` of the combine dtype.
            share: Which.
            sum: Its elements.
        """
        comptime n = Self.width // Self.n_row_vectors
        var rounded = sum.cast[Self.combine_dtype]()
        comptime for i in range(Self.n_row_vectors):
            store16(
                Self.row_vector(row, share, i),
                bitcast[DType.uint32, 4](rounded.slice[n, offset=i * n]()),
            )

    @staticmethod
    @always_inline
    def partial_vector(
        partial_sum: BytePointer, share: Int, i: Int
    ) -> BytePointer:
        """Locates 16 bytes of a partial sum.

        Args:
            partial_sum: `[hidden_size]` of the partial dtype.
            share: Which share.
            i: Which of its 16 bytes.

        Returns:
            Where they stand.
        """
        return partial_sum.unsafe_offset(
            (share * Self.n_partial_vectors + i) * MESSAGE_ALIGN
        )

    @staticmethod
    @always_inline
    def put_partial(partial_sum: BytePointer, share: Int, sum: Self.Sum):
        """Rounds a share once, and sends it.

        Args:
            partial_sum: `[hidden_size]` of the partial dtype, on some rank.
            share: Which.
            sum: Its elements.
        """
        comptime n = Self.width // Self.n_partial_vectors
        var rounded = sum.cast[Self.partial_dtype]()
        comptime for i in range(Self.n_partial_vectors):
            put_16(
                Self.partial_vector(partial_sum, share, i),
                without_empty(
                    bitcast[DType.uint32, 4](rounded.slice[n, offset=i * n]())
                ),
            )


comptime FEW_TOKENS = 64
"""Up to so many a combine has more parts and smaller steps than with more."""
comptime _MOST_VECTORS = 4
"""Neighbouring 16 bytes of a row that a lane has under way at most."""


@always_inline
def are_few_tokens(n_tokens: Int) -> Bool:
    """Chooses how much of a row a warp reads at once.

    With few tokens, little: more warps have something to do, and a launch reads
    its code, too, of which there is less. With many, neighbouring bytes: the
    memory is faster then.

    Args:
        n_tokens: Tokens of a rank.

    Returns:
        Whether little.
    """
    return n_tokens <= FEW_TOKENS


@always_inline
def n_parts_of(n_tokens: Int, n_steps: Int) -> Int:
    """Chooses into how many parts warps take a token.

    Args:
        n_tokens: Tokens of a rank.
        n_steps: Steps of a row.

    Returns:
        In `[1, n_steps]`.
    """
    if are_few_tokens(n_tokens):
        return n_steps
    return min(14 if n_tokens <= 256 else 7, n_steps)


@always_inline
def add_rows[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_steps: Int,
    n_loads: Int,
](
    mut sums: Array[
        PartialFormat[combine_dtype, partial_dtype, hidden_size].Sum, n_steps
    ],
    expert_rows: BytePointer,
    first: Int,
    end: Int,
    row: Int32,
    weight: Float32,
    lane: Int,
):
    """Adds this rank's weighted rows of a token, in choice order, with a warp.

    Parameters:
        combine_dtype: Element type of the rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_steps: Steps that are added at once.
        n_loads: Loads that a lane has under way.

    Args:
        sums: Result: shares of this lane; zeros before.
        expert_rows: `[n_rows][hidden_size]`.
        first: First step.
        end: Behind the last.
        row: In lane `k`: row of choice `k`, or `NO_ROW`.
        weight: In lane `k`: its weight.
        lane: This lane.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime row_bytes = hidden_size * Format.row_element
    comptime n_vectors = n_steps * Format.n_row_vectors
    comptime n_rows = max(1, n_loads // n_vectors)
    comptime n = Format.width // Format.n_row_vectors
    var rest = warp.vote[DType.uint32](row != NO_ROW)
    while rest != 0:
        var parts = Array[LaneBytes, n_rows * n_vectors](fill=0)
        var weights = Array[Float32, n_rows](fill=0)
        var has = Array[Bool, n_rows](fill=False)
        comptime for i in range(n_rows):
            if rest != 0:
                has[i] = True
                var k = count_trailing_zeros(rest)
                rest &= rest - 1
                weights[i] = warp.shuffle_idx(weight, k)
                var from_ = expert_rows.unsafe_offset(
                    Int(warp.shuffle_idx(row, k)) * row_bytes
                )
                comptime for step in range(n_steps):
                    var share = (first + step) * WARP_SIZE + lane
                    if first + step < end and share < Format.n_shares:
                        comptime for j in range(Format.n_row_vectors):
                            parts[
                                i * n_vectors + step * Format.n_row_vectors + j
                            ] = load16(Format.row_vector(from_, share, j))
        comptime for i in range(n_rows):
            if has[i]:
                comptime for vector in range(n_vectors):
                    comptime step = vector // Format.n_row_vectors
                    comptime first_of_part = vector % Format.n_row_vectors * n
                    var numbers = Format.widen(parts[i * n_vectors + vector])
                    comptime for j in range(n):
                        sums[step][first_of_part + j] = fma(
                            weights[i],
                            numbers[j],
                            sums[step][first_of_part + j],
                        )
