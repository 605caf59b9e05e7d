# SPDX-License-Identifier: Apache-2.0
"""What MAX's MoE layer does on one GPU around its matmuls, without expert parallelism.

Indices by expert, a gather of the tokens' rows, and the weighted sum of the experts'
rows, with MAX's own ops (``max.nn.moe``). It is what one rank's dispatch and combine
are measured against.
"""

from typing import Any

from max.dtype import DType
from max.graph import Graph, ops
from max.nn.kernels import moe_create_indices, moe_finalize

from .cases import LAYER_FACTORS
from .peer_graphs import Data, GraphPeer, token_types


class Peer(GraphPeer):
    """One configuration."""

    def graph(self, form: str) -> Graph:
        """Builds a chain: of tokens, ids, weights of each factor the last sums."""
        config, shape = self.config, self.config.shape
        inputs = token_types(config, len(LAYER_FACTORS))
        with Graph(f"{config.name}_l{config.n_layers}", input_types=inputs) as graph:
            x, ids, *weights = (value.tensor for value in graph.inputs)
            for i in range(config.n_layers):
                order, _, restore, _, _ = moe_create_indices(
                    ops.reshape(ids, [-1]), shape.n_experts
                )
                tokens = ops.cast(order // shape.top_k, DType.int32)
                rows = ops.gather(x, tokens, axis=0)
                of_layer = weights[i % len(LAYER_FACTORS)]
                x = moe_finalize(rows, restore, of_layer, x.dtype)
            graph.output(x)
        return graph

    def make_inputs(self, form: str, data: Data) -> list[list[Any]]:
        """Tokens, ids, weights of each factor."""
        from .checks import from_bits

        return [[from_bits(x) for x in data.x], data.ids, *data.weights]
