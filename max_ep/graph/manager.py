# SPDX-License-Identifier: Apache-2.0
"""EPBatchManager: EP ops of one graph, in an order that can run.

Each method checks the order (``order.py``), calls ``builders.py``, and keeps what later
ops need. One class does dispatch and combine, because combine needs values of dispatch,
and MAX has one class for both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    TensorType,
    TensorValue,
    Value,
    ops,
)

from ..config import EPConfig
from ..limits import NUM_GROUPS
from .buffers import (
    BoundBuffers,
    EPCommBuffers,
    buffers_of_inputs,
    input_tree,
    input_types,
)
from .builders import (
    call_distributed_ep_combine,
    call_distributed_ep_dispatch,
    call_ep_combine,
    call_ep_combine_async,
    call_ep_combine_wait,
    call_ep_degraded,
    call_ep_dispatch,
    call_ep_dispatch_async,
    call_ep_dispatch_wait,
    call_ep_dropped,
    call_ep_watch,
)
from .checks import Tokens, check_all_ranks, check_phase, n_tokens_of, refuse_if_in_turn
from .order import OpOrder
from .routing import Replicas, balance_ids, own_ids

_DISPATCH, _COMBINE = range(NUM_GROUPS)


class EPBatchManager:
    """Builds the dispatch and combine ops of a graph.

    The interface of ``max.nn.comm.ep.EPBatchManager``: declare
    :meth:`input_types` as the graph's last inputs, hand their values to
    :meth:`fetch_buffers`, then dispatch and combine. All EP ops of a graph on
    CPU run in the order in which they are built.
    """

    def __init__(self, config: EPConfig) -> None:
        """Makes the manager of a group; it has no buffers yet."""
        self.config = config
        self._buffers: BoundBuffers | None = None
        self._start()

    def _start(self) -> None:
        """Forgets what was built before: a new graph begins."""
        n, in_turn = self.config.n_gpus_per_node, self.config.runs_ranks_in_turn
        self._order = [OpOrder("dispatch", n, in_turn), OpOrder("combine", n, in_turn)]
        self._src_info: dict[int, TensorValue] = {}
        self._expert_rows: dict[int, TensorValue] = {}
        self._num_tokens: dict[int, Dim] = {}

    # ------------------------------------------------------------------- buffers

    def input_tree(self) -> OrderedDict[str, tuple[TensorType | BufferType, ...]]:
        """Returns the EP inputs of the graph by name, in their order.

        ``atomic_counters``: ``[NUM_GROUPS][n_gpus_per_node]`` buffers, flat;
        ``send_buf_ptrs``, ``recv_buf_ptrs``, ``recv_count_ptrs``: one host tensor
        ``[n_ranks]`` a group; with ``eplb_enabled`` ``eplb_log2phy`` and
        ``eplb_logcnt``, one buffer a local rank.
        """
        return input_tree(self.config)

    def input_types(self) -> list[TensorType | BufferType]:
        """Returns the types of the EP inputs, to be declared by the graph."""
        return input_types(self.config)

    def comm_buffers(self, input_vals: Iterable[Value[Any]]) -> EPCommBuffers:
        """Takes the buffers as :meth:`fetch_buffers`; returns them as one value."""
        buffers = buffers_of_inputs(self.config, input_vals)
        self.bind_comm_buffers(buffers)
        return buffers

    def fetch_buffers(self, _input_vals: Iterable[Value[Any]]) -> None:
        """Takes the graph's inputs that :meth:`input_types` declares, in order."""
        self.comm_buffers(_input_vals)

    def bind_comm_buffers(self, comm: EPCommBuffers) -> None:
        """Uses buffers of :meth:`comm_buffers`, as values of the current graph."""
        self._buffers = BoundBuffers(comm)
        self._start()

    def _fetched(self) -> EPCommBuffers:
        if self._buffers is None:
            raise ValueError(
                "EPBatchManager has no buffers yet: declare input_types() as "
                "inputs of the graph and pass their values to fetch_buffers()"
            )
        return self._buffers.values()

    @property
    def atomic_counters(self) -> list[list[BufferValue]]:
        """Counters, ``[NUM_GROUPS][n_gpus_per_node]``."""
        return self._fetched().atomic_counters

    @property
    def send_buf_ptrs(self) -> list[TensorValue]:
        """Send buffers, one tensor a group."""
        return self._fetched().send_buf_ptrs

    @property
    def recv_buf_ptrs(self) -> list[TensorValue]:
        """Receive buffers, one tensor a group."""
        return self._fetched().recv_buf_ptrs

    @property
    def recv_count_ptrs(self) -> list[TensorValue]:
        """Counts, one tensor a group."""
        return self._fetched().recv_count_ptrs

    def eplb_replicas(self, device_id: int, layer: int | TensorValue) -> Replicas:
        """Returns the placement of an MoE layer's experts, with balanced experts.

        For :meth:`ep_balance_ids`, ``softmax_top_k`` and ``balance_ids``.
        """
        comm = self._fetched()
        if comm.eplb_log2phy is None or comm.eplb_logcnt is None:
            raise ValueError(
                "there is no placement of experts: set EPConfig.eplb_enabled=True"
            )
        self.config.device(device_id)  # raises if there is no such rank
        return Replicas(
            comm.eplb_log2phy[device_id], comm.eplb_logcnt[device_id], layer
        )

    def ep_balance_ids(
        self, topk_ids: TensorValue, device_id: int, layer: int | TensorValue
    ) -> TensorValue:
        """Replaces a rank's logical experts by physical ones; see ``balance_ids``."""
        return balance_ids(topk_ids, self.eplb_replicas(device_id, layer))

    def _counter(self, device_id: int) -> BufferValue:
        self.config.device(device_id)  # raises if there is no such rank
        # As in MAX, both phases of a rank share the counters of group 0:
        # combine needs what dispatch recorded there.
        return self.atomic_counters[_DISPATCH][device_id]

    def _pointers(
        self, group: int, device_id: int | None = None
    ) -> tuple[TensorValue, ...]:
        comm = self._fetched()
        kinds = comm.send_buf_ptrs, comm.recv_buf_ptrs, comm.recv_count_ptrs
        of_group = tuple(of_kind[group] for of_kind in kinds)
        if device_id is None or not self.config.use_allreduce:
            return of_group
        return tuple(pointers[device_id : device_id + 1] for pointers in of_group)

    def _of_own_experts(
        self, device_id: int, topk_ids: TensorValue, input_scales: TensorValue | None
    ) -> tuple[TensorValue, TensorValue | None]:
        """Returns ids and input scales as the launch of a rank takes them."""
        config = self.config
        if not config.use_allreduce or topk_ids.dtype != DType.int32:
            return topk_ids, input_scales
        first, n_local = device_id * config.n_local_experts, config.n_local_experts
        if input_scales is not None and input_scales.shape[0] == config.n_experts:
            input_scales = input_scales[first : first + n_local]
        return own_ids(topk_ids, first, n_local, config.n_experts), input_scales

    # ------------------------------------------------------------------ dispatch

    def ep_dispatch_async(
        self,
        input_tokens: Tokens,
        topk_ids: TensorValue,
        device_id: int,
        input_scales: TensorValue | None = None,
        router_weight: TensorValue | None = None,
    ) -> None:
        """Starts sending a rank's tokens to their experts.

        Args:
            input_tokens: ``[n_tokens, hidden_size]`` of ``dispatch_dtype``; see
                :func:`call_ep_dispatch_async`.
            topk_ids: ``[n_tokens, top_k]`` int32 in ``[-1, n_experts)``.
            device_id: The local rank, ``[0, n_gpus_per_node)``.
            input_scales: ``[1]`` or ``[n_experts]`` float32 factors, or None.
            router_weight: With ``combine_mode="sums"``, ``[n_tokens, top_k]``
                float32, or bfloat16, which is widened. Otherwise None:
                :meth:`ep_combine_wait` takes it.
        """
        topk_ids, input_scales = self._of_own_experts(device_id, topk_ids, input_scales)
        call_ep_dispatch_async(
            input_tokens,
            topk_ids,
            self._counter(device_id),
            *self._pointers(_DISPATCH, device_id),
            self.config,
            input_scales,
            router_weight,
        )
        self._order[_DISPATCH].send(device_id)
        self._num_tokens[device_id] = n_tokens_of(input_tokens)

    def ep_dispatch_wait(self, device_id: int) -> tuple[TensorValue, ...]:
        """Completes receiving.

        Returns:
            ``output_tokens``, for FP8 ``output_scales``, ``row_offsets``,
            ``expert_ids`` (see :func:`call_ep_dispatch_wait`), and
            ``expert_usage_stats`` ``[2]`` uint32 on the host: upper bounds of
            the rows of one expert and of the experts with rows. With
            ``output_layout="padded"``: ``output_tokens``, for FP8
            ``output_scales``, ``recv_counts``, ``src_info``, ``recv_ranges``.
        """
        counter = self._counter(device_id)
        self._check_receive("ep_dispatch_wait", device_id)
        self._order[_DISPATCH].wait(device_id)
        results = call_ep_dispatch_wait(
            counter, *self._pointers(_DISPATCH, device_id)[1:], self.config
        )
        return self._keep_src_info(device_id, results)

    def ep_dispatch(
        self,
        input_tokens: Tokens,
        topk_ids: TensorValue,
        device_id: int,
        input_scales: TensorValue | None = None,
        router_weight: TensorValue | None = None,
    ) -> tuple[TensorValue, ...]:
        """Dispatches in one launch; all ranks must run at the same time.

        Args and results are those of :meth:`ep_dispatch_async` and
        :meth:`ep_dispatch_wait`.
        """
        refuse_if_in_turn(
            self.config,
            "ep_dispatch",
            "ep_dispatch_all, or ep_dispatch_async and ep_dispatch_wait",
        )
        self._check_receive("ep_dispatch", device_id)
        topk_ids, input_scales = self._of_own_experts(device_id, topk_ids, input_scales)
        results = call_ep_dispatch(
            input_tokens,
            topk_ids,
            self._counter(device_id),
            *self._pointers(_DISPATCH, device_id),
            self.config,
            input_scales,
            router_weight,
        )
        self._order[_DISPATCH].send_and_wait([device_id])
        self._num_tokens[device_id] = n_tokens_of(input_tokens)
        return self._keep_src_info(device_id, results)

    def ep_dispatch_all(
        self,
        input_tokens: Sequence[Tokens],
        topk_ids: Sequence[TensorValue],
        device_ids: list[int],
        input_scales: Sequence[TensorValue] | None = None,
        router_weights: Sequence[TensorValue] | None = None,
    ) -> list[tuple[TensorValue, ...]]:
        """Dispatches on all local ranks, which ``device_ids`` names.

        Lists have the values of :meth:`ep_dispatch`, one a rank.
        """
        check_all_ranks(
            self.config,
            device_ids,
            input_tokens=input_tokens,
            topk_ids=topk_ids,
            input_scales=input_scales,
            router_weights=router_weights,
        )
        if self.config.use_allreduce:
            none = [None] * len(device_ids)
            return [
                self.ep_dispatch(*of_rank)
                for of_rank in zip(
                    input_tokens,
                    topk_ids,
                    device_ids,
                    input_scales or none,
                    router_weights or none,
                )
            ]
        for device_id in device_ids:
            self._check_receive("ep_dispatch_all", device_id)
        results = call_distributed_ep_dispatch(
            input_tokens,
            topk_ids,
            [self._counter(i) for i in device_ids],
            *self._pointers(_DISPATCH),
            self.config,
            input_scales,
            router_weights,
        )
        self._order[_DISPATCH].send_and_wait(device_ids)
        for device_id, tokens in zip(device_ids, input_tokens):
            self._num_tokens[device_id] = n_tokens_of(tokens)
        return [self._keep_src_info(i, r) for i, r in zip(device_ids, results)]

    # ------------------------------------------------------------------ statistics

    def ep_watch(self, phase: str, device_id: int) -> TensorValue:
        """Measures how long a rank waits for each peer, before the wait.

        The async op of ``phase`` (``"dispatch"`` or ``"combine"``) comes before it, and
        the wait behind. Fused forms have no wait to be watched. Returns ``[n_ranks]``
        int64 nanoseconds, see :func:`call_ep_watch`.
        """
        check_phase(phase)
        group = _COMBINE if phase == "combine" else _DISPATCH
        counter = self._counter(device_id)
        self._order[group].check_wait(device_id, f"ep_watch({phase!r})")
        return call_ep_watch(
            phase, counter, *self._pointers(group, device_id)[1:], self.config
        )

    def ep_received(self, dispatched: tuple[TensorValue, ...]) -> TensorValue:
        """Counts the rows that each expert of a rank got.

        ``dispatched`` is what a dispatch of this manager returned for the rank. The
        result is ``[n_local_experts]`` int32, on the rank's device.
        """
        is_one_rank = isinstance(dispatched, (tuple, list))
        if not is_one_rank or not isinstance(dispatched[0], TensorValue):
            raise TypeError(
                f"dispatched is a {type(dispatched).__name__}, it must be the tuple "
                "of a rank: what ep_dispatch_wait or ep_dispatch returned, or one of "
                "those of ep_dispatch_all"
            )
        config = self.config
        counts = dispatched[1 + config.is_quantized + config.nvfp4_dyn_global_scales]
        if self.config.is_padded:
            return counts
        offsets = ops.cast(counts, DType.int32)
        rows = offsets[1:] - offsets[:-1]
        # The shared expert's group, if any, comes first; experts stand in order.
        return rows[1:] if self.config.fused_shared_expert else rows

    def _check_receive(self, op: str, device_id: int) -> None:
        """Refuses to forget where the rows of a combine under way are."""
        if self.config.combines_sums and self._order[_COMBINE].is_under_way(device_id):
            raise ValueError(
                f"{op} on device {device_id} between ep_combine_async and "
                "ep_combine_wait: combine_mode='sums' finds the rank's own rows by its "
                "last dispatch; call ep_combine_wait first, or use a second "
                "EPBatchManager with buffers of its own"
            )

    def _keep_src_info(
        self, device_id: int, results: tuple[TensorValue, ...]
    ) -> tuple[TensorValue, ...]:
        """Keeps ``src_info`` for combine; returns what a dispatch of MAX's returns."""
        config = self.config
        if config.is_padded:
            self._src_info[device_id] = results[-2]
            return results
        *outputs, self._src_info[device_id] = results
        n_groups = config.n_local_experts + int(config.fused_shared_expert)
        stats = np.array([config.expert_capacity, n_groups], np.uint32)
        return (*outputs, ops.constant(stats, DType.uint32, DeviceRef.CPU()))

    # ------------------------------------------------------------------- combine

    def ep_combine_async(self, input_tokens: TensorValue, device_id: int) -> None:
        """Starts sending expert rows back to their tokens' ranks.

        ``input_tokens`` are of the shape of ``output_tokens`` and of ``combine_dtype``,
        where the rank's last dispatch put them.
        """
        call_ep_combine_async(
            input_tokens,
            self._dispatched(device_id),
            self._counter(device_id),
            *self._pointers(_COMBINE, device_id),
            self.config,
        )
        self._order[_COMBINE].send(device_id)
        self._expert_rows[device_id] = input_tokens

    def ep_combine_wait(
        self, router_weight: TensorValue | None, device_id: int
    ) -> TensorValue:
        """Completes combine.

        ``router_weight`` is ``[n_tokens, top_k]`` float32, or bfloat16, which is
        widened; with ``combine_mode="sums"`` None, as dispatch took it. Returns
        ``[n_tokens, hidden_size]``, see :func:`call_ep_combine_wait`.
        """
        counter = self._counter(device_id)
        self._order[_COMBINE].wait(device_id)
        return call_ep_combine_wait(
            counter,
            *self._pointers(_COMBINE, device_id)[1:],
            self.config,
            self._num_tokens[device_id],
            router_weight,
            # Rows that were not sent stand there.
            self._expert_rows[device_id],
        )

    def ep_combine(
        self,
        input_tokens: TensorValue,
        router_weight: TensorValue | None,
        device_id: int,
        topk_ids: TensorValue | None = None,
    ) -> TensorValue:
        """Combines in one launch; all ranks must run at the same time.

        Args and result are those of :meth:`ep_combine_async` and
        :meth:`ep_combine_wait`; ``topk_ids`` is not read.
        """
        refuse_if_in_turn(
            self.config,
            "ep_combine",
            "ep_combine_all, or ep_combine_async and ep_combine_wait",
        )
        result = call_ep_combine(
            input_tokens,
            self._dispatched(device_id),
            self._counter(device_id),
            *self._pointers(_COMBINE, device_id),
            self.config,
            self._num_tokens[device_id],
            router_weight,
        )
        self._order[_COMBINE].send_and_wait([device_id])
        return result

    def ep_combine_all(
        self,
        input_tokens: Sequence[TensorValue],
        router_weights: Sequence[TensorValue] | None,
        device_ids: list[int],
    ) -> list[TensorValue]:
        """Combines on all local ranks, which ``device_ids`` names.

        Lists have the values of :meth:`ep_combine`, one a rank.
        """
        lists = {"input_tokens": input_tokens, "router_weights": router_weights}
        check_all_ranks(self.config, device_ids, **lists)
        if self.config.use_allreduce:
            weights = router_weights or [None] * len(device_ids)
            return [*map(self.ep_combine, input_tokens, weights, device_ids)]
        results = call_distributed_ep_combine(
            input_tokens,
            [self._dispatched(i) for i in device_ids],
            [self._counter(i) for i in device_ids],
            *self._pointers(_COMBINE),
            self.config,
            [self._num_tokens[i] for i in device_ids],
            router_weights,
        )
        self._order[_COMBINE].send_and_wait(device_ids)
        return results

    def ep_degraded(
        self, topk_ids: TensorValue, router_weight: TensorValue, device_id: int
    ) -> tuple[TensorValue, TensorValue]:
        """Flags tokens that lack an expert because its rank is masked.

        It belongs behind the rank's combine. Returns ``degraded`` ``[n_tokens]`` bool
        and ``live_share`` ``[n_tokens]`` float32, see :func:`call_ep_degraded`.
        """
        counter = self._counter(device_id)
        where = self._pointers(_COMBINE)[1:]
        return call_ep_degraded(counter, *where, self.config, topk_ids, router_weight)

    def ep_dropped(
        self, topk_ids: TensorValue, device_id: int
    ) -> tuple[TensorValue, TensorValue]:
        """Counts what did not fit into ``EPConfig.max_output_rows``.

        It belongs behind the rank's combine. Returns ``[n_tokens]`` int32, the choices
        of each token that its result lacks, and ``[n_local_experts]`` int32, the rows
        of each expert that this rank dropped; see :func:`call_ep_dropped`.
        """
        counter = self._counter(device_id)
        where = self._pointers(_COMBINE, device_id)[1:]
        return call_ep_dropped(counter, *where, self.config, topk_ids)

    def _dispatched(self, device_id: int) -> TensorValue:
        self._counter(device_id)  # raises if there are no buffers
        if device_id not in self._src_info:
            raise ValueError(
                f"combine on device {device_id} without a dispatch: it sends back the "
                "rows of ep_dispatch_wait, ep_dispatch or ep_dispatch_all; call one of "
                "them first"
            )
        return self._src_info[device_id]
