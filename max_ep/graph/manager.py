# SPDX-License-Identifier: Apache-2.0
"""EPBatchManager: EP ops of one graph, in an order that can run.

Each method checks the order (``OpOrder``), calls ``builders.py``, and keeps what later
ops need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorType, TensorValue, ops

from ..formats import PLAIN_DTYPES
from . import builders
from .buffers import COMBINE, DISPATCH, GraphBuffers
from .checks import OpOrder, check_all_ranks, check_value
from .ops import Tokens, call_op, check_buffers, n_tokens_of, start_together
from .routing import balance_ids, own_ids


class EPBatchManager(GraphBuffers):
    """Builds the dispatch and combine ops of a graph.

    The interface of ``max.nn.comm.ep.EPBatchManager``: declare
    :meth:`input_types` as the graph's last inputs, hand their values to
    :meth:`fetch_buffers`, then dispatch and combine. All EP ops of a graph on
    CPU run in the order in which they are built. A wrong dtype raises a
    ``TypeError``; a wrong shape, device or order of calls a ``ValueError``.
    """

    def _start(self) -> None:
        """Forgets what was built before: a new graph begins."""
        n, in_turn = self.config.n_gpus_per_node, self.config.runs_ranks_in_turn
        self._order = [OpOrder("dispatch", n, in_turn), OpOrder("combine", n, in_turn)]
        self._src_info: dict[int, TensorValue] = {}
        self._expert_rows: dict[int, TensorValue] = {}
        self._num_tokens: dict[int, Dim] = {}

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

        ``device_id`` is the local rank, ``[0, n_gpus_per_node)``; the others are those
        of :func:`call_ep_dispatch_async`. With ``combine_mode="rows"``
        ``router_weight`` is None: :meth:`ep_combine_wait` takes it.
        """
        tokens = input_tokens, topk_ids, input_scales, router_weight
        self._send("dispatch_async", device_id, *tokens)

    def ep_dispatch_wait(self, device_id: int) -> tuple[TensorValue, ...]:
        """Completes receiving.

        Returns what :func:`call_ep_dispatch_wait` does, packed rows without
        ``src_info``, but with ``expert_usage_stats`` ``[2]`` uint32 on the host: upper
        bounds of the rows of one expert and of the experts with rows.
        """
        counter = self._counter(device_id)
        self._check_receive("ep_dispatch_wait", device_id)
        self._order[DISPATCH].wait(device_id)
        where = self._pointers(DISPATCH, device_id)[1:]
        results = builders.call_ep_dispatch_wait(counter, *where, self.config)
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
        self._check_receive("ep_dispatch", device_id)
        tokens = input_tokens, topk_ids, input_scales, router_weight
        results = self._send("dispatch", device_id, *tokens)
        self._order[DISPATCH].wait(device_id)
        return self._keep_src_info(device_id, results)

    def _send(
        self,
        op: str,
        device_id: int,
        tokens: Tokens,
        ids: TensorValue,
        scales: TensorValue | None,
        weights: TensorValue | None,
    ) -> tuple[TensorValue, ...]:
        """Adds an op that sends tokens, with the choices of a rank's own launch."""
        config = self.config
        if config.use_allreduce and ids.dtype == DType.int32:
            n_local = config.n_local_experts
            first = device_id * n_local
            ids = own_ids(ids, first, n_local, config.n_experts)
            if scales is not None and scales.shape[0] == config.n_experts:
                scales = scales[first : first + n_local]
        counter, pointers = (
            self._counter(device_id),
            self._pointers(DISPATCH, device_id),
        )
        given = tokens, ids, scales, weights
        results = builders.dispatch(op, config, counter, pointers, given)
        self._order[DISPATCH].send(device_id)
        self._num_tokens[device_id] = n_tokens_of(tokens)
        return results

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
        none = [None] * len(device_ids)
        more = input_scales or none, router_weights or none
        given = list(zip(input_tokens, topk_ids, device_ids, *more))
        if not self.config.runs_ranks_in_turn:
            counters = list(map(self._counter, device_ids))
            lists = input_tokens, topk_ids, router_weights
            start_together(self.config, counters, *lists)
            return [self.ep_dispatch(*of_rank) for of_rank in given]
        for of_rank in given:
            self.ep_dispatch_async(*of_rank)
        return [self.ep_dispatch_wait(device_id) for device_id in device_ids]

    def ep_balance_ids(
        self, topk_ids: TensorValue, device_id: int, layer: int | TensorValue
    ) -> TensorValue:
        """Replaces a rank's logical experts by physical ones; see ``balance_ids``."""
        return balance_ids(topk_ids, self.eplb_replicas(device_id, layer))

    # ------------------------------------------------------------------ statistics

    def ep_watch(self, phase: str, device_id: int) -> TensorValue:
        """Measures how long a rank waits for each peer; changes nothing.

        It stands between *async* and *wait* of ``phase``, ``"dispatch"`` or
        ``"combine"``. Returns ``[n_ranks]`` int64: nanoseconds until the peer's data
        was there, -1 if that took ``EPConfig.timeout_s`` (docs/statistics.md).
        """
        if phase not in ("dispatch", "combine"):
            raise ValueError(f"phase={phase!r}; there are 'dispatch' and 'combine'")
        config, is_combine = self.config, phase == "combine"
        group = COMBINE if is_combine else DISPATCH
        counter = self._counter(device_id)
        self._order[group].check_wait(device_id, f"ep_watch({phase!r})")
        if config.masks:
            raise ValueError(
                "ep_watch with on_timeout='mask': a rank that watches gives no "
                "heartbeat, and its peers would mask it; watch with on_timeout='raise'"
            )
        if config.target == "gpu" and config.max_output_rows is not None:
            raise ValueError(
                "ep_watch with max_output_rows on GPUs: it would wait for rows that a "
                "peer has dropped; leave one of them out"
            )
        if config.relays:
            raise ValueError(
                "ep_watch with hierarchical=True over several hosts: a rank gets most "
                "through relays, so times would be of others; leave one of them out"
            )
        where = self._pointers(group, device_id)[1:]
        values = check_buffers(config, counter, *where)
        types = [TensorType(DType.int64, [config.exchange_ranks], counter.device)]
        (waits_ns,) = call_op(
            "watch", config, counter, values, types, is_combine=is_combine
        )
        return waits_ns

    def ep_received(self, dispatched: tuple[TensorValue, ...]) -> TensorValue:
        """Counts the rows that each expert of a rank got.

        ``dispatched`` is what a dispatch of this manager returned for the rank. The
        result is ``[n_local_experts]`` int32, on the rank's device.
        """
        config = self.config
        place = 1 + config.is_quantized + config.nvfp4_dyn_global_scales
        is_one_rank = isinstance(dispatched, (tuple, list)) and len(dispatched) > place
        if not is_one_rank or not isinstance(dispatched[place], TensorValue):
            raise TypeError(
                f"dispatched is a {type(dispatched).__name__}, it must be the tuple "
                "of a rank: what ep_dispatch_wait or ep_dispatch returned, or one of "
                "those of ep_dispatch_all"
            )
        counts = dispatched[place]
        if config.is_padded:
            return counts
        offsets = ops.cast(counts, DType.int32)
        rows = offsets[1:] - offsets[:-1]
        # The shared expert's group, if any, comes first; experts stand in order.
        return rows[1:] if config.fused_shared_expert else rows

    def _check_receive(self, op: str, device_id: int) -> None:
        """Refuses to forget where the rows of a combine under way are."""
        if self.config.combines_sums and self._order[COMBINE].is_under_way(device_id):
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
        """Starts sending expert rows back; see :func:`call_ep_combine_async`."""
        where = self._where_combined(device_id)
        builders.call_ep_combine_async(input_tokens, *where, self.config)
        self._order[COMBINE].send(device_id)
        self._expert_rows[device_id] = input_tokens

    def ep_combine_wait(
        self, router_weight: TensorValue | None, device_id: int
    ) -> TensorValue:
        """Completes combine; see :func:`call_ep_combine_wait`."""
        where = self._counter(device_id), *self._pointers(COMBINE, device_id)[1:]
        self._order[COMBINE].wait(device_id)
        # Rows that were not sent stand there.
        rows, n_tokens = self._expert_rows[device_id], self._num_tokens[device_id]
        given = n_tokens, router_weight, rows
        return builders.call_ep_combine_wait(*where, self.config, *given)

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
        where = self._where_combined(device_id)
        more = self._num_tokens[device_id], router_weight
        result = builders.call_ep_combine(input_tokens, *where, self.config, *more)
        self._order[COMBINE].send(device_id)
        self._order[COMBINE].wait(device_id)
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
        weights = router_weights or [None] * len(device_ids)
        if not self.config.runs_ranks_in_turn:
            counters = list(map(self._counter, device_ids))
            start_together(self.config, counters, input_tokens, router_weights)
            return [*map(self.ep_combine, input_tokens, weights, device_ids)]
        for rows, device_id in zip(input_tokens, device_ids):
            self.ep_combine_async(rows, device_id)
        return [*map(self.ep_combine_wait, weights, device_ids)]

    def ep_degraded(
        self, topk_ids: TensorValue, router_weight: TensorValue, device_id: int
    ) -> tuple[TensorValue, TensorValue]:
        """Flags the tokens whose result lacks an expert because its rank is masked.

        It belongs behind the combine of these tokens, before the next dispatch
        (docs/fault_tolerance.md). ``topk_ids`` are those that dispatch took,
        ``router_weight`` their weights, float32 or bfloat16.

        Returns:
            ``degraded`` ``[n_tokens]`` bool: whether a choice of the token is on a
            masked rank; ``live_share`` ``[n_tokens]`` float32: the part of the token's
            weights that its other choices have.
        """
        if self.config.on_timeout != "mask":
            raise ValueError("ep_degraded needs EPConfig.on_timeout='mask'")
        device = self._check_choices(topk_ids, device_id)
        shape = [None, self.config.top_k]
        check_value(router_weight, "router_weights", PLAIN_DTYPES, shape, device)
        values = [topk_ids, ops.cast(router_weight, DType.float32)]
        n_tokens = topk_ids.shape[0]
        types = [TensorType(t, [n_tokens], device) for t in (DType.bool, DType.float32)]
        counter = self._counter(device_id)
        return tuple(call_op("degraded", self.config, counter, values, types))

    def ep_dropped(
        self, topk_ids: TensorValue, device_id: int
    ) -> tuple[TensorValue, TensorValue]:
        """Counts what did not fit into ``EPConfig.max_output_rows``.

        It belongs behind the combine of these tokens, before the next dispatch;
        ``topk_ids`` are those that dispatch took.

        Returns:
            ``of_tokens`` ``[n_tokens]`` int32: choices of each token whose row is not
            in its result; ``of_experts`` ``[n_local_experts]`` int32: rows of each that
            this rank dropped.
        """
        if self.config.max_output_rows is None:
            raise ValueError("ep_dropped needs EPConfig.max_output_rows")
        device = self._check_choices(topk_ids, device_id)
        numbers = topk_ids.shape[0], self.config.n_local_experts
        types = [TensorType(DType.int32, [n], device) for n in numbers]
        counter = self._counter(device_id)
        return tuple(call_op("dropped", self.config, counter, [topk_ids], types))

    def _check_choices(self, topk_ids: TensorValue, device_id: int) -> DeviceRef:
        device = self._counter(device_id).device
        shape = [None, self.config.top_k]
        check_value(topk_ids, "topk_ids", DType.int32, shape, device)
        return device

    def _where_combined(self, device_id: int) -> tuple:
        """Returns the last dispatch's ``src_info``, counters and addresses."""
        counter = self._counter(device_id)
        if device_id not in self._src_info:
            raise ValueError(
                f"combine on device {device_id} without a dispatch: it sends back the "
                "rows of ep_dispatch_wait, ep_dispatch or ep_dispatch_all; call one of "
                "them first"
            )
        return self._src_info[device_id], counter, *self._pointers(COMBINE, device_id)
