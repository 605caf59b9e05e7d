# SPDX-License-Identifier: Apache-2.0
"""DeepEP's low-latency calls: padded rows of each expert, in a fixed order.

Dispatches alternate between two regions, and a handle holds its region. So two batches
may be in flight: dispatch A, dispatch B, combine A, combine B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..limits import (
    MAX_COUNT,
    MAX_GPU_PAIRS,
    MAX_OF_ENTRY,
    MAX_RANKS,
    MAX_TOP_K,
    checked_int,
)
from . import compiled
from .channel import BOTH, RECEIVE, SEND, Channel, Region
from .communicator import Communicator, refuse, refuse_arguments
from .library import WIRE_FORMATS, Settings
from .streams import EventOverlap
from .tables import LazyTuple, scales_of_rows, split_tables, view

_N_REGIONS = 2
_CAP = "num_max_dispatch_tokens_per_rank"


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
    n_tokens: int
    combine_buffer: torch.Tensor | None = None

    def items(self) -> tuple[Any, ...]:
        """Returns what DeepEP's handle has."""
        settings, n_local = self.channel.settings, self.channel.n_local
        src_info, ranges, _ = split_tables(self.tables, n_local, settings.ranks)
        return src_info, ranges, settings.tokens, settings.hidden, settings.experts


