# SPDX-License-Identifier: Apache-2.0
"""``ElasticBuffer``: the interface of DeepEP V2, one process a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..limits import MAX_OF_ENTRY, checked_int
from .elastic import Elastic
from .elastic_handle import EPHandle
from .elastic_layout import (
    MOST,
    get_logical_domain_size,
    n_bytes,
    n_ranks_of,
)
from .joining import check_group
from .member import Member, not_compiled
from .streams import EventHandle, EventOverlap, When


class ElasticBuffer(Member):
    """Dispatch and combine of one rank, with the names of DeepEP V2.

    The first call with new sizes builds kernels and allocates memory for the
    constructor's ``num_max_tokens_per_rank``; smaller calls use them. All ranks make
    the same calls in the same order. In shapes ``n_local`` are the experts of a rank.

    A wrong argument raises a ``TypeError`` or ``ValueError`` before a launch, what is
    not supported a ``NotImplementedError``. A rank that does not come is named by a
    ``TimeoutError`` or ``RuntimeError``, on GPUs perhaps of a later call
    (docs/pytorch.md#errors).

    Example:
        >>> buffer = ElasticBuffer(group, num_max_tokens_per_rank=128, hidden=7168)
        >>> rows, ids, weights, handle, _ = buffer.dispatch(x, ids, weights, None, 256)
        >>> y, *_ = buffer.combine(experts(rows, ids, weights), handle)
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        timeout_s: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Joins the other ranks. All processes of the group call it.

        Results are always deterministic. Arguments that are not listed are ignored.

        Args:
            group: The ranks; it carries names and addresses, no data.
            num_bytes: Reported as ``num_bytes``; None: what the sizes need.
            num_max_tokens_per_rank: The most tokens of any rank; 0: of the first call.
            hidden: Only for ``num_bytes``, as ``num_topk`` and ``use_fp8_dispatch``.
            allow_hybrid_mode: Whether, over several hosts of several ranks, a token
                crosses once to each host, and one sum comes back; otherwise once to
                each rank (docs/several_hosts.md#one-message-for-each-host).
            allow_multiple_reduction: Whether the sum of a rank's expanded rows is
                rounded to bfloat16 on its way; otherwise it goes in float32.
            prefer_overlap_with_compute: Only reported.
            explicitly_destroy: Whether only :meth:`destroy` frees the memory.
            timeout_s: How long a rank waits for another, at most a day; None:
                ``MAX_EP_TIMEOUT_S``, or 30.
            device: Of the tensors; None: ``MAX_EP_TORCH_DEVICE``, or the current GPU,
                or the CPU if there is none.

        Raises:
            TimeoutError: If a rank does not come; names it.
        """
        most = checked_int(f"max_ep: {MOST}", num_max_tokens_per_rank, 0, MAX_OF_ENTRY)
        rounds, is_hybrid = bool(allow_multiple_reduction), bool(allow_hybrid_mode)
        same = {MOST: most, "allow_multiple_reduction": rounds}
        same["allow_hybrid_mode"] = is_hybrid
        check_group(group, None)
        if num_bytes is not None:
            num_bytes = checked_int("max_ep: num_bytes", num_bytes, 0, None)
        hidden = checked_int("max_ep: hidden", hidden, 0)
        num_topk = checked_int("max_ep: num_topk", num_topk, 0)
        super().__init__(group, None, device, timeout_s, explicitly_destroy, **same)
        self._elastic = Elastic(self._channels, most, rounds, is_hybrid)
        self.num_max_tokens_per_rank = most
        self.hidden, self.num_topk = hidden, num_topk
        self.use_fp8_dispatch, self.deterministic = use_fp8_dispatch, True
        self.allow_hybrid_mode = is_hybrid
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.allow_multiple_reduction = rounds
        self.num_ranks, self.rank_idx = self._comm.n_ranks, self._comm.rank
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self._comm.rank
        self.num_scaleout_ranks, self.num_scaleup_ranks = 1, self._comm.n_ranks
        self.num_allocated_qps, self.num_cpu_bytes = num_allocated_qps, num_cpu_bytes
        if num_bytes is None:
            num_bytes = n_bytes(self.num_ranks, most, hidden)
        self.num_bytes = num_bytes

    @not_compiled
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        *,
        format: str | None = None,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token to each rank that holds an expert of it.

        Args:
            x: bfloat16 ``[n_tokens, hidden]``, rows of whole 16 bytes; or a pair of
                values and scales, which arrive as they are given: float8_e4m3fn with
                any scales ``[n_tokens, n]`` of 4 bytes, or MXFP8, NVFP4, MXFP4 as
                :func:`max_ep.torch.quantize` returns them.
            topk_idx: int64 ``[n_tokens, top_k]``, in ``[-1, num_experts)``; -1: none.
                None with ``handle``.
            topk_weights: float32 ``[n_tokens, top_k]``, to be sent with the tokens.
            cumulative_local_expert_recv_stats: int32 ``[n_local]``; counts are added.
            num_experts: Experts of the group, a multiple of its ranks.
            num_max_tokens_per_rank: The most tokens of any rank; None: the
                constructor's.
            expert_alignment: What counts are rounded up to, and where expanded rows of
                an expert begin; None: 1.
            num_sms: The most multiprocessors that kernels use; 0: all; fewer than 64
                are taken as 64. The handle reports it as given.
            num_qps: Ignored.
            previous_event: What the work waits for; None: the current stream.
            previous_event_before_epilogue: The same.
            async_with_compute_stream: Whether the work is done on a stream of its own,
                and the current one waits when the event is asked to.
            allocate_on_comm_stream: With both: whether results are allocated there.
            handle: Of an earlier dispatch, to repeat its layout with other tokens.
            do_handle_copy: Whether the handle keeps a copy of ``topk_idx``.
            do_cpu_sync: Whether the host waits for the number of rows; None: True
                without a handle.
            do_expand: Whether rows are by expert, not by token.
            do_zero_padding: Whether expanded rows between those of experts are zeros.
            use_tma_aligned_col_major_sf: Whether scales of rows stand in columns, each
                of whole 16 bytes.
            format: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"`` or ``"mxfp4"``: bfloat16 tokens
                are quantized first, and arrive as a pair.

        Returns:
            Rows ``[n_rows, hidden]``, or the pair; plain: their expert ids, local or
            -1, int64 ``[n_rows, top_k]``; their weights ``[n_rows, top_k]``, expanded
            ``[n_rows]``, None if none were sent; the handle; the event. Without the
            host's wait there are as many rows as there can be, and those that nobody
            sent are undefined.
        """
        numbers = num_experts, num_max_tokens_per_rank, expert_alignment, num_sms
        form = do_expand, do_cpu_sync, do_zero_padding, use_tma_aligned_col_major_sf
        options = *numbers, *form, do_handle_copy, format
        stats = cumulative_local_expert_recv_stats
        when = previous_event, async_with_compute_stream, allocate_on_comm_stream
        at = *when, previous_event_before_epilogue
        given = x, topk_idx, topk_weights, stats, handle, options, at
        if not allocate_on_comm_stream:
            return self._elastic.dispatch(*given)
        with self._comm.streams.allocating(When(*when)):
            return self._elastic.dispatch(*given)

    @not_compiled
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Adds up, for each token, the rows that its ranks return.

        Args:
            x: bfloat16 ``[n_rows, hidden]``, where dispatch put rows; expanded rows
                have their weights. Rows that nobody sent are not read.
            handle: As in dispatch.
            topk_weights: float32 ``[n_rows, top_k]``, expanded ``[n_rows]``, to be
                brought back.
            bias: One or two bfloat16 ``[n_tokens, hidden]``, added in float32.
            num_sms: As in dispatch.
            num_qps: Ignored.
            previous_event: As in dispatch, and the next ones.
            previous_event_before_epilogue: As in dispatch.
            async_with_compute_stream: As in dispatch.
            allocate_on_comm_stream: As in dispatch.

        Returns:
            Sums bfloat16 ``[n_tokens, hidden]``; of the weights ``[n_tokens, top_k]``
            or None, each as the rank of the expert gives it, 0 where there is none; the
            event.
        """
        when = previous_event, async_with_compute_stream, allocate_on_comm_stream
        at = *when, previous_event_before_epilogue
        if not allocate_on_comm_stream:
            return self._elastic.combine(x, handle, topk_weights, bias, at, num_sms)
        with self._comm.streams.allocating(When(*when)):
            return self._elastic.combine(x, handle, topk_weights, bias, at, num_sms)

    # ----------------------------------------------------------- around the calls

    def reset(self) -> None:
        """Makes the memory usable again after an error; all ranks call it."""
        self._elastic.forget()
        super().reset()

    def barrier(
        self,
        use_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
    ) -> None:
        """Waits for this rank's device, and for all ranks to come here."""
        if self._comm.streams.is_capturing():
            raise RuntimeError("max_ep: barrier waits on the host; call it outside")
        self._comm.check()
        self._comm.exchange("ElasticBuffer.barrier")

    @staticmethod
    def capture() -> EventHandle:
        """Records an event on the current stream."""
        return EventHandle()

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, *of_links: Any, **by_name: Any
    ) -> int:
        """Returns what to pass as ``num_sms``: all multiprocessors.

        ``num_scaleout_topk`` and bandwidths, which some versions pass, are ignored.
        """
        return self._comm.most_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: ranks of a host have no queue pairs."""
        return 0

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns hosts, and ranks of each."""
        n_hosts = self._comm.n_hosts
        return n_hosts, self.num_ranks // n_hosts

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns groups that reach each other through a network, and their ranks."""
        return get_logical_domain_size(self.group, self.allow_hybrid_mode)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns about what a rank takes, in bytes: a multiple of 2 MiB."""
        most = checked_int(f"max_ep: {MOST}", num_max_tokens_per_rank, 0)
        hidden = checked_int("max_ep: hidden", hidden, 0)
        return n_bytes(n_ranks_of(group), most, hidden)


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"max_ep: ElasticBuffer.{name}: {instead}")

    return call


_ENGRAM = "tables are not kept here; index a tensor of your own"
_PIPELINE = "stages are not connected here; use torch.distributed.send and recv"
_GATHER = "use torch.distributed.all_gather_into_tensor, or an all-gather of MAX graphs"
for _instead, _names in {
    _ENGRAM: "engram_write engram_fetch get_engram_storage_size_hint",
    _PIPELINE: "pp_set_config pp_send pp_recv get_pp_buffer_size_hint",
    _GATHER: "create_agrs_session destroy_agrs_session agrs_new_session all_gather "
    "agrs_set_config agrs_get_inplace_tensor get_agrs_num_max_session_bytes "
    "get_agrs_buffer_size_hint",
}.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, staticmethod(_refusing(_name, _instead)))
