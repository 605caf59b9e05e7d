# SPDX-License-Identifier: Apache-2.0
"""The order of dispatched rows, and the output tables that describe it.

    packed   [this rank's tokens | ] expert 0 | expert 1 | ...     no gaps
    padded   expert 0 .... | expert 1 .... | ...     each `expert_capacity` rows

In both, the rows of an expert are sorted by source rank, token, k. With a fused
shared expert (packed only) this rank's own tokens come first, as segment 0, and
local expert `e` is segment `e + 1`; otherwise it is segment `e`. Later launches read
where rows start in the pair rows of `Counters`.

With `Group.row_alignment` rows are packed, but each expert's begin at a multiple of it,
and the tables say where the rows of each expert end, and how many each expert and each
pair have. If choices are ranks, there is one expert, and the first table says where the
rows of each source rank end.
"""
from .kernel_argument import KernelArgument, MutPointer
from .layout import Group, round_up


@fieldwise_init
struct RowTables[group: Group](KernelArgument, TrivialRegisterPassable):
    """The output tensors of `dispatch_wait` that say which row is whose."""

    var row_offsets: MutPointer[UInt32]
    """Packed: first row of each segment and the end, `[n_segments + 1]`. Padded:
    `recv_counts`, rows of each local expert, `[n_local_experts]`."""
    var expert_ids: MutPointer[Int32]
    """Packed: number of each segment, `[n_segments]`. Padded: `recv_ranges`, first
    row within the expert's, and rows, of each pair, `[n_pairs][2]`."""

    comptime n_segments = Self.group.n_local_experts() + Int(
        Self.group.fused_shared_expert
    )

    @always_inline
    def first_row(self, local_expert: Int, n_rows: Int) -> Int:
        """Locates the rows of an expert; `n_rows`: where those of the one before end.
        """
        comptime if Self.group.is_padded:
            return local_expert * Self.group.expert_capacity()
        comptime if Self.group.row_alignment > 1:
            return round_up(n_rows, Self.group.row_alignment)
        return n_rows

    @always_inline
    def n_rows_needed(self, n_rows: Int) -> Int:
        comptime if Self.group.is_padded:
            return self.first_row(Self.group.n_local_experts(), 0)
        return n_rows

    @always_inline
    def write_pair(self, pair: Int, begin: Int, count: Int):
        comptime if Self.group.is_padded:
            self.expert_ids[unsafe_offset=2 * pair] = Int32(begin)
            self.expert_ids[unsafe_offset=2 * pair + 1] = Int32(count)
        elif Self.group.is_given():
            comptime if Self.group.chooses_ranks():
                self.row_offsets[unsafe_offset=pair] = UInt32(begin + count)
            else:
                comptime n_local_experts = Self.group.n_local_experts()
                self.expert_ids[unsafe_offset=n_local_experts + pair] = Int32(count)

    @always_inline
    def write_expert(self, local_expert: Int, first_row: Int, count: Int):
        comptime if Self.group.is_padded:
            self.row_offsets[unsafe_offset=local_expert] = UInt32(count)
        elif Self.group.is_given():
            comptime if not Self.group.chooses_ranks():
                self.row_offsets[unsafe_offset=local_expert] = UInt32(first_row + count)
                self.expert_ids[unsafe_offset=local_expert] = Int32(count)
        else:
            self._write_segment(
                local_expert + Int(Self.group.fused_shared_expert), first_row
            )

    @always_inline
    def write_ends(self, n_rows: Int):
        """Writes the shared expert's segment, if there is one, and the end."""
        comptime if not Self.group.is_padded and Self.group.row_alignment == 0:
            comptime if Self.group.fused_shared_expert:
                self._write_segment(0, 0)
            self.row_offsets[unsafe_offset=Self.n_segments] = UInt32(n_rows)

    @always_inline
    def write_no_rows(self, first: Int, step: Int):
        """Writes that experts `first`, `first + step`, ... have no rows."""
        for local_expert in range(first, Self.group.n_local_experts(), step):
            for src_rank in range(Self.group.n_ranks):
                self.write_pair(Self.group.pair(local_expert, src_rank), 0, 0)
            self.write_expert(local_expert, 0, 0)
        if first == 0:
            self.write_ends(0)

    @always_inline
    def _write_segment(self, idx: Int, first_row: Int):
        self.row_offsets[unsafe_offset=idx] = UInt32(first_row)
        self.expert_ids[unsafe_offset=idx] = Int32(idx)
