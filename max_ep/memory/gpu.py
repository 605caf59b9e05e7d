# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of GPU ranks on one host: device memory with peer access."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from max.driver import Buffer, Device, enable_all_peer_access
from max.dtype import DType

from .symmetric_memory import no_memory


def out_of_reach(devices: Sequence[Device]) -> list[str]:
    """Returns the pairs of GPUs without peer access."""
    in_order = sorted({device.id: device for device in devices}.items())
    return [
        f"GPU {i} and GPU {j}"
        for (i, first), (j, second) in combinations(in_order, 2)
        if not (first.can_access(second) and second.can_access(first))
    ]


class GpuMemory:
    """Regions of the ranks of one process, each on its rank's GPU.

    With peer access every GPU reaches every region by its address. Contents are
    undefined.
    """

    def __init__(self, devices: list[Device], region_bytes: int) -> None:
        if len({device.id for device in devices}) > 1:
            try:
                enable_all_peer_access()
            except Exception as error:
                pairs = out_of_reach(devices)
                culprits = "; ".join(pairs) or (
                    "not the ranks' own, but another that this process sees, as MAX "
                    "connects all of them"
                )
                raise RuntimeError(
                    "max_ep: ranks on one host write into each other's memory, and "
                    f"some GPUs cannot: {culprits} ({error}). Hide those with "
                    "CUDA_VISIBLE_DEVICES, or put more ranks on one with ranks_per_gpu"
                ) from error
        self._buffers: list[Buffer] = []
        for rank, device in enumerate(devices):
            try:
                self._buffers.append(Buffer(DType.uint8, [region_bytes], device))
            except Exception as error:
                self.close()
                what = f"{region_bytes} bytes of rank {rank} on {device}"
                raise no_memory(what, error) from error

    def local_addresses(self) -> list[int]:
        return [buffer._data_ptr() for buffer in self._buffers]

    def close(self) -> None:
        self._buffers = []
