# SPDX-License-Identifier: Apache-2.0
"""Loads and waits of the receive phase: entries, metadata, and the steps of tokens.

An entry and a chunk's flag hold their generation. Inline data is its own flag:
`SENTINEL` in the last word of 16 bytes means that they have not arrived.
"""
from max.gpu import WARP_SIZE
from std.memory import bitcast

from ..device.block import Block
from ..device.schedule import InlineSplit, n_steps_of, vector_of_lane
from ..device.warp import ACCESSES_IN_FLIGHT, load16, store16
from ..protocol.failures import Failure
from ..protocol.flags import flag_at, flag_word, load_relaxed_sys, load_relaxed_sys_16
from ..protocol.layout import MESSAGE_ALIGN
from ..protocol.token_format import BytePointer, LaneBytes, SENTINEL, TokenFormat


@always_inline
def load_words[are_two: Bool](words: BytePointer) -> LaneBytes:
    comptime if are_two:
        return load_relaxed_sys_16(words)
    var word = load_relaxed_sys(flag_at(words, 0))
    return bitcast[DType.uint32, 4](SIMD[DType.uint64, 2](word, 0))


@always_inline
def await_words[
    are_two: Bool
](words: BytePointer, src_rank: Int, block: Block[...]) -> LaneBytes:
    return await_loaded[are_two](load_words[are_two](words), words, src_rank, block)


@always_inline
def await_loaded[
    are_two: Bool
](loaded: LaneBytes, words: BytePointer, src_rank: Int, block: Block[...]) -> LaneBytes:
    """Waits for words that have been loaded once."""
    var bytes = loaded
    var n_polls = 0
    while True:
        var is_there = bytes[1] == block.receiving()
        comptime if are_two and block.group.is_linked():
            # A put, or the copy in its place, may bring the halves one by one.
            is_there = is_there and bytes[3] == block.receiving()
        if is_there:
            return bytes
        if block.give_up_if_late(n_polls, src_rank):
            block.fail(Failure.NO_MESSAGE, src_rank, -1, flag_word(bytes[1], 0))
            return bytes
        bytes = load_words[are_two](words)


