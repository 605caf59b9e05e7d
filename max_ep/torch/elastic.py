# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of ``ElasticBuffer``: what they check, and what they launch.

Rows are plain or expanded (``sums.py``). Combine adds up rows that have their weights
already, in the rank of the experts first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..limits import MAX_GPU_PAIRS, MAX_OF_ENTRY, MAX_TOP_K, checked_int
from ..plural import counted
from . import sums
from .calls import EXPANDED, PLAIN, ElasticCall, memory_for
from .channel import BOTH, RECEIVE, SEND, Channel
from .channels import Channels
from .communicator import check_memory, check_start, refuse
from .counts import Counts, count_choices, new_counts
from .elastic_handle import EPHandle, checked_handle
from .elastic_layout import (
    MOST,
    check_columns,
    check_same,
    most_rows,
    n_worst_rows,
    named,
    outputs,
    zeroed,
)
from .library import round_up
from .normal_layout import bytes_of_row, check_choices, check_ids
from .quantized import Given, given_as
from .streams import (
    EventHandle,
    EventOverlap,
    When,
    check_event,
    check_flag,
    check_when,
    wait_for,
)
from .sums import Routing, Sizes


class Options(NamedTuple):
    """Arguments of a dispatch that are no tensors, as its caller gives them."""

    n_experts: int | None
    most: int | None
    alignment: int | None
    num_sms: int
    expands: bool
    is_synced: bool | None
    zeros: bool
    in_columns: bool
    copies_ids: bool
    format: str | None

    def check_flags(self) -> None:
        """Refuses what says neither yes nor no."""
        check_flag("do_expand", self.expands)
        check_flag("do_cpu_sync", self.is_synced is None or self.is_synced)
        check_flag("do_zero_padding", self.zeros)
        check_flag("use_tma_aligned_col_major_sf", self.in_columns)
        check_flag("do_handle_copy", self.copies_ids)


class Plan(NamedTuple):
    """How dispatches with the same shapes and options are done."""

    options: Options
    channel: Channel
    sizes: Sizes
    """With a handle those of one like it."""
    name: str
    """What ranks compare before the host waits for sizes; "": it does not."""
    reads: bool
    """Whether the kernel writes how many rows come; otherwise they are counted ahead.
    """


