# SPDX-License-Identifier: Apache-2.0
"""DeepEP's normal calls: plain rows, one for each pair of a token and a rank.

Where ``is_token_in_rank`` is what ``get_dispatch_layout`` found of ``topk_idx``, these
ids say where a token goes. Otherwise each rank is an expert, a token's choices are its
ranks, and ids and weights go with a row as its scales do.

Kernels combine the last dispatch that a region received. After another one, combine
first repeats the dispatch of its handle (``sums.py``). So any handle may be combined at
any time, also in a backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..limits import checked_int
from ..plural import counted
from . import sums
from .calls import NormalCall, first_tokens, power_of_two, words_of_row
from .channel import Channel
from .channels import Channels
from .communicator import check_start, refuse
from .counts import Counts, count_choices, new_counts
from .library import round_up
from .normal_layout import (
    Layout,
    NormalHandle,
    agree,
    bytes_of_row,
    check_ids,
    check_layout,
    in_int32,
    is_layout_of,
    note_layout,
    plain_sizes,
)
from .quantized import Given, given_as
from .streams import EventOverlap, When, check_when
from .sums import Received, Routing, Sizes
from .tables import first_rows

_COMBINED = torch.bfloat16, torch.float32


class Normal:
    """The normal calls of a rank; :class:`max_ep.torch.Buffer` describes them."""

    def __init__(self, channels: Channels, num_nvl_bytes: int) -> None:
        self.comm = channels.comm
        self._channels = channels
        self._n_bytes = num_nvl_bytes
        self._counts = Counts(channels)
        self._found: dict[tuple[Any, ...], tuple[Channel, NormalCall]] = {}

    def forget(self) -> None:
        """Forgets channels, which a reset may close."""
        self._found.clear()
        self._counts.forget()

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, when: When
    ) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap
    ]:
        """Counts where tokens go."""
        comm = self.comm
        comm.raise_failure()
        check_when(when, "async_finish")
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (None, None))
        num_experts = comm.check_experts(num_experts)
        check_ids(comm, topk_idx, num_experts)
        n_local = num_experts // comm.n_ranks
        per_rank = topk_idx.new_empty(comm.n_ranks, dtype=torch.int32)
        shape = (topk_idx.shape[0], comm.n_ranks)
        in_rank = topk_idx.new_empty(shape, dtype=torch.bool)
        counts, per_host = new_counts(topk_idx, num_experts), None
        if comm.n_hosts > 1:
            per_host = per_rank.new_empty(comm.n_hosts)

        def work() -> None:
            ranks = torch.div(topk_idx, n_local, rounding_mode="floor")
            torch.any(ranks.unsqueeze(2) == comm.rank_numbers, 1, out=in_rank)
            torch.sum(in_rank, 0, dtype=torch.int32, out=per_rank)
            if per_host is not None:
                in_host = in_rank.unflatten(1, (comm.n_hosts, -1)).any(2)
                torch.sum(in_host, 0, dtype=torch.int32, out=per_host)
            count_choices(topk_idx, counts, comm.one)

        tensors = (topk_idx, per_rank, per_host, counts, in_rank)
        event = comm.streams.run(work, tensors, when)
        note_layout(in_rank, topk_idx, num_experts)
        return per_rank, per_host, counts[:-1], in_rank, event

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
        comm = self.comm
        align = checked_int("max_ep: expert_alignment", align)
        worst = checked_int("max_ep: num_worst_tokens", worst, 0)
        check_when(when, "async_finish")
        topk_idx, topk_weights = layout.topk_idx, layout.topk_weights
        given = self._given(x, format)
        row_bytes = bytes_of_row(comm, given.rows, None)
        n_scales = 0 if given.words is None else given.words.shape[1]
        if n_scales == 0:  # otherwise rows are copied, with their scales
            check_start("x", given.rows)
        n_tokens, columns = given.rows.shape
        is_new = handle is None
        if is_new:
            top_k, n_experts = check_layout(comm, n_tokens, layout)
            what = (
                f"dispatch of rows of {row_bytes} bytes, {counted(n_scales, 'scale')}, "
            )
            what += f"top_k={top_k}, num_experts={n_experts}"
            has_ids = topk_idx is not None
            has_ids = has_ids and is_layout_of(layout.mask, topk_idx, n_experts)
            most, n_rows, has_ids = agree(comm, what, n_tokens, has_ids, worst)
            cap = self._channels.cap = self._capacity(most, given.hidden)
            chosen = (n_experts, top_k) if has_ids else (comm.n_ranks, comm.n_ranks)
            sizes = plain_sizes(comm, *chosen, n_tokens, n_rows, cap, has_ids)
            handle = NormalHandle(sizes, layout.mask)
        else:
            handle = self._checked(handle)
            if topk_idx is not None or topk_weights is not None:
                refuse("topk_idx", "is not sent again with a handle")
        routing, is_synced = handle.routing, is_new and not worst
        sizes = routing.sizes
        if n_tokens != sizes.n_tokens:
            what = f"has {counted(n_tokens, 'row')}, those of the handle are"
            refuse("x", f"{what} {sizes.n_tokens}")
        has_words = is_new and topk_idx is not None and not has_ids
        n_words = words_of_row(n_scales, top_k) if has_words else n_scales
        channel, call = self._opened(routing, given, n_words)
        if is_synced:
            self._counts.open(n_experts // comm.n_ranks, call)

        n_rows, new = sizes.n_rows, given.rows.new_empty
        to = Received(new((n_rows, columns)))
        recv_ids, recv_weights, recv_scales = None, None, None
        if n_words:
            recv_scales = to.scales = new((n_rows, n_words), dtype=torch.int32)
        if is_new and topk_idx is not None:
            recv_ids = new((n_rows, top_k), dtype=torch.int64)
            recv_weights = new((n_rows, top_k), dtype=torch.float32)
        if has_words and n_scales:
            recv_scales = new((n_rows, n_scales), dtype=torch.int32)
        if not has_words:
            to.local_ids, to.weights = recv_ids, recv_weights
        numbers = comm.streams.numbers(comm.n_ranks) if is_synced else None
        counts: Callable[[], list[int]] | None = None

        def work() -> None:
            nonlocal counts
            if is_synced:
                counts = self._counts.send(layout.per_expert.view(comm.n_ranks, -1))
            sent, weights, ids = given, None, None
            if has_words:
                to.scales.fill_(-1)  # behind the last row no word is written
                sent = Given(given.rows, self._words_of(given.words, layout, n_words))
            elif is_new:
                weights, ids = topk_weights, topk_idx
            handle.write_ids()
            sums.dispatch(channel, routing, sent, weights, to, ids, numbers)
            if has_words:
                if n_scales:
                    recv_scales.copy_(to.scales[:, :n_scales])
                found = to.scales[:, n_scales:]
                self._read_words(found, n_experts, recv_ids, recv_weights)
            if recv_ids is not None:
                recv_weights.masked_fill_(recv_ids < 0, 0)

        tensors = (given.rows, given.words, *layout, to.rows, to.scales, recv_scales)
        tensors += (recv_ids, recv_weights, *handle.tensors())
        event = comm.streams.run(work, tensors, when)
        listed: list[int] = []
        if is_synced:
            listed = counts()
            if align != 1:
                listed = [round_up(n, align) for n in listed]
            routing.read_ends = ends = sums.ends_in(numbers, comm)
            n_rows = int(ends[-1])
            routing.sizes = sizes.with_fewer(n_rows)
            recv_ids = first_rows(recv_ids, n_rows)
            recv_weights = first_rows(recv_weights, n_rows)
            recv_scales = first_rows(recv_scales, n_rows)
        result = given.arrived(first_rows(to.rows, n_rows), recv_scales)
        if not is_new:
            return result, None, None, None, None, event
        return result, recv_ids, recv_weights, listed, handle, event

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
        check_when(when, "async_finish")
        handle = self._checked(handle)
        routing = handle.routing
        sizes = routing.sizes
        bytes_of_row(comm, x, sizes.n_rows)
        if x.dtype not in _COMBINED:
            raise TypeError(f"max_ep: x must be bfloat16 or float32, got {x.dtype}")
        y = x.new_empty((sizes.n_tokens, x.shape[1]))
        biases = sums.listed(bias)
        check_start("x", x)
        for one in biases:
            comm.check_tensor("bias", one, x.dtype, tuple(y.shape))
            check_start("bias", one)
        channel, call = self._opened_back(routing, x)
        back, weights = None, None
        again = functools.partial(sums.channel_again, self._channels, call=call)
        if topk_weights is not None:
            shape = (sizes.n_rows, None)
            # Any strides will do: gradients often are expanded.
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            top_k = topk_weights.shape[1]
            weights = topk_weights.new_empty((sizes.n_tokens, top_k))
            back = sums.open_channel(self._channels, call.weights(top_k), call)

        def work() -> None:
            handle.write_ids()
            sums.combine(channel, routing, x, y, biases, again)
            if back is not None:
                n_pad = back.settings.combine_hidden - top_k
                padded = torch.nn.functional.pad(topk_weights, (0, n_pad))
                summed = padded.new_empty((sizes.n_tokens, padded.shape[1]))
                sums.combine(back, routing, padded, summed)
                weights.copy_(summed[:, :top_k])

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
            refuse("scales of x", f"have {counted(scales.shape[1], 'column')}")
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
        self, routing: Routing, given: Given, n_words: int
    ) -> tuple[Channel, NormalCall]:
        """Returns the channel of a dispatch, and the call that it is for."""
        sizes = routing.sizes
        key = given.format, given.hidden, n_words
        key += sizes.n_experts, sizes.top_k, sizes.cap
        found = self._found.get(key)
        if found is None:
            call = self._call(sizes, given, n_words)
            found = sums.open_channel(self._channels, call.rows(), call), call
            self._found[key] = found
        return found

    def _opened_back(
        self, routing: Routing, x: torch.Tensor
    ) -> tuple[Channel, NormalCall]:
        """Returns the channel of a combine of such rows: what dispatched, if they come
        back there; and the call that it is for."""
        sizes, channel = routing.sizes, routing.channel
        key = channel, x.dtype, x.shape[1], sizes.n_experts, sizes.top_k, sizes.cap
        found = self._found.get(key)
        if found is not None and found[0].is_open:
            return found
        call = self._call(sizes, Given(x), 0)
        wanted = call.again(call.rows())
        is_own = channel is not None and channel.is_open and channel.comm is self.comm
        if is_own and call.again(channel.settings) == wanted:
            back = channel
        else:
            back = sums.open_channel(self._channels, wanted, call)
        if is_own:
            self._found[key] = back, call
        return back, call

    def _call(self, sizes: Sizes, given: Given, n_words: int) -> NormalCall:
        """Describes a call with such tokens, and words behind each."""
        return NormalCall(
            experts=sizes.n_experts,
            top_k=sizes.top_k,
            hidden=given.hidden,
            tokens=sizes.cap,
            format=given.format,
            scales=n_words or None,
            num_nvl_bytes=self._n_bytes,
            **self.comm.for_calls,
        )

    def _words_of(
        self, scales: torch.Tensor | None, layout: Layout, n_words: int
    ) -> torch.Tensor:
        """Returns what goes behind each row: scales, ids, weights."""
        ids, weights = layout.topk_idx, layout.topk_weights
        (n_tokens, top_k), n_scales = ids.shape, 0
        words = ids.new_empty((n_tokens, n_words), dtype=torch.int32)
        if scales is not None:
            n_scales = scales.shape[1]
            words[:, :n_scales] = scales
        in_int32(ids, words[:, n_scales:][:, :top_k])
        words.view(torch.float32)[:, n_scales + top_k :][:, :top_k] = weights
        return words

    def _read_words(
        self,
        words: torch.Tensor,
        n_experts: int,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Reads ids, as local experts or -1, and weights that have come."""
        top_k, rank = ids.shape[1], self.comm.rank
        n_local = n_experts // self.comm.n_ranks
        of_ids, of_weights = words[:, :top_k], words.view(torch.float32)[:, top_k:]
        torch.sub(of_ids, rank * n_local, out=ids)
        ids.masked_fill_((ids < 0) | (ids >= n_local), -1)
        weights.copy_(of_weights[:, :top_k])


def _is_opaque(scales: Any) -> bool:
    """Returns whether scales are none, or words of which only their caller knows."""
    if scales is None:
        return True
    kinds = torch.float32, torch.int32
    return isinstance(scales, torch.Tensor) and scales.dtype in kinds
