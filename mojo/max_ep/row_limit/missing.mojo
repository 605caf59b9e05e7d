# SPDX-License-Identifier: Apache-2.0
"""What tokens and experts lack after a combine: rows that did not fit
(`kept_rows.mojo`), and experts of ranks that are masked.
"""
from ..protocol.counters import Counters
from ..protocol.kernel_argument import ImmPointer, MutPointer
from ..protocol.layout import Group
from ..work.for_each import Work


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
            self.of_experts[unsafe_offset=expert] = self.counters.rows_dropped(expert)[]
            return
        var n_missing = -self.counters.rows_found(i)[]
        for k in range(Self.group.top_k):
            n_missing += Int32(
                self.topk_ids[unsafe_offset=Self.group.choice(i, k)] >= 0
            )
        self.of_tokens[unsafe_offset=i] = n_missing


@fieldwise_init
struct FindDegraded[group: Group](Work):
    """Flags the tokens with a choice on a masked rank."""

    var degraded: MutPointer[Scalar[DType.bool]]
    """Result `[n_tokens]`."""
    var live_share: MutPointer[Float32]
    """Result `[n_tokens]`: share of the router weights that live ranks have."""
    var counters: Counters[Self.group]
    var topk_ids: ImmPointer[Int32]
    var router_weights: ImmPointer[Float32]

    @always_inline
    def do(self, i: Int):
        var all = Float32(0)
        var live = Float32(0)
        var is_degraded = False
        for k in range(Self.group.top_k):
            var choice = Self.group.choice(i, k)
            var expert_id = Int(self.topk_ids[unsafe_offset=choice])
            if expert_id < 0 or expert_id >= Self.group.n_experts:
                continue
            var weight = self.router_weights[unsafe_offset=choice]
            all += weight
            var rank = expert_id // Self.group.n_local_experts()
            if self.counters.is_masked(rank):
                is_degraded = True
            else:
                live += weight
        self.degraded[unsafe_offset=i] = is_degraded
        self.live_share[unsafe_offset=i] = live / all if is_degraded and all > 0 else 1
