# SPDX-License-Identifier: Apache-2.0
"""Reduced combine of `rank_slots` for GPU ranks.

The rank of the experts adds its rows of a token, and sends one partial sum to
the token's rank, which adds at most `n_ranks` of them:

    partial = 0; for k with an expert here: partial = fma(weight[k], row[k],
        partial)                                              in float32
    sent: partial, rounded once to the partial dtype
    result = own partial, not rounded; then + those of the other ranks, in
        ascending order; rounded to the combine dtype; with a fused shared
        expert then + shared[token], and rounded again

Weights and rows of a token are those that dispatch has noted. Every 16 bytes of
a partial sum are their own flag; the reader puts `EMPTY` back.

After the sending half: every partial sum is on its way. After the receiving
half: the result is there; owners hear from the next launch
(`publish_earlier_reads`), or, split, from the end of this one, that their
partial sums were read. A launch that fails fills what it cannot compute with
NaN.
"""
import max.gpu.primitives.warp as warp
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    grid_dim,
)
from std.bit import count_trailing_zeros
from std.math import ceildiv, fma
from std.memory import bitcast
from std.sys import size_of
from std.utils import StaticTuple
from std.utils.numerics import nan

from ..counters import EPLocalSyncCounters, NO_EXPERT, NO_ROW
from ..expert_slots.combine import combine_layout_of, fill_with_nan
from ..expert_slots.device_steps import (
    SharedAddresses,
    any_lane,
    bytes_at,
    is_last_block,
    load16,
    share_addresses,
    store16,
    take_turn,
)
from ..failures import (
    BAD_N_TOKENS,
    NOTHING_DISPATCHED,
    NO_MESSAGE,
    OTHER_ROWS,
    OVERTAKEN,
    TOO_MANY_ROWS,
    note_failure,
)
from ..flags import (
    FlagPointer,
    SPINS_BETWEEN_LOOKS,
    next_generation,
    peek_16,
    put_16,
)
from ..layout import MESSAGE_ALIGN, RegionLayout
from ..token_format import BytePointer, LaneBytes, SharedRows
from .device_steps import (
    EMPTY,
    Launch,
    await_launch_before,
    await_readers,
    divmod_32,
    header_word,
    is_last_to_start,
    note_readers,
    publish_earlier_reads,
    publish_reads,
    start_launch,
    without_empty,
)

comptime N_WARPS_MIN = 4
"""Warps of a block at least: the last three also notice, count and tell."""

comptime _SEND = 2
comptime _RECEIVE = 3

# The block's control words: next part of a token to add up, and next unit to send.
comptime _NEXT_PART = 0
comptime _NEXT_TURN = 1
comptime _N_CONTROL = 2

comptime SEND_LOADS = 8
"""Loads of rows that a lane has under way when it sends, of several rows or
several steps."""

comptime FEW_SEND_LOADS = 6
"""The same if it adds one step at once: less code."""

comptime ADD_LOADS = 4
"""The same when it also looks at partial sums; more do not fit into registers."""

comptime MAX_LOOKS = 8
"""Looks at partial sums that a lane has under way while it adds rows."""


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
    return n_tokens <= 64


@always_inline
def n_parts_of(n_tokens: Int, n_steps: Int) -> Int:
    """Chooses into how many parts warps take a token.

    Args:
        n_tokens: Tokens of a rank.
        n_steps: Steps of a row.

    Returns:
        In `[1, n_steps]`.
    """
    if n_tokens <= 64:
        return n_steps
    return min(14 if n_tokens <= 256 else 7, n_steps)