class Elastic:
    """The calls of a rank; :class:`max_ep.torch.ElasticBuffer` describes them."""

    def __init__(
        self, channels: Channels, most: int, rounds: bool, is_hybrid: bool
    ) -> None:
        """``most``: tokens of a rank, 0: not known; ``rounds``: sums on their way;
        ``is_hybrid``: ranks relay to others of their host."""
        self._comm = channels.comm
        self._channels = channels
        self._counts = Counts(channels)
        self._most, self._rounds = most, rounds
        self._modes = dict(allow_multiple_reduction=rounds, allow_hybrid_mode=is_hybrid)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        # Shapes of the last combine, and its channel.
        self._last: tuple[Any, Channel | None] = (None, None)
        channels.cap = memory_for(most)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None,
        handle: EPHandle | None,
        options: tuple[Any, ...],
        when: tuple[Any, ...],
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Checks a dispatch, agrees with all ranks on sizes, and launches it.

        ``options`` become :class:`Options`; ``when`` becomes a ``When``, with one more
        event to wait for.
        """
        comm, routing = self._comm, None
        if comm.failure:
            comm.raise_failure()
        comm.check_current_gpu()
        if when != _AT_ONCE:
            _check_when(when)
        if handle is not None:
            if topk_idx is not None:
                refuse("topk_idx", "is that of the handle; leave it out")
            routing = checked_handle(comm, handle)
            if options[:3] != _OF_HANDLE or options[4]:
                check_same(handle, *options[:3], options[4])
        plan, given = self._planned(x, topk_idx, topk_weights, routing, options)
        form, channel, sizes, name, reads = plan
        if topk_idx is not None:
            topk_idx = topk_idx.contiguous()
            if not topk_idx.data_ptr():
                check_memory("topk_idx", topk_idx)
        if topk_weights is not None:
            topk_weights = topk_weights.contiguous()
            if not topk_weights.data_ptr():
                check_memory("topk_weights", topk_weights)
        if stats is not None:
            shape, what = (sizes.n_local,), "cumulative_local_expert_recv_stats"
            comm.check_tensor(what, stats, torch.int32, shape)
        numbers, counts = None, None
        if handle is None:
            check_ids(comm, topk_idx, sizes.n_experts)
            if name:
                if given.words is None:
                    check_start("x", given.rows)
                if not reads:
                    wait_for(when[0])
                    wait_for(when[3])
                    counts = self._send_counts(sizes, topk_idx)
                n_all = sum(comm.exchange(name, sizes.n_tokens))
                sizes = sizes.with_rows(most_rows(sizes, n_all))
            routing = Routing(sizes, topk_idx)
            handle = EPHandle(routing, form.num_sms or comm.most_sms)
            handle.is_synced = bool(name)
        if counts is not None:
            # Tokens are on their way while the host waits for counts, and allocates.
            launch = channel, routing, given, topk_weights, sums.NOWHERE, topk_idx
            work = functools.partial(sums.dispatch, *launch, form=SEND)
            tensors = given.rows, given.words, topk_idx, topk_weights
            self._run(work, tensors + routing.tensors(), when, form.num_sms)
            try:
                n_rows = sum(listed := counts())
                routing.sizes = sizes = sizes.with_fewer(n_rows)
                to = outputs(sizes, given, topk_weights, form.in_columns)
            except BaseException as error:  # other ranks go on
                comm.fail(error)
                raise
            if sizes.is_plain:
                handle.num_recv_tokens = n_rows
            else:
                handle.num_recv_tokens_per_expert_list = listed
        else:
            to = outputs(routing.sizes, given, topk_weights, form.in_columns)
        if form.zeros and not sizes.is_plain:
            to = zeroed(to)

        if counts is None and name:
            numbers = comm.streams.numbers(comm.n_ranks)
        half = BOTH if counts is None else RECEIVE
        launch = channel, routing, given, topk_weights, to, topk_idx, numbers, half
        if when == _AT_ONCE and form.num_sms == 0 and stats is None:
            sums.dispatch(*launch)
            event = EventOverlap()
        else:

            def work() -> None:
                sums.dispatch(*launch)
                if stats is not None:
                    stats.add_(handle.num_unaligned_recv_tokens_per_expert)

            tensors = (given.rows, given.words, topk_idx, topk_weights, stats)
            tensors += (to.rows, to.scales, to.weights, to.local_ids)
            tensors += routing.tensors()
            event = self._run(work, tensors, when, form.num_sms)
        if numbers is not None:
            routing.read_ends = ends = sums.ends_in(numbers, comm)
            handle.num_recv_tokens = n_rows = int(ends[-1])
            routing.sizes, to = sizes.with_fewer(n_rows), to.first(n_rows)
        rows = to.rows if to.scales is None else given.arrived(to.rows, to.scales)
        return rows, to.local_ids, to.weights, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
        when: tuple[Any, ...],
        num_sms: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Checks a combine, and launches it."""
        comm = self._comm
        if when != _AT_ONCE:
            _check_when(when)
        if num_sms != 0:
            num_sms = checked_int("max_ep: num_sms", num_sms, 0)
        comm.check_current_gpu()
        routing = checked_handle(comm, handle)
        sizes, channel = routing.sizes, self._channel_back(routing, x)
        x, columns = x.contiguous(), x.shape[1]
        y = comm.empty((sizes.n_tokens, columns), (columns, 1), torch.bfloat16)
        biases = () if bias is None else self._checked_biases(bias, y)
        back, weights = None, None
        if topk_weights is not None:
            if not self._rounds and not sizes.is_plain:
                refuse("topk_weights", "cannot go without allow_multiple_reduction")
            shape: tuple[int, ...] = (sizes.n_rows,)
            if sizes.is_plain:
                shape += (sizes.top_k,)
            # Any strides will do: gradients often are expanded.
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            weights = x.new_empty((sizes.n_tokens, sizes.top_k), dtype=torch.float32)
            call = sizes.call(columns, "bfloat16", None, **self._modes)
            back = sums.open_channel(self._channels, call.weights(), call)

        again = functools.partial(self._again, sizes, columns)
        launch = channel, routing, x, y, biases, again
        if when == _AT_ONCE and num_sms == 0 and back is None:
            sums.combine(*launch)
            return y, None, EventOverlap()

        def work() -> None:
            sums.combine(*launch)
            if back is not None:
                weights.copy_(sums.combine_weights(back, routing, topk_weights))

        tensors = (x, y, topk_weights, weights, *biases, *routing.tensors())
        return y, weights, self._run(work, tensors, when, num_sms)

    def _checked_biases(self, bias: Any, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        biases = sums.listed(bias)
        for one in biases:
            self._comm.check_tensor("bias", one, torch.bfloat16, tuple(y.shape), True)
        biases = tuple(one.contiguous() for one in biases)
        for one in biases:
            check_start("bias", one)
        return biases

    def _run(
        self,
        work: Callable[[], None],
        tensors: tuple[torch.Tensor | None, ...],
        when: tuple[Any, ...],
        num_sms: int,
    ) -> EventOverlap:
        """Does work as asked; the event of asynchronous work is there on CPU, too."""
        *when, later = when
        wait_for(later)
        when = When(*when)
        with self._comm.using_sms(num_sms):
            event = self._comm.streams.run(work, tensors, when)
        if when.is_async and event.event is None:
            event = EventOverlap(EventHandle())
        return event

    def _send_counts(
        self, sizes: Sizes, topk_idx: torch.Tensor
    ) -> Callable[[], list[int]]:
        """Counts what goes to each rank; returns what waits for the rows that come: all
        plain ones, or those of each local expert, rounded up."""
        comm = self._comm
        n_local, n_ranks = sizes.n_local, comm.n_ranks
        if sizes.is_plain:
            ranks = torch.div(topk_idx, n_local, rounding_mode="floor").unsqueeze(2)
            goes = (ranks == comm.rank_numbers).any(1)
            return self._counts.send(goes.sum(0, dtype=torch.int32).unsqueeze(1))
        counts = new_counts(topk_idx, sizes.n_experts)
        of_experts = count_choices(topk_idx, counts, comm.one)
        read = self._counts.send(of_experts.view(n_ranks, n_local))
        if sizes.alignment == 1:
            return read
        return lambda: [round_up(n, sizes.alignment) for n in read()]

    def forget(self) -> None:
        """Forgets channels, which a reset may close."""
        self._counts.forget()
        self._plans.clear()
        self._last = None, None

    def _channel(self, sizes: Sizes, given: Given) -> Channel:
        """Returns the channel of a dispatch; the sums that come back are of as many
        elements, in bfloat16."""
        bytes_of_row(self._comm, given.rows, None)
        call = self._call(sizes, given)
        return sums.open_channel(self._channels, call.rows(), call)

    def _call(self, sizes: Sizes, given: Given) -> ElasticCall:
        """Describes a dispatch, and the combine after it."""
        n_scales = None if given.words is None else given.words.shape[1]
        return sizes.call(given.hidden, given.format, n_scales, **self._modes)

    def _channel_back(self, routing: Routing, x: torch.Tensor) -> Channel:
        """Checks the rows of a combine; returns its channel: what dispatched, if the
        columns are as many."""
        comm, sizes, channel = self._comm, routing.sizes, routing.channel
        key = None
        if channel is not None and isinstance(x, torch.Tensor):
            key = sizes.n_rows, sizes.is_plain, x.shape, x.dtype, x.device
            if channel is self._last[1] and key == self._last[0]:
                return channel
        comm.check_tensor("x", x, torch.bfloat16, (sizes.n_rows, None), True)
        columns, settings = x.shape[1], channel and channel.settings
        if settings is not None:
            is_rounded = self._rounds or sizes.is_plain  # one row is what it is
            theirs = settings.combine, settings.combine_hidden, settings.partial
            if theirs != ("bfloat16", columns, "bfloat16" if is_rounded else "float32"):
                settings = None
            elif channel.is_open and channel.comm is comm:
                self._last = key, channel
                return channel
        if settings is None:
            bytes_of_row(comm, x.contiguous(), None)
        call = sizes.call(columns, "bfloat16", None, **self._modes)
        settings = call.again(settings or call.rows())
        return sums.open_channel(self._channels, settings, call)

    def _again(self, sizes: Sizes, columns: int, channel: Channel) -> Channel:
        call = sizes.call(columns, "bfloat16", None, **self._modes)
        return sums.channel_again(self._channels, channel, call)

    def _planned(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        routing: Routing | None,
        options: tuple[Any, ...],
    ) -> tuple[Plan, Given]:
        """Returns how a dispatch of these shapes is done, and what it sends. What has
        the key of a plan was checked."""
        plan = None
        try:
            of_ids = (
                (topk_idx.shape, topk_idx.dtype, topk_idx.device)
                if routing is None
                else routing.sizes.of_kernels
            )
            of_weights = topk_weights
            if topk_weights is not None:
                of_weights = topk_weights.shape, topk_weights.dtype, topk_weights.device
            key = (x.shape, x.dtype, x.device, of_ids, of_weights, options)
            key += tuple(map(type, options[:4]))  # 128.0 is equal to 128
            plan = self._plans.get(key)
        except (AttributeError, TypeError):  # a pair, a list, or no sizes at all
            key = None
        form = Options(*options) if plan is None else plan.options
        if plan is not None and form.format is None and x.is_contiguous():
            return plan, Given(x)
        given = given_as(self._comm, x, form.format)
        if plan is not None:
            return plan, given
        form.check_flags()
        n_tokens = given.rows.shape[0]
        if routing is None:
            sizes = self._new_sizes(n_tokens, topk_idx, form)
        else:
            sizes = routing.sizes
            checked_int("max_ep: num_sms", form.num_sms, 0)
            if form.is_synced:
                refuse("do_cpu_sync", "is not for a handle: its sizes are known")
            if n_tokens != sizes.n_tokens:
                refuse(
                    "x",
                    f"has {counted(n_tokens, 'row')}, the handle has {sizes.n_tokens}",
                )
        if form.in_columns:
            check_columns(given)
        channel, name = self._channel(sizes, given), ""
        # Far more expanded rows may come, and columns are as long as what comes.
        reads = sizes.is_plain and not form.in_columns
        if routing is None and (form.is_synced is None or form.is_synced):
            has_weights = topk_weights is not None
            name = named(sizes, given, has_weights, sizes.is_plain and not reads)
            if not reads:
                n_counts = 1 if sizes.is_plain else sizes.n_local
                self._counts.open(n_counts, self._call(sizes, given))
        plan = Plan(form, channel, sizes, name, reads)
        if topk_weights is not None:
            self._comm.check_tensor(
                *("topk_weights", topk_weights, torch.float32),
                *((n_tokens, sizes.top_k), True),
            )
        if key is not None:
            self._plans[key] = plan
        return plan, given

    def _new_sizes(
        self, n_tokens: int, topk_idx: torch.Tensor | None, form: Options
    ) -> Sizes:
        """Checks a dispatch; there are places for as many rows as there can be."""
        comm = self._comm
        n_experts, most, alignment = form[:3]
        if topk_idx is None or n_experts is None:
            refuse("dispatch", "needs a handle, or topk_idx and num_experts")
        n_experts = comm.check_experts(
            n_experts, MAX_GPU_PAIRS if comm.is_gpu else MAX_OF_ENTRY
        )
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None), True)
        top_k = topk_idx.shape[1]
        check_choices(top_k)
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
            refuse(
                "x",
                f"has {counted(n_tokens, 'row')}, {MOST}={most}; raise that on all "
                "ranks",
            )
        check_ids(comm, topk_idx, n_experts)
        cap = max(self._channels.cap, memory_for(most))
        if cap > self._channels.cap:
            self._channels.cap = cap
            self._plans.clear()  # all ranks take the same memory
        rows = EXPANDED if form.expands else PLAIN
        n_local = n_experts // comm.n_ranks
        n_rows = n_worst_rows(rows, comm.n_ranks, n_local, most, top_k, alignment)
        checked_int("max_ep: num_sms", form.num_sms, 0)
        of_kernels = rows, n_experts, top_k, alignment
        copies_ids = bool(form.copies_ids)
        return Sizes(comm, *of_kernels, n_tokens, n_rows, cap, most, copies_ids)


_OF_HANDLE = None, None, None
"""Sizes that are the handle's."""
_AT_ONCE = None, False, False, None
"""When a dispatch or combine is done, if nothing is asked."""


def _check_when(when: tuple[Any, ...]) -> None:
    """Refuses what is no event, or no flag, before anything is sent."""
    *when, later = when
    check_when(When(*when), "async_with_compute_stream")
    check_event(later)
