# SPDX-License-Identifier: Apache-2.0
"""Dispatch of rows as they are given, and combine that returns sums.

Rows are *plain*, one for each token and rank, or *expanded*, one for each token and
expert of this rank. Either way the rank of the experts adds up a token's rows once.

Kernels combine what a region received last. So a combine of an older dispatch first
repeats it, without rows: routing alone decides where rows are.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from .calls import EXPANDED, PLAIN, Call, ElasticCall
from .channel import BOTH, Channel, Region
from .channels import Channels
from .communicator import Communicator
from .library import Settings, round_up
from .tables import view

_REGIONS_UP_TO = {4: 1 << 27, 2: 1 << 29}
"""How many regions a channel has, by the bytes that each may have. Half of them are for
captured graphs: a replay changes a region without a call of Python. With four, two
batches may be in flight."""


@functools.lru_cache(1024)
def _places(
    rows: str, n_ranks: int, n_local: int, n_rows: int, top_k: int, n_copied: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the int32 words of each table; the byte at which each begins, at whole
    16, and last the end."""
    if rows == PLAIN:
        words = n_ranks, 0, n_rows * top_k
    else:
        words = n_local, n_local * (1 + n_ranks), 0
    words = *words, 2 * max(1, n_rows), 2 * n_copied
    steps = [round_up(4 * n, 16) for n in words]
    return words, tuple(itertools.accumulate(steps, initial=0))


@dataclass(eq=False)
class Routing:
    """Where tokens go: what each dispatch of them has alike.

    Every launch writes all tables, and always the same. They are in one allocation, and
    become tensors when they are asked for. ``ends``: where rows end, in plain rows
    those of each source rank, else those of each local expert. ``counts``, expanded:
    rows of each local expert, then of each local expert from each rank. ``src_info``:
    token and choice of a row. ``ids``, plain: what the router chose; -1 after the last
    row.
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
    copies_ids: bool = False
    """Whether a launch copies what is given as ``topk_idx``, and that is the copy."""
    tables: torch.Tensor = field(init=False)
    channel: Channel | None = None
    """Through which the last dispatch went."""
    region: Region | None = None
    use: object = None
    """What the region was used for last, if that is this."""

    def __post_init__(self) -> None:
        n_ranks = self.comm.n_ranks
        n_copied = self.n_tokens * self.top_k if self.copies_ids else 0
        sizes = n_ranks, self.n_experts // n_ranks, self.n_rows, self.top_k, n_copied
        self._words_of, self._at = _places(self.rows, *sizes)
        self.tables = self.comm.empty((self._at[-1] // 8,), (1,), torch.int64)
        if self.copies_ids:
            shape, strides = (self.n_tokens, self.top_k), (self.top_k, 1)
            self.topk_idx = view(self.tables, shape, strides, self._at[4] // 8)

    def addresses(self) -> tuple[int, int, int, int]:
        """Returns where ``ends``, ``counts``, ``ids`` and ``src_info`` are; 0: it has
        none."""
        base, (ends, counts, ids, src_info, *_) = self.tables.data_ptr(), self._at
        if self.rows == PLAIN:
            return base + ends, 0, base + ids, base + src_info
        return base + ends, base + counts, 0, base + src_info

    def _words(self, i: int) -> torch.Tensor:
        first = self._at[i] // 4
        return self.tables.view(torch.int32)[first : first + self._words_of[i]]

    @property
    def ends(self) -> torch.Tensor:
        """Returns int32 ``[n_ranks]``, expanded ``[n_local]``."""
        return self._words(0)

    @property
    def counts(self) -> torch.Tensor:
        """Returns int32 ``[n_local + n_local * n_ranks]``, of expanded rows."""
        return self._words(1)

    @property
    def ids(self) -> torch.Tensor:
        """Returns int32 ``[n_rows, top_k]``, of plain rows."""
        return self._words(2).view(self.n_rows, self.top_k)

    @property
    def src_info(self) -> torch.Tensor:
        """Returns int32 ``[n_rows, 2]``, at least one row."""
        return self._words(3).view(-1, 2)

    def call(
        self, hidden: int, rounds: bool, format: str, scales: int | None = None
    ) -> ElasticCall:
        """Describes a call that sends such tokens there."""
        return ElasticCall(
            experts=self.n_experts,
            top_k=self.top_k,
            hidden=hidden,
            tokens=self.cap,
            format=format,
            scales=scales,
            do_expand=self.rows == EXPANDED,
            expert_alignment=self.alignment,
            allow_multiple_reduction=rounds,
            **self.comm.for_calls,
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Returns what launches use."""
        return self.topk_idx, self.tables

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


def open_channel(channels: Channels, settings: Settings, call: Call) -> Channel:
    """Returns a channel; opens a new one with all other ranks."""
    found = channels.opened.get(settings)
    if found is not None:
        return found
    row = settings.hidden + 4 * settings.scales + 2 * settings.combine_hidden
    n_bytes = settings.ranks * settings.tokens * row
    n_regions = max([1, *(n for n, most in _REGIONS_UP_TO.items() if n_bytes <= most)])
    if not channels.comm.is_gpu:  # nothing is captured
        n_regions = max(1, n_regions // 2)
    (opened,) = channels.open([settings], n_regions, call)
    return opened


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
    routing.channel, routing.region, routing.use = channel, region, object()
    region.use, region.is_captured = routing.use, captures
    region.was_captured |= captures
    n_rows, top_k, is_plain = routing.n_rows, routing.top_k, routing.rows == PLAIN
    # Kernels write all of them.
    recv_weights, local_ids, scales = to.weights, to.local_ids, to.scales
    if recv_weights is None:
        n = n_rows * top_k if is_plain else n_rows
        recv_weights = comm.empty((n,), (1,), torch.float32)
    if local_ids is None and is_plain:
        local_ids = comm.empty((n_rows * top_k,), (1,), torch.int64)
    if weights is None:
        weights = channel.no_weights(routing.cap * top_k)
    ends, counts, kept, src_info = routing.addresses()
    region.dispatch(
        BOTH,
        sent.data_ptr(),
        (routing.topk_idx if ids is None else ids).data_ptr(),
        routing.n_tokens,
        to.rows.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        ends,
        counts,
        src_info,
        n_rows,
        weights.data_ptr(),
        recv_weights.data_ptr(),
        kept,
        0 if local_ids is None else local_ids.data_ptr(),
        *((0, 0) if scales is None else scales.stride()),
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
        routing.addresses()[3],
        y.data_ptr(),
        routing.n_tokens,
        0,  # rows have their weights
        x.shape[0],
        len(biases),
        *(one.data_ptr() for one in biases),
    )


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
