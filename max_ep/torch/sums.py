# SPDX-License-Identifier: Apache-2.0
"""Dispatch of rows as they are given, and combine that returns sums.

Rows are *plain*, one for each token and rank, or *expanded*, one for each token and
expert of this rank. Either way the rank of the experts adds up a token's rows once.

Kernels combine what a region received last. So a combine of an older dispatch first
repeats it, without rows: routing alone decides where rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..limits import TOKEN_ALIGN_BYTES
from ..plural import counted
from .calls import PLAIN, Call, ElasticCall
from .channel import BOTH, RECEIVE, Channel, Region
from .channels import Channels
from .communicator import Communicator, check_start, refuse
from .library import Settings, round_up
from .quantized import Given
from .streams import Numbers
from .tables import first_rows, view

_REGIONS_UP_TO = {4: 1 << 27, 2: 1 << 29}
"""How many regions a channel has, by the bytes that each may have. Half of them are for
captured graphs: a replay changes a region without a call of Python. With four, two
batches may be in flight."""


@dataclass(eq=False)
class Sizes:
    """What dispatches of as many tokens to as many rows have alike."""

    comm: Communicator
    rows: str
    n_experts: int
    top_k: int
    alignment: int
    n_tokens: int
    n_rows: int
    cap: int
    """Tokens of a rank that the memory holds."""
    most: int
    """Tokens that each rank may have."""
    copies_ids: bool
    """Whether a launch copies ``topk_idx`` into the tables."""

    def __post_init__(self) -> None:
        self.is_plain = self.rows == PLAIN
        self.n_local = self.n_experts // self.comm.n_ranks
        self.of_kernels = self.rows, self.n_experts, self.top_k, self.alignment
        self.of_kernels += self.n_tokens, self.cap
        self._lay_out()

    def _lay_out(self) -> None:
        """Lays out the tables: int32 words of each, and the byte at which each begins,
        at whole 16; last the end."""
        n_ranks, n_local = self.comm.n_ranks, self.n_local
        if self.is_plain:
            words = n_ranks, 0, self.n_rows * self.top_k
        else:
            words = n_local, n_local * (1 + n_ranks), 0
        n_copied = self.n_tokens * self.top_k if self.copies_ids else 0
        self.words_of = *words, 2 * max(1, self.n_rows), 2 * n_copied
        end, at = 0, [0]
        for n in self.words_of:
            end += -(-n // 4) * 16
            at.append(end)
        self.at = tuple(at)

    def with_rows(self, n_rows: int) -> Sizes:
        """Returns those of so many rows."""
        sizes = object.__new__(Sizes)  # `copy.copy` takes 5 us more
        vars(sizes).update(vars(self), n_rows=n_rows)
        sizes._lay_out()
        return sizes

    def with_fewer(self, n_rows: int) -> Sizes:
        """Returns those of fewer rows in the same tables."""
        fewer = self.with_rows(n_rows)
        fewer.at = self.at
        return fewer

    def call(
        self, hidden: int, format: str, scales: int | None, **modes: bool
    ) -> ElasticCall:
        """Describes a call that sends such tokens there; ``modes`` of its buffer."""
        return ElasticCall(
            experts=self.n_experts,
            top_k=self.top_k,
            hidden=hidden,
            tokens=self.cap,
            format=format,
            scales=scales,
            do_expand=not self.is_plain,
            expert_alignment=self.alignment,
            **modes,
            **self.comm.for_calls,
        )


class Routing:
    """Where tokens go: what each dispatch of them has alike.

    Every launch writes all tables, and always the same. They are in one allocation, and
    become tensors when they are asked for. ``ends``: where rows end, in plain rows
    those of each source rank, else those of each local expert. ``counts``, expanded:
    rows of each local expert, then of each local expert from each rank. ``src_info``:
    token and choice of a row. ``ids``, plain: what the router chose; -1 after the last
    row.
    """

    channel: Channel | None = None
    """Through which the last dispatch went."""
    region: Region | None = None
    use: object = None
    """What the region was used for last, if that is this."""
    read_ends: np.ndarray | None = None
    """What the host has read, and is not in the tables."""

    def __init__(self, sizes: Sizes, topk_idx: torch.Tensor | None) -> None:
        self.sizes = sizes
        self.tables = sizes.comm.empty((sizes.at[-1] // 8,), (1,), torch.int64)
        self.kept_ids = None if sizes.copies_ids else topk_idx
        """None: those in the tables."""

    @property
    def topk_idx(self) -> torch.Tensor:
        """Returns int64 ``[n_tokens, top_k]``, or what its owner assigned."""
        if self.kept_ids is None:
            n_tokens, top_k, at = self.sizes.n_tokens, self.sizes.top_k, self.sizes.at
            shape, strides = (n_tokens, top_k), (top_k, 1)
            self.kept_ids = view(self.tables, shape, strides, at[4] // 8)
        return self.kept_ids

    def _words(self, i: int) -> torch.Tensor:
        first = self.sizes.at[i] // 4
        return self.tables.view(torch.int32)[first : first + self.sizes.words_of[i]]

    @property
    def ends(self) -> torch.Tensor:
        """Returns int32 ``[n_ranks]``, expanded ``[n_local]``."""
        ends = self._words(0)
        if self.read_ends is None:
            return ends
        if self.sizes.comm.streams.is_capturing():  # a replay writes them, not this
            for word, end in zip(ends, self.read_ends.tolist()):
                word.fill_(end)
        else:
            ends.copy_(torch.from_numpy(self.read_ends))
            self.read_ends = None
        return ends

    @property
    def counts(self) -> torch.Tensor:
        """Returns int32 ``[n_local + n_local * n_ranks]``, of expanded rows."""
        return self._words(1)

    @property
    def ids(self) -> torch.Tensor:
        """Returns int32 ``[n_rows, top_k]``, of plain rows."""
        return self._words(2).view(self.sizes.n_rows, self.sizes.top_k)

    @property
    def src_info(self) -> torch.Tensor:
        """Returns int32 ``[n_rows, 2]``, at least one row."""
        return self._words(3).view(-1, 2)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Returns what launches use."""
        return self.kept_ids, self.tables

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

    def first(self, n_rows: int) -> Received:
        tensors = self.rows, self.scales, self.weights, self.local_ids
        return Received(*(first_rows(one, n_rows) for one in tensors))


