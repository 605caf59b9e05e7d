# SPDX-License-Identifier: Apache-2.0
"""DeepEP's low-latency calls: padded rows of each expert, in a fixed order.

Dispatches alternate between two regions, and a handle holds its region. So two batches
may be in flight: dispatch A, dispatch B, combine A, combine B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..limits import (
    MAX_COUNT,
    MAX_GPU_PAIRS,
    MAX_OF_ENTRY,
    MAX_RANKS,
    MAX_TOP_K,
    TOKEN_ALIGN_BYTES,
    checked_int,
)
from ..plural import counted
from .calls import LowLatencyCall
from .channel import BOTH, RECEIVE, SEND, Channel, Region
from .channels import Channels
from .communicator import Communicator, check_memory, check_start, refuse
from .normal_layout import check_choices
from .quantized import checked_format, joined_pair
from .streams import EventOverlap, When, check_flag
from .tables import LazyTuple, scales_of_rows, split_tables, version, view

_N_REGIONS = 2
CAP = "num_max_dispatch_tokens_per_rank"


@dataclass(eq=False)
class Handle(LazyTuple):
    """What combine needs of a dispatch; reads as DeepEP's tuple: tokens of the rows
    ``int32 [n_local, n_ranks * cap]``, ranges ``int64 [n_local, n_ranks]`` (first row
    in the high word, rows in the low one), cap, hidden size, experts.

    The two tensors are made when they are asked for.
    """

    comm: Communicator
    channel: Channel
    region: Region
    use: object
    tables: torch.Tensor
    topk_idx: torch.Tensor
    ids_version: int | None
    """How often ``topk_idx`` had been written to (``tables.version``)."""
    combine_buffer: torch.Tensor | None = None

    def items(self) -> tuple[Any, ...]:
        """Returns what DeepEP's handle has."""
        settings, n_local = self.channel.settings, self.channel.n_local
        src_info, ranges, _ = split_tables(self.tables, n_local, settings.ranks)
        return src_info, ranges, settings.tokens, settings.hidden, settings.experts


class Wire(NamedTuple):
    """What a dispatch sends, in the words of its arguments."""

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    format: str | None = None
    """Instead of the others; with ``_forwarded`` tokens are quantized already."""
    hidden: int = 0
    """Elements of a token that is quantized already."""


_PLAIN = Wire()


class How(NamedTuple):
    """Arguments that dispatch and combine have alike."""

    waits_ns: torch.Tensor | None = None
    async_finish: bool = False
    return_recv_hook: bool = False


AT_ONCE = How()


