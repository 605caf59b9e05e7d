# SPDX-License-Identifier: Apache-2.0
"""Dispatch of rows as they are given, and combine that returns sums.

Rows are *plain*, one for each token and rank, or *expanded*, one for each token and
expert of this rank. Either way the rank of the experts adds up a token's rows once.

Kernels combine what a region received last. So a combine of an older dispatch first
repeats it, without rows: routing alone decides where rows are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .channel import BOTH, Channel, Region
from .channels import Channels
from .communicator import Communicator
from .library import Settings, round_up

PLAIN, EXPANDED = "plain", "expanded"
_ROW_BYTES = 16
"""Bytes of a row in a dispatch that is only there for the combine after it."""
_REGIONS_UP_TO = {4: 1 << 27, 2: 1 << 29}
"""How many regions a channel has, by the bytes that each may have. Half of them are for
captured graphs: a replay changes a region without a call of Python. With four, two
batches may be in flight."""


@dataclass(eq=False)
class Routing:
    """Where tokens go: what each dispatch of them has alike.

    Every launch writes all tables, and always the same. ``ends``: where rows end, in
    plain rows those of each source rank, else those of each local expert. ``counts``,
    expanded: rows of each local expert, then of each local expert from each rank.
    ``src_info``: token and choice of a row. ``ids``, plain: what the router chose; -1
    after the last row.
    """

    comm: Communicator
    rows: str
    n_experts: int
    top_k: int
    alignment: int
    n_tokens: int
    n_rows: int
    cap: int
    """Tokens of a rank that the memory holds."""
    topk_idx: torch.Tensor
    ends: torch.Tensor = field(init=False)
    counts: torch.Tensor | None = field(init=False, default=None)
    src_info: torch.Tensor = field(init=False)
    ids: torch.Tensor | None = field(init=False, default=None)
    region: Region | None = None
    use: object = None
    """What the region was used for last, if that is this."""

    def __post_init__(self) -> None:
        def new(*shape: int) -> torch.Tensor:
            return self.topk_idx.new_empty(shape, dtype=torch.int32)

        n_local = self.n_experts // self.comm.n_ranks
        if self.rows == PLAIN:
            self.ends, self.ids = new(self.comm.n_ranks), new(self.n_rows, self.top_k)
        else:
            self.ends = new(n_local)
            self.counts = new(n_local * (1 + self.comm.n_ranks))
        self.src_info = new(max(1, self.n_rows), 2)

    def settings(
        self, row_bytes: int, n_scales: int, combine: str, columns: int, partial: str
    ) -> Settings:
        """Describes the channel for rows out of so many bytes and scales, and for sums
        of so many columns back."""
        return Settings(
            target=self.comm.target,
            format="given",
            hidden=row_bytes,
            combine=combine,
            combine_hidden=columns,
            experts=self.n_experts,
            ranks=self.comm.n_ranks,
            top_k=self.top_k,
            tokens=self.cap,
            wide_ids=True,
            rows=self.rows,
            scales=n_scales,
            partial=partial,
            alignment=1 if self.rows == PLAIN else self.alignment,
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Returns what launches use."""
        return self.topk_idx, self.ends, self.counts, self.src_info, self.ids

    def is_latest(self, channel: Channel) -> bool:
        """Returns whether a region of a channel still has what this one dispatched."""
        region = self.region
        if region not in channel.regions or self.use is not region.use:
            return False
        # Replays of a graph dispatch, too.
        captures = channel.comm.streams.is_capturing()
        return region.is_captured == captures and (captures or not region.was_captured)