_NONE = torch.empty(0, device="cpu")
NOWHERE = Received(_NONE, None, _NONE, _NONE)
"""What a dispatch that only sends delivers."""


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


def channel_again(channels: Channels, channel: Channel, call: Call) -> Channel:
    """Returns a channel of short rows, in which it costs little to repeat a dispatch
    for its combine."""
    settings = call.again(channel.settings)
    if settings not in channels.opened and channels.comm.streams.is_capturing():
        return channel  # nothing can be opened
    return open_channel(channels, settings, call)


def joined(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns rows as kernels take them: each with its scales behind it."""
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
    given: Given,
    weights: torch.Tensor | None,
    to: Received,
    ids: torch.Tensor | None = None,
    numbers: Numbers | None = None,
    form: int = BOTH,
) -> None:
    """Dispatches tokens; no weights: 0. ``ids`` are copied to those of the routing;
    None: they are there. ``numbers``: plain rows, where the host reads the ends.
    ``form``: ``SEND``, to ``NOWHERE`` and with as many rows as can come, then
    ``RECEIVE`` as the next of this region, with as many as come."""
    comm, sizes, start = channel.comm, routing.sizes, 0
    if form != RECEIVE:
        words = given.words
        sent = joined(given.rows, words) if words is not None else given.rows
        start = sent.data_ptr()
        if not start or start % TOKEN_ALIGN_BYTES != 0:
            check_start("x", sent)
        captures = comm.streams.is_capturing()
        channel.n_taken += 1
        turns = channel.turns[captures]
        taken = turns[channel.n_taken % len(turns)]
        routing.channel, routing.region, routing.use = channel, taken, object()
        taken.use, taken.is_captured = routing.use, captures
        taken.was_captured |= captures
    region: Any = routing.region
    n_rows, top_k, is_plain = sizes.n_rows, sizes.top_k, sizes.is_plain
    # Kernels write all of them.
    recv_weights, local_ids, scales = to.weights, to.local_ids, to.scales
    if recv_weights is None:
        recv_weights = channel.unread_weights
    if local_ids is None and is_plain:
        local_ids = comm.empty((n_rows * top_k,), (1,), torch.int64)
    if weights is None:
        weights = channel.no_weights
    tables = routing.tables.data_ptr()
    ends, counts, chosen, src_info, kept_ids, _ = sizes.at
    if routing.kept_ids is not None:
        kept_ids = routing.kept_ids.data_ptr() - tables
    region.dispatch(
        form,
        start,
        tables + kept_ids if ids is None else ids.data_ptr(),
        sizes.n_tokens,
        to.rows.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        tables + ends if numbers is None else numbers.address,
        0 if is_plain else tables + counts,
        tables + src_info,
        n_rows,
        weights.data_ptr(),
        recv_weights.data_ptr(),
        tables + chosen if is_plain else 0,
        0 if local_ids is None else local_ids.data_ptr(),
        *((0, 0) if scales is None else scales.stride()),
        tables + kept_ids,
    )
    if numbers is not None:
        comm.streams.launched(numbers)


def listed(bias: Any) -> tuple[torch.Tensor, ...]:
    """Returns the biases that a caller gives to combine."""
    biases = bias if isinstance(bias, (tuple, list)) else (bias,)
    biases = tuple(one for one in biases if one is not None)
    if len(biases) > 2:
        refuse(
            "bias", f"has {counted(len(biases), 'tensor')}; add them up to at most two"
        )
    return biases


def ends_in(numbers: Numbers, comm: Communicator) -> np.ndarray:
    """Waits until it is known how many plain rows come from the ranks up to each, and
    returns that; they may be on their way. Raises if there are none because the
    dispatch has failed."""
    ends = numbers.read()
    if ends[-1] == 0 and numbers.event is not None:
        numbers.event.synchronize()
        comm.check_regions()
    return ends


def combine(
    channel: Channel,
    routing: Routing,
    x: torch.Tensor,
    y: torch.Tensor,
    biases: tuple[torch.Tensor, ...] = (),
    again: Callable[[Channel], Channel] | None = None,
) -> None:
    """Adds up the rows of each token into ``y``, after the biases. ``again`` returns
    the channel in which a dispatch is repeated; None: in that which is given."""
    sizes, start = routing.sizes, x.data_ptr()
    if not start or start % TOKEN_ALIGN_BYTES != 0:
        check_start("x", x)
    is_latest = routing.is_latest(channel)
    if not is_latest and again is not None:
        channel = again(channel)
        is_latest = routing.is_latest(channel)
    if not is_latest:
        settings, new = channel.settings, routing.src_info.new_empty
        n_words = (settings.hidden + round_up(4 * settings.scales, 16)) // 4
        rows = new((sizes.n_rows, settings.hidden // 4))
        scales = new((sizes.n_rows, settings.scales))
        sent = new((sizes.n_tokens, n_words))
        dispatch(channel, routing, Given(sent), None, Received(rows, scales))
    region: Any = routing.region
    region.combine(
        BOTH,
        start,
        routing.tables.data_ptr() + sizes.at[3],
        y.data_ptr(),
        sizes.n_tokens,
        0,  # rows have their weights
        sizes.n_rows,
        len(biases),
        *(one.data_ptr() for one in biases),
    )


def combine_weights(
    channel: Channel, routing: Routing, weights: torch.Tensor
) -> torch.Tensor:
    """Returns, for each choice of this rank's tokens, the weight that the rank of its
    expert gives; 0 for a choice without one."""
    columns, sizes = channel.settings.combine_hidden, routing.sizes
    top_k = sizes.top_k
    rows = weights.new_zeros((sizes.n_rows, columns))
    if sizes.is_plain:
        local = routing.ids - sizes.comm.rank * sizes.n_local
        is_here = (local >= 0) & (local < sizes.n_local)
        rows[:, :top_k] = torch.where(is_here, weights, 0)
    else:
        # Between the rows of two experts there is no choice.
        choices = routing.src_info[: sizes.n_rows, 1:].clamp(0, top_k - 1)
        rows.scatter_(1, choices.long(), weights.unsqueeze(1))
    sums = weights.new_empty((sizes.n_tokens, columns))
    combine(channel, routing, rows, sums)
    return sums[:, :top_k].contiguous()
