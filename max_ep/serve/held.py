# SPDX-License-Identifier: Apache-2.0
"""Weights of experts as inputs of a graph, so that they can move while it is served.

The graph half of ``MAX_EP_BALANCE``: ``balancer.py`` has the buffers. On each rank a
kind of matrix is one tensor with a *place* for each expert of all layers, and at its
end as many places as a layer has: there the next weights of a layer gather. Inputs are
few and large, because each costs a step time on the host. Layers find their experts by
``expert_ids``, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from max.dtype import DType
from max.graph import BufferType, TensorType, TensorValue, Value, ops

from .. import EPConfig
from ..checkpoint.decoder import Decoder
from ..experts import GPU_COLUMNS, GPU_K_STEP, gpu_takes, grouped_swiglu
from ..limits import BALANCE_VARIABLE, FP8_BLOCK


class Kind(NamedTuple):
    """One tensor of a rank: a kind of matrix of all its experts."""

    dtype: DType
    sizes: tuple[int, int]
    """Rows and columns of an expert's matrices."""
    matrices: tuple[str, ...]
    """The weights of an expert that follow each other in a place."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of a place."""
        return self.sizes[0] * self.sizes[1] * self.dtype.size_in_bytes


EXPERTS = ".mlp.experts."
"""In the names of experts' weights, as our decoder has them."""

_GATE_UP, _DOWN = ("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)


class HeldExperts:
    """The experts of all layers, on all ranks of this process."""

    def __init__(self, config: EPConfig, model: Decoder, dtype: DType) -> None:
        """Describes the inputs; the group has a placement of experts."""
        self.config, self.n_layers = config, config.num_moe_layers
        self.n_places = (self.n_layers + 1) * config.n_local_experts
        sizes = model.expert_sizes
        if config.target == "gpu" and not all(gpu_takes(*size) for size in sizes):
            raise ValueError(
                f"experts of {model.hidden_size} x {model.moe.dim} cannot move: on "
                f"GPUs our matmuls take k in multiples of {GPU_K_STEP} and n in "
                f"multiples of {GPU_COLUMNS}; unset {BALANCE_VARIABLE}"
            )
        kinds = []
        for size, matrices in zip(sizes, (_GATE_UP, _DOWN)):
            of_values = config.dispatch_dtype if config.is_quantized else dtype
            kinds.append(Kind(of_values, size, matrices))
            if config.is_quantized:
                blocks = size[0] // FP8_BLOCK, size[1] // FP8_BLOCK
                scales = tuple(f"{name}_scale" for name in matrices)
                kinds.append(Kind(DType.float32, blocks, scales))
        self.kinds = tuple(kinds)

    @property
    def more_bytes(self) -> int:
        """Bytes of a rank beyond those of its share of the model's experts."""
        config = self.config
        n_usual = self.n_layers * (config.num_logical_experts // config.n_ranks)
        each = sum(kind.expert_bytes for kind in self.kinds)
        return (self.n_places - n_usual) * each

    @property
    def count_shape(self) -> list[int]:
        """The shape of a rank's counts: first rows of experts, summed up over steps."""
        return [self.n_layers, self.config.n_local_experts + 1]

    def input_types(self) -> list[TensorType | BufferType]:
        """Returns of each rank its tensors, then its counts."""
        types: list[TensorType | BufferType] = []
        for rank in range(self.config.n_gpus_per_node):
            device = self.config.device(rank)
            for kind in self.kinds:
                shape = [self.n_places, *kind.sizes]
                types.append(TensorType(kind.dtype, shape, device))
            types.append(BufferType(DType.uint32, self.count_shape, device))
        return types

    def fetch(self, values: Iterator[Value[Any]]) -> None:
        """Takes the graph's inputs."""
        self._tensors: list[list[TensorValue]] = []
        self._counts = []
        for _ in range(self.config.n_gpus_per_node):
            self._tensors.append([next(values).tensor for _ in self.kinds])
            self._counts.append(next(values).buffer)
        self._offsets: list[list[TensorValue]] = [[] for _ in self._counts]

    def run(
        self, layer: int, rank: int, dispatched: tuple[TensorValue, ...]
    ) -> TensorValue:
        """Runs a layer's experts on the rows that a rank received, and counts them."""
        n = self.config.n_local_experts
        n_rows = 2 if self.config.is_quantized else 1
        rows, (row_offsets, *_) = dispatched[:n_rows], dispatched[n_rows:]
        self._offsets[rank].append(row_offsets)
        places = np.arange(layer * n, (layer + 1) * n, dtype=np.int32)
        ids = ops.constant(places, DType.int32, row_offsets.device)
        gate_up, down = _operands(self._tensors[rank], n_rows)
        return grouped_swiglu(_operand(rows), gate_up, down, row_offsets, ids)

    def store_counts(self) -> None:
        """Adds what all layers received to the counts; differences of adjacent ones
        stay right when they overflow."""
        for counts, offsets in zip(self._counts, self._offsets):
            ops.buffer_store(counts, ops.buffer_load(counts) + ops.stack(offsets))


def _operand(values: Sequence[TensorValue]) -> Any:
    """Returns a matmul's operand: values, or values and scales."""
    return values[0] if len(values) == 1 else tuple(values)


def _operands(tensors: Sequence[TensorValue], n_of_each: int) -> tuple[Any, Any]:
    """Returns a rank's weights of the first and of the second matmul."""
    return _operand(tensors[:n_of_each]), _operand(tensors[n_of_each:])
