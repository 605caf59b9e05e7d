# SPDX-License-Identifier: Apache-2.0
"""Who sends which tokens to whom in DeepEP's normal calls: checked, and agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..limits import MAX_TOP_K
from .communicator import Communicator, refuse
from .library import round_up, words_of_row
from .tables import LazyTuple

_MOST_TOKENS = 32768


class Layout(NamedTuple):
    """What a first dispatch is given besides its tokens."""

    per_rank: torch.Tensor | None
    """Tokens for each rank."""
    mask: torch.Tensor | None
    """Whether a token goes to a rank."""
    per_expert: torch.Tensor | None
    """Tokens for each expert."""
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


@dataclass(eq=False)
class NormalHandle(LazyTuple):
    """What combine and a repeated dispatch need; reads as DeepEP's tuple.

    Its items: ``rank_prefix_matrix`` int32 ``[n_ranks, n_ranks]``, four sizes int64
    (here alone), None, source token of each row int32 ``[n_rows]``,
    ``is_token_in_rank``, None. In the matrix only this rank's column is filled.

    Attributes:
        n_rows: Rows of ``recv_x``.
        n_made: Rows that kernels may write.
        n_sent: Tokens that this rank sent.
        cap: Tokens of a rank that the channels hold.
        n_scales: Scales of a row, as int32 words; then ids and weights.
        top_k: Ids of a row, and weights.
        mask: ``is_token_in_rank``.
        ids: int32 ``[n_sent, n_ranks]``: the ranks of each token, or -1; written by
            the first launch.
        src_info: int32 ``[n_made, 2]``; every launch writes it and ``ranges``.
        ranges: int32 ``[n_ranks, 2]``: first row of each source, and rows.
    """

    comm: Communicator
    n_rows: int
    n_made: int
    n_sent: int
    cap: int
    n_scales: int
    top_k: int
    mask: torch.Tensor
    ids: torch.Tensor = field(init=False)
    src_info: torch.Tensor = field(init=False)
    ranges: torch.Tensor = field(init=False)
    has_ids: bool = False

    def __post_init__(self) -> None:
        n_ranks, new = self.comm.n_ranks, self.mask.new_empty
        self.ids = new((self.n_sent, n_ranks), dtype=torch.int32)
        self.src_info = new((max(1, self.n_made), 2), dtype=torch.int32)
        self.ranges = new((n_ranks, 2), dtype=torch.int32)

    @classmethod
    def of_items(cls, comm: Communicator, items: Sequence[Any]) -> NormalHandle:
        """Makes a handle of the items of another, or of copies of them."""
        if len(items) != 6 or not isinstance(items[1], torch.Tensor):
            refuse("handle", "has not the items of one that dispatch returned")
        _, sizes, _, sources, mask, _ = items
        if sizes.dtype != torch.int64 or sizes.shape != (4,):
            refuse("handle[1]", "has not the sizes that dispatch returned")
        comm.check_tensor("handle[3]", sources, torch.int32, (None,), True)
        comm.check_tensor("handle[4]", mask, torch.bool, (None, comm.n_ranks))
        n_made, cap, n_scales, top_k = sizes.tolist()
        n_rows, n_sent = len(sources), len(mask)
        return cls(comm, n_rows, n_made, n_sent, cap, n_scales, top_k, mask)

    @property
    def n_words(self) -> int:
        """Returns how many int32 words go with a row."""
        return words_of_row(self.n_scales, self.top_k)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns what launches use."""
        return self.mask, self.ids, self.src_info, self.ranges

    def items(self) -> tuple[Any, ...]:
        """Returns what DeepEP's handle has."""
        n_ranks = len(self.ranges)
        ends = self.ranges.sum(1, dtype=torch.int32)
        matrix = ends.new_zeros((n_ranks, n_ranks))
        matrix[:, self.comm.rank] = ends
        sources = self.src_info[: self.n_rows, 0]
        sizes = self.n_made, self.cap, self.n_scales, self.top_k
        sizes = torch.tensor(sizes, device="cpu")
        return matrix, sizes, None, sources, self.mask, None


def check_layout(comm: Communicator, n_tokens: int, layout: Layout) -> int:
    """Refuses a layout that cannot be of these tokens; returns ids of a token."""
    n_ranks = comm.n_ranks
    per_rank, mask, per_expert, topk_idx, topk_weights = layout
    if per_rank is None or mask is None or per_expert is None:
        refuse(
            "dispatch",
            "needs a handle, or num_tokens_per_rank, is_token_in_rank and "
            "num_tokens_per_expert",
        )
    comm.check_tensor("num_tokens_per_rank", per_rank, torch.int32, (n_ranks,))
    shape = (n_tokens, n_ranks)
    comm.check_tensor("is_token_in_rank", mask, torch.bool, shape)
    comm.check_tensor("num_tokens_per_expert", per_expert, torch.int32, (None,))
    if per_expert.numel() % n_ranks != 0:
        what = f"has {per_expert.numel()} experts, no multiple of {n_ranks} ranks"
        refuse("num_tokens_per_expert", what)
    top_k = 0
    if topk_idx is not None:
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None))
        shape = tuple(topk_idx.shape)
        comm.check_tensor("topk_weights", topk_weights, torch.float32, shape)
        top_k = shape[1]
    elif topk_weights is not None:
        refuse("topk_weights", "are sent with topk_idx only")
    if n_ranks > MAX_TOP_K:
        refuse("dispatch", f"is for at most {MAX_TOP_K} ranks, not {n_ranks}")
    if n_tokens > _MOST_TOKENS:
        refuse("x", f"has {n_tokens} rows, at most {_MOST_TOKENS} go")
    return top_k


def agree(
    comm: Communicator,
    layout: Layout,
    n_tokens: int,
    row_bytes: int,
    n_scales: int,
    num_worst_tokens: int,
) -> tuple[int, int, int, list[int]]:
    """Checks a layout, and exchanges counts if the worst is not given; returns ids of a
    token, the most tokens of a rank, the rows that this rank receives, and those of
    each local expert."""
    n_ranks = comm.n_ranks
    top_k = check_layout(comm, n_tokens, layout)
    if num_worst_tokens:
        most = round_up(num_worst_tokens, n_ranks) // n_ranks
        if n_tokens > most:
            what = f"={num_worst_tokens} is below {n_ranks} ranks x {n_tokens} tokens"
            refuse("num_worst_tokens", what)
        return top_k, most, num_worst_tokens, []
    # The mask says what is sent, so rows are counted by it alone.
    mine = torch.cat([layout.mask.sum(0), layout.per_expert.long()]).tolist()
    n_experts = layout.per_expert.numel()
    what = (
        f"dispatch of rows of {row_bytes} bytes, {n_scales} scales, "
        f"top_k={top_k}, num_experts={n_experts}"
    )
    notes = comm.exchange(what, [n_tokens, *mine])
    n_local = n_experts // n_ranks
    first = 1 + n_ranks + comm.rank * n_local
    counts = [sum(n) for n in zip(*(note[first:][:n_local] for note in notes))]
    most = max(note[0] for note in notes)
    return top_k, most, sum(note[1 + comm.rank] for note in notes), counts
