# SPDX-License-Identifier: Apache-2.0
"""Partial sums: how rows and partial sums are distributed over lanes, and added."""
import max.gpu.primitives.warp as warp
from max.gpu import syncwarp, WARP_SIZE
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import size_of

from ..device.block import Block
from ..device.schedule import Split
from ..device.warp import (
    any_of_lanes,
    avoid_sentinel,
    has_bit,
    load16,
    load16_if,
    store16,
    take_lane,
)
from ..formats.quantized_sums import QuantizedSums
from ..protocol.counters import blocks_share_work
from ..protocol.failures import Failure
from ..protocol.flags import load_relaxed_sys_16, store_relaxed_sys_16
from ..protocol.layout import Group, MESSAGE_ALIGN
from ..protocol.token_format import BytePointer, LaneBytes, SENTINEL
from .weights import LaneWeight


@fieldwise_init
struct LaneSlice[group: Group, combine_dtype: DType, partial_dtype: DType](
    TrivialRegisterPassable
):
    """What a lane has of a row or a partial sum in a step: where it is, how it is added.

    If sums are quantized, all lanes of a warp read the same 16 bytes of scales.
    """

    var idx: Int
    """Which of the `n_slices`; past them: the last step is not whole."""

    comptime hidden_size = Self.group.hidden_size
    comptime is_quantized = Self.group.partial_block > 0
    comptime Quantized = QuantizedSums[
        max(Self.group.partial_block, 32), Self.hidden_size
    ]
    comptime row_width = MESSAGE_ALIGN // size_of[Scalar[Self.combine_dtype]]()
    """Elements of a row in 16 bytes."""
    comptime partial_width = MESSAGE_ALIGN // size_of[Scalar[Self.partial_dtype]]()
    """Elements of a partial sum in 16 bytes."""
    comptime width = max(Self.row_width, Self.partial_width)
    """Elements of a lane in one step."""
    comptime n_row_vectors = Self.width // Self.row_width
    """16 bytes of a row that they fill."""
    comptime n_partial_vectors = (
        Self.width // Self.partial_width + Int(Self.is_quantized)
    )
    """16 bytes of a partial sum that they fill, and those of their scales."""
    comptime row_bytes = Self.hidden_size * size_of[Scalar[Self.combine_dtype]]()
    comptime n_slices = Self.hidden_size // Self.width
    comptime n_steps = ceildiv(Self.n_slices, WARP_SIZE)
    comptime Sum = SIMD[DType.float32, Self.width]

    @staticmethod
    @always_inline
    def partial_of(
        recv_buf: BytePointer, owner_rank: Int, token_idx: Int
    ) -> BytePointer:
        return recv_buf.unsafe_offset(Self.group.partial_offset(owner_rank, token_idx))

    @always_inline
    def row_vector(self, row: BytePointer, i: Int) -> BytePointer:
        return row.unsafe_offset((self.idx * Self.n_row_vectors + i) * MESSAGE_ALIGN)

    @staticmethod
    @always_inline
    def widen(bytes: LaneBytes) -> SIMD[DType.float32, Self.row_width]:
        var numbers = bitcast[Self.combine_dtype, Self.row_width](bytes)
        return numbers.cast[DType.float32]()

    @always_inline
    def store_row(self, row: BytePointer, sum: Self.Sum):
        """Rounds a slice once, and stores it."""
        comptime n = Self.row_width
        var rounded = sum.cast[Self.combine_dtype]()
        comptime for i in range(Self.n_row_vectors):
            store16(
                self.row_vector(row, i),
                bitcast[DType.uint32, 4](rounded.slice[n, offset=i * n]()),
            )

    @always_inline
    def partial_vector(self, partial_sum: BytePointer, i: Int) -> BytePointer:
        comptime if Self.is_quantized:
            if i == 1:
                return partial_sum.unsafe_offset(
                    Self.Quantized.Format.value_bytes
                    + self.idx // WARP_SIZE * MESSAGE_ALIGN
                )
            return partial_sum.unsafe_offset(self.idx * MESSAGE_ALIGN)
        return partial_sum.unsafe_offset(
            (self.idx * Self.n_partial_vectors + i) * MESSAGE_ALIGN
        )

    @always_inline
    def send(self, partial_sum: BytePointer, sum: Self.Sum):
        """Rounds a slice once, and sends it; all lanes of a warp call it."""
        var is_there = self.idx < Self.n_slices
        comptime if Self.is_quantized:
            var given = sum
            comptime if Self.n_slices % WARP_SIZE != 0:
                if not is_there:
                    given = 0
            var wire = Self.Quantized.encode_lane(given, self.idx % WARP_SIZE)
            if is_there:
                store_relaxed_sys_16(
                    self.partial_vector(partial_sum, 0), avoid_sentinel(wire.values)
                )
            if self.idx % WARP_SIZE == 0:
                store_relaxed_sys_16(
                    self.partial_vector(partial_sum, 1),
                    avoid_sentinel[Self.Quantized.Format.scales_flip](wire.scales),
                )
        else:
            if not is_there:
                return
            comptime n = Self.partial_width
            var rounded = sum.cast[Self.partial_dtype]()
            comptime for i in range(Self.n_partial_vectors):
                store_relaxed_sys_16(
                    self.partial_vector(partial_sum, i),
                    avoid_sentinel(
                        bitcast[DType.uint32, 4](rounded.slice[n, offset=i * n]())
                    ),
                )

    @always_inline
    def add_rows[
        n_at_once: Int
    ](
        self,
        mut sum: Self.Sum,
        expert_rows: BytePointer,
        row: Int32,
        mut weight: LaneWeight[Self.group],
    ):
        """Adds a slice of this rank's weighted rows of a token, with a warp; lane `k` has
        row and weight of choice `k`."""
        comptime n_vectors = Self.n_row_vectors
        comptime n_rows = max(1, n_at_once // n_vectors)
        comptime n = Self.row_width
        var rest = warp.vote[DType.uint32](row >= 0)
        while rest != 0:
            # Some rows are loaded at once, then added.
            var parts = Array[LaneBytes, n_rows * n_vectors](fill=0)
            var choices = Array[UInt32, n_rows](fill=0)
            var has = Array[Bool, n_rows](fill=False)
            comptime for i in range(n_rows):
                has[i] = rest != 0
                choices[i] = take_lane(rest)
                var from_ = expert_rows.unsafe_offset(
                    Int(warp.shuffle_idx(row, choices[i])) * Self.row_bytes
                )
                var is_there = has[i]
                comptime if Self.n_slices % WARP_SIZE != 0:
                    is_there = is_there and self.idx < Self.n_slices
                comptime for j in range(n_vectors):
                    parts[i * n_vectors + j] = load16_if(
                        self.row_vector(from_, j), is_there
                    )
            weight.await_(row >= 0)
            var weights = Array[Float32, n_rows](fill=0)
            comptime for i in range(n_rows):
                weights[i] = warp.shuffle_idx(weight.value, choices[i])
            comptime for i in range(n_rows):
                if has[i]:
                    comptime for j in range(n_vectors):
                        var numbers = Self.widen(parts[i * n_vectors + j])
                        comptime for k in range(n):
                            sum[j * n + k] = fma(weights[i], numbers[k], sum[j * n + k])

    @always_inline
    def load_partial[
        n_loaded: Int, //, first: Int
    ](self, mut loaded: Array[LaneBytes, n_loaded], partial_sum: BytePointer):
        """Loads a slice of a partial sum, whether it has come or not."""
        if self.idx < Self.n_slices:
            comptime for i in range(Self.n_partial_vectors):
                loaded[first + i] = load_relaxed_sys_16(
                    self.partial_vector(partial_sum, i)
                )

    @always_inline
    def await_partials[
        n_loaded: Int, //
    ](
        self,
        mut loaded: Array[LaneBytes, n_loaded],
        recv_buf: BytePointer,
        token_idx: Int,
        owners: UInt32,
        block: Block[Self.group],
    ) -> UInt32:
        """Waits for loaded shares of all partial sums at once; returns whose have come.

        With masking, one wait for all owners compiles to less code than one for each.
        """
        comptime n_vectors = Self.n_partial_vectors
        comptime n_all = Self.group.n_ranks * n_vectors
        var wanted = owners if self.idx < Self.n_slices else 0
        var kept = wanted
        var n_polls = 0
        while True:
            var missing = -1
            comptime for i in range(n_all):
                if has_bit(kept, i // n_vectors) and loaded[i][3] == SENTINEL:
                    missing = i // n_vectors
            if missing < 0:
                break
            if block.give_up_if_late(n_polls, missing):
                kept &= ~(UInt32(1) << UInt32(missing))
                # The next one that is missing is given up at once.
                n_polls -= 1
            comptime for i in range(n_all):
                comptime rank = i // n_vectors
                if has_bit(kept, rank) and loaded[i][3] == SENTINEL:
                    var partial_sum = Self.partial_of(recv_buf, rank, token_idx)
                    loaded[i] = load_relaxed_sys_16(
                        self.partial_vector(partial_sum, i % n_vectors)
                    )
        # What one lane has given up, no lane adds.
        return owners & ~any_of_lanes(wanted & ~kept)

    @always_inline
    def add_partial[
        n_loaded: Int, //, first: Int, was_awaited: Bool = False
    ](
        self,
        mut sum: Self.Sum,
        loaded: Array[LaneBytes, n_loaded],
        partial_sum: BytePointer,
        owner_rank: Int,
        block: Block[...],
    ) -> Bool:
        """Adds a slice of a partial sum, as soon as it has come."""
        comptime n = Self.partial_width
        var are_there = True
        comptime if Self.is_quantized:
            are_there = self._add_quantized[first, was_awaited](
                sum, loaded, partial_sum, owner_rank, block
            )
        else:
            if self.idx < Self.n_slices:
                comptime for i in range(Self.n_partial_vectors):
                    var at = self.partial_vector(partial_sum, i)
                    var bytes = loaded[first + i]
                    var has_come = True
                    comptime if was_awaited:
                        store16(at, LaneBytes(SENTINEL))
                    else:
                        has_come = _await_16(at, bytes, owner_rank, block)
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

    @always_inline
    def _add_quantized[
        n_loaded: Int, //, first: Int, was_awaited: Bool
    ](
        self,
        mut sum: Self.Sum,
        loaded: Array[LaneBytes, n_loaded],
        partial_sum: BytePointer,
        owner_rank: Int,
        block: Block[...],
    ) -> Bool:
        var are_there = True
        if self.idx < Self.n_slices:
            var bytes = Array[LaneBytes, 2](fill=0)
            comptime for i in range(2):
                bytes[i] = loaded[first + i]
                comptime if not was_awaited:
                    var at = self.partial_vector(partial_sum, i)
                    var has_come = _await_16[restores=False](
                        at, bytes[i], owner_rank, block
                    )
                    are_there = are_there and has_come
            if are_there:
                store16(self.partial_vector(partial_sum, 0), SENTINEL)
                bytes[1][3] ^= Self.Quantized.Format.scales_flip
                sum = Self.Quantized.add_values(
                    sum,
                    bitcast[DType.uint8, Self.width](bytes[0]),
                    Self.Quantized.scale_of_lane(bytes[1], self.idx % WARP_SIZE),
                )
        # I3, as in `_await_16`. All lanes have read the scales.
        syncwarp()
        if are_there and self.idx % WARP_SIZE == 0:
            store16(self.partial_vector(partial_sum, 1), SENTINEL)
        return are_there

    @always_inline
    def add_shared(self, mut sum: Self.Sum, row: BytePointer):
        """Rounds a sum, and adds a slice of the shared expert's row."""
        sum = sum.cast[Self.combine_dtype]().cast[DType.float32]()
        self.add_row(sum, row)

    @always_inline
    def add_row(self, mut sum: Self.Sum, row: BytePointer):
        """Adds a slice of a row of the result's type."""
        comptime n = Self.row_width
        comptime for i in range(Self.n_row_vectors):
            var numbers = Self.widen(load16(self.row_vector(row, i)))
            comptime for j in range(n):
                sum[i * n + j] += numbers[j]


@always_inline
def _await_16[
    restores: Bool = True
](p: BytePointer, mut bytes: LaneBytes, owner_rank: Int, block: Block[...]) -> Bool:
    """Waits for loaded 16 bytes of a partial sum, and puts `SENTINEL` back."""
    var n_polls = 0
    while bytes[3] == SENTINEL:
        if block.give_up_if_late(n_polls, owner_rank):
            block.fail(Failure.NO_MESSAGE, owner_rank, -1, 0)
            return False
        bytes = load_relaxed_sys_16(p)
    # I3: whoever writes here next has seen a later done word.
    comptime if restores:
        store16(p, LaneBytes(SENTINEL))
    return True


comptime SOME_TOKENS = 256
"""Tokens up to which 16 warps send instead of 8, and each block takes its own sums."""
comptime _FINE_TOKENS = 512
"""Tokens up to which each step of a sum is a chunk. Above, a sum has 7 chunks."""
comptime FEW_TOKENS = 64
"""Tokens up to which more rows of a sum are in flight: then latency matters, else
throughput."""


def n_rows_at_once[are_few: Bool, n_prefetched: Int = 0]() -> Int:
    """Chooses how many rows of a token a lane loads before it adds them.

    With few tokens mostly all of them. With many tokens other warps have loads in
    flight, too, and a slot for a row that does not exist costs time.
    """
    return 8 if are_few and n_prefetched <= 4 else 4


comptime SumSplit[n_steps: Int, are_few: Bool] = Split[
    n_steps, n_steps, n_steps if are_few else 7
]
"""How sums are split. With few tokens, each step is a chunk, without a branch."""


comptime SendSplit[group: Group, n_steps: Int, are_few: Bool] = Split[
    n_steps,
    14 if group.is_linked() else n_steps,
    1 if group.is_linked() else (n_steps if are_few else 7),
]
"""How sums are split that are sent. Over several hosts a put takes all of one, whose
parts warps of a block make if sums are few."""


@always_inline
def send_split[
    group: Group, n_steps: Int, are_few: Bool
](n_tokens: Int, are_in_parts: Bool) -> SendSplit[group, n_steps, are_few]:
    comptime if group.is_linked():
        return SendSplit[group, n_steps, are_few](are_in_parts)
    return SendSplit[group, n_steps, are_few](n_tokens <= _FINE_TOKENS)


@always_inline
def sum_split[n_steps: Int, are_few: Bool](n_tokens: Int) -> SumSplit[n_steps, are_few]:
    return SumSplit[n_steps, are_few](n_tokens <= _FINE_TOKENS)


@always_inline
def from_all_blocks[group: Group](n_tokens: Int) -> Bool:
    """Returns whether blocks take sums from one counter."""
    return blocks_share_work(group) and n_tokens > SOME_TOKENS
