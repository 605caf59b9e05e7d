# SPDX-License-Identifier: Apache-2.0
"""``AllGatherTokenDispatcher``: each layer multiplies by the number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import Graph, TensorValue

from max_ep import AllGatherTokenDispatcher
from max_ep.memory.setup_graph import setup_graph

from . import cases as _cases
from .cases import Case
from .peer_graphs import Data, GraphPeer, token_types, torch_device


class Peer(GraphPeer):
    """One configuration of the dispatcher."""

    has_check_graph = False

    def _dispatcher(self) -> AllGatherTokenDispatcher:
        config = self.config
        sizes = config.shape.hidden_size, config.shape.top_k
        return AllGatherTokenDispatcher(
            *sizes, config.max_tokens, config.n_ranks, target="gpu", timeout_s=5.0
        )

    def graph(self, form: str, *, is_check: bool) -> Graph:
        """Builds a chain.

        Inputs, each a list with one tensor a rank: tokens, ids, probabilities; the EP
        inputs. Outputs, each a tensor a rank: the last layer's sums, the first
        layer's, and the tokens it gathered; then of each layer the routing map and the
        probabilities.
        """
        config, n = self.config, self.config.n_ranks
        dispatcher = self._dispatcher()
        inputs = token_types(config, 1)
        name = f"{config.name}_l{config.n_layers}"
        with Graph(name, input_types=[*inputs, *dispatcher.input_types()]) as graph:
            values = [value.tensor for value in graph.inputs[: len(inputs)]]
            dispatcher.fetch_buffers(graph.inputs[len(inputs) :])
            x, ids, probs = (values[i : i + n] for i in range(0, len(values), n))
            first: list[TensorValue] = []
            kept: list[TensorValue] = []
            for _ in range(config.n_layers):
                tokens, all_probs = dispatcher.token_dispatch(x, probs, ids)
                x = dispatcher.token_combine(tokens)
                first = first or [*x, *tokens]
                kept += [*dispatcher.routing_map, *all_probs]
            graph.output(*x, *first, *kept)
        return graph

    def set_up(self, session: InferenceSession) -> Any:
        """Allocates the group's memory."""
        joined = self._dispatcher().initializer()
        joined.ep_init(session)
        return joined

    def compile_set_up(self, session: InferenceSession) -> None:
        session.load(setup_graph(self._dispatcher().config))

    def make_inputs(self, form: str, data: Data) -> list[list[Any]]:
        """Tokens so small that the chain does not overflow, ids, probabilities."""
        from .checks import from_bits

        x = [from_bits(self._scaled(bits)) for bits in data.x]
        return [x, data.ids, data.weights[0]]

    def _scaled(self, bits: np.ndarray) -> np.ndarray:
        factor = float(self.config.n_ranks) ** -(self.config.n_layers // 2)
        return _cases.scaled_bits(bits, factor)

    def check_layer(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares the first layer."""
        n = self.config.n_ranks
        self._check_gathered(case, data, outputs, n_layers=1)
        self._check_sums(case, data, outputs[n : 2 * n], n_layers=1)

    def check_chain(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares all layers."""
        layers = self.config.n_layers
        self._check_gathered(case, data, outputs, layers)
        self._check_sums(case, data, outputs[: self.config.n_ranks], layers)

    def _check_sums(
        self, case: Case, data: Data, sums: list[Buffer], n_layers: int
    ) -> None:
        from .checks import check_chain, from_bits

        for rank, got in enumerate(sums):
            x = from_bits(self._scaled(data.x[rank]), torch_device(rank)).double()
            where = f"{case.name} rank {rank}, {n_layers} layers"
            want = x * float(self.config.n_ranks) ** n_layers
            check_chain(where, self.tensor(got, rank), want)

    def _check_gathered(
        self, case: Case, data: Data, outputs: list[Buffer], n_layers: int
    ) -> None:
        """Compares the first layer's tokens, and maps and probabilities."""
        from .checks import check_same, stack_tokens

        n = self.config.n_ranks
        n_there = n * case.n_tokens
        scaled = [self._scaled(x) for x in data.x]
        ids, probs = np.concatenate(data.ids), np.concatenate(data.weights[0])
        for rank in range(n):
            where = f"{case.name} rank {rank}"
            got = self.tensor(outputs[2 * n + rank], rank)[:n_there]
            check_same(f"{where}: tokens", got, stack_tokens(scaled, got.device))
            for layer in range(n_layers):
                at = 3 * n + 2 * n * layer + rank
                for what, i, want, rest in (
                    ("routing map", at, ids, -1),
                    ("probabilities", at + n, probs, 0),
                ):
                    got = self.tensor(outputs[i], rank)
                    says = f"{where}, layer {layer}: {what}"
                    check_same(says, got[:n_there], want)
                    unused = got[n_there:]
                    check_same(says, unused, unused.new_full(unused.shape, rest))
