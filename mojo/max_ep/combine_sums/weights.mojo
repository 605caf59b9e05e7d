# SPDX-License-Identifier: Apache-2.0
"""Router weights of partial sums. If they are given to combine, the source of a token
publishes those of each owner's choices, and the owner awaits them once it has loaded the
rows (`Group.late_weights`).
"""
from max.gpu import block_idx, grid_dim, lane_id, syncwarp, warp_id, WARP_SIZE

from ..device.block import Block
from ..device.done_words import await_readers
from ..device.warp import any_lane, bytes_at
from ..protocol.counters import Counters, NO_ROW, rank_elsewhere
from ..protocol.entries import value_of_word, value_word
from ..protocol.failures import Failure, SEND
from ..protocol.flags import (
    count_of,
    flag_at,
    generation_of,
    load_relaxed_sys,
    store_relaxed_sys,
)
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import Group
from ..protocol.transport import put_word


@fieldwise_init
struct LaneWeight[group: Group](TrivialRegisterPassable):
    """The router weight of a lane's choice, once it has come."""

    var value: Float32
    var block: Block[Self.group]
    var src_rank: Int
    var choice: Int
    var is_awaited: Bool
    """Whether it comes from the token's rank, and has not been read."""
    var is_late: Bool
    """Whether it did not come in time."""

    @staticmethod
    @always_inline
    def known(value: Float32, block: Block[Self.group]) -> Self:
        return Self(value, block, 0, 0, False, False)

    @staticmethod
    @always_inline
    def of_source(
        value: Float32, block: Block[Self.group], src_rank: Int, choice: Int
    ) -> Self:
        """Describes that of a choice of a peer; `value`: what dispatch has recorded."""
        return Self(value, block, src_rank, choice, Self.group.late_weights, False)

    @always_inline
    def await_(mut self, has_row: Bool):
        """Reads what is awaited, with all lanes; `has_row`: whether the choice has one.
        """
        comptime if not Self.group.late_weights:
            return
        if not self.is_awaited:
            return
        self.is_awaited = False
        if has_row:
            var generation = self.block.sending()
            var at = flag_at(
                self.block.recv_buf(),
                Self.group.late_weight_offset(self.src_rank, self.choice),
            )
            var word = load_relaxed_sys(at)
            var n_polls = 0
            while generation_of(word) != generation:
                if self.block.give_up_if_late(n_polls, self.src_rank):
                    self.block.record(
                        Failure.NO_MESSAGE, SEND, self.src_rank, -1, generation, word
                    )
                    self.is_late = True
                    break
                word = load_relaxed_sys(at)
            self.value = value_of_word[DType.float32](word)
        syncwarp()


@always_inline
def own_weight[
    group: Group, //
](
    weights: ImmPointer[Float32], row: Int32, token_idx: Int, block: Block[group]
) -> LaneWeight[group]:
    """Loads the weight of a choice that has a row on its token's rank."""
    var value: Float32 = 0
    if row >= 0:
        value = weights[unsafe_offset=group.choice(token_idx, block.lane)]
    return LaneWeight[group].known(value, block)


struct WeightSender[group: Group](TrivialRegisterPassable):
    """How a lane publishes the weights of this rank's choices. What the first needs is
    loaded with the header."""

    var counters: Counters[Self.group]
    var weights: ImmPointer[Float32]
    """`[n_tokens][top_k]`."""
    var n_choices: Int
    var choice: Int
    """The next one."""
    var row: Int32
    """As in `Counters.received_rows`."""
    var weight: Float32

    @always_inline
    def __init__(
        out self,
        counters: Counters[Self.group],
        weights: ImmPointer[Float32],
        n_tokens: Int,
    ):
        var warp_idx = Int(block_idx.x) + Int(warp_id()) * Int(grid_dim.x)
        self.counters = counters
        self.weights = weights
        self.n_choices = Self.group.choice(n_tokens, 0)
        self.choice = warp_idx * WARP_SIZE + Int(lane_id())
        self.row = NO_ROW
        self.weight = 0

    @always_inline
    def load(mut self):
        self.row = NO_ROW
        if self.choice < self.n_choices:
            self.row = self.counters.received_rows(0)[unsafe_offset=self.choice]
            self.weight = self.weights[unsafe_offset=self.choice]

    @always_inline
    def send(mut self, block: Block[Self.group]) -> Bool:
        """Publishes the weight of each choice to its owner, with each warp; false: a peer
        has not read the last ones."""
        if not any_lane(self.choice < self.n_choices):
            return True
        # I3, for weights: an owner's done word follows its partial sums, and these its
        # last look at them.
        if not await_readers(block):
            return False
        while any_lane(self.choice < self.n_choices):
            var owner = rank_elsewhere(self.row)
            if owner >= 0:
                # I1: only this rank writes the weights of its choices.
                self._publish(owner, block)
            self.choice += Self.group.num_threads * Int(grid_dim.x)
            self.load()
        return True

    @always_inline
    def _publish(self, owner: Int, block: Block[Self.group]):
        var value = count_of(value_word(block.sending(), self.weight))
        var offset = Self.group.late_weight_offset(block.my_rank, self.choice)
        var recv_buf = block.recv_bufs[unsafe_offset=owner]
        comptime if Self.group.spans_hosts():
            if block.is_far(owner):
                # A signal, since its owner awaits it: none is under way when the next
                # one goes. Of a put of several words some would be nobody's.
                recv_buf = block.recv_bufs[unsafe_offset=block.my_rank]
                put_word(recv_buf + UInt64(offset), block.sending(), value, owner)
                return
        store_relaxed_sys(flag_at(bytes_at(recv_buf), offset), block.sending(), value)
