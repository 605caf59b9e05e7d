# SPDX-License-Identifier: Apache-2.0
"""What MAX's MoE layer does on one GPU around its matmuls, without expert parallelism.

Indices by expert, a gather of the tokens' rows, and the weighted sum of the experts'
rows, with MAX's own ops (``max.nn.moe``). It is what one rank's dispatch and combine
are measured against.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import Graph, TensorValue, ops
from max.nn.kernels import moe_create_indices, moe_finalize

from .cases import LAYER_FACTORS, Case
from .peer_graphs import CHECKED_LAYERS, Data, GraphPeer, types


class Peer(GraphPeer):
    """One configuration."""

    def graph(self, form: str, *, is_check: bool) -> Graph:
        """Builds a chain.

        Inputs: tokens, ids, weights of each factor. Output: the last layer's sums; with
        ``is_check`` the first layer's sums, its rows, and the choice of each row.
        """
        config, shape = self.config, self.config.shape
        n_layers = CHECKED_LAYERS if is_check else config.n_layers
        inputs = types(config, DType.bfloat16, ["n_tokens", shape.hidden_size])
        inputs += types(config, DType.int32, ["n_tokens", shape.top_k])
        for _ in LAYER_FACTORS:
            inputs += types(config, DType.float32, ["n_tokens", shape.top_k])
        with Graph(f"{config.name}_l{n_layers}", input_types=inputs) as graph:
            x, ids, *weights = (value.tensor for value in graph.inputs)
            first: list[TensorValue] = []
            for i in range(n_layers):
                order, _, restore, _, _ = moe_create_indices(
                    ops.reshape(ids, [-1]), shape.n_experts
                )
                rows = ops.gather(
                    x, ops.cast(order // shape.top_k, DType.int32), axis=0
                )
                x = moe_finalize(
                    rows, restore, weights[i % len(LAYER_FACTORS)], x.dtype
                )
                first = first or [x, rows, order]
            graph.output(*(first if is_check else [x]))
        return graph

    def make_inputs(self, form: str, data: Data) -> list[list[Any]]:
        """Tokens, ids, weights of each factor."""
        from .checks import from_bits

        return [[from_bits(x) for x in data.x], data.ids, *data.weights]

    def check_layer(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares rows by expert, and sums, with the oracle."""
        from .checks import check_combine, check_permutation, stack_tokens

        sums, rows, order = (self.tensor(buffer, 0) for buffer in outputs)
        x = stack_tokens(data.x, rows.device)
        choices = order.cpu().numpy().astype(np.int64)
        check_permutation(case.name, rows, choices, data.ids[0], x)
        check_combine(
            case.name,
            self.config.shape,
            sums,
            data.x[0],
            data.ids[0],
            data.weights[0][0],
            1,
            is_fp8=False,
            exact=False,
        )
