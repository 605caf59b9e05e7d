# SPDX-License-Identifier: Apache-2.0
"""``AllGatherTokenDispatcher``: each layer multiplies by the number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import Graph, TensorValue

from .. import AllGatherTokenDispatcher, reference
from ..memory.setup_graph import setup_graph
from ..plural import counted
from .cases import Case
from .checks import check_chain, check_same, from_bits, stack_tokens
from .peer_graphs import Data, GraphPeer, token_types


class Peer(GraphPeer):
    has_check_graph = False

    def _dispatcher(self) -> AllGatherTokenDispatcher:
        config = self.config
        sizes = config.shape.hidden_size, config.shape.top_k
        return AllGatherTokenDispatcher(
            *sizes, config.max_tokens, config.n_ranks, target="gpu", timeout_s=5.0
        )

    def graph(self, form: str, *, is_check: bool) -> Graph:
        """Builds a chain. It returns the last layer's sums, the first layer's, and the
        tokens, routing map and probabilities that this one gathered."""
        config, n = self.config, self.config.n_ranks
        dispatcher = self._dispatcher()
        inputs = token_types(config)
        name = f"{config.name}_l{config.n_layers}"
        with Graph(name, input_types=[*inputs, *dispatcher.input_types()]) as graph:
            values = [value.tensor for value in graph.inputs[: len(inputs)]]
            dispatcher.fetch_buffers(graph.inputs[len(inputs) :])
            x, *choices = (values[i : i + n] for i in range(0, len(values), n))
            first: list[TensorValue] = []
            for i in range(config.n_layers):
                ids, probs = choices[2 * i : 2 * i + 2]
                tokens, all_probs = dispatcher.token_dispatch(x, probs, ids)
                x = dispatcher.token_combine(tokens)
                gathered = *tokens, *dispatcher.routing_map, *all_probs
                first = first or [*x, *gathered]
            graph.output(*x, *first)
        return graph

    def set_up(self, session: InferenceSession) -> Any:
        joined = self._dispatcher().initializer()
        joined.ep_init(session)
        return joined

    def compile_set_up(self, session: InferenceSession) -> None:
        session.load(setup_graph(self._dispatcher().config))

    def make_inputs(self, form: str, data: Data) -> list[list[Any]]:
        """With tokens so small that the chain does not overflow."""
        inputs = super().make_inputs(form, data)
        inputs[0] = [from_bits(self._scaled(bits)) for bits in data.x]
        return inputs

    def _scaled(self, bits: np.ndarray) -> np.ndarray:
        factor = float(self.config.n_ranks) ** -(self.config.n_layers // 2)
        values = reference.bfloat16_to_float32(bits) * np.float32(factor)
        return reference.float32_to_bfloat16(values)

    def check_layer(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares the first layer."""
        n = self.config.n_ranks
        self._check_sums(case, data, outputs[n : 2 * n], n_layers=1)
        tokens = stack_tokens([self._scaled(x) for x in data.x], "cpu")
        ids, probs = np.concatenate(data.ids[0]), np.concatenate(data.weights[0])
        for i, (what, want, rest) in enumerate(
            (("tokens", tokens, None), ("routing map", ids, -1), ("probs", probs, 0))
        ):
            for rank in range(n):
                got = self.tensor(outputs[(2 + i) * n + rank], rank)
                where, n_there = f"{case.name} rank {rank}: {what}", n * case.n_tokens
                check_same(where, got[:n_there], want)
                if rest is not None:
                    unused = got[n_there:]
                    check_same(where, unused, unused.new_full(unused.shape, rest))

    def check_chain(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares the first layer, and the last one's sums."""
        self.check_layer(case, data, outputs)
        sums = outputs[: self.config.n_ranks]
        self._check_sums(case, data, sums, self.config.n_layers)

    def _check_sums(
        self, case: Case, data: Data, sums: list[Buffer], n_layers: int
    ) -> None:
        for rank, got in enumerate(sums):
            device = self.torch_device(rank)
            x = from_bits(self._scaled(data.x[rank]), device).double()
            where = f"{case.name} rank {rank}, {counted(n_layers, 'layer')}"
            want = x * float(self.config.n_ranks) ** n_layers
            check_chain(where, self.tensor(got, rank), want)
