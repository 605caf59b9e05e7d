# SPDX-License-Identifier: Apache-2.0
"""A block of a GPU launch: how it begins, takes work, waits and fails.

All blocks of a launch are resident at once, because in the fused forms blocks wait for
blocks of other ranks. A launch advances the generations at its start, as soon as every
block has read the old ones (`done_words.mojo`).
"""
import max.gpu.primitives.warp as warp
from max.gpu import barrier, block_idx, grid_dim, lane_id, warp_id, WARP_SIZE

from ..protocol.counters import blocks_share_work, Counters, LaunchHeader, Taken, Word
from ..protocol.failures import (
    Failure,
    is_fatal,
    is_missing,
    RECEIVE,
    record_failure,
    SEND,
)
from ..protocol.flags import (
    Deadline,
    fetch_add_block,
    fetch_add_gpu,
    flag_at,
    FlagPointer,
    generation_of,
    load_acquire_block,
    load_acquire_sys,
    next_generation,
    POLLS_PER_CLOCK_READ,
    SharedWord,
)
from ..protocol.layout import Group
from ..protocol.token_format import BytePointer
from .liveness import Liveness
from .shared import shared, SharedAddresses, SharedBuffers
from .start import check_header, mask_of
from .warp import bytes_at, has_bit


@fieldwise_init
struct Block[group: Group](TrivialRegisterPassable):
    """The state of a block during a launch, the same in each of its warps."""

    comptime _SENT = (
        Word.COMBINE_SENT if Self.group.is_combine() else Word.DISPATCH_SENT
    )
    """The last generation that this op sent."""
    comptime _RECEIVED = (
        Word.COMBINE_RECEIVED if Self.group.is_combine() else Word.DISPATCH_RECEIVED
    )
    """The last one that it received."""

    var lane: Int
    var warp_idx: Int
    var can_go: Bool
    """Whether the launch may do anything; the same in the whole block."""
    var my_rank: Int
    var deadline: Deadline
    var before: LaunchHeader
    var control: SharedWord
    """The control words, all 0 at first."""
    var counters: Counters[Self.group]
    var recv_bufs: SharedAddresses
    """Receive buffers of all ranks, of dispatch or of combine."""
    var counts: SharedAddresses
    """Counts buffers of dispatch of all ranks, in a combine, too."""
    var mask: UInt32
    """Bits of the ranks that were masked when the launch began."""

    @staticmethod
    @always_inline
    def begin[
        n_control: Int
    ](
        word: Int32,
        mask: Int32,
        counters: Counters[Self.group],
        buffers: SharedBuffers,
        phase: Int,
    ) -> Self:
        """Sets a block up, with a barrier; `start.mojo` loads `word` and `mask`."""
        var control = shared[UInt32, n_control + 1]()
        var lane = Int(lane_id())
        var warp_idx = Int(warp_id())
        var header = LaunchHeader.of(word)
        if warp_idx == 0:
            # One warp decides for its block: a failure that is recorded meanwhile
            # must not make some warps leave and others wait for them.
            var can_go = check_header(word, counters, phase)
            if lane == 0:
                control[unsafe_offset=n_control] = 1 if can_go else 0
        elif warp_idx == 1:
            for i in range(lane, n_control, WARP_SIZE):
                control[unsafe_offset=i] = 0
        barrier()
        return Self(
            lane,
            warp_idx,
            control[unsafe_offset=n_control] != 0,
            header.number[Word.MY_RANK](),
            Deadline.after(header.number[Word.TIMEOUT_MS]()),
            header,
            control,
            counters,
            buffers.recv_bufs,
            buffers.counts,
            mask_of[Self.group](mask),
        )

    # ------------------------------------------------- what follows from the header

    @always_inline
    def sending(self) -> UInt32:
        return next_generation(self.before.generation[Self._SENT]())

    @always_inline
    def receiving(self) -> UInt32:
        return next_generation(self.before.generation[Self._RECEIVED]())

    @always_inline
    def answered[sends: Bool](self) -> UInt32:
        """Returns the generation of the dispatch that this combine answers."""
        comptime word = Word.DISPATCH_RECEIVED if sends else Word.COMBINE_OF
        return self.before.generation[word]()

    @always_inline
    def refuses_to_combine(self) -> Bool:
        """Refuses to send rows before the first dispatch; returns whether it has."""
        if self.before.generation[Word.DISPATCH_RECEIVED]() != 0:
            return False
        self.refuse(Failure.NOTHING_DISPATCHED, SEND)
        return True

    @always_inline
    def is_overtaken(self, dispatch_generation: UInt32) -> Bool:
        """Returns whether two dispatches were sent since: choices of two are kept."""
        var sent = self.before.generation[Word.DISPATCH_SENT]()
        return sent != dispatch_generation and sent != (
            next_generation(dispatch_generation)
        )

    @always_inline
    def recv_buf(self) -> BytePointer:
        return bytes_at(self.recv_bufs[unsafe_offset=self.my_rank])

    @always_inline
    def my_counts(self) -> BytePointer:
        return bytes_at(self.counts[unsafe_offset=self.my_rank])

    @always_inline
    def flag(self, rank: Int, offset: Int) -> FlagPointer:
        return flag_at(bytes_at(self.counts[unsafe_offset=rank]), offset)

    @always_inline
    def is_far(self, rank: Int) -> Bool:
        """Returns whether a rank is on another host, where only puts arrive."""
        return Self.group.spans_hosts() and self.counts[unsafe_offset=rank] == 0

    @always_inline
    def relay_to(self, rank: Int) -> Int:
        """Names the rank of a rank's host with which this one exchanges, if ranks relay.
        """
        return Self.group.relay_to(self.my_rank, rank, Self.group.n_mapped)

    @always_inline
    def is_mate(self, rank: Int) -> Bool:
        """Returns whether a rank is another one of this host."""
        comptime n = Self.group.n_mapped
        return rank // n == self.my_rank // n and rank != self.my_rank

    @always_inline
    def is_put(self, src_rank: Int) -> Bool:
        """Returns whether a source puts what it sends here, and no rank of this host
        relays it."""
        comptime if Self.group.relays:
            return self.relays_for(src_rank)
        return self.is_far(src_rank)

    @always_inline
    def relays_for(self, src_rank: Int) -> Bool:
        """Returns whether this rank relays what a source sends to its host."""
        comptime if not Self.group.relays:
            return False
        return self.is_far(src_rank) and self.relay_to(src_rank) == src_rank

    # ------------------------------------------------------------- work and failures

    @always_inline
    def word(self, i: Int) -> SharedWord:
        return self.control.unsafe_offset(i)

    @always_inline
    def await_word(self, i: Int, least: Int):
        """Waits for other warps of the block, without a deadline of its own."""
        while load_acquire_block(self.word(i)) < UInt32(least):
            pass

    @always_inline
    def next_round(self, counter: Int) -> Int:
        """Counts what the warps of this block take; all lanes call it."""
        var round: UInt32 = 0
        if self.lane == 0:
            round = fetch_add_block(self.word(counter), 1)
        return Int(warp.shuffle_idx(round, UInt32(0)))

    @always_inline
    def next_item(self, counter: Int) -> Int:
        """Takes the next item of this block; all lanes call it."""
        return self.next_round(counter) * Int(grid_dim.x) + Int(block_idx.x)

    @always_inline
    def take[what: Int](self, counter: Int, from_all: Bool) -> Int32:
        """Takes the next item, which `of_lane_0` waits for.

        `what`: one of `Taken`. With `from_all` all blocks take from one counter, else
        each takes its own items, which its control word `counter` counts.
        """
        var item: Int32 = 0
        if self.lane == 0:
            if from_all:
                item = fetch_add_gpu(
                    self.counters.taken(what, self._generation_of[what]())
                )
            else:
                var round = fetch_add_block(self.word(counter), 1)
                item = Int32(Int(round) * Int(grid_dim.x) + Int(block_idx.x))
        return item

    @always_inline
    def of_lane_0(self, item: Int32) -> Int:
        """Returns lane 0's item; all lanes call it."""
        return Int(warp.shuffle_idx(item, UInt32(0)))

    @always_inline
    def _generation_of[what: Int](self) -> UInt32:
        return self.receiving() if what == Taken.SUMS else self.sending()

    @always_inline
    def fail(
        self,
        code: Int32,
        missing_rank: Int,
        expert_or_row: Int,
        found: UInt64,
        a: Int = 0,
        b: Int = 0,
    ):
        """Records that what a peer sends is missing or wrong; `found`: its flag."""
        comptime if Self.group.masks:
            # The peer is masked.
            if is_missing(code):
                return
        self.record(
            code, RECEIVE, missing_rank, expert_or_row, self.receiving(), found, a, b
        )

    @always_inline
    def refuse(
        self, code: Int32, phase: Int, expert_or_row: Int = -1, a: Int = 0, b: Int = 0
    ):
        """Records what this rank was given and cannot take."""
        self.record(
            code,
            phase,
            self.my_rank,
            expert_or_row,
            self.sending() if phase == SEND else self.receiving(),
            0,
            a,
            b,
        )

    @always_inline
    def record(
        self,
        code: Int32,
        phase: Int,
        missing_rank: Int,
        expert_or_row: Int,
        wanted: UInt32,
        found: UInt64,
        a: Int = 0,
        b: Int = 0,
    ):
        """Records a failure. After a fatal one later launches do nothing, so that they
        do not publish that this one has read everything."""
        record_failure(
            self.counters, code, phase, missing_rank, expert_or_row, wanted, found, a, b
        )
        if is_fatal(code):
            self.counters.set_broken()

    @always_inline
    def is_masked(self, rank: Int) -> Bool:
        comptime if not Self.group.masks:
            return False
        return has_bit(self.mask, rank)

    @always_inline
    def liveness(self) -> Liveness[Self.group]:
        return {self.counters, self.counts, self.my_rank, self.deadline}

    @always_inline
    def give_up_if_late(self, mut n_polls: Int, rank: Int) -> Bool:
        """Counts a poll without success; returns whether to wait no longer for a rank.

        If ranks mask, it is masked from then on.
        """
        n_polls += 1
        comptime if Self.group.masks:
            if self.is_masked(rank):
                return True
        if n_polls % POLLS_PER_CLOCK_READ != 0:
            return False
        comptime if Self.group.masks:
            return self.liveness().mask_if_late(rank)
        return self.deadline.has_passed()

    @always_inline
    def await_message(
        self, flag: FlagPointer, missing_rank: Int, expert_id: Int = -1
    ) -> UInt64:
        var word = load_acquire_sys(flag)
        var n_polls = 0
        while generation_of(word) != self.receiving():
            if self.give_up_if_late(n_polls, missing_rank):
                self.fail(Failure.NO_MESSAGE, missing_rank, expert_id, word)
                break
            word = load_acquire_sys(flag)
        return word

    # ------------------------------------------------------------------ generations

    @always_inline
    def advance[sends: Bool, receives: Bool](self, n_tokens: Int):
        """Records the generations that the launch sends and receives, with one lane, and
        of a dispatch how many tokens it sends."""
        comptime is_combine = Self.group.is_combine()
        comptime if blocks_share_work(Self.group):
            comptime if sends:
                comptime what = Taken.SUM_SENDS if is_combine else Taken.TOKEN_SENDS
                self._clear_next[what]()
            comptime if receives and is_combine:
                self._clear_next[Taken.SUMS]()
        comptime if sends:
            self.counters.set_generation(Self._SENT, self.sending())
            comptime if is_combine:
                self.counters.set_generation(
                    Word.COMBINE_OF, self.before.generation[Word.DISPATCH_RECEIVED]()
                )
            else:
                self.counters.n_tokens_of(self.sending())[] = Int32(n_tokens)
        comptime if receives:
            self.counters.set_generation(Self._RECEIVED, self.receiving())

    @always_inline
    def _clear_next[what: Int](self):
        """Clears the counter of the next launch that takes `what`."""
        var next = next_generation(self._generation_of[what]())
        self.counters.taken(what, next)[] = 0
