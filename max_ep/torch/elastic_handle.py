# SPDX-License-Identifier: Apache-2.0
"""``EPHandle``: what combine and a repeated dispatch need, and what engines read of it.

Attributes that few read are computed on the device when they are first read. All can be
assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .communicator import Communicator, refuse
from .library import round_up
from .normal_layout import count_ids
from .sums import Routing


class EPHandle:
    """What :meth:`ElasticBuffer.dispatch` returns.

    Attributes:
        num_recv_tokens_per_expert_list: Rows of each local expert, rounded up to the
            alignment; ``[]`` if the host has not waited for the sizes. Of plain rows
            the host may wait for the device when this is read.
        psum_num_recv_tokens_per_scaleup_rank: int32 ``[n_ranks]``, sums of the tokens
            received from the ranks up to each.
        psum_num_recv_tokens_per_expert: int32 ``[n_local]``, expanded: where the rows
            of each local expert end; otherwise sums of the aligned counts.
        num_unaligned_recv_tokens_per_expert: int32 ``[n_local]``, rows of each.
        recv_src_metadata: int32 ``[n_tokens_received, top_k + 2]``: rank times
            ``num_max_tokens_per_rank`` plus token; which token received this is; its
            rows, -1 where there is none. Not during a capture.
        topk_idx: int64 ``[n_tokens, top_k]``.
        dst_buffer_slot_idx: int32 ``[n_tokens, top_k]``: how many of this rank's tokens
            go to the rank of a choice before this one; -1 where there is no choice.
        num_recv_tokens, num_expanded_tokens: Tokens received, and expanded rows;
            without the host's wait, how many there are places for. Of expanded rows the
            host may wait for the device when the first is read.
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: As
            given.
    """

    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None
    is_synced = False
    """Whether the host has waited for the sizes."""

    def __init__(self, routing: Routing, num_sms: int) -> None:
        """Describes a dispatch; the host has not waited for its sizes."""
        self._routing = routing
        self.num_sms = num_sms

    def __getattr__(self, name: str) -> Any:
        """Computes an attribute that nobody has read or assigned yet."""
        compute = _COMPUTED.get(name)
        if compute is None:
            raise AttributeError(f"EPHandle has no attribute {name!r}")
        value = compute(self, self._routing)
        setattr(self, name, value)
        return value


def _counts(handle: EPHandle, routing: Routing) -> torch.Tensor:
    """Counts the rows of each local expert."""
    n_local = routing.sizes.n_local
    if handle.do_expand:
        return routing.counts[:n_local]
    local = routing.ids - routing.sizes.comm.rank * n_local
    is_here = (local >= 0) & (local < n_local)
    return count_ids(torch.where(is_here, local, -1).long(), n_local)


def _listed(handle: EPHandle, routing: Routing) -> list[int]:
    """Lists the rows of each local expert, rounded up, if the host knows their sum."""
    if not handle.is_synced:
        return []
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    return [round_up(n, handle.expert_alignment) for n in counts]


def _ends(handle: EPHandle, routing: Routing) -> torch.Tensor:
    """Says where rows of an expert end; of plain rows, adds up the aligned counts."""
    if handle.do_expand:
        return routing.ends
    align = handle.expert_alignment
    counts = handle.num_unaligned_recv_tokens_per_expert
    aligned = torch.div(counts + align - 1, align, rounding_mode="floor") * align
    return aligned.cumsum(0, dtype=torch.int32)


def _sources(
    handle: EPHandle, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns of each row: whether it is one, number of its token among the places that
    all ranks have, and its choice."""
    rows = torch.arange(routing.sizes.n_rows, device=routing.ends.device)
    ends, n_ranks = routing.ends.long(), routing.sizes.comm.n_ranks
    if not handle.do_expand:
        is_row, source = rows < ends[-1], torch.searchsorted(ends, rows, right=True)
    else:
        n_local = len(ends)
        counts, of_pairs = routing.counts[:n_local], routing.counts[n_local:]
        starts = ends - counts
        expert = torch.searchsorted(starts, rows, right=True) - 1
        expert = expert.clamp(min=0)
        is_row = (rows < ends[expert]) & (rows >= starts[expert])
        places = (rows - starts[expert]).unsqueeze(1)
        source = (of_pairs.view(n_local, n_ranks).cumsum(1)[expert] <= places).sum(1)
    token, choice = routing.src_info[: routing.sizes.n_rows].long().unbind(1)
    token = source * handle.num_max_tokens_per_rank + token
    return is_row, torch.where(is_row, token, 0), torch.where(is_row, choice, 0)


