# SPDX-License-Identifier: Apache-2.0
"""The position of each choice, on its sender and on its receiver.

Positions are in token order, and rows are sorted by local expert, source rank, token,
choice. So results do not depend on timing.
"""
from ..protocol.counters import Counters
from ..protocol.failures import Failure, what_failed
from ..protocol.kernel_argument import ImmPointer
from ..protocol.layout import count_offset, Group, round_up
from ..protocol.router_ids import given_id, load_id
from ..protocol.row_tables import RowTables
from ..row_limit.kept_rows import keep_rows
from .rank import CpuRank

comptime _NO_POSITION = Int32(-1)


struct SendPlan[group: Group](Movable):
    """The position of each choice among the choices of its expert."""

    var ids: ImmPointer[Int32]
    var positions: List[Int32]
    """Position of each choice in its pair, or `_NO_POSITION`."""
    var counts: List[Int]
    var n_dropped: Int
    """Choices whose id is outside `[-1, n_experts)` or whose pair is full."""
    var first_dropped: Int

    def __init__(out self, ids: ImmPointer[Int32], n_tokens: Int):
        var n_choices = n_tokens * Self.group.top_k
        self.ids = ids
        self.positions = List[Int32](length=n_choices, fill=_NO_POSITION)
        self.counts = List[Int](length=Self.group.n_experts, fill=0)
        self.n_dropped = 0
        self.first_dropped = -1
        for choice in range(n_choices):
            var expert_id = self.expert_of(choice)
            if expert_id == -1:
                continue
            if (
                expert_id < 0
                or expert_id >= Self.group.n_experts
                or self.counts[expert_id] == Self.group.max_tokens_per_rank
            ):
                if self.n_dropped == 0:
                    self.first_dropped = choice
                self.n_dropped += 1
                continue
            self.positions[choice] = Int32(self.counts[expert_id])
            self.counts[expert_id] += 1

    def expert_of(self, choice: Int) -> Int:
        return Int(load_id[Self.group](self.ids, choice))

    def rank_of(self, choice: Int) -> Int:
        """Returns -1 if the choice goes to none."""
        if self.positions[choice] == _NO_POSITION:
            return -1
        return self.expert_of(choice) // Self.group.n_local_experts()

    def is_first_to_rank(self, token_idx: Int, k: Int) -> Bool:
        var rank = self.rank_of(Self.group.choice(token_idx, k))
        for earlier in range(k):
            if self.rank_of(Self.group.choice(token_idx, earlier)) == rank:
                return False
        return True

    def goes_to(self, token_idx: Int, rank: Int) -> Bool:
        for k in range(Self.group.top_k):
            if self.rank_of(Self.group.choice(token_idx, k)) == rank:
                return True
        return False

    def goes_to_host(self, token_idx: Int, rank: Int, ranks_per_host: Int) -> Bool:
        """Returns whether a rank of another one's host gets a token."""
        var first = rank - rank % ranks_per_host
        for host_rank in range(first, first + ranks_per_host):
            if self.goes_to(token_idx, host_rank):
                return True
        return False

    def raise_if_dropped(self, rank: CpuRank[Self.group]) raises:
        """Raises if ids were dropped, after everything else was sent."""
        if self.n_dropped == 0:
            return
        var token_idx, k = divmod(self.first_dropped, Self.group.top_k)
        var id = given_id[Self.group](self.ids, self.first_dropped)
        var what = what_failed(Failure.DROPPED, -1, id, token_idx, k, rank.caller)
        raise rank.error(String(t"{self.n_dropped} of {len(self.positions)} {what}"))


def lay_out_rows[
    group: Group, //
](tables: RowTables[group], n_rows_max: Int, rank: CpuRank[group]) raises -> Tuple[
    Int, Int
]:
    """Waits for the counts of all pairs, and computes where their rows go; returns the
    rows of a shared expert, and all."""
    var counters = rank.counters
    var n_shared = 0
    comptime if group.fused_shared_expert:
        n_shared = Int(counters.n_tokens_of(rank.generation)[])

    # Before any row has a place: a source that is masked for a count that is late has
    # no rows at all.
    rank.await_peers()
    var counts = List[Int](length=group.n_pairs(), fill=0)
    for pair in range(rank.n_experts() * group.n_ranks):
        var offset = count_offset[group](pair)
        counts[pair] = rank.count_from(pair % group.n_ranks, offset)
    comptime if group.drops_rows:
        _drop_rows(counts, n_rows_max, rank)

    var n_rows = n_shared
    var end = n_shared
    var largest_pair = 0
    for local_expert in range(group.n_local_experts()):
        var first_row = tables.first_row(local_expert, end)
        var n_expert_rows = 0
        for src_rank in range(group.n_ranks):
            var pair = group.pair(local_expert, src_rank)
            var count = counts[pair]
            counters.set_pair_rows(pair, first_row + n_expert_rows, count)
            tables.write_pair(pair, n_expert_rows, count)
            largest_pair = max(largest_pair, count)
            n_expert_rows += count
        tables.write_expert(local_expert, first_row, n_expert_rows)
        n_rows += n_expert_rows
        end = first_row + n_expert_rows
    tables.write_ends(n_rows)
    var n_needed = tables.n_rows_needed(n_rows)
    comptime if group.row_alignment > 1:
        n_needed = round_up(end, group.row_alignment)
    counters.set_pair_rows(group.n_pairs(), n_needed, largest_pair)
    if n_needed > n_rows_max:
        raise rank.refusal(Failure.TOO_MANY_ROWS, 0, n_needed, n_rows_max)
    return (n_shared, n_rows)


def _drop_rows[
    group: Group, //
](mut counts: List[Int], n_rows_max: Int, rank: CpuRank[group]):
    """Reduces the counts to the rows that fit, and records how many do not."""
    var announced = counts.copy()
    keep_rows(counts, n_rows_max - group.n_shared_max())
    for local_expert in range(group.n_local_experts()):
        var n_dropped = 0
        for src_rank in range(group.n_ranks):
            var pair = group.pair(local_expert, src_rank)
            n_dropped += announced[pair] - counts[pair]
        rank.counters.rows_dropped(local_expert)[] = Int32(n_dropped)


struct RowCursor(TrivialRegisterPassable):
    """Iterates over the rows of all pairs in order, skipping gaps."""

    var pair: Int
    var slot: Int
    var row: Int
    var _n_before: Int

    def __init__(out self):
        self.pair = 0
        self.slot = 0
        self.row = 0
        self._n_before = 0

    def advance(mut self, i: Int, counters: Counters[...]):
        while self._n_before + counters.pair_count(self.pair) <= i:
            self._n_before += counters.pair_count(self.pair)
            self.pair += 1
        self.slot = i - self._n_before
        self.row = counters.pair_row(self.pair) + self.slot


def n_rows_of_pairs(counters: Counters[...]) -> Int:
    """Counts the rows of the last dispatch, without a shared expert's."""
    var n_rows = 0
    for pair in range(counters.group.n_pairs()):
        n_rows += counters.pair_count(pair)
    return n_rows


def hash_src_info(src_info: Pointer[mut=_, Int32, _], counters: Counters[...]) -> Int32:
    """Digests `src_info`, so that combine recognizes the last dispatch's."""
    var digest = UInt32(n_rows_of_pairs(counters))
    for pair in range(counters.group.n_pairs()):
        var first = 2 * counters.pair_row(pair)
        for i in range(first, first + 2 * counters.pair_count(pair)):
            digest = (
                digest ^ src_info[unsafe_offset=i].cast[DType.uint32]()
            ) * 16777619
            digest ^= digest >> 15
    return digest.cast[DType.int32]()
