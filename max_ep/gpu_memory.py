# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of GPU ranks on one host: device memory with peer access."""

from __future__ import annotations

from max.driver import Buffer, Device, enable_all_peer_access
from max.dtype import DType


class GpuMemory:
    """Regions of the ranks of one process, each on its rank's GPU.

    With peer access every GPU reaches every region by its address.
    """

    def __init__(self, devices: list[Device], region_bytes: int) -> None:
        """Allocates the regions; their contents are undefined.

        Args:
            devices: The GPU of each local rank.
            region_bytes: Bytes of one region.

        Raises:
            MemoryError: If a GPU has no room.
        """
        if len({device.id for device in devices}) > 1:
            enable_all_peer_access()
        self._buffers: list[Buffer] = []
        for rank, device in enumerate(devices):
            try:
                self._buffers.append(Buffer(DType.uint8, [region_bytes], device))
            except Exception as error:
                self.close()
                raise MemoryError(
                    f"max_ep: cannot allocate {region_bytes} bytes for rank {rank} "
                    f"on {device}: {error}. Lower max_tokens_per_rank; `max-ep "
                    "plan` shows what each buffer takes"
                ) from error

    def local_addresses(self) -> list[int]:
        """Returns the address of each local rank's region."""
        return [buffer._data_ptr() for buffer in self._buffers]

    def connect(self, timeout_s: float) -> list[int]:
        """Returns the address of every rank's region; all are local.

        Args:
            timeout_s: Not needed here.
        """
        return self.local_addresses()

    def close(self) -> None:
        """Gives the memory back."""
        self._buffers = []
