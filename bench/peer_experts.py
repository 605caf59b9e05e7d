# SPDX-License-Identifier: Apache-2.0
"""Layers of experts of max_ep on one GPU: the peer ``experts``.

A timed graph is a chain of layers with the same weights and choices of their own. So
the weights that a layer reads are not those that the layer before left in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from max.driver import Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, TensorType, TensorValue

from max_ep import EPBatchManager
from max_ep.bench import cases, peer_ep
from max_ep.bench.cases import Case, Config
from max_ep.bench.checks import check_near, check_same, from_bits
from max_ep.bench.peer_graphs import GraphPeer, types
from max_ep.experts import (
    grouped_gate_up,
    grouped_matmul,
    grouped_swiglu,
    routed_swiglu,
)
from max_ep.graph.moe import through_experts

_ROUTED = ("gathered", "dispatched")
_CHECKED_ROWS = 4


class Data(NamedTuple):
    """One seed's inputs, on the host."""

    x: np.ndarray
    choices: list[list[np.ndarray]]
    """What each layer takes beside its rows and the weights."""


class Peer(GraphPeer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._group = peer_ep.Peer(replace(config, peer="sums"))
        self._results: dict[int, Any] = {}

    # ----------------------------------------------------------------------- graphs

    def graph(self, form: str, *, is_check: bool) -> Graph:
        """Builds a chain, or with ``is_check`` its first layer; it returns rows."""
        n_layers = 1 if is_check else self.config.n_layers
        manager = EPBatchManager(peer_ep.ep_config(self._group.config))
        inputs = self._types(form)
        of_group = manager.input_types() if form == "dispatched" else []
        name = f"{self.config.name}_{form}_l{n_layers}"
        with Graph(name, input_types=[*inputs, *of_group]) as graph:
            if of_group:
                manager.fetch_buffers(graph.inputs[len(inputs) :])
            values = (value.tensor for value in graph.inputs[: len(inputs)])
            x, gate_up, down, *choices = values
            n = len(choices) // self.config.n_layers
            for i in range(n_layers):
                given = x, gate_up, down, *choices[i * n : (i + 1) * n]
                x = _layer(form, manager, *given)
            graph.output(x)
        return graph

    def _types(self, form: str) -> list[TensorType]:
        shape, dtype, rows = self.config.shape, DType.bfloat16, ["n_rows"]
        choices: list[tuple[DType, list]] = [
            (DType.uint32, [shape.n_experts + 1]),
            (DType.int32, [shape.n_experts]),
            (DType.int32, rows),
        ][: 3 if form == "gathered_products" else 2]
        if form in _ROUTED:
            dtypes = DType.int32, DType.float32
            choices = [(of_choice, [*rows, shape.top_k]) for of_choice in dtypes]
        given = [(dtype, [*rows, shape.hidden_size])]
        given += [(dtype, list(sizes)) for sizes in self._weight_sizes]
        given += choices * self.config.n_layers
        return [of_rank for t in given for of_rank in types(self.config, *t)]

    def set_up(self, session: InferenceSession) -> Any:
        """Makes the memory of the form that dispatches."""
        return self._group.set_up(session)

    def compile_set_up(self, session: InferenceSession) -> None:
        self._group.compile_set_up(session)

    # ----------------------------------------------------------------------- inputs

    @property
    def _weight_sizes(self) -> tuple[tuple[int, int, int], ...]:
        shape = self.config.shape
        n, hidden, moe_dim = shape.n_experts, shape.hidden_size, shape.moe_dim
        return (n, 2 * moe_dim, hidden), (n, hidden, moe_dim)

    @functools.cached_property
    def weights(self) -> list[Any]:
        """Gate and up, and down of each expert; rows keep about their magnitude."""
        device = self.torch_device(0)
        draw = torch.Generator(device).manual_seed(0)
        made = [
            torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(
                0, factor * sizes[-1] ** -0.5, generator=draw
            )
            # silu(gate) * up of two normal numbers has a deviation of 0.6.
            for sizes, factor in zip(self._weight_sizes, (1, 1 / 0.6))
        ]
        if self.config.target == "gpu":
            torch.cuda.synchronize()
        return made

    def make_data(self, case: Case, seed: int) -> Data:
        """Draws rows, and the choices of each layer."""
        shape, n, is_routed = self.config.shape, case.n_tokens, case.form in _ROUTED
        choices: list[list[np.ndarray]] = []
        for i in range(self.config.n_layers):
            drawn = seed * self.config.n_layers + i
            ids = cases.expert_ids(shape, case.routing, 1, n, drawn)
            if is_routed:
                (weights,) = cases.router_weights(shape, 1, n, drawn)
                # So that sums have the magnitude of rows.
                weights /= np.linalg.norm(weights, axis=1, keepdims=True)
                choices.append([ids[0], weights])
                continue
            (sent,) = cases.routes(shape, ids)
            tables = [
                sent.row_offsets,
                sent.expert_ids,
                sent.rows[:, 0].astype(np.int32),
            ]
            choices.append(tables[: 3 if case.form == "gathered_products" else 2])
        n_rows = n if is_routed else n * shape.top_k
        return Data(cases.tokens(shape, 1, n_rows, seed)[0], choices)

    def make_inputs(self, form: str, data: Data) -> list[list[Any]]:
        """Rows, weights, each layer's choices."""
        return [[v] for v in (from_bits(data.x), *self.weights, *sum(data.choices, []))]

    def group_inputs(self, form: str) -> list[Buffer]:
        """Returns none for forms that do not dispatch."""
        return super().group_inputs(form) if form == "dispatched" else []

    # ----------------------------------------------------------------------- checks

    def check_layer(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares some rows of the first layer with plain products in float64."""
        got = self.tensor(outputs[0], 0)
        at = np.unique(np.linspace(0, len(got) - 1, _CHECKED_ROWS).astype(int))
        gate_up, down = self.weights
        want = torch.zeros_like(got[: len(at)], dtype=torch.double)
        for row, which in zip(want, at):
            for source, expert, weight in _parts(case.form, data.choices[0], which):
                x = from_bits(data.x[source], got.device).double()
                gate, up = (gate_up[expert].double() @ x).chunk(2)
                activated = torch.nn.functional.silu(gate) * up
                row += weight * (down[expert].double() @ activated)
        check_near(case.name, got[torch.from_numpy(at)], want)

    def start(self, case: Case) -> tuple[list[Buffer], Callable[[list[Buffer]], None]]:
        """Returns inputs, and what compares a chain with its layers run one by one.

        The sums of a chain that gathers have the bits of one that dispatches.
        """
        data = self.make_data(case, 0)
        inputs = self._inputs(case.form, data)
        layer = self._model(case.form, is_check=True)
        n = len(data.choices[0])
        end = 3 + n * self.config.n_layers
        rows, choices = inputs[0], inputs[3:end]
        for _ in data.choices:
            (rows,) = layer.execute(rows, *inputs[1:3], *choices, *inputs[end:])
            choices = choices[n:] + choices[:n]
        self._finish()
        want = self.tensor(rows, 0)
        if case.form in _ROUTED:
            other = self._results.setdefault(case.n_tokens, want)
            check_same(f"{case.name}: sums of both forms", want, other)

        def check(outputs: list[Buffer]) -> None:
            self._finish()
            got = self.tensor(outputs[0], 0)
            check_same(f"{case.name}: the chain and its layers", got, want)

        return inputs, check


def _layer(
    form: str,
    manager: EPBatchManager,
    x: TensorValue,
    gate_up: TensorValue,
    down: TensorValue,
    *choices: TensorValue,
) -> TensorValue:
    if form == "gathered":
        return routed_swiglu(x, *choices, gate_up, down)
    if form == "products":
        return grouped_swiglu(x, gate_up, down, *choices)
    if form == "gathered_products":
        activated = grouped_gate_up(x, gate_up, *choices)
        return grouped_matmul(activated, down, *choices[:2])

    def experts(rank: int, dispatched: tuple[TensorValue, ...]) -> TensorValue:
        rows, *groups = dispatched
        return grouped_swiglu(rows, gate_up, down, *groups[:2])

    ids, weights = choices
    return through_experts(manager, [x], [ids], [weights], experts)[0]


def _parts(
    form: str, choices: list[np.ndarray], row: int
) -> list[tuple[int, int, float]]:
    """Returns what a row of a layer adds up: input row, expert and weight of each."""
    if form in _ROUTED:
        ids, weights = choices
        return [(row, int(e), float(w)) for e, w in zip(ids[row], weights[row])]
    offsets, experts, *token_of_row = choices
    expert = experts[np.searchsorted(offsets, row, "right") - 1]
    source = token_of_row[0][row] if token_of_row else row
    return [(int(source), int(expert), 1.0)]
