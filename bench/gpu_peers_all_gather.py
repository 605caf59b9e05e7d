# SPDX-License-Identifier: Apache-2.0
"""Runs and checks the chains of ``bench.gpu_graphs_all_gather`` on GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer

from . import gpu_shapes
from .gpu_graphs_all_gather import dispatcher_of
from .gpu_peers_max import Data, Runner, torch_device
from .gpu_shapes import Case, Config


class AllGatherRunner(Runner):
    """One ``ours_all_gather``: every layer multiplies by the number of ranks."""

    def _join(self) -> Any:
        joined = dispatcher_of(self.config).initializer()
        joined.ep_init(self.compiling_session())
        return joined

    def _inputs(self, form: str, data: Data) -> list[Buffer]:
        small = replace(data, x=[self._scaled(x) for x in data.x])
        small.weights = data.weights[:1]
        return super()._inputs(form, small)

    def _scaled(self, bits: np.ndarray) -> np.ndarray:
        """Makes tokens so small that a chain does not overflow."""
        factor = float(self.config.n_ranks) ** -(
            self.config.n_layers("all_gather") // 2
        )
        return gpu_shapes.scaled_bits(bits, factor)

    def _check_layer(
        self, case: Case, form: str, data: Data, outputs: list[Buffer]
    ) -> None:
        self._check_gathered(case, data, outputs, n_layers=1)
        n = self.config.n_ranks
        self._check_sums(case, data, outputs[n : 2 * n], n_layers=1)

    def _check_chain(
        self, case: Case, form: str, data: Data, outputs: list[Buffer]
    ) -> None:
        self._check_gathered(case, data, outputs, self.config.n_layers(form))
        n = self.config.n_ranks
        self._check_sums(case, data, outputs[:n], self.config.n_layers(form))

    def _check_sums(
        self, case: Case, data: Data, sums: list[Buffer], n_layers: int
    ) -> None:
        from .gpu_checks import check_chain, from_bits

        for rank, got in enumerate(sums):
            x = from_bits(self._scaled(data.x[rank]), torch_device(rank)).double()
            where = f"{case.name} rank {rank}, {n_layers} layers"
            want = x * float(self.config.n_ranks) ** n_layers
            check_chain(where, self._tensor(got, rank), want)

    def _check_gathered(
        self, case: Case, data: Data, outputs: list[Buffer], n_layers: int
    ) -> None:
        """Compares the first layer's tokens, and maps and probabilities."""
        from .gpu_checks import check_same, stack_tokens

        n = self.config.n_ranks
        n_there = n * case.n_tokens
        scaled = [self._scaled(x) for x in data.x]
        ids, probs = np.concatenate(data.ids), np.concatenate(data.weights[0])
        for rank in range(n):
            where = f"{case.name} rank {rank}"
            got = self._tensor(outputs[2 * n + rank], rank)[:n_there]
            check_same(f"{where}: tokens", got, stack_tokens(scaled, got.device))
            for layer in range(n_layers):
                at = 3 * n + 2 * n * layer + rank
                for what, i, want, rest in (
                    ("routing map", at, ids, -1),
                    ("probabilities", at + n, probs, 0),
                ):
                    got = self._tensor(outputs[i], rank)
                    says = f"{where}, layer {layer}: {what}"
                    check_same(says, got[:n_there], want)
                    behind = got[n_there:]
                    check_same(says, behind, behind.new_full(behind.shape, rest))


def runner_of(config: Config, mef_dir: Path | None) -> Runner:
    """Makes the runner of a configuration's peer."""
    kind = AllGatherRunner if config.is_dispatcher else Runner
    return kind(config, mef_dir)
