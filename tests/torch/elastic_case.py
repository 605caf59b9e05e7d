# SPDX-License-Identifier: Apache-2.0
"""Tokens of all ranks for an ``ElasticBuffer``, and by plain loops what each rank must
get of them. `torch_elastic.py` has the calls."""

from typing import Any

import torch

from max_ep.torch import ElasticBuffer

E, K, H, CAP = 8, 3, 256, 16
"""Sizes of all scenarios: few kernels are compiled."""


class Case:
    """Tokens of all ranks, and what each rank must get of them."""

    def __init__(self, buffer: ElasticBuffer, seed: int, kind: str = "drawn") -> None:
        self.buffer, self.kind = buffer, kind
        self.n_ranks, self.rank = buffer.num_ranks, buffer.rank_idx
        self.n_local = E // self.n_ranks
        self.device = buffer._comm.device
        given = [self._tokens_of(rank, seed) for rank in range(self.n_ranks)]
        self.all_x, self.all_ids, self.all_weights = zip(*given)
        mine = [t.to(self.device) for t in given[self.rank]]
        self.x, self.ids, self.weights = mine

    def _tokens_of(self, rank: int, seed: int) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator().manual_seed(100 * seed + rank)
        n = {"one": 1, "none": 0}.get(self.kind, (CAP, 7, 0, 11)[(rank + seed) % 4])
        # Small whole numbers: sums are exact in bfloat16.
        x = torch.randint(-4, 5, (n, H), generator=draw).bfloat16()
        ids = torch.rand(n, E, generator=draw).topk(K, -1).indices
        if self.kind == "first":  # all of one rank
            ids = torch.arange(K).expand(n, K).contiguous()
        if self.kind == "drawn":
            ids[torch.rand(n, K, generator=draw) < 0.2] = -1
        weights = 2.0 ** torch.randint(0, 2, (n, K), generator=draw)
        return x, ids, weights

    def plain(self) -> list[tuple[int, int]]:
        """Lists source and token of this rank's plain rows, in their order."""
        return [
            (src, token)
            for src, ids in enumerate(self.all_ids)
            for token in range(len(ids))
            if any(self.is_here(int(e)) for e in ids[token])
        ]

    def is_here(self, expert: int) -> bool:
        return expert >= 0 and expert // self.n_local == self.rank

    def expanded(self, align: int) -> tuple[dict[int, tuple[int, int, int]], list[int]]:
        """Returns source, token and choice of this rank's expanded rows, and the rows
        of each local expert."""
        rows, counts, first = {}, [], 0
        for expert in range(self.rank * self.n_local, (self.rank + 1) * self.n_local):
            found = [
                (src, *place)
                for src, ids in enumerate(self.all_ids)
                for place in (ids == expert).nonzero().tolist()
            ]
            rows |= {first + i: one for i, one in enumerate(found)}
            counts.append(len(found))
            first += -(-len(found) // align) * align
        return rows, counts

    def want(self) -> torch.Tensor:
        """Returns what experts, which multiply by a number, make of this rank's tokens:
        the plain layer."""
        ids = self.ids
        factors = torch.where(ids >= 0, self.weights * (1 + ids % 4), 0)
        return self.x.float() * factors.sum(1, keepdim=True)

    def run_experts(self, rows: Any, ids: Any, weights: Any, handle: Any) -> Any:
        """Makes the rows that combine takes; those of no token become NaN."""
        first = self.rank * self.n_local
        made = torch.full(rows.shape, float("nan"), device=self.device).bfloat16()
        if ids is not None:
            n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            factors = torch.where(ids >= 0, weights * (1 + (first + ids) % 4), 0)
            made[:n] = (rows[:n].float() * factors[:n].sum(1, keepdim=True)).bfloat16()
            return made
        ends = handle.psum_num_recv_tokens_per_expert
        counts = handle.num_unaligned_recv_tokens_per_expert
        for i, (end, n) in enumerate(zip(ends.tolist(), counts.tolist())):
            mine = slice(end - n, end)
            factor = weights[mine, None] * (1 + (first + i) % 4)
            made[mine] = (rows[mine].float() * factor).bfloat16()
        return made

    # ----------------------------------------------------------- what is compared

    def check_plain(self, rows: Any, ids: Any, weights: Any, handle: Any) -> None:
        want = self.plain()
        n_of = [sum(src <= rank for src, _ in want) for rank in range(self.n_ranks)]
        ends = handle.psum_num_recv_tokens_per_scaleup_rank
        assert ends.dtype == torch.int32 and ends.tolist() == n_of
        assert ids.dtype == torch.int64 and len(rows) == len(ids)
        for row, (src, token) in enumerate(want):
            assert torch.equal(rows[row].cpu(), self.all_x[src][token]), (row, src)
            local = [
                int(e) % self.n_local if self.is_here(int(e)) else -1
                for e in self.all_ids[src][token]
            ]
            assert ids[row].tolist() == local
            if weights is not None:
                assert torch.equal(weights[row].cpu(), self.all_weights[src][token])
        metadata = handle.recv_src_metadata
        most = handle.num_max_tokens_per_rank
        assert metadata[:, 0].tolist() == [src * most + token for src, token in want]
        self.check_counts(handle)
        aligned, total = [], 0
        for n in self.expanded(1)[1]:
            total += -(-n // handle.expert_alignment) * handle.expert_alignment
            aligned.append(total)
        assert handle.psum_num_recv_tokens_per_expert.tolist() == aligned

    def check_expanded(self, rows: Any, ids: Any, weights: Any, handle: Any) -> None:
        want, counts = self.expanded(handle.expert_alignment)
        assert ids is None
        assert weights is None or weights.shape == (len(rows),)
        for row, (src, token, k) in want.items():
            assert torch.equal(rows[row].cpu(), self.all_x[src][token]), (row, src)
            if weights is not None:
                assert weights[row] == self.all_weights[src][token, k]
        ends, first = [], 0
        for n in counts:
            ends.append(first + n)
            first += -(-n // handle.expert_alignment) * handle.expert_alignment
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        self.check_counts(handle)
        tokens = self.plain()
        n_of = [sum(src <= rank for src, _ in tokens) for rank in range(self.n_ranks)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == n_of
        most = handle.num_max_tokens_per_rank
        found = [
            [src * most + token, i]
            + [
                next((r for r, p in want.items() if p == (src, token, k)), -1)
                for k in range(K)
            ]
            for i, (src, token) in enumerate(tokens)
        ]
        assert handle.recv_src_metadata.tolist() == found

    def check_counts(self, handle: Any) -> None:
        sent, slots = [0] * self.n_ranks, []
        for chosen in self.all_ids[self.rank].tolist():
            ranks = [e // self.n_local if e >= 0 else -1 for e in chosen]
            slots.append([sent[r] if r >= 0 else -1 for r in ranks])
            for r in {*ranks} - {-1}:
                sent[r] += 1
        assert handle.dst_buffer_slot_idx.tolist() == slots
        counts, align = self.expanded(1)[1], handle.expert_alignment
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        listed = handle.num_recv_tokens_per_expert_list
        assert listed in ([], [-(-n // align) * align for n in counts])

    def check_result(self, y: torch.Tensor, want: torch.Tensor | None = None) -> None:
        want = self.want() if want is None else want
        assert torch.equal(y.float(), want.bfloat16().float()), self.kind

    def dispatch(self, **how: Any) -> tuple[Any, ...]:
        given = dict(topk_idx=self.ids, topk_weights=self.weights, num_experts=E)
        return self.buffer.dispatch(self.x, **(given | how))
