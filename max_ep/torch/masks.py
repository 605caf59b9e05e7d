# SPDX-License-Identifier: Apache-2.0
"""``enable_shrink``: which ranks this one no longer waits for, and DeepEP's calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from .checks import check_tensor, refuse

if TYPE_CHECKING:
    from .channel import Region
    from .communicator import Communicator


class Masks:
    """The masks of all regions; kernels mask, in theirs, a rank that is late."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.absent: set[int] = set()  # ranks that did not come when a channel opened
        self._latest: torch.Tensor | None = None  # of the region used last
        self._scratch: list[torch.Tensor] = []

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

    def scratch(self, n_bytes: int) -> int:
        """Returns the address of memory for what is written to absent ranks."""
        device = self._comm.device
        self._scratch.append(torch.empty(n_bytes, dtype=torch.uint8, device=device))
        return self._scratch[-1].data_ptr()


class MaskCalls:
    """The part of :class:`max_ep.torch.Buffer` with ``enable_shrink``."""

    _comm: Communicator

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Says which ranks are masked: 1 for each, into int32 ``[n_ranks]``."""
        masks, shape = self._masks(), (self._comm.n_ranks,)
        check_tensor(self._comm, "mask_status", mask_status, torch.int32, shape)
        mask_status.copy_(masks.read())

    def low_latency_update_mask_buffer(
        self, rank_to_mask: int, mask: bool = False
    ) -> None:
        """Masks a rank, or waits for it again from the next call on.

        A rank that has missed calls is masked again: only :meth:`Buffer.reset`, in all
        processes, takes it in.
        """
        masks, comm = self._masks(), self._comm
        if not 0 <= rank_to_mask < comm.n_ranks or rank_to_mask == comm.rank:
            refuse("rank_to_mask", f"={rank_to_mask} is not another rank of the group")
        masks.set([rank_to_mask], int(mask))

    def low_latency_clean_mask_buffer(self) -> None:
        """Waits for all ranks again from the next call on."""
        self._masks().set(range(self._comm.n_ranks), 0)

    def _masks(self) -> Masks:
        if self._comm.masks is None:
            refuse("enable_shrink", "is not set: this Buffer masks no ranks")
        return self._comm.masks
