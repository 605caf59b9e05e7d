# SPDX-License-Identifier: Apache-2.0
"""What MAX's MoE layer does on one GPU around its matmuls, without expert parallelism.

Indices by expert, a gather of the tokens' rows, and the weighted sum of the experts'
rows, with MAX's own ops (``max.nn.moe``). It is what one rank's dispatch and combine
are measured against.
"""

from __future__ import annotations

import numpy as np
import torch
from max.driver import Buffer
from max.dtype import DType
from max.graph import Graph, TensorValue, ops
from max.nn.kernels import moe_create_indices, moe_finalize

from .cases import Case
from .checks import Delivered, check_dispatch, stack_tokens
from .peer_graphs import CHECKED_LAYERS, Data, GraphPeer, token_types


class Peer(GraphPeer):
    def graph(self, form: str, *, is_check: bool) -> Graph:
        """Builds a chain. It returns the last layer's sums; with ``is_check`` the first
        layer's rows, and the choice of each row."""
        config, shape = self.config, self.config.shape
        n_layers = CHECKED_LAYERS if is_check else config.n_layers
        inputs = token_types(config)
        with Graph(f"{config.name}_l{n_layers}", input_types=inputs) as graph:
            x, *choices = (value.tensor for value in graph.inputs)
            first: list[TensorValue] = []
            for i in range(n_layers):
                ids, weights = choices[2 * i : 2 * i + 2]
                order, _, restore, _, _ = moe_create_indices(
                    ops.reshape(ids, [-1]), shape.n_experts
                )
                tokens = ops.cast(order // shape.top_k, DType.int32)
                rows = ops.gather(x, tokens, axis=0)
                x = moe_finalize(rows, restore, weights, x.dtype)
                first = first or [rows, order]
            graph.output(*(first if is_check else [x]))
        return graph

    def check_layer(self, case: Case, data: Data, outputs: list[Buffer]) -> None:
        """Compares rows by expert with the oracle."""
        rows, order = (self.tensor(buffer, 0) for buffer in outputs)
        experts = data.ids[0][0].reshape(-1)[order.cpu().numpy()]
        starts = np.flatnonzero(np.diff(experts, prepend=-1))
        tables = np.append(starts, len(experts)), experts[starts]
        got = Delivered("bfloat16", rows, None, *map(torch.from_numpy, tables))
        x = stack_tokens(data.x, rows.device)
        check_dispatch(case.name, got, data.routes[0], x, exact=False)
