# SPDX-License-Identifier: Apache-2.0
"""``enable_shrink``: which ranks this one no longer waits for."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .channel import Region
    from .communicator import Communicator


class Masks:
    """The masks of all regions; kernels mask, in theirs, a rank that is late."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.absent: set[int] = set()  # ranks that did not come when a channel opened
        self._latest: torch.Tensor | None = None  # of the region used last

    def _of_regions(self) -> list[torch.Tensor]:
        return [
            region.masked
            for settings, channel in self._comm.channels.items()
            if settings.masks
            for region in channel.regions
        ]

    def share(self, region: Region) -> None:
        """Takes over, before a dispatch, whom the region used last has masked."""
        last, self._latest = self._latest, region.masked
        if last is not None and last is not region.masked:
            torch.maximum(region.masked, last, out=region.masked)

    def read(self) -> torch.Tensor:
        """Returns which ranks are masked, as a new ``int32 [n_ranks]``."""
        comm = self._comm
        found = torch.zeros(comm.n_ranks, dtype=torch.int32, device=comm.device)
        comm.streams.current()  # what is read comes after the launches
        for mask in self._of_regions():
            torch.maximum(found, mask, out=found)
        for rank in self.absent:
            found[rank] = 1
        return found

    def set(self, ranks: Collection[int], value: int) -> None:
        """Masks ranks, or waits for them again."""
        self._comm.streams.current()
        for mask in self._of_regions():
            for rank in ranks:
                mask[rank] = value
        self.absent -= set() if value else set(ranks)

    def give_up(self) -> None:
        """Makes masked ranks absent: channels open without them."""
        masked = self.read().nonzero().flatten().tolist()
        self.absent.update(rank for rank in masked if rank != self._comm.rank)