@dataclass
class Received:
    """Where a dispatch puts what comes; None: that is not wanted."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    local_ids: torch.Tensor | None = None


def open_channels(channels: Channels, *wanted: Settings) -> list[Channel]:
    """Returns channels; opens those that are new, with all other ranks."""
    found = []
    for settings in wanted:
        row = settings.hidden + 4 * settings.scales + 2 * settings.combine_hidden
        n_bytes = settings.ranks * settings.tokens * row
        fits = [n for n, most in _REGIONS_UP_TO.items() if n_bytes <= most]
        n_regions = max([1, *fits])
        if not channels.comm.is_gpu:  # nothing is captured
            n_regions = max(1, n_regions // 2)
        found += channels.open([settings], n_regions)
    return found


def _next_region(channel: Channel, captures: bool) -> Region:
    """Returns the region of the next dispatch, in turn."""
    regions, n = channel.regions, len(channel.regions)
    if channel.comm.is_gpu and n > 1:
        regions = regions[n // 2 :] if captures else regions[: n // 2]
    channel.n_taken += 1
    return regions[channel.n_taken % len(regions)]


def joined(x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Returns rows as kernels take them: each with its scales behind it."""
    if scales is None:
        return x
    n_bytes, n_scales = x.shape[1] * x.element_size(), scales.shape[1]
    shape = (x.shape[0], n_bytes + round_up(4 * n_scales, 16))
    both = x.new_empty(shape, dtype=torch.uint8)
    both[:, :n_bytes].copy_(x.view(torch.uint8))
    words = both.view(torch.int32)[:, n_bytes // 4 :][:, :n_scales]
    words.copy_(scales.view(torch.int32))
    return both


def dispatch(
    channel: Channel,
    routing: Routing,
    sent: torch.Tensor,
    weights: torch.Tensor | None,
    to: Received,
    ids: torch.Tensor | None = None,
) -> None:
    """Dispatches tokens, ``joined`` with their scales; None: weights of 0. ``ids`` are
    copied to those of the routing; None: they are there."""
    comm = channel.comm
    captures = comm.streams.is_capturing()
    region = _next_region(channel, captures)
    routing.region, routing.use = region, object()
    region.use, region.is_captured = routing.use, captures
    region.was_captured |= captures
    new = routing.src_info.new_empty
    n_rows = routing.n_rows
    per_row = routing.top_k if routing.rows == PLAIN else 1
    # Kernels write all of them.
    recv_weights, local_ids = to.weights, to.local_ids
    if recv_weights is None:
        recv_weights = new(n_rows * per_row)
    if local_ids is None:
        local_ids = new(n_rows * routing.top_k if routing.rows == PLAIN else 0, 2)
    scales = new((0, 0)) if to.scales is None else to.scales
    if weights is None:
        weights = channel.no_weights(routing.cap * routing.top_k)
    region.dispatch(
        BOTH,
        sent.data_ptr(),
        (routing.topk_idx if ids is None else ids).data_ptr(),
        routing.n_tokens,
        to.rows.data_ptr(),
        scales.data_ptr(),
        routing.ends.data_ptr(),
        0 if routing.counts is None else routing.counts.data_ptr(),
        routing.src_info.data_ptr(),
        n_rows,
        weights.data_ptr(),
        recv_weights.data_ptr(),
        0 if routing.ids is None else routing.ids.data_ptr(),
        local_ids.data_ptr(),
        *scales.stride(),
        routing.topk_idx.data_ptr(),
    )


def combine(
    channel: Channel,
    routing: Routing,
    x: torch.Tensor,
    y: torch.Tensor,
    biases: tuple[torch.Tensor, ...] = (),
) -> None:
    """Adds up the rows of each token into ``y``, after the biases."""
    if not routing.is_latest(channel):
        settings, new = channel.settings, routing.src_info.new_empty
        n_words = (settings.hidden + round_up(4 * settings.scales, 16)) // 4
        rows = new((routing.n_rows, settings.hidden // 4))
        scales = new((routing.n_rows, settings.scales))
        sent = new((routing.n_tokens, n_words))
        dispatch(channel, routing, sent, None, Received(rows, scales))
    region: Any = routing.region
    region.combine(
        BOTH,
        x.data_ptr(),
        routing.src_info.data_ptr(),
        y.data_ptr(),
        routing.n_tokens,
        0,  # rows have their weights
        x.shape[0],
        len(biases),
        *(one.data_ptr() for one in biases),
    )


def weights_back(settings: Settings, top_k: int) -> Settings:
    """Describes the channel in which a weight for each choice returns."""
    columns = round_up(top_k, 4)
    small = dict(hidden=_ROW_BYTES, scales=0, combine="float32", partial="float32")
    return replace(settings, combine_hidden=columns, **small)


def combine_weights(
    channel: Channel, routing: Routing, weights: torch.Tensor
) -> torch.Tensor:
    """Returns, for each choice of this rank's tokens, the weight that the rank of its
    expert gives; 0 for a choice without one."""
    columns, top_k = channel.settings.combine_hidden, routing.top_k
    rows = weights.new_zeros((routing.n_rows, columns))
    if routing.rows == PLAIN:
        n_local = routing.n_experts // routing.comm.n_ranks
        local = routing.ids - routing.comm.rank * n_local
        is_here = (local >= 0) & (local < n_local)
        rows[:, :top_k] = torch.where(is_here, weights, 0)
    else:
        # Between the rows of two experts there is no choice.
        choices = routing.src_info[: routing.n_rows, 1:].clamp(0, top_k - 1)
        rows.scatter_(1, choices.long(), weights.unsqueeze(1))
    sums = weights.new_empty((routing.n_tokens, columns))
    combine(channel, routing, rows, sums)
    return sums[:, :top_k].contiguous()
