# SPDX-License-Identifier: Apache-2.0
"""Layout of DeepEP's normal calls: who sends which tokens to whom, as all agree."""

from __future__ import annotations

import base64
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..limits import MAX_TOP_K
from .calls import words_of_row
from .communicator import Communicator, refuse
from .library import round_up
from .tables import LazyTuple, view

MOST_TOKENS = 32768
_INT32 = torch.iinfo(torch.int32)


@dataclass(eq=False)
class NormalHandle(LazyTuple):
    """What combine and a repeated dispatch need; reads as DeepEP's tuple.

    Its items: ``rank_prefix_matrix`` int32 ``[n_ranks, n_ranks]``, four sizes int64
    (here alone), None, source token of each row int32 ``[n_rows]``,
    ``is_token_in_rank``, None. In the matrix only this rank's column is filled.
    """

    comm: Communicator
    n_rows: int  # of `recv_x`
    n_made: int  # that kernels may write
    n_sent: int  # tokens of this rank
    cap: int  # tokens of a rank that the channels hold
    n_scales: int  # of a row, as int32 words; then ids and weights
    top_k: int  # of a row: ids, and weights
    mask: torch.Tensor  # `is_token_in_rank`
    has_ids: bool = False

    def __post_init__(self) -> None:
        """Lays out what launches need, in one allocation: int32 words of each, and the
        byte at which each begins, at whole 16. ``ids``: ranks of each token, or -1,
        ``[n_sent, n_ranks]``, written by the first launch. Every launch writes
        ``src_info`` ``[n_made, 2]``, ``ranges`` ``[n_ranks, 2]`` (first row and rows)
        and a word that nobody reads."""
        n_ranks = self.comm.n_ranks
        self._words = self.n_sent * n_ranks, 2 * max(1, self.n_made), 2 * n_ranks, 1
        steps = [round_up(4 * n, 16) for n in self._words]
        self.at = tuple(itertools.accumulate(steps, initial=0))
        self.tables = self.mask.new_empty(self.at[-1] // 4, dtype=torch.int32)

    def _part(self, i: int, n_columns: int) -> torch.Tensor:
        n_words, first = self._words[i], self.at[i] // 4
        shape = n_words // n_columns, n_columns
        return view(self.tables, shape, (n_columns, 1), first)

    @property
    def ids(self) -> torch.Tensor:
        return self._part(0, self.comm.n_ranks)

    @property
    def src_info(self) -> torch.Tensor:
        return self._part(1, 2)

    @property
    def ranges(self) -> torch.Tensor:
        return self._part(2, 2)

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
        return self.mask, self.tables

    def items(self) -> tuple[Any, ...]:
        """Returns what DeepEP's handle has."""
        n_ranks = self.comm.n_ranks
        ends = self.ranges.sum(1, dtype=torch.int32)
        matrix = ends.new_zeros((n_ranks, n_ranks))
        matrix[:, self.comm.rank] = ends
        sources = self.src_info[: self.n_rows, 0]
        sizes = self.n_made, self.cap, self.n_scales, self.top_k
        sizes = torch.tensor(sizes, device="cpu")
        return matrix, sizes, None, sources, self.mask, None


def bytes_of_row(comm: Communicator, x: torch.Tensor, n_rows: int | None) -> int:
    """Returns the bytes of a row; refuses other rows than of whole 16 bytes."""
    comm.check_tensor("x", x, None, (n_rows, None))
    n_bytes = x.shape[1] * x.element_size()
    if n_bytes == 0 or n_bytes % 16 != 0:
        refuse("x", f"has rows of {n_bytes} bytes, not a multiple of 16")
    return n_bytes


class Layout(NamedTuple):
    """Where tokens go, as ``get_dispatch_layout`` returns it, and what goes along."""

    per_rank: torch.Tensor | None
    mask: torch.Tensor | None
    per_expert: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


def check_layout(comm: Communicator, n_tokens: int, layout: Layout) -> tuple[int, int]:
    """Refuses a layout that cannot be of these tokens; returns ids of a token, and
    experts."""
    per_rank, mask, per_expert, topk_idx, topk_weights = layout
    n_ranks = comm.n_ranks
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
        check_ids(comm, topk_idx, per_expert.numel())
        top_k = shape[1]
    elif topk_weights is not None:
        refuse("topk_weights", "are sent with topk_idx only")
    if n_ranks > MAX_TOP_K:
        refuse("dispatch", f"is for at most {MAX_TOP_K} ranks, not {n_ranks}")
    if n_tokens > MOST_TOKENS:
        refuse("x", f"has {n_tokens} rows, at most {MOST_TOKENS} go")
    return top_k, per_expert.numel()


def check_ids(comm: Communicator, topk_idx: torch.Tensor, n_experts: int) -> None:
    """Refuses ids of no expert; on GPUs the host does not look at them."""
    if comm.is_gpu or topk_idx.numel() == 0:
        return
    least, most = topk_idx.aminmax()
    if least.item() >= -1 and most.item() < n_experts:
        return
    wrong = ((topk_idx < -1) | (topk_idx >= n_experts)).nonzero()
    token, k = wrong[0].tolist()
    what = f"has {topk_idx[token, k]} for token {token}, k {k}"
    refuse("topk_idx", f"{what}; ids must be in [-1, {n_experts})")


def in_int32(ids: torch.Tensor, out: torch.Tensor) -> None:
    """Puts ids into the 32 bits that travel. One beyond them becomes the nearest: it
    is no expert, where 2**32 + 3 would be 3."""
    out.copy_(ids.clamp(_INT32.min, _INT32.max))


def agree(
    comm: Communicator, what: str, n_tokens: int, num_worst_tokens: int
) -> tuple[int, int]:
    """Returns the most tokens of a rank, and the most rows that this rank receives;
    exchanges numbers of tokens if the worst is not given."""
    n_ranks = comm.n_ranks
    if not num_worst_tokens:
        tokens = comm.exchange(what, n_tokens)
        return max(tokens), sum(tokens)
    most = round_up(num_worst_tokens, n_ranks) // n_ranks
    if n_tokens > most:
        what = f"={num_worst_tokens} is below {n_ranks} ranks x {n_tokens} tokens"
        refuse("num_worst_tokens", what)
    return most, num_worst_tokens


def exchange_counts(comm: Communicator, what: str, counts: list[int]) -> np.ndarray:
    """Returns the counts of all ranks, int32 ``[n_ranks, n]``. They go as text: of
    numbers JSON takes many times as long."""
    text = base64.b64encode(array("i", counts)).decode()
    words = b"".join(map(base64.b64decode, comm.exchange(what, text)))
    return np.frombuffer(words, np.int32).reshape(comm.n_ranks, -1)


def here(counts: np.ndarray, first: int, n_local: int) -> list[int]:
    """Adds up, over all ranks, the counts of the local experts, which begin there."""
    return counts[:, first:][:, :n_local].sum(0).tolist()


def count_ids(
    local_ids: torch.Tensor, n_local: int, one: torch.Tensor | None = None
) -> torch.Tensor:
    """Counts each local expert in int64 ``[rows, top_k]``; -1: none. ``one``: int32
    ``[1]``, if there is one."""
    # In columns, so that fewer ids add to one word; the first place takes -1.
    shape = (n_local + 1, local_ids.shape[1])
    found = local_ids.new_zeros(shape, dtype=torch.int32)
    if one is None:
        one = found.new_ones(1)
    found.scatter_add_(0, local_ids + 1, one.expand(local_ids.shape))
    return found[1:].sum(1, dtype=torch.int32)
