# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of max_ep and of MAX's EP: one code builds and runs both.

Experts are the identity. Quantized rows cannot be combined as they are: there every
expert of a rank returns one given row, the same for all tokens.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import numpy as np
import torch
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, Module, TensorType, TensorValue, ops

from .. import reference
from ..formats import BY_NAME
from ..memory.setup_graph import setup_graph
from ..plural import counted
from . import cases as _cases
from . import checks
from .cases import OURS, Case, Config
from .peer_graphs import (
    CHECKED_LAYERS,
    Data,
    GraphPeer,
    token_types,
    types,
)

WORK_SHAPE = [1024, 8192]
"""What other work is: one softmax over so many bfloat16, in each phase."""


def library(config: Config) -> ModuleType:
    """Returns the module of a peer."""
    name = "max_ep" if config.peer in OURS else "max.nn.comm.ep"
    return importlib.import_module(name)


def ep_config(config: Config) -> Any:
    """Returns the library's ``EPConfig``."""
    token_format = BY_NAME[config.dtype]
    fields: dict[str, Any] = dict(
        dispatch_dtype=token_format.dtype,
        combine_dtype=DType.bfloat16,
        hidden_size=config.shape.hidden_size,
        top_k=config.shape.top_k,
        n_experts=config.shape.n_experts,
        max_tokens_per_rank=config.max_tokens,
        n_gpus_per_node=config.n_ranks,
        n_nodes=1,
        node_id=0,
        dispatch_quant_config=token_format.make_quant_config(),
    )
    if config.peer in OURS:
        fields |= dict(target=config.target, timeout_s=5.0, **OURS[config.peer])
    return library(config).EPConfig(**fields)


def _given_types(config: Config) -> list[TensorType]:
    """Returns the types of quantized tokens: values of each rank, then scales."""
    ep = ep_config(config)
    values = types(config, ep.output_dtype, ["n_tokens", ep.row_columns])
    return values + types(config, ep.scales_dtype, ["n_tokens", ep.n_scales])


