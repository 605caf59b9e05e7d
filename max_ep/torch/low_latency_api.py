# SPDX-License-Identifier: Apache-2.0
"""DeepEP's low-latency calls: padded rows of each expert, in a fixed order.

A dispatch takes the next of two regions, and its handle remembers which. So two
batches may be in flight: dispatch A, dispatch B, combine A, combine B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .channel import BOTH, RECEIVE, SEND, Channel, Communicator, Region
from .checks import check_tensor, refuse
from .events import EventOverlap
from .library import FORMATS

_FORMATS = tuple(FORMATS.values())
_BLOCK = 128
_N_REGIONS = 2


class Handle(tuple):
    """What combine needs of a dispatch; reads as DeepEP's tuple: tokens of the rows
    ``int32 [n_local, n_ranks * cap]``, ranges ``int64 [n_local, n_ranks]`` (first row
    in the high word, rows in the low one), cap, hidden size, experts.

    The tensors are made when they are asked for.
    """

    def __new__(
        cls, channel: Channel, region: Region, tables: torch.Tensor, n_tokens: int
    ) -> Handle:
        settings = channel.settings
        numbers = (settings.tokens, settings.hidden, settings.experts)
        self = super().__new__(cls, (None, None, *numbers))
        self.channel = channel
        self.region = region
        self.tables = tables
        self.n_tokens = n_tokens
        self.combine_buffer: torch.Tensor | None = None
        return self

    def _items(self) -> tuple[Any, ...]:
        n_local, n_rows = self.channel.n_local, self.channel.n_local_rows
        n_ranges = n_local * self.channel.settings.ranks
        src_info = self.tables[: 2 * n_rows].view(n_local, -1, 2)
        ranges = self.tables[2 * n_rows :][: 2 * n_ranges].view(n_local, -1, 2)
        packed = ranges.flip(2).view(torch.int64).squeeze(2)
        return (src_info[:, :, 0], packed, *tuple.__getitem__(self, slice(2, None)))

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())


class LowLatency:
    """The low-latency part of :class:`max_ep.torch.Buffer`."""

    _comm: Communicator
    _low_latency_channels: dict[tuple[int, ...], Channel]

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

        Returns:
            Rows ``[n_local, n_ranks * cap, hidden]`` (with FP8 a pair, scales behind
            them); rows of each expert, int32 ``[n_local]``; the handle; the event; the
            hook, or None.
        """
        comm = self._comm
        kind = (2 if round_scale else 1) if use_fp8 else 0
        settings = (num_max_dispatch_tokens_per_rank, num_experts, kind)
        _check_dispatch(comm, x, topk_idx, *settings)
        if use_ue8m0 and (kind != 2 or x.shape[1] % 512 != 0):
            refuse("use_ue8m0", "needs use_fp8, round_scale, and hidden % 512 == 0")
        if async_finish and return_recv_hook:
            refuse("async_finish", "and return_recv_hook exclude each other")
        channel = self._low_latency_channel(x.shape[1], topk_idx.shape[1], *settings)
        region = channel.next_region()
        n_local, n_ranks = channel.n_local, comm.n_ranks
        n_rows, n_tokens = channel.n_local_rows, x.shape[0]

        # Source of each row, ranges, counts: one allocation.
        n_words = 2 * n_rows + n_local * (2 * n_ranks + 1)
        tables = x.new_empty(n_words, dtype=torch.int32)
        counts = tables[n_words - n_local :]
        dtype = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        rows = x.new_empty((n_local, channel.capacity, x.shape[1]), dtype=dtype)
        scales = packed = None
        if use_fp8:
            shape = (n_local, x.shape[1] // _BLOCK, channel.capacity)
            scales = x.new_empty(shape, dtype=torch.float32)
        if use_ue8m0:
            shape = (n_local, x.shape[1] // _BLOCK // 4, channel.capacity)
            packed = x.new_empty(shape, dtype=torch.int32)
        src_info = tables.data_ptr()
        arguments = (
            x.data_ptr(),
            topk_idx.data_ptr(),
            n_tokens,
            rows.data_ptr(),
            scales.data_ptr() if scales is not None else 0,
            src_info + 4 * (n_words - n_local),
            src_info + 8 * n_rows,
            src_info,
        )
        stats, waits = (
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
        )
        in_one = not (return_recv_hook or comm.shares_gpu or waits is not None)

        def send() -> None:
            region.dispatch(BOTH if in_one else SEND, *arguments)

        def receive() -> None:
            if waits is not None:
                region.watch(False, waits)
            if not in_one:
                region.dispatch(RECEIVE, *arguments)
            if packed is not None:
                _pack_exponents(scales, packed)
            if stats is not None:
                stats.add_(counts)

        event = self._start(send, receive, async_finish, return_recv_hook)
        event.extra_tensors = (x, topk_idx, tables, rows)
        result: Any = rows
        if use_fp8:
            result = (rows, (scales if packed is None else packed).transpose(1, 2))
        handle = Handle(channel, region, tables, n_tokens)
        return result, counts, handle, event, receive if return_recv_hook else None

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
            return_recv_hook: Likewise.
            out: bfloat16 ``[n_tokens, hidden]``, for the result; None: a new one.
            combine_wait_recv_cost_stats: As in dispatch.

        Returns:
            ``[n_tokens, hidden]`` bfloat16; the event; the hook, or None.
        """
        if use_logfmt:
            raise NotImplementedError("max_ep: use_logfmt: combine sends bfloat16")
        if not isinstance(handle, Handle):
            refuse("handle", "is not one that low_latency_dispatch returned")
        if async_finish and return_recv_hook:
            refuse("async_finish", "and return_recv_hook exclude each other")
        channel, region, comm = handle.channel, handle.region, self._comm
        n_tokens, hidden = handle.n_tokens, channel.settings.hidden
        top_k = channel.settings.top_k
        if zero_copy:
            if handle.combine_buffer is None:
                refuse("zero_copy", "needs get_next_low_latency_combine_buffer first")
            x = handle.combine_buffer
        shape = (channel.n_local, channel.capacity, hidden)
        check_tensor(comm, "x", x, torch.bfloat16, shape)
        check_tensor(comm, "topk_idx", topk_idx, torch.int64, (n_tokens, top_k))
        weights = (n_tokens, top_k)
        check_tensor(comm, "topk_weights", topk_weights, torch.float32, weights)
        if out is None:
            out = x.new_empty((n_tokens, hidden))
        check_tensor(comm, "out", out, torch.bfloat16, (n_tokens, hidden))
        arguments = (
            x.data_ptr(),
            handle.tables.data_ptr(),
            out.data_ptr(),
            n_tokens,
            topk_weights.data_ptr(),
        )
        waits = combine_wait_recv_cost_stats
        in_one = not (return_recv_hook or comm.shares_gpu or waits is not None)

        def send() -> None:
            region.combine(BOTH if in_one else SEND, *arguments)

        def receive() -> None:
            if waits is not None:
                region.watch(True, waits)
            if not in_one:
                region.combine(RECEIVE, *arguments)

        event = self._start(send, receive, async_finish, return_recv_hook)
        event.extra_tensors = (x, topk_weights, handle.tables, out)
        return out, event, receive if return_recv_hook else None

    def _low_latency_channel(
        self, hidden: int, top_k: int, cap: int, n_experts: int, kind: int
    ) -> Channel:
        key = (hidden, top_k, cap, n_experts, kind)
        if key not in self._low_latency_channels:
            settings = self._comm.settings(
                format=_FORMATS[kind],
                hidden=hidden,
                combine="bfloat16",
                combine_hidden=hidden,
                experts=n_experts,
                top_k=top_k,
                tokens=cap,
                wide_ids=True,
            )
            (channel,) = self._comm.open([settings], _N_REGIONS)
            self._low_latency_channels[key] = channel
        return self._low_latency_channels[key]

    def _start(
        self,
        send: Callable[[], None],
        receive: Callable[[], None],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> EventOverlap:
        """Runs the parts that are not left to the hook."""
        if return_recv_hook:
            send()
            return EventOverlap()
        return self._comm.run(lambda: (send(), receive()), async_finish)

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Returns bfloat16 ``[n_local, n_ranks * cap, hidden]`` to write rows into."""
        if handle.combine_buffer is None:
            channel = handle.channel
            shape = (channel.n_local, channel.capacity, channel.settings.hidden)
            handle.combine_buffer = handle.tables.new_empty(shape, dtype=torch.bfloat16)
        return handle.combine_buffer

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: the two modes share no memory, so none has to be cleaned."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
    ) -> int:
        """Returns about what both regions take, with 8 experts a token."""
        tokens, row = num_max_dispatch_tokens_per_rank, 2 * hidden + 16
        return _N_REGIONS * tokens * (num_ranks * (row + 64) + 8 * row)


def _check_dispatch(
    comm: Communicator,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    cap: int,
    n_experts: int,
    kind: int,
) -> None:
    """Raises unless the arguments fit together."""
    check_tensor(comm, "x", x, torch.bfloat16, (None, None))
    check_tensor(comm, "topk_idx", topk_idx, torch.int64, (x.shape[0], None))
    multiple = _BLOCK if kind else 8
    if x.shape[1] == 0 or x.shape[1] % multiple != 0:
        refuse("x", f"has {x.shape[1]} columns, not a multiple of {multiple}")
    if x.shape[0] > cap:
        refuse("x", f"has {x.shape[0]} rows, num_max_dispatch_tokens_per_rank={cap}")
    if n_experts < 1 or n_experts % comm.n_ranks != 0:
        refuse("num_experts", f"is {n_experts}, not a multiple of {comm.n_ranks} ranks")
    top_k = topk_idx.shape[1]
    if not 1 <= top_k <= min(32, n_experts):
        refuse("topk_idx", f"has {top_k} columns; 1 to {min(32, n_experts)} go")


def _pack_exponents(scales: torch.Tensor, packed: torch.Tensor) -> None:
    """Puts the exponents of four powers of two into an int32, the first lowest."""
    exponents = (scales.view(torch.int32) >> 23).unflatten(1, (-1, 4))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
    bytes_ = exponents << shifts[None, None, :, None]
    torch.sum(bytes_, 2, dtype=torch.int32, out=packed)
