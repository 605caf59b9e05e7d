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

from typing import Any

import torch

from ..limits import checked_int
from .channel import BOTH, Channel
from .communicator import Communicator, refuse, refuse_hosts
from .library import round_up, rows_out, weights_back, words_of_row, words_out
from .normal_layout import (
    NormalHandle,
    agree,
    bytes_of_row,
    check_ids,
    check_layout,
    in_int32,
    scales_of_row,
)
from .streams import Config, EventOverlap, allocates, check_event

_COMBINES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_DEFAULT_TOKENS = 4096
_CPU_BYTES = 4 << 20
_GPU_BYTES = 1 << 30


class Normal:
    """The normal part of :class:`max_ep.torch.Buffer`.

    Of all three calls: ``previous_event`` is what the work waits for; with
    ``async_finish`` it is done on a stream of its own, and the current one waits when
    the event is asked to; ``allocate_on_comm_stream``, with the other two: results are
    allocated on that stream. ``config`` is ignored.
    """

    _comm: Communicator
    _cap = 0
    num_nvl_bytes: int

    @allocates
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts where tokens go.

        Args:
            topk_idx: int64 ``[n_tokens, top_k]``, in ``[-1, num_experts)``.
            num_experts: Experts of the group, a multiple of its ranks.

        Returns:
            Tokens for each rank int32 ``[n_ranks]``, None, tokens for each expert int32
            ``[num_experts]``, whether a token goes to a rank bool ``[n_tokens,
            n_ranks]``, the event.
        """
        comm = self._comm
        comm.raise_failure()
        check_event(previous_event)
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
        event = comm.streams.run(work, tensors, async_finish, previous_event)
        return per_rank, None, per_expert, in_rank, event

    @allocates
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        """Sends each token once to each rank that holds an expert of it.

        Args:
            x: ``[n_tokens, hidden]``, rows of whole 16 bytes; or a pair of
                float8_e4m3fn and scales ``[n_tokens, n]``, float32, usually one for
                128 elements, or int32 with several in a word.
            handle: Of an earlier dispatch, to repeat its layout with other tokens, or
                ``tuple(handle)``; also of another ``Buffer`` of these ranks.
            num_tokens_per_rank: From ``get_dispatch_layout``, as the next ones.
            is_token_in_rank: bool ``[n_tokens, n_ranks]``.
            num_tokens_per_expert: int32 ``[n_experts]``.
            topk_idx: int64 ``[n_tokens, top_k]``, to be sent with the tokens.
            topk_weights: float32 ``[n_tokens, top_k]``; sent with ``topk_idx``.
            expert_alignment: The counts returned are rounded up to multiples of it.
            num_worst_tokens: Rows to return; the host then waits for nothing, and the
                counts are empty. At least ``n_ranks`` times the most tokens of a rank.

        Returns:
            Rows ``[n_rows, hidden]`` (or the pair), by source rank and token; their
            expert ids, local or -1, int64 ``[n_rows, top_k]``; their weights, 0 where
            the id is -1; a list of rows for each local expert; the handle; the event.
            With ``handle`` all but the first and the last are None.
        """
        comm = self._comm
        align = checked_int("max_ep: expert_alignment", expert_alignment)
        worst = checked_int("max_ep: num_worst_tokens", num_worst_tokens, 0)
        check_event(previous_event)
        if isinstance(x, tuple) and len(x) != 2:
            refuse("x", f"is a tuple of {len(x)}; pass rows, or (rows, scales)")
        x, scales = x if isinstance(x, tuple) else (x, None)
        if num_tokens_per_rdma_rank is not None:
            refuse_hosts("num_tokens_per_rdma_rank: ranks of several hosts")
        row_bytes = bytes_of_row(comm, x, None)
        n_scales = scales_of_row(comm, scales, x)
        n_tokens, hidden = x.shape
        is_new, counts = handle is None, []
        if is_new:
            if previous_event is not None and not worst:
                previous_event.current_stream_wait()
            there = is_token_in_rank, num_tokens_per_expert
            layout = num_tokens_per_rank, *there, topk_idx, topk_weights
            top_k = check_layout(comm, n_tokens, *layout)
            rows = f"rows of {row_bytes} bytes, {n_scales} scales, top_k={top_k}"
            most, n_rows, counts = agree(comm, rows, *there, worst)
            self._cap = self._capacity(most, row_bytes)
            handle = NormalHandle(
                comm,
                n_rows=n_rows,
                n_made=comm.n_ranks * self._cap if worst else n_rows,
                n_sent=n_tokens,
                cap=self._cap,
                n_scales=n_scales,
                top_k=top_k,
                mask=is_token_in_rank,
            )
        handle = self._checked(handle)
        if not is_new and (topk_idx is not None or topk_weights is not None):
            refuse("topk_idx", "is not sent again with a handle")
        if n_tokens != handle.n_sent:
            refuse("x", f"has {n_tokens} rows, those of the handle are {handle.n_sent}")

        recv_x = x.new_empty((handle.n_made, hidden))
        # A handle of other tokens may have no place for scales.
        n_words = max(handle.n_words, words_of_row(n_scales, 0))
        group = self._group(handle.cap)
        wanted = [rows_out(row_bytes, **group)]
        has_extras = scales is not None or topk_idx is not None
        if has_extras:
            combine = _COMBINES.get(x.dtype, "bfloat16")
            wanted.append(words_out(n_words, combine, hidden, **group))
        rows, *back = comm.open(wanted, 1)
        recv_scales, received = None, ()
        if scales is not None:
            recv_scales = scales.new_empty((handle.n_rows, n_scales))
        if topk_idx is not None:
            shape = (handle.n_rows, handle.top_k)
            received = (topk_idx.new_empty(shape), topk_weights.new_empty(shape))

        def work() -> None:
            if not has_extras:
                return self._dispatch_through(handle, [(rows, x, recv_x)])
            k = handle.top_k if received else 0
            parts = [n_scales, k, k, n_words - n_scales - 2 * k]
            sent = handle.ids.new_empty((n_tokens, n_words))
            of_scales, of_ids, of_weights, _ = sent.split(parts, 1)
            if scales is not None:
                of_scales.copy_(scales.contiguous().view(torch.int32))
            if received:
                of_ids.copy_(in_int32(topk_idx))
                of_weights.copy_(topk_weights.view(torch.int32))
            extras = handle.ids.new_full((handle.n_made, n_words), -1)
            self._dispatch_through(handle, [(rows, x, recv_x), (back[0], sent, extras)])
            got = extras[: handle.n_rows]
            of_scales, of_ids, of_weights, _ = got.split(parts, 1)
            if scales is not None:
                recv_scales.copy_(of_scales.view(scales.dtype))
            if received:
                ids, weights = received
                n_local = num_tokens_per_expert.numel() // comm.n_ranks
                torch.sub(of_ids, comm.rank * n_local, out=ids)
                is_elsewhere = (ids < 0) | (ids >= n_local)
                ids.masked_fill_(is_elsewhere, -1)
                weights.view(torch.int32).copy_(of_weights)
                weights.masked_fill_(is_elsewhere, 0)

        tensors = (x, scales, topk_idx, topk_weights, recv_x, recv_scales)
        tensors += received + handle.tensors()
        event = comm.streams.run(work, tensors, async_finish, previous_event)
        result: Any = recv_x[: handle.n_rows]
        if scales is not None:
            result = (result, recv_scales)
        if not is_new:
            return result, None, None, None, None, event
        counts = [round_up(n, align) for n in counts]
        return result, *(received or (None, None)), counts, handle, event

    @allocates
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Adds up, for each token, the rows that its ranks return.

        Args:
            x: bfloat16 (or float32) ``[n_rows, hidden]``, where dispatch put rows.
            handle: As in dispatch.
            topk_weights: float32 ``[n_rows, top_k]``, to be added up as well.
            bias: One or two tensors of the result's shape, added to it.

        Returns:
            Sums ``[n_tokens, hidden]``, of the weights ``[n_tokens, top_k]`` or None,
            the event.
        """
        comm = self._comm
        check_event(previous_event)
        handle = self._checked(handle)
        bytes_of_row(comm, x, handle.n_rows)
        if x.dtype not in _COMBINES:
            raise TypeError(f"max_ep: x must be bfloat16 or float32, got {x.dtype}")
        hidden = x.shape[1]
        y = x.new_empty((handle.n_sent, hidden))
        biases = bias if isinstance(bias, tuple) else (bias,)
        biases = tuple(one for one in biases if one is not None)
        for one in biases:
            comm.check_tensor("bias", one, x.dtype, tuple(y.shape))
        group = self._group(handle.cap)
        wanted = [words_out(handle.n_words, _COMBINES[x.dtype], hidden, **group)]
        weights = None
        if topk_weights is not None:
            shape = (handle.n_rows, None)
            # Any strides will do: gradients often are expanded.
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            top_k = topk_weights.shape[1]
            weights = topk_weights.new_empty((handle.n_sent, top_k))
            wanted.append(weights_back(top_k, **group))
        channel, *of_weights = comm.open(wanted, 1)

        def work() -> None:
            self._combine_through(channel, handle, x, y)
            if of_weights:
                n_pad = of_weights[0].settings.combine_hidden - top_k
                padded = torch.nn.functional.pad(topk_weights, (0, n_pad))
                sums = padded.new_empty((handle.n_sent, padded.shape[1]))
                self._combine_through(of_weights[0], handle, padded, sums)
                weights.copy_(sums[:, :top_k])
            if biases:
                y.copy_(sum(biases, start=y.float()))

        tensors = (x, y, topk_weights, weights, *biases, *handle.tensors())
        event = comm.streams.run(work, tensors, async_finish, previous_event)
        return y, weights, event

    # ------------------------------------------------------------------- inside

    def _checked(self, handle: Any) -> NormalHandle:
        """Refuses what is no handle of these ranks; takes a tuple of its items, too."""
        comm = self._comm
        if isinstance(handle, (tuple, list)):
            handle = NormalHandle.of_items(comm, handle)
        comm.check_handle(handle, NormalHandle, "dispatch", of_group=True)
        return handle

    def _capacity(self, n_tokens: int, row_bytes: int) -> int:
        """Returns how many tokens of a rank channels hold, the same on all ranks; never
        less than before, so that calls of smaller rows find the kernels of the first.
        """
        usual = _GPU_BYTES if self._comm.is_gpu else _CPU_BYTES
        budget = (self._comm.is_gpu and self.num_nvl_bytes) or usual
        fits = max(1, budget // (2 * self._comm.n_ranks * row_bytes))
        start = self._cap or min(_DEFAULT_TOKENS, 1 << (fits.bit_length() - 1))
        return max(start, 1 << max(0, n_tokens - 1).bit_length())

    def _group(self, cap: int) -> dict[str, Any]:
        """Describes a group in which each rank is an expert."""
        n, target = self._comm.n_ranks, self._comm.target
        return dict(target=target, ranks=n, experts=n, top_k=n, tokens=cap)

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
            channel.latest = (handle, self._comm.streams.is_capturing())
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
        captures = self._comm.streams.is_capturing()
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