def _tokens(handle: EPHandle, routing: Routing) -> torch.Tensor:
    """Returns the rows of each token of all ranks ``[places, top_k]``, or -1."""
    is_row, token, choice = _sources(handle, routing)
    n_places = routing.sizes.comm.n_ranks * handle.num_max_tokens_per_rank
    top_k = routing.sizes.top_k
    found = token.new_full((n_places * top_k + 1,), -1)
    # What is no row goes to a place of its own.
    place = torch.where(is_row, token * top_k + choice, n_places * top_k)
    found.scatter_(0, place, torch.arange(len(place), device=place.device))
    return found[:-1].view(n_places, top_k)


def _rank_ends(handle: EPHandle, routing: Routing) -> torch.Tensor:
    """Says where the tokens from each rank end."""
    if not handle.do_expand:
        return routing.ends
    is_here = (_tokens(handle, routing) >= 0).any(1)
    per_rank = is_here.view(routing.sizes.comm.n_ranks, -1).sum(1)
    return per_rank.cumsum(0, dtype=torch.int32)


def _metadata(handle: EPHandle, routing: Routing) -> torch.Tensor:
    """Lists the tokens received; the host waits for their number."""
    if not handle.do_expand:
        is_row, token, _ = _sources(handle, routing)
        token = token[is_row]
        rows = token.new_full((len(token), routing.sizes.top_k), -1)
    else:
        found = _tokens(handle, routing)
        token = (found >= 0).any(1).nonzero().flatten()
        rows = found[token]
    numbers = torch.arange(len(token), device=token.device)
    return torch.cat([torch.stack([token, numbers], 1), rows], 1).int()


def _slots(handle: EPHandle, routing: Routing) -> torch.Tensor:
    """Numbers, for each choice, this rank's tokens that go where it goes."""
    ids, n_ranks = routing.topk_idx, routing.sizes.comm.n_ranks
    is_id = (ids >= 0) & (ids < routing.sizes.n_experts)
    n_local = routing.sizes.n_local
    # The last column takes the choices of no expert.
    rank = torch.where(is_id, ids.clamp(min=0) // n_local, n_ranks)
    goes = ids.new_zeros((len(ids), n_ranks + 1)).scatter_(1, rank, 1)
    before = (goes.cumsum(0) - 1).gather(1, rank)
    return torch.where(is_id, before, -1).int()


def _n_tokens(handle: EPHandle, routing: Routing) -> int:
    """Counts the tokens received, or the places for them if the host has not waited."""
    if handle.is_synced:
        return int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    return routing.sizes.comm.n_ranks * routing.sizes.most


_COMPUTED: dict[str, Callable[[EPHandle, Routing], Any]] = {
    "do_expand": lambda _, routing: not routing.sizes.is_plain,
    "dst_buffer_slot_idx": _slots,
    "expert_alignment": lambda _, routing: routing.sizes.alignment,
    "num_expanded_tokens": lambda handle, r: r.sizes.n_rows if handle.do_expand else 0,
    "num_experts": lambda _, routing: routing.sizes.n_experts,
    "num_max_tokens_per_rank": lambda _, routing: routing.sizes.most,
    "num_recv_tokens": _n_tokens,
    "num_recv_tokens_per_expert_list": _listed,
    "num_unaligned_recv_tokens_per_expert": _counts,
    "psum_num_recv_tokens_per_expert": _ends,
    "psum_num_recv_tokens_per_scaleup_rank": _rank_ends,
    "recv_src_metadata": _metadata,
    "topk_idx": lambda _, routing: routing.topk_idx,
}


def checked_handle(comm: Communicator, handle: Any) -> Routing:
    """Returns where the tokens of a handle go; refuses one of other ranks."""
    if comm.failure:
        comm.raise_failure()
    if not isinstance(handle, EPHandle):
        kind = type(handle).__name__
        refuse("handle", f"is a {kind}; pass what ElasticBuffer.dispatch returned")
    routing = handle._routing
    owner = routing.sizes.comm
    if owner is not comm and owner.group_and_device != comm.group_and_device:
        refuse("handle", "is of an ElasticBuffer of other ranks")
    # A copy will do: autograd keeps those that NeMo assigns.
    ids = vars(handle).get("topk_idx", routing)
    if ids is None:
        refuse("handle.topk_idx", "is None; assign the tensor that dispatch was given")
    if ids is not routing and ids is not routing.topk_idx:
        shape = (routing.sizes.n_tokens, routing.sizes.top_k)
        comm.check_tensor("handle.topk_idx", ids, torch.int64, shape)
        routing.kept_ids = ids
    return routing
