# SPDX-License-Identifier: Apache-2.0
"""Sizes of the calls of ``ElasticBuffer``: what they may be, and what all agree on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..plural import counted
from .calls import PLAIN
from .communicator import refuse
from .elastic_handle import EPHandle
from .joining import check_group
from .library import round_up
from .normal_layout import bytes_of_row
from .quantized import Given
from .sums import Received, Sizes

MOST = "num_max_tokens_per_rank"
_SIZE_STEP = 2 << 20


def n_worst_rows(
    rows: str, n_ranks: int, n_local: int, max_tokens: int, top_k: int, alignment: int
) -> int:
    """Returns how many rows a dispatch may make."""
    if rows == PLAIN:
        return n_ranks * max_tokens
    n = n_ranks * max_tokens * min(top_k, n_local) + (alignment - 1) * n_local
    return round_up(n, alignment)


def named(sizes: Sizes, given: Given, has_weights: bool, in_columns: bool) -> str:
    """Names a dispatch whose ranks tell each other numbers, so that all make it."""
    n_scales = 0 if given.words is None else given.words.shape[1]
    what = f"rows of {bytes_of_row(sizes.comm, given.rows, None)} bytes"
    call = f"ElasticBuffer.dispatch of {what}, {counted(n_scales, 'scale')}, "
    call += f"num_experts={sizes.n_experts}, top_k={sizes.top_k}, "
    call += f"do_expand={not sizes.is_plain}, {MOST}={sizes.most}"
    if not sizes.is_plain:
        call += f", expert_alignment={sizes.alignment}"
    call += "" if has_weights else ", topk_weights=None"
    return call + (", use_tma_aligned_col_major_sf=True" if in_columns else "")


def n_bytes(n_ranks: int, most: int, hidden: int) -> int:
    return max(1, -(-2 * 2 * n_ranks * most * hidden * 2 // _SIZE_STEP)) * _SIZE_STEP


def check_same(
    handle: EPHandle,
    n_experts: int | None,
    most: int | None,
    alignment: int | None,
    do_expand: bool,
) -> None:
    """Refuses sizes that are not those of the handle."""
    for name, given in (
        ("num_experts", n_experts),
        (MOST, most),
        ("expert_alignment", alignment),
        ("do_expand", do_expand or None),
    ):
        if given is not None and given != getattr(handle, name):
            refuse(name, f"={given!r}, and the handle has {getattr(handle, name)}")


def most_rows(sizes: Sizes, n_tokens: int) -> int:
    """Returns how many rows so many tokens of all ranks may make here, also if a token
    has an expert twice: what comes is counted, and must fit into the tables."""
    if sizes.is_plain:
        return n_tokens
    n = n_tokens * sizes.top_k + (sizes.alignment - 1) * sizes.n_local
    return round_up(n, sizes.alignment)


def check_columns(given: Given) -> None:
    """Refuses scales that ``use_tma_aligned_col_major_sf`` is not for."""
    one_byte = 1
    if given.words is not None and given.scales.element_size() == one_byte:
        what = "is for scales of 4 bytes, which columns of 16 bytes hold"
        refuse("use_tma_aligned_col_major_sf", what)


def outputs(
    sizes: Sizes, given: Given, weights: torch.Tensor | None, in_columns: bool
) -> Received:
    """Allocates what a dispatch delivers."""
    x, scales = given.rows, given.words
    empty, n_rows, top_k = sizes.comm.empty, sizes.n_rows, sizes.top_k
    columns = x.shape[1]
    to = Received(empty((n_rows, columns), (columns, 1), x.dtype))
    if scales is not None:
        n = scales.shape[1]
        to.scales = x.new_empty((n_rows, n), dtype=torch.int32)
        if in_columns:
            by_column = x.new_empty((n, round_up(n_rows, 4)), dtype=torch.int32)
            to.scales = by_column.t()[:n_rows]
    layout = ((n_rows, top_k), (top_k, 1)) if sizes.is_plain else ((n_rows,), (1,))
    if weights is not None:
        to.weights = empty(*layout, torch.float32)
    if sizes.is_plain:
        to.local_ids = empty(*layout, torch.int64)
    return to


def zeroed(to: Received) -> Received:
    """Fills with zeros what rows do not overwrite."""
    for tensor in (to.rows.view(torch.uint8), to.scales, to.weights):
        if tensor is not None:
            tensor.zero_()
    return to


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns hosts and ranks of each, as if all were on one; a buffer knows better."""
    return 1, n_ranks_of(group)


def get_logical_domain_size(
    group: dist.ProcessGroup, allow_hybrid_mode: bool = True
) -> tuple[int, int]:
    """Returns groups that reach each other through a network, and their ranks."""
    return 1, n_ranks_of(group)


def n_ranks_of(group: dist.ProcessGroup | None) -> int:
    """Counts the ranks of a group; None: of the default one."""
    if group is not None:
        check_group(group, None)
    return dist.get_world_size(group)
