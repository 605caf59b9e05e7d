# SPDX-License-Identifier: Apache-2.0
"""Balanced experts while a model is served: counts, plans, and weights that move.

All is done between two steps, a little at a time. Counts are read now and then; another
process plans; a slice of weights moves before each step, to places of its rank that no
layer uses; when all of a layer's weights are there, they take their places, and the
layer's table changes. Captured graphs see it: what they read is changed in place.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer
from max.dtype import DType

from .. import EPCommInitializer
from ..balance import Placement, moves
from ..plural import counted
from .held import EXPERTS, HeldExperts

SLICE_BYTES = 16 << 20
"""Most bytes that move before a step: a small part of what a step reads."""

WORTH = 1.1
"""Rows of the busiest rank over the mean from which on a plan is made."""

_LEAST_ROWS = 32
"""Rows of an expert, on average, from which on counts say something."""

_logger = logging.getLogger("max.pipelines.max_ep")  # MAX shows only such names


def start_planner(given: Path, planned: Path) -> subprocess.Popen[str]:
    """Starts a process that plans, and imports what this one does: MAX sets variables
    that keep another Python from its packages."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-m", "max_ep.balance", str(given), str(planned)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.PIPE,
        text=True,
    )


class Balancer:
    """The buffers of :class:`HeldExperts`, and what changes them."""

    def __init__(
        self,
        comm: EPCommInitializer,
        held: HeldExperts,
        weights: Mapping[str, Any],
        seconds: float,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """Loads the weights of a placement; ``weights`` have the names of our decoder.

        ``comm`` has been initialized. ``seconds`` are those between two looks at the
        counts.
        """
        config = held.config
        self._held, self._seconds, self._slice_bytes = held, seconds, slice_bytes
        self.placement = Placement(config.eplb_phy2log_plan, config.n_ranks)
        local = range(config.n_gpus_per_node)
        devices = [config.device(i).to_device() for i in local]
        self._devices = list({device.id: device for device in devices}.values())
        self._tensors = [
            [Buffer(k.dtype, [held.n_places, *k.sizes], device) for k in held.kinds]
            for device in devices
        ]
        zeros = np.zeros(held.count_shape, np.uint32)
        self._counts = [Buffer.from_numpy(zeros.copy()).to(d) for d in devices]
        self._read = self._sums()
        self._tables = self._own_tables(comm, devices)
        self._work: Iterator[None] | None = None
        self._looked = time.monotonic()
        self._load(weights)

    def inputs(self) -> list[Buffer]:
        """Returns the values of ``HeldExperts.input_types``."""
        of_ranks = zip(self._tensors, self._counts)
        return [x for tensors, counts in of_ranks for x in (*tensors, counts)]

    def between_steps(self) -> None:
        """Does what is to be done before a step."""
        if self._work is None:
            now = time.monotonic()
            if now - self._looked < self._seconds:
                return
            self._looked = now
            self._work = self._balance()
        if next(self._work, self) is self:
            self._work, self._looked = None, time.monotonic()

    # ------------------------------------------------------------------ what it does

    def _balance(self) -> Iterator[None]:
        """Looks at the counts, plans and moves; each ``yield`` lets a step pass."""
        sums = self._sums()
        rows = np.diff(sums - self._read).astype(np.int64)  # modulo 2**32
        n_ranks, n_layers, n_local = rows.shape
        if rows.sum() < _LEAST_ROWS * rows.size:
            return
        self._read = sums
        counts = rows.swapaxes(0, 1).reshape(n_layers, n_ranks * n_local)
        of_ranks = rows.sum(2).T
        busiest = float(np.mean(of_ranks.max(1) / np.maximum(of_ranks.mean(1), 1)))
        _logger.info(
            f"max_ep: the busiest rank had {busiest:.2f} times the mean of rows"
        )
        if busiest < WORTH:
            return
        yield
        with tempfile.TemporaryDirectory(prefix="max_ep_balance_") as folder:
            found = yield from self._plan(Path(folder), counts)
        if found is None:
            return
        logical = self.placement.logical_counts(counts)
        now, then = (p.imbalance(logical).mean() for p in (self.placement, found))
        yield
        if then > now - 0.02:
            return
        n_moved, begin = 0, time.monotonic()
        for layer in range(n_layers):
            n_moved += yield from self._move(layer, found)
        _logger.info(
            f"max_ep: moved {n_moved} of {counted(counts.size, 'expert')} in "
            f"{time.monotonic() - begin:.1f} s: {now:.2f} times the mean becomes "
            f"{then:.2f}"
        )

    def _plan(self, folder: Path, counts: np.ndarray) -> Any:
        """Lets another process plan; a step does not share a core with it."""
        given, planned = folder / "counts.npz", folder / "planned.npz"
        config = self._held.config
        np.savez(
            given,
            counts=counts,
            phy2log=self.placement.phy2log,
            n_ranks=config.n_ranks,
            top_k=config.top_k,
            max_replicas=config.max_replicas,
        )
        with start_planner(given, planned) as process:
            while process.poll() is None:
                yield
            if process.returncode:
                said = (process.stderr.read().splitlines() or ["nothing"])[-1]
                _logger.warning(f"max_ep: no plan for experts was made: {said}")
                return None
        return Placement.load(planned)

    def _move(self, layer: int, found: Placement) -> Any:
        """Moves a layer's experts; returns how many."""
        n_ranks, n_local = found.n_ranks, found.n_local
        pair = [Placement(p.phy2log[[layer]], n_ranks) for p in (self.placement, found)]
        held = self._held
        ends = np.cumsum([0, *(kind.expert_bytes for kind in held.kinds)])
        arrived = set()
        for piece in moves(*pair, int(ends[-1]), self._slice_bytes):
            source = piece.src_rank, layer * n_local + piece.src_local
            place = piece.dst_rank, held.n_layers * n_local + piece.dst_local
            for i, (first, end) in enumerate(zip(ends, ends[1:])):
                begin = max(piece.begin, first) - first
                end = min(piece.end, end) - first
                if begin < end:
                    to = self._bytes(i, *place, begin, end)
                    to.inplace_copy_from(self._bytes(i, *source, begin, end))
            arrived.add((piece.dst_rank, piece.dst_local))
            yield
        if not arrived:
            return 0
        # A place may still be read: by the last step, or by a slice on its way.
        self._wait()
        for rank, local in arrived:
            for i, kind in enumerate(held.kinds):
                whole = 0, kind.expert_bytes
                to = self._bytes(i, rank, layer * n_local + local, *whole)
                place = held.n_layers * n_local + local
                to.inplace_copy_from(self._bytes(i, rank, place, *whole))
        phy2log = self.placement.phy2log.copy()
        phy2log[layer] = found.phy2log[layer]
        self.placement = Placement(phy2log, n_ranks)
        log2phy = pair[1].log2phy(held.config.max_replicas)
        for table, row in zip(self._host_tables, (log2phy, pair[1].logcnt)):
            table[layer] = row[0]
        for tables, values in zip(self._tables, self._host_tables):
            for table in tables:
                table.inplace_copy_from(Buffer.from_numpy(values))
        self._wait()  # the tables' values may change again
        yield
        return len(arrived)

    # ----------------------------------------------------------------------- buffers

    def _own_tables(
        self, comm: EPCommInitializer, devices: list[Any]
    ) -> list[list[Buffer]]:
        """Gives the group tables that are changed in place, and returns them."""
        most = self._held.config.max_replicas
        self._host_tables = self.placement.log2phy(most), self.placement.logcnt
        tables = [
            [Buffer.from_numpy(values.copy()).to(device) for device in devices]
            for values in self._host_tables
        ]
        comm.set_eplb_placement(*tables)
        return tables

    def _sums(self) -> np.ndarray:
        """Reads the counts, uint32 ``[n_ranks, n_layers, n_local_experts + 1]``."""
        return np.stack([x.to_numpy().copy() for x in self._counts])

    def _bytes(self, kind: int, rank: int, place: int, begin: int, end: int) -> Buffer:
        """Views bytes of an expert's weights."""
        tensor, each = self._tensors[rank][kind], self._held.kinds[kind].expert_bytes
        flat = tensor.view(DType.uint8, [self._held.n_places * each])
        return flat[int(place * each + begin) : int(place * each + end)]

    def _wait(self) -> None:
        for device in self._devices:
            device.synchronize()

    def _load(self, weights: Mapping[str, Any]) -> None:
        """Copies each expert's weights to its places."""
        held, n_local = self._held, self.placement.n_local
        layers = layers_of(weights)
        for layer, (prefix, row) in enumerate(zip(layers, self.placement.phy2log)):
            for physical, expert in enumerate(row.tolist()):
                rank, local = divmod(physical, n_local)
                for i, kind in enumerate(held.kinds):
                    each = kind.expert_bytes // len(kind.matrices)
                    for j, name in enumerate(kind.matrices):
                        weight = weights[f"{prefix}{expert}.{name}"]
                        where = j * each, (j + 1) * each
                        to = self._bytes(i, rank, layer * n_local + local, *where)
                        to.inplace_copy_from(
                            weight.to_buffer().view(DType.uint8, [each])
                        )
        self._wait()


def layers_of(weights: Mapping[str, Any]) -> list[str]:
    """Returns what the names of experts begin with, layer by layer."""
    begins = {name.partition(EXPERTS)[0] for name in weights if EXPERTS in name}
    numbered = sorted((int(begin.split(".")[1]), begin) for begin in begins)
    return [begin + EXPERTS for _, begin in numbered]
