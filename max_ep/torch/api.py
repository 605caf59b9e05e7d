# SPDX-License-Identifier: Apache-2.0
"""``Buffer``: DeepEP's legacy interface, one process a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ..limits import checked_int, is_integer
from .calls import sends_sums
from .communicator import Masks, refuse, refuse_arguments
from .compiled import Compiled, check_compiled
from .low_latency import AT_ONCE, Handle, How, LowLatency, Wire
from .member import Member, not_compiled
from .normal import Normal
from .normal_layout import Layout, NormalHandle
from .streams import Config, EventHandle, EventOverlap, When


class _Unset(int):
    """A number that nobody has chosen."""


class Buffer(Member):
    """Dispatch and combine of one rank, with the names of DeepEP's ``Buffer``.

    Memory is allocated, and kernels are built, by the first call with new sizes; all
    ranks make it at the same time. All ranks make the same calls in the same order.
    In shapes ``n_local`` are the experts of a rank, and ``cap`` is
    ``num_max_dispatch_tokens_per_rank``.

    A wrong argument raises a ``TypeError`` or ``ValueError`` before a launch, what is
    not supported a ``NotImplementedError``. A rank that does not come is named by a
    ``TimeoutError`` or ``RuntimeError``, on GPUs perhaps of a later call
    (docs/pytorch.md#errors).

    Example:
        >>> buffer = Buffer(dist.group.WORLD, low_latency_mode=True)
        >>> rows, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, 128, 256)
        >>> y, *_ = buffer.low_latency_combine(experts(rows), ids, weights, handle)
    """

    num_sms: int = _Unset(20)

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        combine_mode: str | None = None,
        timeout_s: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Joins the other ranks. All processes of the group call it.

        Both modes always work. Arguments that are not listed are ignored.

        Args:
            group: The ranks; it carries names and addresses, no data.
            num_nvl_bytes: On GPUs a hint for how many tokens the normal calls hold
                memory at first.
            explicitly_destroy: Whether only :meth:`destroy` frees the memory.
            enable_shrink: Whether the low-latency calls mask a rank that is late, and
                go on without it (docs/fault_tolerance.md).
            comm: Of mpi4py, instead of ``group``.
            combine_mode: What ``low_latency_combine`` sends: ``"sums"``, one row for
                each token and rank, added up there in float32 and rounded to bfloat16;
                or ``"rows"``, one for each choice, which the token's rank adds up.
                None: sums, or rows with ``enable_shrink``, where ranks share a GPU, and
                of one rank.
            timeout_s: How long a rank waits for another, at most a day; None:
                ``MAX_EP_TIMEOUT_S``, or 30.
            device: Of the tensors; None: ``MAX_EP_TORCH_DEVICE``, or the current GPU,
                or the CPU if there is none.

        Raises:
            TimeoutError: If a rank does not come; names it.
        """
        num_nvl_bytes = checked_int("max_ep: num_nvl_bytes", num_nvl_bytes, 0, None)
        if combine_mode not in (None, "rows", "sums"):
            refuse("combine_mode", f'={combine_mode!r} must be "rows", "sums" or None')
        if combine_mode == "sums" and enable_shrink:
            refuse("combine_mode", '="sums" masks no rank: leave enable_shrink out')
        same = dict(num_nvl_bytes=num_nvl_bytes, enable_shrink=bool(enable_shrink))
        same["combine_mode"] = combine_mode
        ending = timeout_s, explicitly_destroy, enable_shrink
        super().__init__(group, comm, device, *ending, **same)
        self.rank, self.group_size = self._comm.rank, self._comm.n_ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self._low_latency = LowLatency(self._channels, self._has_sums(combine_mode))
        self._compiled = Compiled(self._low_latency)
        self._normal = Normal(self._channels, num_nvl_bytes)

    def _has_sums(self, combine_mode: str | None) -> bool:
        """Returns whether low-latency combine sends sums; raises where it cannot."""
        share_gpus = self._comm.is_gpu and self._comm.shares_gpu
        if combine_mode == "sums" and share_gpus:
            refuse("combine_mode", '="sums" needs a GPU for each rank; use "rows"')
        return not share_gpus and sends_sums(
            combine_mode, self.group_size, self.enable_shrink
        )

    # ---------------------------------------------------------- low-latency calls

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
        format: str | None = None,
        **of_forks: Any,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Sends each token to the ranks of its experts.

        Args:
            x: bfloat16 ``[n_tokens, hidden]``; ``hidden`` is a multiple of 8, of 128
                with FP8, of 512 with UE8M0, of 32 with other formats. Or values and
                scales, as :func:`max_ep.torch.quantize` returns them: they arrive as
                they are given.
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
            format: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"`` or ``"mxfp4"``: what rows are
                quantized to, instead of ``use_fp8`` and the flags behind it.
            of_forks: What forks of DeepEP take, refused unless it is None or False.

        Returns:
            Rows ``[n_local, n_ranks * cap, hidden]``; with FP8 a pair of them and
            scales ``[n_local, n_ranks * cap, hidden / 128]`` float32, with UE8M0 int32
            ``[..., hidden / 512]``, with other formats as ``quantize`` has them; rows
            of each expert, int32 ``[n_local]``; the handle; the event; the hook, or
            None.
        """
        if of_forks:
            refuse_arguments("low_latency_dispatch", of_forks)
        sizes = num_max_dispatch_tokens_per_rank, num_experts
        wire = Wire(use_fp8, round_scale, use_ue8m0)
        if format is not None:
            is_flag = format == "fp8" and not isinstance(x, tuple)
            wire = Wire(True) if is_flag else Wire(format=format)
        stats = cumulative_local_expert_recv_stats
        waits, how = dispatch_wait_recv_cost_stats, AT_ONCE
        if torch.compiler.is_compiling():
            how = How(waits, async_finish, return_recv_hook)
            check_compiled("dispatch_wait_recv_cost_stats", how)
            given = x, topk_idx, *sizes, wire, stats, return_recv_hook
            return self._compiled.dispatch(*given)
        if waits is not None or async_finish or return_recv_hook:
            how = How(waits, async_finish, return_recv_hook)
        return self._low_latency.dispatch(x, topk_idx, *sizes, wire, stats, how)

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
            use_logfmt: Ignored: combine sends bfloat16, which is more exact.
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
        given = x, topk_idx, topk_weights
        waits, how = combine_wait_recv_cost_stats, AT_ONCE
        if torch.compiler.is_compiling():
            how = How(waits, async_finish, return_recv_hook)
            check_compiled("combine_wait_recv_cost_stats", how)
            if zero_copy:
                raise NotImplementedError("max_ep: zero_copy is not compiled; pass x")
            return self._compiled.combine(*given, handle, out, return_recv_hook)
        if isinstance(handle, tuple) and len(handle) == 6:  # of a compiled dispatch
            handle = self._compiled.stored(handle[5])
        if waits is not None or async_finish or return_recv_hook:
            how = How(waits, async_finish, return_recv_hook)
        return self._low_latency.combine(*given, handle, zero_copy, out, how)

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Returns bfloat16 ``[n_local, n_ranks * cap, hidden]`` to write rows into."""
        return self._low_latency.combine_buffer(handle)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: the two modes share no memory, so none has to be cleaned.

        With ``enable_shrink`` all ranks meet here, and those that do not come are
        masked: a dispatch without tokens.
        """
        self._low_latency.meet()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
    ) -> int:
        """Returns about what both regions take, with 8 experts a token."""
        sizes = num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        return LowLatency.size_hint(*sizes)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Says which ranks are masked: 1 for each, into int32 ``[n_ranks]``."""
        masks, comm = self._masks(), self._comm
        comm.check_tensor("mask_status", mask_status, torch.int32, (comm.n_ranks,))
        mask_status.copy_(masks.read())

    def low_latency_update_mask_buffer(
        self, rank_to_mask: int, mask: bool = False
    ) -> None:
        """Masks a rank, or waits for it again from the next call on.

        A rank that has missed calls is masked again: only :meth:`Buffer.reset`, in all
        processes, takes it in.
        """
        masks, comm = self._masks(), self._comm
        if not is_integer(rank_to_mask) or rank_to_mask not in comm.others:
            what = f"={rank_to_mask!r} is not another rank of the group"
            refuse("rank_to_mask", f"{what}, one of {comm.others}")
        masks.set([rank_to_mask], int(mask))

    def low_latency_clean_mask_buffer(self) -> None:
        """Waits for all ranks again from the next call on."""
        self._masks().set(range(self._comm.n_ranks), 0)

    def _masks(self) -> Masks:
        if self._comm.masks is None:
            refuse("enable_shrink", "is not set: this buffer masks no ranks")
        return self._comm.masks

    # --------------------------------------------------------------- normal calls

    @not_compiled
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap
    ]:
        """Counts where tokens go, for :meth:`dispatch`.

        In all three normal calls the work waits for ``previous_event``; with
        ``async_finish`` it is done on a stream of its own, and the current one waits
        when the event is asked to; ``allocate_on_comm_stream``, with the other two:
        results are allocated on that stream. ``config``: its ``num_sms`` bounds the
        multiprocessors of a dispatch or combine.

        Args:
            topk_idx: int64 ``[n_tokens, top_k]``, in ``[-1, num_experts)``.
            num_experts: Experts of the group, a multiple of its ranks.

        Returns:
            Tokens for each rank int32 ``[n_ranks]``; for each host int32 ``[n_hosts]``,
            or None if there is one; for each expert int32 ``[num_experts]``; whether a
            token goes to a rank bool ``[n_tokens, n_ranks]``; the event.
        """
        when = When(previous_event, async_finish, allocate_on_comm_stream)
        with self._comm.streams.allocating(when):
            return self._normal.layout(topk_idx, num_experts, when)

    @not_compiled
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
        *,
        format: str | None = None,
    ) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        """Sends each token once to each rank that holds an expert of it.

        Args:
            x: ``[n_tokens, hidden]``, rows of whole 16 bytes; or a pair of values and
                scales, which arrive as they are given: float8_e4m3fn with scales
                ``[n_tokens, n]``, float32, usually one for 128 elements, or int32 with
                several in a word; or MXFP8, NVFP4, MXFP4 as
                :func:`max_ep.torch.quantize` returns them.
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
            format: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"`` or ``"mxfp4"``: bfloat16 tokens
                are quantized first, and arrive as a pair.

        Returns:
            Rows ``[n_rows, hidden]`` (or the pair), by source rank and token; their
            expert ids, local or -1, int64 ``[n_rows, top_k]``; their weights, 0 where
            the id is -1; a list of rows for each local expert; the handle; the event.
            With ``handle`` all but the first and the last are None.
        """
        there = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        layout = Layout(*there, topk_idx, topk_weights)
        when = When(previous_event, async_finish, allocate_on_comm_stream)
        given = x, handle, layout, expert_alignment, num_worst_tokens, when, format
        with self._comm.streams.allocating(when), self._using_sms(config):
            return self._normal.dispatch(*given)

    @not_compiled
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
        when = When(previous_event, async_finish, allocate_on_comm_stream)
        with self._comm.streams.allocating(when), self._using_sms(config):
            return self._normal.combine(x, handle, topk_weights, bias, when)

    def _using_sms(self, config: Config | None) -> AbstractContextManager[None]:
        """Bounds the multiprocessors of a normal call, as asked."""
        if config is None:
            config = Buffer.get_dispatch_config(self.group_size)
        elif not isinstance(config, Config):
            kind = type(config).__name__
            raise TypeError(f"max_ep: config is a {kind}; pass a Config, or None")
        n = 0 if config.asks_for_all else config.num_sms
        return self._comm.using_sms(checked_int("max_ep: config.num_sms", n, 0))

    # ----------------------------------------------------------- around the calls

    def reset(self) -> None:
        """Makes the memory usable again after an error; all ranks call it.

        Handles of low-latency calls end with it.
        """
        self._low_latency.forget()
        self._normal.forget()
        self._compiled.handles.clear()
        super().reset()

    def is_available(self) -> bool:
        """Returns whether the buffer can be used."""
        return not self._comm.failure

    @staticmethod
    def capture() -> EventOverlap:
        """Records an event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Bounds the multiprocessors that normal calls use, by an even number; 0: all.
        Fewer than 64 are taken as 64, because a link needs about so many.

        Until it is called they use all, unless a :class:`Config` is passed.
        """
        n = checked_int("max_ep: new_num_sms", new_num_sms, 0)
        if n % 2 != 0:
            refuse("new_num_sms", f"={n} is odd; pass an even number")
        Buffer.num_sms = n

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: kernels are compiled for the GPU that is there."""
        return True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns a configuration with what :meth:`set_num_sms` was given."""
        n = Buffer.num_sms
        return Config(int(n), asks_for_all=isinstance(n, _Unset))

    get_combine_config = get_dispatch_config

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Returns a tensor of shape ``[0]``, which callers may clear; no part of a
        region, for it holds flags that only kernels may write.

        Raises:
            NotImplementedError: If a size or an offset is asked for.
        """
        if size is not None or offset != 0:
            raise NotImplementedError(
                "max_ep: get_local_buffer_tensor(size, offset); combine takes rows "
                "from any tensor, and get_next_low_latency_combine_buffer returns one "
                "for zero_copy"
            )
        if not isinstance(dtype, torch.dtype):
            refuse("dtype", f"={dtype!r} must be one of torch, such as torch.bfloat16")
        return torch.empty(0, dtype=dtype, device=self._comm.device)