class LowLatency:
    """The low-latency calls of a rank; :class:`max_ep.torch.Buffer` describes them."""

    def __init__(self, channels: Channels, sums: bool) -> None:
        """``sums``: whether the rank of the experts adds up a token's rows."""
        self.comm = channels.comm
        self._sums = sums
        self._channels = channels
        self._found: dict[tuple[Any, ...], Channel] = {}
        # Hidden size, top_k and further sizes of the latest dispatch, if ranks mask.
        self._latest: tuple[Any, ...] | None = None

    def forget(self) -> None:
        """Forgets channels, which a reset may close."""
        self._found.clear()

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        cap: int,
        num_experts: int,
        wire: Wire = _PLAIN,
        stats: torch.Tensor | None = None,
        how: How = AT_ONCE,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Checks a dispatch, and launches it or its sending half."""
        if how is not AT_ONCE:
            self._check_how(how)
        if isinstance(x, tuple):
            if wire.format is not None:
                what = f"={wire.format!r}, and x is a pair, which is quantized already"
                refuse("format", what)
            x, name, hidden = joined_pair(self.comm, x)
            wire = Wire(format=f"{name}_forwarded", hidden=hidden)
        elif wire.format is not None and not wire.hidden:
            checked_format(wire.format)
        channel = self._channel(x, topk_idx, cap, num_experts, wire)
        n_local, capacity, _ = channel.rows_shape
        if stats is not None:
            name = "cumulative_local_expert_recv_stats"
            self.comm.check_tensor(name, stats, torch.int32, (n_local,))
        start, ids = x.data_ptr(), topk_idx.data_ptr()
        if not (start and ids) or start % TOKEN_ALIGN_BYTES != 0:
            check_start("x", x)
            check_memory("topk_idx", topk_idx)
        region = channel.next_region()
        if self.comm.masks:
            of_x = x.shape[1], x.dtype
            self._latest = *of_x, topk_idx.shape[1], cap, num_experts, wire
            self.comm.masks.share(region)

        # Source of each row, ranges, counts: one allocation.
        n_words, empty = channel.n_table_words, self.comm.empty
        tables = empty((n_words,), (1,), torch.int32)
        counts = view(tables, (n_local,), (1,), n_words - n_local)
        src_info = tables.data_ptr()
        rows = empty(*channel.rows_layout, channel.rows_dtype)
        result: Any = rows
        scales = None
        if channel.scales_dtype is not None:
            scales = empty(*channel.scales_layout, channel.scales_dtype)
            result = (rows, scales_of_rows(scales) if channel.has_columns else scales)
        arguments = (
            start,
            ids,
            x.shape[0],
            rows.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            src_info + 4 * (n_words - n_local),
            src_info + 8 * n_local * capacity,
            src_info,
        )
        channel.take(region)  # now that nothing is refused any more
        if how is AT_ONCE and stats is None and region.hook is None:
            region.dispatch(BOTH, *arguments)
            event, hook = EventOverlap(), None
        else:
            tensors = x, topk_idx, tables, rows, scales, stats
            after = None if stats is None else lambda: stats.add_(counts)
            given = region, region.dispatch, arguments, tensors, how, after
            event, hook = self._phase(*given)
        of_ids = None if topk_idx.is_inference() else topk_idx._version
        given = region, region.use, tables, topk_idx, of_ids
        handle = Handle(self.comm, channel, *given)
        return result, counts, handle, event, hook

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        zero_copy: bool = False,
        out: torch.Tensor | None = None,
        how: How = AT_ONCE,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Checks a combine, and launches it or its sending half."""
        self.comm.check_handle(handle, Handle, "low_latency_dispatch")
        region = handle.region
        if handle.use is not region.use:
            what = f"{_N_REGIONS} later dispatches, or reset(), have taken its memory"
            refuse("handle", f"is too old: {what}")
        if region.hook is not None and region.hook_is_of_dispatch:
            refuse("handle", "has no rows yet: call the hook of its dispatch")
        if how is not AT_ONCE:
            self._check_how(how)
        channel, ids, comm = handle.channel, handle.topk_idx, self.comm
        n_tokens = ids.shape[0]
        if zero_copy:
            if handle.combine_buffer is None:
                refuse("zero_copy", "needs get_next_low_latency_combine_buffer first")
            x = handle.combine_buffer
        choices = (n_tokens, channel.settings.top_k)
        comm.check_tensor("x", x, torch.bfloat16, channel.rows_shape)
        comm.check_tensor("topk_idx", topk_idx, torch.int64, choices)
        comm.check_tensor("topk_weights", topk_weights, torch.float32, choices)
        of_ids = handle.ids_version
        if topk_idx is not ids or (of_ids is not None and ids._version != of_ids):
            topk_weights = self._weights_of_choices(handle, topk_idx, topk_weights)
        shape = (n_tokens, channel.settings.hidden)
        if out is None:
            comm.check_current_gpu()
            out = comm.empty(shape, (shape[1], 1), torch.bfloat16)
        else:
            comm.check_tensor("out", out, torch.bfloat16, shape)
        start, to = x.data_ptr(), out.data_ptr()
        if (start | to) % TOKEN_ALIGN_BYTES != 0:
            check_start("x", x)
            check_start("out", out)
        arguments = (
            start,
            handle.tables.data_ptr(),
            to,
            n_tokens,
            topk_weights.data_ptr(),
        )
        if how is AT_ONCE and region.hook is None:
            region.combine(BOTH, *arguments)
            return out, EventOverlap(), None
        tensors = x, topk_weights, handle.tables, out
        given = region, region.combine, arguments, tensors, how
        return out, *self._phase(*given)

    def _weights_of_choices(
        self, handle: Handle, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weights of the choices that were dispatched, in their order. They
        may be given in another one, or be left out: they weigh 0 then."""
        kept = handle.topk_idx
        if version(kept) != handle.ids_version:
            what = "was written to since the dispatch that it was given to"
            refuse("topk_idx", f"{what}; write to another tensor")
        if ids.data_ptr() == kept.data_ptr():  # both are contiguous, of one shape
            return weights
        same = (_numbered(ids).unsqueeze(1) == _numbered(kept).unsqueeze(2)).all(3)
        same &= (ids >= 0).unsqueeze(1)
        is_lost = (ids >= 0) & ~same.any(1)
        moved = torch.where(same, weights.unsqueeze(1), 0).sum(2)
        if self.comm.streams.is_capturing():  # nobody can look
            moved.masked_fill_(is_lost.any(1, keepdim=True), float("nan"))
        elif is_lost.any():
            token, k = is_lost.nonzero()[0].tolist()
            what = f"has {ids[token, k]} for token {token}, k {k}, where dispatch had "
            refuse("topk_idx", f"{what}{kept[token].tolist()}; pass its tensor")
        return moved

    def _check_how(self, how: How) -> None:
        waits_ns, async_finish, return_recv_hook = how
        check_ends(async_finish, return_recv_hook)
        if waits_ns is not None:
            name, shape = "wait_recv_cost_stats", (self.comm.n_ranks,)
            if self.comm.masks:
                refuse(name, "cannot be had with enable_shrink")
            self.comm.check_tensor(name, waits_ns, torch.int64, shape)

    def _phase(
        self,
        region: Region,
        launch: Callable[..., None],
        arguments: tuple[int, ...],
        tensors: tuple[torch.Tensor | None, ...],
        how: How,
        after: Callable[[], None] | None = None,
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        """Launches a phase, for the hook or to measure waits in two; returns the event,
        and the hook if one is wanted."""
        waits_ns, async_finish, return_recv_hook = how
        is_combine = launch == region.combine
        if region.hook is not None:  # which nobody called
            region.hook()
        in_two = return_recv_hook or waits_ns is not None
        tensors += (waits_ns,)

        def send() -> None:
            launch(SEND if in_two else BOTH, *arguments)

        def receive() -> None:
            if waits_ns is not None:
                region.watch(is_combine, waits_ns)
            if in_two:
                launch(RECEIVE, *arguments)
            if after is not None:
                after()

        streams = self.comm.streams
        if return_recv_hook:
            send()
            stream, has_received = streams.current(), False

            def hook() -> None:
                nonlocal has_received
                if has_received:
                    return
                if region.hook is not hook:
                    self.comm.raise_failure()
                    what = "has not received, and reset() has taken its memory"
                    refuse("hook", f"{what}; make its call again")
                region.hook = None
                if streams.current() != stream:
                    streams.keep(tensors)
                receive()
                has_received = True

            region.hook, region.hook_is_of_dispatch = hook, not is_combine
            return EventOverlap(None, tensors), hook

        def send_and_receive() -> None:
            send()
            receive()

        return streams.run(send_and_receive, tensors, When(None, async_finish)), None

    def _channel(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        cap: int,
        n_experts: int,
        wire: Wire,
    ) -> Channel:
        """Checks what a dispatch is given, and finds its channel."""
        if not (isinstance(x, torch.Tensor) and isinstance(topk_idx, torch.Tensor)):
            raise TypeError("max_ep: x and topk_idx must be tensors")
        comm = self.comm
        comm.check_current_gpu()
        key = (
            *(x.shape, x.dtype, x.device, cap, n_experts),
            *(cap.__class__, n_experts.__class__),  # 128.0 is equal to 128
            *(topk_idx.shape, topk_idx.dtype, topk_idx.device),
            *wire,
        )
        try:
            channel = self._found.get(key)
        except TypeError:  # a list, or other things that are no sizes
            channel = None
        if channel is not None and x.is_contiguous() and topk_idx.is_contiguous():
            return channel  # what has this key was checked
        options = _options_of(wire)
        if not wire.hidden:
            comm.check_tensor("x", x, torch.bfloat16, (None, None))
        n_tokens, hidden = x.shape[0], wire.hidden or x.shape[1]
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None))
        cap = checked_int(f"max_ep: {CAP}", cap, 1, MAX_OF_ENTRY)
        most = MAX_GPU_PAIRS if comm.is_gpu else MAX_OF_ENTRY
        n_experts = comm.check_experts(n_experts, most)
        if n_tokens > cap:
            refuse(
                "x",
                f"has {counted(n_tokens, 'row')}, {CAP}={cap}; raise that on all ranks",
            )
        top_k = topk_idx.shape[1]
        check_choices(top_k, min(MAX_TOP_K, n_experts))
        call = LowLatencyCall(
            experts=n_experts,
            top_k=top_k,
            hidden=hidden,
            tokens=cap,
            combine_mode="sums" if self._sums else "rows",
            enable_shrink=comm.masks is not None,
            **options,
            **comm.for_calls,
        )
        multiple = call.row_multiple()
        if hidden == 0 or hidden % multiple != 0:
            refuse(
                "x", f"has {counted(hidden, 'column')}, not a multiple of {multiple}"
            )
        (channel,) = self._channels.open([call.settings()], _N_REGIONS, call)
        self._found[key] = channel
        return channel

    def combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Returns where rows of a combine with ``zero_copy`` are written."""
        self.comm.check_handle(handle, Handle, "low_latency_dispatch")
        if handle.combine_buffer is None:
            shape, device = handle.channel.rows_shape, self.comm.device
            with torch.inference_mode(False):  # written in any mode
                buffer = torch.empty(shape, dtype=torch.bfloat16, device=device)
            handle.combine_buffer = buffer
        return handle.combine_buffer

    def meet(self) -> None:
        """If ranks mask, all meet in a dispatch without tokens."""
        if self._latest is not None:
            columns, dtype, top_k, *sizes = self._latest
            device = self.comm.device
            x = torch.empty((0, columns), dtype=dtype, device=device)
            ids = torch.empty((0, top_k), dtype=torch.int64, device=device)
            self.dispatch(x, ids, *sizes)

    @staticmethod
    def size_hint(cap: int, hidden: int, n_ranks: int, n_experts: int) -> int:
        """Returns about what both regions take, with 8 experts a token."""
        tokens = checked_int(f"max_ep: {CAP}", cap, 1, MAX_OF_ENTRY)
        row = 2 * checked_int("max_ep: hidden", hidden, 1, MAX_COUNT // 4) + 16
        n_ranks = checked_int("max_ep: num_ranks", n_ranks, 1, MAX_RANKS)
        checked_int("max_ep: num_experts", n_experts, 1, MAX_OF_ENTRY)
        return _N_REGIONS * tokens * (n_ranks * (row + 64) + 8 * row)


def check_ends(async_finish: Any, return_recv_hook: Any) -> None:
    """Refuses two ways to end a call, and what is none."""
    check_flag("async_finish", async_finish)
    check_flag("return_recv_hook", return_recv_hook)
    if async_finish and return_recv_hook:
        refuse("async_finish", "and return_recv_hook exclude each other")


def _numbered(ids: torch.Tensor) -> torch.Tensor:
    """Returns each id, and how often it comes before in its row: ``[n, k, 2]``."""
    is_equal = ids.unsqueeze(1) == ids.unsqueeze(2)
    return torch.stack([ids, is_equal.tril(-1).sum(2)], 2)


def _options_of(wire: Wire) -> dict[str, Any]:
    """Returns what a call is described by; refuses flags that exclude each other."""
    if wire.format is not None:
        format = wire.format.removesuffix("_forwarded")
        return dict(format=format, pair=format != wire.format)
    flags = dict(zip(("use_fp8", "round_scale", "use_ue8m0"), wire))
    for flag, value in flags.items():
        check_flag(flag, value)
    use_fp8, round_scale, use_ue8m0 = map(bool, flags.values())
    if use_ue8m0 and not (use_fp8 and round_scale):
        refuse("use_ue8m0", "needs use_fp8, round_scale, and hidden % 512 == 0")
    if not use_fp8:
        return {}
    return dict(format="fp8", round_scale=round_scale, use_ue8m0=use_ue8m0)
