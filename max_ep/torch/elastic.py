# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of ``ElasticBuffer``: what they check, and what they launch.

Rows are plain or expanded (``sums.py``). Combine adds up rows that have their weights
already, in the rank of the experts first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..limits import MAX_GPU_PAIRS, MAX_OF_ENTRY, MAX_TOP_K, checked_int
from . import sums
from .channels import Channels
from .communicator import refuse
from .elastic_handle import EPHandle, checked_handle
from .elastic_layout import (
    MOST,
    check_same,
    checked_x,
    n_worst_rows,
    outputs,
    with_sizes,
    zeroed,
)
from .library import memory_for
from .normal_layout import bytes_of_row, check_ids, scales_of_row
from .streams import EventHandle, EventOverlap, When, check_event, wait_for
from .sums import EXPANDED, PLAIN, Routing


class Sizes(NamedTuple):
    """Sizes of a dispatch, as far as its caller gives them."""

    n_experts: int | None
    most: int | None
    alignment: int | None


class Form(NamedTuple):
    """In what form a dispatch returns its rows."""

    is_synced: bool | None
    expands: bool
    zeros: bool
    in_columns: bool
    copies_ids: bool
    num_sms: int


class Elastic:
    """The calls of a rank; :class:`max_ep.torch.ElasticBuffer` describes them."""

    def __init__(self, channels: Channels, most: int, rounds: bool) -> None:
        """``most``: tokens of a rank, 0: not known; ``rounds``: sums on their way."""
        self._comm = channels.comm
        self._channels = channels
        self._most, self._rounds = most, rounds
        channels.cap = memory_for(most)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None,
        handle: EPHandle | None,
        sizes: Sizes,
        form: Form,
        when: When,
        later: Any,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Checks a dispatch, agrees with all ranks on sizes, and launches it."""
        comm, events = self._comm, (when.after, later)
        comm.raise_failure()
        self._check_device()
        checked_int("max_ep: num_sms", form.num_sms, 0)
        x, scales = checked_x(comm, x)
        row_bytes = bytes_of_row(comm, x, None)
        n_scales = scales_of_row(comm, scales, x)
        is_new = handle is None
        if is_new:
            if isinstance(topk_idx, torch.Tensor):
                topk_idx = topk_idx.contiguous()
            handle = self._new_handle(len(x), topk_idx, sizes, form)
            is_synced = form.is_synced is None or bool(form.is_synced)
        else:
            if topk_idx is not None:
                refuse("topk_idx", "is that of the handle; leave it out")
            if form.is_synced:
                refuse("do_cpu_sync", "is not for a handle: its sizes are known")
            is_synced = False
            check_same(handle, form.expands, sizes.n_experts, sizes.most)
        routing = checked_handle(comm, handle)
        if len(x) != routing.n_tokens:
            refuse("x", f"has {len(x)} rows, the handle has {routing.n_tokens}")
        if topk_weights is not None:
            shape = (routing.n_tokens, routing.top_k)
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            topk_weights = topk_weights.contiguous()
        if stats is not None:
            shape = (routing.n_experts // comm.n_ranks,)
            name = "cumulative_local_expert_recv_stats"
            comm.check_tensor(name, stats, torch.int32, shape)
        if is_synced:
            for event in events:
                wait_for(event)
            what = f"rows of {row_bytes} bytes, {n_scales} scales"
            handle = with_sizes(comm, handle, topk_idx, what)
            routing = handle._routing

        to = outputs(routing, x, scales, topk_weights, form.in_columns)
        if form.zeros and handle.do_expand:
            to = zeroed(to)
        # The sums that come back are of as many elements, in bfloat16.
        settings = routing.settings(
            row_bytes, n_scales, "bfloat16", x.shape[1], self._partial(routing)
        )
        (channel,) = sums.open_channels(self._channels, settings)

        def work() -> None:
            sent = sums.joined(x, scales)
            with comm.using_sms(form.num_sms):
                sums.dispatch(channel, routing, sent, topk_weights, to, topk_idx)
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)

        tensors = (x, scales, topk_idx, topk_weights, to.rows, to.scales, to.weights)
        tensors += (to.local_ids, stats, *routing.tensors())
        event = self._run(work, tensors, events, when)
        rows: Any = to.rows.view(x.dtype)
        if scales is not None:
            rows = (rows, to.scales.view(scales.dtype))
        return rows, to.local_ids, to.weights, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
        when: When,
        later: Any,
        num_sms: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Checks a combine, and launches it."""
        comm, events = self._comm, (when.after, later)
        num_sms = checked_int("max_ep: num_sms", num_sms, 0)
        self._check_device()
        routing = checked_handle(comm, handle)
        comm.check_tensor("x", x, torch.bfloat16, (routing.n_rows, None), True)
        x = x.contiguous()
        row_bytes = bytes_of_row(comm, x, None)
        y = x.new_empty((routing.n_tokens, x.shape[1]))
        biases = bias if isinstance(bias, (tuple, list)) else (bias,)
        biases = tuple(one for one in biases if one is not None)
        if len(biases) > 2:
            refuse("bias", f"has {len(biases)} tensors; add them up to at most two")
        for one in biases:
            comm.check_tensor("bias", one, torch.bfloat16, tuple(y.shape), True)
        biases = tuple(one.contiguous() for one in biases)
        partial = self._partial(routing)
        settings = routing.settings(row_bytes, 0, "bfloat16", x.shape[1], partial)
        if routing.region is not None:
            # What dispatched can combine, if the columns are as many.
            theirs = routing.region.settings
            columns = theirs.combine, theirs.combine_hidden, theirs.partial
            if columns == ("bfloat16", x.shape[1], partial):
                settings = theirs
        wanted = [settings]
        weights = None
        if topk_weights is not None:
            if not self._rounds and handle.do_expand:
                refuse("topk_weights", "cannot go without allow_multiple_reduction")
            shape: tuple[int, ...] = (routing.n_rows,)
            if not handle.do_expand:
                shape += (routing.top_k,)
            # Any strides will do: gradients often are expanded.
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            weights = x.new_empty(
                (routing.n_tokens, routing.top_k), dtype=torch.float32
            )
            wanted.append(sums.weights_back(settings, routing.top_k))
        channel, *back = sums.open_channels(self._channels, *wanted)

        def work() -> None:
            with comm.using_sms(num_sms):
                sums.combine(channel, routing, x, y, biases)
                if back:
                    weights.copy_(sums.combine_weights(back[0], routing, topk_weights))

        tensors = (x, y, topk_weights, weights, *biases, *routing.tensors())
        event = self._run(work, tensors, events, when)
        return y, weights, event

    def _check_device(self) -> None:
        comm = self._comm
        if comm.is_gpu and torch._C._cuda_getDevice() != comm.index:
            refuse("the current GPU", f"is not that of this buffer, {comm.device}")

    def _partial(self, routing: Routing) -> str:
        """Returns what sums are on their way; one row is what it is."""
        is_rounded = self._rounds or routing.rows == PLAIN
        return "bfloat16" if is_rounded else "float32"

    def _run(
        self,
        work: Callable[[], None],
        tensors: tuple[torch.Tensor | None, ...],
        events: tuple[Any, Any],
        when: When,
    ) -> EventOverlap:
        """Does work as asked; the event of asynchronous work is there on CPU, too."""
        first, later = events
        check_event(first)
        wait_for(later)
        event = self._comm.streams.run(work, tensors, when)
        if when.is_async and event.event is None:
            event = EventOverlap(EventHandle())
        return event

    def _new_handle(
        self, n_tokens: int, topk_idx: torch.Tensor | None, sizes: Sizes, form: Form
    ) -> EPHandle:
        """Checks where tokens go; the handle has places for as many as there can be."""
        comm = self._comm
        n_experts, most, alignment = sizes
        if topk_idx is None or n_experts is None:
            refuse("dispatch", "needs a handle, or topk_idx and num_experts")
        n_experts = comm.check_experts(
            n_experts, MAX_GPU_PAIRS if comm.is_gpu else MAX_OF_ENTRY
        )
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None))
        top_k = topk_idx.shape[1]
        if not 1 <= top_k <= MAX_TOP_K:
            refuse("topk_idx", f"has {top_k} columns; it must have 1 to {MAX_TOP_K}")
        if not form.expands and comm.n_ranks > MAX_TOP_K:
            what = f"is for at most {MAX_TOP_K} ranks, not {comm.n_ranks}"
            refuse("do_expand=False", f"{what}; pass do_expand=True")
        if most is None:
            most = self._most
            if most == 0:
                refuse(MOST, "is not given, neither here nor to the constructor")
        most = checked_int(f"max_ep: {MOST}", most, 1, MAX_OF_ENTRY)
        alignment = 1 if alignment is None else alignment
        alignment = checked_int("max_ep: expert_alignment", alignment)
        if n_tokens > most:
            refuse("x", f"has {n_tokens} rows, {MOST}={most}; raise that on all ranks")
        check_ids(comm, topk_idx, n_experts)
        cap = self._channels.cap = max(self._channels.cap, memory_for(most))
        rows = EXPANDED if form.expands else PLAIN
        n_local = n_experts // comm.n_ranks
        n_rows = n_worst_rows(rows, comm.n_ranks, n_local, most, top_k, alignment)
        ids = torch.empty_like(topk_idx) if form.copies_ids else topk_idx
        of_routing = n_experts, top_k, alignment, n_tokens, n_rows, cap
        num_sms = form.num_sms or comm.most_sms()
        return EPHandle(Routing(comm, rows, *of_routing, ids), most, num_sms)
