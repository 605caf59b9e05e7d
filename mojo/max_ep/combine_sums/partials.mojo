# SPDX-License-Identifier: Apache-2.0
"""Partial sums: how rows and partial sums are distributed over lanes, and added."""
import max.gpu.primitives.warp as warp
from max.gpu import syncwarp, WARP_SIZE
from std.bit import count_trailing_zeros
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import size_of

from ..device.block import Block
from ..device.schedule import Split
from ..device.warp import any_of_lanes, avoid_sentinel, load16, load16_if, store16
from ..failures import Failure
from ..flags import load_relaxed_sys_16, store_relaxed_sys_16
from ..formats.quantized_sums import QuantizedSums
from ..layout import Group, MESSAGE_ALIGN
from ..token_format import BytePointer, LaneBytes, SENTINEL


struct PartialFormat[group: Group, combine_dtype: DType, partial_dtype: DType]:
    """How a lane's share of a row and of a partial sum is laid out and added.

    If sums are quantized, all lanes of a warp read the same 16 bytes of scales.
    """

    comptime hidden_size = Self.group.hidden_size
    comptime is_quantized = Self.group.partial_block > 0
    comptime Quantized = QuantizedSums[
        max(Self.group.partial_block, 32), Self.hidden_size
    ]
    comptime row_element = size_of[Scalar[Self.combine_dtype]]()
    comptime partial_element = size_of[Scalar[Self.partial_dtype]]()
    comptime width = MESSAGE_ALIGN // min(Self.row_element, Self.partial_element)
    """Elements of a lane in one step."""
    comptime n_row_vectors = Self.width * Self.row_element // MESSAGE_ALIGN
    """16 bytes of a row that they fill."""
    comptime n_partial_vectors = Self.width * Self.partial_element // MESSAGE_ALIGN + (
        1 if Self.is_quantized else 0
    )
    """16 bytes of a partial sum that they fill, and those of their scales."""
    comptime row_bytes = Self.hidden_size * Self.row_element
    comptime n_shares = Self.hidden_size // Self.width
    comptime n_steps = ceildiv(Self.n_shares, WARP_SIZE)
    comptime Sum = SIMD[DType.float32, Self.width]
    """A lane's share, as it is added."""

    @staticmethod
    @always_inline
    def partial_of(
        recv_buf: BytePointer, owner_rank: Int, token_idx: Int
    ) -> BytePointer:
        return recv_buf.unsafe_offset(Self.group.partial_offset(owner_rank, token_idx))

    @staticmethod
    @always_inline
    def row_vector(row: BytePointer, share: Int, i: Int) -> BytePointer:
        return row.unsafe_offset((share * Self.n_row_vectors + i) * MESSAGE_ALIGN)

    @staticmethod
    @always_inline
    def widen(
        bytes: LaneBytes,
    ) -> SIMD[DType.float32, Self.width // Self.n_row_vectors]:
        return bitcast[Self.combine_dtype, Self.width // Self.n_row_vectors](
            bytes
        ).cast[DType.float32]()

    @staticmethod
    @always_inline
    def store_row(row: BytePointer, share: Int, sum: Self.Sum):
        """Rounds a share once, and stores it."""
        comptime n = Self.width // Self.n_row_vectors
        var rounded = sum.cast[Self.combine_dtype]()
        comptime for i in range(Self.n_row_vectors):
            store16(
                Self.row_vector(row, share, i),
                bitcast[DType.uint32, 4](rounded.slice[n, offset=i * n]()),
            )

    @staticmethod
    @always_inline
    def partial_vector(partial_sum: BytePointer, share: Int, i: Int) -> BytePointer:
        comptime if Self.is_quantized:
            if i == 1:
                return partial_sum.unsafe_offset(
                    Self.Quantized.Format.value_bytes
                    + share // WARP_SIZE * MESSAGE_ALIGN
                )
            return partial_sum.unsafe_offset(share * MESSAGE_ALIGN)
        return partial_sum.unsafe_offset(
            (share * Self.n_partial_vectors + i) * MESSAGE_ALIGN
        )

    @staticmethod
    @always_inline
    def put(partial_sum: BytePointer, share: Int, sum: Self.Sum):
        """Rounds a share once, and sends it; all lanes of a warp call it."""
        var is_there = share < Self.n_shares
        comptime if Self.is_quantized:
            var given = sum
            comptime if Self.n_shares % WARP_SIZE != 0:
                if not is_there:
                    given = 0
            var wire = Self.Quantized.encode_lane(given, share % WARP_SIZE)
            if is_there:
                store_relaxed_sys_16(
                    Self.partial_vector(partial_sum, share, 0),
                    avoid_sentinel(wire.values),
                )
            if share % WARP_SIZE == 0:
                store_relaxed_sys_16(
                    Self.partial_vector(partial_sum, share, 1),
                    avoid_sentinel[Self.Quantized.Format.scales_flip](wire.scales),
                )
        else:
            if not is_there:
                return
            comptime n = Self.width // Self.n_partial_vectors
            var rounded = sum.cast[Self.partial_dtype]()
            comptime for i in range(Self.n_partial_vectors):
                store_relaxed_sys_16(
                    Self.partial_vector(partial_sum, share, i),
                    avoid_sentinel(
                        bitcast[DType.uint32, 4](rounded.slice[n, offset=i * n]())
                    ),
                )

    @staticmethod
    @always_inline
    def add_rows[
        n_at_once: Int
    ](
        mut sum: Self.Sum,
        expert_rows: BytePointer,
        share: Int,
        row: Int32,
        weight: Float32,
    ):
        """Adds a share of this rank's weighted rows of a token, with a warp."""
        comptime n_vectors = Self.n_row_vectors
        comptime n_rows = max(1, n_at_once // n_vectors)
        comptime n = Self.width // n_vectors
        var rest = warp.vote[DType.uint32](row >= 0)
        while rest != 0:
            var parts = Array[LaneBytes, n_rows * n_vectors](fill=0)
            var choices = Array[UInt32, n_rows](fill=0)
            var has = Array[Bool, n_rows](fill=False)
            comptime for i in range(n_rows):
                has[i] = rest != 0
                choices[i] = count_trailing_zeros(rest)
                rest &= rest - 1
                var from_ = expert_rows.unsafe_offset(
                    Int(warp.shuffle_idx(row, choices[i])) * Self.row_bytes
                )
                var is_there = has[i]
                comptime if Self.n_shares % WARP_SIZE != 0:
                    is_there = is_there and share < Self.n_shares
                comptime for j in range(n_vectors):
                    parts[i * n_vectors + j] = load16_if(
                        Self.row_vector(from_, share, j), is_there
                    )
            var weights = Array[Float32, n_rows](fill=0)
            comptime for i in range(n_rows):
                weights[i] = warp.shuffle_idx(weight, choices[i])
            comptime for i in range(n_rows):
                if has[i]:
                    comptime for j in range(n_vectors):
                        var numbers = Self.widen(parts[i * n_vectors + j])
                        comptime for k in range(n):
                            sum[j * n + k] = fma(weights[i], numbers[k], sum[j * n + k])

    @staticmethod
    @always_inline
    def load_partial[
        n_loaded: Int, //, first: Int
    ](mut loaded: Array[LaneBytes, n_loaded], partial_sum: BytePointer, share: Int):
        """Loads a share of a partial sum, whether it has come or not."""
        if share < Self.n_shares:
            comptime for i in range(Self.n_partial_vectors):
                loaded[first + i] = load_relaxed_sys_16(
                    Self.partial_vector(partial_sum, share, i)
                )

    @staticmethod
    @always_inline
    def await_partials[
        n_loaded: Int, //
    ](
        mut loaded: Array[LaneBytes, n_loaded],
        recv_buf: BytePointer,
        token_idx: Int,
        share: Int,
        owners: UInt32,
        block: Block[Self.group],
    ) -> UInt32:
        """Waits for loaded shares of all partial sums at once; returns whose have come.

        Of ranks that mask: one wait is less code than one for each owner.
        """
        comptime n_vectors = Self.n_partial_vectors
        var awaited = owners if share < Self.n_shares else 0
        var come = awaited
        var n_polls = 0
        while True:
            var missing = -1
            comptime for i in range(Self.group.n_ranks * n_vectors):
                comptime rank = i // n_vectors
                if (come >> UInt32(rank)) & 1 != 0 and loaded[i][3] == SENTINEL:
                    missing = rank
            if missing < 0:
                break
            if block.give_up_if_late(n_polls, missing):
                come &= ~(UInt32(1) << UInt32(missing))
                # The next one that is missing is given up at once.
                n_polls -= 1
            comptime for i in range(Self.group.n_ranks * n_vectors):
                comptime rank = i // n_vectors
                if (come >> UInt32(rank)) & 1 != 0 and loaded[i][3] == SENTINEL:
                    loaded[i] = load_relaxed_sys_16(
                        Self.partial_vector(
                            Self.partial_of(recv_buf, rank, token_idx),
                            share,
                            i % n_vectors,
                        )
                    )
        return owners & ~any_of_lanes(awaited & ~come)

    @staticmethod
    @always_inline
    def add_partial[
        n_loaded: Int, //, first: Int, is_there: Bool = False
    ](
        mut sum: Self.Sum,
        loaded: Array[LaneBytes, n_loaded],
        partial_sum: BytePointer,
        share: Int,
        owner_rank: Int,
        block: Block[...],
    ) -> Bool:
        """Adds a share of a partial sum, as soon as it has come."""
        comptime n = Self.width // Self.n_partial_vectors
        var are_there = True
        comptime if Self.is_quantized:
            are_there = Self._add_quantized[first, is_there](
                sum, loaded, partial_sum, share, owner_rank, block
            )
        else:
            if share < Self.n_shares:
                comptime for i in range(Self.n_partial_vectors):
                    var at = Self.partial_vector(partial_sum, share, i)
                    var bytes = loaded[first + i]
                    var has_come = True
                    comptime if is_there:
                        store16(at, LaneBytes(SENTINEL))
                    else:
                        bytes, has_come = _await_16(at, bytes, owner_rank, block)
                        are_there = are_there and has_come
                    var part = bitcast[Self.partial_dtype, n](bytes).cast[
                        DType.float32
                    ]()
                    comptime if block.group.masks:
                        if not has_come:
                            part = 0
                    comptime for j in range(n):
                        sum[i * n + j] += part[j]
        return are_there

    @staticmethod
    @always_inline
    def _add_quantized[
        n_loaded: Int, //, first: Int, is_there: Bool
    ](
        mut sum: Self.Sum,
        loaded: Array[LaneBytes, n_loaded],
        partial_sum: BytePointer,
        share: Int,
        owner_rank: Int,
        block: Block[...],
    ) -> Bool:
        var are_there = True
        if share < Self.n_shares:
            var bytes = Array[LaneBytes, 2](fill=0)
            comptime for i in range(2):
                bytes[i] = loaded[first + i]
                comptime if not is_there:
                    var has_come: Bool
                    bytes[i], has_come = _await_16[restores=False](
                        Self.partial_vector(partial_sum, share, i),
                        bytes[i],
                        owner_rank,
                        block,
                    )
                    are_there = are_there and has_come
            if are_there:
                store16(Self.partial_vector(partial_sum, share, 0), SENTINEL)
                bytes[1][3] ^= Self.Quantized.Format.scales_flip
                sum = Self.Quantized.add_values(
                    sum,
                    bitcast[DType.uint8, Self.width](bytes[0]),
                    Self.Quantized.scale_of_lane(bytes[1], share % WARP_SIZE),
                )
        # I3, as in `_await_16`. All lanes have read the scales.
        syncwarp()
        if are_there and share % WARP_SIZE == 0:
            store16(Self.partial_vector(partial_sum, share, 1), SENTINEL)
        return are_there

    @staticmethod
    @always_inline
    def add_shared(mut sum: Self.Sum, row: BytePointer, share: Int):
        """Rounds a sum, and adds a share of the shared expert's row."""
        comptime n = Self.width // Self.n_row_vectors
        sum = sum.cast[Self.combine_dtype]().cast[DType.float32]()
        comptime for i in range(Self.n_row_vectors):
            var numbers = Self.widen(load16(Self.row_vector(row, share, i)))
            comptime for j in range(n):
                sum[i * n + j] += numbers[j]


@always_inline
def _await_16[
    restores: Bool = True
](p: BytePointer, first_loaded: LaneBytes, owner_rank: Int, block: Block[...]) -> Tuple[
    LaneBytes, Bool
]:
    var bytes = first_loaded
    var n_polls = 0
    while bytes[3] == SENTINEL:
        if block.give_up_if_late(n_polls, owner_rank):
            block.fail(Failure.NO_MESSAGE, owner_rank, -1, 0)
            return (bytes, False)
        bytes = load_relaxed_sys_16(p)
    # I3: whoever writes here next has seen a later done word.
    comptime if restores:
        store16(p, LaneBytes(SENTINEL))
    return (bytes, True)


comptime FEW_TOKENS = 64
"""Tokens up to which sums are split into more chunks, with more rows in flight: then
latency matters, else throughput."""


def n_rows_at_once[are_few: Bool, n_prefetched: Int = 0]() -> Int:
    """Chooses how many rows of a token a lane loads before it adds them.

    With few tokens mostly all of them. With many tokens other warps have loads in
    flight, too, and a slot for a row that does not exist costs time.
    """
    return 8 if are_few and n_prefetched <= 4 else 4


comptime SumSplit[n_steps: Int, are_few: Bool] = Split[
    n_steps, n_steps if are_few else 14, n_steps if are_few else 7
]
"""How sums are split: with few tokens, each step is a chunk."""


@always_inline
def sum_split[n_steps: Int, are_few: Bool](n_tokens: Int) -> SumSplit[n_steps, are_few]:
    return SumSplit[n_steps, are_few](n_tokens <= 256)
