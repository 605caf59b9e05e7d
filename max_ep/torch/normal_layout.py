# SPDX-License-Identifier: Apache-2.0
"""Layout of DeepEP's normal calls: who sends which tokens to whom, as all agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..limits import MAX_TOP_K
from ..plural import counted
from .calls import PLAIN
from .communicator import Communicator, refuse
from .sums import Routing, Sizes
from .tables import LazyTuple, Unchanged, version

MOST_TOKENS = 32768
_INT32 = torch.iinfo(torch.int32)


class NormalHandle(LazyTuple):
    """What combine and a repeated dispatch need; reads as DeepEP's tuple.

    Its items: ``rank_prefix_matrix`` int32 ``[n_ranks, n_ranks]``, the tokens of a rank
    that memory is for int64 ``[1]`` (here alone), None, source token of each row int32
    ``[n_rows]``, ``is_token_in_rank``, None. In the matrix only this rank's column is
    filled.
    """

    def __init__(self, sizes: Sizes, mask: torch.Tensor) -> None:
        """``mask``: ``is_token_in_rank``. It says where tokens go if no launch copies
        ids (``sizes.copies_ids``): each rank is an expert then."""
        self.comm, self.mask = sizes.comm, mask
        self._has_ids = sizes.copies_ids
        ids = None if self._has_ids else torch.empty_like(mask, dtype=torch.int64)
        self.routing = Routing(sizes, ids)

    @classmethod
    def of_items(cls, comm: Communicator, items: Sequence[Any]) -> NormalHandle:
        """Makes a handle of the items of another, or of copies of them."""
        if len(items) != 6 or not isinstance(items[1], torch.Tensor):
            refuse("handle", "has not the items of one that dispatch returned")
        _, cap, _, sources, mask, _ = items
        if cap.dtype != torch.int64 or cap.shape != (1,):
            refuse("handle[1]", "has not the size that dispatch returned")
        comm.check_tensor("handle[3]", sources, torch.int32, (None,), True)
        comm.check_tensor("handle[4]", mask, torch.bool, (None, comm.n_ranks))
        chosen = comm.n_ranks, comm.n_ranks
        n_rows, n_tokens, most = len(sources), len(mask), int(cap)
        if not n_tokens <= most <= MOST_TOKENS or most == 0:
            refuse("handle[1]", f"={most} are no tokens that there is memory for")
        sizes = plain_sizes(comm, *chosen, n_tokens, n_rows, most, False)
        return cls(sizes, mask)

    def write_ids(self) -> None:
        """Writes which ranks each token goes to, before the first launch."""
        if not self._has_ids:
            comm, ids = self.comm, self.routing.kept_ids
            torch.where(self.mask, comm.rank_numbers, comm.none, out=ids)
            self._has_ids = True

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Returns what launches use."""
        return self.mask, *self.routing.tensors()

    def items(self) -> tuple[Any, ...]:
        """Returns what DeepEP's handle has."""
        routing, n_ranks = self.routing, self.comm.n_ranks
        matrix = routing.ends.new_zeros((n_ranks, n_ranks))
        matrix[:, self.comm.rank] = routing.ends
        sources = routing.src_info[: routing.sizes.n_rows, 0]
        cap = torch.tensor([routing.sizes.cap], device="cpu")
        return matrix, cap, None, sources, self.mask, None


def plain_sizes(
    comm: Communicator,
    n_experts: int,
    top_k: int,
    n_tokens: int,
    n_rows: int,
    cap: int,
    copies_ids: bool,
) -> Sizes:
    of_rows = PLAIN, n_experts, top_k, 1
    return Sizes(comm, *of_rows, n_tokens, n_rows, cap, cap, copies_ids)


def note_layout(mask: torch.Tensor, topk_idx: torch.Tensor, n_experts: int) -> None:
    """Remembers of which ids a mask says where they go."""
    mask._max_ep_layout = version(mask), Unchanged(topk_idx), n_experts


def is_layout_of(mask: torch.Tensor, topk_idx: torch.Tensor, n_experts: int) -> bool:
    """Returns whether a mask is known to say where these ids go."""
    of_mask, ids, n = getattr(mask, "_max_ep_layout", (None, None, 0))
    return n == n_experts and of_mask == version(mask) and ids.is_in(topk_idx)


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
    if per_expert.numel() % n_ranks != 0 or per_expert.numel() == 0:
        ranks = counted(n_ranks, "rank")
        what = f"has {counted(per_expert.numel(), 'expert')}, no multiple of {ranks}"
        refuse("num_tokens_per_expert", what)
    top_k = 0
    if topk_idx is not None:
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None))
        shape = tuple(topk_idx.shape)
        comm.check_tensor("topk_weights", topk_weights, torch.float32, shape)
        check_choices(shape[1])
        check_ids(comm, topk_idx, per_expert.numel())
        top_k = shape[1]
    elif topk_weights is not None:
        refuse("topk_weights", "are sent with topk_idx only")
    if n_ranks > MAX_TOP_K:
        refuse("dispatch", f"is for at most {MAX_TOP_K} ranks, not {n_ranks}")
    if n_tokens > MOST_TOKENS:
        refuse("x", f"has {counted(n_tokens, 'row')}, at most {MOST_TOKENS} go")
    return top_k, per_expert.numel()


def check_choices(top_k: int, most: int = MAX_TOP_K) -> None:
    """Refuses more choices of a token than kernels take, and none."""
    if not 1 <= top_k <= most:
        refuse("topk_idx", f"has {counted(top_k, 'column')}; it must have 1 to {most}")


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
    comm: Communicator, what: str, n_tokens: int, has_ids: bool, num_worst_tokens: int
) -> tuple[int, int, bool]:
    """Returns the most tokens of a rank, the most rows that this rank receives, and
    whether ids say on all ranks where tokens go; asks the others if the worst is not
    given."""
    n_ranks = comm.n_ranks
    if not num_worst_tokens:
        tokens, have_ids = zip(*comm.exchange(what, (n_tokens, has_ids)))
        return max(tokens), sum(tokens), all(have_ids)
    most = min(num_worst_tokens // n_ranks, MOST_TOKENS)
    if n_tokens > most:
        tokens = f"{counted(n_ranks, 'rank')} x {counted(n_tokens, 'token')}"
        what = f"={num_worst_tokens} is below {tokens}"
        refuse("num_worst_tokens", what)
    return most, num_worst_tokens, has_ids


def count_ids(local_ids: torch.Tensor, n_local: int) -> torch.Tensor:
    """Counts each local expert in int64 ``[rows, top_k]``; -1: none."""
    # In columns, so that fewer ids add to one word; the first place takes -1.
    shape = (n_local + 1, local_ids.shape[1])
    found = local_ids.new_zeros(shape, dtype=torch.int32)
    one = found.new_ones(1)
    found.scatter_add_(0, local_ids + 1, one.expand(local_ids.shape))
    return found[1:].sum(1, dtype=torch.int32)
