# SPDX-License-Identifier: Apache-2.0
"""``ElasticBuffer``: the interface of DeepEP V2, one process a rank.

Rows are plain or expanded (``sums.py``). Combine adds up rows that have their weights
already, in the rank of the experts first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..limits import MAX_GPU_PAIRS, MAX_OF_ENTRY, MAX_TOP_K, checked_int
from ..waits import Waits
from . import sums
from .communicator import Communicator, refuse
from .elastic_handle import EPHandle, checked_handle
from .elastic_layout import (
    MOST,
    check_same,
    checked_x,
    get_logical_domain_size,
    get_physical_domain_size,
    n_bytes,
    n_worst_rows,
    outputs,
    with_sizes,
    zeroed,
)
from .joining import check_group, gatherer, join
from .library import memory_for
from .normal_layout import bytes_of_row, check_ids, scales_of_row
from .streams import EventHandle, EventOverlap, allocates, check_event
from .sums import EXPANDED, PLAIN, Routing

_NUM_SMS = 24


class ElasticBuffer:
    """Dispatch and combine of one rank, with the names of DeepEP V2.

    The first call with new sizes builds kernels and allocates memory for the
    constructor's ``num_max_tokens_per_rank``; smaller calls use them. All ranks make
    the same calls in the same order.

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
            allow_multiple_reduction: Whether the sum of a rank's expanded rows is
                rounded to bfloat16 on its way; otherwise it goes in float32.
            explicitly_destroy: Whether only :meth:`destroy` frees the memory.
            timeout_s: How long a rank waits for another, at most a day; None:
                ``MAX_EP_TIMEOUT_S``, or 30.
            device: Of the tensors; None: ``MAX_EP_TORCH_DEVICE``, or the current GPU,
                or the CPU if there is none.

        Raises:
            NotImplementedError: For ranks on several hosts.
            TimeoutError: If a rank does not come; names it.
        """
        most = checked_int(f"max_ep: {MOST}", num_max_tokens_per_rank, 0, MAX_OF_ENTRY)
        same = {MOST: most, "allow_multiple_reduction": bool(allow_multiple_reduction)}
        check_group(group, None)
        self._comm = join(group, None, device, timeout_s, False, **same)
        self._gather = gatherer(group, None)
        self._cap = memory_for(most)
        self.group = group
        self.num_max_tokens_per_rank = most
        self.hidden, self.num_topk = hidden, num_topk
        self.use_fp8_dispatch, self.deterministic = use_fp8_dispatch, True
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.explicitly_destroy = explicitly_destroy
        self.num_ranks, self.rank_idx = self._comm.n_ranks, self._comm.rank
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self._comm.rank
        self.num_scaleout_ranks, self.num_scaleup_ranks = 1, self._comm.n_ranks
        self.num_allocated_qps, self.num_cpu_bytes = num_allocated_qps, num_cpu_bytes
        if num_bytes is None:
            num_bytes = n_bytes(self.num_ranks, most, hidden)
        self.num_bytes = num_bytes
        # Graphics memory of a process that ends by exit() is given back in order.
        self._finish = weakref.finalize(self, Communicator.close, self._comm)
        self._finish.atexit = not explicitly_destroy

    @allocates
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
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token to each rank that holds an expert of it.

        Args:
            x: bfloat16 ``[n_tokens, hidden]``, rows of whole 16 bytes; or a pair of
                float8_e4m3fn and scales ``[n_tokens, n]`` of 4 bytes, as they travel.
            topk_idx: int64 ``[n_tokens, top_k]``, in ``[-1, num_experts)``; -1: none.
                None with ``handle``.
            topk_weights: float32 ``[n_tokens, top_k]``, to be sent with the tokens.
            cumulative_local_expert_recv_stats: int32 ``[n_local]``; counts are added.
            num_experts: Experts of the group, a multiple of its ranks.
            num_max_tokens_per_rank: The most tokens of any rank; None: the
                constructor's.
            expert_alignment: What counts are rounded up to, and where expanded rows of
                an expert begin; None: 1.
            num_sms: Reported as ``handle.num_sms``.
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

        Returns:
            Rows ``[n_rows, hidden]``, or the pair; plain: their expert ids, local or
            -1, int64 ``[n_rows, top_k]``; their weights ``[n_rows, top_k]``, expanded
            ``[n_rows]``, None if none were sent; the handle; the event. Without the
            host's wait there are as many rows as there can be, and those that nobody
            sent are undefined.
        """
        comm = self._comm
        comm.raise_failure()
        self._check_device()
        events = previous_event, previous_event_before_epilogue
        x, scales = checked_x(comm, x)
        row_bytes = bytes_of_row(comm, x, None)
        n_scales = scales_of_row(comm, scales, x)
        is_new = handle is None
        if is_new:
            if isinstance(topk_idx, torch.Tensor):
                topk_idx = topk_idx.contiguous()
            given = topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment
            handle = self._new_handle(
                len(x), *given, do_expand, num_sms, do_handle_copy
            )
            is_synced = do_cpu_sync is None or bool(do_cpu_sync)
        else:
            if topk_idx is not None:
                refuse("topk_idx", "is that of the handle; leave it out")
            if do_cpu_sync:
                refuse("do_cpu_sync", "is not for a handle: its sizes are known")
            is_synced = False
            check_same(handle, do_expand, num_experts, num_max_tokens_per_rank)
        routing = checked_handle(comm, handle)
        if len(x) != routing.n_tokens:
            refuse("x", f"has {len(x)} rows, the handle has {routing.n_tokens}")
        if topk_weights is not None:
            shape = (routing.n_tokens, routing.top_k)
            comm.check_tensor("topk_weights", topk_weights, torch.float32, shape, True)
            topk_weights = topk_weights.contiguous()
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            shape = (routing.n_experts // comm.n_ranks,)
            name = "cumulative_local_expert_recv_stats"
            comm.check_tensor(name, stats, torch.int32, shape)
        if is_synced:
            _wait_for(*events)
            what = f"rows of {row_bytes} bytes, {n_scales} scales"
            handle = with_sizes(comm, handle, topk_idx, what)
            routing = handle._routing

        to = outputs(routing, x, scales, topk_weights, use_tma_aligned_col_major_sf)
        if do_zero_padding and handle.do_expand:
            to = zeroed(to)
        # The sums that come back are of as many elements, in bfloat16.
        settings = routing.settings(
            row_bytes, n_scales, "bfloat16", x.shape[1], self._partial(routing)
        )
        (channel,) = sums.open_channel(comm, settings)

        def work() -> None:
            sent = sums.joined(x, scales)
            sums.dispatch(channel, routing, sent, topk_weights, to, topk_idx)
            if stats is not None:
                stats.add_(handle.num_unaligned_recv_tokens_per_expert)

        tensors = (x, scales, topk_idx, topk_weights, to.rows, to.scales, to.weights)
        tensors += (to.local_ids, stats, *routing.tensors())
        event = self._run(work, tensors, async_with_compute_stream, events)
        rows: Any = to.rows.view(x.dtype)
        if scales is not None:
            rows = (rows, to.scales.view(scales.dtype))
        return rows, to.local_ids, to.weights, handle, event

    @allocates
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
            num_sms: Ignored, as ``num_qps``.
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
        comm = self._comm
        self._check_device()
        events = previous_event, previous_event_before_epilogue
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
            if not self.allow_multiple_reduction and handle.do_expand:
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
        channel, *back = sums.open_channel(comm, *wanted)

        def work() -> None:
            sums.combine(channel, routing, x, y, biases)
            if back:
                weights.copy_(sums.combine_weights(back[0], routing, topk_weights))

        tensors = (x, y, topk_weights, weights, *biases, *routing.tensors())
        event = self._run(work, tensors, async_with_compute_stream, events)
        return y, weights, event

    # ------------------------------------------------------------------- inside

    def _check_device(self) -> None:
        comm = self._comm
        if comm.is_gpu and torch._C._cuda_getDevice() != comm.index:
            refuse("the current GPU", f"is not that of this buffer, {comm.device}")

    def _partial(self, routing: Routing) -> str:
        """Returns what sums are on their way; one row is what it is."""
        is_rounded = self.allow_multiple_reduction or routing.rows == PLAIN
        return "bfloat16" if is_rounded else "float32"

    def _run(
        self,
        work: Callable[[], None],
        tensors: tuple[torch.Tensor | None, ...],
        is_async: bool,
        events: tuple[Any, Any],
    ) -> EventOverlap:
        """Does work as asked; the event of asynchronous work is there on CPU, too."""
        first, later = events
        check_event(first)
        _wait_for(later)
        event = self._comm.streams.run(work, tensors, is_async, first)
        if is_async and event.event is None:
            event = EventOverlap(EventHandle())
        return event

    def _new_handle(
        self,
        n_tokens: int,
        topk_idx: torch.Tensor | None,
        n_experts: int | None,
        most: int | None,
        alignment: int | None,
        do_expand: bool,
        num_sms: int,
        copies: bool,
    ) -> EPHandle:
        """Checks where tokens go; the handle has places for as many as there can be."""
        comm = self._comm
        if topk_idx is None or n_experts is None:
            refuse("dispatch", "needs a handle, or topk_idx and num_experts")
        n_experts = comm.check_experts(
            n_experts, MAX_GPU_PAIRS if comm.is_gpu else MAX_OF_ENTRY
        )
        comm.check_tensor("topk_idx", topk_idx, torch.int64, (n_tokens, None))
        top_k = topk_idx.shape[1]
        if not 1 <= top_k <= MAX_TOP_K:
            refuse("topk_idx", f"has {top_k} columns; it must have 1 to {MAX_TOP_K}")
        if not do_expand and comm.n_ranks > MAX_TOP_K:
            what = f"is for at most {MAX_TOP_K} ranks, not {comm.n_ranks}"
            refuse("do_expand=False", f"{what}; pass do_expand=True")
        if most is None:
            most = self.num_max_tokens_per_rank
            if most == 0:
                refuse(MOST, "is not given, neither here nor to the constructor")
        most = checked_int(f"max_ep: {MOST}", most, 1, MAX_OF_ENTRY)
        alignment = 1 if alignment is None else alignment
        alignment = checked_int("max_ep: expert_alignment", alignment)
        if n_tokens > most:
            refuse("x", f"has {n_tokens} rows, {MOST}={most}; raise that on all ranks")
        check_ids(comm, topk_idx, n_experts)
        self._cap = max(self._cap, memory_for(most))
        rows = EXPANDED if do_expand else PLAIN
        n_local = n_experts // comm.n_ranks
        n_rows = n_worst_rows(rows, comm.n_ranks, n_local, most, top_k, alignment)
        ids = torch.empty_like(topk_idx) if copies else topk_idx
        sizes = n_experts, top_k, alignment, n_tokens, n_rows, self._cap
        num_sms = checked_int("max_ep: num_sms", num_sms, 0) or _NUM_SMS
        return EPHandle(Routing(comm, rows, *sizes, ids), most, num_sms)

    # ----------------------------------------------------------- around the calls

    def destroy(self) -> None:
        """Frees the memory. Calls after it raise."""
        self._finish()

    def check(self) -> None:
        """Waits for this rank's device, and raises if a launch has failed."""
        self._comm.check()

    def who_waits(self) -> Waits:
        """Says whom this rank waits for, for another thread, while a call hangs."""
        return self._comm.who_waits()

    def reset(self) -> None:
        """Makes the memory usable again after an error; all ranks call it."""
        comm = self._comm
        if comm.has_ended:
            comm.raise_failure()
        comm.streams.synchronize()  # who is here writes to no rank any more
        names = [settings.name() for settings in comm.channels]
        all_ = self._gather((comm.board.n_exchanges, self._cap, names))
        self._cap = max(cap for _, cap, _ in all_)
        opened = set(names).intersection(*(theirs for *_, theirs in all_))
        comm.reset(max(n for n, *_ in all_), opened)
        self._gather(None)

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

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """Returns the stream of asynchronous work; None on CPU."""
        return self._comm.streams.comm

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """Returns a number to pass on; kernels have a block on each multiprocessor."""
        return _NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: ranks of a host have no queue pairs."""
        return 0

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns hosts, and ranks of each."""
        return get_physical_domain_size(self.group)

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
        return n_bytes(dist.get_world_size(group), most, hidden)


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
    _GATHER: "create_agrs_session destroy_agrs_session agrs_set_config all_gather "
    "agrs_get_inplace_tensor get_agrs_buffer_size_hint",
}.items():
    for _name in _names.split():
        setattr(ElasticBuffer, _name, staticmethod(_refusing(_name, _instead)))


def _wait_for(*events: Any) -> None:
    for event in events:
        check_event(event)
        if event is not None:
            event.current_stream_wait()
