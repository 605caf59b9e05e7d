# SPDX-License-Identifier: Apache-2.0
"""What a rank lacks because rows did not fit (`kept_rows.mojo`)."""
from .counters import Counters
from .for_each import Work
from .kernel_argument import ImmPointer, MutPointer
from .layout import Group


@fieldwise_init
struct CountDropped[group: Group](Work):
    """Counts what is missing of a token, or, behind all tokens, of a local expert."""

    var of_tokens: MutPointer[Int32]
    """Result `[n_tokens]`: choices without a row in the last combine."""
    var of_experts: MutPointer[Int32]
    """Result `[n_local_experts]`: rows that the last dispatch dropped."""
    var counters: Counters[Self.group]
    var topk_ids: ImmPointer[Int32]
    var n_tokens: Int

    @always_inline
    def do(self, i: Int):
        if i >= self.n_tokens:
            var expert = i - self.n_tokens
            var n_dropped = self.counters.rows_dropped(expert)[]
            self.of_experts[unsafe_offset=expert] = n_dropped
            return
        var n_missing = -self.counters.rows_found(i)[]
        for k in range(Self.group.top_k):
            n_missing += Int32(
                self.topk_ids[unsafe_offset=Self.group.choice(i, k)] >= 0
            )
        self.of_tokens[unsafe_offset=i] = n_missing