@always_inline
def _add_rows[
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


# ------------------------------------------------------------ the sending half


@always_inline
def _send_partials[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    layout: RegionLayout,
    are_few: Bool,
](
    expert_rows: BytePointer,
    most: Int,
    recv_bufs: SharedAddresses,
    dispatch_counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    sender: Int,
    n_senders: Int,
):
    """Sends this block's share of the partial sums, with one warp of several.

    Parameters:
        combine_dtype: Element type of the rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        are_few: Whether `are_few_tokens`.

    Args:
        expert_rows: `[n_rows][hidden_size]`.
        most: Tokens of the source that has most.
        recv_bufs: All ranks' combine recv buffers.
        dispatch_counts: All ranks' dispatch counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        sender: This warp among those that send.
        n_senders: How many do.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime n_steps = Format.n_steps_at_once[are_few]()
    comptime n_ranks = layout.n_ranks
    comptime top_k = layout.top_k
    comptime n_others = n_ranks - 1
    comptime if n_others > 0:
        var lane = launch.lane
        var my_rank = launch.my_rank
        var n_blocks = Int(grid_dim.x)
        var n_parts = n_parts_of(most, Format.n_steps)
        var n_tokens_of = counters.received_tokens(layout)
        var is_waiting = True
        var turn = sender
        while True:
            var unit = Int(block_idx.x) + turn * n_blocks
            if unit >= most * n_others * n_parts:
                return
            comptime if not are_few:
                turn = n_senders + take_turn(
                    launch.control.unsafe_offset(_NEXT_TURN), lane
                )
            else:
                # A turn is one more trip to shared memory.
                turn += n_senders
            var place, part = divmod_32(unit, n_parts)
            var token_idx, other = divmod(place, n_others)
            var src_rank = my_rank + 1 + other
            src_rank -= n_ranks if src_rank >= n_ranks else 0
            # All three at once: what stands behind the last token is not used.
            var n_tokens = Int(n_tokens_of[unsafe_offset=src_rank])
            var row = NO_ROW
            var weight: Float32 = 0
            if lane < top_k:
                var choice = layout.choice(token_idx, lane)
                row = counters.received_rows(layout, src_rank)[
                    unsafe_offset=choice
                ]
                weight = counters.received_weights(layout, src_rank)[
                    unsafe_offset=choice
                ]
            if token_idx >= n_tokens or not any_lane(row != NO_ROW):
                continue
            var begin = part * Format.n_steps // n_parts
            var end = (part + 1) * Format.n_steps // n_parts
            # I4: the partial sums of a rank have one writer.
            var to = bytes_at(
                recv_bufs[unsafe_offset=src_rank]
                + UInt64(layout.partial_offset(my_rank, token_idx))
            )
            for first in range(begin, end, n_steps):
                var sums = Array[Format.Sum, n_steps](fill=0)
                _add_rows[
                    combine_dtype,
                    partial_dtype,
                    hidden_size,
                    n_steps,
                    SEND_LOADS if n_steps > 1 else FEW_SEND_LOADS,
                ](sums, expert_rows, first, end, row, weight, lane)
                if is_waiting:
                    # I3, for partial sums.
                    if not await_readers[layout, True](
                        launch, dispatch_counts, counters, _SEND
                    ):
                        return
                    is_waiting = False
                comptime for step in range(n_steps):
                    var share = (first + step) * WARP_SIZE + lane
                    if first + step < end and share < Format.n_shares:
                        Format.put_partial(to, share, sums[step])


# ---------------------------------------------------------- the receiving half


@always_inline
def _await_16[
    n_experts: Int
](
    p: BytePointer,
    first_look: LaneBytes,
    owner_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Tuple[LaneBytes, Bool]:
    """Waits for 16 bytes of a partial sum, and puts `EMPTY` back.

    Parameters:
        n_experts: Experts of the group.

    Args:
        p: Where they come.
        first_look: What was there before.
        owner_rank: Who sends them.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        The bytes, and whether they came.
    """
    var bytes = first_look
    var spins = 0
    while bytes[3] == EMPTY:
        spins += 1
        if spins % SPINS_BETWEEN_LOOKS == 0 and launch.deadline.has_passed():
            note_failure(
                counters.failure(),
                NO_MESSAGE,
                _RECEIVE,
                owner_rank,
                -1,
                generation,
                0,
            )
            return (bytes, False)
        bytes = peek_16(p)
    # I3: whoever writes here next has seen a later done word.
    store16(p, LaneBytes(EMPTY))
    return (bytes, True)


@always_inline
def _look_at_partial[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_steps: Int,
    n_looks: Int,
    first_look: Int,
](
    mut looks: Array[LaneBytes, n_looks],
    partial_sum: BytePointer,
    first: Int,
    end: Int,
    lane: Int,
):
    """Reads a lane's shares of a partial sum, whether they have come or not.

    Parameters:
        combine_dtype: Element type of rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_steps: Steps that are added at once.
        n_looks: Length of `looks`.
        first_look: First of those of this partial sum.

    Args:
        looks: Result.
        partial_sum: `[hidden_size]` in this rank's region.
        first: First step.
        end: Behind the last.
        lane: This lane.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime for step in range(n_steps):
        var share = (first + step) * WARP_SIZE + lane
        if first + step < end and share < Format.n_shares:
            comptime for i in range(Format.n_partial_vectors):
                looks[
                    first_look + step * Format.n_partial_vectors + i
                ] = peek_16(Format.partial_vector(partial_sum, share, i))


@always_inline
def _add_partial[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    n_steps: Int,
    n_looks: Int,
    first_look: Int,
](
    mut sums: Array[
        PartialFormat[combine_dtype, partial_dtype, hidden_size].Sum, n_steps
    ],
    looks: Array[LaneBytes, n_looks],
    partial_sum: BytePointer,
    first: Int,
    end: Int,
    owner_rank: Int,
    generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Adds a lane's shares of a partial sum as they come.

    Parameters:
        combine_dtype: Element type of rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        n_steps: Steps that are added at once.
        n_looks: Length of `looks`.
        first_look: First of those of this partial sum.

    Args:
        sums: Shares of this lane, to be added to.
        looks: What was there before.
        partial_sum: `[hidden_size]` in this rank's region.
        first: First step.
        end: Behind the last.
        owner_rank: Who sends it.
        generation: The generation that is received.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether they came; this lane's.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime n = Format.width // Format.n_partial_vectors
    var are_there = True
    comptime for step in range(n_steps):
        var share = (first + step) * WARP_SIZE + launch.lane
        if first + step < end and share < Format.n_shares:
            comptime for i in range(Format.n_partial_vectors):
                var bytes, is_there = _await_16(
                    Format.partial_vector(partial_sum, share, i),
                    looks[first_look + step * Format.n_partial_vectors + i],
                    owner_rank,
                    generation,
                    launch,
                    counters,
                )
                are_there = are_there and is_there
                var part = bitcast[partial_dtype, n](bytes).cast[
                    DType.float32
                ]()
                comptime for j in range(n):
                    sums[step][i * n + j] += part[j]
    return are_there


@always_inline
def _add_tokens[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    layout: RegionLayout,
    fused_shared_expert: Bool,
    n_steps: Int,
](
    output_tokens: BytePointer,
    n_tokens: Int,
    expert_rows: BytePointer,
    recv_bufs: SharedAddresses,
    dispatch_generation: UInt32,
    is_bad: Bool,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Adds up this block's share of the tokens, with one warp of several.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.
        n_steps: Steps that are added at once.

    Args:
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens of this rank.
        expert_rows: This rank's expert rows.
        recv_bufs: All ranks' combine recv buffers.
        dispatch_generation: The dispatch that is answered.
        is_bad: Whether to write NaN only.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime top_k = layout.top_k
    comptime row_bytes = hidden_size * Format.row_element
    comptime n_vectors = Format.n_partial_vectors
    comptime n_looks = layout.n_ranks * n_steps * n_vectors
    comptime looks_first = n_looks <= MAX_LOOKS and n_steps * n_vectors < 4
    comptime max_looks = n_looks if looks_first else n_steps * n_vectors
    var lane = launch.lane
    var my_rank = launch.my_rank
    var generation = next_generation(launch.before.combine_received)
    var recv_buf = bytes_at(recv_bufs[unsafe_offset=my_rank])
    var choices = counters.choices(dispatch_generation, layout.n_choices())
    var n_parts = n_parts_of(n_tokens, Format.n_steps)
    var is_broken = is_bad
    while True:
        var turn = take_turn(launch.control.unsafe_offset(_NEXT_PART), lane)
        # From the last block on: those that send least.
        var item = (
            turn * Int(grid_dim.x) + Int(grid_dim.x) - 1 - Int(block_idx.x)
        )
        if item >= n_tokens * n_parts:
            return
        var token_idx, part = divmod_32(item, n_parts)
        var row = NO_ROW
        var weight: Float32 = 0
        var owner = -1
        if lane < top_k:
            # All three at once: there is no row of what is not here.
            var choice = layout.choice(token_idx, lane)
            var expert = choices[unsafe_offset=choice]
            row = counters.received_rows(layout, my_rank)[unsafe_offset=choice]
            weight = counters.received_weights(layout, my_rank)[
                unsafe_offset=choice
            ]
            if expert != NO_EXPERT:
                owner = Int(expert) // layout.n_local_experts()
        if is_broken:
            owner = -1
            row = NO_ROW
        var owners: UInt32 = 0
        comptime if looks_first:
            comptime for rank in range(layout.n_ranks):
                if any_lane(owner == rank) and rank != my_rank:
                    owners |= UInt32(1) << UInt32(rank)
        var begin = part * Format.n_steps // n_parts
        var end = (part + 1) * Format.n_steps // n_parts
        var result = output_tokens.unsafe_offset(token_idx * row_bytes)
        for first in range(begin, end, n_steps):
            # A first look at the partial sums, under way while rows are added.
            var looks = Array[LaneBytes, max_looks](fill=LaneBytes(EMPTY))
            comptime if looks_first:
                comptime for rank in range(layout.n_ranks):
                    if (owners >> UInt32(rank)) & 1 != 0:
                        _look_at_partial[
                            combine_dtype,
                            partial_dtype,
                            hidden_size,
                            n_steps,
                            max_looks,
                            rank * n_steps * n_vectors,
                        ](
                            looks,
                            recv_buf.unsafe_offset(
                                layout.partial_offset(rank, token_idx)
                            ),
                            first,
                            end,
                            lane,
                        )
            var sums = Array[Format.Sum, n_steps](fill=0)
            _add_rows[
                combine_dtype, partial_dtype, hidden_size, n_steps, ADD_LOADS
            ](sums, expert_rows, first, end, row, weight, lane)
            var is_there = True
            comptime if looks_first:
                comptime for rank in range(layout.n_ranks):
                    if (owners >> UInt32(rank)) & 1 != 0:
                        var came = _add_partial[
                            combine_dtype,
                            partial_dtype,
                            hidden_size,
                            n_experts,
                            n_steps,
                            max_looks,
                            rank * n_steps * n_vectors,
                        ](
                            sums,
                            looks,
                            recv_buf.unsafe_offset(
                                layout.partial_offset(rank, token_idx)
                            ),
                            first,
                            end,
                            rank,
                            generation,
                            launch,
                            counters,
                        )
                        is_there = is_there and came
            else:
                # The lowest owner that is left, each time.
                var last_owner = -1
                while True:
                    var next_owner = Int32(layout.n_ranks)
                    if owner > last_owner and owner != my_rank:
                        next_owner = Int32(owner)
                    last_owner = Int(warp.min(next_owner))
                    if last_owner == layout.n_ranks:
                        break
                    # All that are missing are looked at at once.
                    var partial_sum = recv_buf.unsafe_offset(
                        layout.partial_offset(last_owner, token_idx)
                    )
                    _look_at_partial[
                        combine_dtype,
                        partial_dtype,
                        hidden_size,
                        n_steps,
                        max_looks,
                        0,
                    ](looks, partial_sum, first, end, lane)
                    var came = _add_partial[
                        combine_dtype,
                        partial_dtype,
                        hidden_size,
                        n_experts,
                        n_steps,
                        max_looks,
                        0,
                    ](
                        sums,
                        looks,
                        partial_sum,
                        first,
                        end,
                        last_owner,
                        generation,
                        launch,
                        counters,
                    )
                    is_there = is_there and came
            if any_lane(not is_there):
                counters.set_broken()
                is_broken = True
                owner = -1
                owners = 0
                row = NO_ROW
            comptime for step in range(n_steps):
                var share = (first + step) * WARP_SIZE + lane
                if first + step < end and share < Format.n_shares:
                    comptime if fused_shared_expert:
                        sums[step] = (
                            sums[step]
                            .cast[combine_dtype]()
                            .cast[DType.float32]()
                        )
                        comptime for i in range(Format.n_row_vectors):
                            var numbers = Format.widen(
                                load16(
                                    Format.row_vector(
                                        expert_rows.unsafe_offset(
                                            token_idx * row_bytes
                                        ),
                                        share,
                                        i,
                                    )
                                )
                            )
                            comptime n = Format.width // Format.n_row_vectors
                            comptime for j in range(n):
                                sums[step][i * n + j] += numbers[j]
                    if is_broken:
                        sums[step] = nan[DType.float32]()
                    Format.store_row(result, share, sums[step])


@always_inline
def _is_bad_answer[
    n_experts: Int
](
    n_tokens: Int,
    dispatch_generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Tells whether the result cannot be that of the dispatch; notes why.

    Parameters:
        n_experts: Experts of the group.

    Args:
        n_tokens: Tokens of the result.
        dispatch_generation: The dispatch that is answered.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether to write NaN.
    """
    var generation = next_generation(launch.before.combine_received)
    var n_sent = launch.before.n_tokens(dispatch_generation)
    if n_sent != n_tokens:
        note_failure(
            counters.failure(),
            BAD_N_TOKENS,
            _RECEIVE,
            launch.my_rank,
            -1,
            generation,
            0,
            n_tokens,
            n_sent,
        )
        counters.set_broken()
        return True
    # Where the own rows are, and their weights, is known of the last dispatch.
    if launch.before.dispatch_received != dispatch_generation:
        note_failure(
            counters.failure(),
            OTHER_ROWS,
            _RECEIVE,
            launch.my_rank,
            -1,
            generation,
            0,
            Int(dispatch_generation),
            Int(launch.before.dispatch_received),
        )
        counters.set_broken()
        return True
    # Choices are kept for two dispatches.
    var dispatch_sent = launch.before.dispatch_sent
    if dispatch_sent != dispatch_generation and dispatch_sent != (
        next_generation(dispatch_generation)
    ):
        note_failure(
            counters.failure(),
            OVERTAKEN,
            _RECEIVE,
            launch.my_rank,
            -1,
            generation,
            0,
        )
        counters.set_broken()
        return True
    return False


@always_inline
def _send[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    layout: RegionLayout,
](
    expert_rows: BytePointer,
    recv_bufs: SharedAddresses,
    dispatch_counts: SharedAddresses,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
    n_senders: Int,
):
    """Has a warp of a block take its part in the sending half.

    Parameters:
        combine_dtype: Element type of the rows.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        expert_rows: `[n_rows][hidden_size]`.
        recv_bufs: All ranks' combine recv buffers.
        dispatch_counts: All ranks' dispatch counts buffers.
        launch: From `start_launch`.
        counters: This rank's local words.
        n_senders: Warps that send.
    """
    if launch.warp_idx >= n_senders:
        return
    var most = launch.before.most_received
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime for are_few in [True, False]:
        if are_few_tokens(most) == are_few:
            _send_partials[
                combine_dtype,
                partial_dtype,
                hidden_size,
                n_experts,
                layout,
                are_few,
            ](
                expert_rows,
                most,
                recv_bufs,
                dispatch_counts,
                launch,
                counters,
                launch.warp_idx,
                n_senders,
            )


@always_inline
def _receive[
    combine_dtype: DType,
    partial_dtype: DType,
    hidden_size: Int,
    n_experts: Int,
    layout: RegionLayout,
    fused_shared_expert: Bool,
](
    output_tokens: BytePointer,
    n_tokens: Int,
    expert_rows: BytePointer,
    recv_bufs: SharedAddresses,
    dispatch_generation: UInt32,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
):
    """Has a warp of a block take its part in the receiving half.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        hidden_size: Elements of a row.
        n_experts: Experts of the group.
        layout: How the regions are cut.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.

    Args:
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens of this rank.
        expert_rows: This rank's expert rows.
        recv_bufs: All ranks' combine recv buffers.
        dispatch_generation: The dispatch that is answered.
        launch: From `start_launch`.
        counters: This rank's local words.
    """
    var is_bad = _is_bad_answer(n_tokens, dispatch_generation, launch, counters)
    comptime Format = PartialFormat[combine_dtype, partial_dtype, hidden_size]
    comptime for are_few in [True, False]:
        if are_few_tokens(n_tokens) == are_few:
            _add_tokens[
                combine_dtype,
                partial_dtype,
                hidden_size,
                n_experts,
                layout,
                fused_shared_expert,
                Format.n_steps_at_once[are_few](),
            ](
                output_tokens,
                n_tokens,
                expert_rows,
                recv_bufs,
                dispatch_generation,
                is_bad,
                launch,
                counters,
            )


@always_inline
def _is_nothing_dispatched[
    n_experts: Int
](launch: Launch, counters: EPLocalSyncCounters[n_experts]) -> Bool:
    """Tells whether there is no dispatch to answer; notes it.

    Parameters:
        n_experts: Experts of the group.

    Args:
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether to do nothing.
    """
    if launch.before.dispatch_received != 0:
        return False
    note_failure(
        counters.failure(),
        NOTHING_DISPATCHED,
        _SEND,
        launch.my_rank,
        -1,
        next_generation(launch.before.combine_sent),
        0,
    )
    counters.set_broken()
    return True


@always_inline
def _has_too_few_rows[
    n_experts: Int, layout: RegionLayout
](
    n_rows_max: Int,
    phase: Int,
    launch: Launch,
    counters: EPLocalSyncCounters[n_experts],
) -> Bool:
    """Tells whether the rows are fewer than dispatch delivered; notes it.

    Parameters:
        n_experts: Experts of the group.
        layout: How the regions are cut.

    Args:
        n_rows_max: Rows given.
        phase: Who asks.
        launch: From `start_launch`.
        counters: This rank's local words.

    Returns:
        Whether to do nothing.
    """
    comptime n_pairs = layout.n_local_experts() * layout.n_ranks
    var n_rows = counters.pair_row(n_pairs)
    if n_rows <= n_rows_max:
        return False
    note_failure(
        counters.failure(),
        TOO_MANY_ROWS,
        phase,
        launch.my_rank,
        0,
        next_generation(launch.before.combine_sent),
        0,
        n_rows,
        n_rows_max,
    )
    counters.set_broken()
    return True


# ------------------------------------------------------------------ the kernels


@always_inline
def n_send_warps(n_tokens: Int, n_warps: Int) -> Int:
    """Chooses how many warps of a block send before they add up tokens.

    Args:
        n_tokens: Tokens of this rank.
        n_warps: Warps of a block.

    Returns:
        In `[1, n_warps]`.
    """
    return min(16 if 64 < n_tokens and n_tokens <= 256 else 8, n_warps)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def combine_async_kernel[
    combine_dtype: DType,
    partial_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
](
    expert_rows: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends a partial sum of each token to its rank.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of the rows.
        partial_dtype: Element type of partial sums.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        protocol: A reduced one.

    Args:
        expert_rows: `[n_rows_max][hidden_size]`, in the order of the last
            dispatch, aligned to 16 bytes.
        n_rows_max: How many.
        recv_buf_ptrs: All ranks' combine recv buffers.
        recv_count_ptrs: All ranks' combine counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = combine_layout_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        protocol,
        partial_dtype,
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var dispatch_counts = share_addresses[n_ranks, False](
        recv_count_ptrs, 0, layout.dispatch_counts_from_combine_counts()
    )
    var launch = start_launch[layout, _N_CONTROL](word, ep_counters, _SEND)
    if not launch.can_go or _is_nothing_dispatched(launch, ep_counters):
        return
    if is_last_to_start(launch, ep_counters, n_warps - 2):
        ep_counters.set_combine_sent(
            next_generation(launch.before.combine_sent)
        )
        ep_counters.set_combine_of(launch.before.dispatch_received)
    publish_earlier_reads[layout](launch, dispatch_counts, n_warps - 3)
    if _has_too_few_rows[n_experts, layout](
        Int(n_rows_max), _SEND, launch, ep_counters
    ):
        return
    _send[combine_dtype, partial_dtype, hidden_size, n_experts, layout](
        BytePointer(unsafe_from_address=Int(expert_rows)),
        recv_bufs,
        dispatch_counts,
        launch,
        ep_counters,
        n_warps,
    )
    # AFTER: this generation's partial sums are on their way.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def combine_wait_kernel[
    combine_dtype: DType,
    partial_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    fused_shared_expert: Bool = False,
    shares_gpu: Bool = True,
](
    expert_rows: SharedRows,
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Adds the partial sums of each token, as they arrive.

    Launch: any grid, `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        protocol: A reduced one.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.
        shares_gpu: As in `dispatch_wait_kernel`, whose reason holds here.

    Args:
        expert_rows: Those of `combine_async_kernel`: this rank's own partial
            sums are made here.
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens that this rank dispatched.
        recv_buf_ptrs: All ranks' combine recv buffers.
        recv_count_ptrs: All ranks' combine counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = combine_layout_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        protocol,
        partial_dtype,
    ]()
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var dispatch_counts = share_addresses[n_ranks, False](
        recv_count_ptrs, 0, layout.dispatch_counts_from_combine_counts()
    )
    var launch = start_launch[layout, _N_CONTROL](word, ep_counters, _RECEIVE)
    if not launch.can_go or _has_too_few_rows[n_experts, layout](
        expert_rows.n_rows, _RECEIVE, launch, ep_counters
    ):
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        return
    comptime n_warps = num_threads // WARP_SIZE
    var generation = next_generation(launch.before.combine_received)
    comptime if not shares_gpu:
        if is_last_to_start(launch, ep_counters, n_warps - 2):
            ep_counters.set_combine_received(generation)
        if block_idx.x == 0 and launch.warp_idx == n_warps - 1:
            note_readers[layout, False](launch, dispatch_counts, ep_counters)
    _receive[
        combine_dtype,
        partial_dtype,
        hidden_size,
        n_experts,
        layout,
        fused_shared_expert,
    ](
        BytePointer(unsafe_from_address=Int(output_tokens)),
        Int(n_tokens),
        expert_rows.rows,
        recv_bufs,
        launch.before.combine_of,
        launch,
        ep_counters,
    )
    comptime if shares_gpu:
        if not is_last_block(ep_counters):
            return
        if launch.lane == 0:
            ep_counters.set_combine_received(generation)
        publish_reads[layout](
            launch, dispatch_counts, launch.before.dispatch_received, generation
        )
    # AFTER: the result is complete; every owner may send again, once it is told.


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(num_threads))
)
def combine_kernel[
    combine_dtype: DType,
    partial_dtype: DType,
    num_threads: Int,
    hidden_size: Int,
    top_k: Int,
    n_experts: Int,
    n_ranks: Int,
    max_tokens_per_rank: Int,
    protocol: Int,
    fused_shared_expert: Bool = False,
](
    expert_rows: Pointer[Scalar[combine_dtype], ImmUntrackedOrigin],
    n_rows_max: Int32,
    output_tokens: Pointer[Scalar[combine_dtype], MutUntrackedOrigin],
    n_tokens: Int32,
    recv_buf_ptrs: Array[BytePointer, n_ranks],
    recv_count_ptrs: Array[FlagPointer, n_ranks],
    ep_counters: EPLocalSyncCounters[n_experts],
):
    """Sends and adds up in one launch; all ranks must run at the same time.

    Launch: a grid whose blocks are all resident at once,
    `block_dim = num_threads`.

    Parameters:
        combine_dtype: Element type of rows and results.
        partial_dtype: Element type of partial sums.
        num_threads: Threads of a block, `N_WARPS_MIN` warps or more.
        hidden_size: Elements of a row.
        top_k: Experts of a token.
        n_experts: Experts of the group.
        n_ranks: Ranks of the group.
        max_tokens_per_rank: Tokens one rank may send.
        protocol: A reduced one.
        fused_shared_expert: Whether row `t` is the shared expert's of token `t`.

    Args:
        expert_rows: As in `combine_async_kernel`.
        n_rows_max: How many.
        output_tokens: `[n_tokens][hidden_size]`.
        n_tokens: Tokens that this rank dispatched.
        recv_buf_ptrs: All ranks' combine recv buffers.
        recv_count_ptrs: All ranks' combine counts buffers.
        ep_counters: This rank's local words.
    """
    comptime layout = combine_layout_of[
        combine_dtype,
        hidden_size,
        top_k,
        n_experts,
        n_ranks,
        max_tokens_per_rank,
        protocol,
        partial_dtype,
    ]()
    comptime n_warps = num_threads // WARP_SIZE
    comptime assert num_threads >= N_WARPS_MIN * WARP_SIZE, "a role has no warp"
    await_launch_before()
    var word = header_word(ep_counters)
    var recv_bufs = share_addresses[n_ranks, False](recv_buf_ptrs, 0)
    var dispatch_counts = share_addresses[n_ranks, False](
        recv_count_ptrs, 0, layout.dispatch_counts_from_combine_counts()
    )
    var launch = start_launch[layout, _N_CONTROL](word, ep_counters, _SEND)
    if (
        not launch.can_go
        or _is_nothing_dispatched(launch, ep_counters)
        or _has_too_few_rows[n_experts, layout](
            Int(n_rows_max), _SEND, launch, ep_counters
        )
    ):
        fill_with_nan[num_threads](output_tokens, Int(n_tokens) * hidden_size)
        return
    if is_last_to_start(launch, ep_counters, n_warps - 2):
        ep_counters.set_combine_sent(
            next_generation(launch.before.combine_sent)
        )
        ep_counters.set_combine_received(
            next_generation(launch.before.combine_received)
        )
        ep_counters.set_combine_of(launch.before.dispatch_received)
    publish_earlier_reads[layout](launch, dispatch_counts, n_warps - 3)
    var rows = BytePointer(unsafe_from_address=Int(expert_rows))
    _send[combine_dtype, partial_dtype, hidden_size, n_experts, layout](
        rows,
        recv_bufs,
        dispatch_counts,
        launch,
        ep_counters,
        n_send_warps(Int(n_tokens), n_warps),
    )
    if block_idx.x == 0 and launch.warp_idx == n_warps - 1:
        note_readers[layout, False](launch, dispatch_counts, ep_counters)
    _receive[
        combine_dtype,
        partial_dtype,
        hidden_size,
        n_experts,
        layout,
        fused_shared_expert,
    ](
        BytePointer(unsafe_from_address=Int(output_tokens)),
        Int(n_tokens),
        rows,
        recv_bufs,
        launch.before.dispatch_received,
        launch,
        ep_counters,
    )
    # AFTER: the result is complete; the next launch of this rank says so.