@fieldwise_init
struct _LaneVectors(TrivialRegisterPassable):
    """Some vectors of a token that a lane moves."""

    var bytes: BytePointer
    var first: Int
    var end: UInt32
    """One past the last vector that may be this lane's."""
    var stride: Int

    @always_inline
    def has(self, i: Int) -> Bool:
        return UInt32(self.first + i * self.stride) < self.end

    @always_inline
    def at(self, i: Int) -> BytePointer:
        return self.bytes.unsafe_offset(
            Int(UInt32(self.first + i * self.stride)) * MESSAGE_ALIGN
        )

    @always_inline
    def load[
        n: Int, //, are_all_inline: Bool
    ](self, mut loaded: Array[LaneBytes, n], is_inline: Bool):
        """Loads them; inline ones whether they are there or not."""
        comptime for i in range(n):
            if self.has(i):
                if are_all_inline or is_inline:
                    loaded[i] = load_relaxed_sys_16(self.at(i))
                else:
                    loaded[i] = load16(self.at(i))

    @always_inline
    def store[n: Int, //](self, loaded: Array[LaneBytes, n]):
        comptime for i in range(n):
            if self.has(i):
                store16(self.at(i), loaded[i])

    @always_inline
    def await_all[
        n: Int, //, flip: UInt32
    ](self, mut loaded: Array[LaneBytes, n], src_rank: Int, block: Block[...]) -> Bool:
        """Waits until inline ones are there, flips back, and puts `SENTINEL` back."""
        # All that are missing are polled again at once.
        var n_polls = 0
        while True:
            var is_missing = False
            comptime for i in range(n):
                if self.has(i) and loaded[i][3] == SENTINEL:
                    is_missing = True
            if not is_missing:
                break
            if block.give_up_if_late(n_polls, src_rank):
                block.fail(Failure.NO_MESSAGE, src_rank, -1, 0)
                return False
            comptime for i in range(n):
                if self.has(i) and loaded[i][3] == SENTINEL:
                    loaded[i] = load_relaxed_sys_16(self.at(i))
        comptime for i in range(n):
            if self.has(i):
                # I3: whoever writes here next has seen a later done word.
                store16(self.at(i), LaneBytes(SENTINEL))
                comptime if flip != 0:
                    loaded[i][3] ^= flip
        return True


@fieldwise_init
struct Token(TrivialRegisterPassable):
    """Where a token of a source is read."""

    var bytes: BytePointer
    var src_rank: Int
    var idx: Int
    var is_inline: Bool
    var is_loaded_early: Bool
    """Whether it is loaded before its entries are read, since it has no chunk flags."""


struct Steps[Format: TokenFormat, are_all_inline: Bool]:
    """Some steps of a token, as a lane of a warp holds them."""

    comptime n_steps = n_steps_of[Self.Format]()
    comptime in_flight = min(
        InlineSplit[Self.n_steps].most_steps if Self.are_all_inline else Self.n_steps,
        ACCESSES_IN_FLIGHT,
    )

    var values: Array[LaneBytes, Self.in_flight]
    var scales: Array[LaneBytes, 1]
    """Vector `lane` of the scales of these steps, if there are any."""

    @always_inline
    def __init__(out self):
        self.values = Array[LaneBytes, Self.in_flight](fill=0)
        self.scales = Array[LaneBytes, 1](fill=0)

    @staticmethod
    @always_inline
    def _values(token: Token, first: Int, end: Int, lane: Int) -> _LaneVectors:
        comptime n_vectors = Self.Format.value_bytes // MESSAGE_ALIGN
        return _LaneVectors(
            token.bytes,
            first * WARP_SIZE + lane,
            UInt32(min(end * WARP_SIZE, n_vectors)),
            WARP_SIZE,
        )

    @staticmethod
    @always_inline
    def _scales(token: Token, first: Int, end: Int, lane: Int) -> _LaneVectors:
        return _LaneVectors(
            token.bytes.unsafe_offset(Self.Format.value_bytes),
            first * Self.Format.scale_vectors + lane,
            Self._end_of_scales(first, end),
            1,
        )

    @staticmethod
    @always_inline
    def _end_of_scales(first: Int, end: Int) -> UInt32:
        """Returns one past the last vector of scales of these steps. The last step of a
        token may have fewer than others."""
        var end_here = min(end, first + Self.in_flight)
        return UInt32(
            min(end_here * Self.Format.scale_vectors, Self.Format.n_scale_vectors)
        )

    @always_inline
    def load(mut self, token: Token, first: Int, end: Int, lane: Int):
        Self._values(token, first, end, lane).load[Self.are_all_inline](
            self.values, token.is_inline
        )
        comptime if Self.Format.scale_vectors > 0:
            Self._scales(token, first, end, lane).load[Self.are_all_inline](
                self.scales, token.is_inline
            )

    @always_inline
    def store(self, to: Token, first: Int, end: Int, lane: Int):
        """Puts the steps where another rank has the token."""
        Self._values(to, first, end, lane).store(self.values)
        comptime if Self.Format.scale_vectors > 0:
            Self._scales(to, first, end, lane).store(self.scales)

    @always_inline
    def await_inline(
        mut self, token: Token, first: Int, end: Int, block: Block[...]
    ) -> Bool:
        var are_there = Self._values(token, first, end, block.lane).await_all[
            Self.Format.values_flip
        ](self.values, token.src_rank, block)
        comptime if Self.Format.scale_vectors > 0:
            are_there = (
                Self._scales(token, first, end, block.lane).await_all[
                    Self.Format.scales_flip
                ](self.scales, token.src_rank, block)
                and are_there
            )
        return are_there

    @always_inline
    def place(self, rows: Self.Format.Rows, row: Int, first: Int, end: Int, lane: Int):
        """Puts the steps into a row. Of tokens that were given quantized, the values have
        scales behind what goes to the row."""
        comptime n_row_vectors = Self.Format.row_bytes // MESSAGE_ALIGN
        var to = rows.values().unsafe_offset(row * Self.Format.row_bytes)
        comptime for i in range(Self.in_flight):
            var vector, is_in_chunk = vector_of_lane[Self.Format](first + i, end, lane)
            if is_in_chunk:
                comptime if Self.Format.row_bytes < Self.Format.value_bytes:
                    if vector >= n_row_vectors:
                        Self.Format.place_scales(
                            rows, row, vector - n_row_vectors, self.values[i]
                        )
                        continue
                store16(to.unsafe_offset(vector * MESSAGE_ALIGN), self.values[i])
        comptime n = Self.Format.scale_vectors
        comptime assert (
            Self.in_flight * n <= WARP_SIZE
        ), "a lane has one vector of scales"
        comptime if n > 0:
            var vector = first * n + lane
            if UInt32(vector) < Self._end_of_scales(first, end):
                Self.Format.place_scales(rows, row, vector, self.scales[0])
