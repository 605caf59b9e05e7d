# SPDX-License-Identifier: Apache-2.0
"""DeepEP's normal calls: one row for each pair of a token and a rank.

The kernels route by expert, so here each rank is one expert, and a token's choices are
its ranks. A call makes two dispatches in two channels: words that go with each row
(scales, expert ids, router weights), and rows. Words go first: the host reads from them
how many rows come, and returns while these move. Combine uses the channel of words.

A kernel combines the last dispatch that it received. After another dispatch, combine
first repeats the dispatch of its handle, without rows. So any handle may be combined at
any time, also in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..limits import checked_int
from .calls import NormalCall, first_tokens, power_of_two
from .channel import BOTH, Channel
from .channels import Channels
from .communicator import refuse
from .library import round_up
from .normal_layout import (
    Layout,
    NormalHandle,
    agree,
    bytes_of_row,
    check_ids,
    check_layout,
    count_ids,
    exchange_counts,
    here,
    in_int32,
)
from .quantized import Given, given_as
from .streams import EventOverlap, When, check_event
from .tables import first_rows, view

_COMBINED = torch.bfloat16, torch.float32
_FIRST = 4


class Normal:
    """The normal calls of a rank; :class:`max_ep.torch.Buffer` describes them."""

    def __init__(self, channels: Channels, num_nvl_bytes: int) -> None:
        self.comm = channels.comm
        self._channels = channels
        self._n_bytes = num_nvl_bytes
        self._found: dict[tuple[Any, ...], list[Channel]] = {}

    def forget(self) -> None:
        """Forgets channels, which a reset may close."""
        self._found.clear()

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, when: When
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts where tokens go."""
        comm = self.comm
        comm.raise_failure()
        check_event(when.after)
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (None, None))
        num_experts = comm.check_experts(num_experts)
        check_ids(comm, topk_idx, num_experts)
        n_local = num_experts // comm.n_ranks
        per_rank = topk_idx.new_empty(comm.n_ranks, dtype=torch.int32)
        # Choices of no expert are counted in front of the others, at whole 16 bytes.
        counts = topk_idx.new_empty(_FIRST + num_experts, dtype=torch.int32)
        per_expert = counts[_FIRST:]
        shape = (topk_idx.shape[0], comm.n_ranks)
        in_rank = topk_idx.new_empty(shape, dtype=torch.bool)

        def work() -> None:
            ranks = torch.div(topk_idx, n_local, rounding_mode="floor")
            torch.any(ranks.unsqueeze(2) == comm.rank_numbers, 1, out=in_rank)
            torch.sum(in_rank, 0, dtype=torch.int32, out=per_rank)
            ones = comm.one.expand(topk_idx.numel())
            counts.zero_().scatter_add_(0, topk_idx.flatten() + _FIRST, ones)

        tensors = (topk_idx, per_rank, counts, in_rank)
        event = comm.streams.run(work, tensors, when)
        return per_rank, None, per_expert, in_rank, event

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: NormalHandle | None,
        layout: Layout,
        align: int,
        worst: int,
        when: When,
        format: str | None = None,
    ) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        """Checks a dispatch, agrees with all ranks on sizes, and launches it."""
        comm, previous_event = self.comm, when.after
        align = checked_int("max_ep: expert_alignment", align)
        worst = checked_int("max_ep: num_worst_tokens", worst, 0)
        check_event(previous_event)
        topk_idx, topk_weights = layout.topk_idx, layout.topk_weights
        given = self._given(x, format)
        x, scales = given.rows, given.words
        row_bytes = bytes_of_row(comm, x, None)
        n_scales = 0 if scales is None else scales.shape[1]
        (n_tokens, columns), hidden = x.shape, given.hidden
        is_new, counts, is_synced = handle is None, [], False
        if is_new:
            is_synced = not worst
            top_k, n_experts = check_layout(comm, n_tokens, layout)
            what = f"dispatch of rows of {row_bytes} bytes, {n_scales} scales, "
            what += f"top_k={top_k}, num_experts={n_experts}"
            most, n_rows = agree(comm, what, n_tokens, worst)
            cap = self._channels.cap = self._capacity(most, hidden)
            handle = NormalHandle(
                comm,
                n_rows=n_rows,
                n_made=comm.n_ranks * cap if worst else n_rows,
                n_sent=n_tokens,
                cap=cap,
                n_scales=n_scales,
                top_k=top_k,
                mask=layout.mask,
            )
        reads: list[Callable[[], list[int]]] = []
        if is_synced and topk_idx is None:  # no ids come, which could be counted
            if previous_event is not None:
                previous_event.current_stream_wait()
            reads.append(comm.streams.to_host(layout.per_expert))
        if not is_new:
            handle = self._checked(handle)
            if topk_idx is not None or topk_weights is not None:
                refuse("topk_idx", "is not sent again with a handle")
        if n_tokens != handle.n_sent:
            refuse("x", f"has {n_tokens} rows, those of the handle are {handle.n_sent}")

        recv_x = x.new_empty((handle.n_made, columns))
        has_extras = scales is not None or topk_idx is not None
        channels = self._opened(handle, given, n_scales, has_extras)
        recv_scales, recv_ids, recv_weights = None, None, None
        if scales is not None:
            recv_scales = scales.new_empty((handle.n_rows, n_scales))
        if topk_idx is not None:
            shape = (handle.n_rows, top_k)
            recv_ids = topk_idx.new_empty(shape)
            recv_weights = topk_weights.new_empty(shape)
            n_local = n_experts // comm.n_ranks

        at = x.data_ptr(), recv_x.data_ptr()

        def move_extras() -> None:
            channel = channels[1]
            n_words = channel.settings.hidden
            k = 0 if topk_idx is None else top_k
            # One allocation: words that are sent, then those that come.
            shape = (n_tokens + handle.n_made, n_words)
            words = x.new_empty(shape, dtype=torch.int32)
            floats = words.view(torch.float32)
            sent, n_rows, first = words.data_ptr(), handle.n_rows, n_tokens * n_words
            if scales is not None:
                columns_of(words, n_tokens, 0, n_scales).copy_(scales)
            if topk_idx is not None:
                in_int32(topk_idx, columns_of(words, n_tokens, n_scales, k))
                columns_of(floats, n_tokens, n_scales + k, k).copy_(topk_weights)
                columns_of(words, handle.n_made, first, n_words).fill_(-1)
            self._dispatch_through(handle, channel, sent, sent + 4 * first)
            if scales is not None:
                recv_scales.copy_(columns_of(words, n_rows, first, n_scales))
            if topk_idx is not None:
                of_ids = columns_of(words, n_rows, first + n_scales, k)
                of_weights = columns_of(floats, n_rows, first + n_scales + k, k)
                # An id of -1, for none, is of rank -1.
                owners = torch.div(of_ids, n_local, rounding_mode="floor")
                is_elsewhere = owners != comm.rank
                torch.sub(of_ids, comm.rank * n_local, out=recv_ids)
                recv_ids.masked_fill_(is_elsewhere, -1)
                torch.where(is_elsewhere, comm.zero, of_weights, out=recv_weights)

        def work() -> None:
            if has_extras:
                move_extras()
            else:
                self._dispatch_through(handle, channels[0], *at)
            if is_synced:
                found = [handle.ranges[-1], channels[-1].regions[0].failed]
                if topk_idx is not None:
                    found.append(count_ids(recv_ids, n_local, comm.one))
                reads.append(comm.streams.to_host(*found))
            if has_extras:
                self._dispatch_through(handle, channels[0], *at)

        tensors = (x, scales, topk_idx, topk_weights, recv_x, recv_scales)
        tensors += (recv_ids, recv_weights, *handle.tensors())
        event = comm.streams.run(work, tensors, when)
        if is_synced:
            if topk_idx is None:  # while rows are on their way
                n_local = n_experts // comm.n_ranks
                all_counts = exchange_counts(comm, what, reads[0]())
                counts = here(all_counts, comm.rank * n_local, n_local)
            first, n, failed, *found = reads[-1]()
            if failed:
                comm.check_regions()
            if topk_idx is not None:
                counts = found
            if align != 1:
                counts = [round_up(c, align) for c in counts]
            handle.n_rows = n = first + n
            recv_ids = first_rows(recv_ids, n)
            recv_weights = first_rows(recv_weights, n)
            recv_scales = first_rows(recv_scales, n)
        result = given.arrived(recv_x[: handle.n_rows], recv_scales)
        if not is_new:
            return result, None, None, None, None, event
        return result, recv_ids, recv_weights, counts, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
        when: When,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Checks a combine, and launches it."""
        comm = self.comm
        check_event(when.after)
        handle = self._checked(handle)
        bytes_of_row(comm, x, handle.n_rows)
        if x.dtype not in _COMBINED:
            raise TypeError(f"max_ep: x must be bfloat16 or float32, got {x.dtype}")
        hidden = x.shape[1]
        y = x.new_empty((handle.n_sent, hidden))
        biases = bias if isinstance(bias, tuple) else (bias,)
        biases = tuple(one for one in biases if one is not None)
        for one in biases:
            comm.check_tensor("bias", one, x.dtype, tuple(y.shape))
        weights, top_k = None, None
        if topk_weights is not None:
            shape = (handle.n_rows, None)
            # Any strides will do: gradients often are expanded.
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            top_k = topk_weights.shape[1]
            weights = topk_weights.new_empty((handle.n_sent, top_k))
        channel, *of_weights = self._opened_back(handle, x, top_k)

        def work() -> None:
            self._combine_through(channel, handle, x, y)
            if of_weights:
                n_pad = of_weights[0].settings.combine_hidden - top_k
                padded = torch.nn.functional.pad(topk_weights, (0, n_pad))
                sums = padded.new_empty((handle.n_sent, padded.shape[1]))
                self._combine_through(of_weights[0], handle, padded, sums)
                weights.copy_(sums[:, :top_k])
            if biases:
                with torch.no_grad():  # no result of a kernel has a gradient
                    y.copy_(sum(biases, start=y.float()))

        tensors = (x, y, topk_weights, weights, *biases, *handle.tensors())
        event = comm.streams.run(work, tensors, when)
        return y, weights, event

    # ------------------------------------------------------------------- inside

    def _given(self, x: Any, format: str | None) -> Given:
        """Takes tokens; rows may have any dtype, without scales or with such of 4
        bytes."""
        if format is not None:
            return given_as(self.comm, x, format)
        pair = x if isinstance(x, tuple) else (x, None)
        if len(pair) != 2 or not _is_opaque(pair[1]):
            return given_as(self.comm, x, None)
        rows, scales = pair
        self.comm.check_tensor("x", rows, None, (None, None))
        if scales is None:
            return Given(rows)
        # Any strides will do: matmuls want columns.
        self.comm.check_tensor("scales of x", scales, None, (len(rows), None), True)
        if not 0 < scales.shape[1] <= rows.shape[1]:
            refuse("scales of x", f"have {scales.shape[1]} columns")
        return Given(rows, scales.view(torch.int32), scales)

    def _checked(self, handle: Any) -> NormalHandle:
        """Refuses what is no handle of these ranks; takes a tuple of its items, too."""
        comm = self.comm
        if isinstance(handle, (tuple, list)):
            handle = NormalHandle.of_items(comm, handle)
        comm.check_handle(handle, NormalHandle, "dispatch", of_group=True)
        return handle

    def _capacity(self, n_tokens: int, hidden: int) -> int:
        """Returns how many tokens of a rank channels hold, the same on all ranks; never
        less than before."""
        given = dict(self.comm.for_calls, hidden=hidden, num_nvl_bytes=self._n_bytes)
        start = self._channels.cap or first_tokens(**given)
        return max(start, power_of_two(n_tokens))

    def _opened(
        self, handle: NormalHandle, given: Given, n_scales: int, has_extras: bool
    ) -> list[Channel]:
        """Returns the channels of a dispatch: of rows, and of words if there are some.
        A handle may be of tokens without scales."""
        format, hidden = given.format, given.hidden
        key = format, hidden, n_scales, handle.top_k, handle.cap, has_extras
        found = self._found.get(key)
        if found is None:
            call = self._call(handle, format, hidden, n_scales)
            wanted = [call.rows(), call.words()][: 1 + has_extras]
            found = self._found[key] = self._channels.open(wanted, 1, call)
        return found

    def _opened_back(
        self, handle: NormalHandle, x: torch.Tensor, top_k: int | None
    ) -> list[Channel]:
        """Returns those of a combine: of rows, and of ``top_k`` weights if there are
        some."""
        hidden = x.shape[1]
        key = x.dtype, hidden, handle.n_scales, handle.top_k, handle.cap, top_k
        found = self._found.get(key)
        if found is None:
            call = self._call(handle, Given(x).format, hidden, handle.n_scales)
            wanted = [call.words()]
            if top_k is not None:
                wanted.append(replace(call, top_k=top_k).weights())
            found = self._found[key] = self._channels.open(wanted, 1, call)
        return found

    def _call(
        self, handle: NormalHandle, format: str, hidden: int, n_scales: int
    ) -> NormalCall:
        """Describes a call with a handle."""
        return NormalCall(
            experts=self.comm.n_ranks,  # of any number, the kernels are the same
            top_k=handle.top_k,
            hidden=hidden,
            tokens=handle.cap,
            format=format,
            scales=n_scales or None,
            num_nvl_bytes=self._n_bytes,
            **self.comm.for_calls,
        )

    def _dispatch_through(
        self,
        handle: NormalHandle,
        channel: Channel,
        sent: int,
        received: int,
    ) -> None:
        """Dispatches what is at an address through a channel, to where the handle
        says."""
        if not handle.has_ids:
            torch.where(
                handle.mask, self.comm.rank_numbers, self.comm.none, out=handle.ids
            )
            handle.has_ids = True
        ids, src_info, ranges, unread, _ = handle.at
        tables = handle.tables.data_ptr()
        captures = self.comm.streams.is_capturing()
        channel.latest = (handle, captures)
        channel.was_captured |= captures
        channel.regions[0].dispatch(
            BOTH,
            sent,
            tables + ids,
            handle.n_sent,
            received,
            0,  # no scales
            tables + unread,
            tables + ranges,
            tables + src_info,
        )

    def _combine_through(
        self, channel: Channel, handle: NormalHandle, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Combines through a channel that may have dispatched something else since."""
        captures = self.comm.streams.is_capturing()
        # Replays of a graph dispatch, too.
        is_latest = channel.latest[0] is handle and channel.latest[1] == captures
        if not is_latest or (channel.was_captured and not captures):
            new, n = handle.tables.new_empty, channel.settings.hidden
            sent = new((handle.n_sent, n))
            received = new((max(1, handle.n_made), n))
            at = sent.data_ptr(), received.data_ptr()
            self._dispatch_through(handle, channel, *at)
        channel.regions[0].combine(
            BOTH,
            x.data_ptr(),
            handle.tables.data_ptr() + handle.at[1],
            y.data_ptr(),
            handle.n_sent,
            channel.ones.data_ptr(),
        )


def columns_of(words: torch.Tensor, n_rows: int, first: int, n: int) -> torch.Tensor:
    """Views rows of some columns, from the ``first`` element on."""
    return view(words, (n_rows, n), words.stride(), first)


def _is_opaque(scales: Any) -> bool:
    """Returns whether scales are none, or words of which only their caller knows."""
    if scales is None:
        return True
    kinds = torch.float32, torch.int32
    return isinstance(scales, torch.Tensor) and scales.dtype in kinds
