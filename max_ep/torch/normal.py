# SPDX-License-Identifier: Apache-2.0
"""DeepEP's normal calls: one row for each pair of a token and a rank.

The kernels route by expert, so here each rank is one expert, and a token's choices are
its ranks. A call makes two dispatches in two channels: rows, and words that go with
each row (scales, expert ids, router weights). Combine uses the second channel.

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
    here,
    in_int32,
)
from .quantized import Given, given_as
from .streams import EventOverlap, When, check_event
from .tables import first_rows

_COMBINED = torch.bfloat16, torch.float32


class Normal:
    """The normal calls of a rank; :class:`max_ep.torch.Buffer` describes them."""

    def __init__(self, channels: Channels, num_nvl_bytes: int) -> None:
        self.comm = channels.comm
        self._channels = channels
        self._n_bytes = num_nvl_bytes

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
        per_expert = topk_idx.new_empty(num_experts, dtype=torch.int32)
        shape = (topk_idx.shape[0], comm.n_ranks)
        in_rank = topk_idx.new_empty(shape, dtype=torch.bool)

        def work() -> None:
            # Column 0 takes the choices of no expert.
            ranks = torch.div(topk_idx, n_local, rounding_mode="floor") + 1
            found = in_rank.new_zeros((shape[0], comm.n_ranks + 1))
            in_rank.copy_(found.scatter_(1, ranks, True)[:, 1:])
            torch.sum(in_rank, 0, dtype=torch.int32, out=per_rank)
            counts = per_expert.new_zeros(num_experts + 1)
            ones = per_expert.new_ones(1).expand(topk_idx.numel())
            counts.scatter_add_(0, topk_idx.flatten() + 1, ones)
            per_expert.copy_(counts[1:])

        tensors = (topk_idx, per_rank, per_expert, in_rank)
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
        handle = self._checked(handle)
        if not is_new and (topk_idx is not None or topk_weights is not None):
            refuse("topk_idx", "is not sent again with a handle")
        if n_tokens != handle.n_sent:
            refuse("x", f"has {n_tokens} rows, those of the handle are {handle.n_sent}")

        recv_x = x.new_empty((handle.n_made, columns))
        # A handle may be of tokens without scales.
        call = self._call(handle, given.format, hidden, n_scales or None)
        wanted = [call.rows()]
        has_extras = scales is not None or topk_idx is not None
        if has_extras:
            wanted.append(call.words())
            n_words = wanted[1].hidden
        rows, *back = self._channels.open(wanted, 1, call)
        recv_scales, recv_ids, recv_weights = None, None, None
        if scales is not None:
            recv_scales = scales.new_empty((handle.n_rows, n_scales))
        if topk_idx is not None:
            shape = (handle.n_rows, handle.top_k)
            recv_ids = topk_idx.new_empty(shape)
            recv_weights = topk_weights.new_empty(shape)

        def move() -> None:
            if not has_extras:
                return self._dispatch_through(handle, [(rows, x, recv_x)])
            k = 0 if topk_idx is None else handle.top_k
            parts = [n_scales, k, k, n_words - n_scales - 2 * k]
            sent = handle.ids.new_empty((n_tokens, n_words))
            of_scales, of_ids, of_weights, _ = sent.split(parts, 1)
            if scales is not None:
                of_scales.copy_(scales)
            if topk_idx is not None:
                of_ids.copy_(in_int32(topk_idx))
                of_weights.copy_(topk_weights.view(torch.int32))
            extras = handle.ids.new_full((handle.n_made, n_words), -1)
            self._dispatch_through(handle, [(rows, x, recv_x), (back[0], sent, extras)])
            got = extras[: handle.n_rows]
            of_scales, of_ids, of_weights, _ = got.split(parts, 1)
            if scales is not None:
                recv_scales.copy_(of_scales)
            if topk_idx is not None:
                n_local = layout.per_expert.numel() // comm.n_ranks
                torch.sub(of_ids, comm.rank * n_local, out=recv_ids)
                is_elsewhere = (recv_ids < 0) | (recv_ids >= n_local)
                recv_ids.masked_fill_(is_elsewhere, -1)
                recv_weights.view(torch.int32).copy_(of_weights)
                recv_weights.masked_fill_(is_elsewhere, 0)

        def work() -> None:
            move()
            if is_synced:
                last = handle.ranges[-1]
                found = [last, *(one.regions[0].failed for one in (rows, *back))]
                if topk_idx is not None:
                    n_local = n_experts // comm.n_ranks
                    found.append(count_ids(recv_ids, n_local))
                reads.append(comm.streams.to_host(*found))

        tensors = (x, scales, topk_idx, topk_weights, recv_x, recv_scales)
        tensors += (recv_ids, recv_weights, *handle.tensors())
        event = comm.streams.run(work, tensors, when)
        if is_synced:
            n_local = n_experts // comm.n_ranks
            if topk_idx is None:  # while rows are on their way
                notes = comm.exchange(what, reads[0]())
                counts = here(notes, comm.rank * n_local, n_local)
            first, n, *found = reads[-1]()
            if any(found[: 1 + len(back)]):
                comm.check_regions()
            if topk_idx is not None:
                counts = found[1 + len(back) :]
            counts, n = [round_up(c, align) for c in counts], first + n
            handle.n_rows = n
            recv_ids, recv_weights = (
                first_rows(recv_ids, n),
                first_rows(recv_weights, n),
            )
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
        call = self._call(handle, Given(x).format, hidden, handle.n_scales or None)
        wanted = [call.words()]
        weights = None
        if topk_weights is not None:
            shape = (handle.n_rows, None)
            # Any strides will do: gradients often are expanded.
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            top_k = topk_weights.shape[1]
            weights = topk_weights.new_empty((handle.n_sent, top_k))
            wanted.append(replace(call, top_k=top_k).weights())
        channel, *of_weights = self._channels.open(wanted, 1, call)

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
        of_group = self.comm.target, self.comm.n_ranks, hidden, self._n_bytes
        start = self._channels.cap or first_tokens(*of_group)
        return max(start, power_of_two(n_tokens))

    def _call(
        self, handle: NormalHandle, format: str, hidden: int, scales: int | None
    ) -> NormalCall:
        """Describes a call with a handle."""
        return NormalCall(
            experts=self.comm.n_ranks,  # of any number, the kernels are the same
            top_k=handle.top_k,
            hidden=hidden,
            tokens=handle.cap,
            format=format,
            scales=scales,
            num_nvl_bytes=self._n_bytes,
            **self.comm.for_calls,
        )

    def _dispatch_through(
        self,
        handle: NormalHandle,
        moves: list[tuple[Channel, torch.Tensor, torch.Tensor]],
    ) -> None:
        """Dispatches tensors through channels, to where the handle says."""
        if not handle.has_ids:
            ids = handle.ids
            ranks = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device)
            torch.where(handle.mask, ranks, ranks.new_full((), -1), out=ids)
            handle.has_ids = True
        counts = handle.ranges.new_empty(1)
        for channel, sent, received in moves:
            channel.latest = (handle, self.comm.streams.is_capturing())
            channel.was_captured |= channel.latest[1]
            channel.regions[0].dispatch(
                BOTH,
                sent.data_ptr(),
                handle.ids.data_ptr(),
                handle.n_sent,
                received.data_ptr(),
                0,  # no scales
                counts.data_ptr(),
                handle.ranges.data_ptr(),
                handle.src_info.data_ptr(),
            )

    def _combine_through(
        self, channel: Channel, handle: NormalHandle, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Combines through a channel that may have dispatched something else since."""
        captures = self.comm.streams.is_capturing()
        # Replays of a graph dispatch, too.
        is_latest = channel.latest[0] is handle and channel.latest[1] == captures
        if not is_latest or (channel.was_captured and not captures):
            new = handle.ids.new_empty
            sent = new((handle.n_sent, channel.settings.hidden))
            received = new((len(handle.src_info), channel.settings.hidden))
            self._dispatch_through(handle, [(channel, sent, received)])
        ones = torch.ones(handle.ids.shape, dtype=torch.float32, device=x.device)
        channel.regions[0].combine(
            BOTH,
            x.data_ptr(),
            handle.src_info.data_ptr(),
            y.data_ptr(),
            handle.n_sent,
            ones.data_ptr(),
        )


def _is_opaque(scales: Any) -> bool:
    """Returns whether scales are none, or words of which only their caller knows."""
    if scales is None:
        return True
    kinds = torch.float32, torch.int32
    return isinstance(scales, torch.Tensor) and scales.dtype in kinds
