# SPDX-License-Identifier: Apache-2.0
"""``AllGatherTokenDispatcher``: each layer multiplies by the number of ranks."""

from typing import Any

import numpy as np
from max.driver import Buffer
from max.engine import InferenceSession
from max.graph import Graph

from max_ep import AllGatherTokenDispatcher
from max_ep.memory.setup_graph import setup_graph

from . import cases as _cases
from .cases import Case
from .peer_graphs import Data, GraphPeer, token_types


class Peer(GraphPeer):
    """One configuration of the dispatcher."""

    def _dispatcher(self) -> AllGatherTokenDispatcher:
        config = self.config
        sizes = config.shape.hidden_size, config.shape.top_k
        return AllGatherTokenDispatcher(
            *sizes, config.max_tokens, config.n_ranks, target="gpu", timeout_s=5.0
        )

    def graph(self, form: str) -> Graph:
        """Builds a chain.

        Inputs, each a list with one tensor a rank: tokens, ids, probabilities; the EP
        inputs. Outputs: the last layer's sums.
        """
        config, n = self.config, self.config.n_ranks
        dispatcher = self._dispatcher()
        inputs = token_types(config, 1)
        name = f"{config.name}_l{config.n_layers}"
        with Graph(name, input_types=[*inputs, *dispatcher.input_types()]) as graph:
            values = [value.tensor for value in graph.inputs[: len(inputs)]]
            dispatcher.fetch_buffers(graph.inputs[len(inputs) :])
            x, ids, probs = (values[i : i + n] for i in range(0, len(values), n))
            for _ in range(config.n_layers):
                tokens, _ = dispatcher.token_dispatch(x, probs, ids)
                x = dispatcher.token_combine(tokens)
            graph.output(*x)
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

    def check_chain(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares the last sums."""
        from .checks import check_chain, from_bits

        layers = self.config.n_layers
        for rank, got in enumerate(outputs):
            device = self.torch_device(rank)
            x = from_bits(self._scaled(data.x[rank]), device).double()
            want = x * float(self.config.n_ranks) ** layers
            where = f"{case.name} rank {rank}, {layers} layers"
            check_chain(where, self.tensor(got, rank), want)