class LowLatency:
    """The low-latency part of :class:`max_ep.torch.Buffer`."""

    _comm: Communicator
    _key: str
    _order: torch.Tensor
    group_size: int
    _low_latency_channels: dict[tuple[Any, ...], Channel]
    _latest: tuple[Any, ...] | None = None
    """Hidden size, top_k and further sizes of the latest dispatch, if ranks mask."""

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **of_forks: Any,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Sends each token to the ranks of its experts.

        Args:
            x: bfloat16 ``[n_tokens, hidden]``; ``hidden`` is a multiple of 8, of 128
                with FP8, of 512 with UE8M0.
            topk_idx: int64 ``[n_tokens, top_k]``, in ``[-1, num_experts)``; -1: none.
            num_max_dispatch_tokens_per_rank: The most tokens of any rank.
            num_experts: Experts of the group, a multiple of its ranks.
            cumulative_local_expert_recv_stats: int32 ``[n_local]``; counts are added.
            dispatch_wait_recv_cost_stats: int64 ``[n_ranks]``; how long each rank was
                waited for is added, in ns.
            use_fp8: Whether rows are float8_e4m3fn with a scale for 128 elements.
            round_scale: Whether scales are powers of two.
            use_ue8m0: Whether scales are returned as exponents, four in an int32.
            async_finish: Whether to return before the current stream has the rows.
            return_recv_hook: Whether only to send; the hook receives.
            of_forks: What forks of DeepEP take, refused unless it is None or False.

        Returns:
            Rows ``[n_local, n_ranks * cap, hidden]`` (with FP8 a pair, scales behind
            them); rows of each expert, int32 ``[n_local]``; the handle; the event; the
            hook, or None.
        """
        if of_forks:
            refuse_arguments("low_latency_dispatch", of_forks)
        cap = num_max_dispatch_tokens_per_rank
        stats = cumulative_local_expert_recv_stats
        waits_ns = dispatch_wait_recv_cost_stats
        given = x, topk_idx, cap, num_experts, use_fp8, round_scale, use_ue8m0
        if torch.compiler.is_compiling():
            rows, scales, tables = compiled.dispatch(self._order, self._key, *given)
            n_local, n_ranks = num_experts // self.group_size, self.group_size
            src_info, ranges, counts = split_tables(tables, n_local, n_ranks)
            if stats is not None:
                stats.add_(counts)
            handle = (src_info, ranges, cap, x.shape[1], num_experts, tables)
            result = (rows, scales_of_rows(scales)) if use_fp8 else rows
            hook = compiled.nothing if return_recv_hook else None
            return result, counts, handle, EventOverlap(), hook
        how = self._checked_how(waits_ns, async_finish, return_recv_hook)
        channel = self._low_latency_channel(*given)
        n_local, capacity, _ = channel.rows_shape
        if stats is not None:
            name = "cumulative_local_expert_recv_stats"
            self._comm.check_tensor(name, stats, torch.int32, (n_local,))
        region = channel.next_region()
        if self._comm.masks:
            self._latest = x.shape[1], topk_idx.shape[1], *given[2:]
            self._comm.masks.share(region)

        # Source of each row, ranges, counts: one allocation.
        n_words, empty = channel.n_table_words, self._comm.empty
        tables = empty((n_words,), (1,), torch.int32)
        counts = view(tables, (n_local,), (1,), n_words - n_local)
        src_info = tables.data_ptr()
        dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        rows = empty(*channel.rows_layout, dtype)
        result: Any = rows
        scales = None
        if use_fp8:
            dtype = torch.int32 if use_ue8m0 else torch.float32
            scales = empty(*channel.scales_layout, dtype)
            result = (rows, scales_of_rows(scales))
        arguments = (
            x.data_ptr(),
            topk_idx.data_ptr(),
            x.shape[0],
            rows.data_ptr(),
            scales.data_ptr() if use_fp8 else 0,
            src_info + 4 * (n_words - n_local),
            src_info + 8 * n_local * capacity,
            src_info,
        )
        channel.take(region)  # now that nothing is refused any more
        tensors = x, topk_idx, tables, rows, scales, stats
        after = None if stats is None else lambda: stats.add_(counts)
        event, hook = self._phase(region, "dispatch", arguments, tensors, how, after)
        handle = Handle(self._comm, channel, region, region.use, tables, x.shape[0])
        return result, counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        **of_forks: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings expert rows back, and adds up each token's with its weights.

        Args:
            x: bfloat16 ``[n_local, n_ranks * cap, hidden]``, where dispatch put rows;
                not read with ``zero_copy``.
            topk_idx: Those of the dispatch.
            topk_weights: float32 ``[n_tokens, top_k]``.
            handle: Of the dispatch.
            use_logfmt: Not supported.
            zero_copy: Whether rows are in ``get_next_low_latency_combine_buffer``.
            async_finish: As in dispatch.
            return_recv_hook: As in dispatch.
            out: bfloat16 ``[n_tokens, hidden]``, for the result; None: a new one.
            combine_wait_recv_cost_stats: As in dispatch.
            of_forks: As in dispatch.

        Returns:
            ``[n_tokens, hidden]`` bfloat16; the event; the hook, or None.
        """
        if of_forks:
            refuse_arguments("low_latency_combine", of_forks)
        if use_logfmt:
            raise NotImplementedError(
                "max_ep: use_logfmt: combine sends bfloat16; pass use_logfmt=False"
            )
        if torch.compiler.is_compiling():
            if zero_copy:
                raise NotImplementedError("max_ep: zero_copy is not compiled; pass x")
            y = compiled.combine(
                self._order, self._key, x, topk_idx, topk_weights, handle[5]
            )
            if out is not None:
                y = out.copy_(y)
            return y, EventOverlap(), compiled.nothing if return_recv_hook else None
        if isinstance(handle, tuple) and len(handle) == 6:
            handle = compiled.stored_handle(self, handle[5])  # of a compiled dispatch
        self._comm.check_handle(handle, Handle, "low_latency_dispatch")
        if handle.use is not handle.region.use:
            what = f"{_N_REGIONS} later dispatches, or reset(), have taken its memory"
            refuse("handle", f"is too old: {what}")
        if handle.region.hook is not None and handle.region.hook_is_of_dispatch:
            refuse("handle", "has no rows yet: call the hook of its dispatch")
        waits_ns = combine_wait_recv_cost_stats
        how = self._checked_how(waits_ns, async_finish, return_recv_hook)
        channel, n_tokens, comm = handle.channel, handle.n_tokens, self._comm
        if zero_copy:
            if handle.combine_buffer is None:
                refuse("zero_copy", "needs get_next_low_latency_combine_buffer first")
            x = handle.combine_buffer
        choices = (n_tokens, channel.settings.top_k)
        comm.check_tensor("x", x, torch.bfloat16, channel.rows_shape)
        comm.check_tensor("topk_idx", topk_idx, torch.int64, choices)
        comm.check_tensor("topk_weights", topk_weights, torch.float32, choices)
        shape = (n_tokens, channel.settings.hidden)
        if out is None:
            out = x.new_empty(shape)
        else:
            comm.check_tensor("out", out, torch.bfloat16, shape)
        arguments = (
            x.data_ptr(),
            handle.tables.data_ptr(),
            out.data_ptr(),
            n_tokens,
            topk_weights.data_ptr(),
        )
        tensors = x, topk_weights, handle.tables, out
        return out, *self._phase(handle.region, "combine", arguments, tensors, how)

    def _checked_how(
        self, waits_ns: torch.Tensor | None, async_finish: bool, return_recv_hook: bool
    ) -> tuple[torch.Tensor | None, bool, bool]:
        if async_finish and return_recv_hook:
            refuse("async_finish", "and return_recv_hook exclude each other")
        if waits_ns is not None:
            name, shape = "wait_recv_cost_stats", (self._comm.n_ranks,)
            if self._comm.masks:
                refuse(name, "cannot be had with enable_shrink")
            self._comm.check_tensor(name, waits_ns, torch.int64, shape)
        return waits_ns, async_finish, return_recv_hook

    def _phase(
        self,
        region: Region,
        name: str,
        arguments: tuple[int, ...],
        tensors: tuple[torch.Tensor | None, ...],
        how: tuple[torch.Tensor | None, bool, bool],
        after: Callable[[], None] | None = None,
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        """Launches a phase, for the hook or to measure waits in two; returns the event,
        and the hook if one is wanted."""
        waits_ns, async_finish, return_recv_hook = how
        launch, is_combine = getattr(region, name), name == "combine"
        if region.hook is not None:  # which nobody called
            region.hook()
        in_two = return_recv_hook or waits_ns is not None
        if not (in_two or async_finish or after is not None):
            launch(BOTH, *arguments)
            return EventOverlap(), None
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

        streams = self._comm.streams
        if return_recv_hook:
            send()
            stream = streams.current()

            def hook() -> None:
                if region.hook is not hook:
                    return  # called before
                region.hook = None
                if streams.current() != stream:
                    streams.keep(tensors)
                receive()

            region.hook, region.hook_is_of_dispatch = hook, not is_combine
            return EventOverlap(None, tensors), hook

        def send_and_receive() -> None:
            send()
            receive()

        return streams.run(send_and_receive, tensors, async_finish), None

    def _low_latency_channel(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        cap: int,
        n_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> Channel:
        """Checks what a dispatch is given, and finds its channel."""
        if not (isinstance(x, torch.Tensor) and isinstance(topk_idx, torch.Tensor)):
            raise TypeError("max_ep: x and topk_idx must be tensors")
        comm = self._comm
        if comm.is_gpu and torch._C._cuda_getDevice() != comm.index:
            refuse("the current GPU", f"is not that of this Buffer, {comm.device}")
        key = (
            *(x.shape, x.dtype, x.device, cap, n_experts),
            *(cap.__class__, n_experts.__class__),  # 128.0 is equal to 128
            *(topk_idx.shape, topk_idx.dtype, topk_idx.device),
            *(use_fp8, round_scale, use_ue8m0),
        )
        try:
            channel = self._low_latency_channels.get(key)
        except TypeError:  # a list, or other things that are no sizes
            channel = None
        if channel is not None and x.is_contiguous() and topk_idx.is_contiguous():
            return channel  # what has this key was checked
        flags = dict(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        for flag, value in flags.items():
            if not isinstance(value, int):  # text would be true
                refuse(flag, f"={value!r} must be True or False")
        is_rounded = use_fp8 and round_scale
        name = "fp8" if use_fp8 else "bfloat16"
        if is_rounded:
            name = "fp8-ue8m0" if use_ue8m0 else "fp8-round"
        format, multiple = WIRE_FORMATS[name]
        if use_ue8m0 and not (is_rounded and x.shape[-1] % multiple == 0):
            refuse("use_ue8m0", "needs use_fp8, round_scale, and hidden % 512 == 0")
        comm.check_tensor("x", x, torch.bfloat16, (None, None))
        n_tokens, hidden = x.shape
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None))
        cap = checked_int(f"max_ep: {_CAP}", cap, 1, MAX_OF_ENTRY)
        most = MAX_GPU_PAIRS if comm.is_gpu else MAX_OF_ENTRY
        n_experts = comm.check_experts(n_experts, most)
        if n_tokens > cap:
            refuse("x", f"has {n_tokens} rows, {_CAP}={cap}; raise that on all ranks")
        top_k, most_k = topk_idx.shape[1], min(MAX_TOP_K, n_experts)
        if hidden == 0 or hidden % multiple != 0:
            refuse("x", f"has {hidden} columns, not a multiple of {multiple}")
        if not 1 <= top_k <= most_k:
            refuse("topk_idx", f"has {top_k} columns; it must have 1 to {most_k}")
        settings = Settings(
            target=comm.target,
            format=format,
            hidden=hidden,
            combine="bfloat16",
            combine_hidden=hidden,
            experts=n_experts,
            ranks=comm.n_ranks,
            top_k=top_k,
            tokens=cap,
            packed_scales=use_ue8m0,
            wide_ids=True,
            masks=comm.masks is not None,
        )
        (channel,) = comm.open([settings], _N_REGIONS)
        self._low_latency_channels[key] = channel
        return channel

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Returns bfloat16 ``[n_local, n_ranks * cap, hidden]`` to write rows into."""
        self._comm.check_handle(handle, Handle, "low_latency_dispatch")
        if handle.combine_buffer is None:
            shape, device = handle.channel.rows_shape, self._comm.device
            with torch.inference_mode(False):  # written in any mode
                buffer = torch.empty(shape, dtype=torch.bfloat16, device=device)
            handle.combine_buffer = buffer
        return handle.combine_buffer

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: the two modes share no memory, so none has to be cleaned.

        With ``enable_shrink`` all ranks meet here, and those that do not come are
        masked: a dispatch without tokens.
        """
        if self._latest is not None:
            hidden, top_k, cap, n_experts, *wire = self._latest
            device = self._comm.device
            x = torch.empty((0, hidden), dtype=torch.bfloat16, device=device)
            ids = torch.empty((0, top_k), dtype=torch.int64, device=device)
            self.low_latency_dispatch(x, ids, cap, n_experts, None, None, *wire)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
    ) -> int:
        """Returns about what both regions take, with 8 experts a token."""
        tokens = checked_int(
            f"max_ep: {_CAP}", num_max_dispatch_tokens_per_rank, 1, MAX_OF_ENTRY
        )
        row = 2 * checked_int("max_ep: hidden", hidden, 1, MAX_COUNT // 4) + 16
        n_ranks = checked_int("max_ep: num_ranks", num_ranks, 1, MAX_RANKS)
        checked_int("max_ep: num_experts", num_experts, 1, MAX_OF_ENTRY)
        return _N_REGIONS * tokens * (n_ranks * (row + 64) + 8 * row)
