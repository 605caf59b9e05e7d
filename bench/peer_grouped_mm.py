# SPDX-License-Identifier: Apache-2.0
"""``torch._grouped_mm`` with SwiGLU between: the peer ``grouped_mm``.

Inputs, chains and checks are those of max_ep's ``products``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from max.driver import Buffer

from . import peer_experts


class _Chain:
    """Stands for a model of MAX: layers of torch, which can be captured."""

    def __init__(self, n_layers: int) -> None:
        self._n_layers = n_layers

    def _run(self, *tensors: torch.Tensor) -> torch.Tensor:
        x, gate_up, down, *groups = tensors
        for offsets in groups[::2][: self._n_layers]:
            ends = offsets.view(torch.int32)[1:]
            both = torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends)
            gate, up = both.chunk(2, dim=1)
            activated = torch.nn.functional.silu(gate) * up
            x = torch._grouped_mm(activated, down.transpose(1, 2), offs=ends)
        return x

    def execute(self, *inputs: Buffer) -> list[Buffer]:
        return [Buffer.from_dlpack(self._run(*map(torch.from_dlpack, inputs)))]

    def capture(self, key: int, *inputs: Buffer) -> list[Buffer]:
        tensors = [torch.from_dlpack(buffer) for buffer in inputs]
        self._graph = torch.cuda.CUDAGraph()
        how = dict(capture_error_mode="thread_local")  # MAX has threads of its own
        with torch.cuda.graph(self._graph, **how):
            captured = self._run(*tensors)
        return [Buffer.from_dlpack(captured)]

    def replay(self, key: int, *inputs: Buffer) -> None:
        self._graph.replay()

    def release_captured_graph(self, key: int) -> None:
        del self._graph


class Peer(peer_experts.Peer):
    def open(self, mefs: Path | None) -> None:
        """Allocates nothing: there are no graphs of MAX's."""
        self._comm = None

    def _model(self, form: str, *, is_check: bool = False) -> Any:
        key = form, is_check
        if key not in self._models:
            self._models[key] = _Chain(1 if is_check else self.config.n_layers)
        return self._models[key]

    def _streams(self) -> list[torch.cuda.Stream]:
        return [torch.cuda.current_stream()]

    def _synchronize(self) -> None:
        super()._synchronize()
        if self.config.target == "gpu":
            torch.cuda.synchronize()
