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
from .calls import EXPANDED, PLAIN, memory_for
from .channel import Channel
from .channels import Channels
from .communicator import refuse
from .elastic_handle import EPHandle, checked_handle
from .elastic_layout import (
    MOST,
    check_same,
    n_worst_rows,
    outputs,
    with_sizes,
    zeroed,
)
from .normal_layout import bytes_of_row, check_ids
from .quantized import Given, given_as
from .streams import EventHandle, EventOverlap, When, check_event, wait_for
from .sums import Routing


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
    format: str | None


class Plan(NamedTuple):
    """How dispatches of the same shapes are done."""

    sizes: tuple[str, int, int, int]
    """Form of the rows, experts, choices of a token, alignment."""
    n_rows: int
    cap: int
    most: int
    num_sms: int
    channel: Channel


class Elastic:
    """The calls of a rank; :class:`max_ep.torch.ElasticBuffer` describes them."""

    def __init__(self, channels: Channels, most: int, rounds: bool) -> None:
        """``most``: tokens of a rank, 0: not known; ``rounds``: sums on their way."""
        self._comm = channels.comm
        self._channels = channels
        self._most, self._rounds = most, rounds
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._repeated_through: dict[tuple[Any, ...], Channel] = {}
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
        comm, is_new = self._comm, handle is None
        comm.raise_failure()
        self._check_device()
        if is_new:
            plan, given, topk_idx, topk_weights = self._planned(
                x, topk_idx, topk_weights, sizes, form
            )
            check_ids(comm, topk_idx, plan.sizes[1])
            n_tokens, ids = given.rows.shape[0], (topk_idx, form.copies_ids)
            routing = Routing(comm, *plan.sizes, n_tokens, plan.n_rows, plan.cap, *ids)
            handle, channel = EPHandle(routing, plan.most, plan.num_sms), plan.channel
        else:
            routing, given, topk_weights, channel = self._repeated(
                handle, x, topk_idx, topk_weights, sizes, form
            )
        if stats is not None:
            shape = (routing.n_experts // comm.n_ranks,)
            name = "cumulative_local_expert_recv_stats"
            comm.check_tensor(name, stats, torch.int32, shape)
        if is_new and (form.is_synced is None or form.is_synced):
            wait_for(when.after)
            wait_for(later)
            what = f"rows of {bytes_of_row(comm, given.rows, None)} bytes"
            what += f", {channel.settings.scales} scales"
            handle = with_sizes(comm, handle, topk_idx, what)
            routing = handle._routing

        to = outputs(routing, given, topk_weights, form.in_columns)
        if form.zeros and handle.do_expand:
            to = zeroed(to)

        def work() -> None:
            sent = sums.joined(given.rows, given.words)
            with comm.using_sms(form.num_sms):
                sums.dispatch(channel, routing, sent, topk_weights, to, topk_idx)
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)

        tensors = (given.rows, given.words, topk_idx, topk_weights, stats)
        tensors += (to.rows, to.scales, to.weights, to.local_ids, *routing.tensors())
        event = self._run(work, tensors, when, later)
        rows = given.arrived(to.rows, to.scales)
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
        comm = self._comm
        if num_sms != 0:
            num_sms = checked_int("max_ep: num_sms", num_sms, 0)
        self._check_device()
        routing = checked_handle(comm, handle)
        comm.check_tensor("x", x, torch.bfloat16, (routing.n_rows, None), True)
        x = x.contiguous()
        columns = x.shape[1]
        y = comm.empty((routing.n_tokens, columns), (columns, 1), torch.bfloat16)
        biases = () if bias is None else self._checked_biases(bias, y)
        channel = self._channel_back(routing, x)
        back, weights = None, None
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
            call = routing.call(columns, self._rounds, "bfloat16")
            back = sums.open_channel(self._channels, call.weights(), call)

        def work() -> None:
            with comm.using_sms(num_sms):
                sums.combine(channel, routing, x, y, biases)
                if back is not None:
                    weights.copy_(sums.combine_weights(back, routing, topk_weights))

        tensors = (x, y, topk_weights, weights, *biases, *routing.tensors())
        event = self._run(work, tensors, when, later)
        return y, weights, event

    def _checked_biases(self, bias: Any, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        biases = bias if isinstance(bias, (tuple, list)) else (bias,)
        biases = [one for one in biases if one is not None]
        if len(biases) > 2:
            refuse("bias", f"has {len(biases)} tensors; add them up to at most two")
        for one in biases:
            self._comm.check_tensor("bias", one, torch.bfloat16, tuple(y.shape), True)
        return tuple(one.contiguous() for one in biases)

    def _check_device(self) -> None:
        comm = self._comm
        if comm.is_gpu and torch._C._cuda_getDevice() != comm.index:
            refuse("the current GPU", f"is not that of this buffer, {comm.device}")

    def _partial(self, rows: str) -> str:
        """Returns what sums are on their way; one row is what it is."""
        is_rounded = self._rounds or rows == PLAIN
        return "bfloat16" if is_rounded else "float32"

    def _run(
        self,
        work: Callable[[], None],
        tensors: tuple[torch.Tensor | None, ...],
        when: When,
        later: Any,
    ) -> EventOverlap:
        """Does work as asked; the event of asynchronous work is there on CPU, too."""
        if when.after is None and later is None and not when.is_async:
            work()
            return EventOverlap()
        check_event(when.after)
        wait_for(later)
        event = self._comm.streams.run(work, tensors, when)
        if when.is_async and event.event is None:
            event = EventOverlap(EventHandle())
        return event

    def forget(self) -> None:
        """Forgets channels, which a reset may close."""
        self._plans.clear()
        self._repeated_through.clear()

    def _repeated(
        self,
        handle: EPHandle,
        x: Any,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        sizes: Sizes,
        form: Form,
    ) -> tuple[Routing, Given, torch.Tensor | None, Channel]:
        """Checks a dispatch with a handle; returns its routing, what is sent, and the
        channel."""
        comm = self._comm
        if topk_idx is not None:
            refuse("topk_idx", "is that of the handle; leave it out")
        routing = checked_handle(comm, handle)
        check_same(handle, form.expands, sizes.n_experts, sizes.most)
        key, channel = None, None
        if isinstance(x, torch.Tensor) and x.is_contiguous() and form.format is None:
            key = (x.shape, x.dtype, x.device, form, form.num_sms.__class__)
            key += (routing.rows, routing.n_experts, routing.top_k, routing.alignment)
            key += (routing.n_tokens, routing.cap)
            try:
                channel = self._repeated_through.get(key)
            except TypeError:  # a list, or other things that are no sizes
                key = None
        if channel is not None:  # what has this key was checked
            given, n_tokens = Given(x), routing.n_tokens
        else:
            given = given_as(comm, x, form.format)
            n_tokens = given.rows.shape[0]
            checked_int("max_ep: num_sms", form.num_sms, 0)
            if form.is_synced:
                refuse("do_cpu_sync", "is not for a handle: its sizes are known")
            if n_tokens != routing.n_tokens:
                refuse("x", f"has {n_tokens} rows, the handle has {routing.n_tokens}")
            channel = self._channel(routing, given)
            if key is not None:
                self._repeated_through[key] = channel
        weights = self._checked_weights(topk_weights, n_tokens, routing.top_k)
        return routing, given, weights, channel

    def _checked_weights(
        self, weights: torch.Tensor | None, n_tokens: int, top_k: int
    ) -> torch.Tensor | None:
        if weights is None:
            return None
        shape = (n_tokens, top_k)
        self._comm.check_tensor("topk_weights", weights, torch.float32, shape, True)
        return weights.contiguous()

    def _channel(self, routing: Routing, given: Given) -> Channel:
        """Returns the channel of a dispatch; the sums that come back are of as many
        elements, in bfloat16."""
        bytes_of_row(self._comm, given.rows, None)
        n_scales = None if given.words is None else given.words.shape[1]
        call = routing.call(given.hidden, self._rounds, given.format, n_scales)
        return sums.open_channel(self._channels, call.rows(), call)

    def _channel_back(self, routing: Routing, x: torch.Tensor) -> Channel:
        """Returns the channel of a combine: what dispatched, if the columns are as
        many."""
        columns, partial = x.shape[1], self._partial(routing.rows)
        settings = routing.channel and routing.channel.settings
        if settings is not None:
            theirs = settings.combine, settings.combine_hidden, settings.partial
            if theirs != ("bfloat16", columns, partial):
                settings = None
            elif routing.channel.is_open and routing.channel.comm is self._comm:
                return routing.channel
        if settings is None:
            bytes_of_row(self._comm, x, None)
        call = routing.call(columns, self._rounds, "bfloat16")
        return sums.open_channel(self._channels, settings or call.rows(), call)

    def _planned(
        self, x: Any, topk_idx: Any, topk_weights: Any, sizes: Sizes, form: Form
    ) -> tuple[Plan, Given, torch.Tensor, torch.Tensor | None]:
        """Returns how a new dispatch of these shapes is done; what it sends, checked
        and contiguous."""
        key = None
        if isinstance(x, torch.Tensor) and isinstance(topk_idx, torch.Tensor):
            # The kinds of sizes, too: 128.0 is equal to 128.
            key = (
                *(x.shape, x.dtype, x.device, topk_idx.shape, topk_idx.dtype),
                *(topk_idx.device, sizes, form),
                *(sizes[0].__class__, sizes[1].__class__, sizes[2].__class__),
            )
            try:
                plan = self._plans.get(key)
            except TypeError:  # a list, or other things that are no sizes
                plan = None
            if plan is not None and x.is_contiguous() and topk_idx.is_contiguous():
                # What has this key was checked.
                given = (
                    Given(x)
                    if form.format is None
                    else given_as(self._comm, x, form.format)
                )
                weights = topk_weights
                if weights is not None:
                    weights = self._checked_weights(weights, *topk_idx.shape)
                return plan, given, topk_idx, weights
        given = given_as(self._comm, x, form.format)
        if isinstance(topk_idx, torch.Tensor):
            topk_idx = topk_idx.contiguous()
        plan = self._new_plan(given, topk_idx, sizes, form)
        n_tokens, top_k = topk_idx.shape
        weights = self._checked_weights(topk_weights, n_tokens, top_k)
        if key is not None:
            self._plans[key] = plan
        return plan, given, topk_idx, weights

    def _new_plan(
        self, given: Given, topk_idx: torch.Tensor | None, sizes: Sizes, form: Form
    ) -> Plan:
        """Checks a dispatch; there are places for as many rows as there can be."""
        comm = self._comm
        n_experts, most, alignment = sizes
        if topk_idx is None or n_experts is None:
            refuse("dispatch", "needs a handle, or topk_idx and num_experts")
        n_experts = comm.check_experts(
            n_experts, MAX_GPU_PAIRS if comm.is_gpu else MAX_OF_ENTRY
        )
        n_tokens = given.rows.shape[0]
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
        cap = max(self._channels.cap, memory_for(most))
        if cap > self._channels.cap:
            self._channels.cap = cap
            self._plans.clear()  # all ranks take the same memory
        rows = EXPANDED if form.expands else PLAIN
        n_local = n_experts // comm.n_ranks
        n_rows = n_worst_rows(rows, comm.n_ranks, n_local, most, top_k, alignment)
        num_sms = checked_int("max_ep: num_sms", form.num_sms, 0) or comm.most_sms()
        of_routing = rows, n_experts, top_k, alignment
        routing = Routing(comm, *of_routing, n_tokens, n_rows, cap, topk_idx)
        channel = self._channel(routing, given)
        return Plan(of_routing, n_rows, cap, most, num_sms, channel)