class Peer(GraphPeer):
    def graph(
        self, form: str, *, is_check: bool, module: Module | None = None
    ) -> Graph:
        """Builds a chain. It returns the last layer's sums, or of dispatch alone its
        rows of each expert; with ``is_check`` what the first dispatch returned."""
        config, n = self.config, self.config.n_ranks
        n_layers = CHECKED_LAYERS if is_check else config.n_layers
        manager = library(config).EPBatchManager(ep_config(config))
        inputs = token_types(config)
        n_choices = len(inputs) // n - 1
        if config.peer == "given":
            inputs[:n] = _given_types(config)
        if config.is_quantized:
            n_rows = ep_config(config).get_max_recv_tokens()
            rows = [n_rows, config.shape.hidden_size]
            inputs += types(config, DType.bfloat16, rows)
        if "work" in form:
            inputs += types(config, DType.bfloat16, WORK_SHAPE)
        name = f"{config.name}_{form}_l{n_layers}"
        declared = [*inputs, *manager.input_types()]
        with Graph(name, input_types=declared, module=module) as graph:
            values = [value.tensor for value in graph.inputs[: len(inputs)]]
            manager.fetch_buffers(graph.inputs[len(inputs) :])
            x, *rest = (values[i : i + n] for i in range(0, len(values), n))
            if config.peer == "given":  # values, scales
                x, rest = list(zip(x, rest[0])), rest[1:]
            choices, rest = rest[:n_choices], rest[n_choices:]
            layer = _Layer(manager, form, rest.pop() if "work" in form else [])
            kept: list[tuple[TensorValue, ...]] = []
            for i in range(n_layers):
                ids, weights = choices[2 * i : 2 * i + 2]
                there, back = (weights, None) if config.is_sums else (None, weights)
                outputs = layer.dispatch(x, ids, there)
                kept = kept or outputs
                if form != "dispatch":
                    rows = rest[0] if rest else [o[0] for o in outputs]
                    x = layer.combine(rows, back)
            if is_check:
                graph.output(*(value for o in kept for value in o[:-1]))
            elif form == "dispatch":
                graph.output(*map(manager.ep_received, outputs))
            else:
                graph.output(*x, *layer.work)
        return graph

    def set_up(self, session: InferenceSession) -> Any:
        comm = library(self.config).EPCommInitializer(ep_config(self.config))
        comm.ep_init(session)
        return comm

    def compile_set_up(self, session: InferenceSession) -> None:
        """Compiles its graph. MAX's initializer needs memory: GPU hosts compile it."""
        if self.config.peer in OURS:
            session.load(setup_graph(ep_config(self.config)))

    def make_inputs(self, form: str, data: Data) -> list[list[Any]]:
        """And experts' rows; other work."""
        inputs = super().make_inputs(form, data)
        if self.config.peer == "given":
            inputs[:1] = self._given(data)
        if self.config.is_quantized:
            inputs.append(self._expert_rows)
        if "work" in form:
            work = torch.ones(WORK_SHAPE, dtype=torch.bfloat16)
            inputs.append([work] * self.config.n_ranks)
        return inputs

    def _given(self, data: Data) -> list[list[Buffer]]:
        """Quantizes the tokens of each rank: values, then scales."""
        quantize = BY_NAME[self.config.dtype].quantize
        config, given = ep_config(self.config), []
        for x in data.x:
            pair = quantize(reference.bfloat16_to_float32(x))
            dtypes = config.output_dtype, config.scales_dtype
            given += [
                Buffer.from_numpy(a).view(dtype, list(a.shape))
                for a, dtype in zip(pair, dtypes)
            ]
        return [given[::2], given[1::2]]

    @functools.cached_property
    def _expert_rows(self) -> list[Buffer]:
        """What experts return of quantized rows: one row a rank, as often as needed."""
        n_rows = ep_config(self.config).get_max_recv_tokens()
        made = []
        for rank, device in enumerate(self.devices):
            row = torch.from_numpy(_cases.expert_row(self.config.shape, rank))
            rows = row.bfloat16().expand(n_rows, -1).contiguous()
            made.append(Buffer.from_dlpack(rows).to(device))
            device.synchronize()  # the source is freed
        return made

    def check_layer(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares dispatched rows with the oracle."""
        config, n = self.config, self.config.n_ranks
        is_ours = config.peer in OURS
        per_rank = len(outputs) // n
        for rank in range(n):
            where = f"{case.name} rank {rank}"
            found = outputs[rank * per_rank : (rank + 1) * per_rank]
            rows, *scales, offsets, experts = (self.tensor(b, rank) for b in found)
            checks.check_dispatch(
                where,
                checks.Delivered(
                    config.dtype,
                    rows,
                    scales[0] if scales else None,
                    offsets,
                    experts,
                    config.peer == "packed",
                ),
                data.routes[rank],
                checks.stack_tokens(data.x, self.torch_device(rank)),
                exact=is_ours,
                # MAX lets each expert's FP8 rows begin at a multiple of four.
                filled_to=4 if config.is_quantized and not is_ours else 1,
            )

    def check_chain(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares a chain's result with what exact arithmetic gives."""
        config = self.config
        ids, weights = (of[config.n_layers - 1] for of in (data.ids, data.weights))
        if case.form == "dispatch":
            n_experts = config.shape.n_experts
            rows = np.bincount(np.concatenate(ids).ravel(), minlength=n_experts)
            for rank, got in enumerate(outputs):
                want = rows.reshape(config.n_ranks, -1)[rank]
                checks.check_same(
                    f"{case.name} rank {rank}", self.tensor(got, rank), want
                )
            return
        if not config.is_quantized:
            super().check_chain(case, data, outputs)
            return
        for rank in range(config.n_ranks):
            given = config.shape, config.n_ranks, ids[rank], weights[rank]
            want = checks.expert_sums(*given, self.torch_device(rank))
            where = f"{case.name} rank {rank}, {counted(config.n_layers, 'layer')}"
            checks.check_chain(where, self.tensor(outputs[rank], rank), want)


class _Layer:
    """Builds dispatch and combine in one of the forms, for all ranks."""

    def __init__(self, manager: Any, form: str, work: list[TensorValue]) -> None:
        self.manager = manager
        self.is_fused = form in ("fused", "fused_work", "dispatch")
        self.work = work
        """Each softmax takes the result of the one before, so all of them run."""

    def _work(self) -> None:
        self.work = [ops.softmax(value) for value in self.work]

    def dispatch(
        self,
        x: list[TensorValue],
        ids: list[TensorValue],
        weights: list[TensorValue] | None,
    ) -> list[tuple[TensorValue, ...]]:
        """Dispatches; ``weights``: those that go with the tokens."""
        ranks, manager = range(len(x)), self.manager
        more = [{"router_weight": w} for w in weights] if weights else [{}] * len(x)
        if self.is_fused:
            self._work()
            return [manager.ep_dispatch(x[i], ids[i], i, **more[i]) for i in ranks]
        for i in ranks:
            manager.ep_dispatch_async(x[i], ids[i], i, **more[i])
        self._work()
        return [manager.ep_dispatch_wait(i) for i in ranks]

    def combine(
        self, rows: list[TensorValue], weights: list[TensorValue] | None
    ) -> list[TensorValue]:
        """Combines; ``weights`` is None if dispatch has them."""
        ranks, manager = range(len(rows)), self.manager
        of = weights or [None] * len(rows)
        if self.is_fused:
            self._work()
            return [manager.ep_combine(rows[i], of[i], i) for i in ranks]
        for i in ranks:
            manager.ep_combine_async(rows[i], i)
        self._work()
        return [manager.ep_combine_wait(of[i], i) for i in ranks]
